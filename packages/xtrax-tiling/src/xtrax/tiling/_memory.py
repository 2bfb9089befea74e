"""A budget of memory."""

import dataclasses
from collections.abc import Callable

from xtrax.tiling._check import check_callable, check_int
from xtrax.tiling._spec import AxisDecision


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """How much memory a whole plan may take, and how to tell how much it takes.

    Args:
        bytes: the most that the plan may take, at least 1.
        estimate: `decisions -> bytes`, the memory of a plan with these decisions, a tuple of `AxisDecision` in the
            order of the specs. What it raises reaches the caller of `BatchPlanner.plan`.

    Raises:
        TypeError: `bytes` is not an integer (a bool is none), or `estimate` is not callable.
        ValueError: `bytes` is below 1.

    >>> budget = MemoryBudget(10_000, lambda decisions: 100 * decisions[0].batch_size)
    >>> budget.bytes
    10000
    """

    bytes: int
    estimate: Callable[[tuple[AxisDecision, ...]], float]

    def __post_init__(self) -> None:
        """Check both."""
        object.__setattr__(self, "bytes", check_int("bytes", self.bytes, 1))
        check_callable("estimate", self.estimate, "decisions -> bytes")
