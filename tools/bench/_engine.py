"""The training run of the rows engine-1 and engine-k."""

import itertools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tools.bench.harness import Line, Times, compare_times
from xtrax.training import Engine, ResumableState, Trainer, init_state

STEPS = 2000
BATCH = 32
SIZES = (64, 128, 128, 10)


class Network(eqx.Module):
    """A network of three layers, for a batch of inputs `(n, 64)`."""

    weights: list[jax.Array]
    biases: list[jax.Array]

    def __init__(self, key: jax.Array):
        """Draw the weights."""
        keys = jax.random.split(key, len(SIZES) - 1)
        pairs = list(itertools.pairwise(SIZES))
        self.weights = [jax.random.normal(k, pair) / pair[0] ** 0.5 for k, pair in zip(keys, pairs, strict=True)]
        self.biases = [jnp.zeros(b) for _, b in pairs]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Outputs `(n, 10)`."""
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = jax.nn.relu(x @ weight + bias)
        return x @ self.weights[-1] + self.biases[-1]


class Keep:
    """A callback that keeps the metrics of every step."""

    def __init__(self) -> None:
        """Start with none."""
        self.metrics: list[Any] = []

    def on_step_end(self, state: ResumableState, metrics: Any) -> None:
        """Keep them."""
        self.metrics.append(metrics)


class Data:
    """The same batches in every epoch."""

    def __init__(self) -> None:
        """Draw them."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(STEPS, BATCH, SIZES[0])).astype("float32")
        y = rng.normal(size=(STEPS, BATCH, SIZES[-1])).astype("float32")
        self.batches = [{"inputs": a, "targets": b} for a, b in zip(x, y, strict=True)]

    def train_iter(self) -> list[dict[str, np.ndarray]]:
        """The batches."""
        return self.batches


def loss_fn(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean squared error."""
    return jnp.mean((predictions - targets) ** 2)


def compare(steps_per_call: int, peer: Callable[[Any, Any, Any], Callable[[], Any]]) -> Times:
    """Time `Engine.fit_sync` with one callback against a hand-written loop.

    Args:
        steps_per_call: Of the engine.
        peer: `(step, carry, batches)` to the loop, of no arguments, which returns the last carry's parameters and
            the losses `(STEPS,)`.
    """
    data, optimizer = Data(), optax.adam(1e-4)
    state = init_state(Network(jax.random.key(0)), optimizer, seed=0)
    params, static = eqx.partition(state.model, eqx.is_array)

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = carry

        def objective(params: Any) -> jax.Array:
            return loss_fn(eqx.combine(params, static)(batch["inputs"]), batch["targets"])

        loss, grads = jax.value_and_grad(objective)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    callback = Keep()
    engine = Engine(Trainer(loss_fn, optimizer), [callback], steps_per_call=steps_per_call)

    def work() -> Any:
        callback.metrics.clear()
        model = engine.fit_sync(state, data, 1).model
        return eqx.filter(model, eqx.is_array), np.asarray([metrics["loss"] for metrics in callback.metrics])

    # Other fusions round otherwise, and adam divides by small numbers: hence the tolerance.
    return compare_times(work, peer(step, (params, state.opt_state), data.batches), rtol=1e-2, atol=1e-3)


def line(name: str, times: Times, goal: float) -> Line:
    """The line of a row."""
    return Line(name, times.ratio, goal, detail=f"{times} for {STEPS} steps")
