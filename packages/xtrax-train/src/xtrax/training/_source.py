"""One epoch of batches, in groups of equal shapes, with a position that can be saved."""

import copy
from collections import deque
from typing import Any

from xtrax.training._batch import Batch, BatchCheck
from xtrax.training._data import takes_epoch


class BatchSource:
    """The batches of one epoch.

    Attributes:
        done: batches that were trained on; the engine adds to it.

    Args:
        data: a `DataModule`.
        epoch: the epoch, from 0.
        check: checks each batch.
        resume: the `epoch`, `batches`, `iterator` and `iterator_batches` of a checkpoint in this epoch, or None.

    Raises:
        ValueError: the epoch has fewer batches than the checkpoint has done.
    """

    def __init__(self, data: Any, epoch: int, check: BatchCheck, resume: dict[str, Any] | None = None):
        batches = data.train_iter(epoch=epoch) if takes_epoch(data) else data.train_iter()
        self._iterator: Any = iter(batches)
        self._has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        self._check = check
        self._next: tuple[Batch, Any] | None = None
        self._pulled = 0
        # States of the iterator with the batches pulled before each: some of those pulled may not be done yet.
        self._snapshots: deque[tuple[Any, int]] = deque()
        self.done = 0
        if resume is not None:
            self._fast_forward(resume)

    def group(self, limit: int) -> list[Batch]:
        """Up to `limit` batches of equal shapes; none at the end of the epoch."""
        held, self._next = self._next, None
        if limit > 1 and held is None:
            self._take_snapshot()
        first = self._pull() if held is None else held
        if first is None:
            return []
        group = [first[0]]
        while len(group) < limit:
            self._take_snapshot()
            following = self._pull()
            if following is None:
                break
            if following[1] != first[1]:
                self._next = following
                break
            group.append(following[0])
        return group

    def position(self) -> dict[str, Any]:
        """Where to go on: after `done` batches, by a state of the iterator and how many batches were done in it."""
        if self._pulled == self.done:
            self._take_snapshot()
        self._drop_old_snapshots()
        state, batches = self._snapshots[0] if self._snapshots else (None, 0)
        return {"batches": self.done, "iterator": state, "iterator_batches": batches}

    def _pull(self) -> tuple[Batch, Any] | None:
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        checked = self._check(batch)
        self._pulled += 1
        return checked

    def _take_snapshot(self) -> None:
        if self._has_state:
            self._drop_old_snapshots()
            state = copy.deepcopy(self._iterator.get_state())
            self._snapshots.append((state, self._pulled))

    def _drop_old_snapshots(self) -> None:
        """Leaves the newest snapshot that is not past `done` first."""
        while len(self._snapshots) > 1 and self._snapshots[1][1] <= self.done:
            self._snapshots.popleft()

    def _fast_forward(self, resume: dict[str, Any]) -> None:
        if self._has_state and resume["iterator"] is not None:
            self._iterator.set_state(resume["iterator"])
            self._pulled = resume["iterator_batches"]
            self._snapshots.append((resume["iterator"], self._pulled))
        while self._pulled < resume["batches"]:
            try:
                next(self._iterator)
            except StopIteration:
                raise ValueError(
                    f"the data has {self._pulled} batches in epoch {resume['epoch']}, and the checkpoint has done "
                    f"{resume['batches']}; resume with the data and batch size that it was saved with"
                ) from None
            self._pulled += 1
        self.done = resume["batches"]
