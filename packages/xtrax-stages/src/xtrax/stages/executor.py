"""Run one axis of a plan, with what happens at its edge."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from xtrax.stages._effects import axis_hooks, host_records, is_batchable, is_ordered
from xtrax.stages._errors import ExecutorError
from xtrax.stages._host_record import on_several_devices, outside_traces, run_watched
from xtrax.stages.boundaries import AxisBoundary
from xtrax.stages.plan import execute_plan
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.execute import _run_plan
from xtrax.tiling.plan import AxisDecision, AxisSpec, BatchPlan
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry

__all__ = ["ExecutorError", "execute_map_axis", "execute_plan", "execute_scan_axis"]

_Carry = TypeVar("_Carry")

_AXIS = "leading"
"""What the only axis of a plan is called."""

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

    A `HostTap` or `HostSink` runs on every strategy, ordered too, and takes the elements that are computed at once by
    one call, with their numbers in this axis; the `jax.vmap`s around this call number its lanes in columns before. For
    a nest whose axes are all numbered, use `execute_plan`. Outside any trace this call waits for them, and raises what
    one of them raised. They are the identity for derivatives. An axis that yields None refuses these, and its place in
    a loop that is differentiated, since nothing would depend on its effects.

    A fuse that is a `Reducer` takes the elements chunk by chunk, so that they are never stacked.

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
            sink returns anything, `fn` itself has effects on a `DedupGather` axis, effects are differentiated that
            would be lost (when that is traced), or a host function is in use by another thread.
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
    if isinstance(strategy, Vmap):
        _refuse_order(boundary)
    xs = jax.tree.map(jnp.asarray, xs)
    try:
        return _run(fn, strategy, n, xs, boundary)
    except DispatchRejected as error:
        raise ExecutorError(str(error).replace(f"the DedupGather axis {_AXIS!r}", "a DedupGather axis")) from error


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
    if n == 0:
        raise ValueError("the axis has no elements, and execute_scan_axis needs at least one step.")
    ys, carries = _run(None, Scan(transition=_Step(fn), init=init), n, jax.tree.map(jnp.asarray, xs), boundary)
    return carries[_AXIS], ys


@dataclasses.dataclass(eq=False)
class _Step:
    """The user's step, which must return a pair."""

    fn: Callable[[Any, Any], Any]

    # Programs are kept by what can be hashed, and what this function reads may change between calls.
    __hash__ = None

    def __call__(self, carry: Any, x: Any) -> tuple[Any, Any]:
        result = self.fn(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"fn must return a pair (carry, y); it returned {type(result).__name__}")
        return result


def _run(fn: Any, strategy: AxisStrategy, n: int, xs: Any, boundary: AxisBoundary | None) -> Any:
    """Run a plan of one axis; where that is not part of a trace, wait for host functions and raise what they raise."""
    spec = AxisSpec(_AXIS, cardinality=n, default_batch_size=max(n, 1))
    plan = BatchPlan((AxisDecision(spec, max(n, 1), "the only axis", strategy),))
    hooks = axis_hooks([_AXIS], {_AXIS: boundary}, yields_carries=isinstance(strategy, Scan))

    def call() -> Any:
        return _run_plan(fn, plan, (xs,), None, None, None, hooks)

    records = host_records([boundary])
    if not records or not outside_traces(xs):
        return call()
    several = on_several_devices(fn, vars(strategy), xs)
    return run_watched(call, records, dict.fromkeys(records, n), several_devices=several)


def _refuse_order(boundary: AxisBoundary | None) -> None:
    for role in ("tap", "sink"):
        effect = getattr(boundary, role, None)
        if is_ordered(effect) and not is_batchable(effect):
            raise ExecutorError(
                f"the {role} is ordered, and Vmap runs all elements at once. Use SafeMap, whose chunks keep their "
                f"size, or execute_scan_axis, or make the {role} unordered or a Host{role.capitalize()}."
            )


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
