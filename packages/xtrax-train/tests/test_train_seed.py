"""What the first seed says of training."""

import collections
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
import optax

from xtrax.training import SafetyTrainStep, Trainer, init_state


class Activated(eqx.Module):
    """A model with a static callable and a callable leaf, as `eqx.nn.MLP` has."""

    linear: eqx.nn.Linear
    activation: Callable
    scale: float = eqx.field(static=True, default=2.0)

    def __call__(self, x):
        return self.scale * self.activation(self.linear(x))


def test_seed_trainer_step_has_filter_jit_semantics():
    traces = collections.Counter()

    def loss(predictions, targets):
        traces["loss"] += 1
        return ((predictions - targets) ** 2)[:, 0]

    optimizer = optax.sgd(0.1)
    model = Activated(eqx.nn.Linear(2, 1, key=jax.random.key(0)), jax.nn.tanh)
    state = init_state(model, optimizer, seed=0)
    batch = {"inputs": np.ones((4, 2), "float32"), "targets": np.zeros((4, 1), "float32")}
    for step in (Trainer(loss, optimizer, vmap=True).step, SafetyTrainStep(Trainer(loss, optimizer, vmap=True)).step):
        after, _ = step(state, batch)
        assert after.model.activation is jax.nn.tanh
        traces.clear()
        # Arrays are traced: other values are the same program.
        after, metrics = step(after, batch)
        assert not traces
        # What is not an array is held constant: another value is another program, and counts.
        other = eqx.tree_at(lambda s: s.model.activation, after, jax.nn.relu)
        _, other_metrics = step(other, batch)
        assert traces["loss"]
        predictions = jax.vmap(other.model)(batch["inputs"])
        np.testing.assert_allclose(other_metrics["loss"], np.mean(np.square(predictions)), rtol=1e-5)
        assert metrics["loss"] != other_metrics["loss"]
