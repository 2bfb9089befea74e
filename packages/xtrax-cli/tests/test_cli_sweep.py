"""`xtrax sweep`: the runs are those of `xtrax run`, one failing does not stop the rest, and it can be typed again."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from xtrax.cli import CLIError, load_run
from xtrax.cli._sweep import _ranked, _short
from xtrax.cli._sweep_config import load_sweep
from xtrax.cli._sweep_page import page as _page
from xtrax.cli.config import ConfigError

AXES = """
[sweep.axes]
seed = [7, 8]
optimizer.kwargs.learning_rate = [1e-2, 1e-3]
"""


@pytest.fixture
def grid(project):
    """A project whose `sweep.toml` spans two seeds and two learning rates, for one epoch."""
    text = project.config.read_text().replace("num_epochs = 3", "num_epochs = 1")
    (project.folder / "sweep.toml").write_text(text + AXES)
    return project


def replace(grid, *pairs):
    path = grid.folder / "sweep.toml"
    text = path.read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def same_bits(a, b):
    for mine, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if isinstance(mine, jax.Array):
            is_key = jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key)
            mine, other = (jax.random.key_data(x) if is_key else x for x in (mine, other))
        np.testing.assert_array_equal(mine, other)


def test_every_point_is_the_run_that_it_stands_for(grid):
    code, out, err = grid.xtrax("sweep", "sweep.toml")
    assert (code, err) == (0, "")
    (folder,) = grid.runs()
    told = manifest(folder)
    assert told["kind"] == "sweep"
    assert told["status"] == "finished"
    assert [point["values"] for point in told["points"]] == [
        {"seed": seed, "optimizer.kwargs.learning_rate": rate} for seed in (7, 8) for rate in (1e-2, 1e-3)
    ]
    assert [point["status"] for point in told["points"]] == ["finished"] * 4
    point = told["points"][3]
    sets = ["seed=8", "num_epochs=1", "data.seed=7", "optimizer.kwargs.learning_rate=1e-3"]
    assert grid.xtrax("run", "train.toml", *[part for each in sets for part in ("--set", each)])[0] == 0
    (run,) = set(grid.runs()) - {folder}
    same_bits(load_run(folder / "points" / point["run_id"]).state, load_run(run.name).state)
    assert point["metrics"] == manifest(run)["metrics"]
    assert point["run_id"] == run.name

    # The table: ranked by the loss of the evaluation, the smallest first.
    losses = sorted(point["metrics"]["loss"] for point in told["points"])
    rows = [line.split() for line in out.split("run\n")[1].splitlines()[:4]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    assert [row[3] for row in rows] == [f"{loss:.4g}" for loss in losses]
    assert [row[-1] for row in rows] == told["ranking"]
    assert out.count("\npoint ") == 4
    assert "\x1b[" not in out

    # The page: the same table, in one file that loads nothing.
    page = (folder / "sweep.html").read_text()
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr class=.*", page)]
    assert cells == rows
    assert not re.search(r"(src|href)=|url\(|@import", page)


def test_the_data_keep_the_seed_of_the_file(grid):
    seeds = {point.config.data.seed for point in load_sweep("sweep.toml").points}
    assert seeds == {7}
    replace(grid, ("seed = [7, 8]", "data.seed = [1, 2]"))
    assert [point.config.data.seed for point in load_sweep("sweep.toml").points] == [1, 1, 2, 2]


def test_typed_again_it_does_nothing_twice(grid):
    grid.xtrax("sweep", "sweep.toml")
    (folder,) = grid.runs()
    before = {path: path.stat().st_mtime_ns for path in (folder / "points").rglob("*") if path.is_file()}
    ranking = manifest(folder)["ranking"]
    code, out, _ = grid.xtrax("sweep", "sweep.toml")
    assert code == 0
    assert "4 of them are finished already" in out
    assert {path: path.stat().st_mtime_ns for path in (folder / "points").rglob("*") if path.is_file()} == before
    assert grid.runs() == [folder]
    code, out, _ = grid.xtrax("sweep", "sweep.toml", "--set", "sweep.rank_by=accuracy", "--set", "sweep.goal=max")
    assert code == 0
    points = {point["run_id"]: point["metrics"]["accuracy"] for point in manifest(folder)["points"]}
    ranked = [points[run_id] for run_id in manifest(folder)["ranking"]]
    assert ranked == sorted(points.values(), reverse=True)
    assert set(ranking) == set(points)


def test_a_failing_point_is_recorded_and_typed_again_goes_on_from_its_checkpoint(grid):
    replace(
        grid,
        (f"{grid.module}:make_data", f"{grid.module}:Stopping"),
        ("optimizer.kwargs.learning_rate = [1e-2, 1e-3]", 'data.kwargs.action = ["raise"]'),
        ("num_epochs = 1", "num_epochs = 2"),
    )
    (grid.folder / "stop").touch()
    code, out, err = grid.xtrax("sweep", "sweep.toml")
    assert code == 1
    (folder,) = grid.runs()
    told = manifest(folder)
    assert told["status"] == "failed"
    assert [point["status"] for point in told["points"]] == ["failed"] * 2
    assert "ValueError: bad row 7" in told["points"][0]["error"]
    assert out.count("failed: ") == 2
    assert "2 of 2 points failed" in err
    assert "xtrax sweep sweep.toml" in err
    assert "Traceback" not in err
    assert told["ranking"] == []
    (grid.folder / "stop").unlink()
    code, _, err = grid.xtrax("sweep", "sweep.toml")
    assert (code, err) == (0, "")
    told = manifest(folder)
    assert [point["status"] for point in told["points"]] == ["finished"] * 2
    assert all("error" not in point for point in told["points"])
    for point in told["points"]:  # from the checkpoint that the failure left
        assert len(manifest(folder / "points" / point["run_id"])["resumed"]) == 1


def test_one_bad_value_fails_alone(grid):
    replace(grid, ("seed = [7, 8]\noptimizer.kwargs.learning_rate = [1e-2, 1e-3]", "model.kwargs.width = [4, -1, 8]"))
    code, out, err = grid.xtrax("sweep", "sweep.toml")
    assert code == 1
    (folder,) = grid.runs()
    told = manifest(folder)
    assert [point["status"] for point in told["points"]] == ["finished", "failed", "finished"]
    assert "1 of 3 points failed: " in err
    assert len(told["ranking"]) == 2
    assert [line.split()[0] for line in out.split("run\n")[1].splitlines()[:3]] == ["1", "2", "-"]


def test_ctrl_c_keeps_what_is_done_and_typed_again_it_goes_on(grid):
    replace(grid, (f"{grid.module}:make_data", f"{grid.module}:Stopping"), ("num_epochs = 1", "num_epochs = 2"))
    replace(grid, ("seed = [7, 8]\n", ""))
    assert grid.xtrax("sweep", "sweep.toml", "--runs-dir", "whole")[0] == 0
    (grid.folder / "stop").touch()
    code, _, err = grid.xtrax("sweep", "sweep.toml")
    assert code == 130
    assert "interrupted in point 1 of 2" in err
    assert "\n  xtrax sweep sweep.toml\n" in err
    (folder,) = grid.runs()
    assert manifest(folder)["status"] == "interrupted"
    assert [point["status"] for point in manifest(folder)["points"]] == ["interrupted", "waiting"]
    (grid.folder / "stop").unlink()
    code, _, err = grid.xtrax("sweep", "sweep.toml")
    assert (code, err) == (0, "")
    whole = grid.folder / "whole" / folder.name
    for mine, other in zip(manifest(folder)["points"], manifest(whole)["points"], strict=True):
        assert mine["metrics"] == other["metrics"]
        same_bits(
            load_run(folder / "points" / mine["run_id"]).state, load_run(whole / "points" / other["run_id"]).state
        )


def test_a_sweep_that_was_killed_goes_on(grid):
    replace(grid, ("num_epochs = 1", "num_epochs = 40"), ("learning_rate = [1e-2, 1e-3]", "learning_rate = [1e-2]"))
    command = [sys.executable, "-c", "import sys; from xtrax.cli import main; sys.exit(main())", "sweep", "sweep.toml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        folder = None
        end = time.monotonic() + 120
        while time.monotonic() < end and not (
            grid.runs() and any(p["status"] == "finished" for p in manifest(grid.runs()[0])["points"])
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    (folder,) = grid.runs()
    points = manifest(folder)["points"]  # whole, whenever it was killed
    assert points[0]["status"] == "finished"
    code, _, err = grid.xtrax("sweep", "sweep.toml")
    assert (code, err) == (0, "")
    assert [point["status"] for point in manifest(folder)["points"]] == ["finished", "finished"]
    assert manifest(folder)["points"][0] == points[0]


def test_without_evaluation_the_loss_of_training_ranks(grid):
    code, _, err = grid.xtrax("sweep", "sweep.toml", "--set", "data.kwargs.evaluate=false", "--set", "metrics={}")
    assert (code, err) == (0, "")
    (folder,) = grid.runs()
    points = {point["run_id"]: point["train_metrics"]["loss"] for point in manifest(folder)["points"]}
    ranked = [points[run_id] for run_id in manifest(folder)["ranking"]]
    assert ranked == sorted(points.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (AXES, "\n[sweep]\n", r"sweep.axes: missing"),
        (AXES, "", r"sweep: missing; list values under [sweep.axes]"),
        (AXES, "\n[sweep.axes]\n", r"sweep.axes: has no axes"),
        ("seed = [7, 8]", "seed = []", r"sweep.axes.seed: has no values"),
        ("seed = [7, 8]", "seed = 7", r"sweep.axes.seed: must be an array of values, found 7"),
        ("seed = [7, 8]", "seed = [7, 7]", r"are the same configuration; give each value once"),
        ("seed = [7, 8]", "seed = [7, -1]", r"seed: must be from 0 to 4294967295, found -1"),
        ("seed = [7, 8]", 'seed = [7, "x"]', r"seed: must be an integer, found the string 'x'"),
        ("seed = [7, 8]", "sede = [7, 8]", r"sede: unknown key; did you mean seed?"),
        ("seed = [7, 8]", "seed.x = [7, 8]", r"sweep.axes: seed.x leads through seed, which is no table"),
        ("seed = [7, 8]", "sweep.mode = [7, 8]", r"sweep.mode is the same for every point"),
        ("learning_rate = [1e-2", "learnin_rate = [1e-2", r"does not take 'learnin_rate'; did you mean learning_rate?"),
        (
            "seed = [7, 8]",
            'optimizer.path = ["optax:sgd", "optax:adm"]',
            r"optax has no 'adm'; did you mean optax:adam?",
        ),
        ("[sweep.axes]", '[sweep]\nmode = "vectorized"\n[sweep.axes]', r"this version has no 'vectorized' sweeps"),
        ("[sweep.axes]", '[sweep]\nmode = "dask"\n[sweep.axes]', r"this version has no 'dask' sweeps"),
        ("[sweep.axes]", '[sweep]\nmode = "fast"\n[sweep.axes]', r"sweep.mode: must be one of 'sequential'"),
        ("[sweep.axes]", '[sweep]\nrank_by = "acuracy"\n[sweep.axes]', r"no metric 'acuracy'; did you mean accuracy?"),
        ("[sweep.axes]", '[sweep]\nrank_by = "f1"\n[sweep.axes]', r"no metric 'f1'; it can be loss, accuracy"),
        ("[sweep.axes]", '[sweep]\ngoal = "high"\n[sweep.axes]', r"sweep.goal: must be one of 'min', 'max'"),
        ("seed = [7, 8]", f"seed = {list(range(6000))}", r"they span 12000 points, and at most 10000 are allowed"),
        ("seed = [7, 8]", "optimizer.kwargs = [{}]", r"optimizer.kwargs.learning_rate set the same key"),
    ],
)
def test_a_faulty_sweep_is_told_and_leaves_nothing(grid, old, new, message):
    if "optimizer.kwargs = [" in new:  # TOML itself refuses both in one table unless one is quoted
        new = '"optimizer.kwargs" = [{}]'
    replace(grid, (old, new))
    before = {path for path in grid.folder.rglob("*") if "__pycache__" not in path.parts}
    code, out, err = grid.xtrax("sweep", "sweep.toml")
    assert (code, out) == (2, ""), err
    assert message in err
    assert "sweep.toml" in err
    assert len(err.splitlines()) <= 2
    assert {path for path in grid.folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_a_fault_of_a_value_is_told_at_the_line_of_its_axis(grid):
    replace(grid, ("seed = [7, 8]", "seed = [7, -1]"))
    line = (grid.folder / "sweep.toml").read_text().splitlines().index("seed = [7, -1]") + 1
    with pytest.raises(ConfigError, match=rf"^sweep.toml:{line}: seed: "):
        load_sweep("sweep.toml")


def test_run_and_resume_and_load_run_refuse_a_sweep(grid):
    code, _, err = grid.xtrax("run", "sweep.toml")
    assert code == 2
    assert "this file describes a sweep; type xtrax sweep sweep.toml" in err
    grid.xtrax("sweep", "sweep.toml", "--set", "sweep.axes={seed=[1]}")
    (folder,) = grid.runs()
    code, _, err = grid.xtrax("resume", folder.name, "--in-place")
    assert code == 2
    assert "is a sweep; go on with it by xtrax sweep" in err
    with pytest.raises(CLIError, match="is a sweep; load one of its points"):
        load_run(folder.name)


def test_two_sweeps_at_once_do_not_share_a_folder(grid):
    grid.xtrax("sweep", "sweep.toml", "--set", "sweep.axes={seed=[1]}")
    (folder,) = grid.runs()
    import fcntl

    with open(folder / ".lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, err = grid.xtrax("sweep", "sweep.toml", "--set", "sweep.axes={seed=[1]}")
    assert code == 2
    assert "is in use by process" in err


def test_a_folder_that_cannot_be_written(grid):
    (grid.folder / "file").touch()
    code, _, err = grid.xtrax("sweep", "sweep.toml", "--runs-dir", "file")
    assert code == 2
    assert "cannot make a run folder" in err
    assert "--runs-dir" in err


def test_points_that_have_no_number_have_no_rank():
    records = [
        {"metrics": {"loss": "nan"}},
        {"metrics": {"loss": 2.0}},
        {"status": "failed"},
        {"metrics": {}, "train_metrics": {"loss": 1.0}},
        {"metrics": {"loss": 2.0}},
    ]
    assert _ranked(records, "loss", maximise=False) == [3, 1, 4]
    assert _ranked(records, "loss", maximise=True) == [1, 4, 3]


def test_columns_have_the_shortest_names_that_differ():
    keys = ["seed", "data.seed", "optimizer.kwargs.learning_rate", "model.kwargs.width", "data.kwargs.width"]
    assert list(_short(keys).values()) == [
        "seed",
        "data.seed",
        "learning_rate",
        "model.kwargs.width",
        "data.kwargs.width",
    ]


def test_run_into_a_program_that_ends_is_saved_quietly(project):
    """`xtrax run train.toml | head -2`: as a Unix tool, it ends without a word; the run can be resumed."""
    program = "import sys; from xtrax.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", "train.toml", "--set", "num_epochs=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        process.stdout.close()
        assert process.wait(120) == 141
        told = process.stderr.read()
        assert not [word for word in ("Traceback", "BrokenPipe", "xtrax:") if word in told], told
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert lines[1].startswith("epoch 1/")
    (folder,) = project.runs()
    told = manifest(folder)
    assert told["status"] == "interrupted"
    assert int(load_run(folder.name).state.step) == told["steps"] > 0
    assert os.listdir(folder / "checkpoints")


def test_the_page_takes_no_text_for_markup():
    page = _page("Sweep <1>", "2 points", ["rank", "name"], [(["1", "<b>&amp;"], "best"), (["-", "x"], "failed")])
    assert "<td>&lt;b&gt;&amp;amp;</td>" in page
    assert "<h1>Sweep &lt;1&gt;</h1>" in page
    assert page.count("<tr") == 3
