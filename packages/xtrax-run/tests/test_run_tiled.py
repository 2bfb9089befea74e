"""Runs in tiles against numpy, `jax.vmap` and loops: values, names, effects, memory, and what is refused."""

import re
import threading
import time
import warnings
from pathlib import Path

import equinox as eqx
import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from xtrax.run import AppendedZarrSink, JsonlStagingSink, SinkError, SinkSpec, open_results, run_tiled, verify_store
from xtrax.run._tiled.tiles import choose_tile_rows
from xtrax.stages import AxisBoundary, HostSink, HostTap, io_callback
from xtrax.tiling import (
    AxisDecision,
    AxisSpec,
    BatchPlan,
    BatchPlanner,
    CarrySpec,
    execute_plan,
    find_duplicates,
    reducers,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning"),
    pytest.mark.filterwarnings("ignore::xtrax.tiling.errors.RemainderWarning"),
]
N = 11


def data(n=N, width=3):
    return np.random.default_rng(n).normal(size=(n, width)).astype(np.float32)


def spec(n=N, batch=4, name="row"):
    return AxisSpec(name, n, batch)


def run(fn, *inputs, **options):
    if "plan" not in options:
        options.setdefault("specs", [spec()])
    return run_tiled(fn, *inputs, **{"progress": "off", **options})


def norm(x):
    return {"norm": jnp.sqrt(jnp.sum(x * x)), "aux": {"twice": 2 * x}}


def expected_norm(x):
    return {"norm": np.linalg.norm(x, axis=1), "aux": {"twice": 2 * x}}


def check(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-6)


@pytest.mark.parametrize("batch", [4, 100], ids=["SafeMap", "Vmap"])
@pytest.mark.parametrize("tile_size", [1, 4, 100, None])
def test_values_do_not_depend_on_tiles(tile_size, batch):
    x = data()
    report = run(norm, x, specs=[spec(batch=batch)], tile_size=tile_size)
    check(report.outputs, expected_norm(x))
    assert report.tiles == -(-N // (tile_size or N))
    assert (report.tiles_done, report.tiles_skipped) == (report.tiles, 0)
    # One program for whole tiles, and one for a shorter last one.
    assert report.compiles == (2 if tile_size == 4 else 1)


def test_the_store_has_an_array_for_each_output(tmp_path):
    x = data()
    report = run(norm, x, tile_size=4, sink=SinkSpec(tmp_path / "out", run_id="mine"))
    assert report.outputs is None
    assert (report.run_id, report.output_dir) == ("mine", tmp_path / "out")
    group = zarr.open_group(tmp_path / "out", mode="r")
    check({"norm": group["norm"][:], "aux": {"twice": group["aux/twice"][:]}}, expected_norm(x))
    assert group["aux/twice"].metadata.dimension_names == ("row", None)
    assert group["norm"].shards == (4,)
    assert group.attrs["run_id"] == "mine"
    assert group.attrs["versions"]["jax"] == jax.__version__
    assert verify_store(tmp_path / "out").ok
    sizes = sum(file.stat().st_size for file in tmp_path.rglob("c.*"))
    assert x.nbytes * 4 / 3 == report.bytes_written < sizes


@pytest.mark.parametrize("compression", ["zstd", "lz4", "gzip"])
def test_compression_is_asked_for(compression, tmp_path):
    zeros = np.zeros((64, 512), np.float32)
    run(None, zeros, specs=[spec(64)], tile_size=32, sink=AppendedZarrSink(tmp_path, compression=compression))
    assert sum(file.stat().st_size for file in tmp_path.rglob("c.*")) < zeros.nbytes / 20
    np.testing.assert_array_equal(open_results(tmp_path)["output"][:], zeros)
    assert verify_store(tmp_path).ok


def nested():
    """rows (chunks) x samples (all at once) x time (in order)."""
    decay = CarrySpec("time", np.float32(1), lambda carry, y: (carry / 2 + y, carry + y))
    specs = [AxisSpec("row", N, 4), AxisSpec("sample", 2, 2), AxisSpec("time", 3, 3)]
    return BatchPlanner(carry_specs=[decay]).plan(specs)


def nested_loop(x, gain, noise):
    outputs, carries = np.zeros((N, 2, 3), np.float32), np.zeros((N, 2), np.float32)
    for row in range(N):
        for sample in range(2):
            carry = np.float32(1)
            for step in range(3):
                y = x[row, step] * gain[sample] + noise[row, sample, step]
                outputs[row, sample, step] = carry + y
                carry = carry / 2 + y
            carries[row, sample] = carry
    return outputs, carries


@pytest.mark.parametrize("sink", [False, True])
def test_a_nest_of_axes_with_keys(sink, tmp_path):
    x, gain, key = data(), np.array([1.0, -3.0], np.float32), jax.random.key(3)
    folded = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))(jnp.arange(N * 2 * 3))
    outputs, carries = nested_loop(x, gain, np.asarray(folded).reshape(N, 2, 3))

    def fn(x, gain, *, key):
        return x * gain + jax.random.normal(key)

    options = {"plan": nested(), "axes": [("row", "time"), ("sample",)], "tile_size": 3, "key": key}
    report = run(fn, x, gain, **options, sink=SinkSpec(tmp_path) if sink else None)
    if sink:
        results = open_results(tmp_path)
        assert results["output"].metadata.dimension_names == ("row", "sample", "time")
        found = results["output"][:], {"time": results["carries/time"][:]}
    else:
        found = report.outputs
    np.testing.assert_allclose(found[0], outputs, rtol=1e-5)
    np.testing.assert_allclose(found[1]["time"], carries, rtol=1e-5)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("collect", [False, True])
def test_an_outermost_scan_hands_its_carry_from_tile_to_tile(collect, sink, tmp_path):
    x = data()
    total = CarrySpec("row", {"sum": 0.0, "n": 0}, lambda carry, y: ({"sum": carry["sum"] + y, "n": carry["n"] + 1}, y),
                      collect_outputs=collect)  # fmt: skip
    plan = BatchPlanner(carry_specs=[total]).plan([spec()])
    report = run(lambda x: x[0], x, plan=plan, tile_size=4, sink=SinkSpec(tmp_path) if sink else None)
    if sink:
        results = open_results(tmp_path)
        outputs = results["output"][:] if collect else results.arrays.get("output")
        carry = {name: results[f"carries/row/{name}"][()] for name in ("sum", "n")}
    else:
        outputs, carries = report.outputs
        carry = carries["row"]
    assert carry["n"] == N
    np.testing.assert_allclose(carry["sum"], x[:, 0].sum(), rtol=1e-5)
    if collect:
        np.testing.assert_array_equal(outputs, x[:, 0])
    else:
        assert outputs is None


def test_an_outermost_scan_may_be_reduced():
    x = data()
    running = CarrySpec("row", jnp.float32(0), lambda carry, y: (carry + y, carry + y))
    plan = BatchPlanner(carry_specs=[running]).plan([spec()])
    boundaries = {"row": AxisBoundary(fuse=reducers.topk(2))}
    (values, indices), carries = run(lambda x: x[0], x, plan=plan, tile_size=4, boundaries=boundaries).outputs
    sums = np.cumsum(x[:, 0])
    assert indices.tolist() == np.argsort(-sums, kind="stable")[:2].tolist()
    np.testing.assert_allclose(values, np.sort(sums)[::-1][:2], rtol=1e-6)
    np.testing.assert_allclose(carries["row"], sums[-1], rtol=1e-6)


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_an_outermost_dedup_computes_distinct_rows_and_fires_for_all(batch):
    x = data(5)[[0, 1, 0, 2, 2, 2, 3, 4, 4, 0, 1]]
    seen, copies = [], find_duplicates(x, "row").to_dedup_gather(batch)
    plan = BatchPlan((AxisDecision(spec(), copies.at_once, "given", copies),))
    at_once: list[int] = []
    total = jax.custom_batching.custom_vmap(lambda x: jnp.sum(x))

    @total.def_vmap
    def _(axis_size, in_batched, x):
        at_once.append(axis_size)
        return jnp.sum(x, axis=1), in_batched[0]

    tap = HostTap(lambda values, index: seen.append((values, index)), ordered=True)
    report = run(total, x, plan=plan, tile_size=4, boundaries={"row": AxisBoundary(tap=tap)})
    np.testing.assert_allclose(report.outputs, x.sum(axis=1), rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([index[:, 0] for _, index in seen]), np.arange(N))
    np.testing.assert_array_equal(np.concatenate([values for values, _ in seen]), report.outputs)
    assert report.compiles == 2
    assert max(at_once) == {1: 1, 2: 2, 3: 2, 100: 4}[batch]  # of the 4 that each tile computes


def test_an_outermost_reducer_merges_tiles_in_order(tmp_path):
    x = data() + np.float32(1e4)
    boundaries = {"row": AxisBoundary(fuse={"a": reducers.mean, "b": reducers.argmax})}
    options = {"boundaries": boundaries, "tile_size": 4}
    found = run(lambda x: {"a": x, "b": x[0]}, x, **options).outputs
    np.testing.assert_allclose(found["a"], x.astype(np.float64).mean(0), rtol=1e-7)
    assert found["b"] == np.argmax(x[:, 0])
    run(lambda x: {"a": x, "b": x[0]}, x, **options, sink=SinkSpec(tmp_path))
    results = open_results(tmp_path)
    np.testing.assert_array_equal(results["a"][:], found["a"])
    assert results["b"][()] == found["b"]


def test_a_sink_without_a_fuse_only_commits(tmp_path):
    x, rows = data(), []
    sink = HostSink(lambda values, index: rows.extend(zip(index[:, 0].tolist(), values.tolist(), strict=True)))
    report = run(lambda x: x[1], x, boundaries=[AxisBoundary(sink=sink)], tile_size=3, sink=SinkSpec(tmp_path))
    assert sorted(rows) == list(enumerate(x[:, 1].tolist()))
    assert open_results(tmp_path).arrays == {}
    assert open_results(tmp_path).state["committed"] == report.tiles == 4


def test_effects_of_a_nest_are_those_of_python_loops():
    x, calls = data()[:, :2], []
    specs = [AxisSpec("row", N, 4), AxisSpec("col", 2, 2)]
    tap = HostTap(lambda value, index: calls.append((*index, float(value))), ordered=True, batched=False)
    run(lambda x: x, x, specs=specs, axes=[("row", "col")], boundaries={"col": AxisBoundary(tap=tap)}, tile_size=3)
    assert calls == [(i, j, float(x[i, j])) for i in range(N) for j in range(2)]


class Columns:
    """A table that is read by slices of rows, and remembers them."""

    def __init__(self, values, pause=0.0):
        self.values, self.slices, self.pause = values, [], pause

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        assert isinstance(index, slice)
        time.sleep(self.pause)
        self.slices.append((index.start, index.stop))
        return self.values[index].tolist()


@pytest.mark.parametrize("kind", ["numpy", "jax", "zarr", "zarr inner", "object", "tree", "keys"])
def test_inputs_of_every_kind(kind, tmp_path):
    x = data()
    axes = None
    if kind == "zarr":
        value = zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(2, 3))
    elif kind == "zarr inner":  # the outermost axis need not come first
        value, axes = zarr.create_array(tmp_path / "x.zarr", data=x.T, chunks=(2, 2)), [("col", "row")]
    else:
        value = {
            "numpy": x, "jax": jnp.asarray(x), "object": Columns(x.astype(np.float64)), "tree": {"a": x, "b": [x]},
            "keys": jax.random.split(jax.random.key(0), N),
        }[kind]  # fmt: skip
    if kind == "keys":
        report = run(lambda k: jax.random.normal(k), value, tile_size=4)
        np.testing.assert_array_equal(report.outputs, jax.vmap(jax.random.normal)(value))
        return
    if kind == "zarr inner":
        report = run(lambda x: 2 * x, value, specs=[spec(), AxisSpec("col", 3, 3)], axes=axes, tile_size=4)
    else:
        fn = (lambda t: t["a"] + t["b"][0]) if kind == "tree" else (lambda x: 2 * x)
        report = run(fn, value, tile_size=4)
    np.testing.assert_array_equal(report.outputs, 2 * x)
    if kind == "object":
        assert value.slices == [(0, 1), (0, 4), (4, 8), (8, 11)]  # a look at its type, then tile by tile


def test_what_every_tile_needs_is_read_once_and_not_compiled_in(tmp_path):
    weights = zarr.create_array(tmp_path / "w.zarr", data=data(3, 5))
    model, x = eqx.nn.Linear(3, 5, key=jax.random.key(0)), data()
    report = run(lambda x, w, name: model(x) + x @ w, x, weights, "a name", axes=[("row",), None, None], tile_size=4)
    expected = x @ np.asarray(model.weight).T + np.asarray(model.bias) + x @ data(3, 5)
    np.testing.assert_allclose(report.outputs, expected, rtol=1e-4, atol=1e-5)


def test_an_input_whose_slices_disagree_is_refused(tmp_path):
    class Ragged(Columns):
        def __getitem__(self, index):
            return super().__getitem__(index)[: 4 if index.start < 8 else 2]

    with pytest.raises(ValueError, match=r"inputs\[0\]\[8:11\] is float64\[2, 3\], where float64\[3, 3\] is due"):
        run(lambda x: x, Ragged(data().astype(np.float64)), tile_size=4, sink=SinkSpec(tmp_path))
    assert open_results(tmp_path).state["committed"] == 2  # what was computed before is kept


def test_an_input_may_read_into_one_buffer():
    class Reused(Columns):
        def __getitem__(self, index):
            buffer = self.__dict__.setdefault("buffer", np.empty_like(self.values[:4]))
            part = self.values[index]
            buffer[: len(part)] = part
            return buffer[: len(part)]

    x = data()
    report = run(lambda x: 2 * x, Reused(x), tile_size=4, prefetch=3)
    np.testing.assert_array_equal(report.outputs, 2 * x)


def test_what_an_input_raises_tells_the_tile():
    class Broken(Columns):
        def __getitem__(self, index):
            if index.start == 4:
                raise OSError("node lost")
            return super().__getitem__(index)

    with pytest.raises(OSError, match="node lost") as caught:
        run(lambda x: x["a"], {"a": Broken(data())}, tile_size=4)
    assert caught.value.__notes__ == ["while inputs[0]['a'] was read: rows 4 to 7, tile 1"]


@pytest.mark.parametrize("first", [0, 4])
def test_a_masked_slice_is_refused(first):
    class Masked(Columns):
        def __getitem__(self, index):
            part = self.values[index]
            return np.ma.masked_less(part, 0) if index.start == first else part

    with pytest.raises(TypeError, match=rf"inputs\[0\]\[{first}:.\] is masked, and no program sees the mask"):
        run(lambda x: x, Masked(data()), tile_size=4)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_no_more_tiles_are_in_memory_than_promised(prefetch, tmp_path):
    """A tile is read when one of the places is free, which its commit gives back."""
    rows, ahead = 40, []

    class Watched(Columns):
        def __getitem__(self, index):
            log = tmp_path / "out" / ".xtrax" / "commits.jsonl"
            committed = len(log.read_bytes().splitlines()) if log.exists() else 0
            ahead.append(index.start + 1 - committed)
            return super().__getitem__(index)

    tap = HostTap(lambda values, index: time.sleep(0.005))
    boundaries = {"row": AxisBoundary(tap=tap)}
    run(lambda x: x, Watched(data(rows)), specs=[spec(rows, 1)], tile_size=1, prefetch=prefetch,
        boundaries=boundaries, sink=SinkSpec(tmp_path / "out"))  # fmt: skip
    assert 2 <= max(ahead) <= prefetch + 2
    if prefetch:
        assert max(ahead) > 2  # it does read ahead


def test_reading_goes_on_while_a_tile_is_computed():
    slow, overlaps = Columns(data(6), pause=0.05), []

    def watch(values, index):
        before = len(slow.slices)
        time.sleep(0.2)
        overlaps.append(len(slow.slices) - before)

    boundaries = {"row": AxisBoundary(tap=HostTap(watch))}
    run(lambda x: x, slow, specs=[spec(6, 1)], tile_size=1, boundaries=boundaries)
    assert sum(overlaps) >= 2  # some are read before the first one is computed


def test_a_host_function_that_raises_raises_itself_and_nothing_committed_is_lost(tmp_path):
    x, calls, broken = data(), [], [True]

    def record(values, index):
        calls.extend(index[:, 0].tolist())
        if broken[0] and 6 in calls:
            raise ZeroDivisionError("no")

    boundaries = {"row": AxisBoundary(tap=HostTap(record, ordered=True))}
    with pytest.raises(ZeroDivisionError, match="no") as caught:
        run(lambda x: x, x, boundaries=boundaries, tile_size=2, sink=SinkSpec(tmp_path))
    assert any("axis 'row' element 6" in note for note in caught.value.__notes__)
    assert calls == list(range(8))
    assert open_results(tmp_path).state["committed"] == 3
    calls.clear()
    broken[0] = False
    report = run(lambda x: x, x, boundaries=boundaries, tile_size=2, sink=SinkSpec(tmp_path))
    assert (report.tiles_skipped, report.tiles_done) == (3, 3)
    assert calls == list(range(6, N))  # those of the tile that failed again, those of committed ones never
    np.testing.assert_array_equal(open_results(tmp_path)["output"][:], x)


@pytest.mark.parametrize("sink", [False, True])
def test_no_rows(sink, tmp_path):
    x = np.zeros((0, 3), np.float32)
    report = run(norm, x, specs=[spec(0)], sink=SinkSpec(tmp_path) if sink else None)
    assert (report.tiles, report.compiles) == (0, 0)
    if sink:
        results = open_results(tmp_path)
        assert results.state["finished"]
        assert results["aux/twice"].shape == (0, 3)
        assert verify_store(tmp_path).ok
    else:
        check(report.outputs, expected_norm(x))
    boundaries = {"row": AxisBoundary(fuse=reducers.sum)}
    assert run(lambda x: x[0], x, specs=[spec(0)], boundaries=boundaries).outputs == 0
    with pytest.raises(ValueError, match="axis 'row' needs at least 1"):
        run(lambda x: x[0], x, specs=[spec(0)], boundaries={"row": AxisBoundary(fuse=reducers.max)})


def test_rows_without_bytes(tmp_path):
    run(lambda x: {"none": x[:0], "some": x[0]}, data(), tile_size=4, sink=SinkSpec(tmp_path))
    results = open_results(tmp_path)
    assert results["none"].shape == (N, 0)
    assert results["none"][:].shape == (N, 0)
    np.testing.assert_array_equal(results["some"][:], data()[:, 0])
    assert verify_store(tmp_path).ok
    assert run(lambda x: {"none": x[:0], "some": x[0]}, data(), sink=SinkSpec(tmp_path)).tiles_skipped == 3


def test_many_tiny_tiles(tmp_path):
    x = np.arange(200, dtype=np.int32)
    report = run(lambda x: x * x, x, specs=[spec(200, 1)], tile_size=1, sink=SinkSpec(tmp_path))
    assert report.tiles_done == 200
    np.testing.assert_array_equal(open_results(tmp_path)["output"][:], x * x)


@pytest.mark.parametrize(
    ("rows", "batch", "row_bytes", "expected"),
    [
        (3000, 100, 2**16, 1000),  # 64 MiB are 1,024 rows; the nearest multiple of the chunk is 1,000
        (3000, 3000, 2**16, 1024),  # all at once: cut anywhere
        (3000, 1200, 2**16, 1200),  # a chunk at least
        (3000, 100, 10, 3000),  # no more than there are
        (3000, 100, 2**30, 100),
    ],
)
def test_the_size_of_a_tile_is_near_64_mib_in_whole_chunks(rows, batch, row_bytes, expected):
    decision = BatchPlanner().plan([spec(rows, batch)]).decisions[0]
    assert choose_tile_rows(decision, row_bytes, 7) == expected
    assert choose_tile_rows(decision, 0, row_bytes) == expected  # nothing is stored of a row: what is read counts


def test_double_precision_and_low_precision(tmp_path):
    with jax.enable_x64(True):
        x = data().astype(np.float64)
        np.testing.assert_array_equal(run(lambda x: 3 * x, x, tile_size=4).outputs, 3 * x)
    low = run(lambda x: x.astype(jnp.bfloat16), data(), tile_size=4).outputs
    np.testing.assert_array_equal(low, data().astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"output 'output' has dtype bfloat16, which Zarr cannot hold; cast it"):
        run(lambda x: x.astype(jnp.bfloat16), data(), tile_size=4, sink=SinkSpec(tmp_path / "out"))
    assert not (tmp_path / "out" / "zarr.json").exists()


def test_a_tile_is_split_over_a_mesh():
    mesh = jax.make_mesh((4,), ("devices",))
    x, boundary = data(), AxisBoundary(fuse=reducers.sum)
    np.testing.assert_allclose(run(lambda x: x.sum(), x, tile_size=4, mesh=mesh).outputs, x.sum(1), rtol=1e-6)
    found = run(lambda x: x, x, tile_size=4, mesh=mesh, boundaries={"row": boundary}).outputs
    np.testing.assert_allclose(found, x.sum(0), rtol=1e-5)


def test_effects_over_a_mesh_raise_what_they_raise_and_only_at_an_edge():
    mesh = jax.make_mesh((4,), ("devices",))

    def host(value, index):
        if index[0] == 3:
            raise LookupError("no more")

    tap = HostTap(host, batched=False)
    with pytest.raises(LookupError, match="no more"):
        run(lambda x: x, data(), tile_size=8, mesh=mesh, boundaries={"row": AxisBoundary(tap=tap)})
    with pytest.raises(ValueError, match=r"side effects, and the axis 'row' is split over the devices"):
        run(tap, data(), tile_size=8, mesh=mesh)


def test_progress_without_a_terminal(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("xtrax.run._tiled.progress._LINE_SECONDS", 0.0)
    run(lambda x: x, data(), tile_size=4, progress="auto", sink=SinkSpec(tmp_path))
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(r"run_tiled: 3 of 3 tiles, [\d.]+ tiles/s, 132 B written, 0 s left", lines[-1])
    run(lambda x: x, data(), tile_size=4, progress="off")
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_threads_end_with_the_run(tmp_path):
    run(lambda x: x, data(), tile_size=4, sink=SinkSpec(tmp_path))
    with pytest.raises(ValueError, match="no"):
        run(lambda x: x, _Failing(data()), tile_size=1, sink=SinkSpec(tmp_path / "b"))
    assert not [t.name for t in threading.enumerate() if t.name.startswith("xtrax-")]


class _Failing(Columns):
    def __getitem__(self, index):
        if index.start == 5:
            raise ValueError("no")
        return super().__getitem__(index)


def bucketed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return BatchPlanner().plan([AxisSpec("row", N, 4, bucket_boundaries=(4, 8))])


X = np.zeros((N, 3), np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"specs": None}, ValueError, "exactly one of plan and specs .* neither is given"),
        ({"plan": "both"}, ValueError, "both are given"),
        ({"specs": AxisSpec("row", N, 4)}, TypeError, "put a single one into a list"),
        ({"specs": [AxisSpec("row", N + 1, 4)]}, ValueError, r"inputs\[0\] has 11 elements along axis 'row'.*for 12"),
        ({"axes": [("column",)]}, ValueError, "names axis 'column', which the plan does not have"),
        ({"tile_size": 0}, ValueError, "tile_size is 0; a tile needs at least one row"),
        ({"tile_size": True}, TypeError, "tile_size must be an int or None, not bool"),
        ({"tile_size": 2.0}, TypeError, "not float"),
        ({"prefetch": -1}, ValueError, "prefetch is -1; it must be at least 0"),
        ({"prefetch": True}, TypeError, "prefetch must be an int, not bool"),
        ({"progress": "loud"}, ValueError, "progress is 'loud'; allowed are 'auto', 'off'"),
        ({"progress": None}, TypeError, "progress must be a string"),
        ({"resume": "maybe"}, ValueError, "resume is 'maybe'; allowed are 'auto', 'never', 'require'"),
        ({"resume": "require"}, ValueError, "'require', but sink is None"),
        ({"run_id": "mine"}, ValueError, "run_id is 'mine', but sink is None"),
        ({"run_id": "../mine", "sink": "here"}, ValueError, "run_id is '../mine' and contains '/'"),
        ({"run_id": "", "sink": "here"}, ValueError, "run_id is ''"),
        ({"run_id": 3, "sink": "here"}, TypeError, "run_id must be a string"),
        ({"sink": "path"}, TypeError, r"sink must be a SinkSpec.* Pass SinkSpec\("),
        ({"sink": "jsonl"}, ValueError, "format is 'jsonl'; run_tiled writes Zarr only"),
        ({"sink": "staging"}, TypeError, "not JsonlStagingSink"),
        ({"sink": "nowhere"}, ValueError, "output_dir is None"),
        ({"sink": "schema"}, ValueError, "flush_every or an extension_schema"),
        ({"sink": "other id", "run_id": "mine"}, ValueError, "run_id is 'mine', but the sink's is 'other'"),
        ({"verify_inputs": 1}, TypeError, "verify_inputs must be a bool"),
        ({"boundaries": {"rows": AxisBoundary()}}, ValueError, "Did you mean 'row'"),
        ({"boundaries": AxisBoundary()}, TypeError, "boundaries must map axis names"),
        ({"boundaries": {"row": AxisBoundary(fuse=jnp.mean)}}, ValueError, "only by a Reducer"),
        ({"plan": "bucket", "specs": None}, ValueError, "'row' is a Bucket.* use xtrax.tiling.map_ragged"),
        ({"key": 7}, TypeError, "key must be a PRNG key"),
        ({"key": np.zeros(3, np.uint32)}, ValueError, r"key is a raw key of shape \(3,\)"),
        ({"key": np.zeros(2, np.float32)}, TypeError, "key must be a PRNG key"),
        ({"mesh": "four"}, TypeError, "mesh must be"),
        ({"client": "cluster", "sink": "here"}, TypeError, "client must be a dask.distributed.Client"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_before_anything_is_done(options, error, message, tmp_path):
    if options.get("client") is not None:
        pytest.importorskip("distributed")
    options = dict(options)
    sinks = {
        "here": lambda: SinkSpec(tmp_path / "out"),
        "path": lambda: str(tmp_path / "out"),
        "jsonl": lambda: SinkSpec(tmp_path / "out", format="jsonl"),
        "staging": lambda: JsonlStagingSink(tmp_path / "other"),
        "nowhere": SinkSpec,
        "schema": lambda: SinkSpec(tmp_path / "out", extension_schema={"a": int}),
        "other id": lambda: SinkSpec(tmp_path / "out", run_id="other"),
    }
    if "sink" in options:
        options["sink"] = sinks[options["sink"]]()
    if options.get("plan") == "both":
        options |= {"plan": BatchPlanner().plan([spec()]), "specs": [spec()]}
    if options.get("plan") == "bucket":
        options["plan"] = bucketed()
    calls = []

    def fn(x):
        calls.append(1)
        return x

    with pytest.raises(error, match=message):
        run_tiled(fn, X, **{"specs": [spec()], "progress": "off", **options})
    assert calls == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (([1.0, 2.0],), TypeError, r"inputs\[0\]\[0\] is of type float"),
        (("rows.npy",), TypeError, r"inputs\[0\] is 'rows.npy'; a path is not opened for you"),
        ((X, Path("rows.npy")), TypeError, r"inputs\[1\] is .*Path\('rows.npy'\); a path is not opened for you"),
        (({"x": zarr.open_group},), TypeError, r"inputs\[0\]\['x'\] is a Group of named arrays \('a', 'b'\); pass one"),
        (({"x": h5py.File},), TypeError, r"inputs\[0\]\['x'\] is a File of named arrays \('a', 'b'\); pass one of"),
        ((iter(range(N)),), TypeError, r"inputs\[0\] is a range_iterator, which can be read once"),
        ((None,), TypeError, r"inputs\[0\] is None, and has axis 'row'; pass an array"),
        ((jax.ShapeDtypeStruct((N,), np.float32),), TypeError, r"inputs\[0\] is of type ShapeDtypeStruct"),
        ((np.array(["a"] * N),), TypeError, "has dtype <U1"),
        ((np.array([None] * N),), TypeError, "has dtype object"),
        ((np.ma.zeros(N),), TypeError, "is masked"),
        ((np.zeros(N, ">f4"),), TypeError, r'has dtype >f4, .* pass x\.astype\(x\.dtype\.newbyteorder\("="\)\)'),
        ((Columns([]),), ValueError, "is empty and has no dtype"),
        ((np.zeros(()),), ValueError, "no dimension 0 for axis 'row'"),
        ((), ValueError, "there are no arguments"),
        (({},), ValueError, r"inputs\[0\] has no arrays"),
        ((zarr.array(np.zeros(N - 1)),), ValueError, "has 10 elements along axis 'row'"),
    ],
    ids=range(17),
)
def test_bad_inputs_are_refused(inputs, error, message, tmp_path):
    def made(leaf):
        if leaf not in (zarr.open_group, h5py.File):
            return leaf
        folder = leaf(tmp_path / "of arrays", mode="w")
        for name in ("a", "b"):
            folder.create_group(name)
        return folder

    with pytest.raises(error, match=message):
        run(lambda *x: x, *(({"x": made(tree["x"])} if isinstance(tree, dict) and tree else tree) for tree in inputs))


@pytest.mark.parametrize("kind", ["numpy", "zarr", "object", "tree"])
@pytest.mark.parametrize(("dtype", "large"), [(np.int64, 2**31), (np.int64, -(2**31) - 1), (np.uint64, 2**32)], ids=str)
def test_integers_that_would_wrap_around_are_refused(dtype, large, kind, tmp_path):
    """Numpy's are of 64 bits, and JAX's of 32; what does not differ passes in silence."""
    values = np.arange(N).astype(dtype)
    x = {"numpy": lambda: values, "zarr": lambda: zarr.array(values), "object": lambda: Slices(values),
         "tree": lambda: {"id": values}}[kind]()  # fmt: skip
    np.testing.assert_array_equal(jax.tree.leaves(run(lambda x: x, x, tile_size=4).outputs)[0], values)
    values[5] = large
    x = zarr.array(values) if kind == "zarr" else x
    where = "inputs[0]['id'][4:8]" if kind == "tree" else "inputs[0][4:8]"
    found = rf"{re.escape(where)} is {np.dtype(dtype)} and holds {large}, which u?int32 cannot"
    with pytest.raises(ValueError, match=found):
        run(lambda x: x, x, tile_size=4, sink=SinkSpec(tmp_path / "out"))
    assert open_results(tmp_path / "out").state["committed"] == 1
    with pytest.raises(ValueError, match=rf"inputs\[1\] is {np.dtype(dtype)} and holds {large}"):
        run(lambda x, ids: x, X, values, axes=[("row",), None])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(lambda x: x, values, tile_size=4).outputs, values)


class Slices(Columns):
    """The same, which gives arrays."""

    def __getitem__(self, index):
        return self.values[index]


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_an_input_whose_floats_are_rounded_is_told_once(dtype):
    x, even = np.full((N, 2), 0.1, dtype), [spec(batch=N)]
    x[0, 0] = np.nan
    with pytest.warns(UserWarning, match="which rounds it") as caught:
        run(lambda x, w: x["a"] * w, {"a": x}, np.asarray(0.3, dtype), axes=[("row",), None], tile_size=2, specs=even)
    found = [str(warning.message) for warning in caught]
    assert len(found) == 2  # one for each input, though all of six tiles are rounded
    narrow = {np.float64: "float32", np.complex128: "complex64"}[dtype]
    for name in ("inputs[0]['a']", "inputs[1]"):
        assert any(f"{name} is {np.dtype(dtype)}, and is computed with as {narrow}, which rounds" in f for f in found)
    exact = np.arange(N).astype(dtype)
    exact[1:3] = np.nan, np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(lambda x: x, exact, tile_size=2, specs=even)
        run(lambda x: x, x.astype(narrow), tile_size=2, specs=even)


def test_a_trace_is_refused():
    with pytest.raises(TypeError, match="run_tiled is called inside a trace"):
        jax.jit(lambda x: run(lambda x: x, x).outputs)(X)


def test_an_ordered_effect_needs_one_order():
    boundary = AxisBoundary(tap=HostTap(print, ordered=True))
    with pytest.raises(ValueError, match="mesh is given, and the tap of axis 'row' is ordered"):
        run(lambda x: x, X, boundaries=[boundary], mesh=jax.make_mesh((2,), ("d",)))


@pytest.mark.parametrize("effect", ["io_callback", "ordered", "debug", "HostTap", "ordered HostTap"])
def test_a_function_with_effects_of_its_own_is_refused_on_a_dedup_axis_as_by_execute_plan(effect, tmp_path):
    """They would fire for the distinct elements alone."""
    seen = []
    tap = HostTap(lambda values, index: seen.append(values), ordered=effect.startswith("ordered"))

    def fn(x):
        if effect in ("io_callback", "ordered"):
            io_callback(seen.append, None, x, ordered=effect == "ordered")
        elif effect == "debug":
            jax.debug.callback(seen.append, x)
        else:
            x = tap(x)
        return 2 * x

    x = np.repeat(data(4), 3, axis=0)[:N]
    plan = BatchPlanner(dedup_specs=[find_duplicates(x, "row")]).plan([spec()])
    message = "has side effects, and on the DedupGather axis 'row' they would occur for each distinct element"
    with pytest.raises(ValueError, match=message):
        execute_plan(fn, plan, x)
    with pytest.raises(ValueError, match=message):
        run(fn, x, plan=plan, tile_size=4, sink=SinkSpec(tmp_path / "out"))
    assert seen == []
    assert not (tmp_path / "out" / "zarr.json").exists()


def test_effects_inside_a_dedup_axis_are_refused():
    plan = BatchPlanner(dedup_specs=[find_duplicates(X, "row")]).plan([spec(), AxisSpec("col", 3, 3)])
    boundary = AxisBoundary(tap=HostTap(print))
    with pytest.raises(ValueError, match="axis 'col' has a tap or sink, and lies inside the DedupGather axis 'row'"):
        run(lambda x: x, X, plan=plan, axes=[("row", "col")], boundaries={"col": boundary})


@pytest.mark.parametrize(
    ("name", "message"),
    [("a/b", "contains '/'"), ("..", "other than dots"), ("zarr.json", "reserved"), ("__a", "reserved"), ("", "dots")],
)
def test_names_that_would_leave_the_folder(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(lambda x: {name: x[0]}, X, sink=SinkSpec(tmp_path / "out"))
    assert not (tmp_path / "out" / "zarr.json").exists()


def test_outputs_that_would_lie_at_one_place(tmp_path):
    plan = BatchPlanner(carry_specs=[CarrySpec("row", 0.0, lambda carry, y: (carry, {"carries": y}))]).plan([spec()])
    with pytest.raises(ValueError, match="'carries' and 'carries/row' would lie at one place"):
        run(lambda x: x[0], X, plan=plan, sink=SinkSpec(tmp_path))
    with pytest.raises(ValueError, match="two outputs have the name '1'"):
        run(lambda x: _Both((x, x), {1: x}), X, sink=SinkSpec(tmp_path))


@jax.tree_util.register_pytree_with_keys_class
class _Both:
    """A tree whose leaves have keys of two kinds that are spelled alike."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        kinds = (jax.tree_util.SequenceKey(1), jax.tree_util.DictKey("1"))
        return [(kind, part[1]) for kind, part in zip(kinds, self.parts, strict=True)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*((None, child) for child in children))


def test_a_folder_that_holds_something_else(tmp_path):
    with JsonlStagingSink(tmp_path) as sink:
        sink.stage(("a",), x=np.zeros(3))
    with pytest.raises(ValueError, match=r"already holds results\.jsonl"):
        run(lambda x: x, X, sink=SinkSpec(tmp_path))
    zarr.create_group(tmp_path / "other")
    with pytest.raises(ValueError, match="not a tiled run"):
        run(lambda x: x, X, sink=SinkSpec(tmp_path / "other"))
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SinkError, match="file cannot be opened"):
        run(lambda x: x, X, sink=SinkSpec(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_report_is_a_few_lines_in_the_terminal_and_in_a_notebook():
    report = run(lambda x: x, data(), tile_size=N)
    first, *rest = str(report).splitlines()
    assert first == "run without a sink: 1 tile done, 0 skipped, of 1"
    assert ", 1 compile, peak memory " in rest[-1]
    printed = []

    class Printer:
        text = staticmethod(printed.append)

    report._repr_pretty_(Printer(), cycle=False)
    assert printed == [str(report)]
    assert "array" not in repr(report)  # the outputs may be large
