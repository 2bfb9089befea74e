"""The compiled programs: a scan of training steps, and one evaluation step."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.training._batch import Batch, check_scalar_weight
from xtrax.training._state import StateSpec
from xtrax.training._step import Metric, eval_step, train_step

if TYPE_CHECKING:
    from xtrax.training._trainer import Trainer

Arrays = list[Any]
Step = Callable[[Arrays, Batch], tuple[Arrays, dict[str, jax.Array]]]


def _ignore() -> None:
    return None


class TrainProgram:
    """Training steps for states of one structure.

    Both entry points are a loop whose number of steps is an argument. XLA compiles the body of such a loop alike
    whatever its length, but takes a loop that is known to run once apart (a `lax.scan` of length 1 too) and then fuses
    its operations otherwise. So the results are equal bit for bit however steps are grouped.

    Args:
        trainer: what a step does.
        spec: the structure of the states.
        donate: reuse the buffers of the arrays passed in.
        on_trace: called once for every program that is traced.
    """

    def __init__(self, trainer: "Trainer", spec: StateSpec, *, donate: bool, on_trace: Callable[[], None] = _ignore):
        self.spec = spec
        self._scalars: set[str] | None = None

        def plain(arrays: Arrays, batch: Batch, scalars: set[str]) -> tuple[Arrays, dict[str, jax.Array]]:
            state, metrics = train_step(trainer, spec.state(arrays), batch, scalars)
            return spec.arrays_after_step(state, arrays), metrics

        def step(arrays: Arrays, batch: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
            return plain(arrays, batch, set())

        def one(arrays: Arrays, batch: Batch, steps: jax.Array) -> tuple[Arrays, dict[str, jax.Array]]:
            on_trace()
            return _loop(step, arrays, jax.tree.map(lambda x: x[None], batch), steps)

        def many(arrays: Arrays, batches: Batch, steps: jax.Array) -> tuple[Arrays, dict[str, jax.Array]]:
            on_trace()
            return _loop(step, arrays, batches, steps)

        self._plain = plain
        donated = (0,) if donate else ()
        self._one = jax.jit(one, donate_argnums=donated)
        self._many = jax.jit(many, donate_argnums=donated)
        self._lengths: dict[int, jax.Array] = {}

    def many(self, arrays: Arrays, batches: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
        """As many steps as the leading axis of the stacked batches is long."""
        return self._many(arrays, batches, self._length(jax.tree.leaves(batches)[0].shape[0]))

    def one(self, arrays: Arrays, batch: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
        """One step; each metric comes with a leading axis of 1."""
        self.check(arrays, batch)
        return self._one(arrays, batch, self._length(1))

    def _length(self, steps: int) -> jax.Array:
        # Kept on the device: a number would be transferred at every call.
        if steps not in self._lengths:
            with jax.ensure_compile_time_eval():
                self._lengths[steps] = jnp.asarray(steps, jnp.int32)
        return self._lengths[steps]

    def check(self, arrays: Arrays, batch: Batch) -> None:
        """Refuses weights that the loss would ignore, before any step is done with them."""
        if "weight" not in batch or not isinstance(batch["weight"], np.ndarray):
            return
        if self._scalars is None:
            found: set[str] = set()
            jax.eval_shape(lambda arrays, batch: self._plain(arrays, batch, found), arrays, batch)
            self._scalars = found & {"loss"}
        check_scalar_weight(batch, self._scalars)


class EvalProgram:
    """The evaluation of a batch, for states of one structure."""

    def __init__(
        self, trainer: "Trainer", metrics: Mapping[str, Metric], spec: StateSpec, *, on_trace: Callable[[], None]
    ):
        self.spec = spec
        self._scalars: set[str] = set()

        def one(arrays: Arrays, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
            on_trace()
            return eval_step(trainer, metrics, spec.state(arrays), batch, self._scalars)

        self._one = jax.jit(one)

    def __call__(self, arrays: Arrays, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        """For each name the weighted sum over the examples and the sum of their weights, arrays of shape ()."""
        results = self._one(arrays, batch)
        check_scalar_weight(batch, self._scalars)
        return results


def _loop(step: Step, arrays: Arrays, batches: Batch, steps: jax.Array) -> tuple[Arrays, dict[str, jax.Array]]:
    """`lax.scan(step, arrays, batches)`, but for a number of steps that is not known when it is compiled."""
    step = jax.jit(step, inline=True)  # so that the step is traced once for both uses here
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    _, metrics = jax.eval_shape(step, arrays, one)
    length = jax.tree.leaves(batches)[0].shape[0]
    collected = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), metrics)

    def body(i: jax.Array, carry: tuple[Arrays, Any]) -> tuple[Arrays, Any]:
        arrays, collected = carry
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
        arrays, metrics = step(arrays, batch)
        return arrays, jax.tree.map(lambda all_, x: all_.at[i].set(x), collected, metrics)

    return jax.lax.fori_loop(0, steps, body, (arrays, collected))
