"""How the outermost axis of a plan is cut into tiles."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xtrax.stages import AxisBoundary
from xtrax.tiling import DedupGather, SafeMap
from xtrax.tiling.dedup import get_k_bucket
from xtrax.tiling.plan import AxisDecision
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.strategy import Bucket

_TILE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Rows of the outermost axis, `tile_rows` to a tile; the last one may be shorter."""

    rows: int
    tile_rows: int

    def __len__(self) -> int:
        """How many tiles there are."""
        return -(-self.rows // self.tile_rows)

    def span(self, tile: int) -> tuple[int, int]:
        """The first row of a tile, and the one after its last."""
        return tile * self.tile_rows, min(self.rows, (tile + 1) * self.tile_rows)

    def size(self, tile: int) -> int:
        """How many rows a tile has."""
        start, stop = self.span(tile)
        return stop - start

    @property
    def shapes(self) -> tuple[int, ...]:
        """The sizes that occur: one program each."""
        return tuple(dict.fromkeys(self.size(tile) for tile in (0, len(self) - 1))) if self.rows else ()


def check_tile_size(tile_size: Any) -> int | None:
    """Return it as an int, or None.

    Raises:
        TypeError: If it is neither an integer nor None.
        ValueError: If it is not positive.
    """
    if tile_size is None:
        return None
    try:
        number = operator.index(tile_size)
    except TypeError:
        number = None
    if number is None or isinstance(tile_size, bool):
        raise TypeError(f"tile_size must be an int or None, not {type(tile_size).__name__}: {tile_size!r}")
    if number < 1:
        raise ValueError(f"tile_size is {number}; a tile needs at least one row (None chooses a size)")
    return number


def check_outermost(decision: AxisDecision, boundaries: Mapping[str, AxisBoundary | None]) -> None:
    """Refuse an outermost axis that cannot be cut into tiles.

    Raises:
        ValueError: If it is a Bucket, or has a fuse that is no Reducer.
    """
    name, strategy = decision.spec.name, decision.strategy
    if isinstance(strategy, Bucket):
        raise ValueError(
            f"the outermost axis {name!r} is a Bucket, whose elements differ in length, so that a tile of it is no "
            "part of an array; use xtrax.tiling.map_ragged, or pad the elements and leave out bucket_boundaries"
        )
    boundary = boundaries.get(name)
    if boundary is not None and boundary.fuse is not None and not isinstance(boundary.fuse, Reducer):
        raise ValueError(
            f"the fuse of the outermost axis {name!r} is {boundary.fuse!r}, which needs the stack of all rows; tiles "
            "can be reduced one after another only by a Reducer, such as those of xtrax.tiling.reducers"
        )


def choose_tile_rows(decision: AxisDecision, output_row_bytes: int, input_row_bytes: int) -> int:
    """The multiple of the axis's chunk whose output is nearest to 64 MiB, at most the axis.

    Where nothing is stored of a row, the bytes that are read count.
    """
    rows = max(1, decision.spec.cardinality)
    chunk = min(decision.strategy.batch_size, rows) if isinstance(decision.strategy, SafeMap) else 1
    row_bytes = output_row_bytes or input_row_bytes or 1
    chunks = max(1, round(_TILE_BYTES / (row_bytes * chunk)))
    return min(chunks * chunk, rows)


class DistinctRows:
    """The distinct elements of each tile of a DedupGather axis, as many for every tile."""

    def __init__(self, strategy: DedupGather, tiles: Tiles):
        """Count them, so that one `k_bucket` serves all tiles."""
        self._strategy = strategy
        self._tiles = tiles
        self.k_bucket = get_k_bucket(max((len(local) for local, _ in self._all()), default=1))

    def _all(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return (self._of(tile) for tile in range(len(self._tiles)))

    def _of(self, tile: int) -> tuple[np.ndarray, np.ndarray]:
        start, stop = self._tiles.span(tile)
        _, first, inverse = np.unique(self._strategy.index_map[start:stop], return_index=True, return_inverse=True)
        return first.astype(np.int32), inverse.astype(np.int32)

    def of(self, tile: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the tile that are computed, `(k_bucket,)`, and for each row of the tile which of them it equals."""
        first, inverse = self._of(tile)
        return np.pad(first, (0, self.k_bucket - len(first)), mode="edge"), inverse
