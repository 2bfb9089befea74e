"""Runs on a Dask cluster of two processes: the same bytes, one compile a worker, lost workers made good."""

import os
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from xtrax.run import SinkSpec, open_results, run_tiled, verify_store, zarr_content_digest
from xtrax.stages import AxisBoundary, HostSink, HostTap
from xtrax.tiling import AxisSpec, BatchPlanner, CarrySpec, find_duplicates, reducers

distributed = pytest.importorskip("distributed")

pytestmark = [
    pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning"),
    pytest.mark.filterwarnings("ignore::xtrax.tiling.errors.RemainderWarning"),
    pytest.mark.timeout(280),
]
N = 23


@pytest.fixture(scope="module")
def client():
    """Two workers of one thread each, so that one can be killed."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


def rows():
    return np.random.default_rng(0).normal(size=(N, 5)).astype(np.float32)


def run(fn, x, **options):
    options.setdefault("specs", [AxisSpec("row", N, 2)])
    return run_tiled(fn, x, tile_size=4, progress="off", **options)


@pytest.mark.parametrize("source", ["numpy", "zarr"])
def test_a_cluster_gives_the_same_bytes(source, client, tmp_path):
    model, key = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(1)), jax.random.key(2)

    def fn(x, *, key):
        return {"y": model(x) + jax.random.normal(key), "x": x}

    x = rows()
    run(fn, x, key=key, sink=SinkSpec(tmp_path / "local"))
    value = zarr.create_array(tmp_path / "x.zarr", data=x, chunks=(4, 5)) if source == "zarr" else x
    report = run(fn, value, key=key, sink=SinkSpec(tmp_path / "cluster"), client=client)
    assert zarr_content_digest(tmp_path / "cluster") == zarr_content_digest(tmp_path / "local")
    assert verify_store(tmp_path / "cluster").ok
    assert (report.tiles_done, report.bytes_read) == (6, x.nbytes)
    assert 2 <= report.compiles <= 4  # each of two workers compiles a shape once
    assert not (tmp_path / "cluster" / ".xtrax" / "job.pickle").exists()
    # Either can take up what the other has left.
    assert run(fn, value, key=key, sink=SinkSpec(tmp_path / "local"), client=client).tiles_skipped == 6


def test_more_tiles_than_are_in_flight(client, tmp_path):
    x = np.arange(100, dtype=np.float32)
    report = run(lambda v: v**2, x, specs=[AxisSpec("row", 100, 4)], sink=SinkSpec(tmp_path / "out"), client=client)
    assert (report.tiles, report.tiles_done) == (25, 25)
    np.testing.assert_array_equal(open_results(tmp_path / "out")["output"][:], x**2)


def test_reducers_and_dedup_on_a_cluster(client, tmp_path):
    x = rows()[np.arange(N) % 7]
    plan = BatchPlanner(dedup_specs=[find_duplicates(x, "row")]).plan([AxisSpec("row", N, 2)])
    boundaries = {"row": AxisBoundary(fuse={"m": reducers.mean, "y": reducers.sum})}
    options = {"specs": None, "plan": plan, "boundaries": boundaries}

    def fn(x):
        return {"m": jnp.sin(x), "y": x.sum()}

    run(fn, x, **options, sink=SinkSpec(tmp_path / "local"))
    run(fn, x, **options, sink=SinkSpec(tmp_path / "cluster"), client=client)
    assert zarr_content_digest(tmp_path / "cluster") == zarr_content_digest(tmp_path / "local")
    np.testing.assert_allclose(open_results(tmp_path / "cluster")["m"][:], np.sin(x).mean(0), rtol=1e-5)


def test_effects_reach_files_of_workers_and_failures_reach_the_caller(client, tmp_path):
    def record(values, index):
        for i, value in zip(index[:, 0], values, strict=True):
            (tmp_path / f"{i}.txt").write_text(str(float(value)))
        if 13 in index[:, 0] and not (tmp_path / "mended").exists():
            raise ZeroDivisionError("no")

    boundaries = {"row": AxisBoundary(tap=HostTap(record))}
    options = {"boundaries": boundaries, "sink": SinkSpec(tmp_path / "out"), "client": client}
    with pytest.raises(ZeroDivisionError, match="no"):
        run(lambda x: x[0], rows(), **options)
    assert 3 not in verify_store(tmp_path / "out").problems
    (tmp_path / "mended").touch()
    report = run(lambda x: x[0], rows(), **options)
    assert report.tiles_done + report.tiles_skipped == 6
    found = [float((tmp_path / f"{i}.txt").read_text()) for i in range(N)]
    np.testing.assert_array_equal(np.float32(found), rows()[:, 0])


def test_taps_and_sinks_fire_in_the_workers_one_call_at_a_time(tmp_path):
    """Also in workers of several threads; what they keep in memory is not the caller's."""
    kept = []

    def record(values, index):
        with (tmp_path / "busy").open("x"):  # fails while another call is inside
            time.sleep(0.01)
        for i in index[:, 0]:
            with (tmp_path / f"{i}.txt").open("x") as file:
                file.write(f"{os.getpid()}")
        kept.append(len(values))
        (tmp_path / "busy").unlink()

    boundary = AxisBoundary(tap=HostTap(record))
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=4, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        sink = SinkSpec(tmp_path / "out")
        report = run(lambda x: x[0], rows(), boundaries=[boundary], sink=sink, client=client)
    assert report.tiles_done == 6
    found = {(tmp_path / f"{i}.txt").read_text() for i in range(N)}
    assert len(found) == 1
    assert str(os.getpid()) not in found
    assert kept == []


def test_what_cannot_run_on_a_cluster(client, tmp_path):
    x, sink = rows(), SinkSpec(tmp_path / "out")
    scan = BatchPlanner(carry_specs=[CarrySpec("row", 0.0, lambda c, y: (c, y))]).plan([AxisSpec("row", N, 2)])
    with pytest.raises(ValueError, match="'row' is a Scan, whose tiles follow one another"):
        run(lambda x: x[0], x, specs=None, plan=scan, client=client, sink=sink)
    with pytest.raises(ValueError, match="client is given, and sink is None"):
        run(lambda x: x, x, client=client)
    with pytest.raises(ValueError, match="client and mesh are both given"):
        run(lambda x: x, x, client=client, sink=sink, mesh=jax.make_mesh((2,), ("d",)))
    with pytest.raises(ValueError, match="client is given, and the tap of axis 'row' is ordered"):
        run(lambda x: x, x, client=client, sink=sink, boundaries=[AxisBoundary(tap=HostTap(print, ordered=True))])
    with pytest.raises(ValueError, match="client is given, and the sink of axis 'row' is ordered"):
        run(lambda x: x, x, client=client, sink=sink, boundaries=[AxisBoundary(sink=HostSink(print, ordered=True))])
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be sent to workers"):
        run(lambda x: x + lock.locked(), x, client=client, sink=sink)


def test_a_killed_worker_costs_nothing_but_time(client, tmp_path):
    """The tile that it computes is computed again by another, and the result is the same."""
    x = rows()

    def slowly(values, index):
        time.sleep(0.3)
        if 9 in index[:, 0] and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    boundaries = {"row": AxisBoundary(tap=HostTap(slowly))}
    report = run(lambda x: 2 * x, x, boundaries=boundaries, sink=SinkSpec(tmp_path / "out"), client=client)
    assert (tmp_path / "killed").exists()
    assert report.tiles_done == 6
    np.testing.assert_array_equal(open_results(tmp_path / "out")["output"][:], 2 * x)
    assert verify_store(tmp_path / "out").ok
