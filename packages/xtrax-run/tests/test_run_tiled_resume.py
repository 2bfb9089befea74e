"""Runs that are resumed: what is skipped, what is computed again, and what is refused."""

import contextlib
import json
import logging
import os
import resource
import shutil
import subprocess
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from xtrax.run import (
    AppendedZarrSink,
    DamagedRunError,
    SinkError,
    SinkSpec,
    open_results,
    run_tiled,
    verify_store,
    zarr_content_digest,
)
from xtrax.stages import AxisBoundary, HostTap
from xtrax.tiling import AxisSpec, BatchPlanner, CarrySpec, DedupSpec, reducers

pytestmark = [
    pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning"),
    pytest.mark.filterwarnings("ignore::xtrax.tiling.errors.RemainderWarning"),
]
N = 10


class Stop(Exception):
    """The run is stopped."""


class Rows:
    """Rows that are read, until one is asked for that is too far."""

    def __init__(self, stop_at=None):
        self.values = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
        self.shape, self.dtype, self.stop_at, self.read = self.values.shape, self.values.dtype, stop_at, []

    def __len__(self):
        return N

    def __getitem__(self, index):
        if self.stop_at is not None and index.stop > self.stop_at:
            raise Stop
        self.read.append(index.start)
        return self.values[index]


def double(x):
    return {"y": 2 * x, "s": x.sum()}


def kinds():
    """Plans by name, each with its function and boundaries."""
    scan = CarrySpec("row", (0.0, np.int32(0)), lambda c, y: ((c[0] + y["s"], c[1] + 1), {"a": c[0], **y}))
    fuse = {"row": AxisBoundary(fuse={"y": reducers.mean, "s": reducers.logsumexp})}
    return {
        "map": ({}, {}),
        "scan": ({"carry_specs": [scan]}, {}),
        "fuse": ({}, fuse),
        "scan and fuse": (
            {"carry_specs": [CarrySpec("row", 0.0, lambda c, y: (c + y["s"], {"y": y["y"], "s": c}))]}, fuse
        ),
    }  # fmt: skip


def run(folder, rows, kind="map", fn=double, **options):
    planner, boundaries = kinds()[kind]
    plan = BatchPlanner(**planner).plan([AxisSpec("row", N, 2)])
    options = {"plan": plan, "boundaries": boundaries, "tile_size": 2, "sink": SinkSpec(folder), **options}
    return run_tiled(fn, rows, progress="off", **options)


def stopped(folder, kind="map", stop_at=5, **options):
    with pytest.raises(Stop):
        run(folder, Rows(stop_at), kind, **options)
    return folder


@pytest.mark.parametrize("kind", kinds())
def test_a_stopped_run_goes_on_to_the_same_bytes(kind, tmp_path):
    run(tmp_path / "whole", Rows(), kind)
    stopped(tmp_path / "out", kind)
    before = open_results(tmp_path / "out").state
    assert (before["finished"], before["committed"]) == (False, 2)
    rows = Rows()
    report = run(tmp_path / "out", rows, kind)
    assert (report.tiles_skipped, report.tiles_done) == (2, 3)
    assert rows.read == [0, 2, 4, 6, 8]  # the first and the last committed tile are compared, the others are new
    assert zarr_content_digest(tmp_path / "out") == zarr_content_digest(tmp_path / "whole")
    for file in (tmp_path / "whole").rglob("c.*"):  # and file by file
        assert file.read_bytes() == (tmp_path / "out" / file.relative_to(tmp_path / "whole")).read_bytes()
    assert verify_store(tmp_path / "out").ok
    rows = Rows()
    again = run(tmp_path / "out", rows, kind)
    assert rows.read == [0, 8]
    assert (again.tiles_skipped, again.tiles_done, again.compiles) == (5, 0, 0)


def test_rows_are_shown_as_they_are_committed(tmp_path):
    stopped(tmp_path)
    results = open_results(tmp_path)
    np.testing.assert_array_equal(results["y"][:], 2 * Rows().values[:4])
    assert zarr.open_group(tmp_path, mode="r")["s"].shape == (4,)


def test_the_size_of_tiles_is_kept(tmp_path):
    stopped(tmp_path)
    assert run(tmp_path, Rows(), tile_size=None).tiles == 5
    with pytest.raises(ValueError, match=r"tile_size is 5, but the run in .* has tiles of 2 rows"):
        run(tmp_path, Rows(), tile_size=5)


def test_run_ids(tmp_path):
    with pytest.raises(ValueError, match=r"resume is 'require', but .* holds no run"):
        run(tmp_path, Rows(), resume="require")
    stopped(tmp_path, sink=SinkSpec(tmp_path, run_id="mine"))
    with pytest.raises(ValueError, match=r"run_id is 'other', but .* holds the run 'mine'"):
        run(tmp_path, Rows(), run_id="other")
    with pytest.raises(ValueError, match=r"run_id is 'other', but .* holds the run 'mine'"):
        run(tmp_path, Rows(), sink=AppendedZarrSink(tmp_path, run_id="other"))
    with pytest.raises(FileExistsError, match="holds the run 'mine' with 2 committed tiles"):
        run(tmp_path, Rows(), resume="never")
    assert run(tmp_path, Rows(), resume="require").run_id == "mine"  # the id that is there
    assert run(tmp_path, Rows(), run_id="mine").tiles_skipped == 5
    fresh = run(tmp_path / "new", Rows(), resume="never")
    assert fresh.run_id.startswith("run-")
    with pytest.raises(FileExistsError):
        run(tmp_path / "new", Rows(), resume="never")


def test_a_run_that_committed_nothing_may_be_replaced(tmp_path):
    stopped(tmp_path, stop_at=1, run_id="mine")
    assert open_results(tmp_path).state["committed"] == 0
    report = run(tmp_path, Rows(), fn=lambda x: {"z": x}, tile_size=3, resume="never")
    assert (report.run_id, report.tiles) == ("mine", 4)
    assert list(open_results(tmp_path).arrays) == ["z"]
    assert not (tmp_path / "y").exists()


SCALE = np.float32(2)


def scaled(factor):
    array = jnp.full(3, factor)
    return lambda x: {"y": array * x, "s": x.sum()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": lambda x: {"y": 3 * x, "s": x.sum()}}, "What differs: the program of a tile"),
        ({"fn": scaled(4)}, "What differs: the values of arrays that fn holds"),
        ({"rows": np.zeros((N, 3), np.int32)}, r"inputs\[0\]: it was float32\[10, 3\], and is int32\[10, 3\]"),
        (
            {"boundaries": {"row": AxisBoundary(tap=HostTap(print))}},
            r"host functions: .* \['row.tap: HostTap\(builtins.print",
        ),
        ({"key": True}, "What differs: the program of a tile"),
    ],
    ids=range(5),
)
def test_a_run_of_something_else_is_refused(options, message, tmp_path):
    options = dict(options)
    if options.pop("key", None):
        options |= {"key": jax.random.key(0), "fn": lambda x, key: {"y": x + jax.random.normal(key), "s": x.sum()}}
    stopped(tmp_path, fn=scaled(2))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file.name != "lock"}
    with pytest.raises(ValueError, match=message):
        run(tmp_path, options.pop("rows", Rows()), **{"fn": scaled(2), **options})
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    run(tmp_path, Rows(), fn=scaled(2))


def test_another_number_of_rows_is_refused(tmp_path):
    stopped(tmp_path)
    plan = BatchPlanner().plan([AxisSpec("row", 12, 2)])
    with pytest.raises(ValueError, match="holds a run over 10 elements of axis 'row', and this one is over 12"):
        run(tmp_path, np.zeros((12, 3), np.float32), plan=plan)


@pytest.mark.parametrize("kind", ["object", "numpy", "jax", "zarr", "tree"])
@pytest.mark.parametrize(("row", "tile"), [(1, 0), (5, 2)])
def test_other_inputs_are_noticed_at_the_ends_of_what_is_committed(kind, row, tile, tmp_path):
    def same(rows):
        values = {"a": rows.values, "b": rows} if kind == "tree" else rows.values
        ways = {"jax": jnp.asarray, "zarr": zarr.array, "object": lambda _: rows}
        return ways.get(kind, lambda values: values)(values)

    fn = (lambda x: double(x["b"])) if kind == "tree" else double
    folder = tmp_path / "out"
    stop = {"row": AxisBoundary(tap=HostTap(stop_at_row_6))}
    with pytest.raises(Stop):
        run(folder, same(Rows()), fn=fn, boundaries=stop)
    other = Rows()
    other.values[row, 1] += 1
    with pytest.raises(ValueError, match=rf"the inputs of tile {tile} \(rows {2 * tile} to {2 * tile + 1}\) are not"):
        run(folder, same(other), fn=fn, boundaries=stop)
    with pytest.raises(Stop):  # the same inputs are taken
        run(folder, same(Rows()), fn=fn, boundaries=stop)


def stop_at_row_6(_, numbers):
    if numbers[0] >= 6:
        raise Stop


def test_all_inputs_are_read_again_when_asked_to(tmp_path):
    stopped(tmp_path, stop_at=6)
    other = Rows()
    other.values[3, 1] += 1
    with pytest.raises(ValueError, match=r"the inputs of tile 1 \(rows 2 to 3\) are not those"):
        run(tmp_path, other, verify_inputs=True)
    rows = Rows()
    assert run(tmp_path, rows, verify_inputs=True).tiles_done == 2
    assert rows.read == [0, 2, 4, 6, 8]


def largest(factor=1.0, offset=0.0):
    shift = jnp.full(3, offset)
    return reducers.Reducer(
        init=lambda element: jnp.full(element.shape, -jnp.inf),
        update=lambda state, values, _: jnp.maximum(state, values.max(axis=0)),
        merge=lambda a, b: jnp.maximum(a, factor * b),
        finalize=lambda state: state + shift,
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (("scan", 0.0), ("scan", 1.0), "the first carry"),
        (("dedup", [0, 0, 1, 2, 3, 3, 4, 4, 5, 5]), ("dedup", [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]), "the index_map"),
        (("reduce", largest()), ("reduce", largest(factor=2.0)), "merge or finalize of the Reducer"),
        (("reduce", largest()), ("reduce", largest(offset=1.0)), "merge or finalize of the Reducer"),
    ],
    ids=["carry", "index_map", "merge", "finalize"],
)
def test_what_is_not_in_the_program_of_a_tile_is_compared_too(before, after, message, tmp_path):
    def go(case, rows):
        kind, value = case
        planner, boundaries = {}, {}
        if kind == "scan":
            planner["carry_specs"] = [CarrySpec("row", value, lambda c, y: (c + y.sum(), y))]
        elif kind == "dedup":
            first = np.unique(value, return_index=True)[1]
            planner["dedup_specs"] = [DedupSpec("row", first, np.array(value), len(first))]
        else:
            boundaries["row"] = AxisBoundary(fuse=value)
        plan = BatchPlanner(**planner).plan([AxisSpec("row", N, 2)])
        return run(tmp_path, rows, fn=lambda x: 2 * x, plan=plan, boundaries=boundaries)

    with pytest.raises(Stop):
        go(before, Rows(6))
    with pytest.raises(ValueError, match=f"What differs: {message}"):
        go(after, Rows())
    assert go(before, Rows()).tiles_done == 2


def edit_header(folder, change):
    """Pretend that the run was begun by something else, checksum and all."""
    from xtrax.run._appended.commit_log import sealed

    path = folder / ".xtrax" / "run.json"
    header = json.loads(path.read_bytes())
    del header["check"]
    change(header)
    path.write_text(json.dumps(sealed(header)))


def test_settings_that_change_numbers_are_refused_by_name(tmp_path):
    """As part of the program; those that do not change this one are no matter."""

    def fn(x):
        return {"y": jnp.outer(x, x) @ x}

    stopped(tmp_path, fn=fn)
    with jax.default_matmul_precision("highest"), pytest.raises(ValueError, match="the program of a tile") as caught:
        run(tmp_path, Rows(), fn=fn)
    assert "(jax_default_matmul_precision was None, and is highest)" in str(caught.value)
    with jax.default_prng_impl("rbg"):
        assert run(tmp_path, Rows(), fn=fn).tiles_done == 3


def test_what_compiles_and_runs_the_program_is_told_if_it_differs(tmp_path, monkeypatch):
    stopped(tmp_path)
    edit_header(tmp_path, lambda header: header["computes"].update(jaxlib="0.1", device="abacus"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    with pytest.warns(UserWarning, match="and goes on with") as caught:
        assert run(tmp_path, Rows()).tiles_done == 3
    told = "\n".join(str(warning.message) for warning in caught)
    for what in ("jaxlib 0.1", "the device abacus"):
        assert f"begun with {what}, and goes on with" in told
    assert "goes on with --xla_dump_to=here: the program is the same, but the last bits" in told


def test_another_jax_warns_and_refuses_only_another_program(tmp_path):
    stopped(tmp_path)
    edit_header(tmp_path, lambda header: header["computes"].update(jax="0.1"))
    with pytest.warns(UserWarning, match=r"begun with jax 0\.1, and goes on with"):
        assert run(tmp_path, Rows()).tiles_done == 3
    edit_header(tmp_path, lambda header: header["computes"].update(program_sha256="0" * 64))
    with pytest.raises(ValueError, match=r"the program of a tile.*\(jax was 0\.1, and is"):
        run(tmp_path, Rows())


def files_of(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def damage(folder, what):
    """Harm tile 1 of a run; return what a report must name."""
    shard = folder / "y" / "c.1.0"
    log = folder / ".xtrax" / "commits.jsonl"
    if what == "flipped bit":
        data = bytearray(shard.read_bytes())
        data[5] ^= 16
        shard.write_bytes(data)
        return "c.1.0 holds other bits"
    if what == "truncated":
        os.truncate(shard, 10)
        return "c.1.0 has 10 bytes and not"
    if what == "deleted":
        shard.unlink()
        return "c.1.0 is missing"
    if what == "edited log":
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join([lines[0], lines[1].replace('"tile":1', '"tile":7'), *lines[2:]]))
        return "line 2 does not fit its checksum"
    if what == "state":
        (folder / ".xtrax" / "state" / "1.bin").write_bytes(b"0123456789")
        return "1.bin has 10 bytes"
    raise AssertionError(what)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("what", "kind"),
    [("flipped bit", "map"), ("truncated", "map"), ("deleted", "map"), ("edited log", "map"), ("state", "fuse"),
     ("state", "scan and fuse")],
)  # fmt: skip
def test_a_damaged_tile_is_named_and_computed_again(what, kind, finished, tmp_path, caplog):
    run(tmp_path / "whole", Rows(), kind)
    if finished:
        run(tmp_path / "out", Rows(), kind)
    else:
        stopped(tmp_path / "out", kind, stop_at=7)
    named = damage(tmp_path / "out", what)
    report = verify_store(tmp_path / "out")
    assert not report.ok
    assert named in str(report)
    rows = Rows()
    with caplog.at_level(logging.WARNING, "xtrax.run"):
        again = run(tmp_path / "out", rows, kind)
    known = [] if what == "edited log" else [2]  # what the log still says of the inputs of the damaged tile
    expected = [0, 8 if finished else 4, *known]
    compared, computed = rows.read[: len(expected)], rows.read[len(expected) :]
    assert compared == expected
    assert computed == ([2] if finished else [2, 6, 8])  # exactly that tile, and what was not done
    assert again.tiles_done == len(computed)
    assert named in caplog.text
    assert verify_store(tmp_path / "out").ok
    assert zarr_content_digest(tmp_path / "out") == zarr_content_digest(tmp_path / "whole")


def test_a_damaged_tile_is_not_replaced_by_what_other_inputs_give(tmp_path):
    run(tmp_path / "out", Rows())
    (tmp_path / "out" / "y" / "c.2.0").unlink()
    other = Rows()
    other.values[5] += 1
    with pytest.raises(ValueError, match=r"the inputs of tile 2 \(rows 4 to 5\) are not those"):
        run(tmp_path / "out", other)
    assert run(tmp_path / "out", Rows()).tiles_done == 1
    np.testing.assert_array_equal(open_results(tmp_path / "out")["y"][:], 2 * Rows().values)


def test_a_damaged_tile_that_comes_out_differently_is_told(tmp_path, caplog):
    factor = [2]

    def fn(x):
        return jax.pure_callback(lambda x: factor[0] * np.asarray(x), x, x, vmap_method="broadcast_all")

    run(tmp_path / "out", Rows(), fn=fn)
    for expected in (False, True):
        (tmp_path / "out" / "output" / "c.2.0").unlink()
        caplog.clear()
        assert run(tmp_path / "out", Rows(), fn=fn).tiles_done == 1
        told = [
            r.getMessage() for r in caplog.records if "differs from what was committed first: output" in r.getMessage()
        ]
        assert bool(told) == expected
        factor[0] = 3


def test_a_scan_cannot_compute_a_damaged_tile_again(tmp_path):
    run(tmp_path, Rows(), "scan")
    damage(tmp_path, "flipped bit")
    with pytest.raises(DamagedRunError, match="tile 1 is damaged, and the carry before it is not kept"):
        run(tmp_path, Rows(), "scan")
    assert "tile 1:" in str(verify_store(tmp_path))  # nothing was thrown away


def test_edited_records_of_the_run(tmp_path):
    run(tmp_path, Rows())
    manifest = tmp_path / ".xtrax" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"rows": 10', '"rows": 11'))
    assert "manifest.json does not fit its own checksum" in str(verify_store(tmp_path))
    assert run(tmp_path, Rows()).tiles_done == 0  # it is written anew from what is committed
    assert verify_store(tmp_path).ok
    metadata = tmp_path / "s" / "zarr.json"
    metadata.write_text(metadata.read_text().replace("10", "8"))
    assert "zarr.json was changed: chunk_grid, shape" in str(verify_store(tmp_path)) or "was changed: shape" in str(
        verify_store(tmp_path)
    )
    run(tmp_path, Rows())
    assert verify_store(tmp_path).ok
    header = tmp_path / ".xtrax" / "run.json"
    header.write_text(header.read_text().replace('"rows": 10', '"rows": 11'))
    for look in (verify_store, open_results, lambda folder: run(folder, Rows())):
        with pytest.raises(DamagedRunError, match=r"run\.json does not fit its own checksum"):
            look(tmp_path)


def in_groups(x):
    return {"aux": {"y": 2 * x, "deep": {"s": x.sum()}}}


GROUPS = {"rows": ["aux", "aux/deep", ".xtrax"], "carries": ["carries"], "finals": ["aux", "aux/deep"]}


@pytest.mark.parametrize("how", ["gone", "changed"])
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_are_mended(kind, how, tmp_path):
    options = {"fn": in_groups}
    if kind == "carries":
        scan = CarrySpec("row", 0.0, lambda c, x: (c + x.sum(), {"y": x}))
        options = {"fn": lambda x: x, "plan": BatchPlanner(carry_specs=[scan]).plan([AxisSpec("row", N, 2)])}
    elif kind == "finals":
        options["boundaries"] = {"row": AxisBoundary(fuse={"aux": {"y": reducers.mean, "deep": {"s": reducers.var}}})}
    run(tmp_path, Rows(), **options)
    before = files_of(tmp_path)
    for group in GROUPS[kind]:
        path = tmp_path / group / "zarr.json"
        path.unlink()
        if how == "changed":
            path.write_text('{"zarr_format": 2, "node_type": "group", "attributes": {}}')
    named = {problem.path.parent for problem in verify_store(tmp_path).problems}
    assert named == {tmp_path / group for group in GROUPS[kind]}
    assert run(tmp_path, Rows(), **options).tiles_done == 0
    assert verify_store(tmp_path).ok
    assert files_of(tmp_path) == before


def test_a_torn_line_is_no_commit(tmp_path):
    stopped(tmp_path, stop_at=7)
    log = tmp_path / ".xtrax" / "commits.jsonl"
    os.truncate(log, log.stat().st_size - 1)  # all of it but the newline
    assert verify_store(tmp_path).committed == 2
    rows = Rows()
    run(tmp_path, rows)
    assert rows.read == [0, 2, 4, 6, 8]  # two to compare, three to compute
    assert verify_store(tmp_path).ok


def test_partial_files_of_a_dead_writer_are_removed(tmp_path):
    stopped(tmp_path)
    (tmp_path / "y" / "c.2.0.0a1b2c3d.partial").write_bytes(b"half")
    (tmp_path / "y" / "c.4.0").write_bytes(b"never committed")
    run(tmp_path, Rows())
    assert not list(tmp_path.rglob("*.partial"))
    assert verify_store(tmp_path).ok


def test_effects_of_committed_tiles_never_fire_again(tmp_path):
    fired = []
    boundaries = {"row": AxisBoundary(tap=HostTap(_Record(fired), ordered=True))}
    stopped(tmp_path, boundaries=boundaries)
    committed = 2 * open_results(tmp_path).state["committed"]
    first = list(fired)
    fired.clear()
    run(tmp_path, Rows(), boundaries={"row": AxisBoundary(tap=HostTap(_Record(fired), ordered=True))})
    assert first[:committed] == list(range(committed))
    assert fired == list(range(committed, N))
    fired.clear()
    run(tmp_path, Rows(), boundaries={"row": AxisBoundary(tap=HostTap(_Record(fired), ordered=True))})
    assert fired == []


class _Record:
    def __init__(self, rows):
        self.rows = rows

    def __call__(self, values, index):
        self.rows.extend(index[:, 0].tolist())


def test_a_second_writer_is_refused(tmp_path):
    seen = []

    def intrude(values, index):
        with pytest.raises(SinkError, match="written by another live sink"):
            run(tmp_path, Rows())
        seen.append(index)

    rows = Rows()
    rows_of = rows.__getitem__

    class Intruding(Rows):
        def __getitem__(self, index):
            if index.start == 4:
                intrude(None, index)
            return rows_of(index)

    run(tmp_path, Intruding())
    assert len(seen) == 1
    assert verify_store(tmp_path).ok


def test_a_folder_that_vanishes(tmp_path):
    class Removing(Rows):
        def __getitem__(self, index):
            if index.start == 6:
                os.rename(tmp_path / "out", tmp_path / "gone")
            return super().__getitem__(index)

    with pytest.raises(SinkError, match=r"(removed or replaced|No such file).*tiles are committed") as caught:
        run(tmp_path / "out", Removing(), prefetch=0)
    assert caught.value.path == tmp_path / "out"
    assert not (tmp_path / "out").exists()
    os.rename(tmp_path / "gone", tmp_path / "out")
    run(tmp_path / "out", Rows())  # what was committed is there
    assert verify_store(tmp_path / "out").ok


@contextlib.contextmanager
def largest_file(size):
    """Writes beyond `size` bytes of a file fail, as on a full disk (errno EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wide(x):
    return {"y": jnp.tile(x, 400 * (x.shape[0] // 3)), "s": x.sum()}


def test_a_file_that_cannot_grow(tmp_path):
    with largest_file(8000), pytest.raises(SinkError, match=r"large.*0 of 5 tiles are committed and safe"):
        run(tmp_path / "out", Rows(), fn=wide)
    report = run(tmp_path / "out", Rows(), fn=wide)  # the cause is gone
    assert (report.tiles_skipped, report.tiles_done) == (0, 5)
    run(tmp_path / "whole", Rows(), fn=wide)
    assert zarr_content_digest(tmp_path / "out") == zarr_content_digest(tmp_path / "whole")


def test_a_full_disk(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True
    )
    if not mount or mount.returncode:
        pytest.skip("mounting needs root")
    try:
        (small / "ballast").write_bytes(bytes(170_000))
        # Some 90 kB are left: what a run keeps of itself, and a few tiles of 12 kB.
        with pytest.raises(
            SinkError, match=r"No space left.*of 5 tiles are committed and safe; remove the cause"
        ) as caught:
            run(small / "out", Rows(), fn=wide, prefetch=0)
        committed = len(caught.value.saved)
        assert 0 < committed < 5
        assert verify_store(small / "out").ok
        (small / "ballast").unlink()
        report = run(small / "out", Rows(), fn=wide, prefetch=0)
        assert (report.tiles_skipped, report.tiles_done) == (committed, 5 - committed)
        assert verify_store(small / "out").ok
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.fixture
def read_only(tmp_path, as_nobody):
    """Runs something as a user who may read everything below a folder, and write nothing."""

    def call(work):
        modes = {path: path.stat().st_mode for path in [tmp_path, *tmp_path.rglob("*")]}
        for path in modes:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        try:
            with as_nobody():
                return work()
        finally:
            for path, mode in modes.items():
                os.chmod(path, mode)

    return call


@pytest.mark.parametrize(
    ("exists", "safe"), [(True, "2 of 5 tiles are committed and safe"), (False, "Nothing is committed there")]
)
def test_a_read_only_folder(exists, safe, tmp_path, read_only):
    folder = tmp_path / "out"
    if exists:
        stopped(folder)
    with pytest.raises(SinkError, match=f"Permission denied.*{safe}; remove the cause") as caught:
        read_only(lambda: run(folder, Rows()))
    assert caught.value.saved == (((0,), (1,)) if exists else ())
    assert run(folder, Rows()).tiles_skipped == (2 if exists else 0)


@pytest.mark.parametrize("kind", kinds())
def test_a_finished_run_on_a_read_only_disk_needs_nothing(kind, tmp_path, read_only):
    folder = tmp_path / "out"
    run(folder, Rows(), kind)
    before = files_of(folder)
    report = read_only(lambda: run(folder, Rows(), kind))
    assert (report.tiles_skipped, report.tiles_done, report.output_dir) == (5, 0, folder)
    with pytest.raises(ValueError, match="What differs: the program of a tile"):
        read_only(lambda: run(folder, Rows(), kind, fn=lambda x: {"y": 3 * x, "s": x.sum()}))
    assert files_of(folder) == before


def test_a_damaged_run_on_a_read_only_disk_is_not_taken_for_whole(tmp_path, read_only):
    folder = tmp_path / "out"
    run(folder, Rows())
    damage(folder, "deleted")
    with pytest.raises(SinkError, match=r"Permission denied.*4 of 5 tiles are committed and safe, and 1 ") as caught:
        read_only(lambda: run(folder, Rows()))
    assert "tile 1: " in caught.value.__notes__[0]
    assert run(folder, Rows()).tiles_done == 1


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(SinkError, match=r"It is a file, not a folder: '.*/file'\. Nothing is committed there"):
            run(folder, Rows())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_resumed_run_from_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    stopped("out", sink=SinkSpec("out"))
    os.rename("out", "elsewhere/moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("moved", Rows()).tiles_done == 3
    assert verify_store("moved").ok


def test_no_warning_is_given_for_nothing(tmp_path):
    stopped(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(tmp_path, Rows())


def other_fn(x):
    return {"y": 3 * x, "s": x.sum()}


LOST = {
    "run.json": [".xtrax/run.json"],
    "run.json and the log": [".xtrax/run.json", ".xtrax/commits.jsonl"],
    "run.json and the root": [".xtrax/run.json", "zarr.json"],
    "the log": [".xtrax/commits.jsonl"],
    "all of .xtrax": [".xtrax"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs to be copied, by kind and whether they are finished: making one takes long."""
    root = tmp_path_factory.mktemp("runs")
    for kind in ("map", "fuse"):
        run(root / kind / "finished", Rows(), kind)
        stopped(root / kind / "stopped", kind)
    return root


@pytest.mark.parametrize("which", ["map/finished", "map/stopped", "fuse/finished", "fuse/stopped"])
@pytest.mark.parametrize("lost", LOST)
def test_results_whose_run_is_lost_are_never_written_over(lost, which, runs, tmp_path):
    folder = shutil.copytree(runs / which, tmp_path / "out")
    if (lost, which) == ("all of .xtrax", "fuse/stopped"):
        return  # it holds all that is committed: nothing is left to be lost
    for name in LOST[lost]:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    before = files_of(folder)
    missing = "commits.jsonl" if lost == "the log" else "run.json"
    for fn, resume in ((double, "auto"), (other_fn, "auto"), (double, "never"), (double, "require")):
        with pytest.raises(
            DamagedRunError, match=rf"{missing} is missing, but .* are there.*Restore it.*move the fold"
        ):
            run(folder, Rows(), which.partition("/")[0], fn, resume=resume)
    assert files_of(folder) == before


def test_a_run_with_damaged_commits_alone_is_not_replaced(tmp_path):
    stopped(tmp_path, stop_at=3)
    damage_all = tmp_path / ".xtrax" / "commits.jsonl"
    damage_all.write_text(damage_all.read_text().replace('"tile":0', '"tile":1'))
    with pytest.raises(ValueError, match="What differs: the program of a tile"):
        run(tmp_path, Rows(), fn=other_fn)
    with pytest.raises(FileExistsError, match="resume is 'never'"):
        run(tmp_path, Rows(), resume="never")
    assert run(tmp_path, Rows()).tiles_done == 5
    assert verify_store(tmp_path).ok


def test_a_run_whose_making_was_killed_may_be_made_again(tmp_path, monkeypatch):
    """Also one that replaces a run with shards, but without a commit."""
    from xtrax.run._appended import store as append_store

    stopped(tmp_path, stop_at=1)
    (tmp_path / "y" / "c.0.0").write_bytes(b"written, but never committed")
    (tmp_path / ".xtrax" / "state" / "0.bin").write_bytes(b"nor this")
    for step, visit in [("remove_array", 1), ("remove_array", 2), *(("put_json", i) for i in range(2, 6))]:
        step_of, visits = getattr(append_store, step), iter(range(visit))

        def dying(*arguments, step_of=step_of, visits=visits):
            if next(visits, None) is None:
                raise Stop
            step_of(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(append_store, step, dying)
            with pytest.raises(Stop):
                run(tmp_path, Rows(1), fn=other_fn)
    assert run(tmp_path, Rows()).tiles_done == 5
    assert verify_store(tmp_path).ok
