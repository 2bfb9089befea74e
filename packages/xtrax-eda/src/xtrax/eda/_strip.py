"""An axis as a strip: left to right is one after another, top to bottom is at once."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, TypeAlias

from xtrax.eda._words import count_text, percent_text, plural
from xtrax.eda.types import AxisStats, BucketStats, DedupStats, PlanStats

Style: TypeAlias = Literal["fill", "hatch", "ghost"]
"""Computed; computed for nothing (padding, or twice); not computed, or not known."""

_MOST_BLOCKS = 48  # more would be narrower than the gaps between them
_MOST_LANES = 6
_GAP = 0.2  # of the width of a block


@dataclasses.dataclass(frozen=True)
class Mark:
    """A rectangle; its corner and size in fractions of the strip."""

    x: float
    y: float
    width: float
    height: float
    style: Style


def strip(axis: AxisStats, stats: PlanStats) -> list[Mark]:
    """The marks of one axis."""
    if axis.name in stats.dedup_stats:
        return list(_dedup(stats.dedup_stats[axis.name]))
    if axis.name in stats.bucket_stats:
        return list(_buckets(stats.bucket_stats[axis.name]))
    if axis.kind == "vectorized":
        return list(_lanes(0, 1, axis.cardinality)) if axis.cardinality else []
    if axis.kind == "chunked" and axis.steps:
        return list(_chunks(axis, axis.steps))
    if axis.kind == "sequential" and axis.steps:
        return [Mark(x, 0.35, width, 0.3, "fill") for x, width in _blocks(axis.steps)]
    if axis.strategy == "WhileCarry":
        return [Mark(x, 0.35, width, 0.3, "fill" if x < 0.2 else "ghost") for x, width in _blocks(24)]
    return [Mark(0, 0, 1, 1, "ghost")] if axis.cardinality else []


def caption(axis: AxisStats, stats: PlanStats) -> str:
    """What the strip shows, in a few words."""
    if axis.name in stats.dedup_stats:
        dedup = stats.dedup_stats[axis.name]
        padding = f" + {count_text(dedup.padded - dedup.unique)} padding" if dedup.padded > dedup.unique else ""
        parts = axis.steps or 1
        chunks = f" in {plural(parts, 'chunk')} of {count_text(axis.chunk)}" if parts > 1 else ""
        return f"{count_text(dedup.unique)} distinct{padding}{chunks}, {count_text(dedup.total - dedup.unique)} copied"
    if axis.name in stats.bucket_stats:
        bucket = stats.bucket_stats[axis.name]
        lengths = ", ".join(count_text(size) for size in bucket.boundaries[:6])
        more = ", …" if len(bucket.boundaries) > 6 else ""
        waste = "" if bucket.waste is None else f", {percent_text(bucket.waste)} padding"
        return f"to lengths {lengths}{more}{waste}"
    if axis.cardinality == 0:
        return "no elements"
    if axis.kind == "vectorized":
        return "all at once"
    if axis.kind == "chunked" and axis.steps:
        twice = (axis.computed or 0) - axis.cardinality
        again = f", {count_text(twice)} computed twice" if twice else ""
        return f"{plural(axis.steps, 'chunk')} of {count_text(axis.chunk)}{again}"
    if axis.strategy == "WhileCarry":
        return "until the condition fails"
    if axis.kind == "sequential":
        return "one after another"
    return f"{count_text(axis.batch_size)} at once"


def _blocks(count: int) -> Iterator[tuple[float, float]]:
    """`(x, width)` of blocks with gaps; past a limit each stands for several."""
    drawn = min(count, _MOST_BLOCKS)
    gap = 0 if drawn == 1 else _GAP
    for i in range(drawn):
        yield i / drawn, (1 - gap) / drawn


def _lanes(x: float, width: float, lanes: int, style: Style = "fill") -> Iterator[Mark]:
    """A block of elements that are computed at once."""
    drawn = min(lanes, _MOST_LANES)
    gap = 0 if drawn == 1 else _GAP
    for i in range(drawn):
        yield Mark(x, i / drawn, width, (1 - gap) / drawn, style)


def _chunks(axis: AxisStats, steps: int) -> Iterator[Mark]:
    size = axis.chunk
    blocks = list(_blocks(steps))
    x, width = blocks[0]
    twice = (axis.computed or 0) - axis.cardinality
    lanes = list(_lanes(x, width, size))
    again = -(-twice * len(lanes) // size) if len(blocks) == steps else 0  # rounded up: it never reads as none
    for i, mark in enumerate(lanes):
        # The second chunk computes the last of the first one again.
        yield dataclasses.replace(mark, style="hatch") if i >= len(lanes) - again else mark
    for x, width in blocks[1:]:
        yield from _lanes(x, width, size)


def _dedup(dedup: DedupStats) -> Iterator[Mark]:
    whole = max(dedup.total, dedup.padded)
    x, end = dedup.unique / whole, dedup.padded / whole
    yield from _lanes(0, x, dedup.unique)
    if end > x:
        yield from _lanes(x, end - x, dedup.unique, "hatch")
    if end < 1:
        yield Mark(end, 0, 1 - end, 1, "ghost")


def _buckets(bucket: BucketStats) -> Iterator[Mark]:
    uses = bucket.buckets[:_MOST_BLOCKS]
    longest = uses[-1].boundary
    if bucket.occupancy is None:
        for (x, width), use in zip(_blocks(len(uses)), uses, strict=True):
            height = max(use.boundary / longest, 0.08)
            yield Mark(x, 1 - height, width, height, "ghost")
        return
    total = sum(use.count or 0 for use in uses)
    x = 0.0
    for use in uses:
        if not use.count:
            continue
        width = use.count / total
        height = max(use.boundary / longest, 0.08)
        data = height * (1 - (use.waste or 0))
        gap = min(0.006, width * _GAP)
        if height > data:
            yield Mark(x, 1 - height, width - gap, height - data, "hatch")
        yield Mark(x, 1 - data, width - gap, data, "fill")
        x += width
