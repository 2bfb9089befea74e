"""A document back to TOML."""

import datetime
import json
import re
from collections.abc import Mapping
from typing import Any

from xtrax.config._faults import check_mapping

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dump_toml(raw: Mapping[str, Any]) -> str:
    """The TOML text of a document; reading it gives the same document. Comments are not kept.

    Args:
        raw: Nested mappings with string keys, of what TOML can hold.

    Returns:
        The text, with a header for each table that is not in an array.

    Raises:
        TypeError: If a key is not a string, or TOML cannot hold a value; the message names it.

    Examples:
        >>> print(dump_toml({"seed": 3, "model": {"path": "net:make", "kwargs": {"sizes": [1, 2]}}}), end="")
        seed = 3
        <BLANKLINE>
        [model]
        path = "net:make"
        <BLANKLINE>
        [model.kwargs]
        sizes = [1, 2]
    """
    check_mapping(raw)
    return "\n".join(_table(raw, "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], prefix: str) -> list[str]:
    """The lines of a table: its values, then its tables, since a header ends the values of the one before."""
    lines = [f"{_key(name)} = {_value(value, name)}" for name, value in table.items() if not isinstance(value, Mapping)]
    for name, value in table.items():
        if isinstance(value, Mapping):
            header = f"{prefix}{_key(name)}"
            lines += ["", f"[{header}]", *_table(value, f"{header}.")]
    return lines


def _value(value: Any, name: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, name) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {_value(item, key)}' for key, item in value.items())}}}"
    raise TypeError(f"{name}: TOML cannot hold {value!r} ({type(value).__name__})")


def _key(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the key {name!r} must be a string")
    return name if _BARE.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON, unlike TOML, allows
