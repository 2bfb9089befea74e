"""Engine: trains over epochs, evaluates, calls back, saves."""

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jax.sharding import Mesh

from xtrax.training._batch import BatchCheck
from xtrax.training._callbacks import CallMetrics, Hooks, StepMetrics, loss_first
from xtrax.training._checkpoint_callback import Checkpoint, EpochCheckpoint
from xtrax.training._checks import check_bool, check_int
from xtrax.training._fit import Fit, Interrupt, calls_behind, deferred_interrupt
from xtrax.training._placement import make_placement
from xtrax.training._programs import EvalProgram, TrainProgram, program_for
from xtrax.training._safety import SafetyManager, SafetyTrainStep
from xtrax.training._sharding import LogicalMesh, ShardingPolicy
from xtrax.training._state import ResumableState, StateSpec
from xtrax.training._step import Metric
from xtrax.training._trainer import Trainer, check_opt_state, check_state

_T = TypeVar("_T")


class Engine:
    """Runs a `Trainer` over the epochs of a `DataModule`.

    The loop does not wait for the device: steps are queued, and their metrics are read a few calls later.

    Args:
        trainer: what a step does, a `Trainer` or a `SafetyTrainStep`.
        callbacks: objects with some of the hooks of `Callback`.
        validation_callbacks: objects whose `on_step_start` and `on_step_end` are called for batches of evaluation.
        metrics: for each name a function `(predictions, targets)` to one value per example, of shape `(n,)`, which is
            averaged with `batch["weight"]`; or to a scalar, weighted by the number of examples, where no weight is 0.
        steps_per_call: training steps in one call of the compiled program, k. The results are the same bits on CPU
            whatever k is; a larger one saves Python's part of each step. A group of batches ends where their shapes
            change, and one shorter than k runs a step a call, so that there are at most two programs per shape.
        mesh: devices to train on; by default one. Batches are split over the first axis of a mesh, or over the axes
            that a `LogicalMesh` has for "batch"; one that they do not divide is computed whole on each. The results are
            those of one device, to rounding. Where the mesh spans processes, each gives the same, whole batches.
        sharding: how the model and the optimizer's state are split over the mesh; by default every device has all.

    Attributes:
        history: for each epoch of the last `fit`, a dict of `epoch`, `step`, `train` (the mean over the steps of the
            loss and the aux) and `eval` (what `eval` returns, or None). A resumed run has the earlier epochs too.
        compiles: `{"train": n, "eval": n}`, the programs compiled so far.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `steps_per_call` below 1, or a metric named "loss".

    Example:
        >>> import equinox as eqx, jax, numpy as np, optax
        >>> from xtrax.training import ArrayDataModule, Engine, Trainer, init_state
        >>> x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
        >>> data = ArrayDataModule({"inputs": x, "targets": 2 * x}, batch_size=16)
        >>> optimizer = optax.sgd(0.5)
        >>> engine = Engine(Trainer(lambda p, t: (p - t)[:, 0] ** 2, optimizer, vmap=True))
        >>> state = init_state(eqx.nn.Linear(1, 1, key=jax.random.key(0)), optimizer, seed=0)
        >>> state = engine.fit_sync(state, data, num_epochs=20)
        >>> round(float(state.model.weight[0, 0]), 3)
        2.0
    """

    def __init__(
        self,
        trainer: Trainer | SafetyTrainStep,
        callbacks: Sequence[object] = (),
        validation_callbacks: Sequence[object] = (),
        metrics: Mapping[str, Metric] | None = None,
        steps_per_call: int = 1,
        *,
        mesh: Mesh | LogicalMesh | None = None,
        sharding: ShardingPolicy | None = None,
    ):
        self.safety: SafetyManager | None = None
        if isinstance(trainer, SafetyTrainStep):
            self.safety = trainer.safety_manager if trainer.safety_manager.enabled else None
            trainer = trainer.trainer
        if not isinstance(trainer, Trainer):
            raise TypeError(f"trainer must be a Trainer or a SafetyTrainStep, got {type(trainer).__name__}")
        metrics = {} if metrics is None else metrics
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics must be a dict of names to functions, got {type(metrics).__name__}")
        for name, metric in metrics.items():
            if not isinstance(name, str) or not callable(metric):
                raise TypeError(f"metrics must be a dict of names to functions, got {name!r}: {metric!r}")
        if "loss" in metrics:
            raise ValueError('metrics must not have the name "loss", which is the loss itself')
        self.trainer = trainer
        self.placement = make_placement(mesh, sharding)
        self.callbacks = _check_sequence("callbacks", callbacks)
        self.metrics = dict(metrics)
        self.steps_per_call = check_int("steps_per_call", steps_per_call, at_least=1)
        self.hooks = Hooks(self.callbacks)
        self.validation_hooks = Hooks(
            _check_sequence("validation_callbacks", validation_callbacks), "validation_callbacks"
        )
        self.history: list[dict[str, Any]] = []
        self._compiles = {"train": 0, "eval": 0}
        self._train_programs: list[TrainProgram] = []
        self._eval_programs: list[EvalProgram] = []

    @property
    def compiles(self) -> dict[str, int]:
        """Programs compiled so far, counted inside the traced functions: `{"train": n, "eval": n}`."""
        return dict(self._compiles)

    async def fit(
        self,
        state: ResumableState,
        data: Any,
        num_epochs: int,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
    ) -> ResumableState:
        """Trains, and evaluates after every epoch if the data has `eval_iter`.

        Without a `Checkpoint` callback a checkpoint is saved at the end of an epoch if the last one is 10 seconds old,
        and at the end. On Ctrl-C the current call is finished, a checkpoint is saved if there is a `checkpoint_dir`,
        and `KeyboardInterrupt` is raised. After an error, of a callback for instance, a checkpoint of what was done
        before is saved too, and the error goes on as it was raised.

        Args:
            state: where to start, or with `resume` a state of the same structure. Its arrays stay valid.
            data: a `DataModule`.
            num_epochs: the total number of epochs; 0 trains nothing.
            checkpoint_dir: a folder for checkpoints of this run alone.
            resume: go on from the latest checkpoint there; the result is the same bits as if the run had never
                stopped.

        Returns:
            The final state.

        Raises:
            TypeError: an argument of the wrong kind.
            ValueError: `num_epochs` below 0, `resume` without `checkpoint_dir`, an epoch without batches, a bad batch,
                a checkpoint that does not fit the state, or one in an epoch of more batches than the data has.
            FileNotFoundError: `resume` and there is no checkpoint.
            FileExistsError: no `resume` and `checkpoint_dir` has checkpoints.
        """
        with deferred_interrupt() as interrupt:
            return await self._fit(state, data, num_epochs, checkpoint_dir, resume, interrupt)

    def fit_sync(
        self,
        state: ResumableState,
        data: Any,
        num_epochs: int,
        checkpoint_dir: str | Path | None = None,
        resume: bool = False,
    ) -> ResumableState:
        """`fit`, for code that is not `async`; also inside a running event loop, as in a notebook.

        Callbacks with `async` hooks run in an event loop of their own, in another thread if one is running here.
        """
        with deferred_interrupt() as interrupt:
            run = self._fit(state, data, num_epochs, checkpoint_dir, resume, interrupt)
            return _run(run, needs_loop=self.hooks.any_async or self.validation_hooks.any_async)

    def eval(self, state: ResumableState, data: Any) -> dict[str, float]:
        """Loss and metrics over `data.eval_iter()`, in inference mode (`eqx.nn.inference_mode`), without any update.

        Args:
            state: what to evaluate.
            data: anything with `eval_iter()`.

        Returns:
            `loss` and each metric: averages over all examples, weighted with `batch["weight"]` where there is one.

        Raises:
            TypeError: `state` is not a `ResumableState`, or `data` has no `eval_iter`.
            ValueError: there are no batches, or a bad one.
        """
        check_state(state)
        if not callable(getattr(data, "eval_iter", None)):
            raise TypeError(f"data must have a method eval_iter(), {type(data).__name__} has none")
        spec = StateSpec.of(state)
        arrays = spec.arrays(state)
        if self.placement is not None:
            arrays = self.placement.place(spec, arrays)
        run = self.evaluate(spec, arrays, data, 0)
        return _run(run, needs_loop=self.validation_hooks.any_async)

    async def _fit(
        self,
        state: ResumableState,
        data: Any,
        num_epochs: int,
        checkpoint_dir: str | Path | None,
        resume: bool,
        interrupt: Interrupt,
    ) -> ResumableState:
        check_opt_state(check_state(state), self.trainer.optimizer)
        if not callable(getattr(data, "train_iter", None)):
            raise TypeError(f"data must have a method train_iter(), {type(data).__name__} has none")
        check_int("num_epochs", num_epochs, at_least=0)
        check_bool("resume", resume)
        if checkpoint_dir is not None and not isinstance(checkpoint_dir, str | Path):
            raise TypeError(f"checkpoint_dir must be a path, got {type(checkpoint_dir).__name__}")
        if resume and checkpoint_dir is None:
            raise ValueError("resume=True needs checkpoint_dir, the folder with the checkpoints to go on from")
        folder = None if checkpoint_dir is None else Path(checkpoint_dir).expanduser().resolve()
        if folder is not None and not any(isinstance(c, Checkpoint) and c.says_when for c in self.callbacks):
            self.hooks = Hooks([*self.callbacks, EpochCheckpoint()])
        else:
            self.hooks = Hooks(self.callbacks)
        return await Fit(self, state, data, num_epochs, folder, resume, interrupt).run()

    def train_program(self, spec: StateSpec) -> TrainProgram:
        """The program for states of this structure, compiled once for each shape of batches."""
        return program_for(
            self._train_programs,
            spec,
            lambda: TrainProgram(
                self.trainer,
                spec,
                donate=self.trainer.donate,
                on_trace=lambda: self._count("train"),
                safety=self.safety,
                placement=self.placement,
            ),
        )

    def _eval_program(self, spec: StateSpec) -> EvalProgram:
        return program_for(
            self._eval_programs,
            spec,
            lambda: EvalProgram(
                self.trainer,
                self.metrics,
                spec,
                on_trace=lambda: self._count("eval"),
                safety=self.safety,
                placement=self.placement,
            ),
        )

    def _count(self, kind: str) -> None:
        self._compiles[kind] += 1

    async def evaluate(self, spec: StateSpec, arrays: list[Any], data: Any, epoch: int) -> dict[str, float]:
        """`eval` of a state that is taken apart already."""
        program = self._eval_program(spec)
        check = BatchCheck()
        hooks = self.validation_hooks
        state = spec.state(arrays)
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        pending: deque[dict[str, Any]] = deque()

        def absorb(results: dict[str, Any]) -> None:
            for name, (total, weight) in results.items():
                sums[name] = sums.get(name, 0.0) + float(total)
                weights[name] = weights.get(name, 0.0) + float(weight)

        for number, raw in enumerate(data.eval_iter(), start=1):
            batch, _ = check(raw)
            await hooks.call("on_step_start", state)
            results = program(arrays, batch)
            pending.append(results)
            while len(pending) > calls_behind(batch):
                absorb(pending.popleft())
            if hooks["on_step_end"]:
                means = {name: (total / weight)[None] for name, (total, weight) in results.items()}
                await hooks.call("on_step_end", state, StepMetrics(CallMetrics(means, number, epoch), 0))
        while pending:
            absorb(pending.popleft())
        if not sums:
            raise ValueError("data.eval_iter() gave no batches; evaluation needs at least one")
        return {name: sums[name] / weights[name] for name in loss_first(sums)}


def _check_sequence(name: str, callbacks: Any) -> tuple[object, ...]:
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"{name} must be a list of callbacks, got {type(callbacks).__name__}")
    return tuple(callbacks)


def _run(coroutine: Coroutine[Any, Any, _T], *, needs_loop: bool) -> _T:
    """The result of a coroutine; without an event loop unless a callback needs one."""
    if not needs_loop:
        return _drive(coroutine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _in_thread(coroutine)


def _drive(coroutine: Coroutine[Any, Any, _T]) -> _T:
    while True:
        try:
            waiting = coroutine.send(None)
        except StopIteration as stop:
            return stop.value
        if waiting is not None:
            coroutine.close()
            raise RuntimeError("a hook that waits for an event loop must be an `async def`")


def _in_thread(coroutine: Coroutine[Any, Any, _T]) -> _T:
    results: list[_T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(target,), name="xtrax-fit")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
