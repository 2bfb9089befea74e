"""Callbacks: what they may implement, and how their hooks are called."""

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from xtrax.training._checks import check_int
from xtrax.training._state import ResumableState

logger = logging.getLogger("xtrax.training")

HOOKS = (
    "on_train_start",
    "on_train_end",
    "on_resume",
    "on_epoch_start",
    "on_epoch_end",
    "on_step_start",
    "on_step_end",
    "on_eval_end",
)


@runtime_checkable
class Callback(Protocol):
    """What a callback may implement: any of these hooks, each as a function or an `async def`.

    A class need not inherit from this one. Epochs count from 0. With `steps_per_call=k`, the `on_step_start` hooks of
    the k steps come before the call and the `on_step_end` hooks after it, and `state` is that of the call's start and
    end; a callback that needs it more often has an attribute `state_every = n`, and a call then ends at every step
    that n divides. The engine may reuse the buffers of `state` after the hook returns: copy what you keep
    (`jax.tree.map(jnp.copy, state.step)`), or build the trainer with `donate=False`.

    Besides the hooks, a callback may have
    `attach(fit)`, called first with the `FitContext`, which can ask for a checkpoint or for an early end;
    `flush()`, called before a checkpoint is saved, to write what must not be behind it;
    `close()`, called at the end, also after an error.
    """

    def on_train_start(self, state: ResumableState) -> Any:
        """Called once, before the first step."""
        return None

    def on_train_end(self, state: ResumableState) -> Any:
        """Called once, after the last step; not after an error."""
        return None

    def on_resume(self, state: ResumableState) -> Any:
        """Called after `on_train_start` if the run goes on from a checkpoint."""
        return None

    def on_epoch_start(self, state: ResumableState, epoch: int) -> Any:
        """Called before the first step of an epoch, and again if it is resumed in its middle."""
        return None

    def on_epoch_end(self, state: ResumableState, epoch: int) -> Any:
        """Called after an epoch and its evaluation."""
        return None

    def on_step_start(self, state: ResumableState) -> Any:
        """Called before a step."""
        return None

    def on_step_end(self, state: ResumableState, metrics: Mapping[str, Any]) -> Any:
        """Called after a step, with its `StepMetrics`."""
        return None

    def on_eval_end(self, state: ResumableState, epoch: int, metrics: Mapping[str, float]) -> Any:
        """Called after the evaluation of an epoch."""
        return None


def loss_first(names: Iterable[str]) -> list[str]:
    """Names in the order in which people read them; those of a compiled program's results are sorted."""
    return sorted(names, key=lambda name: name != "loss")


class CallMetrics:
    """The metrics of the steps of one call, on the device until somebody reads them.

    Args:
        arrays: for each name an array of shape `(k,)`.
        first_step: the number of optimizer steps done after the first of them.
        epoch: the epoch that they belong to.
    """

    def __init__(self, arrays: Mapping[str, Any], first_step: int, epoch: int):
        self.arrays = arrays
        self.first_step = first_step
        self.epoch = epoch
        self._values: dict[str, list[Any]] | None = None

    def read(self) -> dict[str, list[Any]]:
        """For each name the k values, as Python numbers. Waits for the device."""
        if self._values is None:
            self._values = {name: np.asarray(array).tolist() for name, array in self.arrays.items()}
        return self._values


class StepMetrics(Mapping[str, Any]):
    """The metrics of one step: `loss` and the aux of the loss, as Python numbers.

    They are read from the device when one is looked up, which waits for that step; a callback that keeps the object
    and reads it some steps later does not make the loop wait.

    Attributes:
        step: optimizer steps done, this one included.
        epoch: the epoch, from 0.

    Example:
        >>> from xtrax.training import StepMetrics
        >>> class EveryHundred:
        ...     def on_step_end(self, state, metrics: StepMetrics):
        ...         if metrics.step % 100 == 0:
        ...             print(metrics.step, metrics["loss"])
    """

    __slots__ = ("_call", "_index")

    def __init__(self, call: CallMetrics, index: int):
        self._call = call
        self._index = index

    @property
    def step(self) -> int:
        """Optimizer steps done, this one included."""
        return self._call.first_step + self._index

    @property
    def epoch(self) -> int:
        """The epoch, from 0."""
        return self._call.epoch

    def __getitem__(self, name: str) -> Any:
        return self._call.read()[name][self._index]

    def __iter__(self) -> Iterator[str]:
        return iter(loss_first(self._call.arrays))

    def __len__(self) -> int:
        return len(self._call.arrays)

    def __repr__(self) -> str:
        return f"StepMetrics(step={self.step}, epoch={self.epoch}, {dict(self)})"


@dataclass
class FitContext:
    """What a callback can know of the `fit` that it is attached to, and ask of it.

    Attributes:
        num_epochs: the total that `fit` was given.
        epoch: epochs done when `fit` began.
        step: optimizer steps done when `fit` began.
        resumed: whether it goes on from a checkpoint.
        checkpoint_dir: where checkpoints are saved, or None.
        steps_per_epoch: `data.steps_per_epoch` if the data has it, or None.
        history: one dict for each finished epoch: `epoch`, `step`, `train` and `eval`.
    """

    num_epochs: int
    epoch: int
    step: int
    resumed: bool
    checkpoint_dir: Path | None
    steps_per_epoch: int | None
    history: Sequence[Mapping[str, Any]]
    checkpoint_requested: bool = field(default=False, init=False)
    stop_requested: bool = field(default=False, init=False)
    exit_code: int | None = field(default=None, init=False)

    def request_checkpoint(self) -> None:
        """Saves a checkpoint as soon as the hooks of this call have run.

        Raises:
            ValueError: `fit` was given no `checkpoint_dir`.
        """
        if self.checkpoint_dir is None:
            raise ValueError("a callback asks for a checkpoint, but fit has no checkpoint_dir; pass one to fit")
        self.checkpoint_requested = True

    def request_stop(self) -> None:
        """Ends training after this call as if it were complete; an epoch in its middle is not evaluated."""
        self.stop_requested = True

    def request_exit(self, code: int) -> None:
        """Saves a checkpoint after this call, if there is a `checkpoint_dir`, and raises `SystemExit(code)`.

        It may be called from a signal handler. `on_train_end` is not called, because training goes on later.
        """
        self.exit_code = code


class Hooks:
    """The hooks of several callbacks, looked up once.

    Callbacks with a `flush` come first, so that a row is recorded before another callback can fail.

    Attributes:
        step_ends: the `on_step_end` hooks of callbacks with a `flush`, which are called for all steps of a call before
            the others are, because a checkpoint after an error has all of them; and those of the others.
    """

    def __init__(self, callbacks: Sequence[object], argument: str = "callbacks"):
        for callback in callbacks:
            _check_callback(callback, argument)
        self.callbacks = sorted(callbacks, key=lambda callback: not hasattr(callback, "flush"))
        self._hooks = {name: [hook for c in self.callbacks if (hook := _hook(c, name))] for name in HOOKS}
        recorders = [callback for callback in self.callbacks if hasattr(callback, "flush")]
        others = [callback for callback in self.callbacks if not hasattr(callback, "flush")]
        self.step_ends = tuple(
            [hook for c in part if (hook := _hook(c, "on_step_end"))] for part in (recorders, others)
        )
        every = [getattr(callback, "state_every", None) for callback in self.callbacks]
        self.state_every = [check_int("state_every", n, at_least=1) for n in every if n is not None]

    def __getitem__(self, name: str) -> list[Callable[..., Any]]:
        return self._hooks[name]

    @property
    def any_async(self) -> bool:
        """True if a hook is an `async def`."""
        return any(inspect.iscoroutinefunction(hook) for hooks in self._hooks.values() for hook in hooks)

    async def call(self, name: str, *args: Any) -> None:
        """Calls one hook of every callback that has it."""
        for hook in self._hooks[name]:
            result = hook(*args)
            if result is not None and inspect.isawaitable(result):
                await result

    def call_method(self, name: str, *args: Any) -> None:
        """Calls `attach`, `flush` or `close` of every callback that has it."""
        for callback in self.callbacks:
            method = getattr(callback, name, None)
            if method is not None:
                method(*args)


def _hook(callback: object, name: str) -> Callable[..., Any] | None:
    # A class that inherits from the protocol has its empty hooks, which need not be called.
    if getattr(type(callback), name, None) is getattr(Callback, name):
        return None
    return getattr(callback, name, None)


def _check_callback(callback: object, argument: str) -> None:
    if isinstance(callback, type):
        raise TypeError(f"{argument} must hold objects, got the class {callback.__name__}; write {callback.__name__}()")
    names = [name for name in dir(callback) if name.startswith("on_")]
    for name in names:
        if name in HOOKS:
            if not callable(getattr(callback, name)):
                raise TypeError(f"{type(callback).__name__}.{name} must be a function, got {getattr(callback, name)!r}")
        elif near := difflib.get_close_matches(name, HOOKS, n=1):
            logger.warning("%s.%s is no hook and is never called; is %s meant?", type(callback).__name__, name, near[0])
    if not any(name in HOOKS for name in names):
        raise TypeError(f"{argument}: {type(callback).__name__} has none of the hooks {', '.join(HOOKS)}")
