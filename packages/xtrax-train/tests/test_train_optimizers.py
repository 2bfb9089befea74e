"""Optimizers against their formulas, and labels of parameters."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xtrax.training import Trainer, adamw_with_schedule, init_state, make_optimizer, no_bias_wd_mask, partition_labels


def rate(step, peak, warmup, total):
    """Linear warm-up from 0, then half a cosine to 0."""
    if step < warmup:
        return peak * step / warmup
    done = min((step - warmup) / (total - warmup), 1.0)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def adamw(params, grads, peak, warmup, total, decay, clip, b1=0.9, b2=0.999, eps=1e-8, mask=(True, True)):
    """AdamW by its formula, in float64, for a list of steps' gradients (each a list of arrays)."""
    params = [np.array(p, "float64") for p in params]
    m = [np.zeros_like(p) for p in params]
    v = [np.zeros_like(p) for p in params]
    for t, gs in enumerate(grads):
        norm = math.sqrt(sum(float((g**2).sum()) for g in gs))
        scale = 1.0 if clip is None or norm < clip else clip / norm
        for i, g in enumerate(gs):
            g = g * scale
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            direction = (m[i] / (1 - b1 ** (t + 1))) / (np.sqrt(v[i] / (1 - b2 ** (t + 1))) + eps)
            direction = direction + decay * mask[i] * params[i]
            params[i] = params[i] - rate(t, peak, warmup, total) * direction
    return params


def follow(optimizer: Any, params: Any, grads: Any) -> tuple[Any, Any]:
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for g in grads:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(3, 2)).astype("float32"), rng.normal(size=2).astype("float32")]
    grads = [[rng.normal(size=(3, 2)).astype("float32"), rng.normal(size=2).astype("float32")] for _ in range(8)]
    return params, grads


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_adamw_is_its_formula(problem, warmup, clip):
    params, grads = problem
    optimizer = adamw_with_schedule(0.1, warmup, 6, weight_decay=0.3, clip_norm=clip)
    got, _ = follow(optimizer, params, grads)
    for a, b in zip(got, adamw(params, grads, 0.1, warmup, 6, 0.3, clip), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_mask_keeps_from_decay(problem):
    params, grads = problem
    optimizer = adamw_with_schedule(0.1, 1, 6, weight_decay=0.3, wd_mask=no_bias_wd_mask, b1=0.8, b2=0.9, eps=1e-3)
    got, _ = follow(optimizer, params, grads)
    expected = adamw(params, grads, 0.1, 1, 6, 0.3, 1.0, 0.8, 0.9, 1e-3, mask=(True, False))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_peak_and_decay_may_be_mapped(problem):
    params, grads = problem
    peaks, decays = np.array([0.01, 0.1, 0.2], "float32"), np.array([0.0, 0.1, 0.3], "float32")

    def train(peak, decay):
        return follow(adamw_with_schedule(peak, 2, 8, weight_decay=decay), params, grads)[0]

    got = jax.jit(jax.vmap(train))(peaks, decays)
    for i in range(3):
        expected = adamw(params, grads, peaks[i], 2, 8, decays[i], 1.0)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=3e-4, atol=1e-5)


def test_another_peak_is_not_another_program(problem):
    params, grads = problem
    traces = []

    @jax.jit
    def update(g, state, params):
        traces.append(1)
        return optimizer.update(g, state, params)

    optimizer: Any = adamw_with_schedule(0.1, 0, 6)
    state = optimizer.init(params)
    first, _ = update(grads[0], state, params)
    half = state._replace(hyperparams={**state.hyperparams, "peak_lr": state.hyperparams["peak_lr"] / 2})
    second, _ = update(grads[0], half, params)
    assert len(traces) == 1
    np.testing.assert_allclose(second[1], first[1] / 2, rtol=1e-6)


def test_rate_is_in_the_state(problem):
    params, grads = problem
    optimizer = adamw_with_schedule(0.1, 3, 6)
    _, state = follow(optimizer, params, grads[:5])
    found = [
        float(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jax.tree_util.keystr(path, simple=True, separator="/").endswith("hyperparams/learning_rate")
    ]
    assert found == [pytest.approx(rate(4, 0.1, 3, 6), rel=1e-5)]


def test_in_a_trainer():
    optimizer = adamw_with_schedule(0.1, 0, 60, wd_mask=no_bias_wd_mask)
    trainer = Trainer(lambda p, t: ((p - t) ** 2)[:, 0], optimizer, vmap=True)
    state = init_state(eqx.nn.Linear(2, 1, key=jax.random.key(0)), optimizer, seed=0)
    x = np.random.default_rng(0).normal(size=(32, 2)).astype("float32")
    for _ in range(60):
        state, metrics = trainer.step(state, {"inputs": x, "targets": x.sum(1, keepdims=True)})
    assert metrics["loss"] < 1e-2


def test_clipping():
    optimizer: Any = make_optimizer(optax.sgd(1.0), clip_norm=2.0)
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-1.2, -1.6], rtol=1e-6)
    small = jax.tree.map(lambda g: g / 10, grads)
    updates, _ = optimizer.update(small, optimizer.init(grads))
    np.testing.assert_allclose([updates["a"][0], updates["b"][0]], [-0.3, -0.4], rtol=1e-6)
    base = optax.sgd(1.0)
    assert make_optimizer(base, clip_norm=None) is base


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"peak_lr": -1.0}, ValueError, "peak_lr must be at least 0, got -1.0"),
        ({"peak_lr": True}, TypeError, "peak_lr must be a number, got True"),
        ({"peak_lr": float("nan")}, ValueError, "peak_lr must be finite, got nan"),
        ({"peak_lr": "1e-3"}, TypeError, "peak_lr must be a number"),
        ({"peak_lr": np.ones(2)}, ValueError, r"peak_lr must be .* of shape \(\), got shape \(2,\)"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be at least 0"),
        ({"warmup_steps": True}, TypeError, "warmup_steps must be an integer"),
        ({"total_steps": 0}, ValueError, "total_steps must be at least 1"),
        ({"warmup_steps": 10}, ValueError, "total_steps must be larger than warmup_steps=10, got 10"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm must be above 0"),
        ({"b1": 1.0}, ValueError, "b1 must be below 1, got 1.0"),
        ({"b2": -0.1}, ValueError, "b2 must be at least 0"),
        ({"eps": float("inf")}, ValueError, "eps must be finite"),
    ],
)
def test_bad_arguments_of_adamw(kwargs, error, message):
    build: Any = adamw_with_schedule
    with pytest.raises(error, match=message):
        build(**{"peak_lr": 0.1, "warmup_steps": 1, "total_steps": 10} | kwargs)


def test_bad_arguments_of_make_optimizer():
    build: Any = make_optimizer
    with pytest.raises(TypeError, match="base must be an optax optimizer"):
        build(lambda lr: lr)
    with pytest.raises(ValueError, match="clip_norm must be above 0, got -1"):
        make_optimizer(optax.sgd(0.1), clip_norm=-1)
    with pytest.raises(TypeError, match="clip_norm must be a number"):
        make_optimizer(optax.sgd(0.1), clip_norm=True)


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    scale: jax.Array

    def __init__(self, key):
        self.conv = eqx.nn.Conv2d(1, 2, 3, key=key)
        self.norm = eqx.nn.LayerNorm((2, 4, 4))
        self.head = eqx.nn.Linear(4, 2, key=key)
        self.scale = jnp.ones(())


def test_mask_of_equinox_layers():
    params = eqx.filter(Net(jax.random.key(0)), eqx.is_inexact_array)
    mask = no_bias_wd_mask(params)
    assert jax.tree.structure(mask) == jax.tree.structure(params)
    assert (mask.conv.weight, mask.head.weight) == (True, True)
    # A convolution's bias and this norm's parameters have three axes, and still do not decay.
    assert (mask.conv.bias, mask.head.bias, mask.scale) == (False, False, False)
    assert (mask.norm.weight, mask.norm.bias) == (False, False)


def test_mask_of_an_ensemble():
    # With a leading axis of members, biases have two axes.
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(3, 2, key=key))(jax.random.split(jax.random.key(0), 4))
    mask = no_bias_wd_mask(eqx.filter(models, eqx.is_inexact_array))
    assert (mask.weight, mask.bias) == (True, False)


def test_labels():
    params = eqx.filter(Net(jax.random.key(0)), eqx.is_inexact_array)
    labels = partition_labels(params, {"^conv/weight$": "slow", "^conv/": "none", "bias$": "none"}, default="fast")
    assert jax.tree.structure(labels) == jax.tree.structure(params)
    # The first rule that fits counts.
    assert (labels.conv.weight, labels.conv.bias, labels.head.bias, labels.head.weight) == (
        "slow",
        "none",
        "none",
        "fast",
    )


def test_labels_with_optax():
    params = {"body": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}}
    labels = partition_labels(params, {"^body/": "frozen", "^head/": "trained"})
    optimizer: Any = optax.partition({"frozen": optax.set_to_zero(), "trained": optax.sgd(1.0)}, labels)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert np.array_equal(updates["body"]["w"], [0, 0])
    assert np.array_equal(updates["head"]["w"], [-1, -1])


def test_bad_labels():
    label: Any = partition_labels
    params = {"body": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}}
    with pytest.raises(ValueError, match="no rule fits head/w"):
        partition_labels(params, {"body": "a"})
    with pytest.raises(ValueError, match=r"rules \['tail'\] fit no parameter.*\['body/w', 'head/w'\]"):
        partition_labels(params, {"w$": "a", "tail": "b"})
    with pytest.raises(ValueError, match="is not a regular expression"):
        partition_labels(params, {"(": "a"})
    with pytest.raises(TypeError, match="must be a string, got 1"):
        label(params, {"w": 1})
    with pytest.raises(TypeError, match="rules must be a dict"):
        label(params, ["w"])
    with pytest.raises(TypeError, match="default must be a label"):
        label(params, {"w": "a"}, default=3)
