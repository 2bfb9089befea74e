"""Read a plan by its attributes, and refuse what is none."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from xtrax.eda._words import is_finite_number, printable
from xtrax.eda.types import MemoryStats

STRATEGIES = ("Vmap", "SafeMap", "Scan", "WhileCarry", "DedupGather", "Bucket")


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision whose attributes have been checked."""

    name: str
    cardinality: int
    batch_size: int
    reasoning: str
    strategy: object
    tile_granularity: int
    memory: int | None


def read_plan(plan: object) -> tuple[Decision, ...]:
    """The decisions of anything that looks like a plan."""
    decisions = getattr(plan, "decisions", None)
    if isinstance(plan, type) or decisions is None or isinstance(decisions, str) or not isinstance(decisions, Iterable):
        raise TypeError(
            f"plan must have .decisions, one for each axis, but is {_kind(plan)}; "
            "pass what BatchPlanner.plan returned, or the .plan of a BudgetInfeasibleError."
        )
    read = tuple(_read_decision(f"plan.decisions[{i}]", decision) for i, decision in enumerate(decisions))
    names = [decision.name for decision in read]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"plan.decisions[{i}] is about axis {name!r}, as an earlier one is; each axis has one.")
    return read


def _read_decision(where: str, decision: object) -> Decision:
    spec = require(where, decision, "spec")
    name = require(f"{where}.spec", spec, "name")
    if not isinstance(name, str):
        raise TypeError(f"{where}.spec.name must be a string, but is {name!r}.")
    if not name:
        raise ValueError(f"{where}.spec.name is empty; each axis has a name.")
    name = printable(name)
    reasoning = getattr(decision, "reasoning", None)
    if reasoning is not None and not isinstance(reasoning, str):
        raise TypeError(f"{where}.reasoning of axis {name!r} must be a string, but is {reasoning!r}.")
    strategy = require(where, decision, "strategy")
    if strategy is None:
        raise TypeError(f"{where}.strategy of axis {name!r} is None; it must be one of {', '.join(STRATEGIES)}.")
    memory = getattr(decision, "memory_estimate_bytes", None)
    return Decision(
        name=name,
        cardinality=integer(f"{where}.spec.cardinality of axis {name!r}", require(where, spec, "cardinality"), 0),
        batch_size=integer(f"{where}.batch_size of axis {name!r}", require(where, decision, "batch_size"), 0),
        reasoning=printable(reasoning or "").strip(),
        strategy=strategy,
        tile_granularity=integer(f"{where}.spec.tile_granularity", getattr(spec, "tile_granularity", 1), 1),
        memory=None if memory is None else integer(f"{where}.memory_estimate_bytes of axis {name!r}", memory, 0),
    )


def read_memory(plan: object, names: Iterable[str]) -> MemoryStats | None:
    """The `memory` of a plan, if it has one that is not None."""
    memory = getattr(plan, "memory", None)
    if memory is None:
        return None
    budget = getattr(memory, "budget", None)
    budget = getattr(budget, "bytes", budget)  # a MemoryBudget, or its bytes
    fixed, compiles = getattr(memory, "fixed_bytes", None), getattr(memory, "compiles", None)
    slopes = getattr(memory, "slope_by_axis", None)
    try:
        slopes = {} if slopes is None else dict(slopes)
    except (TypeError, ValueError):
        raise TypeError(f"plan.memory.slope_by_axis must map axis names to bytes, but is {slopes!r}.") from None
    known = list(names)
    for name, slope in slopes.items():
        if name not in known:
            raise ValueError(f"plan.memory.slope_by_axis names axis {name!r}, which is not planned; there are {known}.")
        if not is_finite_number(slope):
            raise TypeError(f"plan.memory.slope_by_axis[{name!r}] must be a number of bytes, but is {slope!r}.")
    return MemoryStats(
        estimate=round(number("plan.memory.estimate", require("plan.memory", memory, "estimate"))),
        budget=None if budget is None else integer("plan.memory.budget", budget, 1),
        fixed_bytes=None if fixed is None else round(number("plan.memory.fixed_bytes", fixed, negative=True)),
        slope_by_axis={name: float(slope) for name, slope in slopes.items()},
        compiles=None if compiles is None else integer("plan.memory.compiles", compiles, 0),
    )


def strategy_name(strategy: object) -> str:
    """The strategy of `xtrax.tiling` that a class is or derives from, by name; else the name of the class itself."""
    names = [cls.__name__ for cls in type(strategy).__mro__]
    return next((name for name in names if name in STRATEGIES), names[0])


def strategy_of(value: object) -> tuple[str | None, object]:
    """The axis name (None if unknown) and strategy of a decision, or of a strategy itself."""
    strategy = getattr(value, "strategy", None)
    if strategy is None:
        return getattr(value, "axis_name", None), value
    return getattr(getattr(value, "spec", None), "name", None), strategy


def require(where: str, value: object, attribute: str) -> Any:
    """An attribute that has to be there."""
    try:
        return getattr(value, attribute)
    except AttributeError:
        raise TypeError(
            f"{where} must have .{attribute}, as the decisions of a BatchPlan do, but is {_kind(value)}."
        ) from None


def integer(where: str, value: object, minimum: int) -> int:
    """`value` as an int of at least `minimum`; bools and floats are none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{where} must be an integer of at least {minimum}, but is {_kind(value)}.")
    if value < minimum:
        raise ValueError(f"{where} must be at least {minimum}, but is {value}.")
    return int(value)


def number(where: str, value: object, *, negative: bool = False) -> float:
    """`value` as a finite number, by default not a negative one; ints stay exact."""
    if not is_finite_number(value):
        raise TypeError(f"{where} must be a finite number of bytes, but is {_kind(value)}.")
    if not negative and value < 0:  # ty: ignore[unsupported-operator]
        raise ValueError(f"{where} must be at least 0 bytes, but is {value}.")
    return value if isinstance(value, int) else float(value)  # ty: ignore[invalid-argument-type]


def integers(where: str, values: object, minimum: int) -> npt.NDArray[np.int64]:
    """`values` as an array of one dimension, each of its entries an integer of at least `minimum`."""
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__"):
        raise TypeError(f"{where} must be a sequence of integers, but is {_kind(values)}.")
    try:
        array = np.asarray(values)
    except ValueError:  # rows of differing length
        raise TypeError(f"{where} must be a flat sequence of integers, but is nested.") from None
    if array.ndim != 1:
        raise ValueError(f"{where} must have one dimension, but has shape {array.shape}.")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or any(isinstance(value, bool) for value in _entries(values)):
        raise TypeError(f"{where} must hold integers, but has dtype {array.dtype} or a bool among them.")
    if array.min() < minimum:
        at = int(np.argmax(array < minimum))
        raise ValueError(f"{where} must be at least {minimum}, but entry {at} is {array[at]}.")
    if array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{where} must be below 2**63, but one is {array.max()}.")
    return array.astype(np.int64)


def _entries(values: Any) -> Iterable[object]:
    """The entries of what numpy would silently turn bools of into integers: a list or tuple."""
    return values if isinstance(values, (list, tuple)) else ()


def _kind(value: object) -> str:
    """A value and its type, in a line."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:79] + '…'} ({type(value).__name__})"
