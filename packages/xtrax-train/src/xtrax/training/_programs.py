"""The compiled programs: a scan of training steps, and one evaluation step."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from xtrax.training._batch import Batch, check_scalar_weight
from xtrax.training._checked import Verdict, check_values, checked_loop
from xtrax.training._state import StateSpec
from xtrax.training._step import Metric, eval_step, train_step

if TYPE_CHECKING:
    from xtrax.training._placement import Placement
    from xtrax.training._safety import SafetyManager
    from xtrax.training._trainer import Trainer

Arrays = list[Any]
Step = Callable[[Any, Batch], tuple[Any, dict[str, jax.Array]]]

Result = tuple[Arrays, dict[str, jax.Array], Verdict | None]
"""The arrays after k steps, for each metric its values of shape `(k,)`, and what the checks found, if there are any."""


def _ignore() -> None:
    return None


class _Program(Protocol):
    spec: StateSpec


_P = TypeVar("_P", bound=_Program)


def program_for(programs: list[_P], spec: StateSpec, make: Callable[[], _P]) -> _P:
    """The one of `programs` for states of this structure; made, and added to them, if there is none."""
    for program in programs:
        if program.spec.matches(spec):
            return program
    programs.append(make())
    return programs[-1]


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
        safety: what is checked in every step, or None.
        placement: how states and batches lie on a mesh, or None.
    """

    def __init__(
        self,
        trainer: "Trainer",
        spec: StateSpec,
        *,
        donate: bool,
        on_trace: Callable[[], None] = _ignore,
        safety: "SafetyManager | None" = None,
        placement: "Placement | None" = None,
    ):
        self.spec = spec
        self._scalars: set[str] | None = None
        self._placement = placement
        checks = None
        if safety is not None:
            checks = functools.partial(check_values, check_nans=safety.check_nans, check_infs=safety.check_infs)

        def plain(arrays: Arrays, batch: Batch, scalars: set[str]) -> tuple[Arrays, dict[str, jax.Array]]:
            state, metrics = train_step(trainer, spec.state(arrays), batch, scalars, checks)
            arrays = spec.arrays_after_step(state, arrays)
            return arrays if placement is None else placement.constrain(spec, arrays), metrics

        def step(arrays: Arrays, batch: Batch) -> tuple[Arrays, dict[str, jax.Array]]:
            return plain(arrays, batch, set())

        def many(arrays: Arrays, batches: Batch, steps: jax.Array) -> tuple[Arrays, dict[str, jax.Array], Any]:
            on_trace()
            if safety is None:
                arrays, metrics = _loop(step, arrays, batches, steps)
                verdict = None
            else:
                arrays, metrics, verdict = checked_loop(step, _loop)(arrays, batches, steps)
            if placement is not None:
                arrays = placement.constrain(spec, arrays)
                metrics, verdict = placement.replicated((metrics, verdict))
            return arrays, metrics, verdict

        def one(arrays: Arrays, batch: Batch, steps: jax.Array) -> tuple[Arrays, dict[str, jax.Array], Any]:
            return many(arrays, jax.tree.map(lambda x: x[None], batch), steps)

        self._plain = plain
        donated = (0,) if donate else ()
        self._one = jax.jit(one, donate_argnums=donated)
        self._many = jax.jit(many, donate_argnums=donated)
        self._lengths: dict[int, jax.Array] = {}

    def many(self, arrays: Arrays, batches: Batch) -> Result:
        """As many steps as the leading axis of the stacked batches is long."""
        steps = jax.tree.leaves(batches)[0].shape[0]
        if self._placement is not None:
            batches = self._placement.place_batch(batches, stacked=True)
        return self._result(self._many(arrays, batches, self._length(steps)))

    def one(self, arrays: Arrays, batch: Batch) -> Result:
        """One step; each metric comes with a leading axis of 1."""
        self.check(arrays, batch)
        if self._placement is not None:
            batch = self._placement.place_batch(batch)
        return self._result(self._one(arrays, batch, self._length(1)))

    def _result(self, result: tuple[Arrays, dict[str, jax.Array], Any]) -> Result:
        arrays, metrics, verdict = result
        return arrays, metrics, None if verdict is None else Verdict(*verdict)

    def _length(self, steps: int) -> jax.Array:
        # Kept on the device: a number would be transferred at every call.
        if steps not in self._lengths:
            with jax.ensure_compile_time_eval():
                length = jnp.asarray(steps, jnp.int32)
            self._lengths[steps] = length if self._placement is None else self._placement.place_replicated(length)
        return self._lengths[steps]

    def check(self, arrays: Arrays, batch: Batch) -> None:
        """Refuses weights that the loss would ignore, before any step is done with them."""
        if "weight" not in batch or not isinstance(batch["weight"], np.ndarray):
            return
        if self._scalars is None:
            found: set[str] = set()
            plain = checkify.checkify(lambda arrays, batch: self._plain(arrays, batch, found))
            jax.eval_shape(plain, arrays, batch)
            self._scalars = found & {"loss"}
        check_scalar_weight(batch, self._scalars)


class EvalProgram:
    """The evaluation of a batch, for states of one structure."""

    def __init__(
        self,
        trainer: "Trainer",
        metrics: Mapping[str, Metric],
        spec: StateSpec,
        *,
        on_trace: Callable[[], None],
        safety: "SafetyManager | None" = None,
        placement: "Placement | None" = None,
    ):
        self.spec = spec
        self._scalars: set[str] = set()
        self._placement = placement
        self._checked = safety is not None

        def one(arrays: Arrays, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
            on_trace()
            results = eval_step(trainer, metrics, spec.state(arrays), batch, self._scalars)
            return results if placement is None else placement.replicated(results)

        self._one = jax.jit(checkify.checkify(one, errors=checkify.user_checks) if self._checked else one)

    def __call__(self, arrays: Arrays, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
        """For each name the weighted sum over the examples and the sum of their weights, arrays of shape ().

        Raises:
            checkify.JaxRuntimeError: a check of the model, the loss or a metric failed.
        """
        placed = batch if self._placement is None else self._placement.place_batch(batch)
        results = self._one(arrays, placed)
        if self._checked:
            error, results = results
            error.throw()
        check_scalar_weight(batch, self._scalars)
        return results


def _loop(step: Step, arrays: Any, batches: Batch, steps: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
    """`lax.scan(step, arrays, batches)`, but for a number of steps that is not known when it is compiled."""
    step = jax.jit(step, inline=True)  # so that the step is traced once for both uses here
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    _, metrics = jax.eval_shape(step, arrays, one)
    length = jax.tree.leaves(batches)[0].shape[0]
    collected = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), metrics)

    def body(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        arrays, collected = carry
        batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)
        arrays, metrics = step(arrays, batch)
        return arrays, jax.tree.map(lambda all_, x: all_.at[i].set(x), collected, metrics)

    return jax.lax.fori_loop(0, steps, body, (arrays, collected))
