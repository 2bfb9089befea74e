"""Trainer: how one training step is done."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import optax

from xtrax.training._batch import Batch, BatchCheck
from xtrax.training._checks import check_bool, check_int
from xtrax.training._programs import TrainProgram, program_for
from xtrax.training._state import ResumableState, StateSpec


@dataclass(frozen=True)
class Trainer:
    """A model's training step: loss, gradient, update.

    Args:
        loss_fn: `(predictions, targets)` to a scalar, or to one value per example of shape `(n,)`, which is averaged
            with `batch["weight"]` where there is one; or `(loss, aux)` with `aux` a dict of values of those shapes.
        optimizer: an optax optimizer. Its update receives the gradients, its state, the parameters (the inexact arrays
            of the model) and, if it takes extra arguments, `value=` the loss.
        vmap: the model takes one example: `predictions = jax.vmap(model, axis_name="batch")(inputs)`. Otherwise it is
            called on the whole batch.
        accumulate: the number of equal micro-batches that a batch is split into; gradients are those of the whole
            batch, to rounding, if the loss is an average over examples.
        donate: `Engine` reuses the buffers of the state for the next one, so that a callback copies what it keeps. The
            state that a caller passes in is never donated, and `step` never donates.

    A model that takes `key=` is given one, split from the state's at every step (with `vmap`, one per example). A model
    with stateful layers, whose `eqx.nn.State` is in `state.extras["model_state"]`, is called as
    `model(inputs, model_state)` and returns `(predictions, model_state)`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `accumulate` below 1.

    Example:
        >>> import equinox as eqx, jax, numpy as np, optax
        >>> from xtrax.training import Trainer, init_state
        >>> optimizer = optax.sgd(0.1)
        >>> trainer = Trainer(lambda p, t: (p - t)[:, 0] ** 2, optimizer, vmap=True)
        >>> state = init_state(eqx.nn.Linear(2, 1, key=jax.random.key(0)), optimizer, seed=0)
        >>> batch = {"inputs": np.ones((4, 2), "float32"), "targets": np.zeros((4, 1), "float32")}
        >>> state, metrics = trainer.step(state, batch)
        >>> int(state.step), metrics["loss"].shape
        (1, ())
    """

    loss_fn: Callable[[Any, Any], Any]
    optimizer: optax.GradientTransformation
    vmap: bool = field(default=False, kw_only=True)
    accumulate: int = field(default=1, kw_only=True)
    donate: bool = field(default=True, kw_only=True)
    _programs: list[TrainProgram] = field(default_factory=list, init=False, repr=False, compare=False)
    _check: BatchCheck = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn must be a function (predictions, targets) -> loss, got {self.loss_fn!r}")
        if not isinstance(self.optimizer, optax.GradientTransformation):
            raise TypeError(f"optimizer must be an optax optimizer such as optax.adam(1e-3), got {self.optimizer!r}")
        check_bool("vmap", self.vmap)
        check_int("accumulate", self.accumulate, at_least=1)
        check_bool("donate", self.donate)
        object.__setattr__(self, "_check", BatchCheck(accumulate=self.accumulate))

    def step(self, state: ResumableState, batch: dict[str, Any]) -> tuple[ResumableState, dict[str, jax.Array]]:
        """One compiled update; the arrays of `state` stay valid.

        Args:
            state: the state to start from.
            batch: `inputs` and `targets`, pytrees of arrays `(n, ...)`, and optionally `weight` of shape `(n,)`.

        Returns:
            The next state, and the metrics: `loss` and the aux, arrays of shape `()`.

        Raises:
            TypeError: a state, batch or loss of the wrong kind.
            ValueError: a batch or loss with the wrong contents or shapes; the message names the leaf.
        """
        check_state(state)
        checked, _ = self.check_batch(batch)
        spec = StateSpec.of(state)
        program = self._program(spec, state)
        arrays, metrics, _ = program.one(spec.arrays(state), checked)
        return spec.state(arrays), {name: value[0] for name, value in metrics.items()}

    def check_batch(self, batch: Any) -> tuple[Batch, Any]:
        """The batch as a dict, and its signature, after the checks that `step` describes."""
        return self._check(batch)

    def _program(self, spec: StateSpec, state: ResumableState) -> TrainProgram:
        def make() -> TrainProgram:
            check_opt_state(state, self.optimizer)
            return TrainProgram(self, spec, donate=False)

        return program_for(self._programs, spec, make)


def check_state(state: object) -> ResumableState:
    """Returns `state` if it can be trained.

    Raises:
        TypeError: not a `ResumableState`, or one whose model cannot be called.
    """
    if not isinstance(state, ResumableState):
        raise TypeError(f"state must be a ResumableState, from init_state(...), got {type(state).__name__}")
    if not callable(state.model):
        raise TypeError(f"the model of a state must be callable, got {type(state.model).__name__}")
    return state


def check_opt_state(state: ResumableState, optimizer: optax.GradientTransformation) -> None:
    """Refuses a state whose optimizer state another optimizer made.

    Raises:
        ValueError: the structures differ.
    """
    params = eqx.filter(state.model, eqx.is_inexact_array)
    expected = jax.tree.structure(eqx.filter_eval_shape(optimizer.init, params))
    found = jax.tree.structure(state.opt_state)
    if found != expected:
        raise ValueError(
            f"state.opt_state was not made by the trainer's optimizer: it is {found}, and the optimizer makes "
            f"{expected}. Pass one optimizer to both init_state and Trainer"
        )
