"""Trainer.step against a hand-written optax loop."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.training import Engine, ResumableState, Trainer, init_state


def batch_of(n, seed=0, **more):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 3)).astype("float32")
    return {"inputs": x, "targets": x.sum(1, keepdims=True), **more}


def linear(key=0):
    return eqx.nn.Linear(3, 1, key=jax.random.key(key))


def scalar_loss(predictions, targets):
    return jnp.mean((predictions - targets) ** 2)


def hand_written(model, optimizer, batches):
    """What the optax documentation tells a user to write."""
    params = eqx.filter(model, eqx.is_inexact_array)
    opt_state = optimizer.init(params)
    losses = []
    for batch in batches:

        def loss_fn(model, batch=batch):
            return scalar_loss(jax.vmap(model)(batch["inputs"]), batch["targets"])

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        losses.append(float(loss))
    return model, losses


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(0.1), optax.adamw(1e-2, weight_decay=0.1), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))],
    ids=["sgd", "adamw", "clipped"],
)
@pytest.mark.parametrize("per_example", [False, True])
def test_steps_equal_a_hand_written_loop(optimizer, per_example, squared):
    batches = [batch_of(5, seed) for seed in range(4)]
    expected, expected_losses = hand_written(linear(), optimizer, batches)
    trainer = Trainer(squared if per_example else scalar_loss, optimizer, vmap=True)
    state = init_state(linear(), optimizer, seed=0)
    losses = []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(state.model.weight, expected.weight, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.model.bias, expected.bias, rtol=1e-5, atol=1e-6)
    assert int(state.step) == 4


def test_without_vmap_the_model_is_called_on_the_whole_batch():
    class Whole(eqx.Module):
        weight: jax.Array

        def __call__(self, inputs):
            assert inputs["values"].shape == (5, 3)
            return inputs["values"] @ self.weight * inputs["mask"]

    optimizer = optax.sgd(0.1)
    x = batch_of(5)["inputs"]
    mask = np.array([1, 1, 0, 1, 0], "float32")
    batch = {"inputs": {"values": x, "mask": mask}, "targets": np.ones(5, "float32")}
    weight = np.array([0.3, -0.2, 0.1], "float32")
    state = init_state(Whole(jnp.asarray(weight)), optimizer, seed=0)
    state, metrics = Trainer(lambda p, t: (p - t) ** 2, optimizer).step(state, batch)
    error = (x @ weight) * mask - 1
    np.testing.assert_allclose(metrics["loss"], np.mean(error**2), rtol=1e-5)
    gradient = (2 * error * mask) @ x / 5
    np.testing.assert_allclose(state.model.weight, weight - 0.1 * gradient, rtol=1e-5)


def test_vmap_names_its_axis_batch():
    class Centred(eqx.Module):
        scale: jax.Array

        def __call__(self, x):
            return self.scale * (x - jax.lax.pmean(x, "batch"))

    optimizer = optax.sgd(0.0)
    state = init_state(Centred(jnp.ones(())), optimizer, 0)
    x = batch_of(5)["inputs"]
    trainer = Trainer(lambda p, t: (p - t) ** 2 @ jnp.ones(3), optimizer, vmap=True)
    _, metrics = trainer.step(state, {"inputs": x, "targets": np.zeros_like(x)})
    np.testing.assert_allclose(metrics["loss"], ((x - x.mean(0)) ** 2).sum(1).mean(), rtol=1e-5)


def test_weights_average_the_examples(squared):
    optimizer = optax.sgd(0.1)
    weight = np.array([1, 0, 2, 0.5], "float32")
    batch = batch_of(4, weight=weight)
    model = linear()
    _, metrics = Trainer(squared, optimizer, vmap=True).step(init_state(model, optimizer, 0), batch)
    errors = (batch["inputs"] @ np.asarray(model.weight).T + np.asarray(model.bias) - batch["targets"])[:, 0] ** 2
    np.testing.assert_allclose(metrics["loss"], np.average(errors, weights=weight), rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(garbage=st.lists(st.floats(-1e6, 1e6, width=32), min_size=6, max_size=6))
def test_a_weight_of_zero_has_no_effect(garbage):
    optimizer = optax.adam(1e-2)
    trainer = Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True)
    real = batch_of(4, weight=np.array([1, 1, 0, 0], "float32"))
    other = {name: array.copy() for name, array in real.items()}
    other["inputs"][2:] = np.asarray(garbage, "float32").reshape(2, 3)
    a, a_metrics = trainer.step(init_state(linear(), optimizer, 0), real)
    b, b_metrics = trainer.step(init_state(linear(), optimizer, 0), other)
    assert float(a_metrics["loss"]) == float(b_metrics["loss"])
    assert eqx.tree_equal(a.model, b.model)


def test_padding_with_weight_zero_equals_the_batch_without_it(squared):
    optimizer = optax.adam(1e-2)
    trainer = Trainer(squared, optimizer, vmap=True)
    short = batch_of(3)
    padded = {name: np.concatenate([array, np.ones((2, *array.shape[1:]), "float32")]) for name, array in short.items()}
    padded["weight"] = np.array([1, 1, 1, 0, 0], "float32")
    a, _ = trainer.step(init_state(linear(), optimizer, 0), short)
    b, _ = trainer.step(init_state(linear(), optimizer, 0), padded)
    np.testing.assert_allclose(a.model.weight, b.model.weight, rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_accumulating_equals_the_whole_batch(weighted, dropout_state, optimizer, squared):
    batch = batch_of(12)
    if weighted:
        batch["weight"] = np.linspace(0, 1, 12, dtype="float32")
    whole, whole_metrics = Trainer(squared, optimizer, vmap=True).step(dropout_state, batch)
    parts, parts_metrics = Trainer(squared, optimizer, vmap=True, accumulate=4).step(dropout_state, batch)
    np.testing.assert_allclose(parts_metrics["loss"], whole_metrics["loss"], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(whole.opt_state), jax.tree.leaves(parts.opt_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_accumulating_a_scalar_loss_equals_the_whole_batch():
    optimizer = optax.sgd(0.1)
    batch = batch_of(12)
    whole, _ = Trainer(scalar_loss, optimizer, vmap=True).step(init_state(linear(), optimizer, 0), batch)
    parts, _ = Trainer(scalar_loss, optimizer, vmap=True, accumulate=3).step(init_state(linear(), optimizer, 0), batch)
    np.testing.assert_allclose(whole.model.weight, parts.model.weight, rtol=1e-5)


def test_aux_is_averaged_as_the_loss_is():
    def loss_fn(predictions, targets):
        error = (predictions - targets)[:, 0]
        return error**2, {"abs": jnp.abs(error), "largest": jnp.max(jnp.abs(error))}

    optimizer = optax.sgd(0.1)
    model, batch = linear(), batch_of(4, weight=np.array([1, 2, 3, 0], "float32"))
    _, metrics = Trainer(loss_fn, optimizer, vmap=True).step(init_state(model, optimizer, 0), batch)
    error = np.abs(batch["inputs"] @ np.asarray(model.weight).T + np.asarray(model.bias) - batch["targets"])[:, 0]
    assert set(metrics) == {"loss", "abs", "largest"}
    np.testing.assert_allclose(metrics["abs"], np.average(error, weights=batch["weight"]), rtol=1e-5)
    np.testing.assert_allclose(metrics["largest"], error.max(), rtol=1e-5)


def test_every_step_and_example_has_another_key():
    class Noise(eqx.Module):
        scale: jax.Array

        def __call__(self, x, key):
            return self.scale * x + jax.random.normal(key)

    optimizer = optax.sgd(0.0)
    state = init_state(Noise(jnp.ones(())), optimizer, seed=0)
    trainer = Trainer(lambda p, t: (jnp.sum(p), {f"p{i}": p[i] for i in range(3)}), optimizer, vmap=True)
    seen = set()
    for _ in range(3):
        state, metrics = trainer.step(state, {"inputs": np.zeros(3, "float32"), "targets": None})
        seen |= {float(metrics[f"p{i}"]) for i in range(3)}
    assert len(seen) == 9


def test_a_key_is_left_alone_by_a_model_that_takes_none(squared):
    optimizer = optax.sgd(0.1)

    class NoKey(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(x)

    state = init_state(NoKey(linear()), optimizer, 0)
    after, _ = Trainer(squared, optimizer, vmap=True).step(state, batch_of(4))
    assert (jax.random.key_data(after.key) == jax.random.key_data(state.key)).all()


def test_raw_and_typed_keys_give_the_same_numbers(dropout_state, optimizer, squared):
    raw = ResumableState(0, jax.random.key_data(dropout_state.key), dropout_state.model, dropout_state.opt_state)
    trainer = Trainer(squared, optimizer, vmap=True)
    a, _ = trainer.step(dropout_state, batch_of(4))
    b, _ = trainer.step(raw, batch_of(4))
    assert eqx.tree_equal(a.model, b.model)


def test_batch_norm_state_is_carried(assert_same_bits):
    class Normed(eqx.Module):
        norm: eqx.nn.BatchNorm
        linear: eqx.nn.Linear

        def __init__(self, key):
            self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
            self.linear = eqx.nn.Linear(3, 1, key=key)

        def __call__(self, x, state):
            x, state = self.norm(x, state)
            return self.linear(x), state

    optimizer = optax.sgd(0.1)
    model, model_state = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    state = init_state(model, optimizer, 0, model_state=model_state)
    loss = Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True)
    batches = [batch_of(6, seed) for seed in range(3)]
    reference = model_state
    for batch in batches:
        _, reference = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            batch["inputs"], reference
        )
        # The running statistics depend on the inputs alone, so the first model serves for all steps.
        state, _ = loss.step(state, batch)
    for a, b in zip(jax.tree.leaves(state.extras["model_state"]), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

    class Data:
        def train_iter(self):
            return batches

        eval_iter = train_iter

    engine = Engine(loss)
    fitted = engine.fit_sync(init_state(model, optimizer, 0, model_state=model_state), Data(), 1)
    assert_same_bits(fitted, state)
    assert set(engine.history[0]["eval"]) == {"loss"}


def test_a_later_step_is_not_traced_again():
    traces = []

    def loss_fn(predictions, targets):
        traces.append(1)
        return jnp.mean((predictions - targets) ** 2)

    optimizer = optax.sgd(0.1)
    trainer = Trainer(loss_fn, optimizer, vmap=True)
    state = ResumableState(0, jax.random.key(0), linear(), optimizer.init(eqx.filter(linear(), eqx.is_inexact_array)))
    for seed in range(5):
        state, _ = trainer.step(state, batch_of(4, seed))
    assert len(traces) == 1


def test_step_leaves_its_argument_valid(dropout_state, optimizer, squared):
    trainer = Trainer(squared, optimizer, vmap=True)
    a, _ = trainer.step(dropout_state, batch_of(4))
    b, _ = trainer.step(dropout_state, batch_of(4))
    assert eqx.tree_equal(a.model, b.model)


def test_step_can_be_vmapped_over_states(squared):
    optimizer = optax.sgd(0.1)
    trainer = Trainer(squared, optimizer, vmap=True)
    batch = batch_of(4)
    states = [init_state(linear(k), optimizer, 0) for k in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    together, _ = eqx.filter_vmap(lambda state: trainer.step(state, batch))(stacked)
    for i, state in enumerate(states):
        alone, _ = trainer.step(state, batch)
        np.testing.assert_allclose(together.model.weight[i], alone.model.weight, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ([1, 2], TypeError, "dict"),
        ({}, ValueError, "inputs"),
        ({"inputs": np.ones((2, 3), "float32")}, ValueError, "targets"),
        ({**batch_of(2), "weights": np.ones(2)}, ValueError, "weights"),
        ({"inputs": 1.0, "targets": np.ones((2, 1))}, TypeError, "inputs"),
        ({"inputs": {"a": np.array(["x", "y"])}, "targets": None}, TypeError, r"inputs\['a'\]"),
        ({"inputs": np.ones((2, 3)), "targets": np.ones((3, 1))}, ValueError, "leading axis"),
        ({"inputs": np.ones((0, 3)), "targets": np.ones((0, 1))}, ValueError, "at least one example"),
        ({"inputs": np.float32(3), "targets": np.ones((3, 1))}, ValueError, "shape \\(\\)"),
        ({"inputs": {}, "targets": np.ones((3, 1))}, ValueError, "inputs"),
        (batch_of(2, weight=np.ones(3)), ValueError, "weight"),
        (batch_of(2, weight=np.ones((2, 1))), ValueError, "weight"),
        (batch_of(2, weight=None), ValueError, "weight"),
        (batch_of(2, weight=np.array([1, np.nan])), ValueError, "index 1"),
        (batch_of(2, weight=np.array([-1.0, 2])), ValueError, "index 0"),
        (batch_of(2, weight=np.zeros(2)), ValueError, "weight is 0"),
        (batch_of(2, weight=np.ones(2, complex)), TypeError, "weight"),
    ],
)
def test_bad_batch(batch, error, words, squared):
    optimizer = optax.sgd(0.1)
    with pytest.raises(error, match=words):
        Trainer(squared, optimizer, vmap=True).step(init_state(linear(), optimizer, 0), batch)


@pytest.mark.parametrize(
    ("loss_fn", "error", "words"),
    [
        (lambda p, t: p, ValueError, r"\(4, 1\)"),
        (lambda p, t: "x", TypeError, "loss"),
        (lambda p, t: None, TypeError, "loss"),
        (lambda p, t: jnp.sum(p > t), TypeError, "floating"),
        (lambda p, t: jnp.sum(p) + 0j, TypeError, "real"),
        (lambda p, t: (jnp.sum(p), 3), TypeError, "aux"),
        (lambda p, t: (jnp.sum(p), {"loss": 1.0}), ValueError, "loss"),
        (lambda p, t: (jnp.sum(p), {"a": p}), ValueError, "'a'"),
    ],
)
def test_bad_loss(loss_fn, error, words):
    optimizer = optax.sgd(0.1)
    with pytest.raises(error, match=words):
        Trainer(loss_fn, optimizer, vmap=True).step(init_state(linear(), optimizer, 0), batch_of(4))


def test_a_scalar_loss_refuses_weights_that_it_would_ignore():
    optimizer = optax.sgd(0.1)
    trainer = Trainer(scalar_loss, optimizer, vmap=True)
    state = init_state(linear(), optimizer, 0)
    trainer.step(state, batch_of(2, weight=np.ones(2, "float32")))
    with pytest.raises(ValueError, match="one value per example"):
        trainer.step(state, batch_of(2, weight=np.array([1, 0], "float32")))


def test_accumulate_must_divide_the_batch(squared):
    optimizer = optax.sgd(0.1)
    trainer = Trainer(squared, optimizer, vmap=True, accumulate=3)
    with pytest.raises(ValueError, match="accumulate=3"):
        trainer.step(init_state(linear(), optimizer, 0), batch_of(4))


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"loss_fn": 1}, TypeError),
        ({"optimizer": 1e-3}, TypeError),
        ({"vmap": 1}, TypeError),
        ({"donate": None}, TypeError),
        ({"accumulate": True}, TypeError),
        ({"accumulate": 2.0}, TypeError),
        ({"accumulate": 0}, ValueError),
        ({"accumulate": -1}, ValueError),
    ],
)
def test_bad_trainer_argument(kwargs, error):
    arguments: dict[str, Any] = {"loss_fn": scalar_loss, "optimizer": optax.sgd(0.1), **kwargs}
    with pytest.raises(error, match=next(iter(kwargs))):
        Trainer(**arguments)


def test_a_step_that_changes_a_leaf_names_it():
    def update(updates, state, params=None):
        return updates, {"count": jnp.zeros(2)}

    optimizer = optax.GradientTransformation(lambda params: {"count": jnp.zeros(3)}, update)
    with pytest.raises(TypeError, match=r"opt_state.*count"):
        Trainer(scalar_loss, optimizer, vmap=True).step(init_state(linear(), optimizer, 0), batch_of(4))


def test_an_optimizer_may_ask_for_the_loss():
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))
    state = init_state(linear(), optimizer, 0)
    state, _ = Trainer(scalar_loss, optimizer, vmap=True).step(state, batch_of(4))
    assert int(state.step) == 1
