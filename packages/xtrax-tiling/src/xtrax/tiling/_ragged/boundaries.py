"""The lengths to pad to that waste the least, for the lengths that there are."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xtrax.tiling._check import check_boundaries, check_int

_Int64s = npt.NDArray[np.int64]


def suggest_boundaries(lengths: Any, max_buckets: int, *, multiple_of: int = 1) -> tuple[int, ...]:
    """The boundaries that pad the elements of these lengths the least; how much that still is, `padding_waste` tells.

    Let `b[1], ..., b[d]` be the different lengths, and `C[j]` the number of elements up to the j-th. The best `k`
    boundaries for these elements cost `D[k, j] = min over i < j of D[k-1, i] + b[j] * (C[j] - C[i])`. The last term
    obeys the quadrangle inequality, so that the best `i` does not fall as `j` grows, and each `k` takes `O(d log d)`
    instead of `O(d**2)` (Yao, Efficient dynamic programming using quadrangle inequalities, 1980).

    Args:
        lengths: `(n,)` integers of at least 0, such as `[len(x) for x in items]`.
        max_buckets: how many boundaries there may be, at least 1. Each is one program to compile.
        multiple_of: what each boundary is a multiple of, such as a tile of the hardware.

    Returns:
        At most `max_buckets` boundaries, strictly ascending, the last one no shorter than the longest length. There
        are fewer only if fewer waste no more.

    Raises:
        TypeError: lengths or counts that are not integers (bools and floats are none).
        ValueError: no lengths, a negative length, a count below 1, or lengths of which the sum is past 2**62.

    >>> suggest_boundaries([3, 4, 4, 17, 30, 31], 2)
    (4, 31)
    >>> suggest_boundaries([3, 4, 4, 17, 30, 31], 3, multiple_of=8)
    (8, 24, 32)
    """
    max_buckets = check_int("max_buckets", max_buckets, 1)
    multiple_of = check_int("multiple_of", multiple_of, 1)
    values = _lengths(lengths)
    if (int(np.max(values)) + multiple_of) * values.size >= 1 << 62:
        raise ValueError(
            f"lengths has {values.size} entries of up to {np.max(values)}, to pad to a multiple of {multiple_of}; that "
            "sums to more than 2**62 elements, past what can be counted."
        )
    # A boundary is positive, so elements of length 0 are padded to the smallest one.
    sizes, counts = np.unique(-(-np.maximum(values, 1) // multiple_of) * multiple_of, return_counts=True)
    if sizes.size <= max_buckets:
        return tuple(sizes.tolist())
    before = np.concatenate([[0], np.cumsum(counts)])
    # cost[j]: of the j shortest sizes, in padded elements; one bucket pads them all to the longest.
    cost = np.concatenate([[0], sizes]) * before
    choices = []
    for _ in range(max_buckets - 1):
        cost, best = _one_more(cost, sizes, before)
        choices.append(best)
    boundaries = [int(sizes[-1])]
    end = sizes.size
    for best in reversed(choices):
        end = int(best[end])
        if end == 0:
            break
        boundaries.append(int(sizes[end - 1]))
    return tuple(reversed(boundaries))


def padding_waste(lengths: Any, boundaries: Sequence[int]) -> float:
    """The fraction of the padded elements that are padding, where each length is padded to the next boundary.

    Args:
        lengths: `(n,)` integers of at least 0.
        boundaries: the lengths padded to, strictly ascending and positive.

    Returns:
        `1 - sum(lengths) / sum(padded lengths)`, in [0, 1].

    Raises:
        TypeError: a length or boundary that is not an integer.
        ValueError: no lengths, a negative length, empty or unordered boundaries, or a length past the last boundary.

    >>> padding_waste([3, 4, 5], (4, 8))
    0.25
    """
    ascending = np.asarray(check_boundaries("boundaries", boundaries), dtype=np.int64)
    values = _lengths(lengths)
    bucket = np.searchsorted(ascending, values)
    if too_long := int(np.count_nonzero(bucket == ascending.size)):
        raise ValueError(
            f"{too_long} of the lengths, up to {np.max(values)}, are past the last boundary {ascending[-1]}; add a "
            "boundary of at least that length."
        )
    # As Python integers, which do not overflow.
    padded = sum(b * n for b, n in zip(ascending.tolist(), np.bincount(bucket).tolist(), strict=False))
    return 1 - sum(values.tolist()) / padded


def _lengths(lengths: Any) -> _Int64s:
    if isinstance(lengths, str) or not hasattr(lengths, "__len__"):
        raise TypeError(f"lengths must be a sequence of integers, but is {lengths!r} ({type(lengths).__name__}).")
    if len(lengths) == 0:
        raise ValueError("lengths is empty; give the length of at least one element.")
    if not hasattr(lengths, "dtype"):  # an array would take True for 1 and round 3.5
        lengths = [check_int(f"lengths[{i}]", length, 0) for i, length in enumerate(lengths)]
        if (longest := max(lengths)) >= 1 << 62:
            raise ValueError(f"lengths holds {longest}, but must be below 2**62.")
    values = np.asarray(lengths)
    if values.dtype.kind not in "iu":
        raise TypeError(f"lengths must hold integers, but has dtype {values.dtype}; lengths are whole and not NaN.")
    if values.ndim != 1:
        raise ValueError(f"lengths must have one dimension, but has shape {values.shape}; give one length for each.")
    if values.min() < 0:
        at = int(np.argmin(values))
        raise ValueError(f"lengths[{at}] is {values[at]}, but must be at least 0.")
    if values.max() >= 1 << 62:
        raise ValueError(f"lengths holds {np.max(values)}, but must be below 2**62.")
    return values.astype(np.int64)


def _one_more(cost: _Int64s, sizes: _Int64s, before: _Int64s) -> tuple[_Int64s, _Int64s]:
    """The costs with one boundary more, and how many of the sizes the others then cover.

    Every second column is solved first, then every second one between those, each among the choices that lie between
    those of its neighbours: one vectorised step for each of the `log2(d)` levels.
    """
    last = sizes.size
    new, best = np.zeros_like(cost), np.zeros_like(cost)
    stride = 1 << last.bit_length()
    while stride:
        columns = np.arange(stride, last + 1, 2 * stride)
        low = best[columns - stride]
        above = columns + stride
        high = np.where(above <= last, best[np.minimum(above, last)], last)
        high = np.minimum(high, columns - 1)
        widths = high - low + 1
        begins = np.cumsum(widths) - widths
        choices = np.arange(int(widths.sum())) + np.repeat(low - begins, widths)
        totals = cost[choices] - np.repeat(sizes[columns - 1], widths) * before[choices]
        if columns.size:
            least = np.minimum.reduceat(totals, begins)
            # The first of equal choices, which is monotone in the column.
            at = np.flatnonzero(totals == np.repeat(least, widths))
            best[columns] = choices[at[np.searchsorted(at, begins)]]
            new[columns] = least + sizes[columns - 1] * before[columns]
        stride //= 2
    return new, best
