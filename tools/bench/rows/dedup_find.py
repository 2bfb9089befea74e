"""How fast duplicates are found."""

from collections.abc import Iterator

import numpy as np

from tools.bench.harness import Line, Row, compare_times
from xtrax.tiling import find_duplicates

_ROWS, _WIDTH, _DISTINCT = 200_000, 64, 20_000


def _measure() -> Iterator[Line]:
    rng = np.random.default_rng(0)
    distinct = rng.standard_normal((_DISTINCT, _WIDTH), dtype=np.float32)
    # Every one of them occurs, at a random place.
    xs = distinct[rng.permutation(np.arange(_ROWS) % _DISTINCT)]

    def found():
        spec = find_duplicates(xs)
        return spec.unique_indices, spec.index_map

    def by_numpy():
        _, first, groups = np.unique(xs, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first)  # numpy sorts by value, and the first occurrence comes first here
        return first[order].astype(np.int32), np.argsort(order)[groups.ravel()].astype(np.int32)

    times = compare_times(found, by_numpy, repeats=7)
    yield Line("dedup-find", 1 / times.ratio, 20, at_least=True, detail=str(times))
    yield Line("dedup-find/GB/s", xs.nbytes / times.work / 1e9, 0.8, at_least=True, detail=f"{xs.nbytes / 1e6:.1f} MB")


ROW = Row(
    "dedup-find",
    f"find_duplicates of {_ROWS} rows of {_WIDTH} float32, {_DISTINCT} of them distinct",
    "np.unique(axis=0), as often as much faster",
    _measure,
)
