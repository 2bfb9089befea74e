"""Run docs/examples/vowels with the seeds 0 to 4, each in a process of its own, and print accuracy and seconds.

Usage:
    uv run tools/vowels_seeds.py              the `xtrax` beside this Python
    uv run tools/vowels_seeds.py --xtrax PATH    another one, such as .venv-floor/bin/xtrax

Exits with 1 if a run fails, or ends below 95 % test accuracy, after more than 60 seconds (of the whole process), or
with another number of compiles than buckets.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "docs" / "examples" / "vowels" / "train.toml"
LEAST_ACCURACY = 0.95
MOST_SECONDS = 60.0


def cpu_seconds() -> float:
    """What the processes that this one has waited for took of the CPUs: it does not grow on a busy machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_seed(xtrax: Path, seed: int, buckets: int) -> bool:
    """Train with one seed, print a line, and tell whether it did as it should."""
    with tempfile.TemporaryDirectory() as folder:
        began, cpu_before = time.perf_counter(), cpu_seconds()
        command = [xtrax, "run", CONFIG, "--set", f"seed={seed}"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu_before
        if ran.returncode:
            print(f"seed {seed}: exit code {ran.returncode}\n{ran.stderr}", flush=True)
            return False
        (manifest,) = Path(folder).glob(".xtrax/runs/*/manifest.json")
        results = json.loads(manifest.read_text(encoding="utf-8"))
    accuracy, compiles = results["metrics"]["accuracy"], results["compiles"]
    good = accuracy >= LEAST_ACCURACY and seconds <= MOST_SECONDS and compiles == {"train": buckets, "eval": buckets}
    told = f"seed {seed}: accuracy {accuracy:.4f}, {seconds:.1f} s ({cpu:.1f} s of CPU), compiles {compiles}"
    print(told if good else f"{told}    NOT GOOD", flush=True)
    return good


def main() -> int:
    """Run all seeds; 0 if all did as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--xtrax", type=Path, default=Path(sys.executable).with_name("xtrax"))
    xtrax = parser.parse_args().xtrax.resolve()
    if not xtrax.exists():
        parser.error(f"{xtrax} does not exist; name the xtrax command of an environment by --xtrax")
    buckets = len(tomllib.loads(CONFIG.read_text(encoding="utf-8"))["data"]["kwargs"]["boundaries"])
    good = [run_seed(xtrax, seed, buckets) for seed in range(5)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
