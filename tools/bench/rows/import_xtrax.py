"""How long `import xtrax` takes."""

import subprocess
import sys
from collections.abc import Iterator

from tools.bench.harness import Line, Row, compare_times


def _run(code: str) -> int:
    return subprocess.run([sys.executable, "-c", code]).returncode


def _measure() -> Iterator[Line]:
    if _run("import sys, xtrax; sys.exit('jax' in sys.modules)"):
        raise AssertionError("import xtrax imports jax")
    times = compare_times(lambda: _run("import xtrax"), lambda: _run("pass"))
    yield Line("import/seconds-above", times.work - times.peer, 0.10, detail=str(times))


ROW = Row("import", "import xtrax in a new process", "python -c pass, of which it is the seconds above", _measure)
