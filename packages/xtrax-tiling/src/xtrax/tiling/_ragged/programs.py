"""Programs of a function of one padded element, one for each length, and found again on the next call.

A function is taken apart first: its arrays (those of an `eqx.Module`, or in the arguments of a `functools.partial`) are
arguments of the program, and so are the arrays that it closes over, which tracing finds. Nothing is compiled in, and a
module with other weights of the same shapes runs the same program.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.jit import bounded_jit
from xtrax.tiling._kept import Kept, name_of
from xtrax.tiling._ragged.length_axes import length_axes
from xtrax.tiling._split import static_key

Element = tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]  # the structure of an element, and its leaves without the length


class ElementFn:
    """A function of `(padded, mask)`, apart from the arrays that it holds."""

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        """Split it.

        Raises:
            TypeError: it holds a value that is being traced.
        """
        self._fn: Any = fn
        self._is_partial = isinstance(fn, functools.partial)
        self._leaves, self._treedef = jax.tree.flatten(self.tree)
        self._at = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
        self.arrays = [self._leaves[i] for i in self._at]
        _refuse_tracers(self.arrays)

    def with_arrays(self, arrays: Sequence[Any]) -> Callable[[Any, Any], Any]:
        """The function, holding these arrays in place of its own."""
        leaves = list(self._leaves)
        for i, array in zip(self._at, arrays, strict=True):
            leaves[i] = array
        whole = jax.tree.unflatten(self._treedef, leaves)
        if not self._is_partial:
            return whole
        fn, args, keywords = whole
        return functools.partial(fn, *args, **keywords)

    @property
    def tree(self) -> Any:
        """What programs are kept for: the function, or the tree that it is known by."""
        return (self._fn.func, self._fn.args, self._fn.keywords) if self._is_partial else self._fn

    @property
    def key(self) -> Hashable:
        """What tells a tree from others of its kind; a plain function is told apart by itself."""
        if self._treedef == jax.tree.structure(0):
            return None
        static = tuple(static_key(leaf) for i, leaf in enumerate(self._leaves) if i not in set(self._at))
        return self._treedef, static, tuple(jax.typeof(array) for array in self.arrays)

    @property
    def name(self) -> str:
        """Of the function, for profiles."""
        return name_of((self._fn,))


class Program:
    """What one length is run by: `(arrays, leaves, mask)` of a batch to the leaves of the results."""

    def __init__(self, fn: ElementFn, element: Element, batch_size: int, length: int) -> None:
        """Trace it; it is compiled at its first call.

        Raises:
            TypeError: `fn` closes over a value that is being traced.
        """

        def batched(arrays: list[Any], leaves: list[Any], mask: Any) -> Any:
            one = _of_leaves(fn.with_arrays(arrays), element)
            return jax.vmap(one)(leaves, mask)

        leaves, mask = jax.tree.map(
            lambda one: jax.ShapeDtypeStruct((batch_size, *one.shape), one.dtype), _padded_types(element, length)
        )
        traced, shapes = jax.make_jaxpr(batched, return_shape=True)(fn.arrays, leaves, mask)
        _refuse_tracers(traced.consts)
        self._consts = list(traced.consts)
        self.structure = jax.tree.structure(shapes)
        self.of_one = jax.tree.map(lambda output: jax.ShapeDtypeStruct(output.shape[1:], output.dtype), shapes)

        def map_ragged(consts: list[Any], arrays: list[Any], leaves: list[Any], mask: Any) -> list[Any]:
            return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*arrays, *leaves, mask)

        map_ragged.__name__ = map_ragged.__qualname__ = fn.name
        self._run = bounded_jit(map_ragged, max_traces=1)
        self.length_axes: list[tuple[int, ...]] = []

    def __call__(self, arrays: list[Any], leaves: list[Any], mask: npt.NDArray[np.bool_]) -> list[Any]:
        """The results of a batch, each leaf `(batch_size, ...)`."""
        return self._run(self._consts, arrays, leaves, mask)


class Programs:
    """The programs of one function for elements of one type, by length."""

    def __init__(self, element: Element, batch_size: int) -> None:
        """None yet."""
        self._element = element
        self._batch_size = batch_size
        self._by_length: dict[int, Program] = {}

    def of(self, fn: ElementFn, length: int, boundaries: Sequence[int]) -> Program:
        """The program of a length, traced if it is new; other `boundaries` are lengths that `fn` should take too.

        Raises:
            ValueError: an output follows the length without having it as an axis.
        """
        if length not in self._by_length:
            program = Program(fn, self._element, self._batch_size, length)
            # What is traced costs nothing more; fn is meant for the boundaries, and may take half or twice the length.
            others = [*self._by_length, *[b for b in boundaries if b != length][:1], length // 2, 2 * length]
            run = functools.partial(self._abstractly, fn)
            program.length_axes = length_axes(program.of_one, length, run, others)
            self._by_length[length] = program
        return self._by_length[length]

    def _abstractly(self, fn: ElementFn, length: int) -> Any:
        """The types of the results of one element."""
        if length in self._by_length:
            return self._by_length[length].of_one
        leaves, mask = _padded_types(self._element, length)
        # A wrapper of its own, since eval_shape hashes what it is given.
        return jax.eval_shape(
            lambda arrays, *args: _of_leaves(fn.with_arrays(arrays), self._element)(*args), fn.arrays, leaves, mask
        )


_PROGRAMS: Kept[Programs] = Kept(64)


def programs_of(fn: ElementFn, element: Element, batch_size: int) -> Programs:
    """The programs of an earlier call with the same function and type of element, or new ones."""
    key = (fn.key, element, batch_size)
    programs = _PROGRAMS.get(fn.tree, key)
    if programs is None:
        programs = Programs(element, batch_size)
        _PROGRAMS.put(fn.tree, key, programs)
    return programs


def _of_leaves(fn: Callable[[Any, Any], Any], element: Element) -> Callable[[Sequence[Any], Any], Any]:
    return lambda leaves, mask: fn(jax.tree.unflatten(element[0], leaves), mask)


def _padded_types(element: Element, length: int) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """The leaves and the mask of one element of this length."""
    leaves = [jax.ShapeDtypeStruct((length, *leaf.shape), leaf.dtype) for leaf in element[1]]
    return leaves, jax.ShapeDtypeStruct((length,), np.bool_)


def _refuse_tracers(arrays: Sequence[Any]) -> None:
    for array in arrays:
        if isinstance(array, Tracer):
            raise TypeError(
                f"fn holds a value that is being traced ({array}), but its results are arrays on the host; call it "
                "outside jax.jit, jax.grad and jax.vmap, or use bucketize and tiled_vmap inside."
            )
