"""The verbs of the `xtrax` command: what each takes, and the function that does it.

A command line of your own may hold them beside its own verbs:

    >>> from dataclasses import dataclass
    >>> from xtrax.cli import REGISTRY, main
    >>> @dataclass
    ... class Hello:
    ...     "Greet."
    ...     name: str = "you"
    >>> def hello(args: Hello) -> int:
    ...     print("hello,", args.name)
    ...     return 0
    >>> main(["hello", "--name", "Ada"], registry={**REGISTRY, "hello": (Hello, hello)}, prog="mine")
    hello, Ada
    0
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypeAlias

import tyro

from xtrax.cli._defaults import RUNS_DIR
from xtrax.cli._errors import CLIError, UsageError
from xtrax.cli._interrupt import raise_if_interrupted
from xtrax.cli._plan_request import PlanRequest
from xtrax.cli._shapes import parse_shapes

# Optional, since for `X | None` tyro imports typeguard, which takes half as long as the rest of the help.
_Text: TypeAlias = Optional[str]  # noqa: UP045
_Number: TypeAlias = Optional[int]  # noqa: UP045
_File: TypeAlias = Optional[Path]  # noqa: UP045
_Fn: TypeAlias = Annotated[str, tyro.conf.arg(metavar="MODULE:SYMBOL")]
_Shapes: TypeAlias = Annotated[str, tyro.conf.arg(metavar="SHAPES")]
_Budget: TypeAlias = Annotated[_Text, tyro.conf.arg(metavar="BYTES")]
_BatchSize: TypeAlias = Annotated[_Number, tyro.conf.arg(metavar="N")]
_PerElement: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]
_Axes: TypeAlias = Annotated[_Text, tyro.conf.arg(metavar="AXES")]


@dataclass(frozen=True)
class PlanArgs:
    """Plan how the axes of a function are mapped, and print it as a table.

    Example: xtrax plan --fn jax.nn:softmax --shapes "x=(65536,64)f32" --budget 16MB
    """

    fn: _Fn
    """A function of a batch. It is imported: trust it as you would a script."""

    shapes: _Shapes
    """The shapes of its arguments: name=(d0,d1,...)dtype, separated by blanks; dots in a name make dicts."""

    budget: _Budget = None
    """The most memory that the plan may take, such as 2GB (10^9 each) or 1.5GiB (2^30 each); "device" for what the
    device has."""

    batch_size: _BatchSize = None
    """Elements of an axis at once, where they do not all fit. Left out: as @axis_config says, else as many as fit."""

    per_element: _PerElement = False
    """The function takes one element, and the shapes have the axes of --axes in front of it."""

    axes: _Axes = None
    """With --per-element, the axes of each argument, outermost first: "x=batch,chain y=batch"."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of the table."""


@dataclass(frozen=True)
class ExplainArgs:
    """Plan how the axes of a function are mapped, and tell why: as JSON, text, an interactive page or a figure.

    Example: xtrax explain --fn jax.nn:softmax --shapes "x=(65536,64)f32" --batch-size 1024 --fmt html --out plan.html
    """

    fn: _Fn
    """A function of a batch. It is imported: trust it as you would a script."""

    shapes: _Shapes
    """The shapes of its arguments: name=(d0,d1,...)dtype, separated by blanks; dots in a name make dicts."""

    budget: _Budget = None
    """The most memory that the plan may take, such as 2GB (10^9 each) or 1.5GiB (2^30 each); "device" for what the
    device has."""

    batch_size: _BatchSize = None
    """Elements of an axis at once, where they do not all fit. Left out: as @axis_config says, else as many as fit."""

    per_element: _PerElement = False
    """The function takes one element, and the shapes have the axes of --axes in front of it."""

    axes: _Axes = None
    """With --per-element, the axes of each argument, outermost first: "x=batch,chain y=batch"."""

    fmt: Literal["json", "text", "html", "png"] = "json"
    """The form; png needs matplotlib."""

    out: Annotated[_File, tyro.conf.arg(metavar="FILE")] = None
    """The file to write; standard output if left out, except for png."""


@dataclass(frozen=True)
class ExportArgs:
    """Write the program that jax makes of a function for given shapes, as StableHLO.

    Example: xtrax export --fn jax.nn:softmax --shapes "x=(4,3)f32" --out softmax.mlir
    """

    fn: _Fn
    """The function. It is imported: trust it as you would a script."""

    shapes: _Shapes
    """The shapes of its arguments: name=(d0,d1,...)dtype, separated by blanks; dots in a name make dicts."""

    serialized: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write bytes that jax.export.deserialize reads, which call the function without its code."""

    out: Annotated[_File, tyro.conf.arg(metavar="FILE")] = None
    """The file to write; standard output if left out, for text."""


@dataclass(frozen=True)
class RunArgs:
    """Train a model that a TOML file describes.

    Example: xtrax run train.toml --set optimizer.kwargs.learning_rate=1e-3
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """The TOML file. It names code to import: trust it as you would a script."""

    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Set a key of the file for this run, such as num_epochs=5."""

    runs_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RUNS_DIR
    """The folder that holds the runs."""


@dataclass(frozen=True)
class ResumeArgs:
    """Go on with a run from its last checkpoint.

    Examples: xtrax resume 1f0c29ab34de --epochs 10 | xtrax resume 1f0c29ab34de --in-place
    """

    run_id: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN_ID")]
    """The run, as its folder is called."""

    epochs: Annotated[_Number, tyro.conf.arg(metavar="N")] = None
    """Train N more epochs, in a new run beside the old one."""

    in_place: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Finish an interrupted run in its own folder."""

    runs_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RUNS_DIR
    """The folder that holds the runs."""


@dataclass(frozen=True)
class SweepArgs:
    """Train every combination of the values in [sweep.axes] of a TOML file, and rank them.

    Typed again, it goes on with the points that are not finished.

    Example: xtrax sweep sweep.toml --set num_epochs=5
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """The TOML file of a run with a [sweep] table. It names code to import: trust it as you would a script."""

    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Set a key of the file for all points, such as num_epochs=5."""

    runs_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = RUNS_DIR
    """The folder that holds the runs."""


@dataclass(frozen=True)
class GraphValidateArgs:
    """Judge each node of a graph of stages, and write the verdicts into its file.

    Prints one JSON object; exits with 1 if a node does not pass.

    Example: xtrax graph-validate pipeline.json
    """

    graph: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="GRAPH")]
    """The JSON file. It names code to import: trust it as you would a script."""


@dataclass(frozen=True)
class GraphPlanArgs:
    """Judge a graph of stages, and tell how the axes of each node would be mapped.

    Prints one JSON object; exits with 1 if a node does not pass.

    Example: xtrax graph-plan pipeline.json
    """

    graph: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="GRAPH")]
    """The JSON file. It names code to import: trust it as you would a script."""


@dataclass(frozen=True)
class GraphAuthorArgs:
    """Make a graph of stages, judge it and write it.

    Prints one JSON object; exits with 1 if a node does not pass.

    Example: xtrax graph-author --out pipeline.json --num-nodes 5 --seed 0
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The JSON file to write."""

    num_nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 4
    """How many nodes it has."""

    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """The same seed gives the same graph."""

    generator: Annotated[_Text, tyro.conf.arg(metavar="MODULE:SYMBOL")] = None
    """A class or function that returns an object with generate(seed, num_nodes); elementwise functions if left out."""

    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace the file if it is there."""


# The imports stand inside the functions, after the checks, so that neither help nor a usage error imports jax.


def _request(args: PlanArgs | ExplainArgs) -> PlanRequest:
    """What is to be planned, checked as far as that goes without jax."""
    return PlanRequest.parse(args.fn, args.shapes, args.budget, args.batch_size, args.per_element, args.axes)


def _plan(args: PlanArgs) -> int:
    request = _request(args)
    from xtrax.cli._plan import plan

    raise_if_interrupted()
    return plan(request, args.json)


def _explain(args: ExplainArgs) -> int:
    request = _request(args)
    if args.fmt == "png" and args.out is None:
        raise UsageError("--fmt png writes bytes; say where, by --out FILE")
    from xtrax.cli._plan import explain

    raise_if_interrupted()
    return explain(request, args.fmt, args.out)


def _export(args: ExportArgs) -> int:
    shapes = parse_shapes(args.shapes)
    if args.serialized and args.out is None:
        raise UsageError("--serialized writes bytes; say where, by --out FILE")
    from xtrax.cli._export import export

    raise_if_interrupted()
    return export(args.fn, shapes, args.serialized, args.out)


def _check_graph_file(path: Path) -> None:
    if path.is_dir():
        raise CLIError(f"{path}: is a folder; name the JSON file in it")
    if not path.exists():
        raise CLIError(f"{path}: no such file; xtrax graph-author --out {path} makes one")


def _graph_validate(args: GraphValidateArgs) -> int:
    _check_graph_file(args.graph)
    from xtrax.cli._graph import graph_validate

    raise_if_interrupted()
    return graph_validate(args.graph)


def _graph_plan(args: GraphPlanArgs) -> int:
    _check_graph_file(args.graph)
    from xtrax.cli._graph import graph_plan

    raise_if_interrupted()
    return graph_plan(args.graph)


def _graph_author(args: GraphAuthorArgs) -> int:
    for option, value, least in (("--seed", args.seed, 0), ("--num-nodes", args.num_nodes, 1)):
        if value < least:
            raise UsageError(f"{option} must be at least {least}, found {value}")
    from xtrax.cli._graph import graph_author

    raise_if_interrupted()
    return graph_author(args.out, args.generator, args.seed, args.num_nodes, args.force)


def _run(args: RunArgs) -> int:
    began = time.perf_counter()
    from xtrax.cli._train import run

    raise_if_interrupted()
    return run(args.config, args.set, args.runs_dir, began=began)


def _resume(args: ResumeArgs) -> int:
    began = time.perf_counter()
    if args.in_place == (args.epochs is not None):
        raise UsageError(
            f"say either --epochs N (a new run) or --in-place (finish the old one): xtrax resume {args.run_id} ..."
        )
    if args.epochs is not None and args.epochs < 1:
        raise UsageError(f"--epochs must be at least 1, found {args.epochs}")
    from xtrax.cli._resume import resume

    raise_if_interrupted()
    return resume(args.run_id, args.epochs, args.in_place, args.runs_dir, began=began)


def _sweep(args: SweepArgs) -> int:
    began = time.perf_counter()
    from xtrax.cli._sweep import sweep

    raise_if_interrupted()
    return sweep(args.config, args.set, args.runs_dir, began=began)


REGISTRY: dict[str, tuple[type, Callable[[Any], int]]] = {
    "plan": (PlanArgs, _plan),
    "explain": (ExplainArgs, _explain),
    "export": (ExportArgs, _export),
    "run": (RunArgs, _run),
    "resume": (ResumeArgs, _resume),
    "sweep": (SweepArgs, _sweep),
    "graph-validate": (GraphValidateArgs, _graph_validate),
    "graph-plan": (GraphPlanArgs, _graph_plan),
    "graph-author": (GraphAuthorArgs, _graph_author),
}
