"""A type checker sees the types behind the lazy names."""

import subprocess
import sys
from pathlib import Path

import pytest

SNIPPET = """\
from typing import reveal_type

import xtrax
from xtrax import BatchPlanner

reveal_type(xtrax.AxisSpec)
reveal_type(xtrax.AxisSpec("batch", 100, 32).cardinality)
reveal_type(BatchPlanner().plan([]).decisions)
reveal_type(xtrax.tiling.select_bucket(3, (4, 8)))
xtrax.AxisSpek
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> str:
    """What ty says of the snippet, in the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("snippet")
    (folder / "snippet.py").write_text(SNIPPET)
    ty = Path(sys.executable).parent / "ty"
    command = [ty, "check", "--python", sys.executable, "--output-format", "concise", "snippet.py"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder).stdout


@pytest.mark.parametrize(
    ("line", "expected"),
    [(6, "<class 'AxisSpec'>"), (7, "int"), (8, "tuple[AxisDecision, ...]"), (9, "int")],
)
def test_revealed_type(report, line, expected):
    found = [text for text in report.splitlines() if text.startswith(f"snippet.py:{line}:")]
    assert len(found) == 1, report
    assert f"`{expected}`" in found[0]


def test_unknown_name_is_an_error(report):
    assert any(text.startswith("snippet.py:10:") and "AxisSpek" in text for text in report.splitlines()), report
