"""The tiles of a run, computed in this process."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax

from xtrax.run._appended.shards import WrittenTile
from xtrax.run._tiled.program import TileResult
from xtrax.run._tiled.progress import Progress
from xtrax.run._tiled.reader import Places, ReadTile, TileReader
from xtrax.run._tiled.report import RunReport, reset_peak_memory
from xtrax.run._tiled.session import Session, tile_data
from xtrax.run._tiled.writer import TileWriter
from xtrax.stages._effects import expected_elements
from xtrax.stages._host_record import run_watched


def run_tiles(session: Session) -> RunReport:
    """Compute what is not committed. Reading goes ahead of it and writing follows, each in a thread."""
    skipped = len(session.tiles) - len(session.todo)
    request = session.request
    places = Places(request.prefetch + 2)
    with Progress(request.progress, len(session.tiles), skipped) as shown:
        loop = _Loop(session, places, shown)
        reader = TileReader(session.inputs, session.todo, places)
        try:
            loop.run(reader)
        finally:
            reader.end()
            loop.end()
            reader.join()
            loop.join()  # what was computed is committed, also after an error
        loop.check()
    return RunReport(
        run_id=session.run_id,
        output_dir=None if session.store is None else session.store.folder,
        tiles=len(session.tiles),
        tiles_done=loop.done,
        tiles_skipped=skipped,
        seconds_computing=loop.computing,
        seconds_reading=reader.seconds,
        seconds_writing=0.0 if loop.writer is None else loop.writer.seconds,
        seconds_waiting=loop.waiting,
        seconds_starting=loop.started,
        seconds=0.0,
        bytes_read=reader.bytes,
        bytes_written=loop.written,
        compiles=session.compiles,
        peak_memory=0,
    )


class _Loop:
    """Takes tiles from the reader, computes them, and hands them to the writer."""

    def __init__(self, session: Session, places: Places, shown: Progress):
        self.started = self.computing = self.waiting = 0.0
        self.done = self.written = 0
        self._session, self._places, self._shown = session, places, shown
        self._interrupts = session.interrupts
        self._carry: tuple[int, Any] | None = None  # the tile that it comes before, and the carry
        self.writer = None
        if session.store is not None:
            self.writer = TileWriter(session.store, self._committed, places.close)

    def run(self, reader: TileReader) -> None:
        if self._session.todo:
            for rows in dict.fromkeys(self._session.tiles.size(tile) for tile in self._session.todo):
                with self._interrupts.welcome():
                    self._session.program(rows).compile()
            reset_peak_memory()
        self.started = time.perf_counter()
        ahead: tuple[ReadTile, Any] | None = None
        while True:
            start = time.perf_counter()
            if ahead is None:
                with self._interrupts.welcome():
                    read = reader.next()
                if read is None:
                    break
                ahead = self._put(read)
                del read
            (current, leaves), ahead = ahead, None
            waited = time.perf_counter()
            self.waiting += waited - start
            result, ahead = self._compute(current, leaves, reader)
            seconds = time.perf_counter() - waited
            self.computing += seconds
            self._hand_over(current, result, seconds)
            self._interrupts.check()
            # A name is a reference: while the next tile is waited for, nothing of this one should be held here.
            del leaves, result

    def _put(self, read: ReadTile) -> tuple[ReadTile, Any]:
        """Start moving a tile's inputs to the device, and let go of them here."""
        leaves = read.leaves
        if self._session.work.mesh is None:  # over a mesh, the program splits them itself
            leaves = [leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf) for leaf in leaves or ()]
        return dataclasses.replace(read, leaves=None), leaves

    def _compute(self, read: ReadTile, leaves: Any, reader: TileReader) -> Any:
        session = self._session
        rows = session.tiles.size(read.tile)
        program = session.program(rows)
        carry = self._carry_before(read.tile) if session.work.scans else None
        start = session.tiles.span(read.tile)[0]
        expected = expected_elements(session.work.decisions, session.request.boundaries, rows)
        ahead = None
        if expected:
            result = run_watched(
                lambda: program(leaves, start, carry, read.index_map),
                list(expected),
                expected,
                several_devices=session.work.mesh is not None,
            )
        else:
            result = program(leaves, start, carry, read.index_map)
            following = reader.next(wait=False)
            if following is not None:
                ahead = self._put(following)
            jax.block_until_ready(result)
        if session.work.scans:
            self._carry = read.tile + 1, result.state["carry"]
        return result, ahead

    def _carry_before(self, tile: int) -> Any:
        if self._carry is not None and self._carry[0] == tile:
            return self._carry[1]
        return self._session.carry_before(tile)

    def _hand_over(self, read: ReadTile, result: TileResult, seconds: float) -> None:
        if self.writer is not None:
            self.writer.submit(functools.partial(tile_data, read, result, seconds))
            return
        self._session.keep(read.tile, result)
        self.done += 1
        self._places.give_back()
        self._shown.advance(1, 0)

    def _committed(self, tiles: Sequence[WrittenTile]) -> None:
        written = sum(tile.bytes for tile in tiles)
        for tile in tiles:
            self._session.compare_again(tile.record)
        self.done += len(tiles)
        self.written += written
        self._places.give_back(len(tiles))
        self._shown.advance(len(tiles), written)

    def end(self) -> None:
        """Nothing more is handed over."""
        if self.writer is not None:
            self.writer.end()

    def join(self) -> None:
        """Let the writer finish what it has; `check` raises what it failed with."""
        if self.writer is not None:
            self.writer.join()

    def check(self) -> None:
        if self.writer is not None:
            self.writer.check()
