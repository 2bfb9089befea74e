"""The compiled programs: a scan of training steps, and one evaluation step."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from xtrax.training._batch import Batch, check_scalar_weight
from xtrax.training._state import StateSpec
from xtrax.training._step import Metric, eval_step, train_step

if TYPE_CHECKING:
    from xtrax.training._trainer import Trainer

Arrays = list[Any]


def _ignore() -> None:
    return None


class TrainProgram:
    """Training steps for states of one structure.

    Both entry points are a `lax.scan` over steps, also for one step, because XLA compiles the body of a loop alike
    whatever its length, and a step outside a loop not always: results are equal bit for bit however steps are grouped.

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

        def one(arrays: Arrays, batch: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
            on_trace()
            return jax.lax.scan(step, arrays, jax.tree.map(lambda x: x[None], batch))

        def many(arrays: Arrays, batches: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
            on_trace()
            return jax.lax.scan(step, arrays, batches)

        self._plain = plain
        donated = (0,) if donate else ()
        self._one = jax.jit(one, donate_argnums=donated)
        self.many = jax.jit(many, donate_argnums=donated)

    def one(self, arrays: Arrays, batch: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
        """One step; each metric comes with a leading axis of 1."""
        self.check(arrays, batch)
        return self._one(arrays, batch)

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
