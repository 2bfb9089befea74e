"""A thread that reads the inputs of the next tiles while this one is computed."""

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xtrax.run._tiled.inputs import Source, digest_arrays, is_rounded, warn_rounded


class Places:
    """A bound on the tiles that are between being read and being committed."""

    def __init__(self, count: int):
        """All places are free."""
        self._semaphore = threading.Semaphore(count)
        self._closed = False

    def take(self) -> bool:
        """Wait for a place; False if there will be none."""
        self._semaphore.acquire()
        return not self._closed

    def give_back(self, count: int = 1) -> None:
        """Free places."""
        if count:
            self._semaphore.release(count)

    def close(self) -> None:
        """Let nobody wait any more."""
        self._closed = True
        self._semaphore.release()


@dataclass(frozen=True)
class ReadTile:
    """A tile's inputs, on the host.

    Attributes:
        tile: Its number.
        leaves: What is computed from, one for each source; None once it is on the device.
        digest: Of its rows of the inputs.
        index_map: For an outermost DedupGather, which of the leaves' rows each row equals.
        seconds: What reading took.
        bytes: How much was read.
    """

    tile: int
    leaves: list[Any] | None
    digest: str
    index_map: np.ndarray | None
    seconds: float
    bytes: int


class TileInputs:
    """Reads tiles."""

    def __init__(self, sources: Sequence[Source], tiles: Any, distinct: Any = None, dedup_fn: Any = None):
        """Keep what to read.

        Args:
            sources: The inputs.
            tiles: How they are cut.
            distinct: The distinct rows of each tile (`DistinctRows`), or None.
            dedup_fn: Chooses them: `(leaves, rows) -> leaves`; None takes them.
        """
        self._sources, self._tiles, self._distinct, self._dedup_fn = sources, tiles, distinct, dedup_fn
        self._rounded: set[str] = set()  # of which a warning was given

    def digest(self, tile: int) -> str:
        """The digest of a tile's rows."""
        return digest_arrays(self._rows(tile))

    def _rows(self, tile: int) -> list[Any]:
        start, stop = self._tiles.span(tile)
        leaves = []
        for source in self._sources:
            try:
                leaves.append(source.read(start, stop))
            except Exception as error:
                error.add_note(f"while {source.where} was read: rows {start} to {stop - 1}, tile {tile}")
                raise
        return leaves

    def _check_narrowed(self, tile: int, leaves: Sequence[Any]) -> None:
        start, stop = self._tiles.span(tile)
        for source, leaf in zip(self._sources, leaves, strict=True):
            where = f"{source.where}[{start}:{stop}]"
            if source.where not in self._rounded and is_rounded(where, leaf, source.computed):
                self._rounded.add(source.where)
                warn_rounded(source.where, source.dtype, source.computed)

    def read(self, tile: int) -> ReadTile:
        """Read a tile.

        Raises:
            ValueError: If it holds integers that JAX would wrap around.

        Warns:
            UserWarning: Once for each input, if JAX rounds its floats.
        """
        start = time.perf_counter()
        leaves, index_map = self._rows(tile), None
        self._check_narrowed(tile, leaves)
        digest, size = digest_arrays(leaves), sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        if self._distinct is not None:
            chosen, index_map = self._distinct.of(tile)
            if self._dedup_fn is not None:
                leaves = list(self._dedup_fn(leaves, chosen))
            else:
                leaves = [
                    leaf[(slice(None),) * source.dim + (chosen,)]
                    for source, leaf in zip(self._sources, leaves, strict=True)
                ]
        return ReadTile(tile, leaves, digest, index_map, time.perf_counter() - start, size)


class TileReader:
    """Reads tiles in a thread, as far ahead as there are places."""

    def __init__(self, inputs: TileInputs, tiles: Iterable[int], places: Places):
        """Start the thread."""
        self.seconds = 0.0
        self.bytes = 0
        self._inputs, self._tiles, self._places = inputs, tiles, places
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="xtrax-reader", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for tile in self._tiles:
                if not self._places.take():
                    break
                read = self._inputs.read(tile)
                self.seconds += read.seconds
                self.bytes += read.bytes
                self._queue.put(read)
                del read  # whoever takes it alone keeps it
            self._queue.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for the tile
            self._queue.put(error)

    def next(self, *, wait: bool = True) -> ReadTile | None:
        """The next tile; None after the last, or, without `wait`, if it is not there (yet).

        Raises:
            BaseException: What reading it raised, with `wait`.
        """
        try:
            read = self._queue.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(read, ReadTile):
            return read
        self._queue.put(read)  # it is the last: whoever asks again gets it again
        if wait and read is not None:
            raise read
        return None

    def end(self) -> None:
        """Let the thread end, at the tile that it is reading at the latest."""
        self._places.close()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()
