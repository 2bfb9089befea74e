"""A configuration to the objects that it names, with every fault told before anything is called."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax

from xtrax.cli._errors import CLIImportError, tell
from xtrax.cli._imports import add_import_paths, load_fn, near
from xtrax.cli.config import ConfigError, TrainConfig
from xtrax.config import TomlDocument
from xtrax.training import ResumableState, Trainer, init_state

# Folded into the seed for the model's key, so that it differs from the training state's, which is the seed's own.
_MODEL_KEY = 0x6D6F64


@dataclass(frozen=True)
class Built:
    """What a training run is made of."""

    state: ResumableState
    trainer: Trainer
    data: Any
    metrics: Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True)
class Named:
    """What a configuration names, imported, its arguments checked and bound, and nothing called yet."""

    make_model: Callable[[], Any]
    make_optimizer: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    make_data: Callable[[], Any]
    metrics: Mapping[str, Callable[[Any, Any], Any]]


def resolve(config: TrainConfig, document: TomlDocument, import_paths: Iterable[str]) -> Named:
    """Import what a configuration names, and check that it takes the arguments.

    Args:
        config: The configuration.
        document: Where it came from, for the lines of faults.
        import_paths: Folders to import from, first first.

    Raises:
        ConfigError: If something cannot be imported or takes other arguments, all such faults at once.
    """
    add_import_paths(import_paths)
    faults = _Faults(document)
    data_seed = config.seed if config.data.seed is None else config.data.seed
    fixed = {"batch_size": config.data.batch_size, "seed": data_seed}
    named = Named(
        make_model=faults.load("model", "path", config.model.path, config.model.kwargs, random=config.seed),
        make_optimizer=faults.load("optimizer", "path", config.optimizer.path, config.optimizer.kwargs),
        loss=faults.load("loss", "path", config.loss.path, config.loss.kwargs, positional=2),
        make_data=faults.load("data", "factory", config.data.factory, config.data.kwargs, fixed=fixed),
        metrics={name: faults.load("metrics", name, path, {}, positional=2) for name, path in config.metrics.items()},
    )
    faults.raise_if_any()
    return named


def build(config: TrainConfig, document: TomlDocument, import_paths: Iterable[str]) -> Built:
    """Import, check and call what a configuration names.

    Args:
        config: The configuration.
        document: Where it came from, for the lines of faults.
        import_paths: Folders to import from, first first.

    Raises:
        ConfigError: As `resolve`; or if a call raised an error or gave the wrong kind of thing.
    """
    named = resolve(config, document, import_paths)
    faults = _Faults(document)
    data = faults.call("data", config.data.factory, named.make_data)
    if not callable(getattr(data, "train_iter", None)):
        what = f"returned {_kind(data)}, which has no train_iter(); return a DataModule, such as an ArrayDataModule"
        faults.refuse(("data",), f"{config.data.factory} {what}")
    optimizer = faults.call("optimizer", config.optimizer.path, named.make_optimizer)
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        what = f"returned {_kind(optimizer)}, which is no optax optimizer; name a function such as optax:adam"
        faults.refuse(("optimizer",), f"{config.optimizer.path} {what}")
    model, model_state = faults.call("model", config.model.path, named.make_model), None
    if isinstance(model, tuple) and len(model) == 2 and isinstance(model[1], eqx.nn.State):
        model, model_state = model
    if not callable(model):
        faults.refuse(
            ("model",), f"{config.model.path} returned {_kind(model)}, which cannot be called as model(inputs)"
        )
    trainer = Trainer(named.loss, optimizer, vmap=config.model.vmap)
    seed = config.seed
    state = faults.call("model", config.model.path, lambda: init_state(model, optimizer, seed, model_state=model_state))
    return Built(state, trainer, data, named.metrics)


class _Faults:
    """Collects what is wrong with the sections of a document."""

    def __init__(self, document: TomlDocument) -> None:
        self.document = document
        self.found: list[str] = []
        self.cause: Exception | None = None

    def note(self, key: tuple[str, ...], what: str) -> None:
        self.found.append(f"{self.document.where(key)}: {'.'.join(key)}: {what}")

    def raise_if_any(self) -> None:
        if self.found:
            raise ConfigError("\n".join(dict.fromkeys(self.found))) from self.cause

    def refuse(self, key: tuple[str, ...], what: str) -> None:
        self.note(key, what)
        self.raise_if_any()

    def load(
        self,
        section: str,
        field: str,
        path: str,
        kwargs: Mapping[str, Any],
        *,
        fixed: Mapping[str, Any] | None = None,
        positional: int = 0,
        random: int | None = None,
    ) -> Any:
        """The callable with its keyword arguments bound; `random` is a seed to pass on as `key=` or `seed=`."""
        try:
            fn = load_fn(path)
        except CLIImportError as error:
            self.note((section, field), str(error))
            self.cause = self.cause or error
            return None
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # a built-in that does not tell
            return partial(fn, **kwargs, **(fixed or {}))
        given = dict(fixed or {})
        if random is not None and not {"key", "seed"} & set(kwargs):
            if "key" in signature.parameters:
                given["key"] = jax.random.fold_in(jax.random.key(random), _MODEL_KEY)
            elif "seed" in signature.parameters:
                given["seed"] = random
        for name in set(given) & set(kwargs):
            self.note((section, "kwargs", name), f"is passed by xtrax; set {section}.{name} instead")
        before = len(self.found)
        self._check(section, field, path, signature, {**kwargs, **given}, positional)
        if len(self.found) > before or set(given) & set(kwargs):
            return None
        return partial(fn, **kwargs, **given) if kwargs or given else fn

    def _check(
        self,
        section: str,
        field: str,
        path: str,
        signature: inspect.Signature,
        kwargs: Mapping[str, Any],
        positional: int,
    ) -> None:
        """Note the arguments that a callable does not take, or misses."""
        parameters = signature.parameters.values()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for name in [name for name in kwargs if name not in known]:
                hint = near(name, known[positional:], "")
                takes = hint or f"; it takes {', '.join(known[positional:]) or 'no keyword arguments'}"
                self.note((section, "kwargs", name), f"{path} does not take {name!r}{takes}")
            kwargs = {name: value for name, value in kwargs.items() if name in known}
        try:
            signature.bind(*[None] * positional, **kwargs)
        except TypeError as error:
            called = "(predictions, targets)" if positional else "these kwargs"
            key = (section, field) if positional else (section, "kwargs")
            self.note(key, f"{path}{signature} cannot be called with {called}: {error}")

    def call(self, section: str, path: str, fn: Callable[[], Any]) -> Any:
        """Call the user's code; its error becomes one of the configuration."""
        try:
            return fn()
        except BaseException as error:  # the user's code may raise anything
            if isinstance(error, KeyboardInterrupt):
                raise
            where = f"{self.document.where((section,))}: {section}"
            raise ConfigError(f"{where}: {path} raised {tell(error)}") from error


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
