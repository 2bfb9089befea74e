"""PreemptionHandler: saves and exits when the machine is about to be taken away."""

import logging
import signal
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from xtrax.training._callbacks import FitContext, StepMetrics
from xtrax.training._checks import check_int
from xtrax.training._state import ResumableState

logger = logging.getLogger("xtrax.training")


class PreemptionHandler:
    """On a signal, finishes the current call, saves a checkpoint, and exits with a code of one's choice.

    Under SLURM, `#SBATCH --signal=B:USR1@120` sends SIGUSR1 two minutes before the time limit; Kubernetes, and clouds
    that take a machine back, send SIGTERM. The signals are handled while `fit` runs, and as before afterwards. What
    `fit` raises is `SystemExit`; `fit(..., resume=True)` goes on with the same bits. An evaluation that runs is
    finished first.

    Where several processes train together, one that has the signal is enough: they ask one another every `agree_every`
    steps, and all stop at the same step.

    Args:
        signals: which signals.
        exit_code: what the process exits with, from 0 to 255; by default 75, which is EX_TEMPFAIL in `sysexits.h`:
            try again.
        agree_every: steps between two agreements of several processes. An agreement waits for the device.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: no signals, one that cannot be handled, a code out of range, or `agree_every` below 1.

    Example:
        >>> import signal
        >>> from xtrax.training import PreemptionHandler
        >>> handler = PreemptionHandler(signals=[signal.SIGTERM], exit_code=3)
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        exit_code: int = 75,
        *,
        agree_every: int = 50,
    ):
        if not isinstance(signals, Sequence) or isinstance(signals, str):
            raise TypeError(f"signals must be a list of signals, got {signals!r}")
        if not signals:
            raise ValueError("signals must name at least one signal, got none")
        self.signals = tuple(_check_signal(number) for number in signals)
        self.exit_code = check_int("exit_code", exit_code, at_least=0)
        if exit_code > 255:
            raise ValueError(f"exit_code must be at most 255, got {exit_code}")
        self.agree_every = check_int("agree_every", agree_every, at_least=1)
        self.received: signal.Signals | None = None
        self._fit: FitContext | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def attach(self, fit: FitContext) -> None:
        """Remembers the run.

        Raises:
            ValueError: `fit` was given no `checkpoint_dir`.
            RuntimeError: `fit` does not run in the main thread, which alone may handle signals.
        """
        if fit.checkpoint_dir is None:
            raise ValueError("a PreemptionHandler needs the checkpoint_dir of fit; pass one, or leave it out")
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "a PreemptionHandler needs fit to run in the main thread; call fit from there, and await it rather "
                "than fit_sync if an event loop is running"
            )
        self._fit = fit
        self.received = None

    def on_train_start(self, state: ResumableState) -> None:
        """Begins to handle the signals."""
        for number in self.signals:
            self._previous[number] = signal.signal(number, self._handle)

    def on_step_end(self, state: ResumableState, metrics: StepMetrics) -> None:
        """Lets several processes agree."""
        if jax.process_count() == 1 or metrics.step % self.agree_every:
            return
        received = multihost_utils.process_allgather(np.int32(self.received is not None))
        if np.any(received) and self._fit is not None:
            self._fit.request_exit(self.exit_code)

    def close(self) -> None:
        """Handles the signals as before."""
        while self._previous:
            number, previous = self._previous.popitem()
            # None is a handler that was not installed from Python, and cannot be put back.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._fit = None

    def _handle(self, number: int, frame: Any) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
            logger.warning("%s: saving a checkpoint after the current call", self.received.name)
        if self._fit is not None and jax.process_count() == 1:
            self._fit.request_exit(self.exit_code)


def _check_signal(number: Any) -> signal.Signals:
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"signals must hold signals such as signal.SIGTERM, got {number!r}")
    try:
        found = signal.Signals(number)
    except ValueError:
        raise ValueError(f"signals: there is no signal {number} on this system") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"signals: {found.name} cannot be handled")
    return found
