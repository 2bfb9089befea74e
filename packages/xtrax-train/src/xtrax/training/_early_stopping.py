"""EarlyStopping: ends training when evaluation no longer improves."""

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from xtrax.training._callbacks import FitContext
from xtrax.training._checks import check_int
from xtrax.training._state import ResumableState

logger = logging.getLogger("xtrax.training")


class EarlyStopping:
    """Ends training after some epochs without a better evaluation.

    A resumed run counts the epochs before it too, so it stops where a run that never stopped would have. A value that
    is NaN is no improvement.

    Args:
        monitor: an evaluation result, "loss" or the name of a metric.
        patience: epochs without improvement that end training.
        min_delta: by how much a value must be better than the best so far.
        mode: whether "min" or "max" is best.

    Attributes:
        best: the best value so far, or None.
        stopped_epoch: the epoch, from 0, after which training was ended, or None.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `patience` below 1, `min_delta` negative or not finite, or another `mode`.

    Example:
        >>> from xtrax.training import EarlyStopping
        >>> stop = EarlyStopping("accuracy", patience=10, mode="max")
    """

    def __init__(
        self,
        monitor: str = "loss",
        patience: int = 5,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ):
        if not isinstance(monitor, str):
            raise TypeError(f"monitor must be the name of an evaluation result, got {monitor!r}")
        if isinstance(min_delta, bool) or not isinstance(min_delta, int | float):
            raise TypeError(f"min_delta must be a number, got {min_delta!r}")
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta must be finite and at least 0, got {min_delta}")
        if mode not in ("min", "max"):
            raise ValueError(f'mode must be "min" or "max", got {mode!r}')
        self.monitor = monitor
        self.patience = check_int("patience", patience, at_least=1)
        self.min_delta = min_delta
        self.mode = mode
        self.best: float | None = None
        self.stopped_epoch: int | None = None
        self._waited = 0
        self._fit: FitContext | None = None

    def attach(self, fit: FitContext) -> None:
        """Goes through the epochs that a resumed run has behind it."""
        self._fit = fit
        self.best, self.stopped_epoch, self._waited = None, None, 0
        for entry in fit.history:
            self._see(entry)

    def on_epoch_end(self, state: ResumableState, epoch: int) -> None:
        """Looks at the evaluation of the epoch.

        Raises:
            ValueError: there was no evaluation, or it has no such result.
        """
        assert self._fit is not None
        self._see(self._fit.history[-1])

    def _see(self, entry: Mapping[str, Any]) -> None:
        results = entry["eval"]
        if results is None:
            raise ValueError("EarlyStopping needs an evaluation after every epoch; give the data an eval_iter()")
        if self.monitor not in results:
            raise ValueError(f"EarlyStopping(monitor={self.monitor!r}): evaluation has {sorted(results)}")
        value = results[self.monitor]
        sign = 1 if self.mode == "min" else -1
        if not math.isnan(value) and (self.best is None or sign * (self.best - value) > self.min_delta):
            self.best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience and self.stopped_epoch is None:
            self.stopped_epoch = entry["epoch"]
            logger.info("stopping after epoch %d: %s did not improve on %s", entry["epoch"], self.monitor, self.best)
            assert self._fit is not None
            self._fit.request_stop()
