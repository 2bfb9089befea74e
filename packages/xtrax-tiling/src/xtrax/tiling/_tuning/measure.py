"""Which of a few chunk sizes runs fastest: the programs are compiled, held against a budget, and timed in turn.

The whole map is timed and not one chunk, since a chunk alone stays in cache and ranks the sizes wrongly.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._plan.account import byte_text
from xtrax.tiling._programs import Program, compiled_bytes
from xtrax.tiling.errors import BudgetInfeasibleError

_COARSE = (16, 128, 1024, 8192)
_LINEAR_FROM = 16  # from here on memory follows a line
_PHASE_S = 0.4  # of timing, beyond the first calls
_ROUNDS = (5, 12)  # fewest and most
_SLOW_S = 2.0  # a call that takes longer is timed once
_NEAR = 2.0  # sizes within this factor of the best are timed again with those between them
_TIE = 1.02  # of sizes as close as this, the smaller one needs less memory


@dataclasses.dataclass(frozen=True)
class TunedBatchSize:
    """A chunk size that was chosen by measurement.

    Args:
        batch_size: the fastest, for `tiled_vmap(batch_size=...)`, at least 1.
        measurements: from each size that was timed to the seconds of one call, the least of several. Empty where there
            is nothing to choose, for an axis of at most one element.
    """

    batch_size: int
    measurements: Mapping[int, float] = dataclasses.field(hash=False)

    def __post_init__(self) -> None:
        """Keep a copy that nothing else holds."""
        object.__setattr__(self, "measurements", dict(self.measurements))


def search(
    run_at: Callable[[int], Callable[..., Any]],
    args: Sequence[Any],
    total: int,
    budget: int | None = None,
    candidates: Sequence[int] | None = None,
) -> TunedBatchSize:
    """Time a map at a few chunk sizes: at most six, unless the candidates are given.

    Args:
        run_at: from a chunk size to the map, a function of `args`.
        args: concrete arguments, pytrees of arrays.
        total: how many elements are mapped, at least 2.
        budget: bytes that the program may take; None for any.
        candidates: the sizes to time; None for a coarse choice, and then two around the best of it.

    Raises:
        BudgetInfeasibleError: no size that was tried fits the budget.
    """
    bench = _Bench(run_at, args, total, budget)
    for size in candidates or _coarse(total):
        bench.add(size)
    if not candidates and not bench.fitting:
        for size in (4, 1):
            bench.add(size)
    if not bench.fitting:
        assert budget is not None
        tried = ", ".join(f"{size}: {byte_text(count)}" for size, count in bench.bytes.items())
        raise BudgetInfeasibleError(
            f"no chunk size fits the budget of {byte_text(budget)}; the program takes, by its size, {tried}. Arguments "
            "and outputs are part of it, whatever the size; raise the budget."
        )
    bench.time(bench.fitting)
    if not candidates:
        for size in bench.around(bench.best):
            bench.add(size)
        near = _NEAR * bench.seconds[bench.best]
        bench.time([size for size in bench.fitting if bench.seconds.get(size, 0.0) <= near])
    limit = _TIE * bench.seconds[bench.best]
    chosen = min(size for size, seconds in bench.seconds.items() if seconds <= limit)
    return TunedBatchSize(chosen, dict(sorted(bench.seconds.items())))


def _coarse(total: int) -> list[int]:
    """Up to four sizes, far apart, from the smallest."""
    top = min(total, _COARSE[-1])
    sizes = [size for size in _COARSE[:-1] if 2 * size <= top]
    if len(sizes) < 3 and top > 4:
        sizes.insert(0, 2)
    return [*sizes, top]


class _Bench:
    """Compiled programs by the size of their chunks, what they take, and how long."""

    def __init__(
        self, run_at: Callable[[int], Callable[..., Any]], args: Sequence[Any], total: int, budget: int | None
    ) -> None:
        self.run_at = run_at
        self.args = args
        self.leaves = jax.tree.leaves(args)
        self.total = total
        self.budget = budget
        self.bytes: dict[int, int] = {}
        self.programs: dict[int, Callable[[], Any]] = {}
        self.seconds: dict[int, float] = {}

    @property
    def fitting(self) -> list[int]:
        """The sizes whose programs fit, from the smallest."""
        return sorted(self.programs)

    @property
    def best(self) -> int:
        """The fastest size."""
        return min(self.seconds, key=lambda size: self.seconds[size])

    def add(self, size: int) -> None:
        """Compile the program for chunks of at most that size, or of the largest that the budget seems to allow."""
        most = self._most()
        if most is not None and size > most:
            size = most
        size = Chunks.balanced(self.total, max(size, 1)).size
        if size in self.bytes:
            return
        program = Program.of(self.run_at(size), self.args)
        compiled = program.compile()
        self.bytes[size] = compiled_bytes(compiled) if self.budget is not None else 0
        if self.budget is None or self.bytes[size] <= self.budget:
            self.programs[size] = lambda: jax.block_until_ready(compiled(program.consts, self.leaves))

    def _most(self) -> int | None:
        """The largest size within the budget by the line through the two largest that were compiled."""
        if self.budget is None:
            return None
        known = sorted(size for size in self.bytes if _LINEAR_FROM <= size < self.total)
        if len(known) < 2:
            return None
        first, second = known[-2:]
        slope = (self.bytes[second] - self.bytes[first]) / (second - first)
        if slope <= 0:
            return None
        return max(first, math.floor(first + (self.budget - self.bytes[first]) / slope))

    def around(self, best: int) -> list[int]:
        """Two sizes to look at beside the best."""
        known = self.fitting
        at = known.index(best)
        below = known[at - 1] if at else max(best // 8, 1)
        above = known[at + 1] if at + 1 < len(known) else self.total
        between = [round(math.sqrt(below * best)), round(math.sqrt(best * above))]
        if at + 1 == len(known) and best < self.total:
            between[0] = self.total  # larger ones were not tried, and all at once is the last of them
        return [size for size in between if not 0.7 < size / best < 1.4]

    def time(self, sizes: Sequence[int]) -> None:
        """Time these in turn, going up and down, and keep the least of each."""
        first = {size: self._call(size, warm=size not in self.seconds) for size in sizes}
        fewest, most = _ROUNDS
        rounds = min(max(round(_PHASE_S / sum(first.values())), fewest), most)
        for turn in range(rounds):
            for size in sizes if turn % 2 else reversed(sizes):
                if first[size] < _SLOW_S:
                    self._call(size)

    def _call(self, size: int, warm: bool = False) -> float:
        program = self.programs[size]
        if warm:
            program()
        start = time.perf_counter()
        program()
        seconds = time.perf_counter() - start
        self.seconds[size] = min(seconds, self.seconds.get(size, math.inf))
        return seconds
