"""Arrays that strategies hold, as operands of the program that runs them, so that others need no other program."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from xtrax.tiling.carry import materialize_carry
from xtrax.tiling.strategy import DedupGather, Scan


@dataclasses.dataclass(frozen=True)
class HeldArrays:
    """The arrays of a strategy.

    Attributes:
        arrays: the arrays.
        kind: what a program depends on besides their types.
        strategy_with: makes the strategy with others in their place, which may be traced.
    """

    arrays: list[Any]
    kind: Hashable
    strategy_with: Callable[[Sequence[Any]], Any]


def held_arrays(strategy: Any) -> HeldArrays | None:
    """The arrays of a strategy that may be operands; None if it has none, or its own functions are to see values."""
    if isinstance(strategy, Scan):
        leaves, treedef = jax.tree.flatten(materialize_carry(strategy.init))
        kind = (Scan, strategy.transition, strategy.ordered_sinks, strategy.collect_outputs, treedef)
        return HeldArrays(leaves, kind, lambda arrays: _replaced(strategy, init=treedef.unflatten(arrays)))
    if isinstance(strategy, DedupGather) and strategy.dedup_fn is None and strategy.gather_fn is None:
        return HeldArrays(
            [strategy.unique_indices, strategy.index_map],
            (DedupGather, strategy.k_bucket, strategy.batch_size),
            lambda arrays: _replaced(strategy, unique_indices=arrays[0], index_map=arrays[1]),
        )
    return None


def _replaced(strategy: Any, **fields: Any) -> Any:
    """The strategy with other fields, unchecked: a constructor would ask for the values of traced arrays."""
    copy = object.__new__(type(strategy))
    vars(copy).update({field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)} | fields)
    return copy
