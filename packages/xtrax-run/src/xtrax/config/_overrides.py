"""Changes to a document from the command line."""

import copy
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from xtrax.config._document import TomlDocument
from xtrax.config._faults import TOO_DEEP, check_error_class, check_mapping, describe, report
from xtrax.config._keys import Key, format_key, split_key

# What needs no quotes in a shell and can only be meant as a string: a name, a path, a module:symbol.
_BARE_STRING = re.compile(r"[A-Za-z_./~][\w./:@+~-]*")
_NO_NONE = "TOML has no None: leave the key out, here and in the file"
_NOT_TOML = {"true": "write true", "false": "write false", "none": _NO_NONE, "null": _NO_NONE}


def apply_overrides(raw: Mapping[str, Any], overrides: Iterable[str], error_cls: type[Exception]) -> dict[str, Any]:
    """A copy of a document with values set by dotted key.

    Args:
        raw: The document; it is not changed.
        overrides: Texts of the form `key=value`, as in `optimizer.kwargs.lr=1e-3`. The value is TOML; a name, a path
            or a `module:symbol` needs no quotes. A number as part of a key is the index of an array. Tables that do
            not exist are made.
        error_cls: The exception class to raise; called with the message.

    Returns:
        The changed copy, a `TomlDocument` if `raw` was one. Its faults tell an override from a line of the file.

    Raises:
        TypeError: If an argument is of the wrong kind; a single `str` for `overrides` is refused.
        error_cls: If a text has no `=`, its key or value cannot be read, or its key leads through something that is
            not a table. All such faults at once.

    Examples:
        >>> apply_overrides({"optimizer": {"lr": 0.1}}, ["optimizer.lr=1e-3", "model.path=net:make"], ValueError)
        {'optimizer': {'lr': 0.001}, 'model': {'path': 'net:make'}}
        >>> apply_overrides({}, ["lr"], ValueError)
        Traceback (most recent call last):
            ...
        ValueError: override 'lr': write it as key=value, as in optimizer.kwargs.lr=1e-3
    """
    check_mapping(raw)
    check_error_class(error_cls)
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list of key=value texts, got the string {overrides!r}")
    try:
        tables = copy.deepcopy(dict(raw))
    except RecursionError as error:
        raise error_cls(report(raw, [TOO_DEEP])) from error
    origins: dict[Key, int | str] = dict(getattr(raw, "origins", {}))
    faults: list[str] = []
    for text in overrides:
        if not isinstance(text, str):
            raise TypeError(f"overrides must be key=value texts, got {text!r}")
        try:
            key, value = _parse(text)
            full = _set(tables, key, value)
        except ValueError as error:
            faults.append(f"override {_short(text)!r}: {error}")
            continue
        origins = {other: origin for other, origin in origins.items() if other[: len(full)] != full}
        origins |= {full[:length]: "override" for length in range(1, len(full) + 1) if full[:length] not in origins}
    if faults:
        raise error_cls("\n".join(faults))
    return TomlDocument(tables, raw.path, origins) if isinstance(raw, TomlDocument) else tables


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _parse(text: str) -> tuple[tuple[str, ...], Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError("write it as key=value, as in optimizer.kwargs.lr=1e-3")
    key = split_key(name)
    value = value.strip()
    if value.lower() in _NOT_TOML and value not in ("true", "false"):
        raise ValueError(f"{value} is not TOML; {_NOT_TOML[value.lower()]}")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if _BARE_STRING.fullmatch(value):
            return key, value
        raise ValueError(f"the value {value!r} is not TOML; quote a string: {name}='\"...\"'") from error
    except ValueError as error:
        raise ValueError(f"the value has an integer of more digits than Python reads: {error}") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP.what) from error
    if set(parsed) != {"value"}:
        raise ValueError("the value must be one TOML value on one line")
    return key, parsed["value"]


def _set(tables: dict[str, Any], key: tuple[str, ...], value: Any) -> Key:
    """Set a value in place; the key with the indices of arrays as integers."""
    here: Any = tables
    full: Key = ()
    for position, part in enumerate(key):
        last = position == len(key) - 1
        if isinstance(here, list):
            if not here:
                raise ValueError(f"{format_key(full)} is an empty array; set the whole array")
            if not part.isdecimal() or int(part) >= len(here):
                raise ValueError(f"{format_key(full)} is {describe(here)}; its elements are 0 to {len(here) - 1}")
            step: str | int = int(part)
        elif isinstance(here, dict):
            step = part
            if not last:
                here.setdefault(step, {})
        else:
            raise ValueError(f"{format_key(full)} is {describe(here)}, not a table")
        full = (*full, step)
        if last:
            here[step] = value
        else:
            here = here[step]
    return full
