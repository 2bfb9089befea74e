"""How a tiled run goes: a bar on a terminal, a line a minute elsewhere."""

import sys
import time
from typing import Any

from xtrax.run._words import in_bytes

_LINE_SECONDS = 60.0


class Progress:
    """Shows tiles, rate, time left and bytes written, on standard error."""

    def __init__(self, mode: str, tiles: int, skipped: int):
        """Nothing is shown before the block is entered.

        Args:
            mode: `"auto"` or `"off"`.
            tiles: How many tiles the run has.
            skipped: How many were committed before.
        """
        self._mode = mode
        self._tiles, self._skipped, self._done, self._bytes = tiles, skipped, 0, 0
        self._bar: Any = None
        self._task: Any = None
        self._started = self._told = time.monotonic()

    def __enter__(self) -> "Progress":
        """Start the bar, on a terminal."""
        if self._mode != "off" and sys.stderr.isatty():
            # Here, since a run in a batch job needs no terminal's library.
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("tiles"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"),
                       TimeRemainingColumn())  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("tiles", total=self._tiles, completed=self._skipped, told="")
            self._bar.start()
        return self

    def advance(self, tiles: int, written: int) -> None:
        """Tiles were committed."""
        self._done += tiles
        self._bytes += written
        if self._mode == "off":
            return
        if self._bar is not None:
            self._bar.update(self._task, advance=tiles, told=self._told_of())
        elif time.monotonic() - self._told >= _LINE_SECONDS:
            self._told = time.monotonic()
            self._say()

    def _rate(self) -> float:
        return self._done / max(1e-9, time.monotonic() - self._started)

    def _told_of(self) -> str:
        return f"{self._rate():.2f} tiles/s, {in_bytes(self._bytes)} written"

    def _say(self) -> None:
        done = self._skipped + self._done
        left = (self._tiles - done) / max(1e-9, self._rate())
        sys.stderr.write(f"run_tiled: {done} of {self._tiles} tiles, {self._told_of()}, {left:.0f} s left\n")
        sys.stderr.flush()

    def __exit__(self, *_: object) -> None:
        """Leave the terminal as it was; without one, a last line if there was one before."""
        if self._bar is not None:
            self._bar.stop()
        elif self._mode != "off" and self._told > self._started:
            self._say()
