"""Dotted keys: how they are written, split, and where they stand in a TOML text."""

import bisect
import json
import re
import tomllib

# A key as a path from the root: strings for tables, integers for the elements of arrays.
Key = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""("{0,2})' r"|'''.*?'''('{0,2})" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}\n#]+")


def format_key(key: Key) -> str:
    """The dotted form of a key, with quotes where TOML needs them and `[i]` for the element of an array."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            bare = part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False)
            text += f".{bare}" if text else bare
    return text


def split_key(text: str) -> tuple[str, ...]:
    """The parts of a dotted key, by TOML's rules for quotes; `ValueError` if it is not one."""
    scanner = _Scanner(text.strip())
    parts = scanner.key()
    if not parts or scanner.pos != len(scanner.text):
        raise ValueError(f"{text!r} is not a dotted key such as optimizer.kwargs.lr")
    return parts


def key_lines(text: str) -> dict[Key, int]:
    """The line, counted from 1, of each key and table of a TOML text that `tomllib` accepts.

    `tomllib` does not tell where a key stands. The first mention counts, so that `[a.b]` also gives a line to `a`.
    """
    return _Scanner(text.replace("\r\n", "\n")).document()


class _Scanner:
    """Walks over a valid TOML text and notes where its keys are; values are skipped, not read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.pos = 0
        self.lines: dict[Key, int] = {}
        self.newlines = [match.start() for match in re.finditer("\n", text)]
        self.tables_in_array: dict[Key, int] = {}

    def document(self) -> dict[Key, int]:
        table: Key = ()
        self.skip()
        while self.pos < len(self.text):
            if self.text.startswith("[", self.pos):
                table = self.header()
            else:
                self.pair(table)
            self.skip()
        return self.lines

    def header(self) -> Key:
        start, is_array = self.pos, self.text.startswith("[[", self.pos)
        self.pos += 2 if is_array else 1
        parts = self.key()
        self.pos += 2 if is_array else 1
        key: Key = ()
        for part in parts[:-1]:
            key = self.element((*key, part))
            self.note(key, start)
        key = (*key, parts[-1])
        self.note(key, start)
        if is_array:
            self.tables_in_array[key] = self.tables_in_array.get(key, -1) + 1
            key = self.element(key)
            self.note(key, start)
        return key

    def element(self, key: Key) -> Key:
        return (*key, self.tables_in_array[key]) if key in self.tables_in_array else key

    def pair(self, table: Key) -> None:
        start = self.pos
        key = table
        for part in self.key():
            key = (*key, part)
            self.note(key, start)
        self.pos += 1  # the equals sign
        self.skip()
        self.value(key)

    def value(self, key: Key) -> None:
        if self.text[self.pos] in "\"'":
            self.string()
        elif self.text[self.pos] in "[{":
            closing = "]" if self.text[self.pos] == "[" else "}"
            self.pos += 1
            self.skip()
            index = 0
            while self.text[self.pos] != closing:
                if closing == "}":
                    self.pair(key)
                else:
                    self.note((*key, index), self.pos)
                    self.value((*key, index))
                    index += 1
                self.skip()
                if self.text[self.pos] == ",":
                    self.pos += 1
                    self.skip()
            self.pos += 1
        else:
            self.pos = self.match(_SCALAR).end()

    def key(self) -> tuple[str, ...]:
        """A dotted key and the blanks around it."""
        parts: list[str] = []
        while True:
            self.skip()
            if self.text[self.pos : self.pos + 1] in ("'", '"'):
                parts.append(tomllib.loads("key = " + self.string())["key"])
            elif bare := _BARE.match(self.text, self.pos):
                parts.append(bare.group())
                self.pos = bare.end()
            else:
                return ()
            self.skip()
            if self.text[self.pos : self.pos + 1] != ".":
                return tuple(parts)
            self.pos += 1

    def string(self) -> str:
        found = self.match(_STRING)
        self.pos = found.end()
        return found.group()

    def skip(self) -> None:
        self.pos = self.match(_BLANK).end()

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.pos)
        if found is None:
            raise ValueError(f"not valid TOML at character {self.pos}")
        return found

    def note(self, key: Key, pos: int) -> None:
        self.lines.setdefault(key, bisect.bisect_left(self.newlines, pos) + 1)
