"""The settings of a sparsity policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from xtrax.sparse._checks import as_int

FallbackMode = Literal["dense_mask", "error"]


@dataclass(frozen=True)
class SparseConfig:
    """How many weights a matrix keeps, when its mask is renewed, and what happens where that is impossible.

    Args:
        nse_budget: Number of stored elements ("nse") of each sparse matrix, at least 1.
        update_schedule: When `SparsePolicy.should_update` says yes: an int `n` for every `n` steps, counted from step
            0, or a function `step -> bool`.
        fallback_mode: For weights that do not fit a BCOO matrix of exactly `nse_budget` elements (not 2-D, fewer
            weights than the budget, or a mask with more entries than it): `"dense_mask"` keeps the array dense,
            multiplied by its mask; `"error"` raises `ValueError`.

    Raises:
        TypeError: An argument is of the wrong kind (a bool is not an int).
        ValueError: `nse_budget` or `update_schedule` is below 1, or `fallback_mode` is not one of the two.

    >>> SparseConfig(nse_budget=64, update_schedule=100)
    SparseConfig(nse_budget=64, update_schedule=100, fallback_mode='dense_mask')
    """

    nse_budget: int
    update_schedule: int | Callable[[int], bool] = 1
    fallback_mode: FallbackMode = "dense_mask"

    def __post_init__(self) -> None:
        """Refuse bad settings, and turn integers of other libraries into Python's."""
        object.__setattr__(self, "nse_budget", as_int("nse_budget", self.nse_budget, minimum=1))
        if not callable(self.update_schedule):
            object.__setattr__(self, "update_schedule", as_int("update_schedule", self.update_schedule, minimum=1))
        if self.fallback_mode not in get_args(FallbackMode):
            raise ValueError(f"fallback_mode is {self.fallback_mode!r}; it must be 'dense_mask' or 'error'")
