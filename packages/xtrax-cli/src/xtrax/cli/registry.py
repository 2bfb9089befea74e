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
from typing import Annotated, Any

import tyro

from xtrax.cli._defaults import RUNS_DIR


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

    epochs: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
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


def _run(args: RunArgs) -> int:
    began = time.perf_counter()
    from xtrax.cli._train import run  # here, so that help does not import jax

    return run(args.config, args.set, args.runs_dir, began=began)


def _resume(args: ResumeArgs) -> int:
    began = time.perf_counter()
    from xtrax.cli._resume import resume  # here, so that help does not import jax

    return resume(args.run_id, args.epochs, args.in_place, args.runs_dir, began=began)


def _sweep(args: SweepArgs) -> int:
    began = time.perf_counter()
    from xtrax.cli._sweep import sweep  # here, so that help does not import jax

    return sweep(args.config, args.set, args.runs_dir, began=began)


REGISTRY: dict[str, tuple[type, Callable[[Any], int]]] = {
    "run": (RunArgs, _run),
    "resume": (ResumeArgs, _resume),
    "sweep": (SweepArgs, _sweep),
}
