"""A thread that commits tiles while the next ones are computed."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from xtrax.run._appended.shards import TileData, WrittenTile
from xtrax.run._appended.store import AppendStore


class TileWriter:
    """Commits tiles in the order in which they come, several at once where several are written.

    The bound of what waits is the caller's: a tile is submitted with a place taken, which `committed` gives back.
    """

    def __init__(
        self,
        store: AppendStore,
        committed: Callable[[Sequence[WrittenTile]], None],
        failed: Callable[[], None],
    ):
        """Start the thread.

        Args:
            store: Where the tiles go.
            committed: Called after each commit, in the thread.
            failed: Called, in the thread, after an error, so that nobody waits for a place.
        """
        self.seconds = 0.0
        self._store = store
        self._committed, self._failed = committed, failed
        self._queue: queue.SimpleQueue[Future[WrittenTile] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="xtrax-writer", daemon=True)
        self._thread.start()

    def submit(self, make: Callable[[], TileData]) -> None:
        """Hand a tile over.

        Args:
            make: Brings it to the host; called in another thread.

        Raises:
            SinkError: If an earlier one could not be written.
        """
        self.check()
        self._queue.put(self._store.begin(make))

    def check(self) -> None:
        """Raise what the thread has failed with, if it has."""
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Let the thread end once it has committed what was submitted."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait until it has ended; `check` raises what it failed with."""
        self._thread.join()

    def _work(self) -> None:
        begun: deque[Future[WrittenTile] | None] = deque()
        while True:
            if not begun:
                begun.append(self._queue.get())
            while not self._queue.empty():
                begun.append(self._queue.get())
            first = begun.popleft()
            if first is None:
                return
            start = time.perf_counter()
            # One flush of the log serves all that are written. One that failed comes alone, after those before it.
            tiles, failure = [first], first.exception()
            while failure is None and begun and (tile := begun[0]) is not None and tile.done() and not tile.exception():
                tiles.append(tile)
                begun.popleft()
            self._commit(tiles)
            self.seconds += time.perf_counter() - start

    def _commit(self, tiles: Sequence[Future[WrittenTile]]) -> None:
        if self._failure is not None:
            return
        try:
            self._committed(self._store.commit(tiles))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever submits or finishes
            self._failure = error
            self._failed()
