"""JSON files that are there whole or not at all."""

import contextlib
import json
import os
import tempfile
from typing import Any

from xtrax.run._checks import check_path


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write a JSON file so that a reader, a crash or a full disk never sees half of it.

    The text goes to a temporary name in the same folder, is flushed to the disk (`fsync`), takes the final name, and
    the folder is flushed too. Whatever was there before stays whole until then.

    Args:
        path: The file; its folder must exist.
        value: What to write: dicts with string keys, lists, strings, booleans, None, and finite numbers.

    Raises:
        TypeError: If `path` is no path, or a value cannot be written as JSON.
        ValueError: If a float is not finite (JSON has no NaN).
        OSError: If the folder is missing or cannot be written, or the disk is full. Nothing half-written is left.

    Examples:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "manifest.json")
        >>> write_json_atomic(path, {"status": "running"})
        >>> path.read_text()
        '{\\n  "status": "running"\\n}\\n'
    """
    path = check_path(path, what="a file")
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _umask() -> int:
    """The process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
