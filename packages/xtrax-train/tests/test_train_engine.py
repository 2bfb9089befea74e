"""Engine.fit and Engine.eval."""

import asyncio
import logging
import os
import signal
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xtrax.training import (
    ArrayDataModule,
    Callback,
    Engine,
    SafetyManager,
    SafetyTrainStep,
    StepMetrics,
    Trainer,
    init_state,
)


class Recorder:
    """Writes down every hook that is called, with the step, epoch and loss that it can see."""

    def __init__(self, state_every=None):
        self.calls = []
        self.losses = []
        self.states = {}
        if state_every:
            self.state_every = state_every

    def on_train_start(self, state):
        self.calls.append(("train_start", int(state.step)))

    def on_train_end(self, state):
        self.calls.append(("train_end", int(state.step)))

    def on_epoch_start(self, state, epoch):
        self.calls.append(("epoch_start", epoch))

    def on_epoch_end(self, state, epoch):
        self.calls.append(("epoch_end", epoch))

    def on_step_start(self, state):
        self.calls.append(("step_start", int(state.step)))

    def on_step_end(self, state, metrics):
        self.calls.append(("step_end", metrics.step))
        self.losses.append(metrics["loss"])
        self.states[int(state.step)] = np.asarray(state.model.first.weight).copy()

    def on_eval_end(self, state, epoch, metrics):
        self.calls.append(("eval_end", epoch))


class Batches:
    """A fixed list of batches for training, and another for evaluation."""

    def __init__(self, train, evaluation=None):
        self._train = train
        if evaluation is not None:
            self.eval_iter = lambda: evaluation

    def train_iter(self):
        return self._train


def dropout_trainer(optimizer, **kwargs):
    return Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True, **kwargs)


def linear_state(optimizer=None):
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return init_state(eqx.nn.Linear(3, 1, key=jax.random.key(0)), optimizer, 0)


def linear_engine(**kwargs):
    return Engine(dropout_trainer(optax.sgd(0.1)), **kwargs)


def batch_of(n, seed=0, **more):
    x = np.random.default_rng(seed).normal(size=(n, 3)).astype("float32")
    return {"inputs": x, "targets": x.sum(1, keepdims=True), **more}


def test_fit_equals_single_steps(dropout_state, optimizer, array_data, assert_same_bits):
    trainer = dropout_trainer(optimizer)
    expected = dropout_state
    for epoch in range(2):
        for batch in array_data.train_iter(epoch=epoch):
            expected, _ = trainer.step(expected, batch)
    assert_same_bits(Engine(trainer).fit_sync(dropout_state, array_data, 2), expected)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("k", [2, 5])
def test_steps_per_call_changes_no_bit(k, donate, dropout_state, optimizer, ragged_data, assert_same_bits):
    one, many = Recorder(), Recorder()
    first = Engine(dropout_trainer(optimizer), [one])
    other = Engine(dropout_trainer(optimizer, donate=donate), [many], steps_per_call=k)
    expected = first.fit_sync(dropout_state, ragged_data, 2)
    assert_same_bits(other.fit_sync(dropout_state, ragged_data, 2), expected)
    assert one.losses == many.losses
    assert first.history == other.history


def test_steps_per_call_changes_no_bit_of_a_convolution(assert_same_bits):
    class Net(eqx.Module):
        conv: eqx.nn.Conv1d
        last: eqx.nn.Linear

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.conv = eqx.nn.Conv1d(3, 16, 3, padding=1, key=a)
            self.last = eqx.nn.Linear(16, 1, key=b)

        def __call__(self, x):
            return self.last(jax.nn.relu(self.conv(x)).mean(1))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3, 12)).astype("float32")
    data = ArrayDataModule({"inputs": x, "targets": x.mean((1, 2))[:, None]}, 5)
    optimizer = optax.adam(1e-2)
    state = init_state(Net(jax.random.key(0)), optimizer, 0)
    results = [Engine(dropout_trainer(optimizer), steps_per_call=k).fit_sync(state, data, 2) for k in (1, 2, 5)]
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_programs_are_at_most_two_per_shape(dropout_state, optimizer, ragged_data):
    single = Engine(dropout_trainer(optimizer))
    single.fit_sync(dropout_state, ragged_data, 3)
    assert single.compiles == {"train": 2, "eval": 1}
    single.fit_sync(dropout_state, ragged_data, 1)
    assert single.compiles == {"train": 2, "eval": 1}
    grouped = Engine(dropout_trainer(optimizer), steps_per_call=2)
    grouped.fit_sync(dropout_state, ragged_data, 3)
    # Batches of 6 come alone, and those of 4 in pairs.
    assert grouped.compiles == {"train": 2, "eval": 1}


def test_hooks_come_in_order(dropout_state, optimizer, ragged_data):
    recorder = Recorder()
    ragged_data.batches = 2
    Engine(dropout_trainer(optimizer), [recorder]).fit_sync(dropout_state, ragged_data, 2)
    assert recorder.calls == [
        ("train_start", 0),
        *[("epoch_start", 0), ("step_start", 0), ("step_end", 1), ("step_start", 1), ("step_end", 2)],
        *[("eval_end", 0), ("epoch_end", 0)],
        *[("epoch_start", 1), ("step_start", 2), ("step_end", 3), ("step_start", 3), ("step_end", 4)],
        *[("eval_end", 1), ("epoch_end", 1)],
        ("train_end", 4),
    ]


def test_a_callback_sees_the_state_as_often_as_it_asks(dropout_state, optimizer, array_data):
    reference, sparse, exact = Recorder(), Recorder(), Recorder(state_every=3)
    Engine(dropout_trainer(optimizer), [reference]).fit_sync(dropout_state, array_data, 1)
    Engine(dropout_trainer(optimizer), [sparse], steps_per_call=4).fit_sync(dropout_state, array_data, 1)
    Engine(dropout_trainer(optimizer), [exact], steps_per_call=4).fit_sync(dropout_state, array_data, 1)
    assert 3 not in sparse.states
    assert {3, 6} <= set(exact.states)
    for step, weight in exact.states.items():
        np.testing.assert_array_equal(weight, reference.states[step])


def test_the_state_of_the_caller_stays_valid(dropout_state, optimizer, array_data):
    before = np.asarray(dropout_state.model.first.weight).copy()
    Engine(dropout_trainer(optimizer)).fit_sync(dropout_state, array_data, 1)
    np.testing.assert_array_equal(dropout_state.model.first.weight, before)


def test_history_is_the_mean_over_the_steps(dropout_state, optimizer, ragged_data):
    recorder = Recorder()
    engine = Engine(dropout_trainer(optimizer), [recorder])
    engine.fit_sync(dropout_state, ragged_data, 2)
    assert [entry["epoch"] for entry in engine.history] == [0, 1]
    assert [entry["step"] for entry in engine.history] == [7, 14]
    np.testing.assert_allclose(engine.history[1]["train"]["loss"], np.mean(recorder.losses[7:]), rtol=1e-12)


def test_eval_is_exact_over_a_ragged_last_batch():
    state = linear_state()
    full = batch_of(11)
    parts = [{name: array[i : i + 4] for name, array in full.items()} for i in range(0, 11, 4)]

    def absolute(predictions, targets):
        return jnp.abs(predictions - targets)[:, 0]

    metrics = {"absolute": absolute, "mean": lambda p, t: jnp.mean(absolute(p, t))}
    result = linear_engine(metrics=metrics).eval(state, Batches([], parts))
    model = state.model
    error = (full["inputs"] @ np.asarray(model.weight).T + np.asarray(model.bias) - full["targets"])[:, 0]
    np.testing.assert_allclose(result["loss"], np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(result["absolute"], np.mean(np.abs(error)), rtol=1e-5)
    np.testing.assert_allclose(result["mean"], np.mean(np.abs(error)), rtol=1e-5)


def test_eval_ignores_what_has_no_weight():
    state = linear_state()
    batches = [batch_of(4, 0, weight=np.array([1, 1, 0, 3.0], "float32")), batch_of(4, 1, weight=np.eye(4)[0])]
    batches[0]["inputs"][2] = np.nan
    metrics = {"right": lambda p, t: jnp.abs(p - t)[:, 0] < 1}
    result = linear_engine(metrics=metrics).eval(state, Batches([], batches))
    x = np.concatenate([batch["inputs"] for batch in batches])
    error = (x @ np.asarray(state.model.weight).T + np.asarray(state.model.bias) - x.sum(1, keepdims=True))[:, 0]
    weight = np.concatenate([batch["weight"] for batch in batches])
    keep = weight > 0
    np.testing.assert_allclose(result["loss"], np.average(error[keep] ** 2, weights=weight[keep]), rtol=1e-5)
    np.testing.assert_allclose(result["right"], np.average(np.abs(error[keep]) < 1, weights=weight[keep]), rtol=1e-6)


def test_eval_refuses_a_scalar_metric_over_padding():
    engine = linear_engine(metrics={"scalar": lambda p, t: jnp.mean(p)})
    engine.eval(linear_state(), Batches([], [batch_of(2, weight=np.array([1, 2.0]))]))
    with pytest.raises(ValueError, match="scalar"):
        engine.eval(linear_state(), Batches([], [batch_of(2, weight=np.array([1, 0.0]))]))


def test_eval_is_in_inference_mode_and_updates_nothing(dropout_state, optimizer, array_data):
    engine = Engine(dropout_trainer(optimizer))
    first, second = engine.eval(dropout_state, array_data), engine.eval(dropout_state, array_data)
    assert first == second
    x = np.concatenate([batch["inputs"] for batch in array_data.eval_iter()])
    model = eqx.nn.inference_mode(dropout_state.model)
    predictions = jax.vmap(lambda x: model(x, key=jax.random.key(0)))(x)
    np.testing.assert_allclose(first["loss"], np.mean((predictions[:, 0] - x.sum(1)) ** 2), rtol=1e-5)


def test_validation_callbacks_see_every_batch(dropout_state, optimizer, array_data):
    seen = []

    class Watch:
        def on_step_end(self, state, metrics):
            seen.append((metrics.epoch, metrics["loss"]))

    engine = Engine(dropout_trainer(optimizer), validation_callbacks=[Watch()])
    engine.fit_sync(dropout_state, array_data, 2)
    assert [epoch for epoch, _ in seen] == [0, 0, 1, 1]
    sizes = [4, 3]
    for epoch in range(2):
        mean = np.average([loss for e, loss in seen if e == epoch], weights=sizes)
        np.testing.assert_allclose(engine.history[epoch]["eval"]["loss"], mean, rtol=1e-5)


def test_async_hooks_are_awaited_in_order(dropout_state, optimizer, array_data):
    seen = []

    class Slow:
        async def on_step_end(self, state, metrics):
            await asyncio.sleep(0.001)
            seen.append(metrics.step)

    Engine(dropout_trainer(optimizer), [Slow()]).fit_sync(dropout_state, array_data, 1)
    assert seen == list(range(1, 8))


@pytest.mark.parametrize("is_async", [False, True])
def test_fit_sync_inside_a_running_loop(is_async, dropout_state, optimizer, array_data, tmp_path, assert_same_bits):
    class Quiet:
        def on_epoch_end(self, state, epoch):
            pass

    class Waiting:
        async def on_epoch_end(self, state, epoch):
            await asyncio.sleep(0)

    async def notebook():
        engine = Engine(dropout_trainer(optimizer), [Waiting() if is_async else Quiet()])
        return engine.fit_sync(dropout_state, array_data, 1, checkpoint_dir=tmp_path / "a")

    expected = Engine(dropout_trainer(optimizer)).fit_sync(dropout_state, array_data, 1)
    assert_same_bits(asyncio.run(notebook()), expected)


def test_fit_lets_a_running_loop_go_on(dropout_state, optimizer, array_data, tmp_path):
    ticks = []

    class Slow:
        def on_step_end(self, state, metrics):
            time.sleep(0.03)

    async def main():
        async def ticking():
            while True:
                ticks.append(1)
                await asyncio.sleep(0)

        task = asyncio.create_task(ticking())
        await Engine(dropout_trainer(optimizer), [Slow()]).fit(dropout_state, array_data, 1, checkpoint_dir=tmp_path)
        task.cancel()

    asyncio.run(main())
    assert len(ticks) >= 3


def test_metrics_are_a_mapping_read_late(dropout_state, optimizer, array_data):
    kept = []

    class Keep(Callback):
        def on_step_end(self, state, metrics):
            kept.append(metrics)

    engine = Engine(dropout_trainer(optimizer), [Keep()], steps_per_call=3)
    engine.fit_sync(dropout_state, array_data, 1)
    assert all(isinstance(metrics, StepMetrics) for metrics in kept)
    assert [metrics.step for metrics in kept] == list(range(1, 8))
    assert dict(kept[0]) == {"loss": kept[0]["loss"]}
    np.testing.assert_allclose(np.mean([m["loss"] for m in kept]), engine.history[0]["train"]["loss"], rtol=1e-12)
    with pytest.raises(KeyError):
        kept[0]["accuracy"]


def test_a_callback_that_raises_keeps_its_traceback(dropout_state, optimizer, array_data):
    class Broken:
        def on_step_end(self, state, metrics):
            if metrics.step == 3:
                raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        Engine(dropout_trainer(optimizer), [Broken()]).fit_sync(dropout_state, array_data, 1)
    assert caught.traceback[-1].name == "on_step_end"


def test_a_callback_can_stop_training(dropout_state, optimizer, array_data, tmp_path):
    class Stop:
        def attach(self, fit):
            self.fit = fit

        def on_step_end(self, state, metrics):
            if metrics.step == 9:
                self.fit.request_stop()

    engine = Engine(dropout_trainer(optimizer), [Stop()])
    assert int(engine.fit_sync(dropout_state, array_data, 5).step) == 9
    assert len(engine.history) == 1


def test_ctrl_c_finishes_the_call_and_raises(dropout_state, optimizer, array_data):
    steps = []

    class Press:
        def on_step_end(self, state, metrics):
            steps.append(metrics.step)
            if metrics.step == 3:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)
                steps.append("after")

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Engine(dropout_trainer(optimizer), [Press()]).fit_sync(dropout_state, array_data, 1)
    assert steps == [1, 2, 3, "after"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_fit_in_another_thread(dropout_state, optimizer, array_data, assert_same_bits):
    results = []
    engine = Engine(dropout_trainer(optimizer))
    thread = threading.Thread(target=lambda: results.append(engine.fit_sync(dropout_state, array_data, 1)))
    thread.start()
    thread.join()
    assert_same_bits(results[0], Engine(dropout_trainer(optimizer)).fit_sync(dropout_state, array_data, 1))


def test_a_loss_that_is_not_finite_is_reported_once(caplog):
    batch = batch_of(4)
    batch["inputs"][1] = np.nan
    with caplog.at_level(logging.WARNING, "xtrax.training"):
        linear_engine().fit_sync(linear_state(), Batches([batch_of(4), batch, batch]), 1)
    messages = [record.getMessage() for record in caplog.records if "loss" in record.getMessage()]
    assert messages == ["the loss of step 2 is nan"]


def test_zero_epochs_change_nothing(dropout_state, optimizer, array_data, assert_same_bits):
    assert_same_bits(Engine(dropout_trainer(optimizer)).fit_sync(dropout_state, array_data, 0), dropout_state)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"num_epochs": True}, TypeError, "num_epochs"),
        ({"num_epochs": 1.0}, TypeError, "num_epochs"),
        ({"num_epochs": -1}, ValueError, "num_epochs"),
        ({"state": None}, TypeError, "state"),
        ({"data": [1]}, TypeError, "train_iter"),
        ({"data": Batches([])}, ValueError, "no batches"),
        ({"data": Batches([{"inputs": np.ones((2, 3))}])}, ValueError, "targets"),
        ({"data": Batches([batch_of(2)], [])}, ValueError, "eval_iter"),
        ({"resume": True}, ValueError, "checkpoint_dir"),
        ({"resume": 1, "checkpoint_dir": "x"}, TypeError, "resume"),
        ({"checkpoint_dir": 3}, TypeError, "checkpoint_dir"),
    ],
)
def test_bad_fit_argument(kwargs, error, words):
    arguments = {"state": linear_state(), "data": Batches([batch_of(2)]), "num_epochs": 1, **kwargs}
    with pytest.raises(error, match=words):
        linear_engine().fit_sync(**arguments)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"trainer": None}, TypeError, "trainer"),
        ({"callbacks": Recorder()}, TypeError, "callbacks"),
        ({"callbacks": [Recorder]}, TypeError, r"Recorder\(\)"),
        ({"callbacks": [object()]}, TypeError, "hooks"),
        ({"validation_callbacks": [object()]}, TypeError, "validation_callbacks"),
        ({"callbacks": [Recorder(state_every=True)]}, TypeError, "state_every"),
        ({"callbacks": [Recorder(state_every=-2)]}, ValueError, "state_every"),
        ({"metrics": [abs]}, TypeError, "metrics"),
        ({"metrics": {"a": 1}}, TypeError, "metrics"),
        ({"metrics": {"loss": abs}}, ValueError, "loss"),
        ({"steps_per_call": 0}, ValueError, "steps_per_call"),
        ({"steps_per_call": True}, TypeError, "steps_per_call"),
    ],
)
def test_bad_engine_argument(kwargs, error, words):
    with pytest.raises(error, match=words):
        Engine(**{"trainer": dropout_trainer(optax.sgd(0.1)), **kwargs})


def test_a_misspelt_hook_is_reported(caplog):
    class Typo:
        def on_epoch_end(self, state, epoch):
            pass

        def on_step_ends(self, state, metrics):
            pass

    with caplog.at_level(logging.WARNING, "xtrax.training"):
        linear_engine(callbacks=[Typo()])
    assert "on_step_end meant" in caplog.text


def test_eval_needs_an_eval_iter():
    with pytest.raises(TypeError, match="eval_iter"):
        linear_engine().eval(linear_state(), Batches([]))


def test_a_metric_of_another_shape_is_named():
    engine = linear_engine(metrics={"wide": lambda p, t: p})
    with pytest.raises(ValueError, match="'wide'"):
        engine.eval(linear_state(), Batches([], [batch_of(2)]))


def test_an_optimizer_state_of_another_optimizer_is_refused(dropout_state, array_data, squared):
    trainer = Trainer(squared, optax.chain(optax.trace(0.9), optax.adam(1e-2)), vmap=True)
    with pytest.raises(ValueError, match="not made by the trainer's optimizer"):
        Engine(trainer).fit_sync(dropout_state, array_data, 1)
    with pytest.raises(ValueError, match="one optimizer to both init_state and Trainer"):
        trainer.step(dropout_state, next(iter(array_data.train_iter())))
    with pytest.raises(ValueError, match="one optimizer to both init_state and Trainer"):
        SafetyTrainStep(trainer, SafetyManager()).step(dropout_state, next(iter(array_data.train_iter())))
