"""The appended layout: one growing, sharded array per output, whose rows are there once a line of the log says so.

zarr.json             the root group; its attributes are the run's provenance
<name>/zarr.json      an array; its length is that of the committed rows without a gap, a few seconds behind
<name>/c.<tile>...    a shard, the whole of a tile
.xtrax/run.json       the header: what is computed, how it is cut into tiles; written last when a run is made
.xtrax/commits.jsonl  the commit log; a tile is committed if, and only if, its line is whole
.xtrax/state/         carries and reducer states between tiles
.xtrax/manifest.json  written when all tiles are committed
"""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from xtrax.run._appended.array_folders import find_foreign, make_array, remove_array
from xtrax.run._appended.commit_log import CommitLog, Identity, identity_of, read_log, remove, sealed
from xtrax.run._appended.errors import as_sink_error, find_lost_tiles
from xtrax.run._appended.files import (
    COMMITS,
    FORMAT,
    HEADER,
    LAYOUT,
    MANIFEST,
    count_first,
    count_tiles,
    digest_of_file,
    group_metadata,
    layout_of,
    metadata_of,
    put_json,
    read_header,
    run_root,
)
from xtrax.run._appended.inspection import Inspection, find_metadata_problems, inspect_store
from xtrax.run._appended.remains import refuse_remains
from xtrax.run._appended.shards import (
    PARTIAL,
    ArraySpec,
    TileData,
    WrittenTile,
    array_metadata,
    encode,
    flush,
    state_folder,
    write_tile,
    write_whole,
)
from xtrax.run._errors import SinkError
from xtrax.run._fsync import fsync_directory, make_folder
from xtrax.run._json import write_json_atomic
from xtrax.run._lock import FolderLock, NoLock
from xtrax.run._names import HIDDEN

_GROW_SECONDS = 1.0
_OTHERS = ("results.jsonl", "results.h5")
_log = logging.getLogger("xtrax.run")


class AppendStore:
    """The store of one run, held by this process alone until `close`.

    Attributes:
        folder: The root.
        header: What `run.json` says; None until there is a run.
        begun: Whether anything was ever committed to it, be it damaged now.
        committed: The log's record of each committed tile.
    """

    def __init__(self, folder: Path):
        """Make the folder if it is missing, and lock it. A finished run is opened also where no lock can be made.

        Raises:
            ValueError: If it holds output of another layout or format.
            DamagedRunError: If it holds results of a run without its header or its log.
            SinkError: If it cannot be written, or a live writer holds it.
        """
        self.folder = folder.absolute()  # a later chdir must not move the output
        self.header: dict[str, Any] | None = None
        self._header_file: Identity | None = None
        self.begun = False
        self.committed: dict[int, dict[str, Any]] = {}
        self._specs: dict[str, ArraySpec] = {}
        self._rows_shown: dict[str, int] = {}
        self._grown_at = 0.0
        self._writes = False  # what is only looked at, or refused, stays as it is
        # A tile that waits for the disk leaves the core to the next one; more than two only cost memory.
        self._tiles = ThreadPoolExecutor(2, thread_name_prefix="xtrax-tile")
        self._files = ThreadPoolExecutor(4, thread_name_prefix="xtrax-file")
        self._committing = threading.Lock()
        self._log = CommitLog(self.folder / HIDDEN / COMMITS)
        self._lock = self._take_lock()
        try:
            with self._failing("cannot be read"):
                self.header = self._load()
        except BaseException:
            self._lock.release()
            raise

    def _take_lock(self) -> FolderLock | NoLock:
        try:
            with self._failing("cannot be opened for writing"):
                make_folder(self.folder)
                return FolderLock(self.folder)
        except SinkError as error:
            # Unless a live writer has it, a finished run can be read without; `recover` sees whether it is whole.
            if error.__cause__ is not None and self.finalized:
                return NoLock(error)
            raise

    def _load(self) -> dict[str, Any] | None:
        for name in _OTHERS:
            if (self.folder / name).exists():
                raise ValueError(f"{self.folder} already holds {name}; choose another output_dir")
        header = read_header(self.folder)
        if header is None and (self.folder / "zarr.json").exists():
            layout = layout_of(self.folder)
            if layout != LAYOUT:
                raise ValueError(
                    f"{self.folder} holds a Zarr store of the layout {layout!r}, not a tiled run ({LAYOUT!r}); choose "
                    "another output_dir"
                )
        refuse_remains(self.folder, has_header=header is not None)
        self._header_file = identity_of(self.folder / HIDDEN / HEADER)
        return header

    @property
    def rows(self) -> int:
        """Rows of the outermost axis."""
        return 0 if self.header is None else self.header["rows"]

    @property
    def tiles(self) -> int:
        """How many tiles that makes."""
        return 0 if self.header is None else count_tiles(self.header)

    @property
    def prefix(self) -> int:
        """How many tiles are committed before the first that is not."""
        return count_first(self.committed, self.tiles)

    def create(self, header: Mapping[str, Any], specs: Sequence[ArraySpec], provenance: Mapping[str, Any]) -> None:
        """Start a run, in place of one that committed nothing. A kill in here leaves no run.

        Args:
            header: What `run.json` keeps: `run_id`, `rows`, `tile_rows`, and whatever the caller compares on resuming.
            specs: The arrays.
            provenance: The root's attributes.

        Raises:
            FileExistsError: If something that no run wrote lies in the folder of an array.
            SinkError: If the disk does not take it.
        """
        before = list(self._specs.values())
        with self._failing("cannot be written"):
            self._lock.check()
            foreign = find_foreign(self.folder, specs, before)
        if foreign is not None:
            raise FileExistsError(
                f"output {foreign[0].name!r} is written to {foreign[0].folder(self.folder)}, but there is "
                f"{foreign[1].name!r} in it, which no run wrote; move it away, rename the output, or choose another "
                "output_dir"
            )
        self._writes = True
        with self._failing("cannot be written"):
            hidden = self.folder / HIDDEN
            for spec in (*before, *specs):  # of a run without a committed tile
                remove_array(spec.folder(self.folder))
            shutil.rmtree(state_folder(self.folder), ignore_errors=True)
            state_folder(self.folder).mkdir()
            fsync_directory(hidden)
            # Only now: shards or states without a header are those of a run that has lost it.
            self._unlink(hidden / HEADER, hidden / MANIFEST)
            self._log.create()
            put_json(hidden, group_metadata({}))
            put_json(self.folder, run_root(header["run_id"], provenance))
            for spec in specs:
                if spec.tile_rows is not None:  # the others are made when the run ends
                    make_array(self.folder, spec)
            flush({hidden, self.folder})
            full = {
                "format": FORMAT,
                **header,
                "arrays": [spec.to_json() for spec in specs],
                # As written now: another version of zarr may spell the same metadata otherwise.
                "metadata": {spec.name: array_metadata(spec, 0) for spec in specs},
                "provenance": dict(provenance),
            }
            write_json_atomic(hidden / HEADER, sealed(json.loads(json.dumps(full))))
            self._header_file = identity_of(hidden / HEADER)
        self.header = read_header(self.folder)
        self.committed = {}
        self._use(specs)

    def _use(self, specs: Sequence[ArraySpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._rows_shown = {spec.name: -1 for spec in specs if spec.tile_rows is not None}

    def recover(self) -> Inspection:
        """Take up a run that is there: undo what a dead writer left half-done, and check what is committed.

        Nothing that is committed is changed; `repair` gives up what is damaged.

        Returns:
            What is there, and what is wrong with it.

        Raises:
            SinkError: If the disk fails.
        """
        assert self.header is not None
        with self._failing("cannot be recovered"):
            self._use([ArraySpec.from_json(value) for value in self.header["arrays"]])
            if self._lock.held():
                self._clean()
            if self._log.path.is_file():
                log = read_log(self._log.path)
                self.begun = bool(log.records or log.damaged)
            self.begun = self.begun or self.finalized
            found = inspect_store(self.folder)
            self.committed = {tile: record for tile, record in found.records.items() if tile not in found.damaged_tiles}
            if found.problems or not found.finished:
                self._lock.check(*found.problems)  # there is something to be written
        return found

    def _clean(self) -> None:
        for folder in (self.folder / HIDDEN, state_folder(self.folder), *self._array_folders()):
            for partial in folder.glob(f"*{PARTIAL}"):
                partial.unlink()
        state_folder(self.folder).mkdir(exist_ok=True)
        if self._log.path.is_file():
            self._log.load()

    def repair(self, found: Inspection) -> None:
        """Give up what `recover` found to be damaged, so that it is computed again."""
        if not found.problems:
            return
        self._writes = True
        with self._failing("cannot be repaired"):
            self._unlink(self.folder / HIDDEN / MANIFEST)  # it speaks of tiles that are about to go
            self._put_nodes()  # the rows are hidden before their lines go
            self._log.replace(self.committed[tile] for tile in sorted(self.committed))
        for problem in found.problems:
            _log.warning("%s: %s", self.folder, problem)

    def _put_nodes(self) -> None:
        """Write what makes the folder a Zarr store anew."""
        for spec in self._specs.values():
            if spec.tile_rows is not None:
                make_array(self.folder, spec)
                self._rows_shown[spec.name] = -1
        put_json(self.folder / HIDDEN, group_metadata({}))
        put_json(self.folder, run_root(self._known["run_id"], self._known["provenance"]))
        self._grow()

    def _mend(self) -> None:
        """Write the header and the log anew if somebody has removed or cut them: without them the run would be lost."""
        header = self.folder / HIDDEN / HEADER
        if identity_of(header) != self._header_file:
            write_json_atomic(header, self._known)
            self._header_file = identity_of(header)
            _log.warning("%s was removed or changed while the run went on, and is written anew", header)
        if not self._log.is_as_written:
            self._log.replace(self.committed[tile] for tile in sorted(self.committed))
            _log.warning("%s was removed or changed while the run went on, and is written anew", self._log.path)

    @property
    def _known(self) -> dict[str, Any]:
        if self.header is None:
            raise RuntimeError("there is no run yet")
        return self.header

    def _array_folders(self) -> list[Path]:
        return [spec.folder(self.folder) for spec in self._specs.values()]

    def begin(self, make: Callable[[], TileData]) -> Future[WrittenTile]:
        """Start to write a tile in a thread, two at once. It counts once it is committed.

        Args:
            make: Called in that thread.
        """
        return self._tiles.submit(self._write, make)

    def _write(self, make: Callable[[], TileData]) -> WrittenTile:
        data = make()
        self._lock.check()
        return write_tile(self.folder, self._specs, data, self._files)

    def commit(self, begun: Sequence[Future[WrittenTile]]) -> list[WrittenTile]:
        """Wait for tiles, and make them durable. After an error none of them is committed.

        Raises:
            SinkError: If the disk does not take them.
        """
        with self._failing("could not be written to"):
            tiles = [tile.result() for tile in begun]
            self.commit_written(tiles)
        return tiles

    def commit_written(self, tiles: Sequence[WrittenTile]) -> None:
        """Commit tiles whose files are written."""
        with self._failing("could not be written to"), self._committing:
            self._lock.check()
            flush({folder for tile in tiles for folder in tile.folders})
            self._mend()
            self._log_records([tile.record for tile in tiles])

    def _log_records(self, records: Sequence[dict[str, Any]]) -> None:
        self._writes = True
        self._log.append(records)
        self.committed.update((record["tile"], record) for record in records)
        if self._known.get("sequential"):  # only the last carry is ever read again
            for tile in range(records[0]["tile"] - 1, records[-1]["tile"]):
                (state_folder(self.folder) / f"{tile}.bin").unlink(missing_ok=True)
        if time.monotonic() - self._grown_at > _GROW_SECONDS:
            self._grow()

    def _grow(self) -> None:
        """Let the arrays show the rows that are committed without a gap. The log alone decides what is committed."""
        self._grown_at = time.monotonic()
        rows = min(self.rows, self.prefix * self._known["tile_rows"])
        for name, shown in self._rows_shown.items():
            if rows != shown:
                folder = self._specs[name].folder(self.folder)
                put_json(folder, metadata_of(self._known, name, rows))
                fsync_directory(folder)
                self._rows_shown[name] = rows

    def has_state(self, tile: int) -> bool:
        """Whether the state that was committed with a tile is still kept."""
        return tile in self.committed and (state_folder(self.folder) / f"{tile}.bin").exists()

    def state(self, tile: int) -> bytes:
        """The state that was committed with a tile."""
        with self._failing("cannot be read"):
            return (state_folder(self.folder) / f"{tile}.bin").read_bytes()

    @property
    def finalized(self) -> bool:
        """Whether the manifest is there."""
        return os.path.exists(self.folder / HIDDEN / MANIFEST)  # False also where it may not be read

    def finalize(self, finals: Mapping[str, np.ndarray]) -> None:
        """Write what is known only at the end, then the manifest. It may be called again after a kill in it.

        Raises:
            SinkError: If the disk does not take it.
            RuntimeError: If a tile is not committed.
        """
        if self.prefix < self.tiles:
            raise RuntimeError(f"tile {self.prefix} of {self.tiles} is not committed, so the run is not done")
        with self._failing("could not be finalized"):
            self._lock.check()
            specs = list(self._specs.values())
            for _ in find_metadata_problems(self.folder, self._known, specs, self.rows, finished=False):
                self._put_nodes()
                break
            for tile, what in find_lost_tiles(self.folder, self._known, self.committed):
                raise FileNotFoundError(f"tile {tile} was committed, but {what}")
            written = {}
            for name, values in finals.items():
                spec = self._specs[name]
                folder = spec.folder(self.folder)
                make_array(self.folder, spec)
                put_json(folder, metadata_of(self._known, name))
                parts = encode(spec, values)
                if parts:
                    write_whole(folder, spec.shard_name(0), *parts)
                    size = sum(len(part) for part in parts)
                    written[name] = {"bytes": size, "sha256": digest_of_file(folder / spec.shard_name(0))}
                fsync_directory(folder)
            self._grow()
            self._mend()
            manifest = {
                "format": FORMAT,
                "run_id": self._known["run_id"],
                "rows": self.rows,
                "tiles": self.tiles,
                "log_sha256": digest_of_file(self._log.path),
                "finals": written,
            }
            write_json_atomic(self.folder / HIDDEN / MANIFEST, sealed(manifest))

    def close(self) -> None:
        """Show all that is committed, and let other writers in."""
        try:
            if self._writes and self.header is not None and self._lock.held():
                with contextlib.suppress(OSError):  # the disk may be full; the log knows what is committed
                    self._grow()
        finally:
            self._tiles.shutdown()
            self._files.shutdown()
            with self._committing:  # a thread that is just committing holds the folder
                self._lock.release()

    def _unlink(self, *paths: Path) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                remove(path)
                fsync_directory(path.parent)

    def _failing(self, what: str) -> contextlib.AbstractContextManager[None]:
        return as_sink_error(self.folder, what, lambda: (self.committed, self.tiles))
