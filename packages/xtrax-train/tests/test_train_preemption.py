"""A signal saves, exits, and the resumed run ends in the same bits."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from xtrax.training import Engine, MetricsLog, PreemptionHandler, Trainer, get_checkpoint_manager


class Send:
    """Sends this process a signal after a step."""

    def __init__(self, step, number):
        self.step, self.number = step, number

    def on_step_end(self, state, metrics):
        if metrics.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "code", "k"), [(signal.SIGTERM, 75, 1), (signal.SIGUSR1, 3, 3)])
def test_saves_and_exits(number, code, k, dropout_state, optimizer, array_data, squared, tmp_path, assert_same_bits):
    trainer = Trainer(squared, optimizer, vmap=True)
    whole = Engine(trainer, [MetricsLog(tmp_path / "whole.jsonl")]).fit_sync(dropout_state, array_data, 3)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    handler = PreemptionHandler(exit_code=code)
    ended = []

    class Ended:
        def on_train_end(self, state):
            ended.append(True)

    folder = tmp_path / "checkpoints"
    callbacks = [handler, MetricsLog(tmp_path / "parts.jsonl"), Send(9, number), Ended()]
    with pytest.raises(SystemExit) as caught:
        Engine(trainer, callbacks, steps_per_call=k).fit_sync(dropout_state, array_data, 3, checkpoint_dir=folder)
    assert caught.value.code == code
    assert handler.received == number
    assert not ended
    assert {number: signal.getsignal(number) for number in before} == before
    with get_checkpoint_manager(folder) as manager:
        latest = manager.latest_step()
    assert latest is not None
    assert 9 <= latest < 9 + k
    callbacks = [MetricsLog(tmp_path / "parts.jsonl"), Ended()]
    resumed = Engine(trainer, callbacks).fit_sync(dropout_state, array_data, 3, checkpoint_dir=folder, resume=True)
    assert ended
    assert_same_bits(resumed, whole)
    assert (tmp_path / "parts.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()


def test_without_a_signal_nothing_happens(dropout_state, optimizer, array_data, squared, tmp_path):
    handler = PreemptionHandler()
    before = signal.getsignal(signal.SIGTERM)
    state = Engine(Trainer(squared, optimizer, vmap=True), [handler]).fit_sync(
        dropout_state, array_data, 1, checkpoint_dir=tmp_path
    )
    assert int(state.step) == 7
    assert handler.received is None
    assert signal.getsignal(signal.SIGTERM) is before


def test_handlers_are_put_back_after_an_error(dropout_state, optimizer, array_data, squared, tmp_path):
    class Fail:
        def on_step_end(self, state, metrics):
            assert signal.getsignal(signal.SIGTERM) != before
            raise LookupError

    before = signal.getsignal(signal.SIGTERM)
    engine = Engine(Trainer(squared, optimizer, vmap=True), [PreemptionHandler(), Fail()])
    with pytest.raises(LookupError):
        engine.fit_sync(dropout_state, array_data, 1, checkpoint_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


SCRIPT = textwrap.dedent(
    """
    import sys, time
    import equinox as eqx, jax, numpy as np, optax
    from xtrax.training import ArrayDataModule, Engine, PreemptionHandler, Trainer, init_state

    class Announce:
        def on_step_end(self, state, metrics):
            print(metrics.step, flush=True)
            time.sleep(0.05)

    x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
    data = ArrayDataModule({"inputs": x, "targets": x.sum(1, keepdims=True)}, 4)
    optimizer = optax.adam(1e-2)
    state = init_state(eqx.nn.Linear(3, 1, key=jax.random.key(0)), optimizer, 0)
    engine = Engine(Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True), [PreemptionHandler(), Announce()])
    engine.fit_sync(state, data, 10, checkpoint_dir=sys.argv[1])
    """
)


def test_the_process_exits_with_the_code(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 5:
            process.send_signal(signal.SIGTERM)
            break
    rest = [int(line) for line in process.communicate(timeout=300)[0].split()]
    assert process.returncode == 75
    with get_checkpoint_manager(tmp_path) as manager:
        assert manager.latest_step() == max([5, *rest])


def test_needs_a_folder(dropout_state, optimizer, array_data, squared):
    engine = Engine(Trainer(squared, optimizer, vmap=True), [PreemptionHandler()])
    with pytest.raises(ValueError, match="needs the checkpoint_dir of fit"):
        engine.fit_sync(dropout_state, array_data, 1)


def test_needs_the_main_thread(dropout_state, optimizer, array_data, squared, tmp_path):
    engine = Engine(Trainer(squared, optimizer, vmap=True), [PreemptionHandler()])
    errors = []

    def target():
        try:
            engine.fit_sync(dropout_state, array_data, 1, checkpoint_dir=tmp_path)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"signals": []}, ValueError, "at least one signal"),
        ({"signals": "SIGTERM"}, TypeError, "signals must be a list of signals"),
        ({"signals": [True]}, TypeError, "such as signal.SIGTERM, got True"),
        ({"signals": [9999]}, ValueError, "there is no signal 9999"),
        ({"signals": [signal.SIGKILL]}, ValueError, "SIGKILL cannot be handled"),
        ({"exit_code": 256}, ValueError, "exit_code must be at most 255"),
        ({"exit_code": -1}, ValueError, "exit_code must be at least 0"),
        ({"exit_code": True}, TypeError, "exit_code must be an integer"),
        ({"agree_every": 0}, ValueError, "agree_every must be at least 1"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        PreemptionHandler(**kwargs)
