"""Run every gate that CI runs: the one command of README.md and .ci/run.

Builds a wheel of each package, installs the wheels into two environments, and checks them there:
- ceiling: Python 3.13 and the versions of `uv.lock`, in `.venv-ceiling`;
- floor: Python 3.11 and the versions of `tools/floor.txt`, in `.venv-floor`.

Usage:
    uv run tools/check.py            everything
    uv run tools/check.py --quick    only what reads the code, in the current environment
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path for path in (ROOT / "packages").iterdir() if (path / "pyproject.toml").exists())
LAYERS = sorted(f"xtrax.{p.parent.name}" for p in (ROOT / "packages").glob("*/src/xtrax/*/__init__.py"))
DIST = ROOT / "dist"
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
PYTHON_BY_END = {"ceiling": "3.13", "floor": "3.11"}


class GateError(Exception):
    """A gate could not even be run; the message says what is missing."""


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> bool:
    """Run a command with its output shown; True if it succeeded."""
    print("$", *command, flush=True)
    return subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **(env or {})}).returncode == 0


def must(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command that the gates need; `GateError` if it fails."""
    if not run(*command, env=env):
        raise GateError(f"this command failed, so nothing behind it was checked: {' '.join(map(str, command))}")


def interpreter(version: str) -> str:
    """The path of a Python of this version: uv's choice, else pyenv's, else fetched by uv."""
    find = [UV, "python", "find", "--system", "--no-python-downloads", version]
    found = subprocess.run(find, capture_output=True, text=True, cwd=ROOT)
    if found.returncode == 0:
        return found.stdout.strip()
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    kept = sorted(pyenv.glob(f"versions/{version}.*/bin/python"))
    if kept:
        return str(kept[-1])
    if run(UV, "python", "install", version):
        return subprocess.run(find, capture_output=True, text=True, cwd=ROOT, check=True).stdout.strip()
    raise GateError(f"Python {version} is missing and uv could not fetch it; install it and run this again")


def python_of(end: str) -> Path:
    """The interpreter of an environment."""
    return ROOT / f".venv-{end}" / "bin" / "python"


def build_environment(end: str) -> None:
    """Make or renew the environment of one end, with the wheels of `dist/` in it."""
    venv = ROOT / f".venv-{end}"
    # A shell's active environment must not be mistaken for this one.
    env = {"UV_PROJECT_ENVIRONMENT": str(venv), "VIRTUAL_ENV": str(venv)}
    python = interpreter(PYTHON_BY_END[end])
    if end == "ceiling":
        groups = ["--all-groups", "--all-packages", "--all-extras", "--no-install-workspace"]
        # jax's own extras are gigabytes for accelerators that no test here uses.
        groups += [word for extra in ("cuda12", "cuda13", "tpu", "all") for word in ("--no-extra", extra)]
        must(UV, "sync", "--quiet", "--locked", "--python", python, *groups, env=env)
    else:
        must(UV, "venv", "--quiet", "--clear", "--python", python, venv, env=env)
        must(UV, "pip", "sync", "--quiet", "--python", python_of(end), "tools/floor.txt", env=env)
    wheels = sorted(DIST.glob("*.whl"))
    must(UV, "pip", "install", "--quiet", "--python", python_of(end), "--no-deps", "--reinstall", *wheels, env=env)


def static(python: Path) -> dict[str, bool]:
    """The gates that read the code without running it: seconds each."""
    bin_ = python.parent
    ours = "|".join(path.name for path in PACKAGES)
    results = {
        "format (ruff)": run(bin_ / "ruff", "format", "--check", "."),
        "lint (ruff)": run(bin_ / "ruff", "check", "."),
        "declared layers (check_packages)": run(python, "tools/check_packages.py"),
    }
    with tempfile.TemporaryDirectory() as merged:
        # All layers in one folder, as wheels put them: import-linter sees one `xtrax` only so, and ty would otherwise
        # meet each class twice where wheels are installed.
        for package in PACKAGES:
            shutil.copytree(package / "src", merged, dirs_exist_ok=True)
        results["types (ty)"] = run(bin_ / "ty", "check", "--python", python, ".", cwd=Path(merged))
        results["order of layers (import-linter)"] = run(
            bin_ / "lint-imports", "--no-cache", env={"PYTHONPATH": merged}
        )
    third_party = True
    for package in PACKAGES:
        # jaxlib comes with jax and is not imported by name; the meta-package imports nothing that it requires.
        unused = f"DEP002=jaxlib|{ours}" + ("|jax" if package.name == "xtrax" else "")
        flags = ("--known-first-party", "xtrax", "--per-rule-ignores", unused)
        third_party &= run(bin_ / "deptry", "src", *flags, cwd=package)
    results["third-party dependencies (deptry)"] = third_party
    return results


def docs(python: Path) -> dict[str, bool]:
    """Build the documentation site; a warning is an error."""
    site = ("--strict", "--quiet", "-f", "docs/mkdocs.yml", "-d", ROOT / ".site")
    return {"docs (mkdocs)": run(python, "-m", "mkdocs", "build", *site)}


def tests(end: str) -> dict[str, bool]:
    """Every test, docstring example and documentation example in one environment."""
    python = python_of(end)
    pages = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/pages/**/*.md")])
    pages = [page.relative_to(ROOT) for page in pages]
    # xtrax-jit first: its conftest asks for eight devices, which JAX allows only before anything has used one.
    packages = sorted(PACKAGES, key=lambda path: path.name != "xtrax-jit")
    where = [path.relative_to(ROOT) / "tests" for path in packages] + ["tests-integration"]
    what = ("--pyargs", *LAYERS, "xtrax._lazy", "--doctest-modules", "--markdown-docs", *where, *pages)
    how = ("-n", "2", "--dist", "worksteal", "--durations", "15")
    passed = run(python, "-m", "pytest", *how, *what, env={"XTRAX_WHEELS": str(DIST)})
    return {f"tests on the {end} (Python {PYTHON_BY_END[end]})": passed}


def main() -> int:
    """Run the gates and print a line for each; 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what reads the code, in the current environment")
    started = time.monotonic()
    quick = parser.parse_args().quick
    results: dict[str, bool] = {}
    try:
        if quick:
            results |= static(Path(sys.executable))
        else:
            shutil.rmtree(DIST, ignore_errors=True)
            must(UV, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", DIST)
            build_environment("ceiling")
            results |= static(python_of("ceiling"))
            results |= docs(python_of("ceiling"))
            results |= tests("ceiling")
            build_environment("floor")
            results |= tests("floor")
    except GateError as error:
        print(f"check: {error}", file=sys.stderr)
        results["the gates can be run"] = False
    print()
    for gate, passed in results.items():
        print("ok    " if passed else "FAILED", gate)
    print(f"check: {sum(results.values())} of {len(results)} gates passed in {time.monotonic() - started:.0f} s")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
