"""How many elements of an axis are copies."""

import numpy as np

from xtrax.eda._read import integer, integers, require, strategy_of
from xtrax.eda.types import DedupStats
from xtrax.tiling.dedup import get_k_bucket


def analyze_dedup(decision: object) -> DedupStats:
    """Count the copies among the elements of a deduplicated axis.

    Args:
        decision: an `AxisDecision` whose strategy is a `DedupGather`, such a strategy itself, or a `DedupSpec`, whose
            padding is what its strategy would have. Anything with the same attributes will do.

    Returns:
        The distinct, padded and total elements, and how often the distinct ones occur.

    Raises:
        TypeError: there is no `index_map`, or a field of the wrong type.
        ValueError: an `index_map` that is empty or out of range, or fewer computed than distinct elements.

    >>> from xtrax.tiling import DedupSpec
    >>> stats = analyze_dedup(DedupSpec("batch", [0, 1, 4], [0, 1, 1, 0, 2, 1], k=3))
    >>> stats.unique, stats.padded, stats.total, stats.ratio, stats.waste
    (3, 4, 6, 0.5, 0.25)
    >>> stats.copies  # one element occurs once, one twice, and one three times
    ((1, 1), (2, 1), (3, 1))
    """
    axis, strategy = strategy_of(decision)
    where = "decision" if strategy is decision else "decision.strategy"
    return dedup_stats(where, axis, strategy, getattr(getattr(decision, "spec", None), "cardinality", None))


def dedup_stats(where: str, axis: str | None, strategy: object, cardinality: int | None) -> DedupStats:
    """The statistics of a strategy; `where` is how messages call it."""
    of_axis = "" if axis is None else f" of axis {axis!r}"
    if not hasattr(strategy, "index_map"):
        raise TypeError(
            f"{where}{of_axis} must be a DedupGather or a DedupSpec, with .k and .index_map, but is a "
            f"{type(strategy).__name__}; other strategies compute every element."
        )
    unique = integer(f"{where}.k{of_axis}", require(where, strategy, "k"), 1)
    index_map = integers(f"{where}.index_map{of_axis}", require(where, strategy, "index_map"), 0)
    given = getattr(strategy, "k_bucket", None)
    padded = get_k_bucket(unique) if given is None else integer(f"{where}.k_bucket{of_axis}", given, unique)
    total = int(index_map.size)
    if total == 0:
        raise ValueError(f"{where}.index_map{of_axis} is empty; it needs one entry for each element.")
    if cardinality is not None and total != cardinality:
        raise ValueError(
            f"{where}.index_map{of_axis} has {total} entries, but the axis has cardinality {cardinality}; "
            "it needs one entry for each element."
        )
    if np.max(index_map) >= unique:
        raise ValueError(
            f"{where}.index_map{of_axis} must lie in [0, k) with k = {unique}, but holds {np.max(index_map)}."
        )
    occurrences = np.bincount(index_map, minlength=unique)
    copies, distinct = np.unique(occurrences[occurrences > 0], return_counts=True)
    return DedupStats(
        axis=axis,
        unique=unique,
        padded=padded,
        total=total,
        ratio=unique / total,
        waste=(padded - unique) / padded,
        saved=1 - padded / total,
        copies=tuple(zip(copies.tolist(), distinct.tolist(), strict=True)),
    )
