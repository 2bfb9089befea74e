"""The keyed layout: each key is a group of a Zarr v3 store, each array an array in it.

A key's group is written beside the store's nodes, flushed, and renamed into place, so it is there whole or not at all.
"""

import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import zarr
from zarr.storage import LocalStore

from xtrax.run._appended.files import HEADER
from xtrax.run._fsync import fsync_directory, fsync_tree
from xtrax.run._names import HIDDEN
from xtrax.run._staged.sink import Entry, Names
from xtrax.run._values import NUMERIC

_CHUNK_BYTES = 64 * 2**20
_log = logging.getLogger("xtrax.run")


class KeyedZarrWriter:
    """Writes keys as groups; see `xtrax.run._staged.sink.Writer`."""

    format: ClassVar[str] = "zarr"
    dtypes: ClassVar[frozenset[str]] = NUMERIC

    def __init__(self, folder: Path):
        """Nothing is changed before `load`."""
        self._folder = folder
        self._hidden = folder / HIDDEN
        self._new = self._hidden / "new"
        self._old = self._hidden / "old"

    def find(self) -> dict[str, Any] | None:
        """The root's attributes."""
        root = self._folder / "zarr.json"
        if not root.exists():
            if (self._hidden / HEADER).exists():
                raise ValueError(
                    f"{self._folder} holds a tiled run that has lost its zarr.json; choose another output_dir"
                )
            return None
        metadata = json.loads(root.read_bytes())
        if metadata.get("node_type") != "group":
            raise ValueError(f"{self._folder} holds a Zarr {metadata.get('node_type')}; choose another output_dir")
        return metadata.get("attributes", {})

    def load(self) -> None:
        """Undo what a killed writer left half-done."""
        shutil.rmtree(self._new, ignore_errors=True)  # never renamed into place, so never promised
        self._restore()
        if (self._folder / "zarr.json").exists():
            self._show_hidden()

    def _restore(self) -> None:
        """Put back arrays that were moved aside and whose replacement never arrived."""
        if not self._old.exists():
            return
        for folder, _, files in os.walk(self._old):
            if "zarr.json" in files:
                target = self._folder / Path(folder).relative_to(self._old)
                if not target.exists():
                    os.rename(folder, target)
                    fsync_directory(target.parent)
                    _log.warning("restored %s, whose replacement a stopped writer did not finish", target)
        shutil.rmtree(self._old)

    def create(self, provenance: dict[str, Any]) -> None:
        """Write the root group with the provenance as its attributes."""
        self._show_hidden()
        self._put_group(self._folder, provenance)
        fsync_directory(self._folder)

    def _show_hidden(self) -> None:
        # Readers warn of a folder that is no node of the hierarchy, so while it exists it is one.
        self._put_group(self._hidden, {})

    def node(self, path: Names) -> Literal["group", "array"] | None:
        """What the metadata at a path say it is."""
        metadata = _read(self._folder.joinpath(*path, "zarr.json"))
        return None if metadata is None else metadata["node_type"]

    def save(self, entries: Sequence[Entry], saved: list[Entry]) -> None:
        """Write one key after the other, each durable before the next."""
        self._restore()  # if the one before could not
        for entry in entries:
            new = self._new / "group"
            try:
                self._write(new, entry)
                self._place(new, entry)
            finally:
                shutil.rmtree(new, ignore_errors=True)  # a full disk needs the space
                self._restore()
            saved.append(entry)

    def _write(self, new: Path, entry: Entry) -> None:
        new.mkdir(parents=True)
        self._put_group(new, entry.attrs)
        store = LocalStore(new)
        for name, array in entry.arrays.items():
            zarr.create_array(
                store=store,
                name=name,
                data=array,
                chunks=_chunks(array),
                compressors=None,
                zarr_format=3,
                config={"write_empty_chunks": True},  # so that a missing chunk is always damage
            )
        fsync_tree(new)

    def _place(self, new: Path, entry: Entry) -> None:
        target = self._folder.joinpath(*entry.path)
        for depth in range(1, len(entry.path)):
            self._ensure_group(self._folder.joinpath(*entry.path[:depth]))
        metadata = _read(target / "zarr.json")
        if metadata is None:
            os.rename(new, target)
            fsync_directory(target.parent)
            return
        for name in entry.arrays:
            self._swap(new / name, target / name, self._old.joinpath(*entry.path, name))
        before = metadata.get("attributes", {})
        if entry.attrs:
            self._put_group(target, {**before, **entry.attrs})
        fsync_directory(target)

    def _ensure_group(self, folder: Path) -> None:
        if not (folder / "zarr.json").exists():
            parent = self._new / "parent"
            parent.mkdir(parents=True)
            self._put_group(parent, {})
            fsync_tree(parent)
            os.rename(parent, folder)
            fsync_directory(folder.parent)

    def _swap(self, new: Path, target: Path, old: Path) -> None:
        """Replace a folder. What was there has one of its names at every moment; `_restore` puts it back."""
        if target.exists():
            old.parent.mkdir(parents=True, exist_ok=True)
            os.rename(target, old)
            fsync_directory(old.parent)
        os.rename(new, target)
        fsync_directory(target.parent)
        if old.exists():
            shutil.rmtree(old)

    def _put_group(self, folder: Path, attributes: dict[str, Any]) -> None:
        """Replace a group's metadata. Not by zarr, which neither flushes them nor cleans up after a kill."""
        self._new.mkdir(parents=True, exist_ok=True)
        temporary = self._new / "zarr.json"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump({"zarr_format": 3, "node_type": "group", "attributes": attributes}, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, folder / "zarr.json")

    def close(self, *, tidy: bool) -> None:
        """Leave a store that is nothing but Zarr."""
        if tidy:
            self._restore()
            shutil.rmtree(self._new, ignore_errors=True)
            (self._hidden / "zarr.json").unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _chunks(array: np.ndarray) -> tuple[int, ...]:
    """Whole rows of the leading axis, up to 64 MiB: few files, and none that must be read whole for a part of it."""
    if array.ndim == 0:
        return ()
    row = max(1, array.nbytes // max(1, array.shape[0]))
    rows = min(array.shape[0], max(1, _CHUNK_BYTES // row))
    return (max(1, rows), *(max(1, n) for n in array.shape[1:]))
