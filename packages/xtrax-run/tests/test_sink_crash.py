"""A writer is killed at many points inside its drains; what it had drained must be there, whole."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import zarr

from xtrax.run import SinkError, ZarrStagingSink, zarr_content_digest

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
LAB = Path(__file__).with_name("crash_lab.py")


@pytest.fixture
def fast_folder(tmp_path):
    """A folder in memory if there is one: a kill loses nothing that the kernel has."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shared)) if os.access(shared, os.W_OK) else tmp_path
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("fmt", "points"), [("zarr", 20), ("jsonl", 10), ("h5", 20)])
def test_a_process_killed_at_any_step_leaves_what_it_drained_intact(fmt, points, fast_folder):
    if fmt == "h5":
        pytest.importorskip("h5py")
    done = subprocess.run(
        [sys.executable, LAB, fmt, fast_folder, str(points)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    outcomes = report["outcomes"]
    # The kills really fell, and over the whole run.
    assert sum(o["killed"] for o in outcomes) >= points - 1
    assert len({o["drained"] for o in outcomes}) > report["steps"] // 2
    assert [o for o in outcomes if not o["intact"]] == []
    assert [o for o in outcomes if not o["complete_after_resume"]] == []
    if fmt != "zarr":  # a drain is there whole or not at all; in Zarr this holds for each array and each new key
        assert [o for o in outcomes if not o["whole_steps"]] == []
    names = {"zarr": ["item", "other", "zarr.json"], "jsonl": ["results.jsonl"], "h5": ["results.h5"]}
    assert [o["left"] for o in outcomes if o["left"] != names[fmt]] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_zarr_array_whose_replacement_is_interrupted_is_put_back(error, tmp_path, monkeypatch):
    """Between the two renames that replace an array, it has no place in the store."""
    sink = ZarrStagingSink(tmp_path, run_id="one")
    sink.stage(("k",), x=np.arange(3))
    before = zarr_content_digest(tmp_path)
    rename = os.rename

    def fail(source, target):
        if Path(target) == tmp_path / "k" / "x" and "new" in Path(source).parts:
            raise error
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises((KeyboardInterrupt, SinkError)):
            sink.stage(("k",), x=np.zeros(9))
    assert zarr_content_digest(tmp_path) == before
    sink.drain()  # it is still buffered
    sink.finalize()
    np.testing.assert_array_equal(zarr.open_group(tmp_path, mode="r")["k/x"][:], np.zeros(9))
    assert sorted(os.listdir(tmp_path)) == ["k", "zarr.json"]


def test_a_zarr_array_whose_replacement_was_killed_is_put_back_on_opening(tmp_path):
    with ZarrStagingSink(tmp_path, run_id="one") as sink:
        sink.stage(("k",), x=np.arange(3), y=np.ones(2))
    before = zarr_content_digest(tmp_path)
    aside = tmp_path / ".xtrax" / "old" / "k"
    aside.mkdir(parents=True)
    os.rename(tmp_path / "k" / "x", aside / "x")  # where a kill between the two renames leaves it
    shutil.copytree(tmp_path / "k" / "y", aside / "y")  # a kill after the second leaves the old one too
    ZarrStagingSink(tmp_path, run_id="one").finalize()
    assert zarr_content_digest(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == ["k", "zarr.json"]
