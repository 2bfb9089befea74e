"""Run benchmark rows: `python tools/bench/run.py [ROW ...] [--list] [--verbose]`.

Prints `name  ratio  goal  ok|short` for each goal. Exits with 1 if one is short, with 2 for a row that does not exist.
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

# The rows import `tools.bench`, which is found from the top of the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import rows
from tools.bench.harness import Row


def find_rows() -> dict[str, Row]:
    """The rows by name, in the order of their files."""
    modules = (importlib.import_module(f"{rows.__name__}.{info.name}") for info in pkgutil.iter_modules(rows.__path__))
    return {module.ROW.name: module.ROW for module in modules}


def main() -> int:
    """Run the rows named on the command line, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to run; all of them if none is named")
    parser.add_argument("--list", action="store_true", help="list the rows and run none")
    parser.add_argument("--verbose", action="store_true", help="print the measured times too")
    arguments = parser.parse_args()
    known = find_rows()
    unknown = [name for name in arguments.rows if name not in known]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are: {', '.join(known)}")
    if arguments.list:
        for row in known.values():
            print(f"{row.name}  {row.work}, against {row.peer}")
        return 0
    short = False
    for name in arguments.rows or known:
        for line in known[name].measure():
            print(line, flush=True)
            if arguments.verbose and line.detail:
                print(f"    {line.detail}", flush=True)
            short |= not line.ok
    return int(short)


if __name__ == "__main__":
    sys.exit(main())
