"""What a store says when the disk fails it: the cause, what is safe, and what to do."""

import contextlib
from collections.abc import Callable, Collection, Generator
from pathlib import Path

from xtrax.run._appended.files import DamagedRunError, read_committed
from xtrax.run._errors import SinkError


@contextlib.contextmanager
def as_sink_error(folder: Path, what: str, known: Callable[[], tuple[Collection[int], int]]) -> Generator[None]:
    """Turn an `OSError` into a `SinkError` that says which tiles are committed.

    Args:
        folder: The store.
        what: What failed, as in "could not be written to".
        known: Returns the committed tiles as far as the caller knows any, and how many tiles there are.
    """
    try:
        yield
    except SinkError:
        raise
    except OSError as error:
        saved, safe = _safe(folder, *known())
        message = f"{folder} {what}: {error}. {safe}"
        raise SinkError(message, path=folder, saved=[(tile,) for tile in saved]) from error


def _safe(folder: Path, committed: Collection[int], tiles: int) -> tuple[list[int], str]:
    """The tiles that are committed, and a sentence about them."""
    saved = sorted(committed)
    if not saved:  # perhaps because the log was not read yet
        try:
            found = read_committed(folder)
        except (OSError, DamagedRunError):
            return [], "What was committed there is as it was; remove the cause and run again"
        if found is None:
            return [], "Nothing is committed there; remove the cause and run again, or choose another output_dir"
        saved, tiles = found
    return saved, (
        f"{len(saved)} of {tiles} tiles are committed and safe; remove the cause and run again with the same run_id to "
        "go on from there"
    )
