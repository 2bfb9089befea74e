"""Checked steps: what failed is named, and the last good state is kept."""

import linecache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify

from xtrax.training import (
    Engine,
    SafetyError,
    SafetyManager,
    SafetyTrainStep,
    Trainer,
    create_train_step,
    get_checkpoint_manager,
    init_state,
    load_checkpoint,
)


def squared(predictions, targets):
    return ((predictions - targets) ** 2)[:, 0]


def batch(value=1.0, n=4):
    return {"inputs": np.full((n, 3), value, "float32"), "targets": np.zeros((n, 1), "float32")}


class Batches:
    """Batches of the given values, one epoch."""

    def __init__(self, values):
        self.values = values

    def train_iter(self):
        return iter([batch(value) for value in self.values])


def linear_state(optimizer):
    return init_state(eqx.nn.Linear(3, 1, key=jax.random.key(0)), optimizer, seed=0)


@pytest.fixture
def sgd():
    return optax.sgd(0.1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_loss_is_named(sgd, value):
    step = SafetyTrainStep(Trainer(squared, sgd, vmap=True))
    state, _ = step.step(linear_state(sgd), batch())
    what = "has NaN" if np.isnan(value) else "(has NaN|is infinite)"
    with pytest.raises(SafetyError, match=rf"^the loss {what} at step 2; the state of step 1 is kept") as caught:
        step.step(state, batch(value))
    assert caught.value.step == 2
    assert int(caught.value.state.step) == 1
    assert isinstance(caught.value, ValueError)


def test_gradient_leaf_is_named(sgd):
    # The square root is 0 there, and its derivative is not finite: the loss is finite, a gradient is not.
    class Root(eqx.Module):
        good: jax.Array
        bad: jax.Array

        def __call__(self, x):
            return (self.good * jnp.sum(x) + jnp.sqrt(self.bad))[None]

    state = init_state(Root(jnp.ones(()), jnp.zeros(())), sgd, seed=0)
    step = SafetyTrainStep(Trainer(squared, sgd, vmap=True))
    with pytest.raises(SafetyError, match=r"^the gradient of \.bad is infinite at step 1"):
        step.step(state, batch())


def test_parameter_leaf_is_named():
    huge = optax.sgd(1e38)
    state = linear_state(huge)
    step = SafetyTrainStep(Trainer(squared, huge, vmap=True))
    with pytest.raises(SafetyError, match=r"^the parameter \.weight is infinite at step 1"):
        step.step(state, batch(10.0))


def test_where_nan_first_appears_is_told(sgd):
    class Log(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return jnp.log(-jnp.abs(self.linear(x)) - 1)

    state = init_state(Log(eqx.nn.Linear(3, 1, key=jax.random.key(0))), sgd, seed=0)
    with pytest.raises(SafetyError, match=r"; NaN first appears in log \(.*test_train_safety.py:\d+\)$") as caught:
        SafetyTrainStep(Trainer(squared, sgd, vmap=True)).step(state, batch())
    assert caught.value.origin is not None
    line = int(caught.value.origin.rpartition(":")[2].rstrip(")"))
    assert "jnp.log(" in linecache.getline(__file__, line)


def test_flags_choose_what_is_looked_for(sgd):
    state = linear_state(sgd)
    trainer = Trainer(lambda p, t: jnp.where(t[:, 0] == 0, jnp.inf, p[:, 0]), sgd, vmap=True)
    infinite_only = batch()
    _, metrics = SafetyTrainStep(trainer, SafetyManager(check_infs=False)).step(state, infinite_only)
    assert np.isinf(metrics["loss"])
    with pytest.raises(SafetyError, match="the loss is infinite"):
        SafetyTrainStep(trainer, SafetyManager(check_nans=False)).step(state, infinite_only)


def test_checked_steps_give_the_numbers_of_plain_ones(dropout_state, optimizer, assert_same_bits):
    trainer = Trainer(squared, optimizer, vmap=True)
    checked = SafetyTrainStep(trainer)
    plain_state = checked_state = dropout_state
    for i in range(3):
        plain_state, plain = trainer.step(plain_state, batch(i))
        checked_state, metrics = checked.step(checked_state, batch(i))
        np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(plain_state.model), jax.tree.leaves(checked_state.model), strict=True):
        if eqx.is_array(a):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert_same_bits(plain_state.key, checked_state.key)


def test_off_is_the_trainers_own_program(sgd, assert_same_bits):
    traces = []

    def loss(predictions, targets):
        traces.append(1)
        return squared(predictions, targets)

    trainer = Trainer(loss, sgd, vmap=True)
    state = linear_state(sgd)
    expected, _ = trainer.step(state, batch())
    before = len(traces)
    off = SafetyTrainStep(trainer, SafetyManager(enabled=False))
    got, _ = off.step(state, batch())
    assert len(traces) == before
    assert_same_bits(got, expected)
    # Nothing is looked for.
    state, metrics = off.step(state, batch(np.nan))
    assert np.isnan(metrics["loss"])
    assert Engine(off).safety is None


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("bad", [0, 2, 5])
def test_engine_keeps_the_last_good_state(sgd, k, bad, tmp_path, assert_same_bits):
    values = [1.0, -0.5, 0.3, 0.2, 0.7, -1.0, 0.1]
    good = Engine(Trainer(squared, sgd, vmap=True), steps_per_call=k)
    expected = linear_state(sgd) if bad == 0 else good.fit_sync(linear_state(sgd), Batches(values[:bad]), 1)
    values[bad] = np.nan

    class Count:
        def __init__(self):
            self.steps = []

        def on_step_end(self, state, metrics):
            self.steps.append(metrics.step)
            assert np.isfinite(metrics["loss"])

    count = Count()
    engine = Engine(SafetyTrainStep(Trainer(squared, sgd, vmap=True)), [count], steps_per_call=k)
    with pytest.raises(SafetyError, match=f"the loss has NaN at step {bad + 1}") as caught:
        engine.fit_sync(linear_state(sgd), Batches(values), 1, checkpoint_dir=tmp_path)
    assert count.steps == list(range(1, bad + 1))
    kept = caught.value.state
    assert int(kept.step) == bad
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(expected), strict=True):
        if eqx.is_array(a) and not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    with get_checkpoint_manager(tmp_path) as manager:
        assert manager.latest_step() == (bad or None)
        if bad:
            assert_same_bits(load_checkpoint(manager, linear_state(sgd)), kept)


def test_a_checked_run_resumes_past_a_failure_once_the_data_is_mended(sgd, tmp_path):
    values = [1.0, -0.5, 0.3, 0.2, 0.7]
    trainer = SafetyTrainStep(Trainer(squared, sgd, vmap=True))
    whole = Engine(trainer, steps_per_call=2).fit_sync(linear_state(sgd), Batches(values), 1)
    with pytest.raises(SafetyError):
        Engine(trainer, steps_per_call=2).fit_sync(
            linear_state(sgd), Batches([*values[:3], np.nan, 0.7]), 1, checkpoint_dir=tmp_path
        )
    mended = Engine(trainer, steps_per_call=2).fit_sync(
        linear_state(sgd), Batches(values), 1, checkpoint_dir=tmp_path, resume=True
    )
    assert int(mended.step) == 5
    assert np.array_equal(mended.model.weight, whole.model.weight)


def test_checks_in_the_model_are_honoured(sgd, caplog):
    class Positive(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            checkify.check(x[0] > 0, "the first input must be positive, got {x}", x=x[0])
            return self.linear(x)

    class Whole(Batches):
        def train_iter(self):
            return iter([{"inputs": np.full(3, v, "float32"), "targets": np.zeros(3, "float32")} for v in self.values])

        eval_iter = train_iter

    state = init_state(Positive(eqx.nn.Linear(3, 1, key=jax.random.key(0))), sgd, seed=0)
    trainer = Trainer(lambda p, t: jnp.sum((p - t[:1]) ** 2), sgd)
    engine = Engine(SafetyTrainStep(trainer), steps_per_call=3)
    with pytest.raises(SafetyError, match=r"the first input must be positive, got -2\.0; the state of step 1 is kept"):
        engine.fit_sync(state, Whole([1.0, -2.0, np.nan]), 1)
    assert not caplog.records
    with pytest.raises(checkify.JaxRuntimeError, match="must be positive"):
        engine.eval(state, Whole([-1.0]))


def test_create_train_step(sgd, assert_same_bits):
    state = linear_state(sgd)
    expected, _ = Trainer(squared, sgd, vmap=True, accumulate=2).step(state, batch())
    step = create_train_step(squared, sgd, vmap=True, accumulate=2)
    got, metrics = step(state, batch())
    assert_same_bits(got, expected)
    assert metrics["loss"].shape == ()
    checked = create_train_step(squared, sgd, vmap=True, safety_manager=SafetyManager())
    with pytest.raises(SafetyError):
        checked(state, batch(np.nan))


@pytest.mark.parametrize("name", ["enabled", "check_nans", "check_infs"])
def test_manager_refuses_what_is_not_a_bool(name):
    build: Any = SafetyManager
    with pytest.raises(TypeError, match=f"{name} must be True or False, got 1"):
        build(**{name: 1})


def test_bad_arguments(sgd):
    build: Any = SafetyTrainStep
    trainer = Trainer(squared, sgd)
    with pytest.raises(TypeError, match="trainer must be a Trainer, got str"):
        build("trainer")
    with pytest.raises(TypeError, match="safety_manager must be a SafetyManager, got bool"):
        build(trainer, True)
    with pytest.raises(TypeError, match="ResumableState"):
        build(trainer).step("state", batch())
    with pytest.raises(ValueError, match="inputs"):
        SafetyTrainStep(trainer).step(linear_state(sgd), {"targets": np.zeros(3)})
