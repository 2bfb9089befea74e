"""The example of a run that is killed twice, run as its docstring says."""

import re
import subprocess
import sys
from pathlib import Path

from xtrax.run import verify_store, zarr_content_digest

SCRIPT = Path(__file__).resolve().parent.parent / "docs" / "examples" / "vowels" / "survive_kills.py"


def test_a_run_that_is_killed_twice_loses_no_committed_tile(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    committed = [int(n) for n in re.findall(r"killed: (\d+) of 50 tiles", done.stdout)]
    assert len(committed) == 2
    assert 15 <= committed[0] < committed[1] < 50
    # What the last process skipped is what the second had committed.
    assert f"{50 - committed[1]} tiles done, {committed[1]} skipped, of 50" in done.stdout
    assert verify_store(tmp_path / "embeddings").ok
    assert zarr_content_digest(tmp_path / "embeddings") == zarr_content_digest(tmp_path / "uninterrupted")
