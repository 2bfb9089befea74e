"""A run that is open: its tiles, its programs, and its store if it has one."""

import contextlib
import dataclasses
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xtrax.run._appended.files import DamagedRunError
from xtrax.run._appended.inspection import Inspection
from xtrax.run._appended.shards import TileData
from xtrax.run._appended.store import AppendStore
from xtrax.run._checks import new_run_id
from xtrax.run._provenance import collect_provenance
from xtrax.run._tiled.fingerprint import fingerprint, refuse_changes
from xtrax.run._tiled.inputs import Source, is_key
from xtrax.run._tiled.interrupts import Interrupts
from xtrax.run._tiled.outputs import (
    Collected,
    array_specs,
    final_names,
    result_names,
    state_from_bytes,
    state_to_bytes,
    sum_bytes,
)
from xtrax.run._tiled.program import TileProgram, TileResult, Work, array_type
from xtrax.run._tiled.reader import ReadTile, TileInputs
from xtrax.run._tiled.request import Request
from xtrax.run._tiled.tiles import DistinctRows, Tiles, choose_tile_rows
from xtrax.tiling.strategy import DedupGather

_log = logging.getLogger("xtrax.run")


class Session:
    """What a run needs while it goes on.

    Attributes:
        request: What is to be run.
        interrupts: When Ctrl-C raises.
        work: What is computed of a tile.
        tiles: How the outermost axis is cut.
        inputs: Reads them.
        shapes: What a tile of one row returns.
        store: Where the output goes; None without a sink.
        collected: Where it goes without a sink.
        todo: The tiles that are not committed, in order.
        damaged: What the log says of those of them that were committed and then damaged.
        run_id: The run; None without a sink.
    """

    def __init__(self, request: Request, store: AppendStore | None, interrupts: Interrupts):
        """Look at what is to be run; nothing is compiled."""
        self.request, self.store, self.interrupts = request, store, interrupts
        self.run_id: str | None = None
        self.first_carry = request.work.first_carry()
        self.shapes = self._shapes(request.work)
        self.tiles = Tiles(request.rows, self._tile_rows())
        self.work, distinct, dedup_fn = self._distinct()
        self.inputs = TileInputs(request.sources, self.tiles, distinct, dedup_fn)
        self._programs: dict[int, TileProgram] = {}
        self._states: dict[int, Any] = {}  # without a sink
        self.collected = None if store is not None else Collected(request.rows, self.shapes)
        self.todo: list[int] = list(range(len(self.tiles)))
        self.damaged: dict[int, Mapping[str, Any]] = {}

    def _shapes(self, work: Work) -> TileResult:
        """What a tile of one row returns, abstractly."""
        request, one = self.request, dataclasses.replace(work, k_bucket=1)
        leaves = [source.tile_placeholder(1) for source in request.sources]
        types = [array_type(leaf) for leaf in leaves]
        index_map = jax.ShapeDtypeStruct((1,), np.int32)
        return jax.eval_shape(
            lambda leaves, start, carry, index_map: one.run(request.rebuild(leaves), 1, start, carry, index_map),
            types, jax.ShapeDtypeStruct((), np.int32), self.first_carry, index_map,
        )  # fmt: skip

    def _tile_rows(self) -> int:
        request, header = self.request, None if self.store is None else self.store.header
        if header is not None and self._goes_on:
            kept = header["tile_rows"]
            if request.tile_size is not None and request.tile_size != kept:
                raise ValueError(
                    f"tile_size is {request.tile_size}, but the run in {request.output_dir} has tiles of {kept} rows; "
                    "leave tile_size out to resume it"
                )
            return kept
        if request.tile_size is not None:
            return request.tile_size
        outputs = sum_bytes((self.shapes.rows, self.shapes.carries))
        reads = sum(source.row_bytes for source in request.sources)
        return choose_tile_rows(request.work.outermost, outputs, reads)

    def _distinct(self) -> tuple[Work, DistinctRows | None, Any]:
        strategy = self.request.work.outermost.strategy
        if not isinstance(strategy, DedupGather):
            return self.request.work, None, None
        distinct = DistinctRows(strategy, self.tiles)
        choose = None if strategy.dedup_fn is None else _chooser(strategy.dedup_fn, self.request.groups)
        return dataclasses.replace(self.request.work, k_bucket=distinct.k_bucket), distinct, choose

    @property
    def _goes_on(self) -> bool:
        """Whether the run that is in the folder is the one to go on with."""
        return self.store is not None and self.store.begun

    @property
    def has_state(self) -> bool:
        """Whether tiles leave something for later."""
        return self.shapes.state is not None

    @property
    def element(self) -> Any:
        """One output of the outermost axis, abstractly, before it is reduced."""
        hooks = {name: hook for name, hook in self.work.hooks.items() if name != self.work.outermost.spec.name}
        rows = self._shapes(dataclasses.replace(self.request.work, hooks=hooks)).rows
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)

    def program(self, rows: int) -> TileProgram:
        """The program for so many rows, traced and perhaps compiled."""
        if rows not in self._programs:
            self._programs[rows] = trace_tile(
                self.work, self.request.rebuild, self.request.sources, rows, self.first_carry
            )
        return self._programs[rows]

    @property
    def compiles(self) -> int:
        """How many programs were compiled."""
        return sum(program.is_compiled for program in self._programs.values())

    def prepare(self, found: Inspection | None) -> None:
        """Start the run in the store, or take it up, as it was found there."""
        store, request = self.store, self.request
        if store is None:
            return
        size = self.tiles.size(0) if len(self.tiles) else 1
        computes = fingerprint(
            self.program(size), self.work, request.sources, request.hosts, self.first_carry, self.shapes.state
        )
        if not self._goes_on:
            there = None if store.header is None else store.header["run_id"]  # a run that committed nothing
            self.run_id = request.run_id or there or new_run_id()
            header = {
                "run_id": self.run_id,
                "axis": self.work.outermost.spec.name,
                "rows": self.tiles.rows,
                "tile_rows": self.tiles.tile_rows,
                # A carry is needed until the next tile is committed; states that are merged, until the end.
                "sequential": self.work.scans and self.work.reducer is None,
                "computes": computes,
            }
            specs = array_specs(self.work, self.shapes, self.tiles.tile_rows, request.compression)
            store.create(header, specs, collect_provenance())
            return
        header: Any = store.header
        self.run_id = header["run_id"]
        if header["rows"] != self.tiles.rows or header["axis"] != self.work.outermost.spec.name:
            raise ValueError(
                f"{request.output_dir} holds a run over {header['rows']} elements of axis {header['axis']!r}, and this "
                f"one is over {self.tiles.rows} of {self.work.outermost.spec.name!r}; choose another output_dir"
            )
        refuse_changes(request.output_dir, header["computes"], computes)
        self.todo = [tile for tile in self.todo if tile not in store.committed]
        self._check_carries()
        if found is not None:
            self.damaged = {tile: found.records[tile] for tile in found.damaged_tiles if tile in found.records}
        self._check_inputs(store.committed)

    def _check_carries(self) -> None:
        if not self.work.scans or self.store is None:
            return
        for tile in self.todo:
            if tile and tile - 1 not in self.todo and not self.store.has_state(tile - 1):
                raise DamagedRunError(
                    f"{self.request.output_dir}: tile {tile} is damaged, and the carry before it is not kept, because "
                    "the tiles after it were committed; verify_store tells what is damaged. Restore it from a copy, or "
                    "run anew in another output_dir"
                )

    def _check_inputs(self, committed: Mapping[int, Mapping[str, Any]]) -> None:
        tiles = sorted(committed)
        tiles = tiles if self.request.verify_inputs else dict.fromkeys(tiles[:1] + tiles[-1:])
        for tile in (*tiles, *self.damaged):  # what is damaged would be replaced by what other inputs give
            record = self.damaged.get(tile) or committed[tile]
            if record["inputs_sha256"] != self.inputs.digest(tile):
                start, stop = self.tiles.span(tile)
                raise ValueError(
                    f"the inputs of tile {tile} (rows {start} to {stop - 1}) are not those that it was computed from; "
                    "restore them, or choose another output_dir for a run over the new ones"
                )

    def compare_again(self, record: Mapping[str, Any]) -> None:
        """Tell if a tile that was damaged is not what it had been."""
        before = self.damaged.get(record["tile"])
        if before is None:
            return
        parts = {**before["arrays"], "its state": before.get("state")}
        again = {**record["arrays"], "its state": record.get("state")}
        others = [name for name, part in parts.items() if part != again[name]]
        if others:
            _log.warning(
                "%s: tile %d was damaged and computed again, and differs from what was committed first: %s; fn does "
                "not compute the same bits twice, or a Python function that it calls has changed",
                self.request.output_dir, record["tile"], ", ".join(others),
            )  # fmt: skip

    def carry_before(self, tile: int) -> Any:
        """The carry that a tile starts from, read from the store."""
        return self.first_carry if tile == 0 else self._state(tile - 1)["carry"]

    def _state(self, tile: int) -> Any:
        if self.store is None:
            return self._states[tile]
        like = self.shapes.state
        if self.work.scans:  # a key's kind is in the array, not in its shape
            like = {**like, "carry": self.first_carry}
        return state_from_bytes(like, self.store.state(tile))

    def keep(self, tile: int, result: TileResult) -> None:
        """Take a tile's results without a sink."""
        if self.collected is not None:
            self.collected.put(self.tiles.span(tile)[0], result)
            if self.has_state:
                self._states[tile] = result.state
                if self.work.reducer is None:
                    self._states.pop(tile - 1, None)

    def states(self) -> Iterator[Any]:
        """The state of each tile, in order."""
        return (self._state(tile) for tile in range(len(self.tiles)))

    def last_state(self, state: Any) -> Any:
        """The state after the last tile."""
        if not len(self.tiles):
            return {"carry": self.first_carry, "reduced": None}
        return self._state(len(self.tiles) - 1) if state is None else state

    def finalize(self, reduced: Any, state: Any) -> Any:
        """End the run; return its outputs if there is no sink."""
        if self.store is not None:
            if not self.store.finalized:
                finals = final_names(self.work, state, reduced)
                self.store.finalize({name: np.asarray(value) for name, value in finals.items()})
            return None
        assert self.collected is not None
        outputs, carries = self.collected.outputs
        if self.work.reducer is not None:
            outputs = jax.tree.map(np.asarray, reduced)
        if self.work.scans:
            last = jax.tree.map(lambda leaf: leaf if is_key(leaf) else np.asarray(leaf), state["carry"])
            carries = {self.work.outermost.spec.name: last, **carries}
        return (outputs, carries) if carries else outputs


def _chooser(dedup_fn: Any, groups: Sequence[Any]) -> Any:
    """A plan's `dedup_fn`, of the leaves of the inputs that have the outermost axis."""

    def choose(leaves: Sequence[Any], rows: np.ndarray) -> list[Any]:
        chosen = list(leaves)
        for indices, treedef in groups:
            tree = dedup_fn(treedef.unflatten([leaves[i] for i in indices]), rows)
            for i, leaf in zip(indices, jax.tree.leaves(tree), strict=True):
                chosen[i] = leaf
        return chosen

    return choose


def trace_tile(work: Work, rebuild: Any, sources: Sequence[Source], rows: int, carry: Any) -> TileProgram:
    """The program of a tile of so many rows."""
    computed = work.k_bucket or rows
    return TileProgram.of(work, rebuild, [source.tile_placeholder(computed) for source in sources], rows, carry)


@contextlib.contextmanager
def open_session(request: Request, interrupts: Interrupts) -> Generator[Session]:
    """Open the store of a run, if it has one, and close it at the end.

    Raises:
        ValueError: If the store holds another run, or none where one is required.
        FileExistsError: If it holds one that must not be there.
    """
    if request.output_dir is None:
        with interrupts.welcome():
            session = Session(request, None, interrupts)
        yield session
        return
    store = AppendStore(request.output_dir)
    try:
        with interrupts.welcome():
            found = _take_up(store, request)
            session = Session(request, store, interrupts)
            session.prepare(found)
        if found is not None and found.problems:
            store.repair(found)
        yield session
    finally:
        store.close()


def _take_up(store: AppendStore, request: Request) -> Any:
    """Apply `run_id` and `resume` to what is in the folder."""
    if store.header is None:
        if request.resume == "require":
            raise ValueError(
                f"resume is 'require', but {request.output_dir} holds no run; check output_dir, or pass resume='auto'"
            )
        return None
    there = store.header["run_id"]
    if request.run_id is not None and request.run_id != there:
        raise ValueError(
            f"run_id is {request.run_id!r}, but {request.output_dir} holds the run {there!r}; an output_dir holds one "
            "run. Leave run_id out to go on with that one, or choose another output_dir"
        )
    found = store.recover()
    if request.resume == "never" and store.begun:
        raise FileExistsError(
            f"resume is 'never', and {request.output_dir} holds the run {there!r} with {len(found.records)} committed "
            "tiles; choose another output_dir, or pass resume='auto' to go on with it"
        )
    return found


def tile_data(read: ReadTile, result: TileResult, seconds: float) -> TileData:
    """A tile as it is written: its rows and its state on the host, and what the log says of them.

    Args:
        read: What it was computed from.
        result: What its program returned.
        seconds: What computing took.
    """
    about = {
        "inputs_sha256": read.digest,
        "seconds_computing": round(seconds, 6),
        "seconds_reading": round(read.seconds, 6),
    }
    rows = {name: np.asarray(leaf) for name, leaf in result_names(result).items()}
    return TileData(read.tile, rows, state_to_bytes(result.state), about)
