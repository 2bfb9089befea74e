"""Write both ends of the tested range anew: `uv.lock`, and `tools/floor.txt` from the declared lower bounds.

Usage: uv run tools/relock.py
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
# Not jax's own for accelerators, which are gigabytes that no test here uses.
EXTRAS = ("dask", "equinox", "h5", "viz", "xarray")


def main() -> int:
    """Run uv twice; its exit code."""
    packages = sorted(path.name for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").exists())
    command = [UV, "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--python-version", "3.11"]
    command += ["--no-header", "--no-annotate", "--group", "dev", "--output-file", "tools/floor.txt"]
    command += [word for extra in EXTRAS for word in ("--extra", extra)]
    command += [word for package in packages for word in ("--no-emit-package", package)]
    command += [f"packages/{package}/pyproject.toml" for package in packages]
    (ROOT / "tools/floor.txt").unlink(missing_ok=True)
    locked = subprocess.run([UV, "lock"], cwd=ROOT).returncode
    return locked or subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
