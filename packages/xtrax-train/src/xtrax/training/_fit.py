"""One call of `Engine.fit`: the loop over epochs and steps, and what is saved of it."""

import asyncio
import contextlib
import inspect
import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from xtrax.training._batch import Batch, BatchCheck, stack
from xtrax.training._callbacks import CallMetrics, FitContext, Hooks, StepMetrics, loss_first
from xtrax.training._checkpoint import get_checkpoint_manager, load_checkpoint, load_progress, save_checkpoint
from xtrax.training._safety import safety_error
from xtrax.training._source import BatchSource
from xtrax.training._state import ResumableState, StateSpec, fresh_arrays

if TYPE_CHECKING:
    from xtrax.training._engine import Engine

logger = logging.getLogger("xtrax.training")

_MOST_CALLS_BEHIND = 256
_BYTES_BEHIND = 2**28

_YIELD_SECONDS = 0.05
"""How often a running event loop gets a turn."""


def calls_behind(batch: Batch) -> int:
    """How many calls may be queued on the device before the results of the oldest are read.

    Many, so that a moment in which Python or the device is held up does not hold up the other; but the batches of
    those calls are in the device's memory.
    """
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(batch))
    return max(2, min(_MOST_CALLS_BEHIND, _BYTES_BEHIND // max(size, 1)))


class Interrupt:
    """Whether Ctrl-C was pressed, and whether somebody watches for it."""

    def __init__(self) -> None:
        self.pressed = False


@contextlib.contextmanager
def deferred_interrupt() -> Generator[Interrupt]:
    """Notes Ctrl-C instead of raising `KeyboardInterrupt` in the middle of a call; the second one raises at once.

    Where signals are not Python's default to handle, or outside the main thread, it changes nothing.
    """
    interrupt = Interrupt()
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield interrupt
        return

    def on_sigint(signum: int, frame: Any) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True
        logger.warning("interrupted: finishing the current call; press Ctrl-C again to stop at once")

    signal.signal(signal.SIGINT, on_sigint)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupt.pressed:
        # Pressed after the last call: the work is done and saved, and the caller still wants to stop.
        raise KeyboardInterrupt


class Fit:
    """The loop. Every attribute that a checkpoint needs changes between calls only."""

    def __init__(
        self,
        engine: "Engine",
        state: ResumableState,
        data: Any,
        num_epochs: int,
        checkpoint_dir: Path | None,
        resume: bool,
        interrupt: Interrupt,
    ):
        self.engine = engine
        self.data = data
        self.num_epochs = num_epochs
        self.interrupt = interrupt
        self.hooks: Hooks = engine.hooks
        self.k: int = engine.steps_per_call
        self.check = BatchCheck(accumulate=engine.trainer.accumulate)
        self.manager = None if checkpoint_dir is None else _open_manager(checkpoint_dir, resume)
        self.epoch = 0
        self.source: BatchSource | None = None
        self.resume_at: dict[str, Any] | None = None
        self.sums: dict[str, float] = {}
        self.count = 0
        self.history: list[dict[str, Any]] = engine.history
        self.history.clear()
        if resume:
            assert self.manager is not None
            progress = load_progress(self.manager)
            state = load_checkpoint(self.manager, self._placed(state))
            self.epoch = progress["epoch"]
            self.resume_at = progress if progress["batches"] else None
            self.sums = dict(progress["metrics"].get("sums", {}))
            self.count = progress["metrics"].get("count", 0)
            self.history.extend(progress["metrics"].get("history", []))
        self.spec = StateSpec.of(state)
        self.program = engine.train_program(self.spec)
        self.arrays = fresh_arrays(self.spec.arrays(state))
        if engine.placement is not None:
            self.arrays = engine.placement.place(self.spec, self.arrays)
        self.first_step = self.step = int(state.step)
        self.saved_step = self.step if resume else None
        self.pending: deque[CallMetrics] = deque()
        self.warned = False
        self.yielded = time.perf_counter()
        self.context = FitContext(
            num_epochs=num_epochs,
            epoch=self.epoch,
            step=self.step,
            resumed=resume,
            checkpoint_dir=checkpoint_dir,
            steps_per_epoch=getattr(data, "steps_per_epoch", None),
            history=self.history,
        )

    def _placed(self, state: ResumableState) -> ResumableState:
        """The state where the engine's mesh wants it, so that a checkpoint is read to there."""
        placement = self.engine.placement
        if placement is None:
            return state
        spec = StateSpec.of(state)
        return spec.state(placement.place(spec, spec.arrays(state)))

    def state(self) -> ResumableState:
        """The state after the last call; a new object each time, over the same arrays."""
        return self.spec.state(self.arrays)

    async def run(self) -> ResumableState:
        """Trains what is left."""
        try:
            self.hooks.call_method("attach", self.context)
            await self._train()
            if self.manager is not None:
                self.manager.wait_until_finished()
        except BaseException as error:
            self._save_after(error)
            raise
        finally:
            self._close()
        return self.state()

    async def _train(self) -> None:
        state = self.state()
        await self.hooks.call("on_train_start", state)
        if self.context.resumed:
            await self.hooks.call("on_resume", state)
        while self.epoch < self.num_epochs and not self.context.stop_requested:
            await self._run_epoch()
        if self.manager is not None:
            self._save()
        await self.hooks.call("on_train_end", self.state())

    async def _run_epoch(self) -> None:
        await self.hooks.call("on_epoch_start", self.state(), self.epoch)
        self.source = BatchSource(self.data, self.epoch, self.check, self.resume_at)
        self.resume_at = None
        while group := self.source.group(self._limit()):
            if len(group) == self.k > 1:
                for batch in group:
                    self.program.check(self.arrays, batch)
                await self._call(stack(group), self.k, fused=True)
            else:
                for batch in group:
                    await self._call(batch, 1, fused=False)
                    if self.context.stop_requested:
                        break
            if self.context.stop_requested:
                return
        if not self.source.done:
            raise ValueError(f"data.train_iter() gave no batches in epoch {self.epoch}; an epoch needs at least one")
        await self._finish_epoch()

    def _limit(self) -> int:
        """The largest number of steps after which no callback needs to see the state before."""
        return min([self.k, *(n - self.step % n for n in self.hooks.state_every)])

    async def _call(self, batch: Batch, steps: int, *, fused: bool) -> None:
        hooks = self.hooks
        if hooks["on_step_start"]:
            state = self.state()
            for _ in range(steps):
                await hooks.call("on_step_start", state)
        behind = calls_behind(batch)
        run = self.program.many if fused else self.program.one
        self.arrays, metrics, verdict = run(self.arrays, batch)
        wanted = steps
        if verdict is not None:
            # What comes after a step that failed was not done.
            steps = verdict.done
            if steps < wanted:
                metrics = {name: values[:steps] for name, values in metrics.items()}
        assert self.source is not None
        self.source.done += steps
        call = CallMetrics(metrics, self.step + 1, self.epoch)
        self.step += steps
        self.pending.append(call)
        while len(self.pending) > behind:
            self._absorb(self.pending.popleft())
        if any(hooks.step_ends):
            state = self.state()
            of_steps = [StepMetrics(call, index) for index in range(steps)]
            for ends in hooks.step_ends:
                for of_step in of_steps:
                    for hook in ends:  # not by hooks.call, because this is the inmost loop
                        result = hook(state, of_step)
                        if result is not None and inspect.isawaitable(result):
                            await result
        if verdict is not None and steps < wanted:
            failed = jax.tree.map(lambda x: x[steps], batch) if fused else batch
            raise safety_error(self.engine.trainer, self.state(), failed, verdict)
        if self.context.checkpoint_requested:
            self._save()
        self._leave_if_asked()
        if time.perf_counter() - self.yielded > _YIELD_SECONDS:
            await asyncio.sleep(0)
            self.yielded = time.perf_counter()

    async def _finish_epoch(self) -> None:
        self._absorb_all()
        state = self.state()
        entry: dict[str, Any] = {"epoch": self.epoch, "step": self.step}
        entry["train"] = {name: self.sums[name] / self.count for name in loss_first(self.sums)}
        entry["eval"] = None
        if hasattr(self.data, "eval_iter"):
            entry["eval"] = await self.engine.evaluate(self.spec, self.arrays, self.data, self.epoch)
        self.history.append(entry)
        if entry["eval"] is not None:
            await self.hooks.call("on_eval_end", state, self.epoch, dict(entry["eval"]))
        await self.hooks.call("on_epoch_end", state, self.epoch)
        self.epoch += 1
        self.source = None
        self.sums, self.count = {}, 0
        if self.context.checkpoint_requested:
            self._save()
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        """Ends the run between two calls, for Ctrl-C or a callback; `run` saves what was done."""
        if self.interrupt.pressed:
            raise KeyboardInterrupt
        if self.context.exit_code is not None:
            raise SystemExit(self.context.exit_code)

    def _absorb(self, call: CallMetrics) -> None:
        """Adds the metrics of a call to those of the epoch, one step after another, so that grouping is no matter."""
        values = call.read()
        for name, steps in values.items():
            total = self.sums.get(name, 0.0)
            for value in steps:
                total += value
            self.sums[name] = total
        losses = values["loss"]
        self.count += len(losses)
        if not self.warned:
            for index, loss in enumerate(losses):
                if not math.isfinite(loss):
                    self.warned = True
                    logger.warning("the loss of step %d is %s", call.first_step + index, loss)
                    break

    def _absorb_all(self) -> None:
        while self.pending:
            self._absorb(self.pending.popleft())

    def _progress(self) -> dict[str, Any]:
        self._absorb_all()
        position = {"batches": 0, "iterator": None, "iterator_batches": 0}
        if self.source is not None:
            position = self.source.position()
        elif self.resume_at is not None:
            position = {name: self.resume_at[name] for name in position}
        done = [entry for entry in self.history if entry["epoch"] < self.epoch]
        return {
            "epoch": self.epoch,
            **position,
            "metrics": {"history": done, "sums": self.sums, "count": self.count},
        }

    def _save(self) -> None:
        """Saves a checkpoint, unless there is one of this step."""
        self.context.checkpoint_requested = False
        if self.manager is None or self.saved_step == self.step:
            return
        self.hooks.call_method("flush")
        save_checkpoint(self.manager, self.state(), self.step, progress=self._progress())
        self.saved_step = self.step

    def _save_after(self, error: BaseException) -> None:
        """Saves what was done before an error, if anything was; never hides the error."""
        if self.manager is None or isinstance(error, GeneratorExit):
            return
        try:
            if self.step > self.first_step and not any(array.is_deleted() for array in self.arrays):
                self._save()
            self.manager.wait_until_finished()
        except Exception as second:
            logger.exception("no checkpoint could be saved after an error")
            error.add_note(f"no checkpoint could be saved after it: {type(second).__name__}: {second}")

    def _close(self) -> None:
        try:
            self.hooks.call_method("close")
        finally:
            if self.manager is not None:
                self.manager.close()


def _open_manager(directory: Path, resume: bool) -> Any:
    if resume and not directory.is_dir():
        raise FileNotFoundError(f"nothing to resume: {directory} does not exist; start without resume=True")
    manager = get_checkpoint_manager(directory)
    latest = manager.latest_step()
    if resume and latest is None:
        manager.close()
        raise FileNotFoundError(f"nothing to resume: no checkpoint in {directory}; start without resume=True")
    if not resume and latest is not None:
        manager.close()
        raise FileExistsError(
            f"{directory} has a checkpoint of step {latest}; pass resume=True to go on from it, or another folder"
        )
    return manager
