"""What a run says: to its log, to the terminal, and at the end."""

import io
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from xtrax.cli._defaults import RUNS_DIR
from xtrax.cli._errors import OutputClosed
from xtrax.training import FitContext, ResumableState

logger = logging.getLogger("xtrax.cli")

LOG_NAME = "run.log"

_CONTENTS = {
    "manifest.json": "what ran, from which commit, and how it ended",
    "config.toml": "the configuration as it ran",
    "checkpoints": "what a resumed run starts from",
    "metrics.zarr": "the loss and metrics of every step and evaluation",
    LOG_NAME: "epochs, warnings and errors",
}


class Terminal(Console):
    """A console that raises `OutputClosed` when nobody reads it any more, where rich would exit."""

    def on_broken_pipe(self) -> None:
        """Tell the caller."""
        raise OutputClosed


class Journal:
    """A callback that logs every epoch, and knows how far the run is.

    Attributes:
        started: Whether this process has done a step.
        step: Steps done, those before a resume included.
        epoch: The epoch in work, from 0.
    """

    def __init__(self) -> None:
        """Start with nothing done."""
        self.started = False
        self.step = 0
        self.epoch = 0
        self._fit: FitContext | None = None

    def attach(self, fit: FitContext) -> None:
        """Begin where a resumed run is."""
        self.step, self.epoch, self._fit = fit.step, fit.epoch, fit

    def on_epoch_start(self, state: ResumableState, epoch: int) -> None:
        """Note the epoch."""
        self.epoch = epoch

    def on_step_end(self, state: ResumableState, metrics: Mapping[str, Any]) -> None:
        """Count a step, without waiting for it."""
        self.started = True
        self.step += 1

    def on_epoch_end(self, state: ResumableState, epoch: int) -> None:
        """Log the means of the epoch and its evaluation."""
        assert self._fit is not None
        entry = self._fit.history[-1]
        evaluated = f"; evaluation: {_numbers(entry['eval'])}" if entry["eval"] else ""
        total = self._fit.num_epochs
        logger.info("epoch %d/%d, step %d: %s%s", epoch + 1, total, self.step, _numbers(entry["train"]), evaluated)


class LogFile(logging.FileHandler):
    """The log of a run, which a full disk ends quietly.

    Attributes:
        is_whole: Whether all was written.
    """

    def __init__(self, folder: Path) -> None:
        """Open it."""
        super().__init__(folder / LOG_NAME, encoding="utf-8")
        self.is_whole = True

    def handleError(self, record: logging.LogRecord) -> None:
        """Remember, where logging would print a traceback."""
        self.is_whole = False

    def close(self) -> None:
        """Close the file, which may write what is left."""
        try:
            super().close()
        except OSError:
            self.is_whole = False


@contextmanager
def logged(folder: Path) -> Generator[LogFile]:
    """Write the log of a run: xtrax's own messages, and the warnings of everything else.

    Of these, only xtrax's warnings also go to standard error: the handlers that libraries have set up are put aside.
    """
    file = LogFile(folder)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal = logging.StreamHandler()
    terminal.addFilter(lambda record: record.levelno == logging.WARNING)  # errors are told with the exit code
    terminal.setFormatter(logging.Formatter("xtrax: %(message)s"))
    root, own = logging.getLogger(), logging.getLogger("xtrax")
    level, others = own.level, root.handlers
    root.handlers = [file]
    own.addHandler(terminal)
    own.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield file
    finally:
        logging.captureWarnings(False)
        own.setLevel(level)
        own.removeHandler(terminal)
        root.handlers = others
        file.close()


def say(console: Console, text: str, style: str | None = None, *, prose: bool = False) -> None:
    """Print a line as it is: no markup, no colours for numbers, not wrapped; prose is, between words, on a terminal."""
    wrapped = prose and console.is_terminal
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not wrapped, emoji=False)


def print_table(console: Console, table: Table) -> None:
    """Print a table; where the output is not a terminal, a row is a line, however long."""
    if console.is_terminal:
        console.print(table)
        return
    wide = Console(file=io.StringIO(), width=10_000)
    with wide.capture() as captured:
        wide.print(table)
    for line in captured.get().splitlines():
        say(console, line.rstrip())


def typed(program: str) -> str:
    """How `xtrax` or `python` is typed: under `uv run` neither is on the user's own path."""
    # uv sets UV for what it runs, and puts the environment's programs on PATH for that alone; an activated environment,
    # which sets the prompt, has them there anyway.
    if not os.environ.get("UV") or sys.prefix == sys.base_prefix or os.environ.get("VIRTUAL_ENV_PROMPT"):
        return program
    elsewhere = [part for part in os.get_exec_path() if Path(part).resolve() != (Path(sys.prefix) / "bin").resolve()]
    uv = "uv" if shutil.which("uv", path=os.pathsep.join(elsewhere)) else "python3 -m uv"
    return f"{uv} run {program}"


def resume_command(folder: Path, rest: str) -> str:
    """What to type to go on with a run."""
    elsewhere = "" if folder.parent == RUNS_DIR else f" --runs-dir {shlex.quote(str(folder.parent))}"
    return f"{typed('xtrax')} resume {folder.name} {rest}{elsewhere}"


def summary(
    console: Console,
    folder: Path,
    *,
    epochs: int,
    steps: int,
    seconds: float,
    compiles: Mapping[str, int],
    metrics: Mapping[str, float],
    mapped: bool,
) -> None:
    """Print how a run ended, where everything is, and what to type next."""
    say(console, f"\nfinished {epochs} epochs, {steps} steps", "bold")
    programs = ", ".join(
        f"{count} for {'training' if name == 'train' else 'evaluation'}" for name, count in compiles.items()
    )
    told = {f"eval {name}": f"{value:.4g}" for name, value in metrics.items()}
    told |= {"wall time": f"{_duration(seconds)}, compiling included", "programs compiled": programs}
    for name, value in told.items():
        say(console, f"  {name:<18} {value}")
    say(console, f"everything is in {folder}", "bold")
    for name, what in _CONTENTS.items():
        if (folder / name).exists():
            say(console, f"  {name:<18} {what}")
    say(console, "next", "bold")
    say(console, f"  {resume_command(folder, f'--epochs {epochs}')}   (go on training, in a new run)")
    say(console, f"  {typed('python')}   (predict)")
    run = folder.name if folder.parent == RUNS_DIR else str(folder)
    call = "jax.vmap(run.model)" if mapped else "run.model"
    lines = ["import jax"] if mapped else []
    lines += ["from xtrax.cli import load_run", f"run = load_run({run!r})"]
    lines += [f"batch = next(iter(run.data.{'eval' if metrics else 'train'}_iter()))", f"{call}(batch['inputs'])"]
    for line in lines:
        say(console, f"  >>> {line}")


def _numbers(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
