"""A TOML file as a dict that remembers where its keys stand."""

import ast
import contextlib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from xtrax.config._faults import TOO_DEEP, Fault, check_error_class, nearest, report
from xtrax.config._keys import Key, format_key, key_lines

_POSITION = re.compile(r"\s*\(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")


class TomlDocument(dict[str, Any]):
    """The tables of a TOML file: a plain `dict` of plain values, which also knows its file and lines.

    Attributes:
        path: The file.
        origins: For each key, as a tuple of its parts from the root, the line (from 1) on which it first stands, or
            the text `"override"` if it was set by `apply_overrides`.
    """

    def __init__(self, tables: Mapping[str, Any], path: Path, origins: Mapping[Key, int | str]) -> None:
        """Wrap parsed tables."""
        super().__init__(tables)
        self.path = path
        self.origins = dict(origins)

    def where(self, key: Key = ()) -> str:
        """`file:line` of a key, or of the nearest table that holds it; `file` alone if no line is known.

        Args:
            key: The key's parts from the root, such as `("optimizer", "kwargs", "lr")`.
        """
        for length in range(len(key), 0, -1):
            origin = self.origins.get(key[:length])
            if isinstance(origin, int):
                return f"{self.path}:{origin}"
            if origin is not None:
                return f"{self.path} ({origin})"
        return str(self.path)


def load_toml_document(path: str | os.PathLike[str], error_cls: type[Exception]) -> TomlDocument:
    """Read a TOML file.

    Args:
        path: The file, in UTF-8; a byte order mark is allowed.
        error_cls: The exception class to raise for a fault of the file; called with the message.

    Returns:
        The document: a `dict` that also knows the file and the line of each key.

    Raises:
        TypeError: If `path` is not a path, or `error_cls` not an exception class.
        error_cls: If the file is missing, is a folder, cannot be read, is not UTF-8, is not TOML, or has an integer of
            more digits than Python reads. A syntax error is told as `file:line:column`.

    Examples:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "run.toml")
        >>> _ = path.write_text("seed = 3\\n[model]\\npath = 'net:make'\\n")
        >>> document = load_toml_document(path, ValueError)
        >>> document["model"]
        {'path': 'net:make'}
        >>> document.where(("model", "path")) == f"{path}:3"
        True
    """
    check_error_class(error_cls)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a str or a path, got {type(path).__name__}")
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise error_cls(_unreadable(file, error)) from error
    except ValueError as error:  # a NUL byte in the name
        raise error_cls(f"{str(path)!r} cannot be the name of a file: {error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode("utf-8-sig")
        _refuse_syntax(
            file, before, f"not UTF-8 (byte 0x{data[error.start]:02x}); save the file as UTF-8", error_cls, error
        )
    return _parse(file, text, error_cls)


def _parse(file: Path, text: str, error_cls: type[Exception]) -> TomlDocument:
    try:
        return TomlDocument(tomllib.loads(text), file, key_lines(text))
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        position = _POSITION.search(message)
        message = message[: position.start()] if position else message
        if position and position["line"]:
            line, column = int(position["line"]), int(position["column"])
            what = _told(message, text, line, column)
            raise error_cls(f"{file}:{line}:{column}: not valid TOML: {what}") from error
        what = _told(message, text, text.count("\n") + 1, len(text) + 1)
        _refuse_syntax(file, text, f"not valid TOML: {what} at the end of the file", error_cls, error)
    except ValueError as error:  # of int, which does not tell where
        raise error_cls(_too_long(file, text, error_cls) or f"{file}: cannot be read: {error}") from error
    except RecursionError as error:
        raise error_cls(f"{file}: {TOO_DEEP.what}") from error


def _too_long(file: Path, text: str, error_cls: type[Exception]) -> str:
    """One line for each integer of more digits than Python reads."""
    limit = sys.get_int_max_str_digits()
    # Shorter integers in their place are found again in the document if they are values, not parts of a string or key.
    first, found = 10**40, []

    def shorter(match: re.Match[str]) -> str:
        found.append(match.group())
        return str(first + len(found) - 1)

    text = re.sub(rf"(?<![\w.])\d(?:_?\d){{{limit},}}", shorter, text)
    if not found:
        return ""
    document = _parse(file, text, error_cls)
    faults: list[Fault] = []
    waiting: list[tuple[Key, Any]] = [((), document)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict | list):
            steps = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [((*key, step), inner) for step, inner in steps]
        elif isinstance(value, int) and 0 <= abs(value) - first < len(found):
            digits = len(found[abs(value) - first].replace("_", ""))
            faults.append(Fault(key, f"an integer of {digits} digits is too long; Python reads at most {limit}"))
    return report(document, faults[::-1])


def _told(message: str, text: str, line: int, column: int) -> str:
    """A message of `tomllib`; of a key or table that stands twice, with its name."""
    if message == "Cannot overwrite a value":
        # The position is behind the value, which may have several lines: the key is on the last line from which there
        # is TOML up to there.
        lines = text.replace("\r\n", "\n").splitlines(keepends=True)[:line]
        lines[-1] = lines[-1][: column - 1]
        for first in range(len(lines) - 1, -1, -1):
            part = "".join(lines[first:]).strip()
            with contextlib.suppress(tomllib.TOMLDecodeError):
                if tomllib.loads(part) and not part.startswith("["):
                    return f"the key {part.partition('=')[0].strip()} is set twice; keep one"
    if declared := re.fullmatch(r"Cannot declare (\(.*\)) twice", message):
        return f"the table {format_key(ast.literal_eval(declared[1]))} stands twice; join them"
    return message


def _refuse_syntax(file: Path, before: str, what: str, error_cls: type[Exception], cause: Exception) -> NoReturn:
    """Raise `error_cls` at the position just after `before`."""
    line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
    raise error_cls(f"{file}:{line}:{column}: {what}") from cause


def _unreadable(file: Path, error: OSError) -> str:
    """What is wrong with a file that did not open, and what to do."""
    if isinstance(error, FileNotFoundError):
        folder = file.parent
        if not folder.is_dir():
            return f"{file}: no such file; the folder {folder} does not exist either"
        others = sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".toml")
        if near := nearest(file.name, others):
            return f"{file}: no such file; did you mean {folder / near}?"
        listing = f"that folder has {', '.join(others[:5])}" if others else "that folder has no .toml file"
        return f"{file}: no such file; {listing}"
    if isinstance(error, IsADirectoryError):
        return f"{file}: is a folder; name the TOML file in it"
    return f"{file}: cannot be read: {error.strerror or error}"
