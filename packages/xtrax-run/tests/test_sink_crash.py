"""A writer is killed at many points inside its drains; what it had drained must be there, whole."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
