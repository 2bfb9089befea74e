"""Whether two stores hold the same results, and whether what was written is on the disk."""

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from xtrax.run._appended.files import DamagedRunError, count_tiles
from xtrax.run._appended.inspection import Problem, inspect_store
from xtrax.run._canonical import canonical_json_bytes, normalize_json_value
from xtrax.run._checks import check_folder
from xtrax.run._fsync import fsync_directory, fsync_file, fsync_tree
from xtrax.run._names import HIDDEN
from xtrax.run._values import RESERVED

__all__ = [
    "DamagedRunError",
    "IntegrityReport",
    "Problem",
    "canonical_json_bytes",
    "fsync_directory",
    "fsync_file",
    "fsync_tree",
    "normalize_json_value",
    "update_array_digest",
    "update_zarr_node_digest",
    "verify_store",
    "zarr_content_digest",
]

_PIECE_BYTES = 64 * 2**20
_MOST_BYTES = 2**30  # for whole chunks, so that none is decoded twice


class Digest(Protocol):
    """What `hashlib.sha256()` returns, as far as it is used here."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Feed bytes."""
        ...


def zarr_content_digest(path: str | os.PathLike[str]) -> str:
    """A digest of what a Zarr store holds: paths, callers' attributes, and the arrays' dtypes, shapes and values.

    Equal contents have equal digests whatever the chunks, shards, compressor, Zarr format, file times and writer. A
    run's provenance (the reserved attributes of its root), its commit log and its manifest do not count, so two runs
    have equal digests if, and only if, their results are equal bit for bit.

    Args:
        path: The store's folder, or the folder of a group or array in it. It is read in pieces of 64 MiB, or
            of whole chunks up to 1 GiB.

    Returns:
        A sha256 in 64 hexadecimal digits.

    Raises:
        TypeError: If `path` is no path.
        FileNotFoundError: If there is no such folder.
        ValueError: If it holds no Zarr group or array.

    Examples:
        >>> import tempfile, numpy as np, zarr
        >>> a, b = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> _ = zarr.create_array(f"{a}/x", data=np.arange(6.0), chunks=(2,))
        >>> _ = zarr.create_array(f"{b}/x", data=np.arange(6.0), chunks=(3,), compressors=None)
        >>> zarr_content_digest(f"{a}/x") == zarr_content_digest(f"{b}/x")
        True
    """
    path = check_folder(path, "path", "the folder of a Zarr store")
    try:
        node = zarr.open(path, mode="r")
    except (FileNotFoundError, KeyError) as error:
        raise ValueError(f"{path} holds no Zarr group or array ({error})") from error
    digest = hashlib.sha256()
    update_zarr_node_digest(digest, node)
    return digest.hexdigest()


@dataclass(frozen=True)
class IntegrityReport:
    """What `verify_store` found.

    Attributes:
        path: The store.
        run_id: The run.
        tiles: How many tiles the run has.
        committed: How many of them are committed: the log says so, be they damaged or not.
        finished: Whether the run is finished: it has a manifest.
        bytes_checked: Bytes of shards that were read and digested.
        problems: What is not as it was written; empty if all is well.
    """

    path: Path
    run_id: str
    tiles: int
    committed: int
    finished: bool
    bytes_checked: int
    problems: tuple[Problem, ...]

    @property
    def damaged(self) -> int:
        """How many of the committed tiles something is wrong with."""
        return len({problem.tile for problem in self.problems if problem.tile is not None})

    @property
    def ok(self) -> bool:
        """Whether everything that was committed is there, bit for bit."""
        return not self.problems

    def __str__(self) -> str:
        """A line for the store and one for each problem."""
        state = "finished" if self.finished else "unfinished"
        head = f"{self.path}: run {self.run_id}, {state}, {self.committed} of {self.tiles} tiles committed, "
        if self.ok:
            return f"{head}all as written ({self.bytes_checked} bytes)"
        count = f"{len(self.problems)} problem{'s' if len(self.problems) > 1 else ''}"
        return "\n".join([f"{head}{self.damaged} of them damaged; {count}:", *(f"  {p}" for p in self.problems)])


def verify_store(path: str | os.PathLike[str]) -> IntegrityReport:
    """Check a tiled run's output against what was recorded when it was committed. Changes nothing.

    Every committed shard and state is read and compared with its digest; the commit log, the header and the manifest
    carry their own. A flipped bit, a truncated or missing file and an edited record are named with their tile. A run
    that is being written, or was killed, can be checked too: what is not committed does not count.

    Args:
        path: The `output_dir` of a run by `run_tiled`.

    Returns:
        What was found; `.ok` says whether all is well.

    Raises:
        TypeError: If `path` is no path.
        FileNotFoundError: If there is no such folder, or no tiled run in it.
        DamagedRunError: If the run's header was changed or is lost, so that nothing else can be judged.

    Examples:
        >>> import tempfile, warnings, jax.numpy as jnp, numpy as np
        >>> from xtrax.run import SinkSpec, run_tiled
        >>> from xtrax.tiling import AxisSpec
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # no git repository here
        ...     report = run_tiled(
        ...         jnp.sin, np.ones(8), specs=[AxisSpec("n", 8, 8)], sink=SinkSpec(folder), tile_size=4, progress="off"
        ...     )
        >>> verify_store(folder).ok
        True
    """
    path = check_folder(path, "path", "the output_dir of a run by run_tiled")
    found = inspect_store(path)
    header = found.header
    return IntegrityReport(
        path=path,
        run_id=header["run_id"],
        tiles=count_tiles(header),
        committed=len(found.records),
        finished=found.finished,
        bytes_checked=found.bytes_checked,
        problems=found.problems,
    )


def update_zarr_node_digest(digest: Digest, node: zarr.Group | zarr.Array, path: str = "") -> None:
    """Feed a group and all below it, or an array, to a digest, in an order that depends on names alone.

    Args:
        digest: A hashlib object.
        node: The group or array.
        path: Its name in the digest; the root is `""`.

    Raises:
        TypeError: If `node` is neither a group nor an array.

    Examples:
        >>> import hashlib, zarr
        >>> one, other = hashlib.sha256(), hashlib.sha256()
        >>> update_zarr_node_digest(one, zarr.create_group({}, attributes={"a": 1}))
        >>> update_zarr_node_digest(other, zarr.create_group({}, attributes={"a": 2}))
        >>> one.hexdigest() == other.hexdigest()
        False
    """
    if not isinstance(node, zarr.Group | zarr.Array):
        raise TypeError(f"node must be a zarr.Group or zarr.Array, not {type(node).__name__}: {node!r}")
    attrs = dict(node.attrs)
    if not path and "run_id" in attrs:
        attrs = {name: value for name, value in attrs.items() if name not in RESERVED}
    kind = "array" if isinstance(node, zarr.Array) else "group"
    _feed(digest, canonical_json_bytes([kind, path, attrs]))
    if isinstance(node, zarr.Array):
        update_array_digest(digest, node)
        return
    for name, child in sorted(node.members()):
        if path or name != HIDDEN:
            update_zarr_node_digest(digest, child, f"{path}/{name}" if path else name)


def update_array_digest(digest: Digest, array: Any) -> None:
    """Feed an array to a digest: dtype, shape, and values in C order as little-endian bytes.

    Args:
        digest: A hashlib object.
        array: A numpy, JAX or Zarr array of any shape; a Zarr array is read piece by piece.

    Raises:
        TypeError: If it has no shape and dtype, or holds objects that are no strings.

    Examples:
        >>> import hashlib, numpy as np
        >>> digests = [hashlib.sha256(), hashlib.sha256()]
        >>> update_array_digest(digests[0], np.array([1, 2], ">i4"))
        >>> update_array_digest(digests[1], np.array([1, 2], "<i4"))
        >>> digests[0].digest() == digests[1].digest()
        True
    """
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"array must have a shape and a dtype, not be a {type(array).__name__}: {array!r}")
    shape = tuple(int(n) for n in array.shape)
    dtype = np.dtype(array.dtype)
    text = dtype.kind in "OT"
    name = "string" if text else str(dtype.descr) if dtype.fields else dtype.name
    _feed(digest, canonical_json_bytes([name, shape]))
    for piece in _pieces(
        shape, max(1, dtype.itemsize), getattr(array, "shards", None) or getattr(array, "chunks", None)
    ):
        values = np.asarray(array[piece])
        if text:
            _feed(digest, canonical_json_bytes(values.reshape(-1).tolist()))
        else:
            little = values.astype(dtype.newbyteorder("<"), copy=False)
            digest.update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)


def _feed(digest: Digest, data: bytes) -> None:
    """Feed bytes so that no other sequence of feeds gives the same stream."""
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)


def _pieces(shape: tuple[int, ...], itemsize: int, chunks: tuple[int, ...] | None) -> Iterator[tuple[slice | int, ...]]:
    """Indices of pieces that follow one another in C order, of whole chunks along the axis that is cut if they fit."""
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    steps = [itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]  # bytes of one step along each axis
    axis = next((i for i, size in enumerate(steps) if size <= _PIECE_BYTES), len(shape) - 1)
    step = max(1, _PIECE_BYTES // steps[axis])
    if chunks and chunks[axis] * steps[axis] <= _MOST_BYTES:
        step = max(chunks[axis], step - step % chunks[axis])
    for outer in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, min(start + step, shape[axis])))
