"""Run a whole plan, with what happens at the edges of its axes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xtrax.stages._effects import axis_hooks, expected_elements, host_records, is_ordered
from xtrax.stages._errors import ExecutorError
from xtrax.stages._host_record import on_several_devices, outside_traces, run_watched
from xtrax.stages.boundaries import AxisBoundary
from xtrax.stages.topology import axis_boundaries_by_name, validate_plan_topology
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.execute import _run_plan
from xtrax.tiling.plan import AxisDecision, BatchPlan
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.strategy import Scan, WhileCarry

__all__ = ["execute_plan"]


def execute_plan(
    fn: Callable[..., Any] | None,
    plan: BatchPlan,
    *args: Any,
    axes: Sequence[Sequence[str] | None] | None = None,
    boundaries: Mapping[str, AxisBoundary | None] | Sequence[AxisBoundary | None] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Run a function of one element over all axes of a plan, with boundaries at their edges.

    It is `xtrax.tiling.execute_plan`, and at each axis, for each element, `v = tap(element)`, then `sink(v)`. The axis
    yields `fuse(stack of v)` if its boundary has a fuse, which is streamed if it is a `Reducer`; else None if it has a
    sink; else the stack. The element of an axis is what the axes inside it yield, and at a `Scan` axis the output of
    the transition, never the carry.

    **Order of effects.** They occur as in a nest of Python loops, in which `Scan` axes and the chunks of `SafeMap` axes
    are loops, and the elements that are computed at once (of `Vmap` and `DedupGather` axes, and of one chunk) form the
    innermost loop, row-major. So a `SafeMap` axis keeps its batch size under ordered effects. On a `DedupGather` axis
    they occur for all original positions. A `Bucket` axis goes through its buckets, the shortest first, a batch after
    another; `index` says which element is which. No padding or overlap reaches a tap, sink or fuse: under effects the
    last chunk of a `SafeMap` axis is shorter.

    **Exceptions.** A call outside any trace waits for its effects, and raises what a host function raised, itself, with
    a note of axis and element; nothing after it in order has run. Such a call also counts the elements that `HostTap`
    and `HostSink` took against those that were due. Inside `jax.jit` and the like JAX raises its own error, which
    carries the text.

    Args:
        fn: As in `xtrax.tiling.execute_plan`; and so are the other arguments, but for `boundaries`.
        plan: The plan.
        *args: The arguments.
        axes: For each argument the names of its leading dimensions, or None.
        boundaries: From an axis's name to its boundary; or one boundary, or None, for each axis in plan order.
        mesh: Devices over which the outermost axis is split. Effects must then be unordered, as they occur device by
            device, and at an edge: `fn` may have none of its own.
        key: A PRNG key, from which each element gets its own.

    Returns:
        The outputs, or with `Scan` axes the pair of outputs and carries by axis name.

    Raises:
        PlanTopologyError: If the plan and the boundaries cannot run together, or a boundary is for no axis of the plan.
        ExecutorError: If a strategy cannot be run, an ordered tap or sink, or an `fn` with side effects, is used with
            a mesh, a fuse needs outputs that are not collected, effects were lost, or a tap or sink does not return
            what it should.
        TypeError: If an argument is of the wrong kind.
        ValueError: As in `xtrax.tiling.execute_plan`.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import AxisBoundary, HostSink, execute_plan
        >>> from xtrax.tiling import AxisSpec, BatchPlanner, reducers
        >>> seed, row = AxisSpec("seed", 2, default_batch_size=2), AxisSpec("row", 6, default_batch_size=3)
        >>> plan = BatchPlanner().plan([seed, row])
        >>> kept = []
        >>> sink = HostSink(lambda value, index: kept.append((index, value.tolist())), ordered=True, batched=False)
        >>> execute_plan(
        ...     lambda seed, row: seed * row, plan, jnp.arange(2.0), jnp.arange(6.0), axes=[("seed",), ("row",)],
        ...     boundaries={"row": AxisBoundary(fuse=reducers.mean), "seed": AxisBoundary(sink=sink)},
        ... )
        >>> kept
        [((0,), 0.0), ((1,), 2.5)]
    """
    if not isinstance(plan, BatchPlan):
        raise TypeError(f"plan must be a BatchPlan of xtrax.tiling; found {type(plan).__name__}")
    decisions = plan.decisions
    names = [decision.spec.name for decision in decisions]
    by_name = _by_name(names, boundaries)
    validate_plan_topology(decisions, by_name)
    _check(decisions, by_name, mesh)
    hooks = axis_hooks(names, by_name, yields_carries=any(isinstance(d.strategy, Scan) for d in decisions))

    def call() -> Any:
        return _run_plan(fn, plan, args, axes, mesh, key, hooks)

    try:
        if host_records(list(by_name.values())) and outside_traces(fn, args, key):
            expected = expected_elements(decisions, by_name)
            several = mesh is not None or on_several_devices(fn, args, key)
            return run_watched(call, list(expected), expected, several_devices=several)
        return call()
    except DispatchRejected as error:
        raise ExecutorError(str(error)) from error


def _by_name(names: Sequence[str], boundaries: Any) -> dict[str, AxisBoundary]:
    """The boundaries that there are, by axis."""
    if isinstance(boundaries, Mapping):
        given = {name: boundary for name, boundary in boundaries.items() if boundary is not None}
    else:
        given = axis_boundaries_by_name(names, boundaries)
    for name, boundary in given.items():
        if not isinstance(boundary, AxisBoundary):
            raise TypeError(f"the boundary of axis {name!r} must be an AxisBoundary or None; found {boundary!r}")
    return given


def _check(decisions: Sequence[AxisDecision], by_name: Mapping[str, AxisBoundary], mesh: Any) -> None:
    for decision in decisions:
        name, boundary = decision.spec.name, by_name.get(decision.spec.name)
        if isinstance(decision.strategy, WhileCarry):
            raise ExecutorError(
                f"axis {name!r} is a WhileCarry, which steps a carry and has no elements for a function or a boundary; "
                "run it with xtrax.tiling.make_axis_dispatch, by itself"
            )
        if boundary is None:
            continue
        for role in ("tap", "sink"):
            if mesh is not None and is_ordered(getattr(boundary, role)):
                raise ExecutorError(
                    f"axis {name!r}: its {role} is ordered, and a mesh is given, whose devices run at the same time. "
                    f"Make the {role} unordered, and sort by the index that it gets; or leave out mesh."
                )
        collects = not isinstance(decision.strategy, Scan) or decision.strategy.collect_outputs
        if boundary.fuse is not None and not isinstance(boundary.fuse, Reducer) and not collects:
            raise ExecutorError(
                f"axis {name!r}: its fuse needs the stack of the outputs, and its Scan has collect_outputs=False. Use "
                "a Reducer of xtrax.tiling, which is streamed, or collect the outputs."
            )
