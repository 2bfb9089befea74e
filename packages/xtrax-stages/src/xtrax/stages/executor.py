"""Run one axis of a plan, with what happens at its edge."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from xtrax.stages._effects import emit, emit_lanes, has_effects, is_batchable, is_ordered
from xtrax.stages._errors import ExecutorError
from xtrax.stages.boundaries import AxisBoundary
from xtrax.tiling import axis_dispatch, safe_scan
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry

__all__ = ["ExecutorError", "execute_map_axis", "execute_scan_axis"]

_Carry = TypeVar("_Carry")

_HOW_TO_RUN: tuple[tuple[type, str], ...] = (
    (Scan, "it carries a state from element to element: use execute_scan_axis"),
    (WhileCarry, "it has no elements: run it with xtrax.tiling.make_axis_dispatch"),
    (
        Bucket,
        "its elements differ in length and are padded on the host: use select_bucket and bucketize of xtrax.tiling, "
        "then Vmap or SafeMap for the elements of each bucket",
    ),
)


def execute_map_axis(
    fn: Callable[[Any], Any], xs: Any, strategy: AxisStrategy, boundary: AxisBoundary | None = None
) -> Any:
    """Map a function over the leading axis, with a boundary at its edge.

    For each element `v = tap(fn(x))`, then `sink(v)`, inside the iteration:

    - on a `SafeMap` axis chunk by chunk: the elements of a chunk are computed at once, then their effects follow in the
      order of the elements, and then the next chunk is computed. The chunks keep their size when the effects are
      ordered; the last one is shorter where the size does not divide the axis;
    - on a `SafeMap(1)` axis element by element. If anything in it has effects, `fn` is then called without `jax.vmap`,
      so it may run an inner axis whose effects are ordered. The iterators of `xtrax.tiling` use `jax.vmap` even for one
      element, under which JAX refuses ordered effects;
    - on a `Vmap` axis once all elements are computed;
    - on a `DedupGather` axis for each of the `n` original positions, in order, though only the distinct elements are
      computed.

    A tap or sink sees each element of the axis exactly once, and nothing else: no padding. The same holds for the
    effects of `fn` itself on a `Vmap` or `SafeMap` axis, so calls may be nested.

    Args:
        fn: A function of one element.
        xs: A pytree whose leaves are `(n, ...)`.
        strategy: `Vmap`, `SafeMap` or `DedupGather`.
        boundary: What happens at the axis's edge, or None.

    Returns:
        `fuse(stack of v)` if the boundary has a fuse; else None if it has a sink; else the stack, leaves `(n, ...)`.

    Raises:
        ExecutorError: If the strategy is not one that maps, an ordered tap or sink without a batching rule is on a
            `Vmap` axis, the leaves have no common leading axis, a tap returns something else than it was given, a
            sink returns anything, `fn` itself has effects on a
            `DedupGather` axis, or a tap or sink with effects is differentiated (when that is traced).
        TypeError: If an argument is of the wrong kind.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import AxisBoundary, execute_map_axis, io_callback
        >>> from xtrax.tiling import SafeMap
        >>> class Kept:
        ...     ordered = True
        ...     def __init__(self):
        ...         self.rows = []
        ...     def __call__(self, x):
        ...         io_callback(lambda v: self.rows.append(int(v)), None, x, ordered=True)
        >>> kept = Kept()
        >>> execute_map_axis(lambda x: x * x, jnp.arange(5), SafeMap(2), AxisBoundary(sink=kept))
        >>> jax.effects_barrier()
        >>> kept.rows
        [0, 1, 4, 9, 16]
    """
    _check_call("fn", fn, boundary)
    for kind, how in _HOW_TO_RUN:
        if isinstance(strategy, kind):
            raise ExecutorError(f"execute_map_axis cannot run {kind.__name__}: {how}")
    if not isinstance(strategy, (Vmap, SafeMap, DedupGather)):
        raise TypeError(f"strategy must be a Vmap, SafeMap or DedupGather of xtrax.tiling; found {strategy!r}")
    n = _axis_size(xs)
    xs = jax.tree.map(jnp.asarray, xs)
    if isinstance(strategy, SafeMap) and strategy.batch_size == 1 and (has_effects(boundary) or _fires(fn, xs)):
        ys = _map_elements(fn, xs, boundary)
    elif isinstance(strategy, SafeMap) and n > strategy.batch_size and (has_effects(boundary) or _fires(fn, xs)):
        ys = _map_chunks(lambda chunk: emit_lanes(boundary, jax.vmap(fn)(chunk)), xs, n, strategy.batch_size)
    elif isinstance(strategy, DedupGather):
        ys = _map_distinct(fn, xs, strategy, boundary)
    else:
        if isinstance(strategy, Vmap):
            _refuse_order(boundary)
        ys = emit_lanes(boundary, axis_dispatch(strategy, fn, xs))
    return ys if boundary is None or boundary.fuse is None else boundary.fuse(ys)


def execute_scan_axis(
    fn: Callable[[_Carry, Any], tuple[_Carry, Any]], init: _Carry, xs: Any, boundary: AxisBoundary | None = None
) -> tuple[_Carry, Any]:
    """Scan a function over the leading axis, with a boundary at its edge.

    The boundary sees each step's output, in order, and never the carry.

    Args:
        fn: `(carry, x) -> (carry, y)`, as in `jax.lax.scan`.
        init: The first carry; `CarryShape` leaves stand for zeros.
        xs: A pytree whose leaves are `(n, ...)`, with `n >= 1`.
        boundary: What happens at the axis's edge, or None.

    Returns:
        The last carry; and of the outputs `v = tap(y)`: `fuse(stack of v)` if the boundary has a fuse, else None if it
        has a sink, else the stack, leaves `(n, ...)`.

    Raises:
        ExecutorError: As in `execute_map_axis`.
        CarryMismatchError: If `fn` changes the carry's structure, shapes or dtypes.
        TypeError: If an argument is of the wrong kind, or `fn` does not return a pair.
        ValueError: If the axis is empty.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import AxisBoundary, execute_scan_axis
        >>> def running_sum(total, x):
        ...     return total + x, total + x
        >>> total, largest = execute_scan_axis(running_sum, 0, jnp.arange(5), AxisBoundary(fuse=jnp.max))
        >>> int(total), int(largest)
        (10, 10)
    """
    _check_call("fn", fn, boundary)
    _axis_size(xs)

    def step(carry: _Carry, x: Any) -> tuple[_Carry, Any]:
        result = fn(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"fn must return a pair (carry, y); it returned {type(result).__name__}")
        carry, y = result
        return carry, y if boundary is None else emit(boundary, y)

    carry, ys = safe_scan(step, init, xs)
    return carry, ys if boundary is None or boundary.fuse is None else boundary.fuse(ys)


def _fires(fn: Callable[[Any], Any], xs: Any) -> bool:
    """Whether a function of one element has side effects of its own, as one that runs an inner axis may."""
    element = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    return bool(jax.make_jaxpr(fn)(element).effects)


def _map_distinct(fn: Callable[[Any], Any], xs: Any, strategy: DedupGather, boundary: AxisBoundary | None) -> Any:
    """Map over the distinct elements, and pass the result of each original position through the boundary."""
    if _fires(fn, xs):
        raise ExecutorError(
            "fn has side effects, and on a DedupGather axis they would fire for each distinct element, and again for "
            "the padding, instead of for each element. Put them into the boundary of the axis, or map it by SafeMap."
        )
    if not has_effects(boundary) or strategy.gather_fn is not None:
        return emit_lanes(boundary, axis_dispatch(strategy, fn, xs))
    # Each position takes its result as its turn comes, so that what a sink takes is not stacked for all of them.
    distinct = axis_dispatch(dataclasses.replace(strategy, gather_fn=lambda ys, index_map: ys), fn, xs)
    index_map = jnp.asarray(strategy.index_map)
    return emit_lanes(boundary, index_map, lambda i: jax.tree.map(lambda y: y[i], distinct))


def _map_elements(fn: Callable[[Any], Any], xs: Any, boundary: AxisBoundary | None) -> Any:
    """Map over the axis one element at a time, `fn` without `jax.vmap`, under which JAX refuses ordered effects."""

    def of_element(x: Any) -> Any:
        # The boundary gets a stack of one, since a callable with a batching rule may have its effects in that rule.
        stack = jax.tree.map(lambda y: jnp.asarray(y)[None], fn(x))
        return jax.tree.map(lambda y: y[0], emit_lanes(boundary, stack))

    return jax.lax.map(of_element, xs)


def _map_chunks(run: Callable[[Any], Any], xs: Any, n: int, batch_size: int) -> Any:
    """Map a function of a chunk over the axis; the last chunk is shorter where `batch_size` does not divide it.

    The chunks of xtrax.tiling overlap instead, which would repeat the effects of the elements that they share.
    """
    whole = n - n % batch_size
    parts = []

    def run_at(start: jax.Array) -> Any:
        # Slicing inside the loop copies no more than a chunk; splitting xs beforehand would copy all of it.
        return run(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, batch_size), xs))

    outputs = jax.lax.map(run_at, jnp.arange(0, whole, batch_size))
    parts.append(jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), outputs))
    if whole < n:
        parts.append(run(jax.tree.map(lambda x: x[whole:], xs)))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *ys: jnp.concatenate(ys), *parts)


def _check_call(argument: str, fn: Any, boundary: Any) -> None:
    if not callable(fn):
        raise TypeError(f"{argument} must be callable; found {fn!r}")
    if not isinstance(boundary, AxisBoundary | None):
        raise TypeError(f"boundary must be an AxisBoundary or None; found {type(boundary).__name__}")


def _axis_size(xs: Any) -> int:
    """The common size of the leading axis."""
    leaves = jax.tree_util.tree_leaves_with_path(xs)
    if not leaves:
        raise ExecutorError("xs has no arrays, so it has no axis; give at least one leaf (n, ...)")
    sizes: dict[int, str] = {}
    for path, leaf in leaves:
        name = f"xs{jax.tree_util.keystr(path)}"
        if not hasattr(leaf, "shape"):
            raise TypeError(f"{name} must be an array; found {type(leaf).__name__}")
        if not leaf.shape:
            raise ExecutorError(f"{name} is a scalar and has no leading axis; every leaf must be (n, ...)")
        sizes.setdefault(leaf.shape[0], name)
    if len(sizes) > 1:
        found = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ExecutorError(f"the leaves of xs differ in the size of the leading axis: {found}")
    return next(iter(sizes))


def _refuse_order(boundary: AxisBoundary | None) -> None:
    for role in ("tap", "sink"):
        effect = getattr(boundary, role, None)
        if is_ordered(effect) and not is_batchable(effect):
            raise ExecutorError(
                f"the {role} is ordered, and Vmap runs all elements at once. Use SafeMap, whose chunks keep their "
                f"size, or execute_scan_axis, or make the {role} unordered."
            )
