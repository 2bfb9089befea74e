"""A plan in numbers and words."""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from xtrax.eda._bucket import bucket_stats
from xtrax.eda._dedup import dedup_stats
from xtrax.eda._read import Decision, integer, read_memory, read_plan, strategy_name
from xtrax.eda._summary import verdict_of
from xtrax.eda._words import byte_text, ceil_div, count_text, percent_text, plural
from xtrax.eda.types import AxisStats, BucketStats, DedupStats, Kind, MemoryStats, PlanLike, PlanStats

_KINDS: dict[str, Kind] = {
    "Vmap": "vectorized",
    "SafeMap": "chunked",
    "Scan": "sequential",
    "WhileCarry": "sequential",
    "DedupGather": "deduplicated",
    "Bucket": "padded",
}
_TIGHT = 0.95  # above this fraction of the budget, an allocator's fragmentation may decide


def extract_plan_stats(plan: PlanLike, *, lengths: Mapping[str, object] | None = None) -> PlanStats:
    """Read off a plan how each axis is run, what it costs, and what is wrong with its memory.

    Args:
        plan: what `BatchPlanner.plan` returned, the `.plan` of a `BudgetInfeasibleError`, or any object with the same
            attributes.
        lengths: by name, for axes with buckets: `(n,)` integers, the length of each element.

    Returns:
        The statistics; the reasoning of each axis is the plan's own.

    Raises:
        TypeError: no plan, or an attribute of the wrong type.
        ValueError: duplicate or empty names, negative sizes, or lengths that do not fit the axes.

    >>> from xtrax.tiling import AxisSpec, BatchPlanner
    >>> plan = BatchPlanner().plan([AxisSpec("model", 4, 8), AxisSpec("batch", 128, 32)])
    >>> stats = extract_plan_stats(plan)
    >>> stats.strategy_counts, stats.sequential_steps, stats.elements_at_once
    ({'Vmap': 1, 'SafeMap': 1}, 4, 128)
    """
    decisions = read_plan(plan)
    names = [decision.name for decision in decisions]
    if lengths is not None and not isinstance(lengths, Mapping):
        raise TypeError(
            f"lengths must map axis names to the lengths of their elements, but is a {type(lengths).__name__}; "
            "write lengths={'name': lengths}."
        )
    lengths = dict(lengths or {})
    strategies = {decision.name: strategy_name(decision.strategy) for decision in decisions}
    padded = [name for name in names if strategies[name] == "Bucket"]
    for name in lengths:
        if name not in padded:
            raise ValueError(f"lengths names axis {name!r}, which has no buckets; those that do are {padded}.")

    dedups: dict[str, DedupStats] = {}
    buckets: dict[str, BucketStats] = {}
    for decision in decisions:
        if strategies[decision.name] == "DedupGather":
            dedups[decision.name] = dedup_stats("strategy", decision.name, decision.strategy, decision.cardinality)
        elif strategies[decision.name] == "Bucket":
            buckets[decision.name] = bucket_stats(
                "strategy", decision.name, decision.strategy, decision.cardinality, lengths.get(decision.name)
            )
    memory = read_memory(plan, names)
    axes = tuple(_axis(d, strategies[d.name], buckets.get(d.name), dedups.get(d.name), memory) for d in decisions)
    return PlanStats(
        axes=axes,
        strategy_counts=dict(Counter(strategies.values())),
        total_axes=len(axes),
        memory_warnings=_memory_warnings(axes, memory),
        dedup_stats=dedups,
        bucket_stats=buckets,
        memory=memory,
    )


def explain_plan(plan: PlanLike, *, lengths: Mapping[str, object] | None = None) -> PlanStats:
    """The same as `extract_plan_stats`, with a reason for every axis.

    Args:
        plan: as for `extract_plan_stats`.
        lengths: as for `extract_plan_stats`.

    Returns:
        The statistics. Where the plan gives no reason, what its strategy does stands in for one.

    Raises:
        TypeError: as `extract_plan_stats`.
        ValueError: as `extract_plan_stats`.

    >>> from xtrax.tiling import AxisSpec, BatchPlanner
    >>> print(explain_plan(BatchPlanner().plan([AxisSpec("batch", 128, 32)])))
    1 axis, the outermost first
    batch: 128 elements, SafeMap, 32 at once, 4 steps
        cardinality 128 > default_batch_size 32: 4 chunks of 32
    """
    stats = extract_plan_stats(plan, lengths=lengths)
    axes = tuple(
        axis if axis.reasoning else dataclasses.replace(axis, reasoning=describe(axis, stats)) for axis in stats.axes
    )
    return dataclasses.replace(stats, axes=axes)


def describe(axis: AxisStats, stats: PlanStats) -> str:
    """What happens along an axis, in a sentence."""
    size, at_once = count_text(axis.cardinality), count_text(axis.batch_size)
    if axis.kind == "vectorized":
        return f"All {plural(axis.cardinality, 'element')} at once."
    if axis.kind == "chunked" and axis.steps is not None:
        text = f"{plural(axis.steps, 'chunk')} of {plural(axis.chunk, 'element')}, one after another"
        twice = (axis.computed or 0) - axis.cardinality
        return f"{text}; the first two overlap, so {count_text(twice)} are computed twice." if twice else f"{text}."
    if axis.strategy == "WhileCarry":
        return "A carry is stepped until its condition fails."
    if axis.kind == "sequential":
        return f"{plural(axis.cardinality, 'element')} one after another, with a carry."
    if axis.kind == "deduplicated":
        dedup = stats.dedup_stats[axis.name]
        padding = f" with {count_text(dedup.padded - dedup.unique)} of padding" if dedup.padded > dedup.unique else ""
        parts = axis.steps or 1
        chunks = f" in {plural(parts, 'chunk')} of {plural(axis.chunk, 'element')}" if parts > 1 else ""
        how = f"each is computed once{padding}{chunks}, the others copy it"
        return f"{count_text(dedup.unique)} distinct of {size}: {how}."
    if axis.kind == "padded":
        bucket = stats.bucket_stats[axis.name]
        waste = "" if bucket.waste is None else f"; {percent_text(bucket.waste)} of what is computed is padding"
        return f"Padded on the host to {len(bucket.boundaries)} lengths, {at_once} elements at once{waste}."
    return f"{axis.strategy}, {at_once} of {size} elements at once."


def _axis(
    decision: Decision,
    strategy: str,
    bucket: BucketStats | None,
    dedup: DedupStats | None,
    memory: MemoryStats | None,
) -> AxisStats:
    kind = _KINDS.get(strategy, "other")
    steps, computed = _cost(decision, strategy, bucket, dedup)
    bytes_ = decision.memory
    if bytes_ is None and memory is not None and decision.name in memory.slope_by_axis:
        bytes_ = round(memory.slope_by_axis[decision.name] * decision.batch_size)
    return AxisStats(
        name=decision.name,
        strategy=strategy,
        kind=kind,
        cardinality=decision.cardinality,
        batch_size=decision.batch_size,
        steps=steps,
        computed=computed,
        reasoning=decision.reasoning,
        memory_estimate_bytes=bytes_,
        tile_granularity=decision.tile_granularity,
    )


def _cost(
    decision: Decision, strategy: str, bucket: BucketStats | None, dedup: DedupStats | None
) -> tuple[int | None, int | None]:
    """How many turns one after another, and how many elements are computed in them."""
    size, at_once = decision.cardinality, decision.batch_size
    if strategy == "SafeMap":
        if at_once == 0:
            raise ValueError(f"axis {decision.name!r} is chunked with batch_size 0; a chunk has at least 1 element.")
        return _chunks(size, at_once)
    if strategy == "Vmap":
        return min(size, 1), size
    if strategy == "DedupGather" and dedup is not None:
        limit = getattr(decision.strategy, "batch_size", None)
        where = f"strategy.batch_size of axis {decision.name!r}"
        return _chunks(dedup.padded, dedup.padded if limit is None else integer(where, limit, 1))
    if strategy == "Scan":
        return size, size
    if strategy == "Bucket" and bucket is not None and bucket.occupancy is not None and at_once:
        batches = sum(ceil_div(count, at_once) for count in bucket.occupancy)
        return batches, batches * at_once  # a partial batch is filled up
    return None, None


def _chunks(size: int, at_once: int) -> tuple[int, int]:
    """How many chunks, and how many elements in them: they are balanced, and one overlaps where they are not even."""
    chunks = ceil_div(size, at_once)
    return chunks, chunks * ceil_div(size, chunks) if chunks else 0


def _memory_warnings(axes: tuple[AxisStats, ...], memory: MemoryStats | None) -> tuple[str, ...]:
    if memory is None or memory.budget is None:
        return ()
    budget = byte_text(memory.budget)
    warnings = []
    if memory.over:
        warnings.append(verdict_of(memory)[1])
    elif memory.estimate > _TIGHT * memory.budget:
        warnings.append(
            f"The plan needs {byte_text(memory.estimate)} of {budget}: {byte_text(memory.budget - memory.estimate)} "
            "is left for whatever else is on the device."
        )
    if memory.fixed_bytes is not None and memory.fixed_bytes > memory.budget:
        warnings.append(
            f"What no batch size changes, {byte_text(memory.fixed_bytes)}, is over the budget by itself; "
            "only a larger budget or smaller arguments and outputs can help."
        )
    warnings += [
        f"Axis {axis.name!r} alone needs {byte_text(axis.memory_estimate_bytes)} at batch size "
        f"{count_text(axis.batch_size)}, over the budget of {budget}."
        for axis in axes
        if axis.memory_estimate_bytes is not None and axis.memory_estimate_bytes > memory.budget
    ]
    return tuple(warnings)
