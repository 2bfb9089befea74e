"""Jacobians and Hessians a chunk of rows or columns at a time.

`jax.jacfwd` and `jax.jacrev` push the whole standard basis through the derivative at once, and so keep as many copies
of every intermediate value as there are inputs or outputs. Here the function is linearised once, and only
`batch_size` basis vectors are in flight; each is made from its index, so that no identity matrix exists either.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.tiling._check import check_batch_size, check_bool, check_callable
from xtrax.tiling._map.chunked import chunked_vmap
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._planner.memory import MemoryBudget
from xtrax.tiling._split import ARRAY_LIKE, type_text
from xtrax.tiling.tune import tune_batch_size


def tiled_jacfwd(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    batch_size: int | str | None = None,
    budget: int | MemoryBudget | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """`jax.jacfwd`, a chunk of columns at a time: for functions with fewer inputs than outputs.

    `fn` is evaluated and linearised once (`jax.linearize`), whatever the number of chunks. The result can be traced,
    mapped and differentiated like that of `jax.jacfwd`; use it inside `jax.jit`, which fuses the loop.

    There is no `holomorphic=`, which `jax.jacfwd` has: of a complex function, differentiate the real and the imaginary
    part with respect to those of its argument.

    Args:
        fn: a function whose arguments at `argnums` are pytrees of real floating arrays, and whose output is a pytree of
            arrays.
        argnums: the positional argument, or the sequence of them, to differentiate with respect to.
        batch_size: the most columns (entries of the inputs) that are pushed forward at once; None is all of
            them; "auto" the fastest of a few sizes, measured by `tune_batch_size` at each call outside of a trace.
        budget: with "auto", the most bytes the map may take, or a `MemoryBudget`.
        has_aux: whether `fn` returns a pair, of which the second is passed on and not differentiated.

    Returns:
        A function of the arguments of `fn`, with the result of `jax.jacfwd(fn, argnums, has_aux=has_aux)`: each leaf of
        the output, of shape `out`, becomes a pytree like the input, with leaves `(*out, *in)` of the output's dtype.

    Raises:
        TypeError: an argument of the wrong kind; when called, an input that is no real floating array, or
            no pair where `has_aux`.
        ValueError: `batch_size` below 1, `budget` without "auto", no `argnums`; when called, duplicate `argnums` or
            some that `fn` is not given, "auto" inside a trace.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.tiling import tiled_jacfwd
        >>> print(tiled_jacfwd(lambda x: x**2, batch_size=2)(jnp.arange(3.0)))
        [[0. 0. 0.]
         [0. 2. 0.]
         [0. 0. 4.]]
    """
    return _Derivative("tiled_jacfwd", fn, argnums, batch_size, budget, has_aux).function(_forward)


def tiled_jacrev(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    batch_size: int | str | None = None,
    budget: int | MemoryBudget | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """`jax.jacrev`, a chunk of rows at a time: for functions with fewer outputs than inputs.

    `fn` is evaluated once (`jax.vjp`), whatever the number of chunks. The result can be traced, mapped and
    differentiated like that of `jax.jacrev`; use it inside `jax.jit`, which fuses the loop.

    There is no `holomorphic=`, which `jax.jacrev` has: of a complex function, differentiate the real and the imaginary
    part with respect to those of its argument.

    Args:
        fn: a function whose arguments at `argnums` are pytrees of real floating arrays, and whose output is one too.
        argnums: the positional argument, or the sequence of them, to differentiate with respect to.
        batch_size: the most rows (entries of the outputs) that are pulled back at once; None is all of
            them; "auto" the fastest of a few sizes, measured by `tune_batch_size` at each call outside of a trace.
        budget: with "auto", the most bytes the map may take, or a `MemoryBudget`.
        has_aux: whether `fn` returns a pair, of which the second is passed on and not differentiated.

    Returns:
        A function of the arguments of `fn`, with the result of `jax.jacrev(fn, argnums, has_aux=has_aux)`: each leaf of
        the output, of shape `out`, becomes a pytree like the input, with leaves `(*out, *in)` of the input's dtype.

    Raises:
        TypeError: an argument of the wrong kind; when called, an input or output that is no real
            floating array, or no pair where `has_aux`.
        ValueError: `batch_size` below 1, `budget` without "auto", no `argnums`; when called, duplicate `argnums` or
            some that `fn` is not given, "auto" inside a trace.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.tiling import tiled_jacrev
        >>> print(tiled_jacrev(lambda x: jnp.cumsum(x) * x, batch_size=2)(jnp.ones(3)))
        [[2. 0. 0.]
         [1. 3. 0.]
         [1. 1. 4.]]
    """
    return _Derivative("tiled_jacrev", fn, argnums, batch_size, budget, has_aux).function(_reverse)


def tiled_hessian(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    batch_size: int | str | None = None,
    budget: int | MemoryBudget | None = None,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """`jax.hessian`, a chunk of columns at a time: forward mode over one reverse pass.

    The gradient of `fn` is linearised once, whatever the number of chunks. Of a `fn` with several outputs, each column
    holds them all.

    There is no `holomorphic=`, which `jax.hessian` has: of a complex function, differentiate the real and the imaginary
    part with respect to those of its argument.

    Args:
        fn: a function whose arguments at `argnums` are pytrees of real floating arrays, and whose output, most often a
            scalar, is one too.
        argnums: the positional argument, or the sequence of them, to differentiate with respect to.
        batch_size: the most columns (entries of the inputs) at once; None is all of
            them; "auto" the fastest of a few sizes, measured by `tune_batch_size` at each call outside of a trace.
        budget: with "auto", the most bytes the map may take, or a `MemoryBudget`.
        has_aux: whether `fn` returns a pair, of which the second is passed on and not differentiated.

    Returns:
        A function of the arguments of `fn`, with the result of `jax.hessian(fn, argnums, has_aux=has_aux)`: leaves
        `(*out, *in, *in)`, in a pytree of the output's structure whose leaves are pytrees like the input, twice.

    Raises:
        TypeError: an argument of the wrong kind; when called, an input or output that is no real
            floating array, or no pair where `has_aux`.
        ValueError: `batch_size` below 1, `budget` without "auto", no `argnums`; when called, duplicate `argnums` or
            some that `fn` is not given, "auto" inside a trace.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.tiling import tiled_hessian
        >>> print(tiled_hessian(lambda x: jnp.prod(x), batch_size=1)(jnp.array([2.0, 3.0])))
        [[0. 1.]
         [1. 0.]]
    """
    gradient = _Derivative("tiled_hessian", fn, argnums, None, None, has_aux).function(_reverse)
    return _Derivative("tiled_hessian", gradient, argnums, batch_size, budget, has_aux).function(_forward)


class _Derivative:
    """Checked arguments of one of the functions above."""

    def __init__(self, name: str, fn: Any, argnums: Any, batch_size: Any, budget: Any, has_aux: Any) -> None:
        self.name = name
        self.fn = check_callable("fn", fn, "fn(*args)")
        self.single = not isinstance(argnums, (tuple, list))
        self.argnums = tuple(_check_argnum(argnum) for argnum in ((argnums,) if self.single else argnums))
        if not self.argnums:
            raise ValueError("argnums is empty; name at least one positional argument of fn, such as 0.")
        self.batch_size = check_batch_size(batch_size, budget)
        self.budget = budget
        self.has_aux = check_bool("has_aux", has_aux)

    def function(self, jacobian: Callable[..., Any]) -> Callable[..., Any]:
        """`fn`'s derivative as a function of its arguments."""

        # `updated` is empty, as a module's fields are no attributes of its derivative.
        @functools.wraps(self.fn, updated=())
        def derivative(*args: Any, **kwargs: Any) -> Any:
            places = self._places(len(args))
            inputs = tuple(self._as_inputs(f"args[{place}]", args[place]) for place in places)

            def of_inputs(*values: Any) -> Any:
                merged = list(args)
                for place, value in zip(places, values, strict=True):
                    merged[place] = value
                result = self.fn(*merged, **kwargs)
                return self._checked_pair(result) if self.has_aux else result

            return jacobian(self, of_inputs, inputs)

        return derivative

    def _places(self, given: int) -> list[int]:
        """The non-negative argument numbers."""
        for argnum in self.argnums:
            if not -given <= argnum < given:
                raise ValueError(
                    f"argnums has {argnum}, but {self.name}'s function was called with {given} positional arguments; "
                    "pass what is differentiated by position, or change argnums."
                )
        places = [argnum % given for argnum in self.argnums]
        if len(set(places)) < len(places):
            raise ValueError(f"argnums is {self.argnums}, which names an argument twice; name each once.")
        return places

    def _checked_pair(self, result: Any) -> Any:
        if isinstance(result, (tuple, list)) and len(result) == 2:
            return result
        if isinstance(result, (tuple, list)):
            found = f"a {type(result).__name__} of {len(result)}"
        elif isinstance(result, (jax.Array, np.ndarray)):
            found = f"one array, {type_text(result)}"
        else:
            found = f"a {type(result).__name__}"
        raise TypeError(
            f"{self.name} was made with has_aux=True, and so fn must return a pair (output, aux), but it returned "
            f"{found}; return both, or leave out has_aux."
        )

    def _as_inputs(self, where: str, tree: Any) -> Any:
        named, treedef = jax.tree_util.tree_flatten_with_path(tree)
        leaves = []
        for path, leaf in named:
            name = f"{where}{jax.tree_util.keystr(path)}"
            if not isinstance(leaf, ARRAY_LIKE):
                raise TypeError(
                    f"{name} is differentiated with respect to, but is no array ({type(leaf).__name__}); "
                    "pass the arrays alone, for example by eqx.partition."
                )
            leaf = jnp.asarray(leaf)
            self.check_real(name, leaf, "convert it to a float, or leave it out of argnums")
            leaves.append(leaf)
        return treedef.unflatten(leaves)

    def check_real(self, name: str, leaf: Any, remedy: str) -> None:
        """Refuse what is no real floating array."""
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(f"{self.name} takes real floating arrays, but {name} is {type_text(leaf)}; {remedy}.")

    def of_basis(
        self, of_index: Callable[[jax.Array], list[Any]], leaves: Sequence[jax.Array], axis: int
    ) -> list[list[Any]]:
        """For each leaf the results of `of_index`, stacked along `axis` for the entries of that leaf.

        `of_index` takes the place of an entry among those of all leaves.
        """
        sizes = [leaf.size for leaf in leaves]
        total, limit = sum(sizes), self.batch_size
        if isinstance(limit, str):
            indices = np.arange(total, dtype=np.int32)
            limit = tune_batch_size(of_index, indices, budget=self.budget).batch_size if total else None
        firsts = [0, *itertools.accumulate(sizes)]
        by_leaf: list[list[Any]] = [[] for _ in leaves]
        for group in _groups(sizes, limit or max(total, 1)):
            indices = jnp.concatenate([jnp.arange(firsts[i], firsts[i + 1]) for i in group])
            chunks = Chunks.balanced(indices.size, limit or max(total, 1))
            stacked = chunked_vmap(lambda index: of_index(index[0]), [indices], [0], chunks, out_axes=axis)
            cuts = list(itertools.accumulate(sizes[i] for i in group))[:-1]
            parts = [jnp.split(y, cuts, axis) if cuts else [y] for y in stacked]
            for at, i in enumerate(group):
                by_leaf[i] = [part[at] for part in parts]
        return by_leaf


def _groups(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Which leaves are found in one loop.

    The results of several leaves are stacked as one and then cut, which holds them twice, so together they are at most
    a tenth of all, unless they fit a chunk. A large leaf is on its own, and is written to its place.
    """
    most = max(limit, sum(sizes) // 10)
    groups: list[list[int]] = []
    open_size = most + 1
    for i, size in enumerate(sizes):
        if size >= most and sum(sizes) > limit:
            groups.insert(0, [i])
        elif open_size + size > most:
            groups.append([i])
            open_size = size
        else:
            groups[-1].append(i)
            open_size += size
    return groups


def _check_argnum(argnum: Any) -> int:
    if isinstance(argnum, bool) or not isinstance(argnum, (int, np.integer)):
        raise TypeError(
            f"argnums must be an int or a sequence of ints, but has {argnum!r} ({type(argnum).__name__}); "
            "it counts the positional arguments of fn from 0."
        )
    return int(argnum)


def _forward(settings: _Derivative, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    y, push, *aux = jax.linearize(fn, *inputs, has_aux=settings.has_aux)
    ins, in_tree = jax.tree.flatten(inputs)
    outs, out_tree = jax.tree.flatten(y)
    # The derivative of what is no float is zero, and JAX's tangents of it hold no numbers.
    moves = [jnp.issubdtype(jnp.result_type(out), jnp.inexact) for out in outs]

    def column(index: jax.Array) -> list[jax.Array]:
        dots = jax.tree.leaves(push(*in_tree.unflatten(_basis_vector(ins, index))))
        return [dot for dot, moving in zip(dots, moves, strict=True) if moving]

    columns = settings.of_basis(column, ins, -1) if any(moves) else []
    position = itertools.accumulate(moves, initial=0)
    jacobian = []
    for out, moving, at in zip(outs, moves, position, strict=False):
        if moving:
            blocks = [of_leaf[at].reshape(out.shape + leaf.shape) for of_leaf, leaf in zip(columns, ins, strict=True)]
        else:
            blocks = [jnp.zeros(jnp.shape(out) + leaf.shape, out.dtype) for leaf in ins]
        jacobian.append(_by_argument(settings, in_tree, blocks))
    return _with_aux(out_tree.unflatten(jacobian), aux)


def _reverse(settings: _Derivative, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    y, pull, *aux = jax.vjp(fn, *inputs, has_aux=settings.has_aux)
    ins, in_tree = jax.tree.flatten(inputs)
    outs, out_tree = jax.tree.flatten(y)
    for path, leaf in jax.tree_util.tree_leaves_with_path(y):
        settings.check_real(f"output{jax.tree_util.keystr(path)}", leaf, "return its real parts, or return it as aux")

    def row(index: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(pull(out_tree.unflatten(_basis_vector(outs, index))))

    jacobian = []
    for out, rows in zip(outs, settings.of_basis(row, outs, 0), strict=True):
        blocks = [stacked.reshape(out.shape + leaf.shape) for stacked, leaf in zip(rows, ins, strict=True)]
        jacobian.append(_by_argument(settings, in_tree, blocks))
    return _with_aux(out_tree.unflatten(jacobian), aux)


def _basis_vector(leaves: Sequence[jax.Array], index: jax.Array) -> list[jax.Array]:
    """One at entry `index` of all the leaves' entries, zero elsewhere."""
    vector = []
    first = 0
    for leaf in leaves:
        at = (jnp.arange(leaf.size) == index - first).reshape(leaf.shape)
        # Made from the leaf, it has its sharding, and varies over the devices that the leaf varies over.
        vector.append(jnp.where(at, jnp.ones_like(leaf), jnp.zeros_like(leaf)))
        first += leaf.size
    return vector


def _by_argument(settings: _Derivative, in_tree: Any, blocks: list[jax.Array]) -> Any:
    arguments = in_tree.unflatten(blocks)
    return arguments[0] if settings.single else arguments


def _with_aux(jacobian: Any, aux: list[Any]) -> Any:
    return (jacobian, aux[0]) if aux else jacobian
