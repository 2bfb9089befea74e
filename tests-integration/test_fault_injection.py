"""Tiled runs that are killed at every step of the commit protocol, and runs of awkward sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="minutes of kills, on the ceiling alone")
TOOL = Path(__file__).resolve().parent.parent / "tools" / "fault_injection.py"


def run(*arguments):
    done = subprocess.run([sys.executable, TOOL, *arguments, "--json"], capture_output=True, text=True, timeout=580)
    assert done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kill points find files by /proc")
def test_a_run_killed_anywhere_resumes_to_the_same_bytes_and_loses_nothing_committed():
    outcomes = run("--quick")
    named = [outcome for outcome in outcomes if outcome["point"] != "a random moment"]
    assert len({outcome["point"] for outcome in named}) == 28
    assert [o["point"] for o in named if not o["killed"]] == []  # the kills really fell
    assert sum(o["killed"] for o in outcomes) == len(named) + 5
    assert {o["committed"] for o in named} >= {0, 12}  # and over the whole run
    assert len({o["committed"] for o in named}) >= 4
    assert [o for o in outcomes if not o["same"]] == []
    assert [o for o in outcomes if not o["effects"]] == []
    assert [o for o in outcomes if o["recomputed"]] == []
    assert [o for o in outcomes if o["lost"] > 4] == []  # prefetch + 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux forgets a peak of memory")
def test_memory_is_that_of_the_tiles_in_flight():
    """Of 3,000 tiles of 4 bytes, 8 of 60 MB, and 12 of none."""
    for outcome in run("--scale", "0.3"):
        assert outcome["ok"], outcome
        assert outcome["grown"] <= outcome["allowed"], outcome
