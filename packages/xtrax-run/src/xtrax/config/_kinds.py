"""What the fields of a dataclass may be: checked when the class is looked at, and told in words."""

import dataclasses
import datetime
import enum
import types
import typing
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

_NAMES: dict[Any, str] = {
    Any: "any value",
    bool: "a boolean (true or false)",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path, as a string",
    type(None): "nothing",
    datetime.datetime: "a date and time",
    datetime.date: "a date",
    datetime.time: "a time",
}
ARRAYS = (list, tuple, set, frozenset, Sequence)
TABLES = (dict, Mapping, MutableMapping)
UNIONS = (Union, types.UnionType)
_VALUES = (bool, int, float, str, datetime.datetime, datetime.date, datetime.time, type(None))
_ALLOWED = (
    "a field may be bool, int, float, str, pathlib.Path, a date or time of datetime, an enum.Enum or Literal of such "
    "values, a dataclass, list, tuple, set, Sequence, dict, Mapping, a union of these, or Any; what the file does not "
    "set is dataclasses.field(init=False)"
)


def check_fields(cls: Any) -> None:
    """Refuse a dataclass with a field that no TOML document can set, or that cannot be checked against one.

    Raises:
        TypeError: names every such field, with its type.
    """
    faults: list[str] = []
    seen: set[type] = set()
    waiting = [cls]
    while waiting:
        cls = waiting.pop()
        if cls in seen:  # dataclasses may hold one another
            continue
        seen.add(cls)
        try:
            hints = typing.get_type_hints(cls, include_extras=True)
        except (NameError, TypeError, AttributeError, SyntaxError) as error:
            raise TypeError(f"the annotations of {cls.__qualname__} cannot be resolved: {error}") from error
        read = {field.name for field in dataclasses.fields(cls) if field.init}
        for name, kind in hints.items():
            if name in read or isinstance(kind, dataclasses.InitVar):
                inner, why = _look(kind)
                waiting += inner
                faults += [f"{cls.__qualname__}.{name}: {what}" for what in why]
    if faults:
        raise TypeError("\n".join([*faults, _ALLOWED]))


def _look(kind: Any) -> tuple[list[type], list[str]]:
    """The dataclasses in an annotation, and what in it cannot be read."""
    found, faults = [], []
    for part in _parts(kind):
        if part is type(None) and plain(kind) is part:
            faults.append("None cannot be read from TOML, which has none; give the type of the values")
        elif is_dataclass(part):
            found.append(part)
        elif (why := _refusal(part)) is not None:
            within = "" if part is kind else f" in {_shown(kind)}"
            faults.append(f"{_shown(part)}{within} cannot be read from TOML{why}")
    return found, faults


def _parts(kind: Any) -> Iterator[Any]:
    """An annotation and what it is made of, without the aliases."""
    kind = plain(kind)
    yield kind
    origin, arguments = origin_of(kind), typing.get_args(kind)
    if origin in TABLES and len(arguments) == 2:
        if not _is_key(plain(arguments[0])):
            yield _TableKey(arguments[0])
        arguments = arguments[1:]
    if origin in ARRAYS or origin in TABLES or origin in UNIONS:
        for argument in arguments:
            if argument is not Ellipsis:
                yield from _parts(argument)


class _TableKey(typing.NamedTuple):
    """The type of a table's keys, which is not allowed there."""

    kind: Any


def _is_key(kind: Any) -> bool:
    """Whether a key of TOML, which is a string, can be one of this type, and be it in one way only."""
    if kind in (Any, str, int, Path):
        return True
    return is_choice(kind) and all(isinstance(value, str) for value in choices(kind))


def _refusal(kind: Any) -> str | None:
    """Why a type is refused, for the message: an empty hint is one too; None if it is not."""
    origin = origin_of(kind)
    if isinstance(kind, _TableKey):
        return ", whose keys are strings; a table's keys may be str, int, Path, or a Literal or Enum of strings"
    if isinstance(kind, dataclasses.InitVar):
        return "; make it a field, since what is no field is not read"
    if is_choice(kind):
        fit = [type(value) in _VALUES for value in choices(kind)]
        return None if (any(fit) if is_enum(kind) else all(fit)) else ", which has no such values"
    if typing.is_typeddict(kind):
        return "; make it a dataclass"
    if is_dataclass(origin):
        return "; make a dataclass with its types filled in, or derive one from it"
    if getattr(kind, "__unpacked__", False):
        return "; write a tuple of one length, or tuple[X, ...]"
    return None if kind in list(_NAMES) or origin in (*ARRAYS, *TABLES, *UNIONS) else ""


def plain(kind: Any) -> Any:
    """An annotation without `Annotated`, `Final`, `NewType` and aliases."""
    while True:
        if typing.get_origin(kind) in (typing.Annotated, typing.Final):
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        elif type(kind).__name__ == "TypeAliasType":  # of typing from Python 3.12 on
            kind = kind.__value__
        else:
            return kind


def origin_of(kind: Any) -> Any:
    """`list` of `list[int]`; the type itself where nothing is in brackets."""
    return typing.get_origin(kind) or kind


def is_dataclass(kind: object) -> bool:
    """Whether `kind` is a dataclass, not an instance of one."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def is_enum(kind: object) -> bool:
    """Whether `kind` is an enumeration, of integers or strings too."""
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def is_choice(kind: Any) -> bool:
    """Whether `kind` is one of given values."""
    return is_enum(kind) or origin_of(kind) is Literal


def choices(kind: Any) -> list[Any]:
    """The values of an enumeration or a `Literal`."""
    return [member.value for member in kind] if is_enum(kind) else list(typing.get_args(kind))


def name_of(kind: Any) -> str:
    """What a document must have there, in TOML's words."""
    kind = plain(kind)
    if kind in list(_NAMES):  # an annotation may not be hashable
        return _NAMES[kind]
    if is_choice(kind):
        values = [value for value in choices(kind) if value is not None]
        return f"{'one of ' if len(values) > 1 else ''}{', '.join(map(repr, values))}"
    if is_dataclass(kind):
        return f"a table of {', '.join(field.name for field in dataclasses.fields(kind))}"
    if origin_of(kind) in ARRAYS:
        return "an array"
    if origin_of(kind) in TABLES:
        return "a table"
    if origin_of(kind) in UNIONS:
        return " or ".join(name_of(arm) for arm in typing.get_args(kind) if arm is not type(None))
    return _shown(kind)


def _shown(kind: Any) -> str:
    """A type as it is written."""
    if isinstance(kind, _TableKey):
        kind = kind.kind
    return kind.__qualname__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
