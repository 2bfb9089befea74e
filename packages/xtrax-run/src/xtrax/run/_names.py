"""Names that are safe on disk: components of keys, arrays, run ids."""

import operator
import unicodedata
from typing import Any

HIDDEN = ".xtrax"  # the folder of a run's own files: lock, temporary files, journal

_LONGEST = 700  # bytes of a key's path: macOS allows 1024 for the whole path


def check_name(name: Any, what: str) -> str:
    """Return `name` if it can be one component of a path in every format.

    Args:
        name: A string.
        what: What it is, for the message.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is empty, made of dots only, contains `/`, `\\` or a control character, cannot be encoded, is
            longer than 255 bytes, or is reserved by Zarr (`zarr.json`, a leading `__`) or by xtrax.
    """
    if not isinstance(name, str):
        raise TypeError(f"{what} must be a string, not {type(name).__name__}: {name!r}")
    if not name.strip("."):
        raise ValueError(f"{what} is {name!r}; it must hold something other than dots")
    bad = [c for c in ("/", "\\") if c in name]
    if bad:
        raise ValueError(f"{what} is {name!r} and contains {bad[0]!r}; use one component a level, as in ('a', 'b')")
    controls = [c for c in name if unicodedata.category(c) == "Cc"]
    if controls:
        raise ValueError(f"{what} is {name!r} and contains the control character {controls[0]!r}; leave it out")
    if name.startswith("__") or name in ("zarr.json", HIDDEN):
        raise ValueError(f"{what} is {name!r}, which is reserved on disk (a leading '__', 'zarr.json', {HIDDEN!r})")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{what} is {name!r}, which UTF-8 cannot encode (a lone surrogate)") from None
    if size > 255:
        raise ValueError(f"{what} is {size} bytes long ({name[:20]!r}...); a name on disk holds at most 255")
    return name


def key_path(key: Any) -> tuple[str, ...]:
    """The names on disk of a key, which also tell whether two keys are the same.

    Raises:
        TypeError: If the key is no tuple, or a component neither an int nor a string.
        ValueError: If the key is empty or too long, or a component not fit for a name.
    """
    if not isinstance(key, tuple):
        raise TypeError(f"key must be a tuple of ints and strings, not {type(key).__name__}: {key!r}")
    if not key:
        raise ValueError("key is empty; it needs at least one component, as in ('step', 3)")
    path = tuple(_component(part, f"component {i} of key {key!r}") for i, part in enumerate(key))
    size = sum(len(part.encode()) + 1 for part in path)
    if size > _LONGEST:
        raise ValueError(f"key makes a path of {size} bytes ({path[0][:20]!r}...); allowed are {_LONGEST}; shorten it")
    return path


def _component(part: Any, what: str) -> str:
    if isinstance(part, str):
        return check_name(part, what)
    if not isinstance(part, bool):
        try:
            return str(operator.index(part))
        except TypeError:
            pass  # not an integer of any kind; the message below says so
    raise TypeError(f"{what} is {part!r} of type {type(part).__name__}; allowed are ints (not bools) and strings")
