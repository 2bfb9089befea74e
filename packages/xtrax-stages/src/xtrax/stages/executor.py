"""Run one axis of a plan, with what happens at its edge."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from xtrax.stages._axis_run import Axis, run_map, run_scan
from xtrax.stages._effects import host_records, thread_result
from xtrax.stages._errors import ExecutorError
from xtrax.stages._host_call import NO_TOKEN
from xtrax.stages._host_record import outside_traces, run_watched
from xtrax.stages._place import Place
from xtrax.stages.boundaries import AxisBoundary
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry

__all__ = ["ExecutorError", "execute_map_axis", "execute_scan_axis"]

_Carry = TypeVar("_Carry")
_T = TypeVar("_T")

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
    axis = Axis(lambda x, place: (fn(x), NO_TOKEN), boundary, Place(), "", guard=True)

    def call() -> Any:
        return thread_result(*run_map(axis, xs, strategy, n))

    return _outermost(call, boundary, xs)


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
    n = _axis_size(xs)

    def step(carry: _Carry, x: Any, place: Place) -> tuple[_Carry, Any, Any]:
        result = fn(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"fn must return a pair (carry, y); it returned {type(result).__name__}")
        return *result, NO_TOKEN

    axis = Axis(lambda x, place: (x, NO_TOKEN), boundary, Place(), "")

    def call() -> tuple[_Carry, Any]:
        carry, ys, token = run_scan(axis, step, init, xs, n)
        return thread_result((carry, ys), token)

    return _outermost(call, boundary, (init, xs))


def _outermost(call: Callable[[], _T], boundary: AxisBoundary | None, arguments: Any) -> _T:
    """Make the call; where it is not part of a trace, wait for its host functions and raise what they raise."""
    records = host_records(boundary)
    return run_watched(call, records) if records and outside_traces(arguments) else call()


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
