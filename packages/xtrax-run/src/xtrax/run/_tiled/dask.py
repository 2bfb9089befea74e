"""The tiles of a run, computed on the workers of a Dask cluster.

Each task computes a tile, writes its shards whole and flushes them; the client alone writes the commit log. A task is
idempotent: one that is run again, because its worker was lost, writes the same bytes under the same names, even while
the lost worker still writes. Workers find the job in the run's folder, which all of them must see.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import zarr
from distributed import as_completed, get_worker
from zarr.storage import MemoryStore

from xtrax.run._appended.shards import ArraySpec, WrittenTile, flush, write_tile, write_whole
from xtrax.run._fsync import fsync_directory
from xtrax.run._names import HIDDEN
from xtrax.run._tiled.inputs import Source, is_key
from xtrax.run._tiled.program import TileProgram, Work
from xtrax.run._tiled.progress import Progress
from xtrax.run._tiled.reader import ReadTile, TileInputs
from xtrax.run._tiled.report import RunReport
from xtrax.run._tiled.session import Session, tile_data, trace_tile
from xtrax.run._tiled.tiles import Tiles
from xtrax.stages import HostSink, HostTap
from xtrax.stages._effects import expected_elements
from xtrax.stages._host_record import run_watched

_JOB = "job.pickle"


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker needs to compute tiles.

    Attributes:
        folder: The store.
        work: What is computed.
        boundaries: By axis.
        rebuild: The inputs, from their leaves.
        sources: Their leaves; without data where the client reads.
        inputs: Reads tiles; None where the client does.
        tiles: How the outermost axis is cut.
        specs: The arrays of the store.
        program_sha256: Of the program of a tile, to tell a worker whose jax is another.
    """

    folder: Path
    work: Work
    boundaries: Any
    rebuild: Any
    sources: tuple[Source, ...]
    inputs: TileInputs | None
    tiles: Tiles
    specs: tuple[ArraySpec, ...]
    program_sha256: str


class Workshop:
    """A job on a worker, with its compiled programs.

    Attributes:
        job: The job.
        calling: Held by the thread whose tile calls host functions.
    """

    def __init__(self, job: Job):
        """Nothing is compiled yet."""
        self.job = job
        self._programs: dict[int, TileProgram] = {}
        self._lock = threading.Lock()  # a worker may have several threads
        self.calling = threading.Lock()

    def program(self, rows: int) -> TileProgram:
        """The program for so many rows, compiled once."""
        job = self.job
        with self._lock:
            if rows not in self._programs:
                program = trace_tile(job.work, job.rebuild, job.sources, rows, None)
                if rows == job.tiles.size(0):
                    self._check(program)
                program.compile()
                self._programs[rows] = program
            return self._programs[rows]

    def _check(self, program: TileProgram) -> None:
        if program.digest() != self.job.program_sha256:
            raise RuntimeError(
                f"a worker on {socket.gethostname()} (jax {jax.__version__}, {jax.default_backend()}) makes another "
                "program of fn than the client; give both the same versions, code, backend and jax configuration"
            )

    @property
    def compiles(self) -> int:
        """How many programs were compiled here."""
        return len(self._programs)


@functools.lru_cache(maxsize=1)
def _workshop(path: str, digest: str) -> Workshop:
    data = Path(path).read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise RuntimeError(f"{path} is not what the client wrote; the workers must see the same folder")
    return Workshop(cloudpickle.loads(data))


_loading = threading.Lock()


def compute_tile(path: str, digest: str, tile: int, read: ReadTile | None) -> tuple[WrittenTile, dict[str, Any]]:
    """Compute a tile on a worker, and write it durably.

    Returns:
        The tile, its folders flushed, and what the client reports.
    """
    with _loading:
        workshop = _workshop(path, digest)
    job = workshop.job
    if read is None:
        assert job.inputs is not None
        read = job.inputs.read(tile)
    rows = job.tiles.size(tile)
    program = workshop.program(rows)
    leaves, first = [jax.device_put(leaf) for leaf in read.leaves or ()], job.tiles.span(tile)[0]
    expected = expected_elements(job.work.decisions, job.boundaries, rows)
    with workshop.calling if expected else contextlib.nullcontext():  # a host function is watched by one call at a time
        start = time.perf_counter()
        result = run_watched(lambda: program(leaves, first, None, read.index_map), list(expected), expected)
        computing = time.perf_counter() - start
    data = tile_data(read, result, computing)
    with ThreadPoolExecutor(2) as pool:
        written = write_tile(job.folder, {spec.name: spec for spec in job.specs}, data, pool)
    flush(set(written.folders))
    about = {"worker": get_worker().address, "compiles": workshop.compiles, "read": read.bytes}
    return dataclasses.replace(written, folders=frozenset()), about


def run_on_workers(session: Session) -> RunReport:
    """Compute what is not committed, on the cluster. Tasks in flight are bounded, so that inputs do not pile up."""
    client, store = session.request.client, session.store
    assert store is not None
    job, ships = _job(session)
    data = _pickled(job)
    digest = hashlib.sha256(data).hexdigest()
    hidden = store.folder / HIDDEN
    write_whole(hidden, _JOB, data)
    fsync_directory(hidden)
    skipped = len(session.tiles) - len(session.todo)
    seconds = {"computing": 0.0, "reading": 0.0, "writing": 0.0}
    bytes_read, bytes_written, compiles = 0, 0, {}
    todo, flying, begun = iter(session.todo), as_completed(), time.perf_counter()

    def submit(count: int) -> None:
        for tile in itertools.islice(todo, count):
            read = session.inputs.read(tile) if ships else None
            name = f"xtrax-{digest[:16]}-{tile}"
            flying.add(client.submit(compute_tile, str(hidden / _JOB), digest, tile, read, key=name))

    done = 0
    try:
        with Progress(session.request.progress, len(session.tiles), skipped) as shown:
            submit(2 * max(1, sum(client.nthreads().values())) + session.request.prefetch)
            while True:
                with session.interrupts.welcome():
                    future = next(flying, None)
                    if future is None:
                        break
                    tile, about = future.result()
                store.commit_written([tile])
                session.compare_again(tile.record)
                done += 1
                for kind in seconds:
                    seconds[kind] += tile.record[f"seconds_{kind}"]
                bytes_read += about["read"]
                bytes_written += tile.bytes
                compiles[about["worker"]] = max(compiles.get(about["worker"], 0), about["compiles"])
                shown.advance(1, tile.bytes)
                submit(1)
    finally:
        client.cancel(list(flying.futures))
        (hidden / _JOB).unlink(missing_ok=True)
    return RunReport(
        run_id=session.run_id,
        output_dir=store.folder,
        tiles=len(session.tiles),
        tiles_done=done,
        tiles_skipped=skipped,
        seconds_computing=seconds["computing"],
        seconds_reading=seconds["reading"],
        seconds_writing=seconds["writing"],
        seconds_waiting=0.0,
        seconds_starting=begun,
        seconds=0.0,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        compiles=sum(compiles.values()),
        peak_memory=0,
    )


def _job(session: Session) -> tuple[Job, bool]:
    """The job, and whether the client reads the inputs."""
    sources = session.request.sources
    for source in sources:
        if is_key(source.value):
            raise ValueError(
                f"{source.where} holds PRNG keys, which cannot be sent to workers; pass key=, or their key data"
            )
    here = not all(isinstance(s.value, zarr.Array) and not isinstance(s.value.store, MemoryStore) for s in sources)
    if here:
        sources = tuple(dataclasses.replace(source, value=None) for source in sources)
    store, request = session.store, session.request
    assert store is not None
    assert store.header is not None
    specs = tuple(ArraySpec.from_json(value) for value in store.header["arrays"])
    job = Job(
        store.folder, session.work, request.boundaries, request.rebuild, sources, None if here else session.inputs,
        session.tiles, specs, store.header["computes"]["program_sha256"],
    )  # fmt: skip
    return job, here


class _Pickler(cloudpickle.Pickler):
    """Pickles what a job holds and pickle does not."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, HostTap | HostSink):  # the record of its calls is of this process
            return type(obj), (obj.fn, obj.ordered, obj.batched)
        if is_key(obj):
            return _key, (np.asarray(jax.random.key_data(obj)), str(jax.random.key_impl(obj)))
        return super().reducer_override(obj)


def _key(data: np.ndarray, impl: str) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=impl)


def _pickled(job: Job) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=5).dump(job)
    except Exception as error:
        raise TypeError(
            f"fn, the plan or a boundary cannot be sent to workers: {error}; make them of functions and arrays, "
            "without open files, locks and the like"
        ) from error
    return buffer.getvalue()
