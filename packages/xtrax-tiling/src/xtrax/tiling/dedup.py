"""Declare that most elements of an axis are copies, so that each distinct one is computed once."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from xtrax.tiling._check import check_callable, check_int, check_name
from xtrax.tiling._duplicates import group_rows, host_leaves
from xtrax.tiling.strategy import DedupFn, DedupGather, GatherFn, check_representatives, index_array


def get_k_bucket(k: int) -> int:
    """How many elements to compute for `k` distinct ones, so that few sizes are compiled.

    Powers of two up to 256; above, eight steps to the octave (288, 320, ..., 512, 576, ...), so that the padding is
    below 12.5 % of `k` and the number of sizes still grows with its logarithm.

    Args:
        k: the number of distinct elements, at least 1.

    Returns:
        The smallest such size that is no smaller than `k`.

    Raises:
        TypeError: `k` is not an integer (a bool is none).
        ValueError: `k` is below 1.

    >>> [get_k_bucket(k) for k in (1, 3, 200, 257, 1000)]
    [1, 4, 256, 288, 1024]
    """
    k = check_int("k", k, 1)
    octave = 1 << (k - 1).bit_length()  # the smallest power of two that is no smaller than k
    if octave <= 256:
        return octave
    step = octave // 16  # an eighth of the octave from octave / 2 to octave
    return -(-k // step) * step


@dataclasses.dataclass(frozen=True, eq=False)
class DedupSpec:
    """Which elements of an axis are distinct, and which of those each element equals.

    Args:
        axis_name: the axis, by the name of its `AxisSpec`.
        unique_indices: `(k,)` integers, the position of each distinct element.
        index_map: `(n,)` integers, for each element the position in `unique_indices` of the one that it equals.
        k: how many are distinct.
        dedup_fn: `(xs, unique_indices) -> xs`, selects them; None takes them along the leading axis.
        gather_fn: `(ys, index_map) -> ys`, hands out the results; None takes them along the leading axis.

    Raises:
        TypeError: arrays that are not integer, a `k` that is not an integer, a function that is not callable.
        ValueError: `k` below 1 or not the number of `unique_indices`; entries of these that repeat or are not in
            `[0, n)`; an `index_map` that does not cover exactly `[0, k)`, or in which a distinct element does not
            stand for itself: `index_map[unique_indices[i]]` is `i`.

    >>> DedupSpec("batch", np.array([0, 2]), np.array([0, 0, 1, 0]), k=2).to_dedup_gather().k_bucket
    2
    """

    axis_name: str
    unique_indices: npt.NDArray[np.integer]
    index_map: npt.NDArray[np.integer]
    k: int
    dedup_fn: DedupFn | None = None
    gather_fn: GatherFn | None = None

    def __post_init__(self) -> None:
        """Store read-only int32 copies, and check that they fit together."""
        check_name("axis_name", self.axis_name)
        object.__setattr__(self, "k", check_int("k", self.k, 1))
        unique = index_array("unique_indices", self.unique_indices)
        mapping = index_array("index_map", self.index_map)
        object.__setattr__(self, "unique_indices", unique)
        object.__setattr__(self, "index_map", mapping)
        if unique.size != self.k:
            raise ValueError(f"k is {self.k}, but unique_indices has {unique.size} entries; they must be equal.")
        ordered = np.sort(unique)
        if np.any(ordered[1:] == ordered[:-1]):
            raise ValueError(f"unique_indices names an element twice: {_short(unique)}; each is distinct.")
        # Counting is several times faster than sorting a long index_map, once no entry is past k.
        if np.any(mapping >= self.k) or not np.all(np.bincount(mapping, minlength=self.k)):
            stray = np.setxor1d(mapping, np.arange(self.k))
            raise ValueError(
                f"index_map must cover exactly [0, k) with k = {self.k}, but {_short(stray)} "
                "is missing from it or out of range."
            )
        check_representatives(unique, mapping, self.k)
        if self.dedup_fn is not None:
            check_callable("dedup_fn", self.dedup_fn, "(xs, unique_indices) -> xs")
        if self.gather_fn is not None:
            check_callable("gather_fn", self.gather_fn, "(ys, index_map) -> ys")

    @property
    def duplicate_fraction(self) -> float:
        """The fraction of the elements that are copies of an earlier one, in [0, 1)."""
        return 1 - self.k / self.index_map.size

    def to_dedup_gather(self, batch_size: int | None = None) -> DedupGather:
        """The strategy, with `unique_indices` padded to `get_k_bucket(k)` by repeating the last.

        Args:
            batch_size: distinct elements computed at once, at least 1; None for all.

        Raises:
            TypeError: `batch_size` is neither an integer nor None (a bool is none).
            ValueError: `batch_size` is below 1.
        """
        k_bucket = get_k_bucket(self.k)
        padded = np.pad(self.unique_indices, (0, k_bucket - self.k), mode="edge")
        return DedupGather(padded, self.index_map, self.k, k_bucket, self.dedup_fn, self.gather_fn, batch_size)


def find_duplicates(xs: Any, axis_name: str = "batch") -> DedupSpec:
    """Find the elements that are equal byte for byte, so that each distinct one is computed once.

    An element is the row of every leaf at one position of the leading axis. Rows are equal if all their bytes are:
    NaNs by their bits, and -0.0 is not 0.0. The first of equal rows represents them, and the order is kept. Rows are
    hashed in blocks and each is then compared with its representative, so that a collision of hashes costs time (the
    rows are sorted instead) but never a wrong answer. Besides the hashes and the indices nothing is copied, except
    blocks of what is not contiguous; JAX arrays on an accelerator are brought to the host.

    Args:
        xs: a pytree of numpy arrays and addressable JAX arrays, each `(n, ...)`, with `n` of at least 1. Typed PRNG
            keys count by their key data.
        axis_name: the axis, by the name of its `AxisSpec`.

    Returns:
        A spec with `unique_indices` ascending. Its `duplicate_fraction` tells whether using it can pay.

    Raises:
        TypeError: a leaf that is no array, is being traced or masked, or has a dtype whose values are not told by
            their bytes (objects, structured dtypes, long doubles).
        ValueError: no leaves, a scalar leaf, leading sizes that differ, no elements, or an array with parts on other
            hosts.

    >>> spec = find_duplicates({"tokens": np.array([[7, 1], [3, 3], [7, 1], [3, 3], [7, 1]])})
    >>> spec.unique_indices.tolist(), spec.index_map.tolist(), spec.duplicate_fraction
    ([0, 1], [0, 1, 0, 1, 0], 0.6)
    """
    check_name("axis_name", axis_name)
    leaves, size = host_leaves("xs", xs)
    if size == 0:
        raise ValueError("xs has no elements along its leading axis, so there is none to represent; skip the search.")
    first, groups = group_rows(leaves, size)
    return DedupSpec(axis_name, first, groups, k=first.size)


def _short(values: Any) -> str:
    """The first few entries, as text."""
    shown = ", ".join(str(value) for value in values[:5])
    return f"[{shown}{', ...' if len(values) > 5 else ''}]"
