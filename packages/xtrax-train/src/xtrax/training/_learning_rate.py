"""LearningRateMonitor: the learning rate of every step."""

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xtrax.training._callbacks import StepMetrics
from xtrax.training._checks import check_int
from xtrax.training._paths import path_text
from xtrax.training._state import ResumableState

logger = logging.getLogger("xtrax.training")


class LearningRateMonitor:
    """Keeps the learning rate of the training steps of this process, and logs it (INFO) after each epoch.

    Args:
        schedule: a function of the number of updates done before, as optax schedules are. By default the rate is read
            from the optimizer's state, where `adamw_with_schedule` and `optax.inject_hyperparams` keep it.
        every: the steps that this divides.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `every` below 1.

    Example:
        >>> from xtrax.training import LearningRateMonitor
        >>> monitor = LearningRateMonitor(every=100)
        >>> monitor.rates
        {}
    """

    def __init__(self, schedule: Callable[[Any], Any] | None = None, every: int = 1):
        if schedule is not None and not callable(schedule):
            raise TypeError(f"schedule must be a function of the step, got {schedule!r}")
        self.schedule = schedule
        self.every = check_int("every", every, at_least=1)
        # A rate in the state is exact at the end of a call only.
        self.state_every = self.every if schedule is None else None
        self._kept: dict[int, Any] = {}

    @property
    def rates(self) -> dict[int, float]:
        """The rate of each step, by its number from 1. Waits for the device."""
        for step, value in self._kept.items():
            if not isinstance(value, float):
                self._kept[step] = float(value)
        return dict(self._kept)

    def on_train_start(self, state: ResumableState) -> None:
        """Forgets an earlier run.

        Raises:
            ValueError: the optimizer's state has no learning rate, or several.
        """
        self._kept = {}
        if self.schedule is None:
            _learning_rate(state)

    def on_step_end(self, state: ResumableState, metrics: StepMetrics) -> None:
        """Keeps the rate of the step."""
        if metrics.step % self.every:
            return
        if self.schedule is not None:
            self._kept[metrics.step] = self.schedule(metrics.step - 1)
        else:
            self._kept[metrics.step] = jnp.copy(_learning_rate(state))

    def on_epoch_end(self, state: ResumableState, epoch: int) -> None:
        """Logs the last rate."""
        if self._kept and logger.isEnabledFor(logging.INFO):
            step, value = next(reversed(self._kept.items()))
            logger.info("epoch %d: learning rate %g at step %d", epoch, float(value), step)


def _learning_rate(state: ResumableState) -> jax.Array:
    found = {
        path_text(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if path_text(path).endswith("hyperparams/learning_rate")
    }
    if len(found) == 1:
        return next(iter(found.values()))
    what = f"has several learning rates ({', '.join(found)})" if found else "has no learning rate in it"
    raise ValueError(
        f"LearningRateMonitor: the optimizer's state {what}; pass schedule=, or build the optimizer by "
        "adamw_with_schedule or optax.inject_hyperparams"
    )
