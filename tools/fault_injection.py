"""Kill tiled runs with SIGKILL, resume them, and tell what was lost.

Each run computes 12 tiles in a process of its own, with a host function that notes every row that it sees. It is
killed at a named point of the commit protocol, reached for the n-th time, or at a random moment; then it is resumed. It
must end in the digest of a run that was never stopped, compute no committed tile again, call no host function for one,
and have lost no more tiles than may be in flight.

Usage: python tools/fault_injection.py [--quick] [--random N] [--seed N] [--scale X] [--json]

`--quick` takes each named point once and five random moments. Linux and macOS.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import zarr

from xtrax.run import (
    SinkSpec,
    run_tiled,
    verify_store,
    zarr_content_digest,
)
from xtrax.run._appended import shards, store
from xtrax.run._appended.commit_log import CommitLog, read_log
from xtrax.run._appended.store import AppendStore
from xtrax.run._tiled.report import peak_memory, reset_peak_memory
from xtrax.stages import AxisBoundary, HostTap
from xtrax.tiling import AxisSpec, BatchPlanner, CarrySpec, reducers

TILES, TILE_ROWS, PREFETCH = 12, 8, 2
ROWS = TILES * TILE_ROWS
KINDS = ("map", "scan", "fuse")

Kill = Callable[[], None]
"""Counts a visit, and kills the process if it is the one."""


def _before(owner: Any, name: str, kill: Kill, when: Callable[..., bool] = lambda *_: True) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args):
            kill()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, kill: Kill, when: Callable[..., bool] = lambda *_: True) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if when(*args):
            kill()
        return result

    setattr(owner, name, wrapped)


def _halfway(kill: Kill, when: Callable[[str], bool]) -> None:
    """Inside a write: half of the bytes have reached the file."""
    write, rest = os.write, threading.local()  # two tiles are written at once

    def wrapped(handle: int, data: Any) -> int:
        if not when(os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))) or getattr(rest, "follows", False):
            rest.follows = False
            return write(handle, data)
        rest.follows = True  # the caller writes it next
        written = write(handle, memoryview(data)[: (len(data) + 1) // 2])
        kill()
        return written

    setattr(os, "write", wrapped)  # noqa: B010 - the types of os.write and of this differ


def _named(prefix: str, suffix: str = "") -> Callable[[str], bool]:
    return lambda name: name.startswith(prefix) and name.endswith(suffix)


def _target(test: Callable[[str], bool]) -> Callable[..., bool]:
    return lambda source, target, *_: test(os.path.basename(target))


def _flushed(test: Callable[[str], bool]) -> Callable[..., bool]:
    return lambda handle: test(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))


def _shard(name: str) -> bool:
    return name.startswith("c.")


POINTS: dict[str, tuple[str, Callable[[Kill], None]]] = {
    # What is killed, the kind of run, and how. In the order of the protocol.
    "making a run: its arrays": ("map", lambda kill: _before(store, "put_json", kill)),
    "making a run: before its header": (
        "map",
        lambda kill: _before(os, "replace", kill, _target(_named("run.json"))),
    ),
    "making a run: after its header": ("map", lambda kill: _after(os, "replace", kill, _target(_named("run.json")))),
    "computing: in a host function": ("map", lambda kill: _before(_Notes, "write", kill)),
    "a shard: before it": (
        "map",
        lambda kill: _before(shards, "write_whole", kill, lambda _, name, *__: _shard(name)),
    ),
    "a shard: inside its write": ("map", lambda kill: _halfway(kill, lambda name: _shard(name))),
    "a shard: written, not flushed": ("map", lambda kill: _before(os, "fsync", kill, _flushed(_shard))),
    "a shard: flushed, not renamed": ("map", lambda kill: _before(os, "replace", kill, _target(_shard))),
    "a shard: renamed, folder not flushed": ("map", lambda kill: _before(store, "flush", kill)),
    "a carry: inside its write": ("scan", lambda kill: _halfway(kill, lambda name: ".bin." in name)),
    "a carry: written, its tile not committed": ("scan", lambda kill: _before(CommitLog, "append", kill)),
    "a carry: committed, the one before still there": (
        "scan",
        lambda kill: _after(CommitLog, "append", kill),
    ),
    "a reducer's state: flushed, not renamed": (
        "fuse",
        lambda kill: _before(os, "replace", kill, _target(lambda name: name.endswith(".bin"))),
    ),
    "the log: before the line": ("map", lambda kill: _before(CommitLog, "append", kill)),
    "the log: inside the line": ("map", lambda kill: _halfway(kill, lambda name: name == "commits.jsonl")),
    "the log: written, not flushed": (
        "map",
        lambda kill: _before(os, "fsync", kill, _flushed(lambda name: name == "commits.jsonl")),
    ),
    "the log: after the commit": ("map", lambda kill: _after(CommitLog, "append", kill)),
    "the arrays' length: before it": ("map", lambda kill: _before(AppendStore, "_grow", kill)),
    "the arrays' length: inside": (
        "map",
        lambda kill: _before(os, "replace", kill, lambda s, t: str(t).endswith(("y/zarr.json", "s/zarr.json"))),
    ),
    "finalize: before it": ("fuse", lambda kill: _before(AppendStore, "finalize", kill)),
    "finalize: between the reduced outputs": (
        "fuse",
        lambda kill: _before(store, "make_array", kill, lambda root, spec: spec.tile_rows is None and spec.name == "y"),
    ),
    "finalize: the manifest written, not flushed": (
        "map",
        lambda kill: _before(os, "fsync", kill, _flushed(_named(".manifest.json"))),
    ),
    "finalize: before the manifest's rename": (
        "map",
        lambda kill: _before(os, "replace", kill, _target(_named("manifest.json"))),
    ),
    "finalize: after the manifest's rename": (
        "map",
        lambda kill: _after(os, "replace", kill, _target(_named("manifest.json"))),
    ),
}
ON_RESUMING: dict[str, Callable[[Kill], None]] = {
    "resuming: before the torn line is cut": lambda kill: _before(CommitLog, "load", kill),
    "resuming: while committed tiles are checked": lambda kill: _before(store, "inspect_store", kill),
    "resuming: before a damaged tile is given up": lambda kill: _before(CommitLog, "replace", kill),
    "resuming: after a damaged tile is given up": lambda kill: _after(CommitLog, "replace", kill),
}


class _Notes:
    """The host function: notes the rows that it sees, in one write each call."""

    def __init__(self, path: Path):
        self.path, self.began = path, 0.0

    def __call__(self, values: Any, index: np.ndarray) -> None:
        self.began = self.began or time.perf_counter()
        self.write(index[:, 0].tolist())

    def write(self, rows: list[int]) -> None:
        with self.path.open("a") as file:
            file.write(f"{rows}\n")
        time.sleep(0.002)


def compute(kind: str, folder: Path, notes: Path) -> dict[str, Any]:
    """Run, or resume; the same in every process."""
    x = np.random.default_rng(0).normal(size=(ROWS, 64)).astype(np.float32)
    scan = CarrySpec("row", jnp.zeros(64), lambda carry, y: (0.5 * carry + y["y"], {"y": carry, "s": y["s"]}))
    plan = BatchPlanner(carry_specs=[scan] if kind == "scan" else []).plan([AxisSpec("row", ROWS, 4)])
    fuse = {"y": reducers.mean, "s": reducers.var} if kind == "fuse" else None
    note = _Notes(notes)
    boundaries = {"row": AxisBoundary(tap=HostTap(note, ordered=True), fuse=fuse)}
    report = run_tiled(
        lambda x: {"y": jnp.tanh(x), "s": jnp.sum(x * x)}, x, plan=plan, boundaries=boundaries, tile_size=TILE_ROWS,
        sink=SinkSpec(folder), prefetch=PREFETCH, progress="off",
    )  # fmt: skip
    return {"done": report.tiles_done, "starting": report.seconds_starting, "running": time.perf_counter() - note.began}


def in_child(work: Callable[[], Any], kill_after: float | None = None, since: Path | None = None) -> tuple[bool, Any]:
    """Work in a forked process, killed some seconds after its start, or after a file is there, or not at all.

    Returns:
        Whether it was killed, and what the work returned.

    This process starts no device, so that a child may: forking is quick, and importing jax is not.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            warnings.simplefilter("ignore")
            os.write(writer, json.dumps(work()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writer)
    if kill_after is not None:
        while (
            since is not None
            and not since.exists()
            and not os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        ):
            time.sleep(0.001)
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if status and not killed:
        raise RuntimeError(f"a run failed by itself (status {status}); see above")
    return killed, json.loads(data) if data else None


def dying(work: Callable[[], Any], install: Callable[[Kill], None], visit: int) -> Callable[[], Any]:
    """The work, which kills itself at a visit of a point."""

    def armed() -> Any:
        visits = 0

        def kill() -> None:
            nonlocal visits
            visits += 1
            if visits == visit:
                os.kill(os.getpid(), signal.SIGKILL)

        install(kill)
        work()
        return visits

    return armed


def rows_of(notes: Path) -> list[int]:
    """The rows that a host function has seen, in order."""
    if not notes.exists():
        return []
    return [row for line in notes.read_text().splitlines() if line.endswith("]") for row in json.loads(line)]


def state_of(folder: Path) -> dict[str, Any]:
    """Digest and verdict of a store, in a child: zarr has threads, which a fork does not copy."""
    return {"digest": zarr_content_digest(folder), "ok": verify_store(folder).ok}


class Lab:
    """Runs, kills and compares."""

    def __init__(self, root: Path):
        """Make an uninterrupted run of each kind, and time one."""
        self.root, self.count = root, 0
        self.digest: dict[str, str] = {}
        self.seconds: dict[str, dict[str, float]] = {}
        for kind in KINDS:
            folder, notes = root / f"whole-{kind}", root / f"notes-{kind}"
            self.seconds[kind] = in_child(lambda k=kind, folder=folder, notes=notes: compute(k, folder, notes))[1]
            self.digest[kind] = in_child(lambda folder=folder: state_of(folder))[1]["digest"]

    def outcome(self, name: str, kind: str, killing: Callable[[Path, Path], bool]) -> dict[str, Any]:
        """Kill a run, resume it, and compare.

        Args:
            name: What is shown.
            kind: Of the run.
            killing: Runs in a folder, with a file for notes, and says whether it was killed.
        """
        self.count += 1
        folder, notes = self.root / f"run-{self.count}", [self.root / f"notes-{self.count}-{i}" for i in range(2)]
        killed = killing(folder, notes[0])
        log = folder / ".xtrax" / "commits.jsonl"
        committed = {record["tile"] for record in read_log(log).records} if log.exists() else set()
        begun = {row // TILE_ROWS for row in rows_of(notes[0])}
        _, report = in_child(lambda: compute(kind, folder, notes[1]))
        again = rows_of(notes[1])
        found = in_child(lambda: state_of(folder))[1]
        left = [row for row in range(ROWS) if row // TILE_ROWS not in committed]
        shutil.rmtree(folder)
        return {
            "point": name,
            "kind": kind,
            "killed": killed,
            "committed": len(committed),
            "lost": len(begun - committed),
            "same": found["digest"] == self.digest[kind] and found["ok"],
            "recomputed": report["done"] - (TILES - len(committed)),
            "effects": again == left,  # of every row that was not committed once, in order, and of no other
        }

    def at_point(self, name: str, visit: int) -> dict[str, Any]:
        """Kill at the n-th visit of a named point."""
        kind, install = POINTS[name]

        def killing(folder: Path, notes: Path) -> bool:
            return in_child(dying(lambda: compute(kind, folder, notes), install, visit))[0]

        return self.outcome(name, kind, killing)

    def while_resuming(self, name: str) -> dict[str, Any]:
        """Kill once in the middle, harm a committed tile, and kill again while it is resumed."""

        def killing(folder: Path, notes: Path) -> bool:
            first, install = POINTS["the log: inside the line"]
            in_child(dying(lambda: compute(first, folder, notes), install, 4))
            if "damaged" in name:
                os.truncate(folder / "y" / "c.0.0", 100)
            killed, _ = in_child(dying(lambda: compute(first, folder, notes), ON_RESUMING[name], 1))
            if "damaged" in name:  # what is still in the log is not all sound
                self._drop_damaged(folder)
            return killed

        return self.outcome(name, "map", killing)

    def _drop_damaged(self, folder: Path) -> None:
        log = CommitLog(folder / ".xtrax" / "commits.jsonl")
        log.replace([record for record in log.load().records if record["tile"]])

    def at_random(self, kind: str, moment: float) -> dict[str, Any]:
        """Kill at a moment from -1, the start, over 0, when the first tile is computed, to 1, the end."""
        seconds = self.seconds[kind]
        delay = (1 + moment) * seconds["starting"] if moment < 0 else moment * seconds["running"]

        def killing(folder: Path, notes: Path) -> bool:
            return in_child(lambda: compute(kind, folder, notes), delay, None if moment < 0 else notes)[0]

        return self.outcome("a random moment", kind, killing)

    def visits(self, name: str) -> int:
        """How often a run that is left alone passes a point."""
        kind, install = POINTS[name]
        folder = self.root / "count"
        _, visits = in_child(dying(lambda: compute(kind, folder, self.root / "notes-count"), install, 0))
        shutil.rmtree(folder)
        return visits


def experiments(lab: Lab, *, quick: bool, random_kills: int, seed: int) -> Iterator[dict[str, Any]]:
    """All kills, one after another."""
    for name in POINTS:
        visits = lab.visits(name)
        # How many tiles one commit takes depends on their moments, so the last visits may not come again.
        at = {max(1, visits // 2)} if quick else {1, max(1, visits // 2), max(1, 3 * visits // 4)}
        for visit in sorted(at):
            yield lab.at_point(name, visit)
    for name in ON_RESUMING:
        yield lab.while_resuming(name)
    generator, killed = random.Random(seed), 0
    for i in range(3 * random_kills):  # a run that ends before its moment is looked at, but does not count
        if killed == random_kills:
            break
        outcome = lab.at_random(KINDS[i % len(KINDS)], generator.uniform(-0.2, 1.0))
        killed += outcome["killed"]
        yield outcome


class Made:
    """Rows that are made where they are read, so that only tiles in flight take memory."""

    def __init__(self, rows: int, width: int):
        """As many rows as that, each its own number."""
        self.shape, self.dtype = (rows, width), np.dtype(np.float32)

    def __len__(self) -> int:
        """How many rows there are."""
        return self.shape[0]

    def __getitem__(self, index: slice) -> np.ndarray:
        """Make some rows."""
        numbers = np.arange(index.start, index.stop, dtype=np.float32)[:, None]
        return np.broadcast_to(numbers, (len(numbers), self.shape[1])).copy()


def scale(root: Path, factor: float) -> Iterator[dict[str, Any]]:
    """Runs of very many and of very large tiles: what the process grew by, against what the tiles in flight take."""
    megabyte = 2**20
    for name, tiles, tile_bytes in (
        ("tiny tiles", round(10_000 * factor), 4),
        ("tiles of 200 MB", 8, round(200 * factor) * megabyte),
        ("tiles of 0 bytes", 12, 0),
    ):
        folder = root / name.replace(" ", "-")

        def work(
            name: str = name, tiles: int = tiles, tile_bytes: int = tile_bytes, folder: Path = folder
        ) -> dict[str, Any]:
            width = tile_bytes // 4 if tile_bytes <= 4 else tile_bytes // 4 // 64
            rows = tiles if tile_bytes <= 4 else 64 * tiles
            plan = BatchPlanner().plan([AxisSpec("row", rows, 8)])
            reset_peak_memory()
            before = peak_memory()
            start = time.perf_counter()
            report = run_tiled(
                lambda x: x + 1, Made(rows, width), plan=plan, tile_size=rows // tiles, prefetch=PREFETCH,
                sink=SinkSpec(folder), progress="off",
            )  # fmt: skip
            seconds = time.perf_counter() - start
            array = zarr.open_array(folder / "output", mode="r")
            ok = (
                report.tiles_done == tiles
                and verify_store(folder).ok
                and bool(np.all(np.asarray(array[rows - 1]) == rows))
            )
            # Of a tile its inputs and outputs, and of the one that is written its bytes as Zarr has them.
            allowed = (2 * (PREFETCH + 2) + 2) * tile_bytes + 150 * megabyte
            return {"point": name, "ok": ok, "tiles": tiles, "tile_bytes": tile_bytes, "seconds": round(seconds, 1),
                    "grown": report.peak_memory - before, "allowed": allowed}  # fmt: skip

        yield in_child(work)[1]
        shutil.rmtree(folder)


def good(outcome: dict[str, Any]) -> bool:
    """Whether nothing that was promised is broken."""
    named = outcome["killed"] or outcome["point"] == "a random moment"
    return bool(
        named
        and outcome["same"]
        and outcome["effects"]
        and not outcome["recomputed"]
        and outcome["lost"] <= PREFETCH + 2
    )


def table(outcomes: list[dict[str, Any]]) -> str:
    """A row for each point."""
    lines = [f"{'killed at':48} {'kills':>5} {'committed':>9} {'lost':>4} {'again':>5} {'effects':>7} {'digest':>6}"]
    for point in dict.fromkeys(outcome["point"] for outcome in outcomes):
        of = [outcome for outcome in outcomes if outcome["point"] == point]
        committed = sorted({outcome["committed"] for outcome in of})
        span = str(committed[0]) if len(committed) == 1 else f"{committed[0]}-{committed[-1]}"
        lines.append(
            f"{point:48} {sum(o['killed'] for o in of):5} {span:>9} {max(o['lost'] for o in of):4} "
            f"{sum(o['recomputed'] for o in of):5} {'exact' if all(o['effects'] for o in of) else 'WRONG':>7} "
            f"{'same' if all(o['same'] for o in of) else 'OTHER':>6}"
        )
    return "\n".join(lines)


def _fast_folder() -> str | None:
    """A folder in memory if there is a large one: a kill loses nothing that the kernel has."""
    shared = "/dev/shm"
    return shared if os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 4 * 2**30 else None


def main() -> int:
    """Kill, compare, print; 1 if anything is not as promised."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="each named point once, and five random moments")
    parser.add_argument("--random", type=int, metavar="N", help="how many random moments (50)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random moments")
    parser.add_argument("--scale", type=float, metavar="X", help="instead, runs of 10,000 and of 200 MB tiles, times X")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    arguments = parser.parse_args()
    kills = arguments.random if arguments.random is not None else 5 if arguments.quick else 50
    root = Path(tempfile.mkdtemp(dir=_fast_folder()))
    try:
        if arguments.scale is not None:
            outcomes = list(scale(root, arguments.scale))
            print(json.dumps(outcomes) if arguments.json else "\n".join(map(str, outcomes)))
            return int(not all(outcome["ok"] and outcome["grown"] <= outcome["allowed"] for outcome in outcomes))
        outcomes = list(experiments(Lab(root), quick=arguments.quick, random_kills=kills, seed=arguments.seed))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    failed = [outcome for outcome in outcomes if not good(outcome)]
    if arguments.json:
        print(json.dumps(outcomes))
    else:
        print(table(outcomes))
        print(f"{sum(o['killed'] for o in outcomes)} kills; {len(failed)} not as promised")
        for outcome in failed:
            print(f"  {outcome}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
