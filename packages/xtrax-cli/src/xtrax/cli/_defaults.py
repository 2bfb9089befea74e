"""Defaults that are needed before anything heavy is imported."""

from pathlib import Path

RUNS_DIR = Path(".xtrax/runs")
