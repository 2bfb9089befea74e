"""`xtrax sweep`: every point of a grid, one after another, and a table of how they did."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from xtrax.cli._build import build, resolve
from xtrax.cli._defaults import INTERRUPTED, RUNS_DIR
from xtrax.cli._errors import CLIError, OutputClosed
from xtrax.cli._folder import RunFolder, jsonable, read_manifest
from xtrax.cli._interrupt import is_interrupted
from xtrax.cli._report import Terminal, print_table, say, typed
from xtrax.cli._sweep_config import Point, Sweep, load_sweep
from xtrax.cli._sweep_page import page
from xtrax.cli._train import has_checkpoint, train
from xtrax.cli._write import write
from xtrax.cli.config import ConfigError
from xtrax.config import dump_toml

_RESULTS = ("metrics", "train_metrics", "steps", "seconds")


def sweep(config_path: Path, overrides: Sequence[str], runs_dir: Path, *, began: float) -> int:
    """Train every point of a sweep that is not finished yet.

    Args:
        config_path: The TOML file, with a `[sweep]` table.
        overrides: `key=value` texts.
        runs_dir: The folder that holds the runs; the sweep's own folder is in it.
        began: `time.perf_counter()` when the command began.

    Returns:
        The exit code: 0; 1 if a point failed; 130 if interrupted.

    Raises:
        ConfigError: If the file has a fault; nothing is left.
        CLIError: If the sweep's folder cannot be made or is in use.
    """
    grid = load_sweep(config_path, overrides)
    import_paths = [str(config_path.resolve().parent), os.getcwd()]
    _check_names(grid, import_paths)
    again = _command(config_path, overrides, runs_dir)
    folder = _open(grid, config_path, overrides, runs_dir, import_paths)
    try:
        return _Running(grid, folder, import_paths, again).run(began)
    finally:
        folder.close()


def _check_names(grid: Sweep, import_paths: Sequence[str]) -> None:
    """Refuse what no point could run with, or some could not, before any runs."""
    faults: list[str] = []
    cause: ConfigError | None = None
    for point in grid.points:
        try:
            resolve(point.config, point.document, import_paths)
        except ConfigError as error:
            faults += str(error).splitlines()
            cause = cause or error
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults))) from cause


def _open(
    grid: Sweep, config_path: Path, overrides: Sequence[str], runs_dir: Path, import_paths: Sequence[str]
) -> RunFolder:
    """The sweep's folder, held by this process, with a record for each point in its manifest."""
    path = runs_dir / grid.run_id
    if (path / "manifest.json").is_file():
        folder = RunFolder.reopen(path)
        folder.start()
        return folder
    text = dump_toml(grid.document).encode() if overrides else config_path.read_bytes()
    about = {
        "kind": "sweep",
        "source": str(config_path.resolve()),
        "overrides": list(overrides),
        "import_paths": list(import_paths),
        "mode": grid.table.mode,
        "axes": jsonable(grid.axes),
        "points": [
            {"run_id": point.run_id, "values": jsonable(point.values), "status": "waiting"} for point in grid.points
        ],
    }
    return RunFolder.create_named(path, text, about)


class _Running:
    """A sweep at work: `manifest.json` is written, as a whole, whenever a point has ended."""

    def __init__(self, grid: Sweep, folder: RunFolder, import_paths: Sequence[str], again: str) -> None:
        self.grid = grid
        self.folder = folder
        self.import_paths = list(import_paths)
        self.again = again
        self.code = INTERRUPTED  # of the point that was interrupted
        self.names = _short(list(grid.axes))
        self.console = Terminal(file=sys.stdout)
        self.records: list[dict[str, Any]] = [dict(record) for record in folder.manifest["points"]]

    def run(self, began: float) -> int:
        done = sum(record["status"] == "finished" for record in self.records)
        total = len(self.records)
        say(
            self.console, f"sweep {self.folder.path.name}: {total} points over {', '.join(self.names.values())}", "bold"
        )
        if done:
            say(self.console, f"{done} of them are finished already")
        for number, (point, record) in enumerate(zip(self.grid.points, self.records, strict=True), 1):
            if record["status"] == "finished":
                continue
            line = f"point {number}/{total}  {self._told(point.values)}"
            try:
                with self.console.status(line):
                    outcome = self._run_point(point)
            except CLIError as error:
                if is_interrupted():  # which was taken for a fault of what it hit
                    self._record(record, {"status": "interrupted"})
                    return self._stop(number, None)
                outcome = {"status": "failed", "error": str(error)}
            except (KeyboardInterrupt, OutputClosed) as error:
                self._record(record, {"status": "interrupted"})
                return self._stop(number, error)
            self._record(record, outcome)
            if outcome["status"] == "interrupted":
                return self._stop(number, None, self.code)
            said = outcome["error"].splitlines()[0] if "error" in outcome else _results(outcome)
            try:
                say(self.console, f"{line}  {outcome['status']}: {said}", "red" if "error" in outcome else None)
            except OutputClosed as error:
                return self._stop(number, error)
        return self._finish(time.perf_counter() - began)

    def _run_point(self, point: Point) -> dict[str, Any]:
        """Train a point, or what is left of it; its results, or that it was interrupted."""
        began = time.perf_counter()
        path = self.folder.path / "points" / point.run_id
        status = read_manifest(path)["status"] if (path / "manifest.json").is_file() else None
        code = 0
        if status != "finished":
            built = build(point.config, point.document, self.import_paths)
            resume = status is not None and has_checkpoint(path)
            if resume:
                child = RunFolder.reopen(path)
                child.start()
            else:
                if path.exists():  # it was stopped before anything was saved
                    shutil.rmtree(path)
                about = {
                    "kind": point.config.kind,
                    "parent": self.folder.path.name,
                    "source": self.folder.manifest["source"],
                    "overrides": self.folder.manifest["overrides"],
                    "import_paths": self.import_paths,
                }
                text = dump_toml(point.document).encode()
                child = RunFolder.create(path.parent, point.config, text, about)
            code = train(point.config, built, child, resume=resume, began=began, quiet=True)
        if code:
            self.code = code
            return {"status": "interrupted"}
        manifest = read_manifest(path)
        return {"status": "finished", **{name: manifest[name] for name in _RESULTS}}

    def _record(self, record: dict[str, Any], outcome: Mapping[str, Any]) -> None:
        record.pop("error", None)
        record.update(outcome)
        self.folder.update(points=self.records)

    def _stop(self, number: int, error: BaseException | None, code: int = INTERRUPTED) -> int:
        self.folder.finish("interrupted")
        if isinstance(error, OutputClosed):
            raise error
        errors = Console(file=sys.stderr)
        say(errors, f"\nxtrax: interrupted in point {number} of {len(self.records)}, and saved. Go on with")
        say(errors, f"  {self.again}")
        return code

    def _finish(self, seconds: float) -> int:
        """Rank, tell and record how all points did."""
        order = _ranked(self.records, self.grid.table.rank_by, maximise=self.grid.table.goal == "max")
        failed = [record for record in self.records if record["status"] == "failed"]
        self.folder.finish(
            "failed" if failed else "finished",
            points=self.records,
            rank_by=self.grid.table.rank_by,
            goal=self.grid.table.goal,
            ranking=[self.records[index]["run_id"] for index in order],
            seconds=seconds,
        )
        best = order[0] if order else None
        say(self.console, "")
        header, rows = self._rows(order)
        print_table(self.console, self._table(header, rows))
        self._write_page(header, rows)
        say(self.console, f"everything is in {self.folder.path}, the table in its sweep.html", "bold")
        if best is not None:
            say(self.console, "next", "bold")
            say(self.console, f"  {typed('python')}   (the best point)")
            path = self.folder.path / "points" / self.records[best]["run_id"]
            for line in ("from xtrax.cli import load_run", f"run = load_run({str(path)!r})"):
                say(self.console, f"  >>> {line}")
        if not failed:
            return 0
        errors = Console(file=sys.stderr)
        say(errors, f"xtrax: {len(failed)} of {len(self.records)} points failed: {_first_line(failed[0])}")
        say(errors, f"mend it, and try those points again with {self.again}")
        return 1

    def _rows(self, order: Sequence[int]) -> tuple[list[str], list[tuple[list[str], str]]]:
        """The header, and the cells and kind of a row for each point, the best first; what has no rank comes last."""
        by = self.grid.table.rank_by
        metrics = [by, *sorted({name for record in self.records for name in _measured(record)} - {by})]
        arrow = " ↑" if self.grid.table.goal == "max" else " ↓"
        header = ["rank", *self.names.values(), *(f"{name}{arrow if name == by else ''}" for name in metrics)]
        rest = [index for index in range(len(self.records)) if index not in order]
        rows = []
        for rank, index in enumerate([*order, *rest], 1):
            record, values = self.records[index], self.grid.points[index].values
            measured = _measured(record)
            failed = record["status"] == "failed"
            cells = [str(rank) if index in order else "-"]
            cells += [_shown(values[key]) for key in self.names]
            cells += [_shown(measured[name]) if name in measured else "-" for name in metrics]
            cells += [f"{record['seconds']:.1f}" if "seconds" in record else "-"]
            cells += [record["status"] if failed else record["run_id"]]
            rows.append((cells, "failed" if failed else "best" if rank == 1 and index in order else ""))
        return [*header, "seconds", "run"], rows

    def _table(self, header: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in header:
            table.add_column(name, justify="left" if name == header[-1] else "right")
        for cells, kind in rows:
            table.add_row(*cells, style={"failed": "red", "best": "green"}.get(kind))
        return table

    def _write_page(self, header: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> None:
        goal = "largest" if self.grid.table.goal == "max" else "smallest"
        caption = f"{len(self.records)} points, the {goal} {self.grid.table.rank_by} first"
        name = self.folder.path.name
        write(page(f"Sweep {name.removeprefix('sweep-')}", caption, header, rows), self.folder.path / "sweep.html")

    def _told(self, values: Mapping[str, Any]) -> str:
        return " ".join(f"{self.names[key]}={_shown(value)}" for key, value in values.items())


def _measured(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The metrics of the last evaluation, or of training where there is none."""
    return record.get("metrics") or record.get("train_metrics") or {}


def _ranked(records: Sequence[Mapping[str, Any]], by: str, *, maximise: bool) -> list[int]:
    """The indices of the points that have a number to rank by, the best first, and equal ones in their order."""
    numbers = {
        index: value
        for index, record in enumerate(records)
        if isinstance(value := _measured(record).get(by), int | float)  # NaN is kept as text
    }
    return sorted(numbers, key=lambda index: -numbers[index] if maximise else numbers[index])


def _results(outcome: Mapping[str, Any]) -> str:
    kind = "eval " if outcome["metrics"] else ""
    told = [f"{kind}{name} {_shown(value)}" for name, value in _measured(outcome).items()]
    return "  ".join([*told, f"{outcome['seconds']:.1f} s"])


def _first_line(record: Mapping[str, Any]) -> str:
    return str(record["error"]).splitlines()[0]


def _short(keys: Sequence[str]) -> dict[str, str]:
    """For each dotted key the shortest end of it that no other has."""
    short: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        short[key] = next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1), key)
    return short


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _command(config_path: Path, overrides: Sequence[str], runs_dir: Path) -> str:
    """What to type to go on."""
    sets = [part for override in overrides for part in ("--set", override)]
    where = [] if runs_dir == RUNS_DIR else ["--runs-dir", str(runs_dir)]
    return f"{typed('xtrax')} " + shlex.join(["sweep", str(config_path), *sets, *where])
