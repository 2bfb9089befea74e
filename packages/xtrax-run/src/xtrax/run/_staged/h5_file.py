"""A file that changes in transactions, for HDF5, which by itself leaves a broken file if it is stopped while writing.

HDF5 writes through `TransactionFile`. New space at the end of the file is written at once: nothing refers to it yet.
Changes of what was there before are kept in memory as pages, and `commit` takes them over: it flushes the new space,
writes the pages to a journal, flushes and renames it, and then changes the file. Whoever is stopped in between leaves
either the file as it was, or a whole journal that `recover` plays again.
"""

import hashlib
import io
import os
import struct
from pathlib import Path

from xtrax.run._fsync import fsync_directory

_PAGE = 4096
_MAGIC = b"xtrax-h5-journal-1\n"
_HEAD = struct.Struct("<QQ")  # the file's size afterwards, the number of pages
_NUMBER = struct.Struct("<Q")


class TransactionFile(io.RawIOBase):
    """A binary file, open for reading and writing, whose changes wait for `commit`."""

    def __init__(self, path: Path, journal: Path):
        """Open a file that exists.

        Args:
            path: The file; `recover` was called on it.
            journal: Where the journal goes; on the same file system.
        """
        self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._path, self._journal = path, journal
        self._base = self._size = os.fstat(self._handle).st_size
        self._first_new = -(-self._base // _PAGE)  # pages from here on hold nothing that was there before
        self._pages: dict[int, bytearray] = {}
        self._at = 0
        self._error: OSError | None = None

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def writable(self) -> bool:
        """Whether it can be written."""
        return True

    def seekable(self) -> bool:
        """Whether its position can be set."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """The position."""
        return self._at

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # ty: ignore[incompatible-method-override]
        """Read into a buffer; return how many bytes."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size - self._at))
        for page, start, stop, offset in _parts(self._at, count):
            held = self._pages.get(page)
            data = held[start:stop] if held else os.pread(self._handle, stop - start, page * _PAGE + start)
            view[offset : offset + stop - start] = data.ljust(stop - start, b"\0")
        self._at += count
        return count

    def write(self, data: bytes | memoryview, /) -> int:  # ty: ignore[incompatible-method-override]
        """Write all bytes; an error of the disk is raised by `commit`, since HDF5 would not survive it here."""
        view = memoryview(data).cast("B")
        edge = max(0, min(len(view), self._first_new * _PAGE - self._at))
        self._write_pages(self._at, view[:edge])
        try:
            if self._error is None:
                _pwrite_all(self._handle, view[edge:], self._at + edge)
        except OSError as error:
            self._error = error
        if self._error is not None:
            self._write_pages(self._at + edge, view[edge:])  # so that what was written can be read
        self._at += len(view)
        self._size = max(self._size, self._at)
        return len(view)

    def _write_pages(self, at: int, view: memoryview) -> None:
        for page, start, stop, offset in _parts(at, len(view)):
            if page not in self._pages:
                self._pages[page] = bytearray(os.pread(self._handle, _PAGE, page * _PAGE).ljust(_PAGE, b"\0"))
            self._pages[page][start:stop] = view[offset : offset + stop - start]

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size; it takes effect with `commit`."""
        self._size = self._at if size is None else size
        return self._size

    def flush(self) -> None:
        """Do nothing: `commit` flushes."""

    def commit(self) -> None:
        """Make every change durable, or none.

        Raises:
            OSError: If the disk did not take them; nothing that was there before has changed, or `recover` finishes.
        """
        if self._error is not None:
            raise self._error
        os.ftruncate(self._handle, max(self._size, self._base))
        os.fsync(self._handle)
        pages = [_NUMBER.pack(number) + page for number, page in sorted(self._pages.items())]
        body = b"".join([_MAGIC, _HEAD.pack(self._size, len(pages)), *pages])
        temporary = self._journal.with_suffix(".new")
        with temporary.open("wb") as file:
            file.write(body + hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._journal)
        fsync_directory(self._journal.parent)
        self._base = self._size  # from here on only forward
        _play(self._handle, body, self._journal)

    def replay(self) -> None:
        """Read from now on what a commit that was stopped would have written; the file stays as it is.

        Raises:
            ValueError: If the journal is damaged.
        """
        if (body := _read_journal(self._path, self._journal)) is not None:
            self._size, pages = _unpack(body)
            self._pages.update((number, bytearray(page)) for number, page in pages)

    def end(self) -> None:
        """Close, and take back what was not committed."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            try:
                if os.fstat(handle).st_size != self._base:
                    os.ftruncate(handle, self._base)
            finally:
                os.close(handle)


def recover(path: Path, journal: Path) -> None:
    """Finish a commit that was stopped.

    Raises:
        ValueError: If the journal is damaged.
        OSError: If the file cannot be written.
    """
    journal.with_suffix(".new").unlink(missing_ok=True)
    body = _read_journal(path, journal)
    if body is None:
        return
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _play(handle, body, journal)
    finally:
        os.close(handle)


def _read_journal(path: Path, journal: Path) -> bytes | None:
    """What a journal says, if there is one."""
    if not journal.exists():
        return None
    data = journal.read_bytes()
    body, digest = data[:-32], data[-32:]
    if not body.startswith(_MAGIC) or hashlib.sha256(body).digest() != digest:
        raise ValueError(f"{journal} is damaged; without it {path} may be too. Restore both from a copy")
    return body


def _unpack(body: bytes) -> tuple[int, list[tuple[int, memoryview]]]:
    """The file's size, and pages with their numbers."""
    at = len(_MAGIC) + _HEAD.size
    size, count = _HEAD.unpack(body[len(_MAGIC) : at])
    pages = []
    for _ in range(count):
        (number,) = _NUMBER.unpack_from(body, at)
        start = at + _NUMBER.size
        at = start + _PAGE
        pages.append((number, memoryview(body)[start:at]))
    return size, pages


def _play(handle: int, body: bytes, journal: Path) -> None:
    size, pages = _unpack(body)
    for number, page in pages:
        _pwrite_all(handle, page, number * _PAGE)
    os.ftruncate(handle, size)
    os.fsync(handle)
    journal.unlink()
    fsync_directory(journal.parent)


def _parts(at: int, count: int) -> list[tuple[int, int, int, int]]:
    """Pages that `count` bytes from `at` touch: number, start and stop in the page, offset in the bytes."""
    parts, end, offset = [], at + count, 0
    while at < end:
        page, start = divmod(at, _PAGE)
        stop = min(_PAGE, start + end - at)
        parts.append((page, start, stop, offset))
        offset += stop - start
        at += stop - start
    return parts


def _pwrite_all(handle: int, view: memoryview, at: int) -> None:
    while view:
        done = os.pwrite(handle, view, at)
        view, at = view[done:], at + done
