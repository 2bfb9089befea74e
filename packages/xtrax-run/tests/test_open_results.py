"""`open_results` of tiled, keyed and training runs."""

import itertools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
import pytest
import zarr

from xtrax.run import DamagedRunError, SinkSpec, ZarrStagingSink, open_results, run_tiled, verify_store
from xtrax.run._appended.shards import ArraySpec, TileData
from xtrax.run._appended.store import AppendStore
from xtrax.run._checks import check_folder
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
    assert repr(results).splitlines() == [
        f"run one in {folder}, finished, 3 of 3 tiles committed: 2 arrays",
        "  aux/z  bool (6, 4)",
        "  y      float32 (6, 4, 2)",
    ]
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
    assert repr(results).splitlines()[0] == f"run abc in {tmp_path}, finished, checkpoints at 7, 20: 2 arrays"
    if pytest.importorskip("xarray"):
        assert results.dataset["eval/loss"].dims == ("eval_row",)


def test_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder"):
        open_results(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no output that is known here"):
        open_results(tmp_path)
    with pytest.raises(TypeError, match=r"output_dir must be a path .*not NoneType"):
        open_results(None)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="file is a file, not a folder; give the folder of a run"):
        open_results(tmp_path / "file")


DAMAGE = {
    "y/c.1.0.0": r"tile 1 of array 'y' is damaged: .*/y/c\.1\.0\.0",
    "aux/z/c.2.0": r"tile 2 of array 'aux/z' is damaged: .*/aux/z/c\.2\.0",
}


@pytest.mark.parametrize("how", ["is missing", "has 9 bytes and not"])
@pytest.mark.parametrize("shard", DAMAGE)
def test_a_shard_that_is_gone_or_cut_is_never_read_as_zeros(shard, how, folder):
    path = folder / shard
    path.unlink() if how == "is missing" else os.truncate(path, 9)
    with pytest.raises(DamagedRunError, match=f"{DAMAGE[shard]} {how}.*verify_store tells.*call of run_tiled"):
        open_results(folder)


@pytest.mark.parametrize("file", ["y", "y/zarr.json", ".xtrax/commits.jsonl", ".xtrax/run.json", ".xtrax"])
def test_other_files_that_are_gone(file, folder):
    shutil.rmtree(folder / file) if (folder / file).is_dir() else (folder / file).unlink()
    name = {"y": "y/zarr.json", ".xtrax": ".xtrax/run.json"}.get(file, file)
    with pytest.raises(DamagedRunError, match=f"{name}.* is missing"):
        open_results(folder)


def test_a_tile_without_its_line_in_the_log(folder):
    log = folder / ".xtrax" / "commits.jsonl"
    log.write_text(log.read_text().replace('"tile":1', '"tile":7'))
    with pytest.raises(DamagedRunError, match=r"commits\.jsonl line 2 does not fit its checksum.*verify_store tells"):
        open_results(folder)


@pytest.mark.parametrize("finished", [True, False])
def test_a_log_that_was_cut(finished, folder):
    log = folder / ".xtrax" / "commits.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:1]))
    message = r"commits\.jsonl was cut or changed: it names 1 tiles, .* finished with 3"
    if not finished:
        (folder / ".xtrax" / "manifest.json").unlink()
        message = r"zarr\.json says 6 rows where 2 are committed"
    with pytest.raises(DamagedRunError, match=message):
        open_results(folder)


@pytest.mark.parametrize(
    ("file", "before", "after", "what"),
    [
        ("aux/z", '"bool"', '"int8"', "data_type"),
        ("y", '"little"', '"big"', "codecs"),
        ("y", "[6, 4, 2]", "[6, 2, 4]", "shape"),
        ("y", "[6, 4, 2]", "[8, 4, 2]", "says 8 rows where 6 are committed"),
        ("y", '"fill_value": 0.0', '"fill_value": 1.0', "fill_value"),
    ],
)
def test_an_array_whose_description_was_changed(file, before, after, what, folder):
    path = folder / file / "zarr.json"
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(DamagedRunError, match=rf"{file}/zarr\.json (was changed: )?{what}; verify_store tells"):
        open_results(folder)


def test_the_rows_are_those_of_the_log(folder):
    """After a kill, `zarr.json` is behind for good."""
    (folder / ".xtrax" / "manifest.json").unlink()
    for name in ("y", "aux/z"):
        path = folder / name / "zarr.json"
        path.write_text(path.read_text().replace('"shape": [6', '"shape": [2'))
    assert zarr.open_array(folder / "y", mode="r").shape == (2, 4, 2)
    results = open_results(folder)
    np.testing.assert_array_equal(results["y"][:], np.stack([X, -X], axis=-1))
    np.testing.assert_array_equal(results["aux/z"][:], X > 7)
    assert results.state == {"finished": False, "tiles": 3, "committed": 3, "rows": 6}


def test_the_log_of_another_run(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    run_tiled(lambda x: x, X, specs=[AxisSpec("row", 6, 6)], tile_size=2, sink=SinkSpec(other), progress="off")
    shutil.copy(other / ".xtrax" / "commits.jsonl", folder / ".xtrax" / "commits.jsonl")
    with pytest.raises(DamagedRunError, match=r"names tile 0 with arrays \['output'\], which is not of this run"):
        open_results(folder)


def test_what_is_written_at_the_end_is_looked_for_too(tmp_path):
    boundaries = {"row": AxisBoundary(fuse=reducers.mean)}
    run_tiled(lambda x: x, X, specs=[AxisSpec("row", 6, 6)], boundaries=boundaries, sink=SinkSpec(tmp_path),
              progress="off")  # fmt: skip
    (tmp_path / "output" / "c.0").unlink()
    with pytest.raises(DamagedRunError, match=r"array 'output' is damaged: .*/output/c\.0 is missing"):
        open_results(tmp_path)


SPEC = ArraySpec("y", (2,), "float32", 1, ("n", None))


def start(folder, tiles=2):
    store = AppendStore(folder)
    store.create({"run_id": "one", "rows": tiles, "tile_rows": 1}, [SPEC], {})
    for tile in range(tiles):
        data = TileData(tile, {"y": np.full((1, 2), tile, np.float32)}, None, {})
        store.commit([store.begin(lambda data=data: data)])
    store.finalize({})
    store.close()


def test_a_reader_beside_runs_that_start(tmp_path):
    """It sees no run, or the run, and nothing else."""
    seen, wrong, stop = set(), [], threading.Event()
    folders = [tmp_path / "runs" / str(i) for i in range(30)]

    def poll():
        while not stop.is_set():
            for folder in folders:
                try:
                    results = open_results(folder)
                    assert results["y"].shape[0] <= results.state["committed"] <= 2
                    seen.add(folder)
                except FileNotFoundError as error:
                    if not any(text in str(error) for text in ("no folder", "has not started", "no output that is")):
                        wrong.append(error)
                except Exception as error:  # noqa: BLE001 - all of them are told below
                    wrong.append(error)

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        for folder in folders:
            start(folder)
    finally:
        time.sleep(0.1)
        stop.set()
        reader.join()
    assert not wrong
    assert seen


@pytest.mark.parametrize("step", ["read_header", "layout_of", "refuse_remains", "read_manifest", "check_metadata"])
def test_a_run_that_starts_between_two_looks(step, tmp_path, monkeypatch):
    from xtrax.run import results

    real, looks = getattr(results, step), itertools.count()

    def started_meanwhile(*args, **options):
        found = real(*args, **options)
        if next(looks) == 0:
            start(tmp_path)
        return found

    if step in ("read_manifest", "check_metadata"):  # these come once there is a header
        store = AppendStore(tmp_path)
        store.create({"run_id": "zero", "rows": 5, "tile_rows": 1}, [SPEC], {})
        store.close()
    monkeypatch.setattr(results, step, started_meanwhile)
    opened = open_results(tmp_path)
    assert opened.provenance["run_id"] in ("zero", "one")
    assert opened["y"][:, 0].tolist() == list(range(opened.state["committed"]))


def test_a_folder_that_is_made_meanwhile(tmp_path, monkeypatch):
    def exists(path):
        path.mkdir(exist_ok=True)
        return True

    with monkeypatch.context() as patched:
        patched.setattr(type(tmp_path), "exists", exists)
        assert check_folder(tmp_path / "out", "output_dir", "a folder") == tmp_path / "out"
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="link is a dangling symbolic link; give"):
        open_results(tmp_path / "link")


def test_a_run_that_is_being_written(tmp_path, monkeypatch):
    """As another process sees it, at every step."""
    monkeypatch.setattr("xtrax.run._appended.store._GROW_SECONDS", 0)
    store = AppendStore(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no output that is known here"):
        open_results(tmp_path)
    store.create({"run_id": "one", "rows": 4, "tile_rows": 1}, [SPEC], {})
    for tile in (0, 2, 1, 3):
        store.commit(
            [store.begin(lambda tile=tile: TileData(tile, {"y": np.full((1, 2), tile, np.float32)}, None, {}))]
        )
        results = open_results(tmp_path)
        shown = {0: 1, 2: 1, 1: 3, 3: 4}[tile]
        np.testing.assert_array_equal(results["y"][:, 0], np.arange(shown))
    store.close()


def test_rows_that_are_committed_while_a_run_is_opened(tmp_path, monkeypatch):
    from xtrax.run import results

    store = AppendStore(tmp_path)
    store.create({"run_id": "one", "rows": 2, "tile_rows": 1}, [SPEC], {})
    read_manifest = results.read_manifest

    def commit_meanwhile(path):
        tile = TileData(0, {"y": np.ones((1, 2), np.float32)}, None, {})
        store.commit([store.begin(lambda: tile)])
        store.close()
        return read_manifest(path)

    monkeypatch.setattr(results, "read_manifest", commit_meanwhile)  # between the log and the arrays
    opened = open_results(tmp_path)
    assert opened["y"][:].tolist() == [[1, 1]]
    assert opened.state["committed"] == 1


def test_a_run_that_has_not_started(tmp_path, monkeypatch):
    from xtrax.run._appended import store as append_store

    def killed(*_):
        raise KeyboardInterrupt

    store = AppendStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(append_store, "write_json_atomic", killed)
        with pytest.raises(KeyboardInterrupt):
            store.create({"run_id": "one", "rows": 4, "tile_rows": 1}, [SPEC], {})
    with pytest.raises(FileNotFoundError, match="holds a run that has not started"):
        open_results(tmp_path)
    store.close()
    with pytest.raises(FileNotFoundError, match="holds a run that has not started"):
        open_results(tmp_path)


def test_attributes_that_a_user_adds_are_no_damage(tmp_path):
    run_tiled(lambda x: 2 * x, np.arange(6.0, dtype=np.float32), specs=[AxisSpec("n", 6, 3)], tile_size=3,
              sink=SinkSpec(tmp_path / "out"), progress="off")  # fmt: skip
    root = zarr.open_group(tmp_path / "out", mode="r+")
    root.attrs["title"] = "twice"
    root["output"].attrs["units"] = "m"
    assert verify_store(tmp_path / "out").ok
    assert open_results(tmp_path / "out")["output"][:].tolist() == [0, 2, 4, 6, 8, 10]
