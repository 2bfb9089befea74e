"""Errors and warnings of planning and of mapping."""

from typing import Any


class AmbiguousAxisError(ValueError):
    """An axis whose role is `AxisRole.UNKNOWN` was to be planned, and nothing says how it is mapped."""


class BudgetInfeasibleError(ValueError):
    """No plan fits into the budget, though every axis that can be was demoted to chunks.

    Args:
        message: the budget, the estimate and the state of every axis.
        plan: the `BatchPlan` that was reached, to look at; its `memory` has the numbers.
    """

    def __init__(self, message: str, plan: Any = None) -> None:
        """Keep the plan beside the message."""
        super().__init__(message)
        self.plan = plan


class CarryMismatchError(TypeError):
    """A step of a loop returned a carry of another structure, shape or dtype than it was given."""


class DispatchRejected(ValueError):
    """A strategy that no iterator on the device can run; the message says what runs it instead."""


class RemainderWarning(RuntimeWarning):
    """An axis is no multiple of its batch size, so that its chunks are smaller than that, or overlap; results hold."""
