"""How a row is measured: both sides in one process, alternating, on the same inputs, and checked to agree.

To add a row, add a module to `tools/bench/rows` that has a `ROW`.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

_BATCH_S = 0.002  # what is timed at once: far above the clock's resolution, far below the machine's drift
_REPEAT_S = 0.2  # of each side, in alternating batches


@dataclasses.dataclass(frozen=True)
class Line:
    """One measured ratio.

    Attributes:
        name: The row's name, with what is measured after a slash where a row has several lines.
        ratio: The work's measure over the peer's.
        goal: The bound for it.
        at_least: Whether the ratio must reach the goal, rather than stay within it.
        detail: The measures themselves, for `--verbose`.
    """

    name: str
    ratio: float
    goal: float
    at_least: bool = False
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the goal is met; a ratio that is not a number never meets it."""
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    def __str__(self) -> str:
        """The line that is printed: `name  ratio  goal  ok|short`."""
        sign = ">=" if self.at_least else "<="
        return f"{self.name}  {self.ratio:.3f}  {sign}{self.goal:g}  {'ok' if self.ok else 'short'}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A benchmark.

    Attributes:
        name: What it is called on the command line.
        work: What is measured, in words.
        peer: What it is measured against, in words.
        measure: Measures it, yielding a `Line` for each goal.
    """

    name: str
    work: str
    peer: str
    measure: Callable[[], Iterable[Line]]


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds a call takes on each side, and their ratio: medians over the repeats."""

    work: float
    peer: float
    ratio: float
    spread: tuple[float, float]

    def __str__(self) -> str:
        """The times of both sides, and how far the repeats' ratios spread."""
        low, high = self.spread
        return f"{_seconds(self.work)} against {_seconds(self.peer)}; repeats {low:.3f} to {high:.3f}"


def compare_times(
    work: Callable[[], Any],
    peer: Callable[[], Any],
    *,
    repeats: int = 9,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Times:
    """Time two functions of no arguments that compute the same.

    After a warm-up, which compiles, each repeat alternates batches of calls, and which side goes first alternates
    too, so that a drift of the machine meets both alike. A batch is as many calls as take about 2 ms (one, for longer
    work) and ends when their results are ready. A repeat's measure is the median of its batches.

    Args:
        work: What is measured.
        peer: What it is measured against.
        repeats: How many repeats, at least 7.
        rtol: Relative tolerance of the results' agreement; 0 asks for equality.
        atol: Absolute tolerance of it.

    Raises:
        AssertionError: If the two results do not agree.
        ValueError: If there are fewer than 7 repeats.
    """
    if repeats < 7:
        raise ValueError(f"repeats must be at least 7, got {repeats}.")
    check_equal(work(), peer(), rtol=rtol, atol=atol)
    calls = _calls_per_batch(work, peer)
    pairs = max(1, round(_REPEAT_S / max(_batch(work, calls), _batch(peer, calls), _BATCH_S)))
    measures = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            batches: tuple[list[float], list[float]] = ([], [])
            for pair in range(2 * pairs):
                for side in (0, 1) if pair % 2 else (1, 0):
                    batches[side].append(_batch((work, peer)[side], calls) / calls)
            measures.append((statistics.median(batches[0]), statistics.median(batches[1])))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    ratios = [mine / other for mine, other in measures]
    return Times(
        work=statistics.median(mine for mine, _ in measures),
        peer=statistics.median(other for _, other in measures),
        ratio=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
    )


def check_equal(work: Any, peer: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Hold two results, trees of arrays, against one another.

    Raises:
        AssertionError: If they do not agree.
    """
    mine, other = jax.tree.structure(work), jax.tree.structure(peer)
    if mine != other:
        raise AssertionError(f"the two sides return different trees: {mine} and {other}")
    for a, b in zip(jax.tree.leaves(work), jax.tree.leaves(peer), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


def temp_bytes(jitted: Any, *args: Any) -> int:
    """Temporary memory of a compiled function for these arguments, in bytes, by XLA's account."""
    return jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes


def _calls_per_batch(*functions: Callable[[], Any]) -> int:
    """How many calls of the slower function take about a batch's time."""
    calls = 1
    while max(_batch(function, calls) for function in functions) < _BATCH_S / 2:
        calls *= 2
    return calls


def _batch(function: Callable[[], Any], calls: int) -> float:
    """Seconds that a number of calls take, until their results are ready."""
    result = None
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
