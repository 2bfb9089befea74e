"""Run one axis: all at once, in chunks, with a carry, or until a condition fails."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jax import lax

from xtrax.tiling._axes import resolve_axes
from xtrax.tiling._carry_check import checked_cond, checked_step, checked_transition
from xtrax.tiling._check import check_bool, check_callable, check_int
from xtrax.tiling._map.chunked import chunked_vmap
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling.carry import materialize_carry


@runtime_checkable
class MapIterator(Protocol):
    """Maps a function of one element over an axis of a pytree."""

    def __call__(self, fn: Callable[[Any], Any], xs: Any, in_axes: Any = 0) -> Any:
        """Return the results, stacked along a new leading axis."""
        ...


@runtime_checkable
class ScanIterator(Protocol):
    """Walks the leading axis of a pytree with a carry."""

    def __call__(self, fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
        """Return the last carry and the stacked outputs."""
        ...


@dataclasses.dataclass(frozen=True)
class VmapIterator:
    """All elements at once.

    >>> import jax.numpy as jnp
    >>> VmapIterator()(lambda x: x + 1, jnp.arange(3))
    Array([1, 2, 3], dtype=int32)
    """

    def __call__(self, fn: Callable[[Any], Any], xs: Any, in_axes: Any = 0) -> Any:
        """`jax.vmap` of `fn` over one pytree.

        Args:
            fn: a function of one element.
            xs: a pytree of arrays; the mapped ones share the size `n` of their mapped axis.
            in_axes: the axis of each leaf, as in `jax.vmap`: an int (negative from the end), None for a leaf that is
                the same for all elements, or a pytree of them that is a prefix of `xs`.

        Returns:
            What `fn` returns, each leaf `(n, ...)`.

        Raises:
            TypeError: `fn` is not callable, or an axis is neither an int nor None.
            ValueError: nothing is mapped, `in_axes` is no prefix of `xs`, a leaf lacks the axis, or sizes differ.
        """
        check_callable("fn", fn, "x -> y")
        resolve_axes(xs, in_axes)
        return jax.vmap(fn, in_axes=(in_axes,))(xs)


@dataclasses.dataclass(frozen=True)
class SafeMapIterator:
    """Chunks of at most `tile` elements, one after another, whatever the number of elements.

    The results are those of `jax.vmap`. Memory is that of the inputs, the outputs and one chunk: chunks are balanced,
    and the first two overlap where they do not come out even, so a few elements may be computed twice. Where `fn` has
    side effects each element is computed once: the last chunk is shorter instead. Differentiable in both modes; reverse
    mode keeps what `fn` saves of every element, unless `fn` is a `jax.checkpoint`. A call outside `jax.jit` is traced
    anew each time, as with every loop of JAX, and compiled once.

    Args:
        tile: elements mapped at once, at least 1.

    Raises:
        TypeError: `tile` is not an integer (a bool is none).
        ValueError: `tile` is below 1.

    >>> import jax.numpy as jnp
    >>> SafeMapIterator(2)(lambda x: x * x, jnp.arange(5))
    Array([ 0,  1,  4,  9, 16], dtype=int32)
    """

    tile: int

    def __post_init__(self) -> None:
        """Check the tile."""
        object.__setattr__(self, "tile", check_int("tile", self.tile, 1))

    def __call__(self, fn: Callable[[Any], Any], xs: Any, in_axes: Any = 0) -> Any:
        """`jax.vmap` of `fn` over one pytree, a chunk at a time. Arguments and errors as of `VmapIterator`."""
        check_callable("fn", fn, "x -> y")
        axes = resolve_axes(xs, in_axes)
        if axes.size <= self.tile:
            return jax.vmap(fn, in_axes=(in_axes,))(xs)
        chunks = Chunks.balanced(axes.size, self.tile)
        return chunked_vmap(axes.of_mapped(fn), axes.mapped, axes.mapped_axes, chunks)


@dataclasses.dataclass(frozen=True)
class JaxScanIterator:
    """One element after another, by `jax.lax.scan`.

    Args:
        collect_outputs: whether the outputs are stacked; if not, they are None and take no memory.

    >>> import jax.numpy as jnp
    >>> JaxScanIterator()(lambda total, x: (total + x, total), jnp.int32(0), jnp.array([3, 4]))
    (Array(7, dtype=int32), Array([0, 3], dtype=int32))
    """

    collect_outputs: bool = True

    def __post_init__(self) -> None:
        """Check the flag."""
        check_bool("collect_outputs", self.collect_outputs)

    def __call__(self, fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any) -> tuple[Any, Any]:
        """Scan over the leading axis of a pytree.

        Args:
            fn: `(carry, x) -> (carry, y)`.
            init: the first carry; `CarryShape` leaves stand for zeros.
            xs: a pytree of arrays `(n, ...)`.

        Returns:
            The last carry, and what `fn` returned for each element, each leaf `(n, ...)`, or None.

        Raises:
            TypeError: `fn` is not callable or does not return a pair.
            CarryMismatchError: `fn` changes the carry's structure, shapes or dtypes.
            ValueError: `xs` has no arrays, or their leading axes differ.
        """
        check_callable("fn", fn, "(carry, x) -> (carry, y)")
        resolve_axes(xs)
        return lax.scan(checked_transition(fn, self.collect_outputs), materialize_carry(init), xs)


@dataclasses.dataclass(frozen=True)
class WhileLoopIterator:
    """A carry that is stepped until a condition fails, by `jax.lax.while_loop`.

    >>> WhileLoopIterator()(lambda c: c < 100, lambda c: 2 * c, 3)
    Array(192, dtype=int32, weak_type=True)
    """

    def __call__(self, cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
        """Step the carry while `cond` holds.

        Args:
            cond: `carry -> bool`, a scalar.
            body: `carry -> carry`.
            init: the first carry; `CarryShape` leaves stand for zeros.

        Returns:
            The first carry for which `cond` is False.

        Raises:
            TypeError: `cond` or `body` is not callable, or `cond` returns no bool scalar.
            CarryMismatchError: `body` changes the carry's structure, shapes or dtypes.
        """
        check_callable("cond", cond, "carry -> bool")
        check_callable("body", body, "carry -> carry")
        return lax.while_loop(checked_cond(cond), checked_step(body), materialize_carry(init))


def safe_map(fn: Callable[[Any], Any], xs: Any, batch_size: int | None = None) -> Any:
    """`jax.lax.map` with any remainder at no extra memory, that refuses an empty axis.

    An axis without elements is where a filter upstream has let nothing through, more often than not. Where it is meant,
    `SafeMapIterator(batch_size)` and `VmapIterator()` map it as `jax.vmap` does, to results `(0, ...)`.

    Args:
        fn: a function of one element.
        xs: a pytree of arrays `(n, ...)`, n at least 1.
        batch_size: elements mapped at once; None takes them one by one, as `jax.lax.map` does.

    Returns:
        What `fn` returns, each leaf `(n, ...)`.

    Raises:
        TypeError: `fn` is not callable, or `batch_size` is not an integer.
        ValueError: the axis is empty, the leaves disagree about it, or `batch_size` is below 1.

    >>> import jax.numpy as jnp
    >>> safe_map(lambda x: x + 1, jnp.arange(3), batch_size=2)
    Array([1, 2, 3], dtype=int32)
    """
    check_callable("fn", fn, "x -> y")
    iterator = None if batch_size is None else SafeMapIterator(check_int("batch_size", batch_size, 1))
    if resolve_axes(xs).size == 0:
        raise ValueError(
            "xs has no elements along its leading axis, and safe_map needs at least one; SafeMapIterator maps none."
        )
    return lax.map(fn, xs) if iterator is None else iterator(fn, xs)


def safe_scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int | None = None,
    reverse: bool = False,
    unroll: int = 1,
) -> tuple[Any, Any]:
    """`jax.lax.scan` whose arguments and carry are checked, and that refuses an empty axis.

    Where an axis without elements is meant, `JaxScanIterator()` scans it as `jax.lax.scan` does, to the first carry.

    Args:
        fn: `(carry, x) -> (carry, y)`.
        init: the first carry; `CarryShape` leaves stand for zeros.
        xs: a pytree of arrays `(n, ...)`, or None with a `length`.
        length: the number of steps; where `xs` has arrays it must be theirs.
        reverse: whether to go from the last element to the first.
        unroll: how many steps are unrolled into one iteration of the loop, at least 1.

    Returns:
        The last carry, and what `fn` returned for each element, each leaf `(n, ...)`.

    Raises:
        TypeError: an argument of the wrong type, or `fn` does not return a pair.
        CarryMismatchError: `fn` changes the carry's structure, shapes or dtypes.
        ValueError: no steps, or a `length` that is not that of `xs`.

    >>> import jax.numpy as jnp
    >>> safe_scan(lambda c, x: (c + x, None), jnp.float32(0), jnp.arange(4.0))
    (Array(6., dtype=float32), None)
    """
    check_callable("fn", fn, "(carry, x) -> (carry, y)")
    check_bool("reverse", reverse)
    unroll = check_int("unroll", unroll, 1)
    if length is not None:
        length = check_int("length", length, 0)
    if jax.tree.leaves(xs):
        size = resolve_axes(xs).size
        if length is not None and length != size:
            raise ValueError(f"length is {length}, but xs has {size} elements along its leading axis.")
    elif length is None:
        raise ValueError("xs has no arrays, so the number of steps is unknown; pass length.")
    else:
        size = length
    if size == 0:
        raise ValueError("the axis has no elements, and safe_scan needs at least one step; JaxScanIterator takes none.")
    step = checked_transition(fn, collect_outputs=True)
    return lax.scan(step, materialize_carry(init), xs, length=size, reverse=reverse, unroll=unroll)
