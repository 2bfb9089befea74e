"""What `xtrax run` reads: the tables of a training run's TOML file."""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from xtrax.cli._errors import CLIError
from xtrax.config import (
    TomlDocument,
    apply_overrides,
    check_schema_version,
    load_toml_document,
    structure_dataclass,
)

SCHEMA_VERSION = 1


class ConfigError(CLIError, ValueError):
    """A configuration that cannot be run: one line for each fault, with the file, the line and the key."""


def _is_path(value: str) -> None:
    if not re.fullmatch(r"[^:\s]+:[^:\s]+", value):
        module, _, symbol = value.rpartition(".")
        hint = (
            f"; did you mean {module}:{symbol}?"
            if re.fullmatch(r"\w+(\.\w+)*", module) and symbol.isidentifier()
            else ""
        )
        raise ValueError(f"must be module:symbol, such as optax:adam, found {value!r}{hint}")


def _at_least_1(value: float) -> None:
    if value < 1:
        raise ValueError(f"must be at least 1, found {value}")


def _is_positive(value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"must be positive, found {value}")


def _is_seed(value: int | None) -> None:
    if value is not None and not 0 <= value < 2**32:
        raise ValueError(f"must be from 0 to {2**32 - 1}, found {value}")


def _are_paths(value: dict[str, str]) -> None:
    for name, path in value.items():
        try:
            _is_path(path)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from error


def _are_metrics(value: dict[str, str]) -> None:
    _are_paths(value)
    if "loss" in value:
        raise ValueError("loss is the name of the loss itself, which is always evaluated; name the metric otherwise")


def _says_when(value: "CheckpointConfig | None") -> None:
    if value is not None and value.every_steps is value.every_minutes is value.every_epochs is value.best is None:
        raise ValueError("set every_steps, every_minutes, every_epochs or best, or leave the table out")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """`[model]`: `path(**kwargs)`, with `key=` or `seed=` if it takes one, gives the model.

    Attributes:
        path: `module:symbol` of a class or function.
        kwargs: Its keyword arguments.
        vmap: Whether the model takes one example and is mapped over the batch; else it takes the batch.
    """

    path: str = field(metadata={"check": _is_path})
    kwargs: dict[str, Any] = field(default_factory=dict)
    vmap: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """`[optimizer]`: `path(**kwargs)` gives an `optax.GradientTransformation`.

    Attributes:
        path: `module:symbol`, such as `optax:adam`.
        kwargs: Its keyword arguments.
    """

    path: str = field(metadata={"check": _is_path})
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """`[loss]`: the function of `(predictions, targets)` itself, with `kwargs` bound.

    Attributes:
        path: `module:symbol`, such as `optax:softmax_cross_entropy_with_integer_labels`.
        kwargs: Keyword arguments bound to it.
    """

    path: str = field(metadata={"check": _is_path})
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`[data]`: `factory(batch_size=, seed=, **kwargs)` gives a `DataModule`.

    Attributes:
        factory: `module:symbol`.
        batch_size: Examples in a batch.
        kwargs: Further keyword arguments, passed as they are.
        seed: The seed of the data; the run's own if left out.
    """

    factory: str = field(metadata={"check": _is_path})
    batch_size: int = field(metadata={"check": _at_least_1})
    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int | None = field(default=None, metadata={"check": _is_seed})


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`[checkpoint]`: when to save besides the end, Ctrl-C and errors, as `xtrax.training.Checkpoint` takes it.

    Without the table, training saves at the ends of epochs, some seconds apart.

    Attributes:
        every_steps: At each step that this divides.
        every_minutes: At the first step after so many minutes since the last save.
        every_epochs: At the end of each epoch whose number, from 1, this divides.
        best: The name of an evaluation result; the state with its best value is kept in `checkpoints/best`.
        best_mode: Whether `"min"` or `"max"` is best.
    """

    every_steps: int | None = field(default=None, metadata={"check": _is_positive})
    every_minutes: float | None = field(default=None, metadata={"check": _is_positive})
    every_epochs: int | None = field(default=None, metadata={"check": _is_positive})
    best: str | None = None
    best_mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. Every key that is not named here is refused.

    Attributes:
        num_epochs: How many passes over the data.
        model: The model.
        optimizer: The optimizer.
        loss: The loss.
        data: The data.
        schema_version: The layout of the file: 1.
        kind: What the file describes; only `"train"`, a training run, which is also what it is if left out.
        seed: Of the model, of the training state and, unless `[data]` has its own, of the data.
        steps_per_call: Steps compiled into one call of the engine; results do not depend on it.
        metrics: A name for each `module:symbol` of `(predictions, targets) -> (n,)`.
        checkpoint: When to save.
    """

    num_epochs: int = field(metadata={"check": _at_least_1})
    model: ModelConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    data: DataConfig
    schema_version: int = SCHEMA_VERSION
    kind: Literal["train"] = "train"
    seed: int = field(default=0, metadata={"check": _is_seed})
    steps_per_call: int = field(default=1, metadata={"check": _at_least_1})
    metrics: dict[str, str] = field(default_factory=dict, metadata={"check": _are_metrics})
    checkpoint: CheckpointConfig | None = field(default=None, metadata={"check": _says_when})


def load_train_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> tuple[TrainConfig, TomlDocument]:
    """Read a training run's TOML file.

    Args:
        path: The file.
        overrides: `key=value` texts, such as `optimizer.kwargs.learning_rate=1e-3`.

    Returns:
        The configuration, and the document that it came from, overrides applied.

    Raises:
        ConfigError: With every fault of the file at once.

    Examples:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "train.toml")
        >>> _ = path.write_text('''
        ... schema_version = 1
        ... num_epochs = 2
        ... model = {path = "equinox.nn:MLP"}
        ... optimizer = {path = "optax:adam", kwargs = {learning_rate = 1e-3}}
        ... loss = {path = "optax:l2_loss"}
        ... data = {factory = "data:make", batch_size = 32}
        ... ''')
        >>> config, _ = load_train_config(path, ["num_epochs=3"])
        >>> config.num_epochs, config.optimizer.kwargs
        (3, {'learning_rate': 0.001})
    """
    document = load_toml_document(path, ConfigError)
    changed = apply_overrides(document, overrides, ConfigError)
    check_schema_version(changed, SCHEMA_VERSION, ConfigError)
    if "sweep" in changed:
        raise ConfigError(f"{document.where(('sweep',))}: sweep: this file describes a sweep; type xtrax sweep {path}")
    config = structure_dataclass(changed, TrainConfig, ConfigError)
    document = TomlDocument(changed, document.path, getattr(changed, "origins", {}))
    best = None if config.checkpoint is None else config.checkpoint.best
    results = ["loss", *config.metrics]
    if best is not None and best not in results:
        close = difflib.get_close_matches(best, results, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(results)}"
        where = document.where(("checkpoint", "best"))
        raise ConfigError(f"{where}: checkpoint.best: {best!r} is no evaluation result; {hint}")
    return config, document
