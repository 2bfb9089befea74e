"""Checks of what describes a sink, shared by the spec and the sinks."""

import operator
import os
import secrets
from pathlib import Path
from typing import Any

from xtrax.run._names import check_name


def new_run_id() -> str:
    """A new random run id: `run-` and 12 hexadecimal digits.

    Examples:
        >>> import re
        >>> bool(re.fullmatch("run-[0-9a-f]{12}", new_run_id()))
        True
    """
    return f"run-{secrets.token_hex(6)}"


def check_run_id(run_id: Any) -> str | None:
    """Return it if it is None or fit for a file name; TypeError or ValueError if not."""
    return None if run_id is None else check_name(run_id, "run_id")


def check_path(path: Any, name: str = "path", what: str = "a file or folder") -> Path:
    """Return it as a path.

    Args:
        path: A string or `os.PathLike`.
        name: Of the argument, for the message.
        what: What it must name, for the message.

    Raises:
        TypeError: If it is no path, or one of bytes.
        ValueError: If it is empty or holds NUL.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a path (a string or os.PathLike), not {type(path).__name__}: {path!r}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a text path, not bytes: {text!r}")
    if not text or "\0" in text:
        raise ValueError(f"{name} is {text!r}; it must name {what}")
    return Path(text)


def check_output_dir(output_dir: Any) -> Path:
    """Return it as a path; TypeError if it is no path, ValueError if it is empty or holds NUL."""
    return check_path(output_dir, "output_dir", "a folder")


def check_folder(path: Any, name: str, what: str) -> Path:
    """Return it as a path; TypeError or ValueError as `check_path`, FileNotFoundError if no folder is there."""
    path = check_path(path, name, what)
    if path.is_dir():
        return path
    found = "a dangling symbolic link" if path.is_symlink() else "no folder"
    if path.exists():
        if path.is_dir():  # it was made meanwhile
            return path
        found = "a file, not a folder"
    raise FileNotFoundError(f"{path} is {found}; give {what}")


def check_flush_every(flush_every: Any) -> int:
    """Return it as an int; TypeError if it is no integer, ValueError if it is not positive."""
    try:
        number = operator.index(flush_every)
    except TypeError:
        number = None
    if number is None or isinstance(flush_every, bool):
        raise TypeError(f"flush_every must be an int, not {type(flush_every).__name__}: {flush_every!r}")
    if number < 1:
        raise ValueError(
            f"flush_every is {number}; it must be at least 1 (to drain by hand only, choose a large number)"
        )
    return number
