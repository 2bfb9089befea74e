"""Faults of a configuration, and how they are told."""

import datetime
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from xtrax.config._keys import Key, format_key


class Fault(NamedTuple):
    """One thing that is wrong with a configuration; `meant` is the key that an unknown one probably stands for."""

    key: Key
    what: str
    meant: str | None = None


TOO_DEEP = Fault((), "arrays or tables are nested too deeply to be read; flatten them")


def check_error_class(error_cls: object) -> None:
    """`TypeError` unless `error_cls` is a class of exceptions."""
    if not (isinstance(error_cls, type) and issubclass(error_cls, Exception)):
        raise TypeError(f"error_cls must be an exception class such as ValueError, got {error_cls!r}")


def check_mapping(raw: object) -> None:
    """`TypeError` unless `raw` is a mapping."""
    if not isinstance(raw, Mapping):
        raise TypeError(f"raw must be the dict of a TOML document, got {type(raw).__name__}")


def report(raw: object, faults: Sequence[Fault]) -> str:
    """One line for each fault: `file:line: dotted.key: what`, without what is not known."""
    where = getattr(raw, "where", None)
    lines = []
    for fault in faults:
        parts = [where(fault.key)] if where else []
        parts += [format_key(fault.key)] if fault.key else []
        lines.append(": ".join([*parts, fault.what]))
    return "\n".join(lines)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean X?`, or the list of what is known if nothing is near."""
    known = sorted(known)
    if near := nearest(name, known):
        return f"did you mean {near}?"
    return f"allowed: {', '.join(known)}" if known else "none is allowed here"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name nearest to a misspelt one, if any is near; case and dashes do not count."""
    folded = {_fold(other): other for other in sorted(known)}
    near = difflib.get_close_matches(_fold(name), folded, 1)
    return folded[near[0]] if near else None


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")


def describe(value: Any) -> str:
    """A value in TOML's words, shortened."""
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int):
        # Python writes no integer of more than some thousand digits, and nobody reads one of fifty.
        return f"the integer {value}" if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return f"the float {value}"
    if isinstance(value, str):
        return f"the string {value!r}" if len(value) <= 40 else f"the string {value[:37]!r}..."
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "an empty array" if not value else f"an array of {len(value)}"
    if isinstance(value, datetime.date | datetime.time):
        return f"the date or time {value}"
    return f"{value!r} ({type(value).__name__})"
