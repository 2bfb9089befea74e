"""Losses put together, and gradients a part at a time."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.training import LossFunction, MultiTaskLoss, Trainer, WeightedLoss, accumulate_grads, init_state

# For what a type checker would refuse too.
UNTYPED_WEIGHTED: Any = WeightedLoss
UNTYPED_MULTI: Any = MultiTaskLoss


def squared(predictions, targets):
    return (predictions - targets) ** 2


def absolute(predictions, targets):
    return jnp.abs(predictions - targets)


def test_a_plain_function_is_a_loss_function():
    assert isinstance(squared, LossFunction)
    assert isinstance(WeightedLoss(squared, 1.0), LossFunction)
    assert not isinstance("loss", LossFunction)


def test_weighted_loss():
    p, t = np.array([1.0, 3.0]), np.array([0.0, 1.0])
    assert np.array_equal(WeightedLoss(squared, 2.5)(p, t), 2.5 * (p - t) ** 2)
    loss, aux = WeightedLoss(lambda p, t: (squared(p, t), {"n": 3}), 0.5)(p, t)
    assert np.array_equal(loss, 0.5 * (p - t) ** 2)
    assert aux == {"n": 3}


def test_multi_task_loss_is_the_weighted_sum():
    p = {"a": np.array([1.0, 3.0]), "b": np.array([2.0, 5.0]), "unused": np.zeros(1)}
    t = {"a": np.zeros(2), "b": np.ones(2)}
    loss = MultiTaskLoss({"a": squared, "b": lambda p, t: (absolute(p, t), {"n": 3})}, {"b": 4.0})
    total, aux = loss(p, t)
    np.testing.assert_allclose(total, p["a"] ** 2 + 4 * (p["b"] - 1))
    np.testing.assert_allclose(aux["a"], p["a"] ** 2)
    np.testing.assert_allclose(aux["b"], p["b"] - 1)
    assert aux["b/n"] == 3


def test_multi_task_loss_in_a_trainer():
    class Two(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear

        def __call__(self, x):
            return {"a": self.a(x)[0], "b": self.b(x)[0]}

    model = Two(eqx.nn.Linear(2, 1, key=jax.random.key(0)), eqx.nn.Linear(2, 1, key=jax.random.key(1)))
    optimizer = optax.sgd(0.1)
    trainer = Trainer(MultiTaskLoss({"a": squared, "b": WeightedLoss(absolute, 2.0)}, {"a": 3.0}), optimizer, vmap=True)
    x = np.random.default_rng(0).normal(size=(4, 2)).astype("float32")
    targets = {"a": x[:, 0], "b": x[:, 1]}
    weight = np.array([1, 1, 2, 0], "float32")
    _, metrics = trainer.step(init_state(model, optimizer, seed=0), {"inputs": x, "targets": targets, "weight": weight})
    p = jax.vmap(model)(x)
    a = np.average((p["a"] - x[:, 0]) ** 2, weights=weight)
    b = np.average(2 * np.abs(p["b"] - x[:, 1]), weights=weight)
    np.testing.assert_allclose(metrics["a"], a, rtol=1e-5)
    np.testing.assert_allclose(metrics["b"], b, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], 3 * a + b, rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: UNTYPED_WEIGHTED("mse", 1.0), TypeError, "loss_fn must be a function"),
        (lambda: WeightedLoss(squared, True), TypeError, "weight must be a number, got True"),
        (lambda: WeightedLoss(squared, float("nan")), ValueError, "weight must be finite, got nan"),
        (lambda: MultiTaskLoss({}), ValueError, "at least one task"),
        (lambda: UNTYPED_MULTI([squared]), TypeError, "losses must be a dict by task, got list"),
        (lambda: UNTYPED_MULTI({"a": 1}), TypeError, "losses must be a dict of names to functions, got 'a': 1"),
        (lambda: MultiTaskLoss({"loss": squared}), ValueError, 'must not have the name "loss"'),
        (lambda: MultiTaskLoss({"a": squared}, {"b": 1.0}), ValueError, r"'b', which is no task; there are \['a'\]"),
        (lambda: UNTYPED_MULTI({"a": squared}, {"a": "x"}), TypeError, r"weights\['a'\] must be a number"),
    ],
)
def test_bad_losses(build, error, message):
    with pytest.raises(error, match=message):
        build()


def test_bad_calls_of_a_multi_task_loss():
    loss = MultiTaskLoss({"a": squared, "b": lambda p, t: jnp.mean(squared(p, t))})
    x = {"a": np.ones(2), "b": np.ones(2)}
    with pytest.raises(TypeError, match="predictions must be a dict by task"):
        loss(np.ones(2), x)
    with pytest.raises(ValueError, match=r"targets has \['a'\] and lacks the tasks \['b'\]"):
        loss(x, {"a": np.ones(2)})
    with pytest.raises(ValueError, match=r"must have one shape.*'a': \(2,\), 'b': \(\)"):
        loss(x, x)


@settings(max_examples=20, deadline=None)
@given(parts=st.sampled_from([1, 2, 3, 6]), seed=st.integers(0, 100))
def test_accumulated_gradient_is_that_of_the_whole_batch(parts, seed):
    rng = np.random.default_rng(seed)
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(seed))
    batch = {"x": rng.normal(size=(12, 3)).astype("float32"), "y": rng.normal(size=12).astype("float32")}

    def loss_fn(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2)

    value, grads = accumulate_grads(loss_fn, parts)(model, batch)
    expected, expected_grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_accumulated_aux_is_stacked():
    def loss_fn(w, x):
        return jnp.mean(w * x), {"largest": jnp.max(x)}

    (value, aux), grad = jax.jit(accumulate_grads(loss_fn, 2, has_aux=True))(jnp.array(2.0), jnp.arange(4.0))
    assert (float(value), float(grad)) == (3.0, 1.5)
    assert np.array_equal(aux["largest"], [1.0, 3.0])


def test_accumulation_needs_the_memory_of_one_part():
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

    w, x = jnp.ones((64, 256)), jnp.ones((4096, 64))

    def temporaries(parts):
        analysis = jax.jit(accumulate_grads(loss_fn, parts)).lower(w, x).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries(16) < temporaries(1) / 4


def test_bad_accumulation():
    build: Any = accumulate_grads
    with pytest.raises(TypeError, match="loss_fn must be a function"):
        build("loss", 2)
    with pytest.raises(ValueError, match="num_microbatches must be at least 1, got 0"):
        accumulate_grads(squared, 0)
    with pytest.raises(TypeError, match="num_microbatches must be an integer, got True"):
        accumulate_grads(squared, True)
    with pytest.raises(TypeError, match="has_aux must be True or False"):
        build(squared, 1, has_aux=1)
    step = accumulate_grads(lambda w, b: jnp.mean(w * b["x"]), 2)
    w = jnp.array(1.0)
    with pytest.raises(ValueError, match="3 examples cannot be split into num_microbatches=2"):
        step(w, {"x": np.ones(3)})
    with pytest.raises(ValueError, match="0 examples"):
        step(w, {"x": np.ones(0)})
    with pytest.raises(ValueError, match=r"same leading axis, got .*'x'\].*: 2"):
        step(w, {"x": np.ones(2), "y": np.ones(4)})
    with pytest.raises(TypeError, match="numpy or JAX array, got float"):
        step(w, {"x": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"got shape \(\)"):
        step(w, {"x": np.float32(1.0) * np.ones(())})
    with pytest.raises(ValueError, match="at least one array"):
        step(w, {})
