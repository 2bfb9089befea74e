"""What the rows that write to a disk share: seconds a call, alternating, each into a folder of its own."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.harness import Times

Timed = Callable[[Path], float]
"""Works in an empty folder, and says how many seconds of that count."""


def alternate(work: Timed, peer: Timed, *, repeats: int = 7) -> Times:
    """Medians of both sides, after one call of each; which goes first alternates, as the disk has moods."""
    once(work)
    once(peer)
    measures = []
    for repeat in range(repeats):
        pair = [0.0, 0.0]
        for side in (0, 1) if repeat % 2 else (1, 0):
            pair[side] = once((work, peer)[side])
        measures.append(pair)
    ratios = [mine / other for mine, other in measures]
    return Times(
        work=statistics.median(mine for mine, _ in measures),
        peer=statistics.median(other for _, other in measures),
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
    )


def once(timed: Timed) -> float:
    """Run it in a folder, and remove that."""
    folder = Path(tempfile.mkdtemp())
    try:
        return timed(folder)
    finally:
        shutil.rmtree(folder)


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
