"""EarlyStopping and LearningRateMonitor."""

import logging
import math
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from xtrax.training import (
    ArrayDataModule,
    EarlyStopping,
    Engine,
    LearningRateMonitor,
    Trainer,
    adamw_with_schedule,
    init_state,
)


def squared(predictions, targets):
    return ((predictions - targets) ** 2)[:, 0]


class Scripted:
    """Data whose evaluation loss in each epoch is given: the model's prediction is 0, and targets are set."""

    def __init__(self, losses):
        self.losses = losses
        self.evaluated = 0

    def train_iter(self, epoch):
        self.evaluated = epoch
        yield {"inputs": np.zeros((2, 1), "float32"), "targets": np.zeros((2, 1), "float32")}

    def eval_iter(self):
        target = np.full((2, 1), math.sqrt(self.losses[self.evaluated]), "float32")
        yield {"inputs": np.zeros((2, 1), "float32"), "targets": target}


def zero_state(optimizer):
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.bias, model, np.zeros(1, "float32"))
    return init_state(model, optimizer, seed=0)


SGD = optax.sgd(0.0)


def epochs_of(stop, losses, **kwargs):
    engine = Engine(Trainer(squared, SGD, vmap=True), [stop], **kwargs)
    engine.fit_sync(zero_state(SGD), Scripted(losses), len(losses))
    return len(engine.history)


@pytest.mark.parametrize(
    ("losses", "kwargs", "epochs"),
    [
        ([4, 3, 2, 1], {"patience": 1}, 4),
        ([4, 3, 3, 3, 1], {"patience": 2}, 4),
        ([4, 5, 3, 5, 5, 1], {"patience": 2}, 5),
        ([4, 3.5, 3.1, 1], {"patience": 2, "min_delta": 1.0}, 3),
        ([1, 2, 3, 3, 9], {"patience": 1, "mode": "max"}, 4),
        ([1, 4, 0.5], {"patience": 5}, 3),
    ],
)
def test_stops_when_evaluation_no_longer_improves(losses, kwargs, epochs):
    stop = EarlyStopping(**kwargs)
    assert epochs_of(stop, losses) == epochs
    assert stop.stopped_epoch == (epochs - 1 if epochs < len(losses) else None)


def test_nan_is_no_improvement():
    def loss(predictions, targets):
        return squared(predictions, targets) * np.nan

    engine = Engine(Trainer(loss, SGD, vmap=True), [EarlyStopping(patience=3)])
    engine.fit_sync(zero_state(SGD), Scripted([1.0] * 9), 9)
    assert len(engine.history) == 3


def test_a_metric_is_monitored():
    stop = EarlyStopping("error", patience=1)
    assert epochs_of(stop, [4, 9, 1], metrics={"error": lambda p, t: abs(p - t)[:, 0]}) == 2
    assert stop.best == pytest.approx(2.0)


def test_a_resumed_run_counts_the_epochs_before(tmp_path):
    losses = [4, 5, 5, 5, 5, 5]
    trainer = Trainer(squared, SGD, vmap=True)
    Engine(trainer, [EarlyStopping(patience=3)]).fit_sync(zero_state(SGD), Scripted(losses), 2, checkpoint_dir=tmp_path)
    stop = EarlyStopping(patience=3)
    engine = Engine(trainer, [stop])
    engine.fit_sync(zero_state(SGD), Scripted(losses), 6, checkpoint_dir=tmp_path, resume=True)
    assert len(engine.history) == 4
    # And once more: it has stopped already.
    engine.fit_sync(zero_state(SGD), Scripted(losses), 6, checkpoint_dir=tmp_path, resume=True)
    assert len(engine.history) == 4
    assert stop.stopped_epoch == 3


def test_it_needs_an_evaluation_with_the_result():
    x = np.ones((4, 1), "float32")
    engine = Engine(Trainer(squared, SGD, vmap=True), [EarlyStopping()])
    with pytest.raises(ValueError, match="needs an evaluation after every epoch"):
        engine.fit_sync(zero_state(SGD), ArrayDataModule({"inputs": x, "targets": x}, 2), 1)
    with pytest.raises(ValueError, match=r"EarlyStopping\(monitor='accuracy'\): evaluation has \['loss'\]"):
        epochs_of(EarlyStopping("accuracy"), [1.0])


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"monitor": 1}, TypeError, "monitor must be the name"),
        ({"patience": 0}, ValueError, "patience must be at least 1"),
        ({"patience": True}, TypeError, "patience must be an integer"),
        ({"min_delta": -1}, ValueError, "min_delta must be finite and at least 0"),
        ({"min_delta": math.nan}, ValueError, "min_delta must be finite"),
        ({"min_delta": True}, TypeError, "min_delta must be a number"),
        ({"mode": "lowest"}, ValueError, 'mode must be "min" or "max"'),
    ],
)
def test_bad_arguments_of_early_stopping(kwargs, error, message):
    with pytest.raises(error, match=message):
        EarlyStopping(**kwargs)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_rates_are_those_of_the_schedule(k, every, dropout_state, array_data, caplog):
    peak, warmup, total = 0.1, 3, 20

    def expected(step):
        done = step - 1
        if done < warmup:
            return peak * done / warmup
        return peak * 0.5 * (1 + math.cos(math.pi * (done - warmup) / (total - warmup)))

    optimizer = adamw_with_schedule(peak, warmup, total)
    from_state = LearningRateMonitor(every=every)
    from_schedule = LearningRateMonitor(optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total), every=every)
    engine = Engine(Trainer(squared, optimizer, vmap=True), [from_state, from_schedule], steps_per_call=k)
    with caplog.at_level(logging.INFO, "xtrax.training"):
        engine.fit_sync(init_state(dropout_state.model, optimizer, seed=0), array_data, 2)
    steps = [step for step in range(1, 15) if step % every == 0]
    for monitor in (from_state, from_schedule):
        assert list(monitor.rates) == steps
        np.testing.assert_allclose(list(monitor.rates.values()), [expected(s) for s in steps], rtol=1e-5, atol=1e-9)
    assert sum("learning rate" in record.message for record in caplog.records) == 4


def test_rates_of_inject_hyperparams(dropout_state, array_data):
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    monitor = LearningRateMonitor(every=7)
    engine = Engine(Trainer(squared, optimizer, vmap=True), [monitor])
    engine.fit_sync(init_state(dropout_state.model, optimizer, seed=0), array_data, 1)
    assert monitor.rates == {7: 0.25}


def test_a_rate_that_cannot_be_found(dropout_state, optimizer, array_data):
    engine = Engine(Trainer(squared, optimizer, vmap=True), [LearningRateMonitor()])
    with pytest.raises(ValueError, match="has no learning rate in it; pass schedule="):
        engine.fit_sync(dropout_state, array_data, 1)
    two = optax.chain(*[optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)] * 2)
    with pytest.raises(ValueError, match="has several learning rates"):
        Engine(Trainer(squared, two, vmap=True), [LearningRateMonitor()]).fit_sync(
            init_state(dropout_state.model, two, seed=0), array_data, 1
        )


def test_bad_arguments_of_the_monitor():
    build: Any = LearningRateMonitor
    with pytest.raises(TypeError, match="schedule must be a function of the step"):
        build(0.1)
    with pytest.raises(ValueError, match="every must be at least 1"):
        LearningRateMonitor(every=0)
