"""Constants that are needed before anything heavy is imported."""

from pathlib import Path

RUNS_DIR = Path(".xtrax/runs")

# Exit codes, as shells have them for a process that a signal ended.
INTERRUPTED = 128 + 2  # SIGINT
OUTPUT_CLOSED = 128 + 13  # SIGPIPE
