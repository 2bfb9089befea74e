"""Checkpoint: when a checkpoint is saved."""

import math
import time
from collections.abc import Mapping
from typing import Any, Literal

from xtrax.training._callbacks import FitContext, StepMetrics
from xtrax.training._checkpoint import get_checkpoint_manager, save_checkpoint
from xtrax.training._checks import check_int
from xtrax.training._state import ResumableState


class Checkpoint:
    """Saves checkpoints in the `checkpoint_dir` of `fit`, which keeps the latest five, and the best apart.

    The end of training, Ctrl-C and errors are saved whatever is asked here; with `best` alone, so are the ends of
    epochs, some seconds apart, as without this callback.

    Args:
        every_steps: at each step that this divides.
        every_minutes: at the first step after so many minutes since the last one.
        every_epochs: at the end of each epoch whose number, from 1, this divides.
        best: the name of an evaluation result ("loss" or a metric); the state with the best value so far is saved in
            the folder `best` of `checkpoint_dir`.
        best_mode: whether "min" or "max" is best.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: nothing is asked for, a number that is not positive, or another `best_mode`.

    Example:
        >>> from xtrax.training import Checkpoint
        >>> checkpoint = Checkpoint(every_steps=1000, best="accuracy", best_mode="max")
    """

    def __init__(
        self,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        every_epochs: int | None = None,
        *,
        best: str | None = None,
        best_mode: Literal["min", "max"] = "min",
    ):
        if every_steps is every_minutes is every_epochs is best is None:
            raise ValueError("Checkpoint needs every_steps, every_minutes, every_epochs or best")
        self.state_every = None if every_steps is None else check_int("every_steps", every_steps, at_least=1)
        self.every_epochs = None if every_epochs is None else check_int("every_epochs", every_epochs, at_least=1)
        if every_minutes is not None:
            if isinstance(every_minutes, bool) or not isinstance(every_minutes, int | float):
                raise TypeError(f"every_minutes must be a number, got {every_minutes!r}")
            if not (every_minutes > 0 and math.isfinite(every_minutes)):
                raise ValueError(f"every_minutes must be positive and finite, got {every_minutes}")
        if best is not None and not isinstance(best, str):
            raise TypeError(f"best must be the name of an evaluation result, got {best!r}")
        if best_mode not in ("min", "max"):
            raise ValueError(f'best_mode must be "min" or "max", got {best_mode!r}')
        self.every_minutes = every_minutes
        self.best = best
        self.best_mode = best_mode
        self._fit: FitContext | None = None
        self._manager: Any = None
        self._best_value: float | None = None
        self._saved = 0.0

    @property
    def says_when(self) -> bool:
        """Whether it saves from time to time; `best` alone only says what to keep apart."""
        return any(every is not None for every in (self.state_every, self.every_minutes, self.every_epochs))

    def attach(self, fit: FitContext) -> None:
        """Remembers the run, and the best value of its earlier epochs."""
        if fit.checkpoint_dir is None:
            raise ValueError("a Checkpoint callback needs the checkpoint_dir of fit; pass one, or leave it out")
        self._fit = fit
        self._saved = time.monotonic()
        self._best_value = None
        if self.best is not None:
            self._manager = get_checkpoint_manager(fit.checkpoint_dir / "best", max_to_keep=1)
            for entry in fit.history:
                self._improves(entry["eval"])

    def on_step_end(self, state: ResumableState, metrics: StepMetrics) -> None:
        """Asks for a checkpoint if one is due."""
        if (self.state_every is not None and metrics.step % self.state_every == 0) or self._minutes_passed():
            self._request()

    def on_eval_end(self, state: ResumableState, epoch: int, metrics: Mapping[str, float]) -> None:
        """Saves the state apart if it is the best so far."""
        if self.best is None or not self._improves(metrics):
            return
        latest = self._manager.latest_step()
        # A resumed run may come by a step that was saved before it was killed, with the same result.
        if latest is None or int(state.step) > latest:
            save_checkpoint(self._manager, state)

    def on_epoch_end(self, state: ResumableState, epoch: int) -> None:
        """Asks for a checkpoint if one is due."""
        if (self.every_epochs is not None and (epoch + 1) % self.every_epochs == 0) or self._minutes_passed():
            self._request()

    def close(self) -> None:
        """Waits for the best state to be written."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _request(self) -> None:
        assert self._fit is not None
        self._saved = time.monotonic()
        self._fit.request_checkpoint()

    def _minutes_passed(self) -> bool:
        return self.every_minutes is not None and time.monotonic() - self._saved >= 60 * self.every_minutes

    def _improves(self, metrics: Mapping[str, float] | None) -> bool:
        if metrics is None or self.best is None:
            return False
        if self.best not in metrics:
            raise ValueError(f"Checkpoint(best={self.best!r}): evaluation has {sorted(metrics)}; name one of them")
        value = metrics[self.best]
        sign = 1 if self.best_mode == "min" else -1
        better = not math.isnan(value) and (self._best_value is None or sign * value < sign * self._best_value)
        if better:
            self._best_value = value
        return better


class EpochCheckpoint:
    """What `fit` does without a `Checkpoint` callback: at the end of an epoch, if the last one is some seconds old.

    A checkpoint costs some hundredths of a second of the loop, which many short epochs would not forgive.
    """

    def __init__(self, seconds: float = 10.0):
        self._seconds = seconds
        self._saved = 0.0
        self._fit: FitContext | None = None

    def attach(self, fit: FitContext) -> None:
        self._fit = fit
        self._saved = time.monotonic()

    def on_epoch_end(self, state: ResumableState, epoch: int) -> None:
        if self._fit is not None and time.monotonic() - self._saved >= self._seconds:
            self._saved = time.monotonic()
            self._fit.request_checkpoint()
