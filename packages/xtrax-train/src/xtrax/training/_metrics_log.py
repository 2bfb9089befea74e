"""MetricsLog: the metrics of every step, in a file that survives a kill."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import zarr

from xtrax.training._callbacks import FitContext, StepMetrics, logger
from xtrax.training._checks import check_int
from xtrax.training._state import ResumableState

Row = dict[str, Any]

_FLUSH_ROWS = 1000
_FLUSH_SECONDS = 10.0
_CHUNK_ROWS = 16384


class MetricsLog:
    """Writes the metrics of training steps and of evaluations to a file.

    Rows have `step` (optimizer steps done), `epoch` and the metrics. They are written in blocks of 1,000 or after 10
    seconds, and always before a checkpoint. When a run is resumed, what is in the file past the checkpoint is cut, so
    that it ends with the rows of a run that never stopped.

    Args:
        path: a folder that ends in `.zarr`, which holds one growing array for each name, `train/step`, `train/loss`,
            `eval/step`, ... (int64 for `step` and `epoch`, float64 for metrics, NaN where a row has none); or a file
            that ends in `.jsonl`, with one object a line, whose `kind` is `train` or `eval` and in which a value that
            is not finite is null.
        every: the training steps to log are those that this divides.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: another ending, or `every` below 1.
        FileExistsError: when `fit` starts anew and the file has rows of another run.

    Example:
        >>> from xtrax.training import MetricsLog
        >>> log = MetricsLog("metrics.zarr", every=10)
    """

    def __init__(self, path: str | Path, every: int = 1):
        if not isinstance(path, str | Path):
            raise TypeError(f"path must be a path, got {path!r} ({type(path).__name__})")
        self.path = Path(path)
        if self.path.suffix not in (".zarr", ".jsonl"):
            raise ValueError(f"path must end in .zarr or .jsonl, got {str(path)!r}")
        self.every = check_int("every", every, at_least=1)
        self._file: _File | None = None
        self._rows: list[tuple[str, StepMetrics | Row]] = []
        self._flushed = 0.0

    def attach(self, fit: FitContext) -> None:
        """Opens the file, and cuts what a checkpoint does not know of."""
        self._rows = []
        self._flushed = time.monotonic()
        self._file = _ZarrFile(self.path) if self.path.suffix == ".zarr" else _JsonlFile(self.path)
        keep = {"train": ("step", fit.step), "eval": ("epoch", fit.epoch - 1)}
        if not fit.resumed and self._file.has_past(keep):
            raise FileExistsError(
                f"{self.path} has rows past step {fit.step}, where this run starts; resume that run, or log to "
                "another path"
            )
        self._file.cut(keep)
        last = self._file.last_step()
        if fit.resumed and (0 if last is None else last) < fit.step - fit.step % self.every:
            missing = f"steps {(last or 0) + 1} to {fit.step}"
            logger.warning("%s has no rows of %s; they are lost, and the log goes on from there", self.path, missing)

    def on_step_end(self, state: ResumableState, metrics: StepMetrics) -> None:
        """Keeps the row of a step."""
        if metrics.step % self.every:
            return
        self._rows.append(("train", metrics))
        if len(self._rows) >= _FLUSH_ROWS or time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def on_eval_end(self, state: ResumableState, epoch: int, metrics: Mapping[str, float]) -> None:
        """Keeps the row of an evaluation."""
        self._rows.append(("eval", {"step": int(state.step), "epoch": epoch, **metrics}))

    def flush(self) -> None:
        """Writes the rows that are kept."""
        if self._file is None:
            return
        if self._rows:
            self._file.append([(kind, _plain(row)) for kind, row in self._rows])
        self._rows = []
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Writes the rows that are kept, and forgets the file."""
        self.flush()
        self._file = None


Keep = dict[str, tuple[str, int]]
"""For each kind of row the column that decides, and its last value to keep."""


class _File(Protocol):
    def has_past(self, keep: Keep) -> bool: ...
    def cut(self, keep: Keep) -> None: ...
    def last_step(self) -> int | None: ...
    def append(self, rows: list[tuple[str, Row]]) -> None: ...


class _ZarrFile:
    """One array for each column; a kill while rows are appended may leave some columns longer than others."""

    def __init__(self, path: Path):
        self._root = zarr.open_group(str(path), mode="a")
        self._groups = {kind: self._root.require_group(kind) for kind in ("train", "eval")}
        self._columns = {kind: dict(group.arrays()) for kind, group in self._groups.items()}

    def _rows(self, kind: str) -> int:
        return min((array.shape[0] for array in self._columns[kind].values()), default=0)

    def _rows_to_keep(self, kind: str, keep: Keep) -> int:
        name, last = keep[kind]
        rows = self._rows(kind)
        if not rows:
            return 0
        return int(np.searchsorted(np.asarray(self._columns[kind][name][:rows]), last, side="right"))

    def has_past(self, keep: Keep) -> bool:
        return any(self._rows_to_keep(kind, keep) < self._rows(kind) for kind in keep)

    def cut(self, keep: Keep) -> None:
        for kind, columns in self._columns.items():
            rows = self._rows_to_keep(kind, keep)
            for array in columns.values():
                if array.shape[0] != rows:
                    array.resize((rows,))

    def last_step(self) -> int | None:
        rows = self._rows("train")
        return int(np.asarray(self._columns["train"]["step"][rows - 1])) if rows else None

    def append(self, rows: list[tuple[str, Row]]) -> None:
        for kind in self._columns:
            if of_kind := [row for name, row in rows if name == kind]:
                self._append(kind, of_kind)

    def _append(self, kind: str, rows: list[Row]) -> None:
        columns = self._columns[kind]
        before = self._rows(kind)
        for name in dict.fromkeys(name for row in rows for name in row):
            if name not in columns:
                integer = name in ("step", "epoch")
                columns[name] = self._groups[kind].create_array(
                    name,
                    shape=(before,),
                    chunks=(_CHUNK_ROWS,),
                    dtype="int64" if integer else "float64",
                    fill_value=0 if integer else float("nan"),
                    compressors=None,
                )
        for name, array in columns.items():
            array.append(np.asarray([row.get(name, math.nan) for row in rows], array.dtype))


class _JsonlFile:
    """One JSON object a line."""

    def __init__(self, path: Path):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    def _lines(self) -> list[tuple[str, Row]]:
        """The complete lines; one that a kill has torn has no newline."""
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        try:
            return [(line, json.loads(line)) for line in lines if line.endswith("\n")]
        except json.JSONDecodeError as error:
            raise ValueError(f"{self._path} is no metrics log: {error}; log to another path") from error

    def has_past(self, keep: Keep) -> bool:
        return any(not _kept(row, keep) for _, row in self._lines())

    def cut(self, keep: Keep) -> None:
        kept = "".join(line for line, row in self._lines() if _kept(row, keep))
        if kept.encode() == self._path.read_bytes():
            return
        temporary = self._path.with_name(self._path.name + ".partial")
        temporary.write_text(kept, encoding="utf-8")
        os.replace(temporary, self._path)

    def last_step(self) -> int | None:
        return max((row["step"] for _, row in self._lines() if row["kind"] == "train"), default=None)

    def append(self, rows: list[tuple[str, Row]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(_line(kind, row) for kind, row in rows)


def _plain(row: StepMetrics | Row) -> Row:
    return {"step": row.step, "epoch": row.epoch, **row} if isinstance(row, StepMetrics) else row


def _kept(row: Row, keep: Keep) -> bool:
    name, last = keep[row["kind"]]
    return row[name] <= last


def _line(kind: str, row: Row) -> str:
    values = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in row.items()}
    return json.dumps({"kind": kind, **values}) + "\n"
