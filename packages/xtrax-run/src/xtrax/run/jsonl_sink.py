"""Staged results as JSON lines, and how to read them back."""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from xtrax.run._checks import check_path
from xtrax.run._errors import Key
from xtrax.run._fsync import fsync_directory
from xtrax.run._names import HIDDEN, key_path
from xtrax.run._staged.sink import BufferedSink, Entry, Names, Writer
from xtrax.run._values import NUMERIC

_FILE = "results.jsonl"
_VERSION = 1
_SMALL_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_log = logging.getLogger("xtrax.run")


@dataclass(frozen=True, eq=False)
class Record:
    """One key's results, read back.

    Attributes:
        key: The key, ints and strings as they were staged.
        attrs: Its attributes.
        arrays: Its arrays by name, with dtype and shape as staged.
    """

    key: Key
    attrs: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class _JsonlWriter:
    """Appends a line a key; see `xtrax.run._staged.sink.Writer`."""

    format: ClassVar[str] = "jsonl"
    dtypes: ClassVar[frozenset[str]] = NUMERIC | set(_SMALL_FLOATS)

    def __init__(self, folder: Path):
        self._folder = folder
        self._path = folder / _FILE
        self._handle: int | None = None

    def find(self) -> dict[str, Any] | None:
        return read_jsonl_provenance(self._path) if self._path.exists() else None

    def load(self) -> None:
        (self._folder / HIDDEN / "new").unlink(missing_ok=True)
        if not self._path.exists():
            return
        self._handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        size, whole = os.fstat(self._handle).st_size, _whole_lines(self._handle)
        if whole < size:
            _log.warning(
                "%s: dropped the last %d bytes, a line that a stopped writer did not finish", self._path, size - whole
            )
            os.ftruncate(self._handle, whole)
            os.fsync(self._handle)

    def create(self, provenance: dict[str, Any]) -> None:
        new = self._folder / HIDDEN / "new"
        with new.open("w", encoding="utf-8") as file:
            file.write(_dump({"format": "xtrax-jsonl", "version": _VERSION, "provenance": provenance}))
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, self._path)
        fsync_directory(self._folder)
        self._handle = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def node(self, path: Names) -> Literal["group", "array"] | None:
        return None  # lines have no paths, so none can clash

    def save(self, entries: Sequence[Entry], saved: list[Entry]) -> None:
        assert self._handle is not None, "load or create comes first"
        start = os.fstat(self._handle).st_size
        written: list[Entry] = []
        failed: OSError | None = None
        for entry in entries:
            before = os.fstat(self._handle).st_size
            try:
                _write_all(self._handle, _line(entry))
            except OSError as error:
                os.ftruncate(self._handle, before)
                failed = error
                break
            written.append(entry)
        try:
            os.fsync(self._handle)
        except OSError:
            os.ftruncate(self._handle, start)  # what the disk refused must not be found there later
            raise
        saved += written
        if failed:
            raise failed

    def close(self, *, tidy: bool) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class JsonlStagingSink(BufferedSink):
    """Stages results by key into `output_dir/results.jsonl`: the provenance, then one JSON object a line.

    Arrays are nested lists with their dtype and shape, and `read_jsonl` gives back every value exactly, NaN and the
    infinities included (a NaN's sign and payload are not kept). Complex numbers are pairs. A line is there whole or not
    at all: a torn last line, which only a crash can leave, is dropped when a sink opens the file again. A key that was
    drained before gets another line; `read_jsonl` merges them.

    Text is about four times the size of the numbers: for large arrays use Zarr.

    Args:
        output_dir: The folder, made if missing.
        flush_every: Drain after this many calls of `stage`.
        run_id: The run; needed to go on with one that is there. `None`: a new id.
        extension_schema: Types of the attributes that callers may set, by name; `None`: any.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument has a wrong value, or the folder holds another run, format or version.
        SinkError: If the folder cannot be written, or a live sink writes there.

    Examples:
        >>> import tempfile, warnings
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # no git repository here
        ...     with JsonlStagingSink(folder) as sink:
        ...         sink.stage(("step", 1), attrs={"split": "train"}, loss=[0.5, float("nan")])
        >>> [record] = read_jsonl(folder)
        >>> record.key, record.attrs, record.arrays["loss"]
        (('step', 1), {'split': 'train'}, array([0.5, nan]))
    """

    _writer_class: ClassVar[type[Writer]] = _JsonlWriter


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """Read what a `JsonlStagingSink` wrote, also while it is writing.

    Args:
        path: The file, or the sink's `output_dir`.

    Returns:
        One record a key, in the order in which keys first appear; the lines of one key are merged.

    Warns:
        RuntimeWarning: If the last line is torn (its writer was stopped); it is left out.

    Raises:
        TypeError: If `path` is no path.
        FileNotFoundError: If there is no such file.
        ValueError: If the file is of another kind or version, or a line is damaged; the message names it.
    """
    path = _file(path)
    records: dict[Names, Record] = {}
    for number, text in _lines(path):
        try:
            raw = json.loads(text)
            key = tuple(raw["key"])
            record = records.setdefault(key_path(key), Record(key))
            record.attrs.update(raw["attrs"])
            record.arrays.update({name: _decode(value) for name, value in raw["arrays"].items()})
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error!r}); remove that line to read the rest"
            ) from error
    return list(records.values())


def read_jsonl_provenance(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The provenance of a run that a `JsonlStagingSink` wrote: run id, time, commit, versions, device.

    Args:
        path: The file, or the sink's `output_dir`.

    Raises:
        TypeError: If `path` is no path.
        FileNotFoundError: If there is no such file.
        ValueError: If the file is of another kind or version.
    """
    path = _file(path)
    with path.open("rb") as file:
        text = file.readline()
    try:
        head = json.loads(text)
        if head["format"] != "xtrax-jsonl" or head["version"] != _VERSION:
            raise ValueError(f"format {head['format']!r}, version {head['version']!r}")
        return dict(head["provenance"])
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is no results file of version {_VERSION} of xtrax.run ({error!r})") from error


def _file(path: str | os.PathLike[str]) -> Path:
    path = check_path(path, what="a results file, or the folder of one")
    return path / _FILE if path.is_dir() else path


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of records with their numbers, after the header was checked."""
    read_jsonl_provenance(path)
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                warnings.warn(f"{path}: the last line is torn and left out", RuntimeWarning, stacklevel=3)
            elif number > 1:
                yield number, text


def _line(entry: Entry) -> bytes:
    arrays = {name: _encode(array) for name, array in entry.arrays.items()}
    key = [part if isinstance(part, str) else int(part) for part in entry.key]
    return _dump({"key": key, "attrs": entry.attrs, "arrays": arrays}).encode()


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n"


def _encode(array: np.ndarray) -> dict[str, Any]:
    values = array
    if array.dtype.kind == "c":
        values = np.stack([array.real, array.imag], axis=-1)
    if array.dtype.kind not in "biu":
        values = values.astype(np.float64)  # exact, and its decimal text is exact again
        if not np.isfinite(values).all():
            values = np.where(np.isfinite(values), values.astype(object), _spell(values))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": values.tolist()}


def _spell(values: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(values), "NaN", np.where(values > 0, "Infinity", "-Infinity")).astype(object)


def _decode(raw: dict[str, Any]) -> np.ndarray:
    name, shape = raw["dtype"], tuple(raw["shape"])
    if name not in _JsonlWriter.dtypes:
        raise ValueError(f"unknown dtype {name!r}")
    dtype = jnp.dtype(name)
    if dtype.kind in "biu":
        return np.array(raw["data"], dtype).reshape(shape)
    values = np.array(raw["data"], np.float64)  # numpy reads "NaN" and "Infinity"
    if dtype.kind == "c":
        pairs = values.astype(np.finfo(dtype).dtype).reshape(*shape, 2)
        return np.ascontiguousarray(pairs).view(dtype).reshape(shape)
    return values.astype(dtype).reshape(shape)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _whole_lines(handle: int) -> int:
    """The size of the file up to and with its last newline."""
    end = os.fstat(handle).st_size
    while end > 0:
        start = max(0, end - 2**16)
        at = os.pread(handle, end - start, start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0
