"""Checks of arguments, with messages that name the argument, what was found and what is allowed."""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 element`, `3 elements`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_int(name: str, value: Any, minimum: int) -> int:
    """`value` as a plain int of at least `minimum`; bools and floats are no ints."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer of at least {minimum}, but is {value!r} ({_kind(value)}).")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, but is {value}.")
    return int(value)


def check_bool(name: str, value: Any) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, but is {value!r} ({_kind(value)}).")
    return value


def check_name(name: str, value: Any) -> str:
    """`value` if it is a string that is not empty."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, but is {value!r} ({_kind(value)}).")
    if not value:
        raise ValueError(f"{name} is empty; give the axis a name, such as 'batch'.")
    return value


def check_names(name: str, value: Any) -> frozenset[str]:
    """`value` as a set of names; None is the empty set, and a single string is refused."""
    if value is None:
        return frozenset()
    if isinstance(value, str) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a set of axis names or None, but is {value!r} ({_kind(value)}).")
    return frozenset(check_name(f"an entry of {name}", entry) for entry in value)


def check_callable(name: str, value: Any, signature: str) -> Callable[..., Any]:
    """`value` if it can be called; `signature` tells the reader how it would be."""
    if not callable(value):
        raise TypeError(f"{name} must be callable as {signature}, but is {value!r} ({_kind(value)}).")
    return value


def check_boundaries(name: str, value: Any) -> tuple[int, ...]:
    """`value` as a tuple of strictly ascending positive ints."""
    if isinstance(value, str) or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be a sequence of integers, such as (16, 32, 64), but is {value!r}.")
    if len(value) == 0:
        raise ValueError(f"{name} is empty; give at least one bucket size, the largest no shorter than the data.")
    boundaries = tuple(check_int(f"{name}[{i}]", entry, 1) for i, entry in enumerate(value))
    for before, after in itertools.pairwise(boundaries):
        if after <= before:
            raise ValueError(f"{name} must be strictly ascending, but {after} follows {before} in {boundaries}.")
    return boundaries


def check_batch_size(value: Any, budget: Any) -> int | str | None:
    """`value` as an int of at least 1, None or "auto"; only "auto" has a `budget`, bytes or a `MemoryBudget`."""
    if isinstance(value, str):
        if value != "auto":
            raise ValueError(f'batch_size must be an integer of at least 1, None or "auto", but is {value!r}.')
        check_budget(budget)
        return value
    if budget is not None:
        raise ValueError(
            f'budget limits the sizes that batch_size="auto" tries, but batch_size is {value!r}; leave out one.'
        )
    return None if value is None else check_int("batch_size", value, 1)


def check_budget(value: Any) -> int | None:
    """The bytes of a budget, a number or a `MemoryBudget`; None for none."""
    # The module of MemoryBudget uses this one, so it is told by what it holds.
    return None if value is None else check_int("budget", getattr(value, "bytes", value), 1)


def _kind(value: Any) -> str:
    return type(value).__name__
