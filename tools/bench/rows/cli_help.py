"""How long the command takes to tell what it does, from the start of the process to its end."""

import inspect
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.bench.harness import Line, Row, compare_times
from xtrax.cli import REGISTRY

_COMMAND = "import sys; from xtrax.cli import main; sys.exit(main())"
_WITHOUT_JAX = f"{_COMMAND.replace('sys.exit(main())', 'main()')}; sys.exit('jax' in sys.modules)"
_CASES = {"help": ("--help",), "verb-help": ("plan", "--help"), "mistyped": ("plna",)}


def _peer() -> str:
    """A program of tyro alone, with the verbs and options of the command."""
    lines = ["import sys", "from dataclasses import dataclass", "from typing import Annotated", "import tyro"]
    kinds = []
    for verb, (args_class, _) in REGISTRY.items():
        name = verb.title().replace("-", "")
        lines += ["@dataclass", f"class {name}:", f'    "What {verb} does."']
        for option in inspect.signature(args_class).parameters:
            lines += [f"    {option}: str = ''", f'    "What {option} is."']
        kinds.append(f"Annotated[{name}, tyro.conf.subcommand({verb!r}, prefix_name=False)]")
    return "\n".join([*lines, f"tyro.cli({' | '.join(kinds)}, prog='peer')", ""])


def _run(*command: str) -> int:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def _measure() -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        peer = Path(folder) / "peer.py"
        peer.write_text(_peer())
        for name, arguments in _CASES.items():
            if _run(sys.executable, "-c", _WITHOUT_JAX, *arguments):
                raise AssertionError(f"xtrax {' '.join(arguments)} imports jax")
            times = compare_times(
                lambda arguments=arguments: _run(sys.executable, "-c", _COMMAND, *arguments),
                lambda arguments=arguments: _run(sys.executable, str(peer), *arguments),
            )
            yield Line(f"cli-help/{name}", times.ratio, 1.15, detail=str(times))


ROW = Row(
    "cli-help",
    "xtrax --help, xtrax plan --help, a mistyped verb",
    "a program of tyro alone with the same verbs and options",
    _measure,
)
