"""The half of a sink that is the same for every format: what is staged, when it is drained, who may write."""

import os
import threading
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from xtrax.run._checks import check_flush_every, check_output_dir, check_run_id, new_run_id
from xtrax.run._errors import Key, SinkError, some
from xtrax.run._fsync import make_folder
from xtrax.run._lock import FolderLock
from xtrax.run._names import check_name, key_path
from xtrax.run._provenance import collect_provenance
from xtrax.run._values import check_attrs, check_schema, to_array

Names = tuple[str, ...]
LAYOUT = "keyed-1"
_FILES = {"zarr": "zarr.json", "jsonl": "results.jsonl", "h5": "results.h5"}


@dataclass(eq=False)
class Entry:
    """What is buffered for one key."""

    key: Key
    path: Names
    attrs: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


class Writer(Protocol):
    """The half of a sink that knows a format. It is used by one thread at a time, under the folder's lock."""

    format: ClassVar[str]
    dtypes: ClassVar[frozenset[str]]

    def __init__(self, folder: Path): ...

    def find(self) -> dict[str, Any] | None:
        """The provenance on disk, `None` if there is no output yet. Changes nothing: the output may be another's."""

    def load(self) -> None:
        """Repair what a dead writer left behind, be there output or not."""

    def create(self, provenance: dict[str, Any]) -> None:
        """Start the output, durably and all at once."""

    def node(self, path: Names) -> Literal["group", "array"] | None:
        """What lies at a path on disk."""

    def save(self, entries: Sequence[Entry], saved: list[Entry]) -> None:
        """Write entries; add each to `saved` once it is durable. `OSError` if the disk does not take them."""

    def close(self, *, tidy: bool) -> None:
        """Let go of the output; if `tidy`, the folder is still ours: remove what only a live writer needs."""


class BufferedSink:
    """A sink over a `Writer`; see `StagingSink` for what its methods promise."""

    _writer_class: ClassVar[type[Writer]]

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        flush_every: int = 1,
        run_id: str | None = None,
        extension_schema: Mapping[str, type | tuple[type, ...]] | None = None,
    ):
        """Open or create the output and lock its folder.

        Args:
            output_dir: The folder, made if missing. It holds one run, in one format.
            flush_every: Drain after this many calls of `stage`.
            run_id: The run; needed to go on with one that is there. `None`: a new id.
            extension_schema: Types of the attributes that callers may set; `None`: any.

        Raises:
            TypeError: If an argument is of the wrong type.
            ValueError: If an argument has a wrong value, or the folder holds another run, another format or
                output that this version does not know.
            SinkError: If the folder cannot be written, or a live sink writes there.
        """
        self.output_dir = check_output_dir(output_dir).absolute()  # a later chdir must not move the output
        self.flush_every = check_flush_every(flush_every)
        self._schema = check_schema(extension_schema)
        run_id = check_run_id(run_id)
        self._buffer: dict[Names, Entry] = {}
        self._groups: Counter[Names] = Counter()  # prefixes of the buffered keys, themselves included
        self._stages = 0
        self._mutex = threading.RLock()  # host callbacks stage from the runtime's threads
        self._finalized = False
        self._writer = self._writer_class(self.output_dir)
        try:
            make_folder(self.output_dir)
            self._lock = FolderLock(self.output_dir)
            accepted = False
            try:
                found = self._find(run_id)
                accepted = True
                self.provenance: dict[str, Any] = self._open(found, run_id)
            except BaseException:
                self._end(tidy=accepted)  # what is refused stays as it is
                raise
        except SinkError:
            raise
        except OSError as error:
            raise SinkError(
                f"{self.output_dir} cannot be opened for writing: {error}; choose another output_dir, or make it "
                "writable",
                path=self.output_dir,
            ) from error
        self.run_id: str = self.provenance["run_id"]

    def _find(self, run_id: str | None) -> dict[str, Any] | None:
        """The provenance on disk, if it is a run that may be gone on with; it is refused before anything is changed."""
        for other, file in _FILES.items():
            if other != self._writer.format and (self.output_dir / file).exists():
                raise ValueError(
                    f"{self.output_dir} already holds output in the format {other!r}; choose another output_dir for "
                    f"{self._writer.format!r}"
                )
        found = self._writer.find()
        if found is None:
            return None
        if "run_id" not in found or found.get("layout") != LAYOUT:
            raise ValueError(
                f"{self.output_dir} holds output that this version of xtrax.run did not write (layout "
                f"{found.get('layout')!r}, known is {LAYOUT!r}); choose another output_dir"
            )
        if found["run_id"] != run_id:
            raise ValueError(
                f"{self.output_dir} holds the run {found['run_id']!r}, but run_id is {run_id!r}; pass "
                f"run_id={found['run_id']!r} to go on with it, or choose another output_dir"
            )
        return found

    def _open(self, found: dict[str, Any] | None, run_id: str | None) -> dict[str, Any]:
        self._writer.load()
        if found is not None:
            return found
        provenance = {"run_id": run_id or new_run_id(), "layout": LAYOUT, **collect_provenance()}
        self._writer.create(provenance)
        return provenance

    def stage(self, key: Key, attrs: Mapping[str, Any] | None = None, **arrays: Any) -> None:
        """Buffer arrays and attributes of a key; drain if `flush_every` calls have come together.

        The values are copied. A key that was staged before is merged: new names are added, known ones replaced, in
        the buffer as on disk.

        Args:
            key: A tuple of ints and strings, `("fold", 3)`. `3` and `"3"` are the same component.
            attrs: Values that JSON holds; NaN and infinities become strings (`normalize_json_value`).
            **arrays: Numbers of any shape: numpy or JAX arrays, Python numbers, nested lists.

        Raises:
            TypeError: If the key, an attribute or an array is of a kind that cannot be stored. Nothing is staged.
            ValueError: If a name would leave the folder, is reserved, or would be both an array and a group.
            RuntimeError: If the sink was finalized.
            SinkError: If the drain failed; the entry is still buffered.
        """
        with self._mutex:
            if self._finalized:
                raise RuntimeError(f"the sink on {self.output_dir} was finalized; open a new one with the same run_id")
            writer = self._writer
            path = key_path(key)
            values = {
                check_name(name, f"array name of key {key!r}"): to_array(value, name, key, writer.dtypes, writer.format)
                for name, value in arrays.items()
            }
            checked = check_attrs(attrs, key, self._schema)
            self._refuse_clash(key, path, values)
            entry = self._buffer.get(path)
            if entry is None:
                entry = self._buffer[path] = Entry(key, path)
                self._groups.update(path[: i + 1] for i in range(len(path)))
            entry.attrs.update(checked)
            entry.arrays.update(values)
            self._stages += 1
            if self._stages >= self.flush_every:
                self.drain()

    def _refuse_clash(self, key: Key, path: Names, names: Mapping[str, Any]) -> None:
        """`ValueError` if a path would be an array for one key and a group for another."""
        for i in range(1, len(path) + 1):
            parent = self._buffer.get(path[: i - 1])
            if (parent and path[i - 1] in parent.arrays) or self._writer.node(path[:i]) == "array":
                raise ValueError(f"key {key!r} needs a group at {'/'.join(path[:i])}, which is an array of another key")
        for name in names:
            child = (*path, name)
            if self._groups[child] or self._writer.node(child) == "group":
                raise ValueError(f"array {name!r} of key {key!r} would lie where other keys have a group; rename it")

    def take(self, key: Key) -> dict[str, np.ndarray]:
        """Return the buffered arrays of a key by name, and drop the key from the buffer.

        Raises:
            KeyError: If nothing is buffered for it (never staged, or drained).
        """
        with self._mutex:
            path = key_path(key)
            if path not in self._buffer:
                raise KeyError(f"nothing is buffered for key {key!r}; buffered are {some(self.keys())}")
            return self._drop(path).arrays

    def _drop(self, path: Names) -> Entry:
        for i in range(len(path)):
            self._groups[path[: i + 1]] -= 1
            if not self._groups[path[: i + 1]]:
                del self._groups[path[: i + 1]]
        return self._buffer.pop(path)

    def keys(self) -> tuple[Key, ...]:
        """The buffered keys, in the order in which they were first staged."""
        with self._mutex:
            return tuple(entry.key for entry in self._buffer.values())

    def __len__(self) -> int:
        """How many keys are buffered."""
        return len(self._buffer)

    def drain(self) -> None:
        """Write all that is buffered. When it returns, the data are durable.

        Raises:
            SinkError: If the disk did not take them; what was not saved stays buffered.
        """
        with self._mutex:
            if not self._buffer:
                return
            entries, saved = list(self._buffer.values()), []
            try:
                self._lock.check()
                self._writer.save(entries, saved)
            except OSError as error:
                done = [entry.key for entry in saved]
                left = [entry.key for entry in entries if entry not in saved]  # by identity
                raise SinkError(
                    f"{self.output_dir}: draining failed: {error}. Saved by this drain: {some(done)}; still buffered: "
                    f"{some(left)}. What earlier drains saved is intact; remove the cause and call drain() again",
                    path=self.output_dir,
                    saved=done,
                    unsaved=left,
                ) from error
            finally:
                for entry in saved:
                    self._drop(entry.path)
                if not self._buffer:
                    self._stages = 0

    def finalize(self) -> None:
        """Drain, tidy up and let other writers in; `stage` raises from then on. A second call does nothing.

        Raises:
            SinkError: If the drain failed; the sink stays open.
        """
        with self._mutex:
            if self._finalized:
                return
            self.drain()
            self._end()

    def _end(self, *, tidy: bool = True) -> None:
        self._finalized = True
        try:
            self._writer.close(tidy=tidy and self._lock.held())
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        """The sink itself; the end of the block finalizes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Save what was staged, also after an error, and unlock the folder whatever happens."""
        try:
            self.finalize()
        except SinkError as failed:
            if error is None:
                raise
            error.add_note(f"In addition, a sink could not save what was staged: {failed}")  # the first error matters
        finally:
            if not self._finalized:
                self._end()

    def __del__(self, _warn: Any = warnings.warn) -> None:
        """Tell of data that nobody saved."""
        if getattr(self, "_buffer", None) and not self._finalized:
            _warn(f"a sink on {self.output_dir} was dropped with unsaved keys: {some(self.keys())}", ResourceWarning)
