"""Axes whose elements are independent: all of them, or the distinct ones, at once or a chunk at a time."""

import dataclasses
from collections.abc import Sequence

from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._plan.account import byte_text
from xtrax.tiling._plan.spec import AxisDecision, AxisSpec
from xtrax.tiling.strategy import AxisStrategy, DedupGather, SafeMap, Vmap


def by_size(spec: AxisSpec) -> AxisDecision:
    """All at once if there are at most `default_batch_size` elements, else chunks of that."""
    size, limit = spec.cardinality, spec.default_batch_size
    if size <= limit:
        return all_at_once(spec, f"cardinality {size} <= default_batch_size {limit}: all at once")
    return in_chunks(spec, limit, f"cardinality {size} > default_batch_size {limit}")


def by_limit(spec: AxisSpec, estimate: int, limit: int) -> AxisDecision:
    """All at once if that fits into the memory of the device, else chunks."""
    size = spec.cardinality
    need = f"all {size} at once need {byte_text(estimate)}"
    if estimate <= limit:
        return all_at_once(spec, f"{need}, within the device limit of {byte_text(limit)}")
    need = f"{need}, over the device limit of {byte_text(limit)}"
    if size > spec.default_batch_size:
        return in_chunks(spec, spec.default_batch_size, need)
    # The default would not narrow the axis, so it gets the share of its elements that the limit is of the estimate.
    share = size * limit // estimate
    chunk = max(share // spec.tile_granularity, 1) * spec.tile_granularity
    if chunk >= size:
        return all_at_once(spec, f"{need}, but no smaller chunk is a multiple of tile_granularity {chunk}")
    return in_chunks(spec, chunk, f"{need}, where about {share} of them fit")


def distinct_by_size(dedup: AxisDecision) -> AxisDecision:
    """A `DedupGather` of all distinct elements at once, if they are at most `default_batch_size`, else in chunks."""
    size, limit = computed(dedup.spec, dedup), dedup.spec.default_batch_size
    return dedup if size <= limit else in_chunks(dedup.spec, limit, f"{size} > default_batch_size {limit}", dedup=dedup)


def computed(spec: AxisSpec, dedup: AxisDecision | None) -> int:
    """How many elements of an axis are computed; `dedup` is its decision for a `DedupGather`, if it is one."""
    if dedup is None or not isinstance(dedup.strategy, DedupGather):
        return spec.cardinality
    return dedup.strategy.k_bucket


def all_at_once(spec: AxisSpec, reasoning: str, dedup: AxisDecision | None = None) -> AxisDecision:
    """`Vmap`, or what `dedup` decided, with all elements at once, and why."""
    return _decision(spec, None, reasoning, dedup)


def in_chunks(
    spec: AxisSpec, limit: int, because: str, numbers: str = "", dedup: AxisDecision | None = None
) -> AxisDecision:
    """`SafeMap`, or what `dedup` decided in chunks, why, and how the chunks come out."""
    size = computed(spec, dedup)
    chunks = Chunks.balanced(size, limit)
    reasoning = f"{because}: {chunks.count} chunks of {chunks.size}"
    if size % limit:
        how = "balanced" if chunks.size < limit else "the first two overlapping"
        reasoning += f", {how} because {size} is not a multiple of {limit} (remainder {size % limit})"
    if chunks.overlap:
        reasoning += f", elements computed twice: {chunks.overlap}"
    return _decision(spec, limit, reasoning + numbers, dedup)


def _decision(spec: AxisSpec, limit: int | None, reasoning: str, dedup: AxisDecision | None) -> AxisDecision:
    """Of at most `limit` elements at once, None for all; why they are deduplicated comes first."""
    strategy: AxisStrategy = Vmap() if limit is None else SafeMap(limit)
    if dedup is not None and isinstance(dedup.strategy, DedupGather):
        strategy = dataclasses.replace(dedup.strategy, batch_size=limit)
        reasoning = f"{dedup.reasoning}; {reasoning}"
    return AxisDecision(spec, computed(spec, dedup) if limit is None else limit, reasoning, strategy)


def remainder_text(decisions: Sequence[AxisDecision]) -> str:
    """The warning about axes whose chunks do not come out even at their batch size."""
    sentences = []
    twice = 0
    for decision in decisions:
        spec, limit = decision.spec, decision.batch_size
        chunks = Chunks.balanced(spec.cardinality, limit)
        twice += chunks.overlap
        sentences.append(
            f"axis {spec.name!r} runs as {chunks.count} chunks of {chunks.size}, since {spec.cardinality} elements are "
            f"no multiple of {limit} (remainder {spec.cardinality % limit})."
        )
    repeated = f" Elements computed twice: {twice}, or none where the function has side effects." if twice else ""
    return f"{' '.join(sentences)} Results are those of jax.vmap; nothing needs to be done.{repeated}"
