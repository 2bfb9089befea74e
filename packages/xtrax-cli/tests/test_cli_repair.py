"""Runs that were damaged, disks that are full, and commands that work when they are typed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from xtrax.cli import CLIError, load_run
from xtrax.cli._report import LogFile, logger, typed

SHORT = ["--set", "num_epochs=1"]


def a_run(project, *sets):
    code, _, err = project.xtrax("run", "train.toml", *sets)
    assert (code, err) == (0, "")
    return project.runs()[-1]


def refused(project, *arguments):
    """The error of a command that is refused, of three lines at most."""
    code, _, err = project.xtrax(*arguments)
    assert code == 2, err
    assert err.startswith("xtrax: ")
    assert err.count("\n") <= 3
    assert "Traceback" not in err
    return err


def test_the_best_state_is_loaded_by_best(project):
    checkpoint = "\n[checkpoint]\nevery_epochs = 1\nbest = 'accuracy'\nbest_mode = 'min'\n"
    project.config.write_text(project.config.read_text() + checkpoint)
    folder = a_run(project, "--set", "optimizer.kwargs.learning_rate=0.3", "--set", "num_epochs=4")
    best, last = load_run(folder, best=True), load_run(folder)
    (step,) = (int(entry.name) for entry in (folder / "checkpoints" / "best").iterdir() if entry.name.isdecimal())
    assert int(best.state.step) == step
    assert int(last.state.step) == 12

    def accuracy(run):
        right = [jax.vmap(run.model)(b["inputs"]).argmax(-1) == b["targets"] for b in run.data.eval_iter()]
        return float(np.concatenate(right).mean())

    assert accuracy(best) <= accuracy(last)


def test_best_is_refused_where_there_is_none(project):
    folder = a_run(project, *SHORT)
    with pytest.raises(CLIError, match=r"has no best checkpoint; name an evaluation result as best in \[checkpoint\]"):
        load_run(folder, best=True)
    with pytest.raises(TypeError, match="best must be True or False, got 1"):
        load_run(folder, best=1)


@pytest.mark.parametrize("item", ["progress/metadata", "state/manifest.ocdbt", "state/_METADATA"])
def test_a_truncated_checkpoint_names_run_and_folder(project, item):
    folder = a_run(project, "--set", "checkpoint.every_epochs=1", "--set", "num_epochs=2")
    path = folder / "checkpoints" / "6" / item
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(
        CLIError, match=f"checkpoint of run {folder.name}, in .*checkpoints, cannot be read: .*"
    ) as caught:
        load_run(folder)
    assert "remove the folder 6 there to go on from step 3" in str(caught.value)
    before = (folder / "manifest.json").read_bytes()
    err = refused(project, "resume", folder.name, "--epochs", "1")
    assert folder.name in err or "left nothing" in err
    assert project.runs() == [folder]
    assert (folder / "manifest.json").read_bytes() == before
    shutil.rmtree(folder / "checkpoints" / "6")
    assert int(load_run(folder).state.step) == 3


@pytest.mark.parametrize("name", ["run_id", "kind", "status", "source", "import_paths", "overrides"])
@pytest.mark.parametrize("value", [None, 3])
def test_a_manifest_that_lacks_a_key(project, name, value):
    folder = project.folder / ".xtrax" / "runs" / "abc"
    folder.mkdir(parents=True)
    manifest = {"schema_version": 1, "import_paths": [], "overrides": []}
    manifest |= {"run_id": "abc", "kind": "train", "status": "interrupted", "source": "x.toml"}
    manifest = {**manifest, name: value} if value else {key: manifest[key] for key in manifest if key != name}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for how in (["--in-place"], ["--epochs", "1"]):
        err = refused(project, "resume", "abc", *how)
        assert f"abc/manifest.json has {'3 as' if value else 'no'} {name}" in err
    with pytest.raises(CLIError, match=f"abc/manifest.json has .* {name}"):
        load_run("abc")


def test_a_module_that_raises_what_is_no_exception(project):
    assert "MODULE:odd raised Odd: neither this nor that".replace("MODULE", project.module) in refused(
        project, "run", "train.toml", "--set", "data.factory=MODULE:odd"
    )
    project.code.write_text("class Odd(BaseException):\n    pass\n\n\nraise Odd('early')\n")
    program = "import sys; from xtrax.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", "train.toml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"importing {project.module} failed: Odd: early" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("[checkpoint]", "toml:23: checkpoint: set every_steps, every_minutes, every_epochs or best, or leave"),
        (
            "[checkpoint]\nbest_mode = 'max'",
            "toml:23: checkpoint: set every_steps, every_minutes, every_epochs or best",
        ),
        ("[checkpoint]\nbest = 'acuracy'", "toml:24: checkpoint.best: 'acuracy' is no evaluation result; did you mean"),
        ("loss = 'MODULE:accuracy'", "metrics: loss is the name of the loss itself"),
    ],
)
def test_what_checkpoints_and_metrics_may_be_called_is_checked_first(project, lines, message):
    project.config.write_text(project.config.read_text() + lines.replace("MODULE", project.module) + "\n")
    assert message in refused(project, "run", "train.toml")
    assert project.runs() == []


def test_best_without_evaluation_is_told_before_the_first_step(project):
    sets = ["--set", "checkpoint.best=loss", "--set", "data.kwargs.evaluate=false"]
    err = refused(project, "run", "train.toml", *sets)
    assert "checkpoint.best: 'loss' is no evaluation result; evaluation gives nothing" in err
    assert project.runs() == []


def test_a_model_of_one_example_that_got_a_batch_is_told_of_vmap(project):
    err = refused(project, "run", "train.toml", "--set", "model.vmap=false")
    assert "if it takes one example, set vmap = true in [model]" in err
    err = refused(project, "run", "train.toml", "--set", "metrics.accuracy=MODULE:wrong_shape")
    assert "vmap = true" not in err


def test_a_log_on_a_full_disk_prints_nothing(tmp_path, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "run.log").symlink_to("/dev/full")
    log = LogFile(tmp_path)
    logger.addHandler(log)
    try:
        logger.error("epoch 1", exc_info=ValueError("x"))
    finally:
        logger.removeHandler(log)
        log.close()
    assert not log.is_whole
    assert capsys.readouterr() == ("", "")


def test_a_traceback_that_could_not_be_logged_is_not_said_to_be_there(project, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    opened = LogFile.__init__

    def on_full_disk(self, folder):
        (folder / "run.log").symlink_to("/dev/full")
        opened(self, folder)

    monkeypatch.setattr(LogFile, "__init__", on_full_disk)
    (project.folder / "stop").touch()
    sets = ["--set", "data.factory=MODULE:Stopping", "--set", "data.kwargs={action = 'disk'}"]
    code, _, err = project.xtrax("run", "train.toml", *sets)
    assert code == 1
    assert "Logging error" not in err
    assert "traceback is in" not in err
    assert "--debug shows the traceback; then: xtrax resume" in err
    (folder,) = project.runs()
    assert json.loads((folder / "manifest.json").read_text())["status"] == "failed"


def test_commands_are_told_as_they_are_typed(monkeypatch, tmp_path):
    monkeypatch.delenv("VIRTUAL_ENV_PROMPT", raising=False)
    monkeypatch.delenv("UV", raising=False)
    assert typed("xtrax") == "xtrax"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("UV", "/somewhere/uv")
    for folder in (tmp_path / ".venv" / "bin", tmp_path / "bin"):
        folder.mkdir(parents=True)
        (folder / "uv").write_text("#!/bin/sh\n")
        (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert typed("python") == "python3 -m uv run python"
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / ".venv" / "bin"), str(tmp_path / "bin")]))
    assert typed("xtrax") == "uv run xtrax"
    monkeypatch.setenv("VIRTUAL_ENV_PROMPT", "(.venv)")
    assert typed("xtrax") == "xtrax"


def test_under_uv_the_summary_says_uv(project, monkeypatch):
    monkeypatch.setenv("UV", "/somewhere/uv")
    monkeypatch.delenv("VIRTUAL_ENV_PROMPT", raising=False)
    _, out, _ = project.xtrax("run", "train.toml", *SHORT)
    (folder,) = project.runs()
    assert f" run xtrax resume {folder.name} --epochs 1" in out
    assert " run python   (predict)" in out
