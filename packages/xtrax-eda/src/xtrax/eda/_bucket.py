"""How elements of differing length fall into buckets, and how much of them is padding."""

import itertools

import numpy as np
import numpy.typing as npt

from xtrax.eda._read import integers, require, strategy_of
from xtrax.eda.types import BucketStats, BucketUse
from xtrax.tiling.bucket import select_bucket


def analyze_bucket(decision: object, lengths: object = None) -> BucketStats:
    """Say how large the padding of an axis can be, and with lengths how large it is.

    Args:
        decision: an `AxisDecision` whose strategy is a `Bucket`, or such a strategy itself. Anything with the same
            attributes will do.
        lengths: `(n,)` integers, the length of each element of the axis. A sample of them can be given with a
            strategy, which has no cardinality to hold it against.

    Returns:
        The buckets; with lengths their occupancy and waste.

    Raises:
        TypeError: there are no `boundaries`, or lengths that are not integers (bools are none).
        ValueError: boundaries that are empty or not strictly ascending, a negative length, one past the last boundary,
            or another number of lengths than the axis has elements.

    >>> from xtrax.tiling import Bucket
    >>> stats = analyze_bucket(Bucket((4, 8)), lengths=[3, 4, 5])
    >>> stats.occupancy, stats.data, stats.padded, stats.waste
    ((2, 1), 12, 16, 0.25)
    >>> analyze_bucket(Bucket((4, 8))).worst_waste  # an element of length 1, padded to 4
    0.75
    """
    axis, strategy = strategy_of(decision)
    where = "decision" if strategy is decision else "decision.strategy"
    return bucket_stats(where, axis, strategy, getattr(getattr(decision, "spec", None), "cardinality", None), lengths)


def bucket_stats(where: str, axis: str | None, strategy: object, total: int | None, lengths: object) -> BucketStats:
    """The statistics of a strategy; `where` is how messages call it."""
    of_axis = "" if axis is None else f" of axis {axis!r}"
    if not hasattr(strategy, "boundaries"):
        raise TypeError(
            f"{where}{of_axis} must be a Bucket, with .boundaries, but is a {type(strategy).__name__}; "
            "other strategies pad no elements."
        )
    boundaries = integers(f"{where}.boundaries{of_axis}", require(where, strategy, "boundaries"), 1)
    if boundaries.size == 0:
        raise ValueError(f"{where}.boundaries{of_axis} is empty; give at least one length to pad to.")
    sizes = tuple(boundaries.tolist())
    if any(after <= before for before, after in itertools.pairwise(sizes)):
        raise ValueError(f"{where}.boundaries{of_axis} must be strictly ascending, but is {sizes}.")
    shortest = [1, *(size + 1 for size in sizes[:-1])]
    uses = [BucketUse(size, low, worst_waste=(size - low) / size) for size, low in zip(sizes, shortest, strict=True)]
    worst = max(use.worst_waste for use in uses)
    if lengths is None:
        return BucketStats(axis, sizes, total, tuple(uses), worst)

    known = integers(f"lengths{of_axis}", lengths, 0)
    if total is not None and known.size != total:
        raise ValueError(
            f"lengths{of_axis} has {known.size} entries, but the axis has cardinality {total}; give one for "
            "each element, or pass the strategy alone to analyze_bucket to look at a sample of them."
        )
    values, counts = np.unique(known, return_counts=True)
    uses = _fill(uses, values, counts)
    data, padded = sum(use.data or 0 for use in uses), sum(use.padded or 0 for use in uses)
    return BucketStats(
        axis,
        sizes,
        int(known.size),
        tuple(uses),
        worst,
        occupancy=tuple(use.count or 0 for use in uses),
        data=data,
        padded=padded,
        waste=(padded - data) / padded if padded else 0.0,
        lengths=tuple(zip(values.tolist(), counts.tolist(), strict=True)),
    )


def _fill(uses: list[BucketUse], values: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[BucketUse]:
    """The buckets with the distinct lengths in them, Python integers so that no sum overflows."""
    sizes = [use.boundary for use in uses]
    count, data = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    for value, number in zip(values.tolist(), counts.tolist(), strict=True):
        size = select_bucket(value, sizes)
        count[size] += number
        data[size] += number * value
    filled = []
    for use in uses:
        size = use.boundary
        padded = count[size] * size
        waste = (padded - data[size]) / padded if padded else 0.0
        filled.append(BucketUse(size, use.shortest, use.worst_waste, count[size], data[size], padded, waste))
    return filled
