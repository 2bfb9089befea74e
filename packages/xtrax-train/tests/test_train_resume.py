"""A run that stops anywhere and is resumed ends in the same bits as one that never stopped."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.training import Checkpoint, Engine, MetricsLog, Trainer, get_checkpoint_manager, load_progress


class StopAt:
    """Stops at a step: by an error, by Ctrl-C, or by asking."""

    def __init__(self, step, how):
        self.step, self.how = step, how

    def attach(self, fit):
        self.fit = fit

    def on_step_end(self, state, metrics):
        if metrics.step == self.step:
            if self.how == "error":
                raise LookupError("planted")
            if self.how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.02)
            if self.how == "ask":
                self.fit.request_stop()


def read_log(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    root = zarr.open_group(str(path), mode="r")
    return {
        f"{kind}/{name}": np.asarray(array[:]).tolist()
        for kind, group in root.groups()
        for name, array in group.arrays()
    }


def run(folder, state, data, optimizer, *, k=1, stop=None, resume=False, log="log.jsonl", epochs=3):
    trainer = Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True)
    callbacks = [MetricsLog(folder / log), *([] if stop is None else [stop])]
    engine = Engine(trainer, callbacks, metrics={"off": lambda p, t: abs(p - t)[:, 0]}, steps_per_call=k)
    final = engine.fit_sync(state, data, epochs, checkpoint_dir=folder / "checkpoints", resume=resume)
    return final, engine.history, read_log(folder / log)


@pytest.mark.parametrize(
    ("which", "how", "log"),
    [
        ("array_data", "error", "log.zarr"),
        ("array_data", "interrupt", "log.jsonl"),
        ("ragged_data", "interrupt", "log.zarr"),
        ("ragged_data", "ask", "log.jsonl"),
    ],
)
def test_stopped_in_the_middle_of_an_epoch(
    which, how, log, dropout_state, optimizer, tmp_path, request, assert_same_bits
):
    data = request.getfixturevalue(which)
    expected, history, rows = run(tmp_path / "whole", dropout_state, data, optimizer, log=log)
    error = {"error": LookupError, "interrupt": KeyboardInterrupt, "ask": None}[how]
    stop = StopAt(10, how)
    if error is None:
        partial, _, _ = run(tmp_path / "parts", dropout_state, data, optimizer, stop=stop, log=log)
        assert int(partial.step) == 10
    else:
        with pytest.raises(error):
            run(tmp_path / "parts", dropout_state, data, optimizer, stop=stop, log=log)
    with get_checkpoint_manager(tmp_path / "parts" / "checkpoints") as manager:
        progress = load_progress(manager)
    assert (progress["epoch"], progress["batches"]) == (1, 3)
    resumed = run(tmp_path / "parts", dropout_state, data, optimizer, resume=True, log=log)
    assert_same_bits(resumed[0], expected)
    assert resumed[1] == history
    assert resumed[2] == rows


def test_stopped_at_any_step_with_any_grouping(
    dropout_state, optimizer, ragged_data, tmp_path_factory, assert_same_bits
):
    expected, history, rows = run(tmp_path_factory.mktemp("whole"), dropout_state, ragged_data, optimizer)

    @settings(max_examples=5, deadline=None)
    @given(stop=st.integers(1, 20), before=st.sampled_from([1, 3]), after=st.sampled_from([1, 3]))
    def check(stop, before, after):
        folder = tmp_path_factory.mktemp("parts")
        with pytest.raises(LookupError):
            run(folder, dropout_state, ragged_data, optimizer, k=before, stop=StopAt(stop, "error"))
        resumed = run(folder, dropout_state, ragged_data, optimizer, k=after, resume=True)
        assert_same_bits(resumed[0], expected)
        assert resumed[1] == history
        assert resumed[2] == rows

    check()


def test_an_error_in_the_middle_of_a_call_loses_no_rows(dropout_state, optimizer, array_data, tmp_path):
    whole = run(tmp_path / "whole", dropout_state, array_data, optimizer, epochs=1)
    with pytest.raises(LookupError):
        run(tmp_path / "parts", dropout_state, array_data, optimizer, k=4, stop=StopAt(2, "error"), epochs=1)
    resumed = run(tmp_path / "parts", dropout_state, array_data, optimizer, k=4, resume=True, epochs=1)
    assert resumed[2] == whole[2]


def test_an_iterator_with_a_state_is_not_read_from_the_start(dropout_state, optimizer, tmp_path):
    pulled = []

    class Numbered:
        def __init__(self):
            self.i = 0

        def __iter__(self):
            return self

        def __next__(self):
            if self.i == 6:
                raise StopIteration
            pulled.append(self.i)
            x = np.full((2 if self.i < 3 else 4, 3), self.i, "float32")
            self.i += 1
            return {"inputs": x, "targets": x[:, :1]}

        def get_state(self):
            return {"i": self.i}

        def set_state(self, state):
            self.i = state["i"]

    class Data:
        def train_iter(self):
            return Numbered()

    with pytest.raises(LookupError):
        run(tmp_path, dropout_state, Data(), optimizer, stop=StopAt(3, "error"), k=2, epochs=1)
    # The fourth batch, of another shape, was looked at to end the group; it is not done, and is read again.
    assert pulled == [0, 1, 2, 3]
    pulled.clear()
    run(tmp_path, dropout_state, Data(), optimizer, resume=True, epochs=1)
    assert pulled == [3, 4, 5]


def test_more_epochs_later(dropout_state, optimizer, array_data, tmp_path, assert_same_bits):
    expected, history, rows = run(tmp_path / "whole", dropout_state, array_data, optimizer, epochs=3)
    run(tmp_path / "parts", dropout_state, array_data, optimizer, epochs=2)
    resumed = run(tmp_path / "parts", dropout_state, array_data, optimizer, epochs=3, resume=True)
    assert_same_bits(resumed[0], expected)
    assert resumed[1] == history
    assert resumed[2] == rows


def test_resuming_what_is_complete_changes_nothing(dropout_state, optimizer, array_data, tmp_path, assert_same_bits):
    expected, history, rows = run(tmp_path, dropout_state, array_data, optimizer)
    resumed = run(tmp_path, dropout_state, array_data, optimizer, resume=True)
    assert_same_bits(resumed[0], expected)
    assert resumed[1] == history
    assert resumed[2] == rows


def test_hooks_of_a_resumed_run(dropout_state, optimizer, array_data, tmp_path, squared):
    calls = []

    class Watch:
        def on_train_start(self, state):
            calls.append(("train_start", int(state.step)))

        def on_resume(self, state):
            calls.append(("resume", int(state.step)))

        def on_epoch_start(self, state, epoch):
            calls.append(("epoch_start", epoch))

    with pytest.raises(LookupError):
        run(tmp_path, dropout_state, array_data, optimizer, stop=StopAt(10, "error"))
    engine = Engine(Trainer(squared, optimizer, vmap=True), [Watch()])
    engine.fit_sync(dropout_state, array_data, 2, checkpoint_dir=tmp_path / "checkpoints", resume=True)
    assert calls == [("train_start", 10), ("resume", 10), ("epoch_start", 1)]


def test_a_folder_in_use_is_not_overwritten(dropout_state, optimizer, array_data, tmp_path):
    run(tmp_path, dropout_state, array_data, optimizer, epochs=1)
    with pytest.raises(FileExistsError, match="resume=True"):
        run(tmp_path, dropout_state, array_data, optimizer, epochs=1)


def test_nothing_to_resume(dropout_state, optimizer, array_data, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        run(tmp_path, dropout_state, array_data, optimizer, resume=True)
    assert not (tmp_path / "checkpoints").exists()


def test_data_that_has_become_shorter(dropout_state, optimizer, ragged_data, tmp_path):
    with pytest.raises(LookupError):
        run(tmp_path, dropout_state, ragged_data, optimizer, stop=StopAt(6, "error"))
    ragged_data.batches = 4
    with pytest.raises(ValueError, match="4 batches in epoch 0"):
        run(tmp_path, dropout_state, ragged_data, optimizer, resume=True)


def test_an_error_before_the_first_step_leaves_no_checkpoint(dropout_state, optimizer, array_data, tmp_path):
    class Broken:
        def on_train_start(self, state):
            raise LookupError

    with pytest.raises(LookupError):
        run(tmp_path, dropout_state, array_data, optimizer, stop=Broken())
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]


SCRIPT = textwrap.dedent(
    """
    import sys, time, pathlib
    import equinox as eqx, jax, numpy as np, optax
    from xtrax.training import ArrayDataModule, Checkpoint, Engine, MetricsLog, Trainer, init_state

    class Noisy(eqx.Module):
        linear: eqx.nn.Linear
        def __call__(self, x, key):
            return self.linear(x) + 0.1 * jax.random.normal(key, (1,))

    class Announce:
        def on_step_end(self, state, metrics):
            print(metrics.step, flush=True)
            time.sleep(float(sys.argv[3]))

    folder, resume = pathlib.Path(sys.argv[1]), sys.argv[2] == "resume"
    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    arrays = {"inputs": x, "targets": x.sum(1, keepdims=True)}
    data = ArrayDataModule(arrays, 4, eval_arrays=arrays)
    optimizer = optax.adam(1e-2)
    state = init_state(Noisy(eqx.nn.Linear(3, 1, key=jax.random.key(0))), optimizer, 0)
    callbacks = [Checkpoint(every_steps=3), MetricsLog(folder / "log.zarr"), Announce()]
    trainer = Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True)
    engine = Engine(trainer, callbacks)
    final = engine.fit_sync(state, data, 3, checkpoint_dir=folder / "checkpoints", resume=resume)
    leaves = [np.asarray(jax.random.key_data(final.key)), *jax.tree.leaves((final.model, final.opt_state))]
    np.savez(folder / "final.npz", *[np.asarray(leaf) for leaf in leaves])
    """
)


def test_killed_by_sigkill(tmp_path):
    def start(folder, mode, pause):
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-c", SCRIPT, str(folder), mode, pause]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    whole = start(tmp_path / "whole", "new", "0")
    killed = start(tmp_path / "killed", "new", "0.05")
    assert killed.stdout is not None
    # Step 17 is in the middle of the second epoch, and past the checkpoint of step 12 at least.
    for line in killed.stdout:
        if int(line) == 17:
            killed.kill()
            break
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "final.npz").exists()
    resumed = start(tmp_path / "killed", "resume", "0")
    steps = [int(line) for line in resumed.communicate(timeout=300)[0].split()]
    whole.communicate(timeout=300)
    assert resumed.returncode == whole.returncode == 0
    assert 13 <= steps[0] <= 17
    assert steps == list(range(steps[0], 31))
    a, b = np.load(tmp_path / "whole" / "final.npz"), np.load(tmp_path / "killed" / "final.npz")
    assert all(a[name].tobytes() == b[name].tobytes() for name in a.files)
    assert read_log(tmp_path / "whole" / "log.zarr") == read_log(tmp_path / "killed" / "log.zarr")


def test_checkpoint_every_steps_is_resumed_from(dropout_state, optimizer, array_data, tmp_path, squared):
    trainer = Trainer(squared, optimizer, vmap=True)
    engine = Engine(trainer, [Checkpoint(every_steps=7)])
    engine.fit_sync(dropout_state, array_data, 1, checkpoint_dir=tmp_path)
    # The last batch of the epoch was saved before its evaluation, which a resumed run makes up for.
    engine.fit_sync(dropout_state, array_data, 1, checkpoint_dir=tmp_path, resume=True)
    assert len(engine.history) == 1
    assert engine.history[0]["eval"] is not None


def test_ctrl_c_of_a_coroutine_saves_too(dropout_state, optimizer, array_data, tmp_path, squared, assert_same_bits):
    class Press:
        def on_step_end(self, state, metrics):
            if metrics.step == 5:
                os.kill(os.getpid(), signal.SIGINT)
            # asyncio cancels the coroutine when it next waits, which it does every 50 ms.
            time.sleep(0.06 if metrics.step >= 5 else 0)

    trainer = Trainer(squared, optimizer, vmap=True)
    engine = Engine(trainer, [Press()])
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(engine.fit(dropout_state, array_data, 3, checkpoint_dir=tmp_path))
    with get_checkpoint_manager(tmp_path) as manager:
        assert manager.latest_step() == 5
    resumed = Engine(trainer).fit_sync(dropout_state, array_data, 3, checkpoint_dir=tmp_path, resume=True)
    assert_same_bits(resumed, Engine(trainer).fit_sync(dropout_state, array_data, 3))
