"""Bad input: one or two lines with the fix, the right exit code, no traceback, and nothing half-written."""

import errno
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from xtrax.cli import CLIError, _folder
from xtrax.cli._folder import RunFolder, find_run
from xtrax.cli.config import ConfigError, load_train_config

SHORT = ["--set", "num_epochs=1"]


def refused(project, *arguments, code=2):
    """The error of a command that must leave nothing behind."""
    before = sorted(project.folder.rglob("*"))
    found, _, err = project.xtrax(*arguments)
    assert found == code, err
    assert "Traceback" not in err
    assert err.startswith("xtrax: ")
    after = [path for path in sorted(project.folder.rglob("*")) if "__pycache__" not in path.parts]
    assert after == before
    return err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_epochs = 3", "num_epoch = 3", r"toml:2: num_epoch: unknown key; did you mean num_epochs\?"),
        ("num_epochs = 3", "num_epochs = 0", r"toml:2: num_epochs: must be at least 1, found 0"),
        (
            "num_epochs = 3",
            "num_epochs = true",
            r"toml:2: num_epochs: must be an integer, found the boolean true",
        ),
        ("num_epochs = 3", "num_epochs = = 3", r"toml:2:14: not valid TOML: "),
        ("num_epochs = 3\n", "", r"toml: num_epochs: missing; set it to an integer"),
        ("schema_version = 1\n", "", r"toml: schema_version: missing; write schema_version = 1"),
        ("schema_version = 1", "schema_version = 2", r"toml:1: schema_version: 2 is newer than 1"),
        ("seed = 7", "seed = -1", r"toml:3: seed: must be from 0 to 4294967295, found -1"),
        ("seed = 7", 'kind = "tile"', r"toml:3: kind: must be one of 'train', found the string 'tile'"),
        ("batch_size = 32", "batch_size = 0", r"toml:19: data\.batch_size: must be at least 1, found 0"),
        (
            "optax:adam",
            "optax.adam",
            r"toml:11: .*must be module:symbol, .* found 'optax\.adam'; did you mean optax:adam\?",
        ),
        ("optax:adam", "adam", r"toml:11: optimizer\.path: must be module:symbol, such as optax:adam, found 'adam'$"),
        ("MODULE:accuracy", "a.b.c", r"metrics: accuracy must be .* found 'a\.b\.c'; did you mean a\.b:c\?"),
        ("seed = 7", "seed = 7\nseed = 8", r"toml:4:9: not valid TOML: the key seed is set twice; keep one"),
        ("optax:adam", "optax:adm", r"toml:11: optimizer\.path: optax has no 'adm'; did you mean optax:adam\?"),
        (
            "optax:adam",
            "optaxx:adam",
            r"toml:11: optimizer\.path: there is no module 'optaxx'; did you mean optax\?",
        ),
        (
            "learning_rate",
            "learnin_rate",
            r"toml:12: .*does not take 'learnin_rate'; did you mean learning_rate",
        ),
        ("{learning_rate = 1e-2}", "{}", r"toml:12: optimizer\.kwargs: optax:adam.* missing .*'learning_rate'"),
        ("{learning_rate = 1e-2}", "3", r"toml:12: optimizer\.kwargs: must be a table, found the integer 3"),
        ("width = 8", 'width = "8"', r"toml:5: model: .*:make raised .*Error: .* \(.*\.py:\d+, in make\)"),
        (
            "[loss]\npath",
            "[loss]\nkwargs.axes = 1\npath",
            r"loss\.kwargs\.axes: .* does not take 'axes'; did you mean axis\?",
        ),
        ("MODULE:make_data", "MODULE:no_data", r"data: .*no_data returned a list, which has no train_iter\(\)"),
        ("MODULE:make_data", "MODULE:exit_now", r"data: .*exit_now raised SystemExit: usage: nothing"),
        ("MODULE:make_data", "MODULE:NUMBER", r"toml:18: data\.factory: .*NUMBER is not callable"),
        (
            "batch_size = 32",
            "batch_size = 32\nkwargs.seed = 3",
            r"data\.kwargs\.seed: is passed by xtrax; set data\.seed",
        ),
        ("= {learning_rate = 1e-2}", "= {}\n[x]", r"x: unknown key; allowed: "),
        (
            "MODULE:accuracy",
            "MODULE:make_tuple",
            r"metrics\.accuracy: .*cannot be called with \(predictions, targets\)",
        ),
        ("MODULE:accuracy", "accuracy", r"metrics: accuracy must be module:symbol"),
    ],
)
def test_a_faulty_config_is_told_by_line(project, old, new, message):
    text = project.config.read_text().replace(project.module, "MODULE")
    assert old in text
    project.config.write_text(text.replace(old, new).replace("MODULE", project.module))
    err = refused(project, "run", "train.toml")
    assert re.search(message, err), err
    assert err.count("\n") <= 2


def test_all_faults_are_told_at_once(project):
    text = project.config.read_text()
    for old, new in (("optax:adam", "optaxx:adam"), ("make_data", "make_dta"), (":accuracy", ":acuracy")):
        text = text.replace(old, new)
    project.config.write_text(text)
    err = refused(project, "run", "train.toml")
    assert len(err.splitlines()) == 3
    for word in ("did you mean optax?", ":make_data?", ":accuracy?"):
        assert word in err
    with pytest.raises(ConfigError):
        load_train_config("train.toml", ["seed=-1"])


def test_a_missing_file_a_folder_and_a_typo(project):
    assert "xyz: no such file; that folder has train.toml" in refused(project, "run", "xyz")
    assert "trian.toml: no such file; did you mean train.toml?" in refused(project, "run", "trian.toml")
    assert "is a folder" in refused(project, "run", ".")


def test_a_data_file_cut_short(project):
    path = project.folder / "data.npz"
    np.savez(path, inputs=np.zeros((50, 2), "float32"), targets=np.zeros(50, "int32"))
    sets = ["--set", "data.factory=MODULE:from_file", "--set", "data.kwargs={path='data.npz'}", *SHORT]
    assert project.xtrax("run", "train.toml", *sets)[0] == 0
    (good,) = project.runs()
    path.write_bytes(path.read_bytes()[:200])
    err = refused(project, "run", "train.toml", *sets)
    assert re.search(r"data: \w+:from_file raised \w+: .*\(project\d+\.py:\d+, in from_file\)", err)
    assert project.runs() == [good]
    path.unlink()
    assert "No such file or directory: 'data.npz'" in refused(project, "run", "train.toml", *sets)


def test_a_module_that_fails_while_it_is_imported(project):
    project.code.write_text("import numpy as np\n\nTABLE = np.load('nowhere.npy')\n" + project.code.read_text())
    err = refused(project, "run", "train.toml")
    assert f"importing {project.module} failed: FileNotFoundError" in err
    assert f"({project.module}.py:3)" in err
    code, _, err = project.xtrax("run", "train.toml", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "numpy" in err


def test_what_fails_before_the_first_step_exits_2_and_leaves_no_folder(project):
    err = refused(project, "run", "train.toml", "--set", "metrics.accuracy=MODULE:wrong_shape")
    assert "left nothing" in err
    assert "metric 'accuracy' must have shape () or (32,), one value per example, got (32, 2)" in err
    err = refused(project, "run", "train.toml", "--set", "model.vmap=false")
    assert "left nothing" in err
    (project.folder / "stop").touch()
    sets = ["data.factory=MODULE:Stopping", "data.kwargs={epoch = 0, batch = 0, action = 'error'}"]
    err = refused(project, "run", "train.toml", *[part for each in sets for part in ("--set", each)])
    assert "ValueError: bad row 7" in err


@pytest.mark.parametrize(("action", "words"), [("error", "ValueError: bad row 7"), ("disk", "free some space")])
def test_what_fails_later_exits_1_and_can_be_resumed(project, action, words):
    sets = ["data.factory=MODULE:Stopping", f"data.kwargs={{action = '{action}'}}"]
    (project.folder / "stop").touch()
    code, _, err = project.xtrax("run", "train.toml", *[part for each in sets for part in ("--set", each)])
    assert code == 1
    assert words in err
    assert "Traceback" not in err
    (folder,) = project.runs()
    assert "failed in epoch 2, after step 4" in err
    assert f"xtrax resume {folder.name} --in-place" in err
    assert len(err.splitlines()) == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert "Traceback" in (folder / "run.log").read_text()
    (project.folder / "stop").unlink()
    assert project.xtrax("resume", folder.name, "--in-place")[0] == 0
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"


def test_a_folder_that_cannot_be_written(project):
    (project.folder / "file").touch()
    err = refused(project, "run", "train.toml", "--runs-dir", "file/runs")
    assert "cannot make a run folder: file" in err
    assert "--runs-dir" in err
    if os.geteuid():
        (project.folder / "locked").mkdir(mode=0o500)
        assert "Permission denied" in refused(project, "run", "train.toml", "--runs-dir", "locked/runs")


def test_a_full_disk_before_training_leaves_nothing(project, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_folder, "write_json_atomic", full)
    assert "No space left on device" in refused(project, "run", "train.toml")


def test_a_full_disk_in_the_end_is_told_even_if_the_manifest_cannot_be_written(project, monkeypatch):
    (project.folder / "stop").touch()
    write = _folder.write_json_atomic

    def full_once_failed(path, value):
        if value["status"] == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, value)

    monkeypatch.setattr(_folder, "write_json_atomic", full_once_failed)
    sets = ["--set", "data.factory=MODULE:Stopping", "--set", "data.kwargs={action = 'disk'}"]
    code, _, err = project.xtrax("run", "train.toml", *sets)
    assert code == 1
    assert "the manifest" not in err.splitlines()[0]
    assert "manifest could not be brought up to date" in err


@pytest.mark.parametrize("run_id", ["../runs", "/etc", "a/b", "..", ".", "", "a\0b", "~"])
def test_a_run_id_that_leaves_the_folder_is_refused(project, run_id):
    assert "is not a run id" in refused(project, "resume", run_id, "--epochs", "1")
    with pytest.raises(CLIError, match="is not a run id"):
        find_run(project.folder, run_id)


def test_resume_tells_what_there_is(project):
    assert "there is no run 'abc' in .xtrax/runs; it holds no runs" in refused(project, "resume", "abc", "--in-place")
    project.xtrax("run", "train.toml", *SHORT)
    (folder,) = project.runs()
    assert f"did you mean {folder.name}?" in refused(project, "resume", folder.name[:-1], "--epochs", "1")
    assert f"it holds {folder.name}" in refused(project, "resume", "zzz", "--epochs", "1")
    err = refused(project, "resume", folder.name, "--in-place")
    assert f"run {folder.name} is finished; for more: xtrax resume {folder.name} --epochs N" in err


@pytest.mark.parametrize("how", [["--epochs", "1"], ["--in-place"]])
def test_resume_with_code_that_no_longer_fits_changes_nothing(project, how):
    project.config.write_text(project.config.read_text().replace("make_data", "Stopping"))
    (project.folder / "stop").touch()
    assert project.xtrax("run", "train.toml")[0] == 130
    (folder,) = project.runs()
    config = folder / "config.toml"
    text = config.read_text()
    config.write_text(text.replace("width = 8", "width = 9"))
    before = (folder / "manifest.json").read_bytes()
    code, _, err = project.xtrax("resume", folder.name, *how)
    assert code == 2
    assert "layers[0].weight is float32[8, 2] in the checkpoint, float32[9, 2] in the template" in err
    assert project.runs() == [folder]
    assert (folder / "manifest.json").read_bytes() == before
    config.write_text(text)
    (project.folder / "stop").unlink()
    assert project.xtrax("resume", folder.name, *how)[0] == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 2}', ""])
def test_a_manifest_that_is_not_one(project, text):
    project.xtrax("run", "train.toml", *SHORT)
    (folder,) = project.runs()
    (folder / "manifest.json").write_text(text)
    err = refused(project, "resume", folder.name, "--epochs", "1")
    assert "manifest.json" in err


def test_a_run_in_use_is_not_taken_over(project):
    config, _ = load_train_config("train.toml")
    about = {"kind": "train", "source": "train.toml", "overrides": [], "import_paths": []}
    folder = RunFolder.create("runs", config, b"", about)
    with pytest.raises(CLIError, match=rf"in use by process {os.getpid()}"):
        RunFolder.reopen(folder.path)
    folder.close()
    again = RunFolder.reopen(folder.path)
    again.close()
    assert again.manifest["run_id"] == folder.path.name


def test_runs_that_start_at_once_share_no_folder(project):
    config, _ = load_train_config("train.toml")

    def start(number):
        folder = RunFolder.create("a/b/runs", config, b"x", {"number": number})
        if number % 2:
            folder.discard()  # removes parents that are empty, under the feet of the others
            return None
        folder.close()
        return folder.path

    with ThreadPoolExecutor(16) as pool:
        paths = [path for path in pool.map(start, range(64)) if path is not None]
    assert len(set(paths)) == 32
    numbers = [json.loads((path / "manifest.json").read_text())["number"] for path in paths]
    assert numbers == list(range(0, 64, 2))
    assert sorted(path.name for path in (project.folder / "a/b/runs").iterdir()) == sorted(path.name for path in paths)
