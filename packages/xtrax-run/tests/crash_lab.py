"""Kill a writing process at many points, then report what is on the disk. Run by `test_sink_crash.py`.

Every file operation of the writer (Python's audit events, and writes and flushes) is counted; a run is killed with
SIGKILL at a chosen count, so that the kills fall between and inside all steps of a drain.

Usage: python crash_lab.py FORMAT FOLDER POINTS    prints one JSON object
"""

import json
import os
import pathlib
import signal
import sys

import numpy as np

from xtrax.run._staged import sink as staged_sink
from xtrax.run.jsonl_sink import read_jsonl
from xtrax.run.sink import SinkSpec, make_sink

_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


def script():
    """What is staged, in order, each drained at once: key, arrays. Later ones add to and replace earlier ones."""
    for i in range(4):
        yield ("item", i), {"x": np.full((30, 40), float(i)), "n": np.arange(i + 1)}
        yield ("item", 0), {"x": np.full((20, 10 + i), 100.0 + i), f"extra{i}": np.full(3, i, np.int32)}
        yield ("other", "deep", i), {"y": np.full((300, 7), -float(i), np.float32)}


def expected(steps):
    """The content after some steps of the script."""
    content = {}
    for (key, arrays), _ in zip(script(), range(steps), strict=False):
        content.setdefault("/".join(map(str, key)), {}).update(arrays)
    return content


def read_back(fmt, folder):
    """`{path: {name: array}}` of what is on the disk, read by the format's own library."""
    content = {}
    if fmt == "jsonl":
        return {"/".join(map(str, r.key)): r.arrays for r in read_jsonl(folder)}
    if fmt == "h5":
        import h5py

        with h5py.File(pathlib.Path(folder, "results.h5"), "r") as file:

            def visit(path, node):
                if isinstance(node, h5py.Dataset):
                    key, _, name = path.rpartition("/")
                    content.setdefault(key, {})[name] = node[()]

            file.visititems(visit)
        return content
    import zarr

    def walk(group, path):
        for name, node in group.members():
            if isinstance(node, zarr.Array):
                content.setdefault("/".join(path), {})[name] = node[...]
            elif name != ".xtrax":
                walk(node, (*path, name))

    walk(zarr.open_group(folder, mode="r"), ())
    return content


def same(left, right):
    """Whether two contents are equal to the bit."""
    return left.keys() == right.keys() and all(
        left[key].keys() == right[key].keys()
        and all(a.dtype == (b := right[key][n]).dtype and np.array_equal(a, b) for n, a in left[key].items())
        for key in left
    )


def write(fmt, folder, report, kill_at):
    """Stage the script; report the count of finished drains; die at an operation. Returns the operations counted."""
    count = 0

    def tick(*_):
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event, arguments):
        if event in _EVENTS and str(folder) in str(arguments):
            tick()

    def counted(function):
        def call(*arguments):
            if count + 1 == kill_at and function.__name__ in ("write", "pwrite"):  # a torn write
                handle, data, *where = arguments
                function(handle, bytes(data)[: len(data) // 2], *where)
            tick()
            return function(*arguments)

        return call

    real_write = os.write
    sys.addaudithook(audit)
    for name in ("write", "pwrite", "fsync", "ftruncate"):
        setattr(os, name, counted(getattr(os, name)))
    sink = make_sink(SinkSpec(folder, format=fmt, run_id="lab"))
    for i, (key, arrays) in enumerate(script()):
        sink.stage(key, **arrays)
        real_write(report, bytes([i + 1]))
    sink.finalize()
    return count


def in_child(function, *arguments):
    """Run in a forked process; return what it reported, as bytes."""
    reader, report = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 1
        try:
            count = function(*arguments[:2], report, *arguments[2:])
            os.close(report)
            pathlib.Path(str(arguments[1]) + ".count").write_text(str(count))
            status = 0
        finally:
            os._exit(status)
    os.close(report)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    return data, status


def main(fmt, root, points):
    """Kill, reopen, compare; print the outcome of every kill."""
    staged_sink.collect_provenance = dict  # not what is tested here, and it would start jax before a fork
    total_steps = sum(1 for _ in script())
    data, status = in_child(write, fmt, root / "whole", None)
    assert (data[-1], status) == (total_steps, 0), (data, status)
    operations = int(pathlib.Path(f"{root / 'whole'}.count").read_text())
    runs = []
    for i in range(points):
        kill_at = 1 + i * (operations - 1) // (points - 1)
        data, status = in_child(write, fmt, root / str(kill_at), kill_at)
        runs.append((kill_at, data[-1] if data else 0, status))
    outcomes = []
    for kill_at, drained, status in runs:
        folder = root / str(kill_at)
        sink = make_sink(SinkSpec(folder, format=fmt, run_id="lab"))  # recovers; the dead writer's lock is no obstacle
        found = read_back(fmt, folder)
        states = {steps for steps in (drained, drained + 1) if same(found, expected(steps))}
        intact = bool(states)
        if not intact:
            # A key that is staged again may be between two states, each array in one of them.
            before, after = expected(drained), expected(drained + 1)
            intact = all(
                any(np.array_equal(array, found.get(key, {}).get(name)) for array in (arrays[name], after[key][name]))
                for key, arrays in before.items()
                for name in arrays
            )
        for key, arrays in script():
            sink.stage(key, **arrays)
        sink.finalize()
        outcomes.append(
            {
                "kill_at": kill_at,
                "killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
                "drained": drained,
                "whole_steps": sorted(states),
                "intact": intact,
                "complete_after_resume": same(read_back(fmt, folder), expected(total_steps)),
                "left": sorted(p.name for p in folder.iterdir()),
            }
        )
    print(json.dumps({"operations": operations, "steps": total_steps, "outcomes": outcomes}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]))
