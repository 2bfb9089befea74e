"""One live writer a folder."""

import contextlib
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from xtrax.run._errors import SinkError
from xtrax.run._names import HIDDEN

# A forked child inherits open files, and with them the lock: it would outlive the process that took it.
_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_drop_in_child)


class FolderLock:
    """An exclusive `flock` on `folder/.xtrax/lock`, which the kernel drops when the process ends, however it ends."""

    def __init__(self, folder: Path):
        """Take the lock.

        Raises:
            SinkError: If a live writer holds it, or the file system has no locks.
            OSError: If the lock file cannot be made.
        """
        self.folder = folder
        self.path = folder / HIDDEN / "lock"
        self._handle: int | None = None
        while self._handle is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path.parent)
            try:
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                continue  # a writer that was just ending removed the folder
            try:
                self._flock(handle)
                # That writer may have removed the file after it was opened here: then this lock protects nothing.
                if _same_file(handle, self.path):
                    self._closer = weakref.finalize(self, os.close, handle)
                    self._handle = handle
            finally:
                if self._handle is None:
                    os.close(handle)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        _held.add(self)

    def _flock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode() or "unknown"
            raise SinkError(
                f"{self.folder} is being written by another live sink (holder: {holder}); wait for it to finish, "
                "finalize it, or choose another output_dir",
                path=self.folder,
            ) from None
        except OSError as error:
            raise SinkError(
                f"{self.folder} cannot be locked ({error}); two writers could not be told apart there. Choose an "
                "output_dir on a file system with flock",
                path=self.folder,
            ) from error

    def check(self, *_: object) -> None:
        """Raise `FileNotFoundError` unless the folder is still the one that was locked, by this process."""
        if self._handle is None:
            raise FileNotFoundError(
                "the sink was opened by another process (before a fork) or is closed; open a new one"
            )
        if not self.held():
            raise FileNotFoundError("the folder was removed or replaced while it was being written")

    def held(self) -> bool:
        """Whether this process holds the lock of what is at the folder's path now."""
        return self._handle is not None and _same_file(self._handle, self.path)

    def release(self) -> None:
        """Give the lock up and leave no trace of it."""
        if self._handle is not None:
            with contextlib.suppress(OSError):  # a vanished or read-only folder; the lock itself goes with the handle
                if _same_file(self._handle, self.path):
                    self.path.unlink()
                    self.path.parent.rmdir()
            self._close()

    def _close(self) -> None:
        if self._handle is not None:
            self._handle = None
            self._closer()


class NoLock:
    """In the place of a lock that a disk refuses: it lets a finished run be read, and nothing be written."""

    def __init__(self, refused: SinkError):
        """Keep what taking the lock has raised."""
        self._refused = refused

    def check(self, *reasons: object) -> None:
        """Raise it, with notes of why something has to be written."""
        for reason in reasons:
            self._refused.add_note(f"To be written anew: {reason}")
        raise self._refused

    def held(self) -> bool:
        """No."""
        return False

    def release(self) -> None:
        """Nothing is held."""


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
