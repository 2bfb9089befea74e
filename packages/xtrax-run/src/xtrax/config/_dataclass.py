"""TOML to typed dataclasses, with every fault told at once; built on cattrs."""

import dataclasses
import datetime
import enum
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import cattrs
from cattrs.gen import make_dict_structure_fn, override

from xtrax.config._document import load_toml_document
from xtrax.config._faults import Fault, check_error_class, check_mapping, describe, did_you_mean, nearest, report
from xtrax.config._keys import Key
from xtrax.config._overrides import apply_overrides

T = TypeVar("T")

_NAMES: dict[Any, str] = {
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


def load_dataclass(
    path: str | os.PathLike[str], cls: type[T], error_cls: type[Exception], *, overrides: Iterable[str] = ()
) -> T:
    """Read a TOML file into a typed dataclass, whose fields may be dataclasses.

    A table becomes a dataclass, a `dict` or a `Mapping`; an array a `list` or a `tuple`. Values are not converted,
    but for an integer where a float is meant and a string where a `pathlib.Path` or an `enum.Enum` is: `"3"` and
    `true` are not integers. Fields with a default may be left out. A field's own check is
    `dataclasses.field(metadata={"check": function})`, where the function raises `ValueError` for what is not allowed; a
    `ValueError` of `__post_init__` counts as a fault of its table.

    Args:
        path: The file.
        cls: The dataclass.
        error_cls: The exception class to raise; called with the message.
        overrides: `key=value` texts applied to the document first, as by `apply_overrides`.

    Returns:
        An instance of `cls`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        error_cls: If the file cannot be read, or has unknown keys (the nearest known name is told), missing ones or
            values that are not allowed: all at once, one line each, with the file, the line and the dotted key.

    Examples:
        >>> import dataclasses, pathlib, tempfile
        >>> @dataclasses.dataclass
        ... class Optimizer:
        ...     lr: float = 1e-3
        >>> @dataclasses.dataclass
        ... class Config:
        ...     steps: int
        ...     optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
        >>> path = pathlib.Path(tempfile.mkdtemp(), "run.toml")
        >>> _ = path.write_text("steps = 10\\n[optimizer]\\nlr = 1\\n")
        >>> load_dataclass(path, Config, ValueError)
        Config(steps=10, optimizer=Optimizer(lr=1.0))
        >>> load_dataclass(path, Config, ValueError, overrides=["optimizer.lr=0.5"]).optimizer.lr
        0.5
    """
    return structure_dataclass(
        apply_overrides(load_toml_document(path, error_cls), overrides, error_cls), cls, error_cls
    )


def structure_dataclass(raw: Mapping[str, Any], cls: type[T], error_cls: type[Exception]) -> T:
    """A document, or any mapping of plain values, as a typed dataclass; see `load_dataclass` for the rules.

    Args:
        raw: The document; faults carry lines if it came from `load_toml_document`.
        cls: The dataclass.
        error_cls: The exception class to raise; called with the message.

    Returns:
        An instance of `cls`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        error_cls: With all faults at once.

    Examples:
        >>> import dataclasses
        >>> @dataclasses.dataclass
        ... class Config:
        ...     steps: int
        ...     seed: int = 0
        >>> structure_dataclass({"steps": 3}, Config, ValueError)
        Config(steps=3, seed=0)
        >>> structure_dataclass({"steps": "3", "sede": 1}, Config, ValueError)
        Traceback (most recent call last):
            ...
        ValueError: steps: must be an integer, found the string '3'
        sede: unknown key; did you mean seed?
    """
    check_mapping(raw)
    check_error_class(error_cls)
    if not _is_dataclass(cls):
        raise TypeError(f"cls must be a dataclass, got {cls!r}")
    try:
        return _converter().structure(raw, cls)
    except (cattrs.BaseValidationError, ValueError, TypeError) as error:
        faults = list(_faults(error, ()))
        raise error_cls(report(raw, _without_misspelt(faults))) from error


class _UnknownKeys(ValueError):
    """Keys of a table that its dataclass does not have."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        super().__init__(", ".join(unknown))
        self.unknown = unknown
        self.known = known


def _converter() -> cattrs.Converter:
    """Structures TOML's values without converting them; knows dataclasses, collections, unions and literals."""
    converter = cattrs.Converter(detailed_validation=True)
    for kind in (bool, int, str, datetime.datetime, datetime.date, datetime.time):
        converter.register_structure_hook(kind, _exactly)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(enum.Enum, _enum_member)
    converter.register_structure_hook(Path, lambda value, _: Path(_exactly(value, str, Path)))

    def register(matches: Callable[[Any], bool], hook_of: Callable[[Any, cattrs.Converter], Callable]) -> None:
        converter.register_structure_hook_factory(matches, lambda kind: hook_of(kind, converter))

    register(lambda kind: _origin(kind) in (list, tuple), _array_hook)
    register(lambda kind: isinstance(_origin(kind), type) and issubclass(_origin(kind), Mapping), _table_hook)
    register(_is_dataclass, _dataclass_hook)
    register(lambda kind: _origin(kind) is Literal, _literal_hook)
    register(lambda kind: _origin(kind) in (Union, types.UnionType), _union_hook)
    return converter


def _is_dataclass(kind: object) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _origin(kind: Any) -> Any:
    return typing.get_origin(kind) or kind


def _exactly(value: Any, kind: Any, told: Any = None) -> Any:
    if type(value) is not kind:  # bools are not integers, datetimes not dates
        raise TypeError(f"must be {_name(told or kind)}, found {describe(value)}")
    return value


def _number(value: Any, kind: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"must be {_name(kind)}, found {describe(value)}")
    return float(value)


def _array_hook(kind: Any, converter: cattrs.Converter) -> Callable:
    origin, arguments = _origin(kind), typing.get_args(kind)
    fixed = origin is tuple and arguments and arguments[-1] is not Ellipsis

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"must be an array, found {describe(value)}")
        if fixed and len(value) != len(arguments):
            raise ValueError(f"must be an array of {len(arguments)}, found {describe(value)}")
        kinds = arguments if fixed else [arguments[0] if arguments else Any] * len(value)
        return origin(_each(enumerate(value), kinds, kind, converter))

    return structure


def _table_hook(kind: Any, converter: cattrs.Converter) -> Callable:
    arguments = typing.get_args(kind)
    item = arguments[1] if len(arguments) == 2 else Any

    def structure(value: Any, _: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a table, found {describe(value)}")
        return dict(zip(value, _each(value.items(), [item] * len(value), kind, converter), strict=True))

    return structure


def _each(items: Iterable[tuple[Any, Any]], kinds: Iterable[Any], kind: Any, converter: cattrs.Converter) -> list[Any]:
    """Every element structured, or cattrs' error with every fault and its index or name."""
    done, errors = [], []
    for (index, value), item in zip(items, kinds, strict=True):
        try:
            done.append(value if item is Any else converter.structure(value, item))
        except (cattrs.BaseValidationError, ValueError, TypeError) as error:
            error.add_note(cattrs.IterableValidationNote(f"element {index}", index, item))
            errors.append(error)
    if errors:
        raise cattrs.IterableValidationError("faults", errors, kind)  # ty: ignore[too-many-positional-arguments]
    return done


def _dataclass_hook(cls: Any, converter: cattrs.Converter) -> Callable:
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    checks = {name: field.metadata["check"] for name, field in fields.items() if "check" in field.metadata}

    def checked(check: Callable[[Any], None]) -> Callable:
        def structure(value: Any, kind: Any) -> Any:
            done = converter.structure(value, kind)
            check(done)
            return done

        return structure

    inner = make_dict_structure_fn(
        cls,
        converter,
        _cattrs_detailed_validation=True,
        **{name: override(struct_hook=checked(check)) for name, check in checks.items()},  # ty: ignore[invalid-argument-type]
    )

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a table, found {describe(value)}")
        unknown = [name for name in value if name not in fields]
        try:
            done = inner({name: value[name] for name in value if name in fields}, cls)
        except cattrs.ClassValidationError as error:
            if not unknown:
                raise
            errors = [*error.exceptions, _UnknownKeys(unknown, list(fields))]
            raise cattrs.ClassValidationError("faults", errors, cls) from error  # ty: ignore[too-many-positional-arguments]
        if unknown:
            raise _UnknownKeys(unknown, list(fields))
        return done

    return structure


def _enum_member(value: Any, cls: Any) -> Any:
    return cls(_one_of(value, [member.value for member in cls]))


def _literal_hook(kind: Any, _: cattrs.Converter) -> Callable:
    return lambda value, _: _one_of(value, list(typing.get_args(kind)))


def _one_of(value: Any, allowed: list[Any]) -> Any:
    for each in allowed:
        if type(each) is type(value) and each == value:
            return each
    near = nearest(value, [each for each in allowed if isinstance(each, str)]) if isinstance(value, str) else None
    hint = f"; did you mean {near}?" if near else ""
    raise ValueError(f"must be one of {', '.join(map(repr, allowed))}, found {describe(value)}{hint}")


def _union_hook(kind: Any, converter: cattrs.Converter) -> Callable:
    every = typing.get_args(kind)
    arms = [arm for arm in every if arm is not type(None)]

    def structure(value: Any, _: Any) -> Any:
        if value is None and len(arms) < len(every):
            return None
        if len(arms) == 1:
            return converter.structure(value, arms[0])
        for arm in sorted(arms, key=lambda arm: type(value) is not arm):  # the exact type first
            try:
                return converter.structure(value, arm)
            except (cattrs.BaseValidationError, ValueError, TypeError):
                continue
        raise TypeError(f"must be {' or '.join(map(_name, arms))}, found {describe(value)}")

    return structure


def _name(kind: Any) -> str:
    if kind in _NAMES:
        return _NAMES[kind]
    if _is_dataclass(kind):
        return f"a table of {', '.join(field.name for field in dataclasses.fields(kind))}"
    if _origin(kind) in (list, tuple):
        return "an array"
    if isinstance(_origin(kind), type) and issubclass(_origin(kind), Mapping):
        return "a table"
    return str(kind)


def _faults(error: BaseException, key: Key) -> Iterator[Fault]:
    """The faults in the tree of errors that cattrs raises, with their keys."""
    if isinstance(error, _UnknownKeys):
        for name in error.unknown:
            what = f"unknown key; {did_you_mean(name, error.known)}"
            yield Fault((*key, name), what, nearest(name, error.known))
    elif isinstance(error, cattrs.ClassValidationError | cattrs.IterableValidationError):
        noted, plain = error.group_exceptions()
        for inner, note in noted:
            step = note.index if isinstance(note, cattrs.IterableValidationNote) else note.name
            if isinstance(inner, KeyError) and inner.args == (step,):
                yield Fault((*key, step), f"missing; set it to {_name(note.type)}")
            else:
                yield from _faults(inner, (*key, step))
        for inner in plain:
            yield from _faults(inner, key)
    else:
        yield Fault(key, str(error) or type(error).__name__)


def _without_misspelt(faults: list[Fault]) -> list[Fault]:
    """Drop "missing" for a key that stands there under a misspelt name: that is one fault, not two."""
    meant = {(*fault.key[:-1], fault.meant) for fault in faults if fault.meant}
    return [fault for fault in faults if not (fault.what.startswith("missing;") and fault.key in meant)]
