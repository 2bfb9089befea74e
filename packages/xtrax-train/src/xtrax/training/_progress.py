"""ProgressBar: how training goes, for the person at the terminal."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from xtrax.training._callbacks import FitContext, StepMetrics
from xtrax.training._state import ResumableState

_REFRESH_SECONDS = 0.1


class ProgressBar:
    """One line for each epoch, with loss, evaluation results and rate; on a terminal also a bar for the current one.

    Where the output is not a terminal there is only the line, without control characters.

    Args:
        console: where to write; by default standard output.

    Raises:
        TypeError: `console` is not a `rich.console.Console`.

    Example:
        >>> import io
        >>> from rich.console import Console
        >>> from xtrax.training import ProgressBar
        >>> bar = ProgressBar(Console(file=io.StringIO()))
    """

    def __init__(self, console: Console | None = None):
        if console is not None and not isinstance(console, Console):
            raise TypeError(f"console must be a rich.console.Console, got {type(console).__name__}")
        self._console = Console() if console is None else console
        self._fit: FitContext | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._steps_per_epoch: int | None = None
        self._eval: Mapping[str, float] = {}
        self._steps = 0
        self._started = self._stepped = self._shown = 0.0
        self._last: StepMetrics | None = None

    def attach(self, fit: FitContext) -> None:
        """Remembers how many epochs and steps there will be."""
        self._fit = fit
        self._steps_per_epoch = fit.steps_per_epoch

    def on_epoch_start(self, state: ResumableState, epoch: int) -> None:
        """Starts the bar of the epoch."""
        self._steps = 0
        self._eval = {}
        self._last = None
        self._started = self._stepped = time.perf_counter()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[info]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
                auto_refresh=False,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._title(epoch), total=self._steps_per_epoch, info="")
            self._progress.refresh()

    def on_step_end(self, state: ResumableState, metrics: StepMetrics) -> None:
        """Moves the bar, at most ten times a second."""
        self._steps += 1
        self._stepped = time.perf_counter()
        if self._progress is not None and self._stepped - self._shown > _REFRESH_SECONDS:
            self._shown = self._stepped
            # The loss of the refresh before, which is known by now: the loop does not wait for it.
            info = "" if self._last is None else f"loss {self._last['loss']:.4g}"
            self._progress.update(self._task, completed=self._steps, info=f"{info}  {self._rate()}")
            self._progress.refresh()
            self._last = metrics

    def on_eval_end(self, state: ResumableState, epoch: int, metrics: Mapping[str, float]) -> None:
        """Keeps the results for the line of the epoch."""
        self._eval = metrics

    def on_epoch_end(self, state: ResumableState, epoch: int) -> None:
        """Writes the line of the epoch."""
        self._stop()
        self._steps_per_epoch = self._steps_per_epoch or self._steps
        parts = [self._title(epoch)]
        if self._fit is not None and self._fit.history:
            parts += [f"{name} {value:.4g}" for name, value in self._fit.history[-1]["train"].items()]
        parts += [f"eval {name} {value:.4g}" for name, value in self._eval.items()]
        parts.append(self._rate())
        self._console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Removes a bar that an error left."""
        self._stop()

    def _stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}" if self._fit is None else f"epoch {epoch + 1}/{self._fit.num_epochs}"

    def _rate(self) -> str:
        seconds = self._stepped - self._started
        if seconds <= 0:
            return ""
        rate = self._steps / seconds
        return f"{rate:,.0f} steps/s" if rate >= 100 else f"{rate:.3g} steps/s"
