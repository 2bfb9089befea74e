"""The example of ragged, repeated recordings under a budget, run as its docstring says."""

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "examples" / "vowels" / "under_a_budget.py"


def test_recordings_are_scored_within_the_budget_in_few_programs(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stderr
    # The script itself holds the planned results against those of the plain loop.
    assert "The planned results are those of the loop" in done.stdout
    rows = re.findall(r"^(one by one|padded to the longest|planned)\D*?(\d+) +([\d.]*) +(\d*)$", done.stdout, re.M)
    naive, at_once, planned = rows
    assert int(planned[1]) == 3 < int(naive[1])
    assert int(planned[3]) <= 64 < int(at_once[3]) / 100
    assert done.stdout.count("DedupGather") == 3
    assert "SafeMap" in done.stdout
    right = float(re.search(r"([\d.]+)% of the recordings", done.stdout)[1])
    assert right >= 95
