"""A budget of memory."""

import dataclasses
from collections.abc import Callable, Collection

from xtrax.tiling._check import check_callable, check_int, check_names
from xtrax.tiling._spec import AxisDecision


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """How much memory a whole plan may take, and how to tell how much it takes.

    Args:
        bytes: the most that the plan may take, at least 1.
        estimate: `decisions -> bytes`, the memory of a plan with these decisions, a tuple of `AxisDecision` in the
            order of the specs. What it raises reaches the caller of `BatchPlanner.plan`. If it has an attribute
            `compiles`, the number of programs that it compiled so far, the plan tells how many there were.
        solve: whether a demoted axis gets the largest chunk for which the plan fits, which takes a few estimates, and
            not its `default_batch_size`: for all axes, for none, or for those whose names are given.

    Raises:
        TypeError: `bytes` is not an integer (a bool is none), `estimate` is not callable, or `solve` is neither a bool
            nor a collection of names.
        ValueError: `bytes` is below 1.

    >>> budget = MemoryBudget(10_000, lambda decisions: 100 * decisions[0].batch_size)
    >>> budget.bytes
    10000
    """

    bytes: int
    estimate: Callable[[tuple[AxisDecision, ...]], float]
    solve: bool | Collection[str] = False

    def __post_init__(self) -> None:
        """Check all, and store names as a frozen set."""
        object.__setattr__(self, "bytes", check_int("bytes", self.bytes, 1))
        check_callable("estimate", self.estimate, "decisions -> bytes")
        if not isinstance(self.solve, bool):
            if self.solve is None:
                raise TypeError("solve must be True, False or a set of axis names, but is None.")
            object.__setattr__(self, "solve", check_names("solve", self.solve))

    def solves(self, name: str) -> bool:
        """Whether the chunk of this axis is chosen by the estimate, once it is demoted."""
        return self.solve if isinstance(self.solve, bool) else name in self.solve
