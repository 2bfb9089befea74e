"""The example of the page about Dask, run as the script that it is: workers import it, so that it needs its guard."""

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "pages" / "runs" / "dask.md"


def test_the_example_runs_as_a_script(tmp_path):
    (script,) = [block.partition("```")[0] for block in PAGE.read_text().split("```python\n")[1:]]
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "8 tiles done, 0 skipped, of 8" in done.stdout
