"""The arrays of a tiled run: what each looks like in Zarr, and how a tile of it becomes one shard on the disk.

A shard is written by one writer as one file: temporary name, `fsync`, rename. zarr's own local store does not flush,
and a shard that two writers change loses data.
"""

import functools
import hashlib
import json
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from zarr import codecs
from zarr.storage import MemoryStore

from xtrax.run._appended.commit_log import put_in_place, write_file
from xtrax.run._appended.crc32c import crc32c
from xtrax.run._fsync import fsync_directory
from xtrax.run._names import HIDDEN, check_name
from xtrax.run._values import NUMERIC

_CHUNK_BYTES = (64 * 2**10, 4 * 2**20)  # of a chunk inside a shard: what a reader decodes for a part of a row range
PARTIAL = ".partial"
_encoding = threading.Lock()  # the arrays in memory are kept from call to call
Compression = Literal["zstd", "lz4", "gzip"]
COMPRESSIONS: dict[str, Any] = {
    "zstd": lambda: codecs.ZstdCodec(level=1),
    "lz4": lambda: codecs.BloscCodec(cname="lz4"),
    "gzip": lambda: codecs.GzipCodec(level=1),
}


@dataclass(frozen=True)
class ArraySpec:
    """An array of the output.

    Attributes:
        name: Its path in the store, components divided by `/`.
        shape: Of a row if `tile_rows` is not None, else of all of it.
        dtype: Its name, one of those that Zarr holds.
        tile_rows: Rows of a shard, which is a tile; None for what is written once, at the end.
        dims: Names of its dimensions, or None for one without.
        compression: Of the chunks, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    tile_rows: int | None
    dims: tuple[str | None, ...]
    compression: Compression | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row (of all of it, if it has none)."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def to_json(self) -> dict[str, Any]:
        """As the run's header keeps it."""
        return asdict(self) | {"shape": list(self.shape), "dims": list(self.dims)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ArraySpec":
        """The inverse of `to_json`."""
        fields: dict[str, Any] = {**value, "shape": tuple(value["shape"]), "dims": tuple(value["dims"])}
        return cls(**fields)

    def folder(self, root: Path) -> Path:
        """Where it lies in a store."""
        return root.joinpath(*self.name.split("/"))

    def shard_name(self, tile: int) -> str:
        """The file of a tile. No folder a shard, so that one flush of the array's folder makes many names durable."""
        if self.tile_rows is None:
            return ".".join(["c", *["0"] * len(self.shape)])
        return ".".join(["c", str(tile), *["0"] * len(self.shape)])


def check_array_spec(spec: ArraySpec) -> ArraySpec:
    """Return it, if Zarr can hold such an array under that name.

    Raises:
        TypeError: If it cannot hold the dtype.
        ValueError: If a component of the name cannot be one on the disk.
    """
    for part in spec.name.split("/"):
        check_name(part, f"the name of output {spec.name!r}")
    if spec.dtype not in NUMERIC:
        raise TypeError(
            f"output {spec.name!r} has dtype {spec.dtype}, which Zarr cannot hold; cast it in fn, for instance with "
            ".astype(jnp.float32) (of a PRNG key, return jax.random.key_data)"
        )
    return spec


def chunk_rows(spec: ArraySpec) -> int:
    """Rows of a chunk inside a shard, which has to hold a whole number of them."""
    rows, row = spec.tile_rows or 1, max(1, spec.row_bytes)
    low, high = _CHUNK_BYTES
    divisors = [d for d in range(1, math.isqrt(rows) + 1) if rows % d == 0]
    divisors = sorted({*divisors, *(rows // d for d in divisors)})
    best = max((d for d in divisors if d * row <= high), default=1)
    # Rows with no fitting divisor (a prime number of them) would make a shard of very many tiny chunks.
    return best if best * row >= low else min((d for d in divisors if d * row >= low), default=rows)


@functools.lru_cache(maxsize=64)
def _in_memory(spec: ArraySpec, rows: int | None) -> tuple[dict[str, Any], zarr.Array]:
    """A Zarr array of some rows in a dict."""
    held: dict[str, Any] = {}
    row = tuple(max(1, n) for n in spec.shape)
    if spec.tile_rows is None:
        shape, chunks, shards = spec.shape, row, None
    else:
        shape, chunks, shards = (rows or 0, *spec.shape), (chunk_rows(spec), *row), (spec.tile_rows, *row)
    array = zarr.create_array(
        store=MemoryStore(held),
        name="a",
        shape=shape,
        chunks=chunks,
        shards=shards,
        dtype=spec.dtype,
        fill_value=0,
        compressors=None if spec.compression is None else COMPRESSIONS[spec.compression](),
        zarr_format=3,
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=spec.dims,
        config={"write_empty_chunks": True},  # so that a missing chunk is always damage
    )
    return held, array


def array_metadata(spec: ArraySpec, rows: int | None = None) -> dict[str, Any]:
    """What `zarr.json` says of the array when it has so many rows."""
    held, _ = _in_memory(spec, rows if spec.tile_rows is None else 0)
    metadata = json.loads(held["a/zarr.json"].to_bytes())
    if spec.tile_rows is not None:
        metadata["shape"][0] = rows
    return metadata


def encode(spec: ArraySpec, values: np.ndarray) -> tuple[memoryview | bytes, ...]:
    """The bytes of a shard (or of an array that is written once), in parts; no parts if it has no elements.

    Args:
        spec: The array.
        values: `(n, *spec.shape)`, n at most `spec.tile_rows`; `spec.shape` for what is written once.
    """
    expected = values.shape[:1] + spec.shape if spec.tile_rows is not None else spec.shape
    if values.shape != expected or values.dtype != np.dtype(spec.dtype):
        raise ValueError(
            f"output {spec.name!r} is {values.dtype}{list(values.shape)}, expected {spec.dtype}{list(expected)}"
        )
    if values.size == 0:
        return ()
    if spec.compression is None:
        return _plain(spec, values)
    with _encoding:
        held, array = _in_memory(spec, len(values) if spec.tile_rows is not None else None)
        array[...] = values
        (key,) = (key for key in held if not key.endswith("zarr.json"))
        return (memoryview(held.pop(key).as_numpy_array()).cast("B"),)


def _plain(spec: ArraySpec, values: np.ndarray) -> tuple[memoryview | bytes, ...]:
    """The bytes that zarr makes without a compressor, without the copies that it makes of them.

    A shard (https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/) is its chunks, one after another,
    which hold whole rows here, so that they are the array as it is; then the offset and size of each, and a checksum.
    """
    little = np.ascontiguousarray(values, np.dtype(spec.dtype).newbyteorder("<"))
    data = memoryview(little.reshape(-1).view(np.uint8))
    if spec.tile_rows is None:
        return (data,)
    rows = chunk_rows(spec)
    used = -(-len(values) // rows)
    padding = bytes((used * rows - len(values)) * spec.row_bytes)  # the last chunk is whole too
    index = np.full((spec.tile_rows // rows, 2), 2**64 - 1, "<u8")  # which says that a chunk is not there
    size = rows * spec.row_bytes
    index[:used, 0], index[:used, 1] = np.arange(used, dtype="<u8") * size, size
    table = index.tobytes()
    return data, padding, table + crc32c(table).to_bytes(4, "little")


def write_whole(folder: Path, name: str, *parts: bytes | memoryview) -> None:
    """A file that is there whole or not at all; durable once its folder is flushed."""
    temporary = folder / f"{name}.{secrets.token_hex(4)}{PARTIAL}"  # unique: a lost worker may still be writing
    try:
        write_file(temporary, *parts)
        put_in_place(temporary, folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)  # a full disk needs the space
        raise


def state_folder(root: Path) -> Path:
    """Where the states between tiles lie."""
    return root / HIDDEN / "state"


@dataclass(frozen=True)
class TileData:
    """A finished tile.

    Attributes:
        tile: Its number, from 0.
        arrays: Its rows of each output, `(n, ...)`, on the host.
        state: The carry or reducer state to be kept with it, or None.
        about: What else the log keeps of it, such as digests of its inputs.
    """

    tile: int
    arrays: Mapping[str, np.ndarray]
    state: bytes | None
    about: Mapping[str, Any]


@dataclass(frozen=True)
class WrittenTile:
    """A tile whose files are on the disk, but not yet in the log.

    Attributes:
        record: What the log will say of it.
        folders: Those whose names must be flushed first.
        bytes: Of its rows and its state.
    """

    record: dict[str, Any]
    folders: frozenset[Path]
    bytes: int


def write_tile(root: Path, specs: Mapping[str, ArraySpec], data: TileData, pool: Executor) -> WrittenTile:
    """Write the shards and the state of a tile. They count once a line of the log names them.

    Digesting takes as long as writing, so each is a task of its own; hashing and system calls let other threads run.

    Args:
        root: The store.
        specs: Its arrays.
        data: The tile.
        pool: What runs the tasks. All have ended when this returns or raises.

    Raises:
        OSError: If the disk does not take them.
    """
    start = time.perf_counter()
    files = {name: (specs[name].folder(root), specs[name].shard_name(data.tile), encode(specs[name], values))
             for name, values in data.arrays.items()}  # fmt: skip
    if data.state is not None:
        files["\0state"] = state_folder(root), f"{data.tile}.bin", (data.state,)
    tasks = {name: (pool.submit(write_whole, folder, file, *parts) if parts else None, pool.submit(_digest, parts))
             for name, (folder, file, parts) in files.items()}  # fmt: skip
    wait([task for pair in tasks.values() for task in pair if task is not None])
    written = {}
    for name, (writing, digesting) in tasks.items():
        if writing is not None:
            writing.result()
        written[name] = {"bytes": sum(len(part) for part in files[name][2]), "sha256": digesting.result()}
    record: dict[str, Any] = {"tile": data.tile}
    if data.state is not None:
        record["state"] = written.pop("\0state")
    record |= {"arrays": written, **data.about, "seconds_writing": round(time.perf_counter() - start, 6)}
    size = sum(array.nbytes for array in data.arrays.values()) + len(data.state or b"")
    return WrittenTile(record, frozenset(folder for folder, _, parts in files.values() if parts), size)


def _digest(parts: tuple[memoryview | bytes, ...]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def find_lost(root: Path, spec: ArraySpec, sizes: Mapping[int, int]) -> Iterator[tuple[int, str]]:
    """Tiles of an array whose shard is not there, or not as long as it was, and what is wrong with it.

    Args:
        root: The store.
        spec: The array.
        sizes: Bytes of the shard of each tile.
    """
    folder = str(spec.folder(root))  # a Path for each of many thousand shards would take longer than looking at them
    for tile, expected in sizes.items():
        shard = f"{folder}/{spec.shard_name(tile)}"
        try:
            size = os.stat(shard).st_size
        except (FileNotFoundError, NotADirectoryError):
            size = None
        if size != expected and expected:  # of rows without elements there is no shard
            yield (
                tile,
                f"{shard} "
                + ("is missing" if size is None else f"has {size} bytes and not {expected}: it was cut or replaced"),
            )


def flush(folders: set[Path]) -> None:
    """Make the names in folders durable."""
    for folder in sorted(folders):
        fsync_directory(folder)
