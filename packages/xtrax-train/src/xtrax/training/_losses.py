"""Losses: the protocol, and ways to put several together."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp


@runtime_checkable
class LossFunction(Protocol):
    """A loss, as `Trainer` takes it.

    A plain function is one. It returns one value per example, of shape `(n,)`, which is averaged with
    `batch["weight"]`; or a scalar; or either with a dict of more values of those shapes, `(loss, aux)`.
    """

    def __call__(self, predictions: Any, targets: Any, /) -> Any:
        """The loss of the predictions of a batch."""
        ...


@dataclass(frozen=True)
class WeightedLoss:
    """A loss times a number.

    Args:
        loss_fn: the loss; what it returns as aux is left as it is.
        weight: a finite number. It is part of the compiled program.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `weight` is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.training import WeightedLoss
        >>> half = WeightedLoss(lambda p, t: (p - t) ** 2, 0.5)
        >>> print(half(jnp.array([1.0, 2.0]), jnp.array([0.0, 0.0])))
        [0.5 2. ]
    """

    loss_fn: LossFunction
    weight: float

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise TypeError(f"loss_fn must be a function (predictions, targets) -> loss, got {self.loss_fn!r}")
        _check_weight("weight", self.weight)

    def __call__(self, predictions: Any, targets: Any, /) -> Any:
        """The loss times the weight, and the aux if there is one."""
        loss, aux = _split(self.loss_fn(predictions, targets))
        weighted = self.weight * jnp.asarray(loss)
        return weighted if aux is None else (weighted, aux)


@dataclass(frozen=True)
class MultiTaskLoss:
    """The weighted sum of the losses of several tasks, each reported by its name.

    The model returns a dict of predictions by task, and `batch["targets"]` is a dict of targets by task.

    Args:
        losses: a loss for each task. All return one value per example, or all return a scalar.
        weights: the weight of each task; 1 for those that are left out.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: no tasks, a task named "loss", a weight for a task that there is not, or one that is not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.training import MultiTaskLoss
        >>> squared = lambda p, t: (p - t) ** 2
        >>> loss = MultiTaskLoss({"mass": squared, "charge": squared}, weights={"charge": 3.0})
        >>> x = {"mass": jnp.array([1.0]), "charge": jnp.array([2.0])}
        >>> total, by_task = loss(x, {"mass": jnp.array([0.0]), "charge": jnp.array([0.0])})
        >>> print(total, by_task["charge"])
        [13.] [4.]
    """

    losses: Mapping[str, LossFunction]
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("losses", self.losses), ("weights", self.weights)):
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a dict by task, got {type(value).__name__}")
        if not self.losses:
            raise ValueError("losses must have at least one task, got none")
        for task, loss_fn in self.losses.items():
            if not isinstance(task, str) or not callable(loss_fn):
                raise TypeError(f"losses must be a dict of names to functions, got {task!r}: {loss_fn!r}")
        if "loss" in self.losses:
            raise ValueError('a task must not have the name "loss", which is taken by the sum; choose another')
        for task, weight in self.weights.items():
            if task not in self.losses:
                raise ValueError(f"weights has {task!r}, which is no task; there are {sorted(self.losses)}")
            _check_weight(f"weights[{task!r}]", weight)

    def __call__(self, predictions: Any, targets: Any, /) -> tuple[Any, dict[str, Any]]:
        """The weighted sum, and the unweighted loss of each task with its aux as `task/name`.

        Raises:
            TypeError: predictions or targets are not a dict.
            ValueError: a task is missing in them, or losses of different shapes.
        """
        for name, value in (("predictions", predictions), ("targets", targets)):
            if not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a dict by task, got {type(value).__name__}")
            if missing := [task for task in self.losses if task not in value]:
                raise ValueError(f"{name} has {sorted(map(str, value))} and lacks the tasks {missing}")
        values: dict[str, Any] = {}
        reported: dict[str, Any] = {}
        for task, loss_fn in self.losses.items():
            loss, aux = _split(loss_fn(predictions[task], targets[task]))
            values[task] = reported[task] = jnp.asarray(loss)
            reported |= {f"{task}/{name}": value for name, value in (aux or {}).items()}
        shapes = {task: value.shape for task, value in values.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"the losses of all tasks must have one shape, () or (n,), got {shapes}")
        total = sum(self.weights.get(task, 1.0) * value for task, value in values.items())
        return total, reported


def _split(result: Any) -> tuple[Any, Mapping[str, Any] | None]:
    return result if isinstance(result, tuple) and len(result) == 2 else (result, None)


def _check_weight(name: str, weight: Any) -> None:
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise TypeError(f"{name} must be a number, got {weight!r} ({type(weight).__name__})")
    if not math.isfinite(weight):
        raise ValueError(f"{name} must be finite, got {weight}")
