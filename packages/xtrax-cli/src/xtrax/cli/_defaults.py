"""Constants that are needed before anything heavy is imported."""

from pathlib import Path

RUNS_DIR = Path(".xtrax/runs")

# Exit codes, as shells have them for a process that a signal ended.
INTERRUPTED = 128 + 2  # SIGINT
TERMINATED = 128 + 15  # SIGTERM, before there was anything to save
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: a signal of a scheduler came, and the run is saved
OUTPUT_CLOSED = 128 + 13  # SIGPIPE
