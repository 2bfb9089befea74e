"""Staged results as one HDF5 file."""

import json
import os
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from xtrax.run._fsync import fsync_directory, fsync_file
from xtrax.run._names import HIDDEN
from xtrax.run._staged.h5_file import TransactionFile, recover
from xtrax.run._staged.sink import BufferedSink, Entry, Names, Writer
from xtrax.run._values import NUMERIC

_FILE = "results.h5"
_LIBVER = ("v110", "v110")  # one format of the file, whichever HDF5 writes it


class _H5Writer:
    """Writes keys as groups of one file, a drain as a transaction; see `xtrax.run._staged.sink.Writer`."""

    format: ClassVar[str] = "h5"
    dtypes: ClassVar[frozenset[str]] = NUMERIC

    def __init__(self, folder: Path):
        self._h5py = _h5py()
        self._path = folder / _FILE
        self._journal = folder / HIDDEN / "journal"
        self._nodes: dict[str, Literal["group", "array"]] = {}

    def find(self) -> dict[str, Any] | None:
        if not self._path.exists():
            return None
        if not self._h5py.is_hdf5(self._path):
            raise ValueError(f"{self._path} is no HDF5 file, or a damaged one; choose another output_dir")
        preview = TransactionFile(self._path, self._journal)  # the file itself may be broken while there is a journal
        try:
            preview.replay()
            with self._h5py.File(preview, "r") as file:
                return {name: _load_attr(value) for name, value in file.attrs.items()}
        finally:
            preview.end()

    def load(self) -> None:
        recover(self._path, self._journal)
        if self._path.exists():
            with self._h5py.File(self._path, "r") as file:
                file.visititems(self._note)

    def _note(self, path: str, node: Any) -> None:
        self._nodes[path] = "array" if isinstance(node, self._h5py.Dataset) else "group"

    def create(self, provenance: dict[str, Any]) -> None:
        new = self._journal.with_suffix(".new")
        with self._h5py.File(new, "w", libver=_LIBVER) as file:
            _put_attrs(file, provenance)
        fsync_file(new)
        os.rename(new, self._path)
        fsync_directory(self._path.parent)

    def node(self, path: Names) -> Literal["group", "array"] | None:
        return self._nodes.get("/".join(path))

    def save(self, entries: Sequence[Entry], saved: list[Entry]) -> None:
        recover(self._path, self._journal)
        transaction = TransactionFile(self._path, self._journal)
        try:
            with self._h5py.File(transaction, "r+", libver=_LIBVER) as file:
                for entry in entries:
                    self._write(file, entry)
            transaction.commit()
        finally:
            transaction.end()
        for entry in entries:
            for depth in range(1, len(entry.path) + 1):
                self._nodes["/".join(entry.path[:depth])] = "group"
            self._nodes.update({"/".join((*entry.path, name)): "array" for name in entry.arrays})
        saved += entries

    def _write(self, file: Any, entry: Entry) -> None:
        group = file.require_group("/".join(entry.path))
        _put_attrs(group, entry.attrs)
        for name, array in entry.arrays.items():
            if name in group:
                del group[name]
            grows = {"maxshape": (None,) * array.ndim, "chunks": True} if array.ndim else {}
            group.create_dataset(name, data=array, **grows)

    def close(self, *, tidy: bool) -> None:
        if tidy:
            self._journal.with_suffix(".new").unlink(missing_ok=True)  # of a drain that failed


class H5StagingSink(BufferedSink):
    """Stages results by key into `output_dir/results.h5`: the key is the group's path, as in Zarr.

    Datasets are chunked and can be resized along every axis. The root's attributes are the run's provenance; what
    HDF5 attributes cannot hold (lists, dicts, None) is JSON text.

    A drain is a transaction: HDF5 alone can leave a file that nothing opens if its process is killed while it writes,
    this sink leaves either all of a drain or none of it. Between drains the file is closed, so other programs may open
    it; whoever keeps it open sees what was drained before.

    Needs h5py, the extra `h5`.

    Args:
        output_dir: The folder, made if missing.
        flush_every: Drain after this many calls of `stage`.
        run_id: The run; needed to go on with one that is there. `None`: a new id.
        extension_schema: Types of the attributes that callers may set, by name; `None`: any.

    Raises:
        ImportError: If h5py is not installed.
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument has a wrong value, or the folder holds another run, format or layout.
        SinkError: If the folder cannot be written, or a live sink writes there.

    Examples:
        >>> import tempfile, warnings, h5py, numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # no git repository here
        ...     with H5StagingSink(folder, run_id="demo") as sink:
        ...         sink.stage(("fold", 3), attrs={"loss": 0.25}, weights=np.arange(3.0))
        >>> with h5py.File(f"{folder}/results.h5") as file:
        ...     file["fold/3/weights"][:], float(file["fold/3"].attrs["loss"]), file.attrs["run_id"]
        (array([0., 1., 2.]), 0.25, 'demo')
    """

    _writer_class: ClassVar[type[Writer]] = _H5Writer


def _h5py() -> types.ModuleType:
    try:
        import h5py  # here, because it is an optional extra
    except ImportError as error:
        raise ImportError("the format 'h5' needs h5py: install xtrax-run with its extra h5, or h5py itself") from error
    return h5py


def _put_attrs(node: Any, attrs: dict[str, Any]) -> None:
    for name, value in attrs.items():
        plain = isinstance(value, str | bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**63)
        if isinstance(value, str) and "\0" in value:
            plain = False  # HDF5 strings end at a NUL; JSON escapes it
        node.attrs[name] = value if plain else json.dumps(value)


def _load_attr(value: Any) -> Any:
    """A root attribute as it was before `_put_attrs`: provenance holds dicts and plain values."""
    if isinstance(value, np.generic):
        return value.item()
    return json.loads(value) if isinstance(value, str) and value.startswith("{") else value
