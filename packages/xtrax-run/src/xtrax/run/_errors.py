"""The error that a caller of a sink may want to catch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

Key = tuple[Any, ...]


class SinkError(OSError):
    """Output could not be opened or written: the disk is full, read-only or gone, or another process writes there.

    What earlier drains saved is intact. After a failed drain, entries that were not saved are still buffered, so
    `drain` may be called again once the cause is removed.

    Attributes:
        path: The folder or file that could not be written (`pathlib.Path`).
        saved: Keys that this drain had made durable before it failed.
        unsaved: Keys that are still buffered.
    """

    def __init__(self, message: str, *, path: Path, saved: Iterable[Key] = (), unsaved: Iterable[Key] = ()):
        """Keep the message and the facts behind it."""
        super().__init__(message)
        self.path = path
        self.saved = tuple(saved)
        self.unsaved = tuple(unsaved)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with the keyword-only facts, which OSError would drop."""
        return _rebuild, (str(self), self.path, self.saved, self.unsaved)


def _rebuild(message: str, path: Path, saved: tuple[Key, ...], unsaved: tuple[Key, ...]) -> SinkError:
    return SinkError(message, path=path, saved=saved, unsaved=unsaved)


def some(keys: Iterable[Key], limit: int = 5) -> str:
    """The first few keys, for a message."""
    keys = list(keys)
    if not keys:
        return "none"
    text = ", ".join(map(repr, keys[:limit]))
    return text if len(keys) <= limit else f"{text} and {len(keys) - limit} more"
