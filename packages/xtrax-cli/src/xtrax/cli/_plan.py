"""`xtrax plan` and `xtrax explain`: a plan before it is paid for."""

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console
from rich.table import Table

from xtrax.cli._bytes import format_bytes
from xtrax.cli._errors import CLIError
from xtrax.cli._plan_request import PlanRequest
from xtrax.cli._planning import Planned, make_plan
from xtrax.cli._report import Terminal, print_table, say
from xtrax.cli._version import __version__
from xtrax.cli._write import write
from xtrax.eda import MemoryStats, PlanStats, explain_plan, render

SCHEMA_VERSION = 1
_STYLES = {
    "vectorized": "green",
    "chunked": "yellow",
    "sequential": "magenta",
    "deduplicated": "cyan",
    "padded": "blue",
}


def plan(request: PlanRequest, as_json: bool) -> int:
    """Print a plan as a table, or as one JSON object.

    Returns:
        The exit code: 0, or 1 if the plan does not fit its budget.

    Raises:
        CLIError: If there is no plan.
    """
    planned = make_plan(request)
    stats = explain_plan(planned.plan)
    if as_json:
        write(_json(request, planned, stats), None)
    else:
        _print(request, planned, stats)
    return _verdict(planned)


def explain(request: PlanRequest, fmt: Literal["json", "text", "html", "png"], out: Path | None) -> int:
    """Write a plan with its reasons.

    Args:
        request: What is planned.
        fmt: The form.
        out: The file; standard output if None, which a PNG cannot go to.

    Returns:
        The exit code: 0, or 1 if the plan does not fit its budget.

    Raises:
        CLIError: If there is no plan, matplotlib is missing for a PNG, or the file cannot be written.
    """
    planned = make_plan(request)
    stats = explain_plan(planned.plan)
    if fmt == "json":
        write(_json(request, planned, stats), out)
    elif fmt == "text":
        write("\n".join([_heading(request, planned), str(stats), *_note_lines(planned)]), out)
    else:
        try:
            write(render(stats, fmt, title=request.fn, logger=_silent()), out)
        except ImportError as error:
            raise CLIError(str(error)) from error
    return _verdict(planned)


def _silent() -> logging.Logger:
    """A logger for what is told with the exit code."""
    logger = logging.Logger("xtrax.cli.explain")
    logger.addHandler(logging.NullHandler())
    return logger


def _verdict(planned: Planned) -> int:
    """The exit code; says on standard error why a plan does not fit."""
    if planned.infeasible is None:
        return 0
    say(Console(file=sys.stderr), f"xtrax: {planned.infeasible}", prose=True)
    return 1


def _heading(request: PlanRequest, planned: Planned) -> str:
    of = "of a batch" if request.axes is None else "of one element"
    inputs = ", ".join(f"{name}: {kind}" for name, kind in planned.inputs.items())
    kinds = list(planned.outputs.values())
    outputs = kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"
    return f"{request.fn}, {of}\n  ({inputs}) -> {outputs}\n"


def _note_lines(planned: Planned) -> list[str]:
    return [f"note: {note}" for note in planned.notes]


def _print(request: PlanRequest, planned: Planned, stats: PlanStats) -> None:
    console = Terminal(file=sys.stdout)
    first, rest = _heading(request, planned).split("\n", 1)
    say(console, first, "bold")
    say(console, rest)
    if stats.axes:
        print_table(console, _table(stats))
    else:
        say(console, "no argument has an axis, so there is nothing to plan")
    if stats.memory is not None:
        say(console, f"\n{_memory(stats.memory)}", "red" if stats.memory.over else None)
    if planned.notes:
        say(console, "")
    for note in _note_lines(planned):
        say(console, note, "dim", prose=True)


def _memory(memory: MemoryStats) -> str:
    if memory.budget is None:
        return f"memory  {format_bytes(memory.estimate)}"
    share = memory.estimate * 1000 // memory.budget / 10  # rounded down: 100 % is all of it
    fits = f"over by {format_bytes(memory.over)}" if memory.over else f"{share:g} % of it"
    programs = f"; {memory.compiles} programs compiled to find out" if memory.compiles else ""
    return f"memory  {format_bytes(memory.estimate)} of {format_bytes(memory.budget)}, {fits}{programs}"


def _table(stats: PlanStats) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("axis", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("strategy", no_wrap=True)
    table.add_column("at once", justify="right", no_wrap=True)
    table.add_column("steps", justify="right", no_wrap=True)
    table.add_column("because", ratio=1)
    for axis in stats.axes:
        strategy = f"[{style}]{axis.strategy}[/]" if (style := _STYLES.get(axis.kind)) else axis.strategy
        steps = "-" if axis.steps is None else str(axis.steps)
        table.add_row(axis.name, str(axis.cardinality), strategy, str(axis.batch_size), steps, axis.reasoning)
    return table


def _json(request: PlanRequest, planned: Planned, stats: PlanStats) -> str:
    document: dict[str, Any] = {
        "_meta": {
            "schema_version": SCHEMA_VERSION,
            "xtrax": __version__,
            "jax": jax.__version__,
            "fn": request.fn,
            "shapes": request.text,
            "per_element": request.axes is not None,
        },
        "inputs": dict(planned.inputs),
        "outputs": dict(planned.outputs),
        **dataclasses.asdict(stats),
        "fits": stats.fits,
        "notes": list(planned.notes),
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
