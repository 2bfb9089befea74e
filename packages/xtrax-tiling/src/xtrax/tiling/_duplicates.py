"""Rows that are equal byte for byte: hashed, grouped by hash, and then compared."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from xtrax.tiling._check import plural
from xtrax.tiling._host_arrays import check_readable

_BLOCK_BYTES = 1 << 19  # rows are read in blocks of this size, which stay in the cache between passes
_WORD = 8


def host_leaves(name: str, xs: Any) -> tuple[list[npt.NDArray[Any]], int]:
    """The leaves of a pytree as arrays on the host, and the size of the leading axis that they share.

    Args:
        name: what the caller calls `xs`, for messages.
        xs: a pytree of numpy arrays and addressable JAX arrays. Typed PRNG keys become their key data.

    Raises:
        TypeError: a leaf that is no array, is being traced, or whose values are not told by their bytes.
        ValueError: no leaves, a scalar leaf, an array with parts on other hosts, or sizes that differ.
    """
    named = [(f"{name}{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(xs)]
    if not named:
        raise ValueError(f"{name} has no leaves; give at least one array, whose leading axis is the one to look along.")
    leaves = [_host_leaf(leaf_name, leaf) for leaf_name, leaf in named]
    size = len(leaves[0])
    for (leaf_name, _), leaf in zip(named, leaves, strict=True):
        if len(leaf) != size:
            raise ValueError(
                f"{named[0][0]} has {plural(size, 'element')} along its leading axis, but {leaf_name} has {len(leaf)}; "
                "the leaves of one axis must agree."
            )
    return leaves, size


def group_rows(leaves: list[npt.NDArray[Any]], size: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Find the rows that are equal by the bytes of all leaves.

    Args:
        leaves: arrays with `size` rows along their leading axis.
        size: at least 1.

    Returns:
        `(first, groups)`: `(k,)` ascending positions, of the first row of each kind, and `(size,)`, for each row the
            position of its kind in `first`.
    """
    leaves = [leaf for leaf in leaves if _row_bytes(leaf)]
    leaders = _leaders(_row_hashes(leaves, size))
    if not _same_rows(leaves, leaders, size):
        # Two kinds of row share a hash, so the rows are sorted by their bytes instead.
        leaders = _leaders_by_bytes(leaves, size)
    is_first = leaders == np.arange(size)
    return np.flatnonzero(is_first), (np.cumsum(is_first) - 1)[leaders]


def _host_leaf(name: str, leaf: Any) -> npt.NDArray[Any]:
    check_readable(name, leaf, "the search for duplicates")
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be a numpy or JAX array, but is {leaf!r} ({type(leaf).__name__}).")
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    if array.dtype.hasobject or array.dtype.names is not None or array.dtype.char in "gG":
        raise TypeError(
            f"{name} has dtype {array.dtype}, whose values are not told by their bytes; give numbers, bools or "
            "fixed-width strings, each field as a leaf of its own."
        )
    if array.ndim == 0:
        raise ValueError(f"{name} is a scalar, and so has no leading axis to look along.")
    return array


def _row_bytes(leaf: npt.NDArray[Any]) -> int:
    return leaf.dtype.itemsize * int(np.prod(leaf.shape[1:], dtype=np.int64))


def _blocks(leaf: npt.NDArray[Any], size: int) -> Iterator[slice]:
    rows = max(1, _BLOCK_BYTES // _row_bytes(leaf))
    return (slice(start, min(start + rows, size)) for start in range(0, size, rows))


def _as_bytes(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """`(b, ...)` as the `(b, row bytes)` that it lies in; a copy only if the rows are not contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(len(rows), _row_bytes(rows))


def _as_words(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """`(b, ...)` as `(b, words)`, the bytes of each row filled up with zeros to whole words."""
    raw = _as_bytes(rows)
    if missing := -raw.shape[1] % _WORD:
        padded = np.zeros((len(raw), raw.shape[1] + missing), np.uint8)
        padded[:, : raw.shape[1]] = raw
        raw = padded
    return raw.view(np.uint64)


def _row_hashes(leaves: list[npt.NDArray[Any]], size: int) -> npt.NDArray[np.uint64]:
    """A 64-bit hash of each row: the sum of its words, each times an odd number of its own (multiply-shift).

    A sum of products mixes upwards only, so that words that differ in their high bits alone, such as those of small
    whole floats, would share the low bits of their hash. Hence the high bits are first folded into the low ones.

    Dietzfelbinger et al., A reliable randomized algorithm for the closest-pair problem, 1997.
    """
    hashes = np.zeros(size, np.uint64)
    rng = np.random.default_rng(0)
    for leaf in leaves:
        words = -(-_row_bytes(leaf) // _WORD)
        factors = rng.integers(0, 1 << 63, words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        for block in _blocks(leaf, size):
            row = _as_words(leaf[block])
            folded = row >> np.uint64(32)
            folded ^= row
            folded ^= folded >> np.uint64(16)
            hashes[block] += np.einsum("ij,j->i", folded, factors)
    return hashes


def _leaders(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """For each position the first one that has its hash, by a hash table without chains.

    In each round every position that is left writes itself into a slot that its hash chooses. The hash of whichever
    stays there is settled; those whose slot went to another hash choose anew. A few rounds do, each for a fraction of
    the positions of the one before, and together they take a tenth of the time of sorting.
    """
    size = hashes.size
    members = np.arange(size)
    settled = np.empty(size, np.intp)
    bits = size.bit_length() + 1
    rng = np.random.default_rng(1)
    left, keys = members, hashes
    while left.size:
        factor = rng.integers(0, 1 << 63, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        slots = ((keys * factor) >> np.uint64(64 - bits)).astype(np.intp)
        table = np.empty(1 << bits, np.intp)
        table[slots] = left
        winners = table[slots]
        settled[left] = winners
        lost = hashes[winners] != keys
        left, keys = left[lost], keys[lost]
    first = np.full(size, size)
    np.minimum.at(first, settled, members)
    return first[settled]


def _same_rows(leaves: list[npt.NDArray[Any]], leaders: npt.NDArray[np.intp], size: int) -> bool:
    """Whether every row equals its leader, byte for byte."""
    for leaf in leaves:
        for block in _blocks(leaf, size):
            others = leaders[block]
            moved = not np.array_equal(others, np.arange(block.start, block.stop))
            if moved and not np.array_equal(_as_bytes(leaf.take(others, 0, mode="clip")), _as_bytes(leaf[block])):
                return False
    return True


def _leaders_by_bytes(leaves: list[npt.NDArray[Any]], size: int) -> npt.NDArray[np.intp]:
    """For each position the first one that has its row, by sorting the rows themselves."""
    ends = list(itertools.accumulate((_row_bytes(leaf) for leaf in leaves), initial=0))
    rows = np.empty((size, ends[-1]), np.uint8)
    for leaf, (start, end) in zip(leaves, itertools.pairwise(ends), strict=True):
        rows[:, start:end] = _as_bytes(leaf)
    _, first, groups = np.unique(rows.view(f"V{ends[-1]}")[:, 0], return_index=True, return_inverse=True)
    return first[groups]
