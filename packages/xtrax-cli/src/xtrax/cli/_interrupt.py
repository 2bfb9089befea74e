"""Ctrl-C and SIGTERM that are not lost, wherever Python is when they come."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any

from xtrax.cli._defaults import INTERRUPTED


class Noted:
    """A signal handler that raises `KeyboardInterrupt`, and remembers that it did.

    Python discards what is raised while it collects garbage, and extension modules turn it into errors of their own;
    so verbs ask by `raise_if_interrupted` between the parts of their work. While an extension module is being loaded
    nothing is raised: some of them, jaxlib's among them, end the process by SIGABRT or SIGSEGV.

    Attributes:
        signal: The first signal that came; None before.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.signal = self.signal or number
        if not _loads_extension(frame):
            raise KeyboardInterrupt


def _loads_extension(frame: FrameType | None) -> bool:
    """Whether the code that `frame` runs was called by an extension module that is being loaded."""
    while frame is not None:
        loads = frame.f_code.co_name in ("create_module", "exec_module")
        if loads and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def noted_interrupts() -> Generator[Noted]:
    """Note SIGINT and SIGTERM, where they are Python's default to handle and this is the main thread."""
    noted = Noted()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    taken = {number: default for number, default in defaults.items() if signal.getsignal(number) is default}
    report, report_top = sys.unraisablehook, sys.excepthook

    def without_interrupts(unraisable: Any) -> None:
        if noted.signal is None or not issubclass(unraisable.exc_type, KeyboardInterrupt):
            report(unraisable)

    def top_without_interrupts(kind: Any, error: Any, trace: Any) -> None:  # which C code, as numpy's, calls too
        if noted.signal is None or not issubclass(kind, KeyboardInterrupt):
            report_top(kind, error, trace)

    sys.unraisablehook, sys.excepthook = without_interrupts, top_without_interrupts
    for number in taken:
        signal.signal(number, noted)
    try:
        yield noted
    finally:
        for number, default in taken.items():
            signal.signal(number, default)
        sys.unraisablehook, sys.excepthook = report, report_top


def raise_if_interrupted() -> None:
    """Raise the `KeyboardInterrupt` of a signal that came before and was lost."""
    if is_interrupted():
        raise KeyboardInterrupt


def is_interrupted() -> bool:
    """Whether a signal has come that ends the command."""
    handlers = (signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))
    return any(isinstance(handler, Noted) and handler.signal is not None for handler in handlers)


@contextlib.contextmanager
def default_interrupts() -> Generator[None]:
    """Leave SIGINT to what runs inside, which takes over only from Python's own handler."""
    noted = signal.getsignal(signal.SIGINT)
    if not isinstance(noted, Noted):
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if noted.signal is not None:
            raise KeyboardInterrupt
        yield
    finally:
        signal.signal(signal.SIGINT, noted)


def leave_at_once_on_interrupt() -> None:
    """For a process that has done its work: Ctrl-C while Python cleans up ends it, with no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
