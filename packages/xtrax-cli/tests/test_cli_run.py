"""`xtrax run`, `xtrax resume` and `load_run`: what they leave, and that stopping changes nothing."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zarr

from xtrax.cli import CLIError, load_run
from xtrax.training import Engine, Trainer, init_state


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def same_bits(a, b):
    leaves_a, leaves_b = (jax.tree.leaves(eqx.filter(state, eqx.is_array)) for state in (a, b))
    assert len(leaves_a) == len(leaves_b) > 4
    for x, y in zip(leaves_a, leaves_b, strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def rows(folder):
    root = zarr.open_group(str(folder / "metrics.zarr"), mode="r")
    return {
        f"{kind}/{name}": np.asarray(array[:]).tolist()
        for kind, group in root.groups()
        for name, array in group.arrays()
    }


def test_a_run_leaves_a_manifest_a_config_checkpoints_metrics_and_a_log(project):
    code, out, err = project.xtrax("run", "train.toml")
    assert (code, err) == (0, "")
    (folder,) = project.runs()
    assert re.fullmatch(r"[0-9a-f]{12}", folder.name)
    said = manifest(folder)
    assert said["status"] == "finished"
    assert said["kind"] == "train"
    assert said["import_paths"] == [str(project.folder)] * 2
    assert said["config"]["optimizer"] == {"path": "optax:adam", "kwargs": {"learning_rate": 0.01}}
    assert said["config"]["seed"] == 7
    assert said["provenance"]["versions"]["jax"] == jax.__version__
    assert said["provenance"]["git"]["sha"] == "unknown"
    assert said["compiles"] == {"train": 1, "eval": 1}
    assert said["steps"] == 9
    assert (folder / "config.toml").read_bytes() == project.config.read_bytes()
    assert re.findall(r"epoch (\d)/3, step (\d): .*evaluation: .*accuracy", (folder / "run.log").read_text()) == [
        ("1", "3"),
        ("2", "6"),
        ("3", "9"),
    ]
    assert rows(folder)["train/step"] == list(range(1, 10))
    assert rows(folder)["eval/accuracy"][-1] == said["metrics"]["accuracy"]
    for word in (
        f"eval accuracy      {said['metrics']['accuracy']:.4g}",
        "wall time",
        "1 for training, 1 for evaluation",
        f"xtrax resume {folder.name} --epochs 3",
        f"load_run('{folder.name}')",
        "jax.vmap(run.model)",
    ):
        assert word in out
    assert "\x1b" not in out
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]


def test_the_result_is_what_the_same_objects_give_in_python(project):
    project.xtrax("run", "train.toml")
    (folder,) = project.runs()
    loaded = load_run(folder.name)
    module = sys.modules[project.module]
    optimizer = optax.adam(1e-2)
    trainer = Trainer(optax.softmax_cross_entropy_with_integer_labels, optimizer, vmap=True)
    key = jax.random.fold_in(jax.random.key(7), 0x6D6F64)
    state = init_state(module.make(8, key, rate=0.1), optimizer, 7)
    engine = Engine(trainer, metrics={"accuracy": module.accuracy})
    state = engine.fit_sync(state, module.make_data(32, 7), 3)
    same_bits(loaded.state, state)
    assert manifest(folder)["metrics"] == engine.history[-1]["eval"]


def test_load_run_gives_a_model_that_predicts_as_the_summary_says(project):
    project.xtrax("run", "train.toml")
    (folder,) = project.runs()
    by_id, by_path = load_run(folder.name), load_run(folder)
    same_bits(by_id.state, by_path.state)
    batches = list(by_id.data.eval_iter())
    right = np.concatenate(
        [
            np.asarray(jax.vmap(by_id.model)(batch["inputs"])).argmax(-1) == batch["targets"]  # dropout is off
            for batch in batches
        ]
    )
    assert right.mean() == pytest.approx(manifest(folder)["metrics"]["accuracy"], abs=1e-6)
    assert by_id.config.num_epochs == 3
    assert by_id.state.model.layers[2].inference is False


def test_the_same_config_twice_gets_a_suffix_and_other_values_another_id(project):
    project.xtrax("run", "train.toml", "--set", "num_epochs=1")
    project.xtrax("run", "train.toml", "--set", "num_epochs=1", "--set", "schema_version=1")
    project.xtrax("run", "train.toml", "--set", "num_epochs=1", "--set", "optimizer.kwargs.learning_rate=0.5")
    first, second, third = (folder.name for folder in project.runs())
    assert second == f"{first}-2"
    assert third[:12] != first
    assert load_run(third).config.optimizer.kwargs == {"learning_rate": 0.5}
    same_bits(load_run(first).state, load_run(second).state)


@pytest.mark.parametrize(("epoch", "batch"), [(0, 1), (2, 2)])
def test_ctrl_c_and_resume_in_place_end_in_the_same_bits(project, epoch, batch):
    project.config.write_text(project.config.read_text().replace("make_data", "Stopping"))
    where = ["--set", f"data.kwargs.epoch={epoch}", "--set", f"data.kwargs.batch={batch}"]
    assert project.xtrax("run", "train.toml", *where)[0] == 0
    (project.folder / "stop").touch()
    code, _, err = project.xtrax("run", "train.toml", *where)
    assert code == 130
    whole, stopped = project.runs()
    assert f"xtrax resume {stopped.name} --in-place" in err
    assert "Traceback" not in err
    assert manifest(stopped)["status"] == "interrupted"
    assert manifest(stopped)["steps"] == 3 * epoch + batch + 1
    (project.folder / "stop").unlink()
    code, _, err = project.xtrax("resume", stopped.name, "--in-place")
    assert (code, err) == (0, "")
    assert len(project.runs()) == 2
    assert manifest(stopped)["status"] == "finished"
    assert len(manifest(stopped)["resumed"]) == 1
    assert manifest(stopped)["metrics"] == manifest(whole)["metrics"]
    same_bits(load_run(whole.name).state, load_run(stopped.name).state)
    assert rows(stopped) == rows(whole)


def test_resume_epochs_goes_on_in_a_sibling_as_if_it_had_been_one_run(project):
    project.xtrax("run", "train.toml")
    project.xtrax("run", "train.toml", "--set", "num_epochs=5")
    short, long = project.runs()
    before = {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
    code, _, err = project.xtrax("resume", short.name, "--epochs", "2")
    assert (code, err) == (0, "")
    (sibling,) = set(project.runs()) - {short, long}
    assert sibling.name == f"{long.name}-2"
    assert manifest(sibling)["parent"] == short.name
    assert manifest(sibling)["config"]["num_epochs"] == 5
    assert load_run(sibling.name).config == load_run(long.name).config
    same_bits(load_run(sibling.name).state, load_run(long.name).state)
    assert rows(sibling) == rows(long)
    assert {path: path.read_bytes() for path in short.rglob("*") if path.is_file()} == before


def test_epochs_after_an_interruption_count_from_the_last_checkpoint(project):
    project.config.write_text(project.config.read_text().replace("make_data", "Stopping"))
    (project.folder / "stop").touch()
    assert project.xtrax("run", "train.toml")[0] == 130
    (stopped,) = project.runs()
    (project.folder / "stop").unlink()
    assert project.xtrax("resume", stopped.name, "--epochs", "1")[0] == 0
    (sibling,) = set(project.runs()) - {stopped}
    assert manifest(sibling)["config"]["num_epochs"] == 2
    assert manifest(sibling)["steps"] == 6
    assert manifest(stopped)["status"] == "interrupted"


def test_a_run_without_evaluation_or_metrics(project):
    project.config.write_text(project.config.read_text().split("[metrics]")[0])
    code, out, err = project.xtrax("run", "train.toml", "--set", "data.kwargs.evaluate=false")
    assert (code, err) == (0, "")
    (folder,) = project.runs()
    assert manifest(folder)["metrics"] == {}
    assert "0 for evaluation" in out
    assert "train_iter" in out


def test_a_model_with_state_and_a_model_that_takes_a_seed(project):
    project.code.write_text(
        project.code.read_text()
        + """
class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self, seed):
        self.norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        self.linear = eqx.nn.Linear(2, 2, key=jax.random.key(seed))

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.linear(x), state


def make_normed(seed):
    return eqx.nn.make_with_state(Normed)(seed)
"""
    )
    sets = ["--set", "model.path=MODULE:make_normed", "--set", "model.kwargs={}"]
    code, _, err = project.xtrax("run", "train.toml", *sets)
    assert (code, err) == (0, "")
    (folder,) = project.runs()
    loaded = load_run(folder.name)
    assert "model_state" in loaded.state.extras
    code, _, err = project.xtrax(
        "run", "train.toml", "--set", "model.path=MODULE:make_normed", "--set", "model.kwargs={seed=3}"
    )
    assert (code, err) == (0, "")
    other = load_run(next(run for run in project.runs() if run != folder).name)
    assert not np.array_equal(other.state.model.linear.weight, loaded.state.model.linear.weight)


def test_steps_per_call_changes_no_bit(project):
    project.xtrax("run", "train.toml")
    project.xtrax("run", "train.toml", "--set", "steps_per_call=3")
    one, three = project.runs()
    same_bits(load_run(one.name).state, load_run(three.name).state)


def test_load_run_tells_what_is_wrong(project):
    with pytest.raises(CLIError, match=r"there is no run 'abc' in \.xtrax/runs; it holds no runs"):
        load_run("abc")
    with pytest.raises(CLIError, match="not the folder of a run"):
        load_run(project.folder)
    with pytest.raises(TypeError, match="run_id_or_path must be a run id or a path, got 3"):
        load_run(3)
    project.xtrax("run", "train.toml", "--set", "num_epochs=1")
    (folder,) = project.runs()
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("width = 8", "width = 9"))
    with pytest.raises(ValueError, match=r"layers\[0\]\.weight is float32\[8, 2\] in the checkpoint, float32\[9, 2\]"):
        load_run(folder.name)


def read_until(terminal, wanted, seconds=120):
    """What a process writes to a terminal, until it has written `wanted` or ends."""
    text, end = "", time.monotonic() + seconds
    while wanted not in text and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # the process has closed its side
                break
    return text


def test_a_terminal_gets_a_bar_and_a_real_ctrl_c_says_how_to_go_on(project):
    project.config.write_text(project.config.read_text().replace("num_epochs = 3", "num_epochs = 1_000_000"))
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-c", "import sys; from xtrax.cli import main; sys.exit(main())", "run", "train.toml"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        text = read_until(terminal, "epoch 2/")
        process.send_signal(signal.SIGINT)
        text += read_until(terminal, "--in-place")
        assert process.wait(60) == 130, text
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    (folder,) = project.runs()
    assert "\x1b[" in text
    assert "Traceback" not in text
    assert f"xtrax resume {folder.name} --in-place" in text
    assert manifest(folder)["status"] == "interrupted"
    assert int(load_run(folder.name).state.step) == manifest(folder)["steps"]
