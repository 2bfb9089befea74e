"""TOML to typed dataclasses, with every fault told at once; built on cattrs."""

import dataclasses
import datetime
import enum
import os
import re
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import cattrs
from cattrs.gen import make_dict_structure_fn, override

from xtrax.config._document import load_toml_document
from xtrax.config._faults import (
    TOO_DEEP,
    Fault,
    check_error_class,
    check_mapping,
    describe,
    did_you_mean,
    nearest,
    report,
)
from xtrax.config._keys import Key
from xtrax.config._kinds import (
    ARRAYS,
    TABLES,
    UNIONS,
    check_fields,
    choices,
    is_dataclass,
    is_enum,
    name_of,
    origin_of,
    plain,
)
from xtrax.config._overrides import apply_overrides

T = TypeVar("T")

# A key that stands for an integer, written in the one way: dict[int, X] would else lose one of "1" and "01".
_INTEGER = re.compile(r"0|-?[1-9][0-9]*")


def load_dataclass(
    path: str | os.PathLike[str], cls: type[T], error_cls: type[Exception], *, overrides: Iterable[str] = ()
) -> T:
    """Read a TOML file into a typed dataclass, whose fields may be dataclasses.

    A table becomes a dataclass or a `dict` (for `Mapping` too); an array a `list`, a `tuple` (for `Sequence` too) or a
    `set`. Values are not converted, but for an integer where a float is meant, if a float can hold it exactly, and a
    string where a `pathlib.Path` or an `enum.Enum` is: `"3"` and `true` are not integers. The keys of a `dict` may be
    `str`, `int` (written as Python writes it), `Path`, or a `Literal` or `Enum` of strings. Fields with a default may
    be left out. A field's own check is
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
        TypeError: If an argument is of the wrong kind, or `cls` has fields of types that no TOML document can set,
            such as `bytes`, a `TypedDict`, a `Callable` or an `InitVar`; each is named.
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
        TypeError: If an argument is of the wrong kind, or `cls` has fields of types that no TOML document can set.
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
    if not is_dataclass(cls):
        raise TypeError(f"cls must be a dataclass, got {cls!r}")
    check_fields(cls)
    try:
        return _converter().structure(raw, cls)
    except RecursionError as error:
        raise error_cls(report(raw, [TOO_DEEP])) from error
    except (cattrs.BaseValidationError, ValueError, TypeError) as error:
        faults = list(_faults(error, ()))
        raise error_cls(report(raw, _without_misspelt(faults))) from error


class _UnknownKeys(ValueError):
    """Keys of a table that its dataclass does not have."""

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        super().__init__(", ".join(map(str, unknown)))
        self.unknown = unknown
        self.known = known


def _converter() -> cattrs.Converter:
    """Structures TOML's values without converting them; knows dataclasses, collections, unions and literals."""
    converter = cattrs.Converter(detailed_validation=True)
    for kind in (bool, int, float, str, type(None), datetime.datetime, datetime.date, datetime.time, enum.Enum):
        converter.register_structure_hook(kind, _value)
    converter.register_structure_hook(Path, lambda value, _: Path(_exactly(value, str, Path)))

    def register(matches: Callable[[Any], bool], hook_of: Callable[[Any, cattrs.Converter], Callable]) -> None:
        converter.register_structure_hook_factory(matches, lambda kind: hook_of(kind, converter))

    register(lambda kind: origin_of(kind) in ARRAYS, _array_hook)
    register(lambda kind: origin_of(kind) in TABLES, _table_hook)
    register(is_dataclass, _dataclass_hook)
    register(lambda kind: origin_of(kind) is Literal, lambda kind, _: _choice_hook(kind))
    register(lambda kind: origin_of(kind) in UNIONS, _union_hook)
    return converter


def _value(value: Any, kind: Any) -> Any:
    if is_enum(kind):  # an IntEnum is an int to cattrs
        return _choice_hook(kind)(value, kind)
    return _number(value, kind) if kind is float else _exactly(value, kind)


def _exactly(value: Any, kind: Any, told: Any = None) -> Any:
    if type(value) is not kind:  # bools are not integers, datetimes not dates
        raise TypeError(f"must be {name_of(told or kind)}, found {describe(value)}")
    return value


class _InexactError(ValueError):
    """An integer that no float is equal to."""


def _number(value: Any, kind: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"must be {name_of(kind)}, found {describe(value)}")
    try:
        number = float(value)
    except OverflowError as error:
        raise _InexactError(f"must be a number that a float can hold, found {describe(value)}") from error
    if isinstance(value, int) and int(number) != value:
        raise _InexactError(
            f"must be a number that a float can hold exactly, found {describe(value)}; the nearest is {number!r}"
        )
    return number


def _array_hook(kind: Any, converter: cattrs.Converter) -> Callable:
    origin, arguments = origin_of(kind), typing.get_args(kind)
    fixed = origin is tuple and hasattr(kind, "__args__") and arguments[-1:] != (Ellipsis,)  # not of a bare tuple
    build = tuple if origin is Sequence else origin

    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, list | tuple):
            hint = ""
            if isinstance(value, Mapping) and value and all(str(name).isdecimal() for name in value):
                hint = (
                    "; elements are overridden one by one only in an array that the file has: set the whole array, as "
                    "in key=[1, 2]"
                )
            raise TypeError(f"must be an array, found {describe(value)}{hint}")
        if fixed and len(value) != len(arguments):
            raise ValueError(f"must be an array of {len(arguments)}, found {describe(value)}")
        kinds = arguments if fixed else [arguments[0] if arguments else Any] * len(value)
        done = _each(enumerate(value), kinds, kind, lambda _, each, item: _inner(each, item, converter))
        if issubclass(build, set | frozenset):
            try:
                twice = [describe(each) for each, count in Counter(done).items() if count > 1]
            except TypeError as error:
                raise TypeError(f"must be an array of what a set can hold: {error}") from error
            if twice:
                raise ValueError(f"must be an array without repetition, found {', '.join(twice)} more than once")
        return build(done)

    return structure


def _table_hook(kind: Any, converter: cattrs.Converter) -> Callable:
    of_keys, item = typing.get_args(kind) or (str, Any)
    key_of = _key_hook(plain(of_keys), converter)

    def structure(value: Any, _: Any) -> dict[Any, Any]:
        if not isinstance(value, Mapping):
            raise TypeError(f"must be a table, found {describe(value)}")
        named: dict[Any, Any] = {}

        def pair(name: Any, each: Any, kind: Any) -> tuple[Any, Any]:
            key = key_of(name)
            if key in named:
                raise ValueError(f"the key is the same as {named[key]!r}; keep one of them")
            named[key] = name
            return key, _inner(each, kind, converter)

        return dict(_each(value.items(), [item] * len(value), kind, pair))

    return structure


def _key_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any], Any]:
    """From a table's key to one of the type; TOML's are strings."""

    def key_of(name: Any) -> Any:
        if kind is int and isinstance(name, str) and _INTEGER.fullmatch(name):
            return int(name)
        try:
            return _inner(name, str if kind is Any else kind, converter)
        except (ValueError, TypeError) as error:
            raise type(error)(f"the key {error}") from error

    return key_of


def _inner(value: Any, kind: Any, converter: cattrs.Converter) -> Any:
    return value if kind is Any else converter.structure(value, kind)


def _each(
    items: Iterable[tuple[Any, Any]], kinds: Iterable[Any], kind: Any, build: Callable[[Any, Any, Any], Any]
) -> list[Any]:
    """`build(index, value, kind)` of every element, or cattrs' error with every fault and its index or name."""
    done, errors = [], []
    for (index, value), item in zip(items, kinds, strict=True):
        try:
            done.append(build(index, value, item))
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


def _choice_hook(kind: Any) -> Callable:
    allowed, build = choices(kind), kind if is_enum(kind) else lambda value: value
    return lambda value, _: build(_one_of(value, allowed))


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
        inexact = None
        for arm in sorted(arms, key=lambda arm: type(value) is not arm):  # the exact type first
            try:
                return converter.structure(value, arm)
            except _InexactError as error:
                inexact = error
            except (cattrs.BaseValidationError, ValueError, TypeError):
                continue
        raise inexact or TypeError(f"must be {name_of(kind)}, found {describe(value)}")

    return structure


def _faults(error: BaseException, key: Key) -> Iterator[Fault]:
    """The faults in the tree of errors that cattrs raises, with their keys."""
    if isinstance(error, _UnknownKeys):
        for name in error.unknown:
            if not isinstance(name, str):
                yield Fault(key, f"the key {name!r} must be a string")
                continue
            what = f"unknown key; {did_you_mean(name, error.known)}"
            yield Fault((*key, name), what, nearest(name, error.known))
    elif isinstance(error, cattrs.ClassValidationError | cattrs.IterableValidationError):
        noted, others = error.group_exceptions()
        for inner, note in noted:
            step = note.index if isinstance(note, cattrs.IterableValidationNote) else note.name
            if isinstance(inner, KeyError) and inner.args == (step,):
                yield Fault((*key, step), f"missing; set it to {name_of(note.type)}")
            else:
                yield from _faults(inner, (*key, step))
        for inner in others:
            yield from _faults(inner, key)
    else:
        yield Fault(key, str(error) or type(error).__name__)


def _without_misspelt(faults: list[Fault]) -> list[Fault]:
    """Drop "missing" for a key that stands there under a misspelt name: that is one fault, not two."""
    meant = {(*fault.key[:-1], fault.meant) for fault in faults if fault.meant}
    return [fault for fault in faults if not (fault.what.startswith("missing;") and fault.key in meant)]
