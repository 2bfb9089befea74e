"""A fault planted in a copy of the repository is caught by the gate that is there for it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(sys.version_info < (3, 13), reason="these gates run on the ceiling")

FAULTS = {
    "upward import": (
        "packages/xtrax-jit/src/xtrax/jit/_planted.py",
        '"""Planted."""\n\nfrom xtrax.tiling import AxisSpec as AxisSpec\n',
        {"order of layers (import-linter)", "declared layers (check_packages)"},
    ),
    "import of a layer that is not declared": (
        "packages/xtrax-cli/src/xtrax/cli/_planted.py",
        '"""Planted."""\n\nfrom xtrax.jit import bounded_jit as bounded_jit\n',
        {"declared layers (check_packages)"},
    ),
    "layer that the design does not have": (
        "packages/xtrax-jit/src/xtrax/planted/__init__.py",
        '"""Planted."""\n',
        {"order of layers (import-linter)"},
    ),
    "third-party package that is not declared": (
        "packages/xtrax-jit/src/xtrax/jit/_planted.py",
        '"""Planted."""\n\nimport optax as optax\n',
        {"third-party dependencies (deptry)"},
    ),
    "type error": (
        "packages/xtrax-jit/src/xtrax/jit/_planted.py",
        '"""Planted."""\n\nCOUNT: int = "three"\n',
        {"types (ty)"},
    ),
    "unused import": (
        "packages/xtrax-jit/src/xtrax/jit/_planted.py",
        '"""Planted."""\n\nimport json\n',
        {"lint (ruff)"},
    ),
    "unformatted code": (
        "packages/xtrax-jit/src/xtrax/jit/_planted.py",
        '"""Planted."""\n\nCOUNT = {"a":1}\n',
        {"format (ruff)"},
    ),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The files of the repository that the gates read."""
    for name in ("packages", "tools", "pyproject.toml"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        _ = (
            shutil.copytree(source, tmp_path / name, ignore=ignore)
            if source.is_dir()
            else shutil.copy(source, tmp_path)
        )
    return tmp_path


def failed_gates(repository: Path) -> set[str]:
    """The gates that `tools/check.py --quick` reports as failed."""
    command = [sys.executable, repository / "tools" / "check.py", "--quick"]
    output = subprocess.run(command, capture_output=True, text=True, cwd=repository).stdout
    assert "gates passed" in output, output
    return {line.removeprefix("FAILED ").strip() for line in output.splitlines() if line.startswith("FAILED ")}


def test_nothing_fails_without_a_fault(copy):
    assert failed_gates(copy) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(copy, fault):
    path, text, expected = FAULTS[fault]
    (copy / path).parent.mkdir(exist_ok=True)
    (copy / path).write_text(text)
    assert failed_gates(copy) == expected
