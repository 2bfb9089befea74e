"""Ctrl-C between the steps of a run, not in the middle of one, where it would leave threads and locks behind."""

import contextlib
import logging
import signal
import threading
from collections.abc import Generator
from typing import Any

_log = logging.getLogger("xtrax.run")


class Interrupts:
    """Notes Ctrl-C, and raises `KeyboardInterrupt` for it where that leaves nothing half-done."""

    def __init__(self) -> None:
        """Nothing is pressed yet."""
        self._pressed = self._welcome = False

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if Ctrl-C was pressed."""
        if self._pressed:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def welcome(self) -> Generator[None]:
        """Inside, Ctrl-C raises at once: for what may take long, and is undone by leaving it."""
        self.check()
        self._welcome = True
        try:
            yield
        finally:
            self._welcome = False

    def on_signal(self, signum: int, frame: Any) -> None:
        """Note the first one; raise where it is welcome, and for the second one."""
        again, self._pressed = self._pressed, True
        if again or self._welcome:
            raise KeyboardInterrupt
        _log.warning("interrupted: finishing the current tile; press Ctrl-C again to stop at once")


@contextlib.contextmanager
def deferred_interrupts() -> Generator[Interrupts]:
    """Notes Ctrl-C instead of raising `KeyboardInterrupt`; what was only noted is raised at the end.

    Where signals are not Python's default to handle, or outside the main thread, it changes nothing.
    """
    interrupts = Interrupts()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.on_signal)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.check()
