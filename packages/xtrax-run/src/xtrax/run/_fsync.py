"""Make files and folders durable, not only visible."""

import errno
import os
from pathlib import Path

from xtrax.run._checks import check_path


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Wait until a file's bytes are on the disk.

    A new file's name is durable only after `fsync_directory` of its folder.

    Args:
        path: A regular file.

    Raises:
        TypeError: If `path` is no path.
        IsADirectoryError: If it is a folder.
        OSError: If it cannot be opened or flushed.

    Examples:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "data.bin")
        >>> _ = path.write_bytes(b"abc")
        >>> fsync_file(path)
    """
    path = check_path(path, what="a file")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; use fsync_directory or fsync_tree")
    _fsync(path, os.O_RDONLY)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Wait until a folder's list of names is on the disk: files created, renamed or removed in it.

    Args:
        path: A folder.

    Raises:
        TypeError: If `path` is no path.
        NotADirectoryError: If it is not a folder.
        OSError: If it cannot be opened or flushed.

    Examples:
        >>> import tempfile
        >>> fsync_directory(tempfile.mkdtemp())
    """
    _fsync(check_path(path, what="a folder"), os.O_RDONLY | os.O_DIRECTORY)


def fsync_tree(path: str | os.PathLike[str]) -> None:
    """`fsync` every file and folder below a folder, and itself, from the bottom up.

    From the bottom up, because a name should not be durable before what it names. Symbolic links are not followed.

    Args:
        path: A folder.

    Raises:
        TypeError: If `path` is no path.
        NotADirectoryError: If it is not a folder.
        OSError: If anything below it cannot be flushed.

    Examples:
        >>> import pathlib, tempfile
        >>> root = pathlib.Path(tempfile.mkdtemp())
        >>> (root / "a").mkdir()
        >>> _ = (root / "a" / "data.bin").write_bytes(b"abc")
        >>> fsync_tree(root)
    """

    def fail(error: OSError) -> None:
        raise error

    path = check_path(path, what="a folder")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a folder; fsync_tree flushes a folder and all below it")
    for folder, _, files in os.walk(path, topdown=False, onerror=fail):
        for name in files:
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink():
                fsync_file(file)
        fsync_directory(folder)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, durably.

    Raises:
        NotADirectoryError: If it, or one of its parents, is a file.
        FileNotFoundError: If it, or one of its parents, is a dangling symbolic link.
        OSError: If it cannot be made.
    """
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "It is a file, not a folder", str(path))
        if path.is_symlink() and not path.exists():
            what = f"It is a symbolic link to {os.readlink(path)}, which is not there"
            raise FileNotFoundError(errno.ENOENT, what, str(path))
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        fsync_directory(path.parent)


def _fsync(path: str | os.PathLike[str], flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
