"""A thread that commits tiles while the next ones are computed."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from xtrax.run._append_store import AppendStore, TileData


class TileWriter:
    """Commits tiles in the order in which they come, several at once where several wait.

    The bound of its queue is the caller's: a tile is submitted with a place taken, which `committed` gives back.
    """

    def __init__(
        self,
        store: AppendStore,
        on_host: Callable[[Any], TileData],
        committed: Callable[[Sequence[TileData]], None],
        failed: Callable[[], None],
    ):
        """Start the thread.

        Args:
            store: Where the tiles go.
            on_host: What is submitted, as arrays on the host.
            committed: Called after each commit, in the thread.
            failed: Called, in the thread, after an error, so that nobody waits for a place.
        """
        self.seconds = 0.0
        self._store, self._on_host = store, on_host
        self._committed, self._failed = committed, failed
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="xtrax-writer", daemon=True)
        self._thread.start()

    def submit(self, item: Any) -> None:
        """Hand a tile over.

        Raises:
            SinkError: If an earlier one could not be written.
        """
        self.check()
        self._queue.put(item)

    def check(self) -> None:
        """Raise what the thread has failed with, if it has."""
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Wait until all that was submitted is committed, or has failed; `check` raises what it failed with."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        last = False
        while not last:
            items = [self._queue.get()]
            while not self._queue.empty():  # one flush of the log serves all that wait
                items.append(self._queue.get())
            last = items[-1] is None
            if self._failure is None:
                self._commit([item for item in items if item is not None])
            del items  # not held while the next ones are waited for

    def _commit(self, items: Sequence[Any]) -> None:
        if not items:
            return
        start = time.perf_counter()
        try:
            tiles = [self._on_host(item) for item in items]
            self._store.commit(tiles)
            self._committed(tiles)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever submits or finishes
            self._failure = error
            self._failed()
        finally:
            self.seconds += time.perf_counter() - start
