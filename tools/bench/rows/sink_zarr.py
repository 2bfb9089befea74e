"""Streaming a gigabyte of tiles into the appended store, each committed durably."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tools.bench._disk import alternate, once, seconds
from tools.bench.harness import Line, Row
from xtrax.run import fsync_directory, fsync_file
from xtrax.run._appended.shards import ArraySpec, TileData, chunk_rows
from xtrax.run._appended.store import AppendStore
from xtrax.run._tiled.writer import TileWriter

_TILES, _ROWS, _WIDTH = 16, 4096, 4096  # 64 MiB a tile
_SPEC = ArraySpec("output", (_WIDTH,), "float32", _ROWS, ("row", None))


def _tiles() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.random((_ROWS, _WIDTH), np.float32) for _ in range(4)]


def _streamed(folder: Path, tiles: list[np.ndarray]) -> None:
    store = AppendStore(folder / "out")
    store.create({"run_id": "bench", "rows": _ROWS * _TILES, "tile_rows": _ROWS}, [_SPEC], {})
    writer = TileWriter(store, lambda tiles: None, lambda: None)
    for i in range(_TILES):
        writer.submit(functools.partial(TileData, i, {"output": tiles[i % len(tiles)]}, None, {}))
    writer.end()
    writer.join()
    writer.check()
    store.finalize({})
    store.close()


def _raw(folder: Path, tiles: list[np.ndarray]) -> None:
    array: Any = zarr.create_array(
        folder / "out",
        shape=(_ROWS * _TILES, _WIDTH),
        dtype="float32",
        shards=(_ROWS, _WIDTH),
        chunks=(chunk_rows(_SPEC), _WIDTH),
        compressors=None,
    )
    for i in range(_TILES):
        array[i * _ROWS : (i + 1) * _ROWS] = tiles[i % len(tiles)]
        shard = folder / "out" / "c" / str(i) / "0"
        fsync_file(shard)
        fsync_directory(shard.parent)
        fsync_directory(shard.parent.parent)


def _measure() -> Iterator[Line]:
    tiles = _tiles()

    def equal(folder: Path) -> float:
        _streamed(folder, tiles)
        mine = zarr.open_array(folder / "out" / "output", mode="r")
        for i in (0, _TILES - 1):
            np.testing.assert_array_equal(mine[i * _ROWS : (i + 1) * _ROWS], tiles[i % len(tiles)])
        return 0.0

    once(equal)
    times = alternate(
        lambda folder: seconds(lambda: _streamed(folder, tiles)), lambda folder: seconds(lambda: _raw(folder, tiles))
    )
    rate = _TILES * tiles[0].nbytes / 1e6
    detail = f"{times}; {rate / times.work:.0f} MB/s against {rate / times.peer:.0f} MB/s"
    yield Line("sink-zarr", 1 / times.ratio, 0.9, at_least=True, detail=detail)


ROW = Row(
    "sink-zarr", "1 GB of tiles streamed to Zarr and committed", "raw sharded Zarr writes, each shard fsynced", _measure
)
