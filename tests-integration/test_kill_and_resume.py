"""A run killed by SIGKILL and resumed ends in the same bits as one that was never stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import zarr

from xtrax.cli import load_run

ROOT = Path(__file__).resolve().parent.parent
XTRAX = Path(sys.executable).parent / "xtrax"
CONFIG = ROOT / "docs" / "examples" / "vowels" / "train.toml"
SETTINGS = ("num_epochs=4", "checkpoint.every_steps=7")  # 19 steps an epoch: most saves are in the middle of one


def command(runs: Path) -> list[str]:
    """The run that the tests stop and resume."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return [str(XTRAX), "run", str(CONFIG), *settings, "--runs-dir", str(runs)]


def bits(folder: Path) -> tuple[list[bytes], dict[str, np.ndarray]]:
    """Every array of the last state, and every column of the metrics."""
    leaves = [leaf for leaf in jax.tree.leaves(load_run(folder).state) if isinstance(leaf, jax.Array)]
    raw = [jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    group = zarr.open_group(folder / "metrics.zarr", mode="r")
    columns = {f"{kind}/{name}": np.asarray(a[:]) for kind in ("train", "eval") for name, a in group[kind].arrays()}
    return [np.asarray(x).tobytes() for x in raw], columns


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    """The folder of the run that was never stopped."""
    runs = tmp_path_factory.mktemp("uninterrupted")
    subprocess.run(command(runs), check=True, capture_output=True)
    return next(runs.iterdir())


@pytest.mark.parametrize("saved_steps", [7, 28])
def test_killed_and_resumed_in_place(uninterrupted, saved_steps, tmp_path):
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(f"*/checkpoints/{saved_steps}")):
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    folder = next(tmp_path.iterdir())

    resume = [str(XTRAX), "resume", folder.name, "--in-place", "--runs-dir", str(tmp_path)]
    done = subprocess.run(resume, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished 4 epochs, 76 steps" in done.stdout

    state, metrics = bits(folder)
    expected_state, expected_metrics = bits(uninterrupted)
    assert state == expected_state
    assert metrics.keys() == expected_metrics.keys()
    for name, column in expected_metrics.items():
        np.testing.assert_array_equal(metrics[name], column, err_msg=name)
    assert len(metrics["train/step"]) == 76
