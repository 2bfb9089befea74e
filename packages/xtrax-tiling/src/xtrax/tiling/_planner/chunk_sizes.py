"""The largest chunk of an axis whose program fits, by the line that memory follows.

Memory of a compiled loop over chunks is affine in the chunk size from about 16 elements up; below that the compiler may
choose other kernels, so smaller sizes are tried one by one. Chunks are balanced, so what counts is not the limit that
is asked for but the size that it leads to: `ceil(n / ceil(n / limit))`.
"""

import itertools
import math
from collections.abc import Callable

from xtrax.tiling._map.layout import Chunks

_LINEAR_FROM = 16
_SECOND_POINT = 128
_WASTED = 0.05  # of what the chunks may take: if they take that much less than the line says, it is drawn anew, once
_HALVE_AFTER = 4


class ChunkSizes:
    """The sizes that the chunks of an axis can have, and those that were looked at.

    Args:
        total: how many of its elements are computed.
        step: its `tile_granularity`; limits are multiples of it, below `total`.
    """

    def __init__(self, total: int, step: int) -> None:
        """Of this axis."""
        self.total = total
        self.step = step
        self.seen: list[int] = []

    def at_once(self, limit: int | None) -> int:
        """How many elements chunks of at most `limit` hold; None stands for all."""
        return self.total if limit is None else Chunks.balanced(self.total, limit).size

    def limit_of(self, size: int) -> int | None:
        """The limit for the largest chunks of at most `size` elements; None if there is none, or only all at once."""
        size = min(size, self.total - 1)
        if size < 1:
            return None
        count = -(-self.total // size)
        most = min(-(-self.total // (count - 1)) - 1, self.total - 1)  # the largest limit with that many chunks
        limit = most // self.step * self.step
        return self._smallest_like(limit) if limit else None

    def _smallest_like(self, limit: int) -> int:
        """The smallest limit with as many chunks."""
        return -(-self.at_once(limit) // self.step) * self.step

    @property
    def smallest(self) -> int | None:
        """The smallest limit."""
        return self._smallest_like(self.step) if self.step < self.total else None

    def below(self, size: int) -> list[int]:
        """All limits whose chunks are smaller than `size`, from the smallest."""
        limits = [self.limit_of(s) for s in range(1, size)]
        return sorted({limit for limit in limits if limit is not None})

    def probes(self) -> tuple[int, int] | None:
        """Two sizes on the line, or None if the axis is too short for that."""
        most = -(-self.total // (_LINEAR_FROM - 1)) - 1  # chunks, if each has 16 elements or more
        if most < 3:
            return None
        first = -(-self.total // most)
        second = self.at_once(min(_SECOND_POINT, self.total - 1))
        return (first, second) if first < second else None


def largest_fitting(cost: Callable[[int], int], budget: int, sizes: ChunkSizes) -> int | None:
    """The limit for the largest chunks that fit, or for those that take the least if none fits.

    Args:
        cost: bytes for a limit.
        budget: bytes.
        sizes: of the axis; those that were looked at are noted in it.

    Returns:
        The limit, or None if the axis cannot be cut.
    """

    def at(limit: int) -> int:
        sizes.seen.append(sizes.at_once(limit))
        return cost(limit)

    if sizes.smallest is None:
        return None
    probes = sizes.probes()
    if probes is None:
        return _bisect(at, budget, sizes.below(sizes.total))
    first, second = probes
    low = at(first)
    slope = (at(second) - low) / (second - first)
    too_large = sizes.total
    best: int | None = None
    redrawn = False
    for attempt in itertools.count():
        wanted = math.floor(first + (budget - low) / slope) if slope > 0 else too_large
        if attempt >= _HALVE_AFTER:  # no line at all
            wanted = (first + too_large) // 2
        limit = sizes.limit_of(min(wanted, too_large - 1)) if wanted >= first else None
        if limit is None or sizes.at_once(limit) < first or (best is not None and limit <= best):
            break
        here, found = sizes.at_once(limit), at(limit)
        expected = low + slope * (here - first)
        if found > budget:
            too_large = here
        else:
            best = limit
            if redrawn or expected - found < _WASTED * (budget - low):
                break
            redrawn = True
        if here == first or low > budget:
            break
        slope = (found - low) / (here - first)
    if best is not None:
        return best
    return _bisect(at, budget, sizes.below(first + 1) or [sizes.smallest])


def _bisect(at: Callable[[int], int], budget: int, limits: list[int]) -> int | None:
    """The largest of these limits that fits, or the one that takes the least."""
    known: dict[int, int] = {}
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        known[limits[middle]] = at(limits[middle])
        if known[limits[middle]] <= budget:
            low = middle + 1
        else:
            high = middle
    if low:
        return limits[low - 1]
    return min(known, key=lambda limit: known[limit], default=None)
