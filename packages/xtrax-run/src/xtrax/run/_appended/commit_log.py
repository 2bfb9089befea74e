"""The commit log of a tiled run: one line of JSON a tile, and what no line names does not exist.

Each line carries a checksum of itself. The file only grows while a run writes; a line without its newline was being
written when the process died and is cut on opening, a whole line whose checksum is wrong was changed afterwards.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from xtrax.run._canonical import canonical_json_bytes
from xtrax.run._fsync import fsync_directory

_CHECK = "check"


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the checksum of its content."""
    return {**record, _CHECK: _checksum(record)}


def is_sealed(record: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a record is a dict whose checksum fits its content."""
    if not isinstance(record, dict) or _CHECK not in record:
        return False
    rest = {name: value for name, value in record.items() if name != _CHECK}
    return record[_CHECK] == _checksum(rest)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json_bytes(record)).hexdigest()[:16]


@dataclass(frozen=True)
class LogContent:
    """What a commit log holds.

    Attributes:
        records: The records of the whole lines, in order.
        damaged: Numbers (from 1) of whole lines that are not what was written.
        whole_bytes: Where the last whole line ends.
        torn: Whether something follows it.
        sha256: Of the whole file.
    """

    records: tuple[dict[str, Any], ...]
    damaged: tuple[int, ...]
    whole_bytes: int
    torn: bool
    sha256: str


def read_log(path: Path) -> LogContent:
    """Read a log without changing it.

    Raises:
        FileNotFoundError: If it is not there.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    records, damaged = [], []
    for number, line in enumerate(data[:whole].splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if is_sealed(record):
            records.append({name: value for name, value in record.items() if name != _CHECK})
        else:
            damaged.append(number)
    return LogContent(tuple(records), tuple(damaged), whole, whole < len(data), hashlib.sha256(data).hexdigest())


class CommitLog:
    """Appends records durably. One process writes at a time, under the folder's lock."""

    def __init__(self, path: Path):
        """Nothing is touched yet; `create` or `load` comes first."""
        self.path = path
        self._written: Identity | None = None

    @property
    def is_as_written(self) -> bool:
        """Whether it is the file that was loaded or written here, and as long."""
        return identity_of(self.path) == self._written

    def create(self) -> None:
        """Make an empty log, durably, in place of any that is there."""
        self.replace(())

    def load(self) -> LogContent:
        """Read the log, after cutting what a dead writer left of a line."""
        content = read_log(self.path)
        if content.torn:
            self._cut(content.whole_bytes)
        self._written = identity_of(self.path)
        return content

    def append(self, records: Sequence[dict[str, Any]]) -> None:
        """Add records; when it returns they are on the disk.

        Raises:
            OSError: If the disk does not take them. None of them counts then: what was written of them is cut.
        """
        data = b"".join(_line(record) for record in records)
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            before = os.fstat(handle).st_size
            try:
                write_all(handle, data)
                os.fsync(handle)
            except OSError:
                # Otherwise the next line would be glued to half a line, and both be lost.
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, before)
                    os.fsync(handle)
                raise
            self._written = _identity(os.fstat(handle))
        finally:
            os.close(handle)

    def replace(self, records: Iterable[dict[str, Any]]) -> None:
        """Put other records in the place of all; a kill leaves the old ones or the new ones."""
        temporary = self.path.with_name(f"{self.path.name}.partial")
        write_file(temporary, b"".join(_line(record) for record in records))
        put_in_place(temporary, self.path)
        fsync_directory(self.path.parent)
        self._written = identity_of(self.path)

    def _cut(self, size: int) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, size)
            os.fsync(handle)
        finally:
            os.close(handle)


def _line(record: dict[str, Any]) -> bytes:
    return canonical_json_bytes(sealed(record)) + b"\n"


Identity = tuple[int, int, int]


def identity_of(path: Path) -> Identity | None:
    """Tells a file from another one, and from itself when it was longer or shorter; None if there is none."""
    try:
        return _identity(os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino, found.st_size


def put_in_place(temporary: Path, path: Path) -> None:
    """Give a file its name, in place of whatever has it, as in `remove`."""
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        remove(path)
        os.replace(temporary, path)


def remove(path: Path) -> None:
    """Remove a file, or an empty folder that has come into its place.

    Raises:
        OSError: If a folder with something in it is there.
    """
    if not path.is_dir():
        path.unlink()
        return
    try:
        path.rmdir()
    except OSError as error:
        what = "a folder with something in it is where the run keeps a file; move it away"
        raise OSError(error.errno, what, str(path)) from None


def write_all(handle: int, data: bytes | memoryview) -> None:
    """Write all of it: `os.write` may take a part."""
    view = memoryview(data)
    while view.nbytes:
        view = view[os.write(handle, view) :]


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file and flush it. Its name is durable once its folder is flushed too."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for part in parts:
            write_all(handle, part)
        os.fsync(handle)
    finally:
        os.close(handle)
