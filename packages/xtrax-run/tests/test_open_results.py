"""`open_results` of tiled, keyed and training runs."""

import json
import sys
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from xtrax.run import SinkSpec, ZarrStagingSink, open_results, run_tiled
from xtrax.stages import AxisBoundary
from xtrax.tiling import AxisSpec, reducers

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
X = np.arange(24, dtype=np.float32).reshape(6, 4)


@pytest.fixture
def folder(tmp_path):
    specs = [AxisSpec("row", 6, 6), AxisSpec("col", 4, 4)]
    run_tiled(lambda x: {"y": jnp.stack([x, -x]), "aux": {"z": x > 7}}, X, specs=specs, axes=[("row", "col")],
              tile_size=2, sink=SinkSpec(tmp_path, run_id="one"), progress="off")  # fmt: skip
    return tmp_path


def test_a_tiled_run(folder):
    results = open_results(str(folder))
    assert sorted(results.arrays) == ["aux/z", "y"]
    assert isinstance(results, Mapping)
    assert list(results) == list(results.keys()) == list(results.arrays)
    assert len(results) == 2
    assert "y" in results
    assert "x" not in results
    assert results.get("x") is None
    assert results == results
    assert isinstance(hash(results), int)
    assert isinstance(results["y"], zarr.Array)  # nothing is read yet
    np.testing.assert_array_equal(results["y"][2:4], np.stack([X, -X], axis=-1)[2:4])
    np.testing.assert_array_equal(results["aux/z"][:], X > 7)
    assert results.provenance["run_id"] == "one"
    assert results.provenance["versions"]["jax"]
    assert results.state == {"finished": True, "tiles": 3, "committed": 3, "rows": 6}
    assert results.timings.keys() == {"computing", "reading", "writing"}
    assert all(seconds > 0 for seconds in results.timings.values())
    with pytest.raises(KeyError, match=r"has no array 'x'; it has \['aux/z', 'y'\]"):
        results["x"]
    with pytest.raises(TypeError):
        results.arrays["x"] = None


def test_as_a_dataset(folder):
    pytest.importorskip("xarray")
    dataset = open_results(folder).dataset
    assert dict(dataset.sizes) == {"row": 6, "col": 4, "y_dim_2": 2}
    assert dataset["y"].dims == ("row", "col", "y_dim_2")
    assert not dataset["y"].variable._in_memory
    np.testing.assert_array_equal(dataset["y"].isel(row=[4, 0], y_dim_2=1), -X[[4, 0]])
    np.testing.assert_array_equal(dataset["aux/z"].values, X > 7)
    assert dataset.attrs["run_id"] == "one"
    assert float(dataset["y"].sum()) == 0


def test_a_reduced_output_as_a_dataset(tmp_path):
    pytest.importorskip("xarray")
    boundaries = {"row": AxisBoundary(fuse={"m": reducers.mean, "n": reducers.count})}
    run_tiled(lambda x: {"m": x, "n": x}, X, specs=[AxisSpec("row", 6, 6)], boundaries=boundaries,
              sink=SinkSpec(tmp_path), progress="off")  # fmt: skip
    dataset = open_results(tmp_path).dataset
    np.testing.assert_array_equal(dataset["m"], X.mean(0))
    assert int(dataset["n"].max()) == 6


def test_without_xarray(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match=r"install xtrax-run\[xarray\]"):
        _ = open_results(folder).dataset


def test_a_keyed_store(tmp_path):
    with ZarrStagingSink(tmp_path, run_id="one") as sink:
        sink.stage(("fold", 3), weights=np.arange(3.0))
    results = open_results(tmp_path)
    assert results["fold/3/weights"][:].tolist() == [0, 1, 2]
    assert results.provenance["run_id"] == "one"


def test_a_training_run(tmp_path):
    """A folder as `xtrax run` leaves it."""
    manifest = {"run_id": "abc", "status": "finished", "provenance": {"git": {"sha": "1"}}, "epochs": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    metrics = zarr.create_group(tmp_path / "metrics.zarr")
    metrics.create_array("train/loss", data=np.array([3.0, 2.0]))
    metrics.create_array("eval/loss", data=np.array([4.0]))
    for step in (20, 7):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    results = open_results(tmp_path)
    assert results["train/loss"][:].tolist() == [3, 2]
    assert results.provenance == {"run_id": "abc", "git": {"sha": "1"}}
    assert results.state["status"] == "finished"
    assert results.state["checkpoints"] == [7, 20]
    if pytest.importorskip("xarray"):
        assert results.dataset["eval/loss"].dims == ("eval_row",)


def test_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder"):
        open_results(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no output that is known here"):
        open_results(tmp_path)
