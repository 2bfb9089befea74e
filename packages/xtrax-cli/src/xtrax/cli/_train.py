"""`xtrax run`: a training run from its configuration to its summary."""

import contextlib
import dataclasses
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from rich.console import Console

from xtrax.cli._build import Built, build
from xtrax.cli._defaults import INTERRUPTED, PREEMPTED
from xtrax.cli._errors import CLIError, OutputClosed, RunError, tell
from xtrax.cli._folder import RunFolder, jsonable
from xtrax.cli._interrupt import default_interrupts, raise_if_interrupted
from xtrax.cli._report import LOG_NAME, Journal, LogFile, Terminal, logged, logger, resume_command, say, summary
from xtrax.cli.config import TrainConfig, load_train_config
from xtrax.config import dump_toml
from xtrax.run import collect_provenance
from xtrax.training import Checkpoint, Engine, MetricsLog, PreemptionHandler, ProgressBar, ResumableState


def run(config_path: Path, overrides: Sequence[str], runs_dir: Path, *, began: float) -> int:
    """Train what a TOML file describes.

    Args:
        config_path: The file.
        overrides: `key=value` texts.
        runs_dir: The folder that holds the runs.
        began: `time.perf_counter()` when the command began.

    Returns:
        The exit code: 0; 130 if interrupted; 75 if SIGTERM or SIGUSR1 stopped it, saved.

    Raises:
        CLIError: If it failed before the first step; nothing is left.
        RunError: If it failed later.
    """
    config, document = load_train_config(config_path, overrides)
    import_paths = [str(config_path.resolve().parent), os.getcwd()]
    built = build(config, document, import_paths)
    raise_if_interrupted()
    text = dump_toml(document).encode() if overrides else config_path.read_bytes()
    about = {
        "kind": config.kind,
        "parent": None,
        "source": str(config_path.resolve()),
        "overrides": list(overrides),
        "import_paths": import_paths,
    }
    folder = RunFolder.create(runs_dir, config, text, about)
    return train(config, built, folder, resume=False, began=began)


def train(
    config: TrainConfig, built: Built, folder: RunFolder, *, resume: bool, began: float, quiet: bool = False
) -> int:
    """Train in a run's folder, and record and tell how it ended.

    Args:
        config: The configuration.
        built: What it names.
        folder: The run's folder, which is closed at the end, and discarded if no step is done.
        resume: Whether to go on from the folder's last checkpoint.
        began: `time.perf_counter()` when the command began.
        quiet: Whether to leave the telling to the caller: neither a bar nor a summary.

    Returns:
        The exit code.

    Raises:
        CLIError: If it failed before the first step.
        RunError: If it failed later.
        OutputClosed: If nobody reads the output any more; what was done is saved.
    """
    journal, console = Journal(), Terminal(file=sys.stdout, quiet=quiet)
    in_main_thread = threading.current_thread() is threading.main_thread()  # which alone may handle signals
    preemption = PreemptionHandler(exit_code=PREEMPTED) if in_main_thread else None
    try:
        with logged(folder.path) as log:
            try:
                _record_provenance(folder, resume)
                callbacks: list[Any] = [journal, ProgressBar(console), MetricsLog(folder.path / "metrics.zarr")]
                if preemption is not None:
                    callbacks.append(preemption)
                if config.checkpoint is not None:
                    callbacks.append(Checkpoint(**dataclasses.asdict(config.checkpoint)))
                engine = Engine(built.trainer, callbacks, metrics=built.metrics, steps_per_call=config.steps_per_call)
                state = _strong(built.state)
                evaluated = _try_evaluation(engine, state, built.data)
                _check_best(config, evaluated)
                raise_if_interrupted()
                say(console, f"run {folder.path.name}, in {folder.path}")
                checkpoints = folder.path / "checkpoints"
                with default_interrupts():
                    state = engine.fit_sync(state, built.data, config.num_epochs, checkpoints, resume)
                results = _results(engine, state, time.perf_counter() - began)
                folder.finish("finished", **jsonable(results))
            except (KeyboardInterrupt, OutputClosed) as error:
                if not journal.started:
                    raise
                _interrupted(folder, journal, quiet=quiet or isinstance(error, OutputClosed))
                if isinstance(error, OutputClosed):
                    raise
                return INTERRUPTED
            except (Exception, SystemExit) as error:
                if not journal.started:
                    raise
                if isinstance(error, SystemExit) and preemption is not None and preemption.received is not None:
                    _interrupted(folder, journal, quiet=quiet)
                    return PREEMPTED
                raise _failed(folder, journal, error, log) from error
    except RunError:
        raise
    except (KeyboardInterrupt, OutputClosed):
        if not journal.started:
            folder.discard()
        raise
    except CLIError:
        folder.discard()
        raise
    except (Exception, SystemExit) as error:
        folder.discard()
        left = "left nothing" if folder.is_new else "left the run as it was"
        what = f"failed before the first step, and {left}: {tell(error)}{_hint(error)}{_shape_hint(config, error)}"
        raise CLIError(what) from error
    finally:
        folder.close()
    told = {name: results[name] for name in ("metrics", "steps", "seconds", "compiles")}
    summary(console, folder.path, epochs=config.num_epochs, mapped=config.model.vmap, **told)
    return 0


class _OneBatch:
    """The first evaluation batch of some data."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def eval_iter(self) -> Iterator[Any]:
        """Only the first."""
        for batch in self._data.eval_iter():
            yield batch
            return


def _try_evaluation(engine: Engine, state: ResumableState, data: Any) -> list[str]:
    """Evaluate one batch, so that a metric of the wrong shape does not cost the first epoch; the names of results.

    The engine keeps the compiled program.
    """
    if callable(getattr(data, "eval_iter", None)):
        return sorted(engine.eval(state, _OneBatch(data)))
    return []


def _check_best(config: TrainConfig, evaluated: list[str]) -> None:
    """Refuse a `best` where there is no evaluation; that it is the name of a result is known from the file."""
    best = None if config.checkpoint is None else config.checkpoint.best
    if best is not None and best not in evaluated:
        raise CLIError(
            f"checkpoint.best: {best!r} is no evaluation result; evaluation gives nothing, since the data has no "
            "eval_iter()"
        )


def _strong(state: ResumableState) -> ResumableState:
    """The state with arrays of strong type, as training returns them: one program serves both."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=leaf.dtype) if eqx.is_array(leaf) else leaf, state)


def _record_provenance(folder: RunFolder, resume: bool) -> None:
    """Note code, versions and device: of the run, and of each time it was resumed."""
    provenance = collect_provenance(folder.manifest["import_paths"][0])
    if resume and "provenance" in folder.manifest:
        folder.update(resumed=[*folder.manifest.get("resumed", []), provenance])
    else:
        folder.update(provenance=provenance)


def _results(engine: Engine, state: ResumableState, seconds: float) -> dict[str, Any]:
    """What the manifest keeps of a run that is finished; the metrics are those of the last epoch."""
    nothing: dict[str, Any] = {"train": {}, "eval": None}
    last = engine.history[-1] if engine.history else nothing
    return {
        "metrics": dict(last["eval"] or {}),
        "train_metrics": dict(last["train"]),
        "steps": int(state.step),
        "seconds": seconds,
        "compiles": engine.compiles,
    }


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has saved anything to go on from."""
    return holds_checkpoint(folder / "checkpoints")


def holds_checkpoint(checkpoints: Path) -> bool:
    """Whether a folder of checkpoints has one."""
    return checkpoints.is_dir() and any(entry.name.isdecimal() for entry in checkpoints.iterdir())


@contextlib.contextmanager
def readable_checkpoints(folder: Path) -> Generator[None]:
    """Tell that a run's checkpoint cannot be read, whatever orbax and tensorstore raise.

    That it does not fit is another matter, of which the `ValueError` that names the leaf is let through.
    """
    absl = logging.getLogger("absl")
    disabled = absl.disabled
    absl.disabled = True  # orbax logs a traceback of what it also raises
    try:
        yield
    except Exception as error:
        if isinstance(error, CLIError) or (type(error) is ValueError and "in the checkpoint" in str(error)):
            raise
        what = f"a checkpoint of run {folder.name}, in {folder / 'checkpoints'}, cannot be read: {tell(error)}"
        steps = sorted(int(entry.name) for entry in (folder / "checkpoints").iterdir() if entry.name.isdecimal())
        fix = f"\nremove the folder {steps[-1]} there to go on from step {steps[-2]}" if len(steps) > 1 else ""
        raise CLIError(what + fix) from error
    finally:
        absl.disabled = disabled


def _interrupted(folder: RunFolder, journal: Journal, *, quiet: bool) -> None:
    where = f"interrupted in epoch {journal.epoch + 1}, after step {journal.step}"
    folder.finish("interrupted", steps=journal.step)
    logger.info("%s", where)
    if quiet:
        return
    errors = Console(file=sys.stderr)
    if has_checkpoint(folder.path):
        say(errors, f"\nxtrax: {where}, and saved. Go on with")
        say(errors, f"  {resume_command(folder.path, '--in-place')}")
    else:
        say(errors, f"\nxtrax: {where}, before anything was saved; start anew")


def _failed(folder: RunFolder, journal: Journal, error: BaseException, log: LogFile) -> RunError:
    logger.error("failed in epoch %d, after step %d", journal.epoch + 1, journal.step, exc_info=error)
    what = f"run {folder.path.name} failed in epoch {journal.epoch + 1}, after step {journal.step}: {tell(error)}"
    lines = [what + _hint(error)]
    try:
        folder.finish("failed", steps=journal.step, error=tell(error))
    except OSError as second:
        lines.append(f"its manifest could not be brought up to date either: {tell(second)}")
    lines += getattr(error, "__notes__", [])
    on = f"then: {resume_command(folder.path, '--in-place')}" if has_checkpoint(folder.path) else "nothing was saved"
    traceback = f"the traceback is in {folder.path / LOG_NAME}" if log.is_whole else "--debug shows the traceback"
    lines.append(f"{traceback}; {on}")
    return RunError("\n".join(lines))


def _hint(error: BaseException) -> str:
    """What to do about an error that is nobody's fault."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return "; free some space on the disk"
        seen = seen.__cause__ or seen.__context__
    return ""


def _shape_hint(config: TrainConfig, error: BaseException) -> str:
    """What is probably wrong if shapes do not match in the first batch."""
    text = str(error)
    if config.model.vmap or not isinstance(error, TypeError | ValueError):
        return ""
    if not any(word in text for word in ("dot_general", "shape", "dimension", "matmul", "rank", "broadcast")):
        return ""
    return "\nmodel: it gets the whole batch; if it takes one example, set vmap = true in [model]"
