"""Training steps that stop at the first value that is not finite, with the last good state in hand."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from jax.experimental import checkify

from xtrax.training._checked import Verdict
from xtrax.training._checks import check_bool
from xtrax.training._losses import LossFunction
from xtrax.training._programs import TrainProgram
from xtrax.training._state import ResumableState, StateSpec
from xtrax.training._step import train_step
from xtrax.training._trainer import Trainer, check_state

logger = logging.getLogger("xtrax.training")


class SafetyError(checkify.JaxRuntimeError):
    """A check of a training step failed.

    Attributes:
        state: the last good state: the one before the step that failed.
        step: the number of the step that failed.
        origin: the operation in which NaN first appears, with its line, if it was found.
    """

    def __init__(self, message: str, state: ResumableState, origin: str | None = None):
        super().__init__(message)
        self.state = state
        self.step = int(state.step) + 1
        self.origin = origin


@dataclass(frozen=True)
class SafetyManager:
    """What a `SafetyTrainStep` checks.

    Args:
        enabled: off, the step is the trainer's own program, and costs nothing.
        check_nans: look for NaN in the loss, the gradients and the updated parameters.
        check_infs: look for infinities there.

    Checks of checkify in the model or the loss (`checkify.check`) are honoured whenever it is enabled.

    Raises:
        TypeError: an argument that is not a bool.

    Example:
        >>> from xtrax.training import SafetyManager
        >>> SafetyManager(check_infs=False)
        SafetyManager(enabled=True, check_nans=True, check_infs=False)
    """

    enabled: bool = True
    check_nans: bool = True
    check_infs: bool = True

    def __post_init__(self) -> None:
        for name in ("enabled", "check_nans", "check_infs"):
            check_bool(name, getattr(self, name))


@dataclass(frozen=True)
class SafetyTrainStep:
    """The training step of a `Trainer` with checks, by `jax.experimental.checkify`.

    When a check fails, the update is discarded inside the program, so that the state before it is there even where its
    buffers were donated. The error names what failed (the loss, or the gradient or parameter of a leaf) and the step.
    Then the step is repeated once under `checkify.nan_checks`, to say in which operation NaN first appears.

    `Engine` takes one in place of a trainer. It then waits for each call, so that no step is done after a failure; and
    saves the last good state, if it has a `checkpoint_dir`, before it raises.

    Args:
        trainer: what a step does.
        safety_manager: what is checked.

    Raises:
        TypeError: an argument of the wrong kind.

    Example:
        >>> import equinox as eqx, jax, numpy as np, optax
        >>> from xtrax.training import SafetyManager, SafetyTrainStep, Trainer, init_state
        >>> optimizer = optax.sgd(0.1)
        >>> step = SafetyTrainStep(Trainer(lambda p, t: (p - t)[:, 0] ** 2, optimizer, vmap=True), SafetyManager())
        >>> state = init_state(eqx.nn.Linear(2, 1, key=jax.random.key(0)), optimizer, seed=0)
        >>> batch = {"inputs": np.full((4, 2), np.nan, "float32"), "targets": np.zeros((4, 1), "float32")}
        >>> try:
        ...     state, metrics = step.step(state, batch)
        ... except ValueError as error:
        ...     print(str(error).partition(";")[0])
        the loss has NaN at step 1
    """

    trainer: Trainer
    safety_manager: SafetyManager = field(default_factory=SafetyManager)
    _programs: list[TrainProgram] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.trainer, Trainer):
            raise TypeError(f"trainer must be a Trainer, got {type(self.trainer).__name__}")
        if not isinstance(self.safety_manager, SafetyManager):
            raise TypeError(f"safety_manager must be a SafetyManager, got {type(self.safety_manager).__name__}")

    def step(self, state: ResumableState, batch: dict[str, Any]) -> tuple[ResumableState, dict[str, jax.Array]]:
        """`Trainer.step`, checked.

        Args:
            state: the state to start from.
            batch: `inputs`, `targets` and optionally `weight`.

        Returns:
            The next state, and the metrics.

        Raises:
            SafetyError: a check failed; it is a `ValueError`, and its `state` is the last good one.
            TypeError: a state, batch or loss of the wrong kind.
            ValueError: a batch or loss with the wrong contents or shapes.
        """
        if not self.safety_manager.enabled:
            return self.trainer.step(state, batch)
        check_state(state)
        checked, _ = self.trainer.check_batch(batch)
        spec = StateSpec.of(state)
        arrays, metrics, verdict = self._program(spec).one(spec.arrays(state), checked)
        after = spec.state(arrays)
        if verdict is not None and verdict.done < 1:
            raise safety_error(self.trainer, after, checked, verdict)
        return after, {name: value[0] for name, value in metrics.items()}

    def _program(self, spec: StateSpec) -> TrainProgram:
        for program in self._programs:
            if program.spec.matches(spec):
                return program
        self._programs.append(TrainProgram(self.trainer, spec, donate=False, safety=self.safety_manager))
        return self._programs[-1]


def create_train_step(
    loss_fn: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    vmap: bool = False,
    accumulate: int = 1,
    safety_manager: SafetyManager | None = None,
) -> Callable[[ResumableState, dict[str, Any]], tuple[ResumableState, dict[str, jax.Array]]]:
    """A compiled training step, for a loop of one's own.

    Args:
        loss_fn: as for `Trainer`.
        optimizer: as for `Trainer`.
        vmap: as for `Trainer`.
        accumulate: as for `Trainer`.
        safety_manager: what to check; None checks nothing.

    Returns:
        A function `(state, batch) -> (state, metrics)`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `accumulate` below 1.

    Example:
        >>> import equinox as eqx, jax, numpy as np, optax
        >>> from xtrax.training import create_train_step, init_state
        >>> optimizer = optax.sgd(0.1)
        >>> step = create_train_step(lambda p, t: (p - t)[:, 0] ** 2, optimizer, vmap=True)
        >>> state = init_state(eqx.nn.Linear(2, 1, key=jax.random.key(0)), optimizer, seed=0)
        >>> state, metrics = step(state, {"inputs": np.ones((4, 2), "float32"), "targets": np.ones((4, 1), "float32")})
        >>> int(state.step)
        1
    """
    trainer = Trainer(loss_fn, optimizer, vmap=vmap, accumulate=accumulate)
    return trainer.step if safety_manager is None else SafetyTrainStep(trainer, safety_manager).step


def safety_error(trainer: Trainer, state: ResumableState, batch: Any, verdict: Verdict) -> SafetyError:
    """The error of a failed check, after the step was repeated to find where NaN comes from.

    Args:
        trainer: what a step does.
        state: the last good state.
        batch: the batch of the step that failed.
        verdict: what the checks found.
    """
    message = verdict.message
    origin = _origin(trainer, state, batch)
    where = f"; NaN first appears here: {origin}" if origin else ""
    return SafetyError(f"{message}; the state of step {int(state.step)} is kept{where}", state, origin)


def _origin(trainer: Trainer, state: ResumableState, batch: Any) -> str | None:
    spec = StateSpec.of(state)

    def step(arrays: list[Any], batch: Any) -> Any:
        after, metrics = train_step(trainer, spec.state(arrays), batch, set())
        return spec.arrays(after), metrics

    try:
        error, _ = jax.jit(checkify.checkify(step, errors=checkify.nan_checks))(spec.arrays(state), batch)
        found = error.get()
    except Exception:  # the failure itself must not be hidden by that of this search
        logger.warning("where NaN comes from could not be found", exc_info=True)
        return None
    return found if found is not None and "nan generated" in found else None
