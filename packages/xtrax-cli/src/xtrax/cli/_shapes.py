"""The grammar of shapes on a command line: `x=(4,3)f32 batch.mask=(4,)bool`."""

import difflib
import re
from dataclasses import dataclass
from typing import TypeAlias

from xtrax.cli._errors import ShapeParseError

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "bool": "bool",
    "c64": "complex64",
    "c128": "complex128",
    "key": "key",
}

_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_DIMENSION = re.compile(r"[0-9]+")
_BLANK = re.compile(r"\s*")
_WORD = re.compile(r"[^\s,()=]*")
_LARGEST = 2**63 - 1
_WINDOW = 70  # characters of the text that are shown around a fault


@dataclass(frozen=True)
class Shape:
    """One entry: the shape of an array and its dtype, by jax's name or `"key"` for typed PRNG keys."""

    shape: tuple[int, ...]
    dtype: str


Shapes: TypeAlias = dict[str, "Shape | Shapes"]


def parse_shapes(text: str) -> Shapes:
    """Parse entries `name=(d0,d1,...)dtype`, separated by blanks.

    Args:
        text: The entries. A name with dots stands for nested dicts. There may be blanks inside the parentheses.

    Returns:
        From name to `Shape`, or to a dict of the same kind, in the order of the text.

    Raises:
        ShapeParseError: At the first fault: its place by a caret, and the grammar.

    Examples:
        >>> parse_shapes("x=(4,3)f32 batch.y=()i32 batch.k=(4,)key")["batch"]
        {'y': Shape(shape=(), dtype='int32'), 'k': Shape(shape=(4,), dtype='key')}
        >>> parse_shapes("x=(4,3)f33")
        Traceback (most recent call last):
            ...
        xtrax.cli._errors.ShapeParseError: there is no dtype 'f33'; did you mean f32?
          x=(4,3)f33
                 ^
        Entries are name=(d0,d1,...)dtype, separated by blanks; dots in a name nest: "x=(4,3)f32 batch.y=(4,)i32".
        The dtypes are f16 bf16 f32 f64 i8 i16 i32 i64 u8 u16 u32 u64 bool c64 c128 key.
    """
    shapes: Shapes = {}
    at = _skip(text, 0)
    if at == len(text):
        raise _fault(text, at, "there is no entry")
    while at < len(text):
        start, end = at, _skip_name(text, at)
        name = text[start:end]
        at = _expect(text, end, "=", f"after the name {name!r}")
        at = _expect(text, at, "(", f"of the shape of {name!r}")
        dimensions, at = _dimensions(text, at)
        dtype, at = _dtype(text, at)
        _place(shapes, name, Shape(dimensions, dtype), text, start)
        at = _skip(text, at)
    return shapes


def _skip(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return at if blank is None else blank.end()


def _skip_name(text: str, at: int) -> int:
    name = _NAME.match(text, at)
    if name is None:
        raise _fault(text, at, f"a name must stand here, found {text[at]!r}")
    return name.end()


def _expect(text: str, at: int, wanted: str, where: str) -> int:
    if not text.startswith(wanted, at):
        raise _fault(text, at, f"{wanted!r} {where} must stand here, found {_found(text, at)}")
    return at + 1


def _dimensions(text: str, at: int) -> tuple[tuple[int, ...], int]:
    """The sizes up to the closing parenthesis, and where it ends; a comma may follow the last."""
    sizes: list[int] = []
    while True:
        at = _skip(text, at)
        if text.startswith(")", at):
            return tuple(sizes), at + 1
        size = _DIMENSION.match(text, at)
        if size is None:
            raise _fault(text, at, f"a size of at least 0 or ')' must stand here, found {_found(text, at)}")
        if int(size[0][:30]) > _LARGEST:
            raise _fault(text, at, f"a size must be at most {_LARGEST}")
        sizes.append(int(size[0]))
        at = _skip(text, size.end())
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(")", at):
            raise _fault(text, at, f"',' or ')' must stand here, found {_found(text, at)}")


def _dtype(text: str, at: int) -> tuple[str, int]:
    word = _WORD.match(text, at)
    name, end = (word[0], word.end()) if word else ("", at)
    if name not in DTYPES:
        by_jax_name = {full: short for short, full in DTYPES.items()}
        near = by_jax_name.get(name) or next(iter(difflib.get_close_matches(name, DTYPES, 1)), None)
        hint = f"; did you mean {near}?" if near else ""
        raise _fault(text, at, f"there is no dtype {name!r}{hint}" if name else "a dtype must stand here")
    if end < len(text) and not text[end].isspace():
        raise _fault(text, end, f"a blank or the end must stand here, found {text[end]!r}")
    return DTYPES[name], end


def _place(shapes: Shapes, name: str, shape: Shape, text: str, at: int) -> None:
    """Put an entry where its dotted name says."""
    *parents, leaf = name.split(".")
    here = shapes
    for depth, parent in enumerate(parents, 1):
        inner = here.setdefault(parent, {})
        if isinstance(inner, Shape):
            raise _fault(text, at, f"{'.'.join(parents[:depth])!r} has a shape already, so it cannot hold {name!r}")
        here = inner
    if leaf in here:
        kind = "a shape" if isinstance(here[leaf], Shape) else "entries in it"
        raise _fault(text, at, f"{name!r} has {kind} already; give each name once")
    here[leaf] = shape


def _found(text: str, at: int) -> str:
    return repr(text[at]) if at < len(text) else "the end"


def _fault(text: str, at: int, what: str) -> ShapeParseError:
    """The error at a position, with the text around it on one line."""
    first = max(0, min(at - _WINDOW // 2, len(text) - _WINDOW))
    last = first + _WINDOW
    before, after = ("..." if first else ""), ("..." if last < len(text) else "")
    shown = before + "".join(" " if c.isspace() else c for c in text[first:last]) + after
    return ShapeParseError(
        f"{what}\n  {shown}\n  {' ' * (len(before) + at - first)}^\n"
        'Entries are name=(d0,d1,...)dtype, separated by blanks; dots in a name nest: "x=(4,3)f32 batch.y=(4,)i32".'
        f"\nThe dtypes are {' '.join(DTYPES)}."
    )
