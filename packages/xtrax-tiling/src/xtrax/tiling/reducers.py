"""Reduce the outputs of a map chunk by chunk, without ever stacking them.

A `Reducer` says how. The ready ones are objects (`mean`, `sum`, `max`, `min`, `var`, `logsumexp`, `count`, `argmax`) or
functions of a parameter (`topk`, `histogram`), and work on every leaf of the output. `as_reducer` combines several in a
pytree. Those that add floating numbers (`sum`, `mean`, `var`, `logsumexp`) carry the rounding errors along, accumulate
half precision in single precision, and can be differentiated. NaN propagates as in numpy.

How many elements there were is counted in JAX's default integer, so that `mean`, `var`, `count`, `argmax` and `topk`
are right for up to 2**31 - 1 elements, or 2**63 - 1 in x64 mode.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from xtrax.tiling._check import check_callable, check_int, plural
from xtrax.tiling._reducers import orders, sums

__all__ = [
    "Reducer",
    "argmax",
    "as_reducer",
    "count",
    "histogram",
    "logsumexp",
    "max",
    "mean",
    "min",
    "sum",
    "topk",
    "var",
]


@dataclasses.dataclass(frozen=True)
class Reducer:
    """A reduction of an axis that takes any number of its elements at a time.

    Elements arrive in the order of the axis, and `merge(a, b)` is of two stretches of which `a` comes first, so that a
    reduction may depend on the order. `merge` is associative, up to rounding where numbers are added. All four
    are pure and traceable; the state is a pytree of arrays, whose structure, shapes and dtypes never change.

    Attributes:
        init: `init(element) -> state` of no elements; `element` is a pytree of `jax.ShapeDtypeStruct`, one element of
            the output.
        update: `update(state, values, mask) -> state` with more elements: `values` like `element`, each leaf
            `(n, ...)`; `mask` a bool array `(n,)`, True for what counts, or None if all do.
        merge: `merge(a, b) -> state` of both stretches.
        finalize: `finalize(state) -> result`.
        at_least: the fewest elements of an axis for which there is a result. Who runs the reducer refuses a shorter
            axis by `check_size`, before any trace.

    Raises:
        TypeError: one of the four is not callable, or `at_least` is no int.
        ValueError: `at_least` is negative.

    Example:
        The largest absolute value, over chunks of two:

        >>> import jax, jax.numpy as jnp
        >>> from xtrax.tiling.reducers import Reducer
        >>> largest = Reducer(
        ...     init=lambda element: jnp.zeros(element.shape, element.dtype),
        ...     update=lambda state, values, mask: jnp.maximum(
        ...         state, jnp.max(jnp.abs(values if mask is None else jnp.where(mask, values, 0)), axis=0)
        ...     ),
        ...     merge=jnp.maximum,
        ...     finalize=lambda state: state,
        ... )
        >>> state = largest.init(jax.ShapeDtypeStruct((), jnp.float32))
        >>> for chunk in jnp.array([[1.0, -7.0], [3.0, 2.0]]):
        ...     state = largest.update(state, chunk, None)
        >>> print(largest.finalize(state))
        7.0
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    finalize: Callable[[Any], Any]
    at_least: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_callable("init", self.init, "init(element)")
        check_callable("update", self.update, "update(state, values, mask)")
        check_callable("merge", self.merge, "merge(a, b)")
        check_callable("finalize", self.finalize, "finalize(state)")
        check_int("at_least", self.at_least, 0)

    def check_size(self, size: int, axis: str = "the axis") -> None:
        """Refuse an axis with too few elements for a result.

        Args:
            size: the number of elements.
            axis: what the axis is called in the message.

        Raises:
            ValueError: `size` is less than `at_least`.
        """
        if size < self.at_least:
            raise ValueError(
                f"the reducer of {axis} needs at least {plural(self.at_least, 'element')}, but there are {size}; "
                "reduce a longer axis, or use a reducer that has a result for fewer, such as sum."
            )


def as_reducer(tree: Any) -> Reducer:
    """Reducers of parts of an output as one reducer of all of it.

    Args:
        tree: a `Reducer`, or a pytree of them that is a prefix of the output; each reduces what is below it.

    Returns:
        A `Reducer` whose result has the structure of `tree`, with each reducer's result in its place.

    Raises:
        TypeError: a leaf of `tree` is no `Reducer`.
        ValueError: `tree` is empty; and from `init`, `tree` is no prefix of the output.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xtrax.tiling import reducers
        >>> both = reducers.as_reducer({"loss": reducers.mean, "length": reducers.max})
        >>> values = {"loss": jnp.array([1.0, 2.0]), "length": jnp.array([5, 3])}
        >>> state = both.init(jax.eval_shape(lambda xs: jax.tree.map(lambda x: x[0], xs), values))
        >>> result = both.finalize(both.update(state, values, None))
        >>> print(result["loss"], result["length"])
        1.5 5
    """
    if isinstance(tree, Reducer):
        return tree
    named, treedef = jax.tree_util.tree_flatten_with_path(tree)
    if not named:
        raise ValueError(f"reduce is {tree!r}, which has no Reducer; give one, such as xtrax.tiling.reducers.mean.")
    for path, leaf in named:
        if not isinstance(leaf, Reducer):
            raise TypeError(
                f"reduce{jax.tree_util.keystr(path)} must be a Reducer, but is {leaf!r} ({type(leaf).__name__}); "
                "use one of xtrax.tiling.reducers, or make a Reducer(init, update, merge, finalize)."
            )
    parts = tuple(leaf for _, leaf in named)
    try:
        return _combined(treedef, parts)
    except TypeError:  # the functions of a part cannot be hashed
        return _combined.__wrapped__(treedef, parts)


# The same parts are the same reducer, so that a program that was compiled for it is found again.
@functools.lru_cache(maxsize=256)
def _combined(treedef: Any, parts: tuple[Reducer, ...]) -> Reducer:
    """The reducer of an output of which each part has its own."""

    def init(element: Any) -> Any:
        try:
            elements = treedef.flatten_up_to(element)
        except ValueError as error:
            raise ValueError(
                f"reduce must be a Reducer or a pytree of them that is a prefix of the output, but is {treedef}, and "
                f"the output is {jax.tree.structure(element)}; give one Reducer for each part of the output."
            ) from error
        return treedef.unflatten([part.init(below) for part, below in zip(parts, elements, strict=True)])

    def update(state: Any, values: Any, mask: Any) -> Any:
        pairs = zip(parts, treedef.flatten_up_to(state), treedef.flatten_up_to(values), strict=True)
        return treedef.unflatten([part.update(old, below, mask) for part, old, below in pairs])

    def merge(a: Any, b: Any) -> Any:
        pairs = zip(parts, treedef.flatten_up_to(a), treedef.flatten_up_to(b), strict=True)
        return treedef.unflatten([part.merge(first, second) for part, first, second in pairs])

    def finalize(state: Any) -> Any:
        states = treedef.flatten_up_to(state)
        return treedef.unflatten([part.finalize(part_state) for part, part_state in zip(parts, states, strict=True)])

    fewest = functools.reduce(lambda most, part: part.at_least if part.at_least > most else most, parts, 0)
    return Reducer(init, update, merge, finalize, fewest)


def _leafwise(
    name: str, cls: Any, *, at_least: int = 0, complex_too: bool = False, **parameters: Any
) -> Reducer:  # fmt: skip
    """The reducer that keeps a state of the class `cls` for each leaf of the output."""
    of = functools.partial(cls.of, **parameters)

    def is_state(node: Any) -> bool:
        return isinstance(node, cls)

    def init(element: Any) -> Any:
        _check_element(name, element, complex_too)
        return jax.tree.map(lambda leaf: of(jnp.zeros((0, *leaf.shape), leaf.dtype), None), element)

    def update(state: Any, values: Any, mask: Any) -> Any:
        return jax.tree.map(lambda old, leaf: old.merged(of(leaf, mask)), state, values, is_leaf=is_state)

    def merge(a: Any, b: Any) -> Any:
        return jax.tree.map(lambda first, second: first.merged(second), a, b, is_leaf=is_state)

    def finalize(state: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.result(), state, is_leaf=is_state)

    return Reducer(init, update, merge, finalize, at_least)


def _check_element(name: str, element: Any, complex_too: bool) -> None:
    """Refuse an output without leaves, and one with a leaf that is not made of numbers."""
    named, _ = jax.tree_util.tree_flatten_with_path(element)
    if not named:
        raise ValueError(f"the output is {element!r}, which has no arrays for the reducer {name}; return at least one.")
    for path, leaf in named:
        dtype = getattr(leaf, "dtype", None)
        where = f"output{jax.tree_util.keystr(path)}"
        if dtype is None or not hasattr(leaf, "shape"):
            raise TypeError(f"{where} must be an array for the reducer {name}, but is a {type(leaf).__name__}.")
        if not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
            raise TypeError(f"the reducer {name} takes numbers and bools, but {where} is {dtype}; return its numbers.")
        if jnp.issubdtype(dtype, jnp.complexfloating) and not complex_too:
            raise TypeError(
                f"the reducer {name} takes real numbers, but {where} is {dtype}; "
                "return its real part, its imaginary part or its absolute value."
            )


def _count() -> Reducer:
    def init(element: Any) -> Any:
        if not jax.tree.leaves(element):
            raise ValueError(f"the output is {element!r}, which has no arrays to count; return at least one.")
        return jnp.zeros((), int)

    def update(state: Any, values: Any, mask: Any) -> Any:
        return state + sums.count_of(jax.tree.leaves(values)[0], mask)

    return Reducer(init, update, lambda a, b: a + b, lambda state: state)


mean: Reducer = _leafwise("mean", sums.Mean, complex_too=True)
"""The mean, in the dtype of `jnp.mean`; NaN for no elements."""

sum: Reducer = _leafwise("sum", sums.Sum, complex_too=True)
"""The sum, in the dtype of `jnp.sum`: integers as integers, bools counted; 0 for no elements. As there, integers wrap
around where the sum passes the dtype's limit: 2**31 - 1 for `int32`, the widest without x64 mode."""

var: Reducer = _leafwise("var", sums.Variance, complex_too=True)
"""The variance about the mean, divided by the number of elements, as `jnp.var`; NaN for no elements."""

logsumexp: Reducer = _leafwise("logsumexp", sums.LogSumExp)
"""`log(sum(exp(x)))`, in the dtype of `jax.nn.logsumexp`; -inf for no elements."""

max: Reducer = _leafwise("max", orders.Extreme, at_least=1, greatest=True)
"""The greatest element; an empty axis is refused. If all are masked: -inf, or the least integer. Equal
elements share the derivative equally, as in `jnp.max`."""

min: Reducer = _leafwise("min", orders.Extreme, at_least=1, greatest=False)
"""The least element; an empty axis is refused. If all are masked: inf, or the greatest integer. Equal
elements share the derivative equally, as in `jnp.min`."""

argmax: Reducer = _leafwise("argmax", orders.ArgMax, at_least=1)
"""The position of the first greatest element, or of the first NaN; an empty axis is refused. Positions count what is
not masked; -1 if all are masked."""

count: Reducer = _count()
"""The number of elements, one integer for the whole output."""


@functools.lru_cache(maxsize=64)
def _topk(k: int) -> Reducer:
    return _leafwise("topk", orders.TopK, at_least=k, k=k)


def topk(k: int) -> Reducer:
    """The `k` greatest elements and where they are.

    Args:
        k: how many, at least 1. An axis with fewer elements is refused.

    Returns:
        A `Reducer` whose result, for each leaf of shape `(...)`, is a pair: the values `(k, ...)`, greatest first, and
        their positions `(k, ...)` in JAX's default integer. Equal values come in the order of their positions; NaN is
        greater than any number, and -0.0 equal to 0.0. Positions count what is not masked; past the last one that is
        not, the position is -1 and the value -inf, or the least integer.

    Raises:
        TypeError: `k` is no int.
        ValueError: `k` is less than 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xtrax.tiling.reducers import topk
        >>> best = topk(2)
        >>> state = best.init(jax.ShapeDtypeStruct((), jnp.float32))
        >>> for chunk in (jnp.array([3.0, 9.0, 1.0]), jnp.array([9.0, 5.0])):
        ...     state = best.update(state, chunk, None)
        >>> values, positions = best.finalize(state)
        >>> print(values, positions)
        [9. 9.] [1 3]
    """
    return _topk(check_int("k", k, 1))


@functools.lru_cache(maxsize=64)
def _histogram(edges: tuple[float, ...]) -> Reducer:
    return _leafwise("histogram", orders.Histogram, edges=np.asarray(edges, np.float64))


def histogram(edges: Sequence[float] | np.ndarray) -> Reducer:
    """How many elements fall into each bin, as `numpy.histogram` counts them.

    Args:
        edges: the `bins + 1` edges in ascending order, as concrete numbers. A bin holds its lower edge and not its
            upper one; the last bin holds both. What lies outside, and NaN, is not counted.

    Returns:
        A `Reducer` whose result, for each leaf of shape `(...)`, is the counts `(bins, ...)` in JAX's default integer.
        Values are compared with the edges as in double precision, whatever their dtype.

    Raises:
        TypeError: `edges` are no sequence of real numbers.
        ValueError: fewer than two edges, NaN, or edges that descend.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xtrax.tiling.reducers import histogram
        >>> bins = histogram([0.0, 1.0, 2.0])
        >>> state = bins.init(jax.ShapeDtypeStruct((), jnp.float32))
        >>> print(bins.finalize(bins.update(state, jnp.array([0.0, 0.5, 1.0, 2.0, 2.5]), None)))
        [2 2]
    """
    if isinstance(edges, Tracer):
        raise TypeError("edges must be concrete numbers, but are traced by a JAX transformation; make them outside it.")
    try:
        array = np.asarray(edges)
    except ValueError as error:  # numpy's word for rows of different lengths
        raise TypeError(f"edges must be a sequence of numbers, such as [0, 1, 2], but are {edges!r}.") from error
    if isinstance(edges, str) or array.dtype == np.bool_ or not (
        np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)
    ):  # fmt: skip
        raise TypeError(f"edges must be a sequence of real numbers, such as [0, 1, 2], but are {edges!r}.")
    if array.ndim != 1 or array.size < 2:
        raise ValueError(f"edges must be at least two numbers in one dimension, but have the shape {array.shape}.")
    values = array.astype(np.float64)
    if np.isnan(values).any():
        raise ValueError(
            f"edges must be numbers in ascending order, but edges[{int(np.argmax(np.isnan(values)))}] is NaN."
        )
    descends = np.flatnonzero(np.diff(values) < 0)
    if descends.size:
        at = int(descends[0])
        raise ValueError(
            f"edges must be in ascending order, but edges[{at + 1}] = {values[at + 1]} follows edges[{at}] = "
            f"{values[at]}; sort them."
        )
    return _histogram(tuple(values.tolist()))
