"""What a plan says about the memory that it takes."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class PlanMemory:
    """What a plan was budgeted, what it is estimated to take, and how that moves with the chunk of each axis.

    Near the plan, the estimate is about `fixed_bytes + sum(slope_by_axis[name] * batch_size)`; at the plan it is
    exactly that. Where axes nest, the slope of one depends on the chunks of the others, and is given at theirs.

    Args:
        budget: bytes that the plan may take.
        fixed_bytes: bytes that no chunk moves. Below zero where the chunks of nested axes multiply.
        slope_by_axis: bytes for each further element at once, for every axis whose chunk can be its default, and, where
            the budget solves for chunks, for those that were cut.
        estimate: bytes that the plan takes.
        compiles: how many programs were compiled to find out; none with an `estimate` that was given.
    """

    budget: int
    fixed_bytes: int
    slope_by_axis: Mapping[str, float] = dataclasses.field(hash=False)
    estimate: int
    compiles: int

    def __post_init__(self) -> None:
        """Keep a copy of the slopes, which nothing else holds."""
        object.__setattr__(self, "slope_by_axis", dict(self.slope_by_axis))

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the budget."""
        return self.estimate <= self.budget

    def __str__(self) -> str:
        """The estimate beside the budget."""
        over = "" if self.fits else f", over by {byte_text(self.estimate - self.budget)}"
        return f"estimate {byte_text(self.estimate)} of a budget of {byte_text(self.budget)}{over}"


def byte_text(count: int) -> str:
    """A number of bytes, in full and, from 10 kB up, rounded to a decimal unit as well."""
    if count < 10_000:
        return f"{count} bytes"
    exponent = min((len(str(count)) - 1) // 3, 5)
    return f"{count} bytes ({count / 1000**exponent:.3g} {'kMGTP'[exponent - 1]}B)"


def check_estimate(source: str, value: Any) -> int:
    """What an estimator returned, as whole bytes, rounded up."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{source} must return a number of bytes, but returned {value!r}.") from None
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{source} must return a number of bytes that is finite and not negative, but it is {value}.")
    return math.ceil(value)
