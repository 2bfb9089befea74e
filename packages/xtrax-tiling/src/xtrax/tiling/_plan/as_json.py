"""Plans as JSON: everything but functions, carries and the arrays of `DedupGather`, which are matched by axis name.

The document is `{"format": "xtrax.tiling.BatchPlan", "schema_version": 1, "decisions": [...], "memory": {...} | null}`.
A version that this release does not know is refused, and so is every key that it does not know.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from xtrax.tiling._check import check_bool, check_int, check_name
from xtrax.tiling._plan.account import PlanMemory
from xtrax.tiling._plan.claims import by_axis
from xtrax.tiling._plan.spec import AxisDecision, AxisSpec
from xtrax.tiling.carry import CarrySpec
from xtrax.tiling.dedup import DedupSpec
from xtrax.tiling.roles import AxisRole
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry

FORMAT = "xtrax.tiling.BatchPlan"
SCHEMA_VERSION = 1


def plan_to_json(decisions: Sequence[AxisDecision], memory: PlanMemory | None) -> str:
    """The document as text; see `BatchPlan.to_json`."""
    for decision in decisions:
        _check_at_once(decision)
    document = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "decisions": [_decision_out(decision) for decision in decisions],
        "memory": None if memory is None else dataclasses.asdict(memory),
    }
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def plan_from_json(
    text: str, carry_specs: Sequence[CarrySpec], dedup_specs: Sequence[DedupSpec]
) -> tuple[tuple[AxisDecision, ...], PlanMemory | None]:
    """The decisions and the memory of the document; see `BatchPlan.from_json`."""
    if not isinstance(text, str):
        raise TypeError(f"text must be the string that to_json returned, but is {text!r} ({type(text).__name__}).")
    specs = _Specs(by_axis("carry_specs", carry_specs, CarrySpec), by_axis("dedup_specs", dedup_specs, DedupSpec))
    try:
        document = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise ValueError(f"text is no JSON, so no plan that to_json wrote: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"text is no plan: its format is not {FORMAT!r}; pass what BatchPlan.to_json returned.")
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ValueError(
            f"the plan has schema_version {version!r}, and this release reads {SCHEMA_VERSION}; read it with the "
            "release that wrote it, or plan again."
        )
    _, _, decisions, memory = _fields("the plan", document, ("format", "schema_version", "decisions", "memory"))
    if not isinstance(decisions, list):
        raise ValueError(f"decisions of the plan must be a list, but is {decisions!r}.")
    read = tuple(_decision_in(f"decisions[{i}]", entry, specs) for i, entry in enumerate(decisions))
    specs.refuse_unused()
    return read, None if memory is None else _memory_in(memory)


@dataclasses.dataclass
class _Specs:
    """What the reader knows about axes, and which of it was needed."""

    carries: Mapping[str, CarrySpec]
    dedups: Mapping[str, DedupSpec]
    used: set[str] = dataclasses.field(default_factory=set)

    def carry(self, name: str, kind: str) -> CarrySpec:
        """The carry of an axis."""
        if name not in self.carries:
            raise ValueError(
                f"axis {name!r} is a {kind} with a transition, which a plan's text does not hold; pass its CarrySpec "
                "in carry_specs."
            )
        self.used.add(name)
        return self.carries[name]

    def dedup(self, name: str) -> DedupSpec:
        """The duplicates of an axis."""
        if name not in self.dedups:
            raise ValueError(
                f"axis {name!r} is a DedupGather, whose indices a plan's text does not hold; pass its DedupSpec in "
                "dedup_specs."
            )
        self.used.add(name)
        return self.dedups[name]

    def refuse_unused(self) -> None:
        """Refuse a spec that no axis needed."""
        for source, given in (("carry_specs", self.carries), ("dedup_specs", self.dedups)):
            for name in sorted(set(given) - self.used):
                raise ValueError(f"{source} names axis {name!r}, but the plan has no such axis that needs it.")


def _decision_out(decision: AxisDecision) -> dict[str, Any]:
    spec = {field.name: getattr(decision.spec, field.name) for field in dataclasses.fields(AxisSpec)}
    return {
        "spec": spec | {"role": decision.spec.role.name},
        "batch_size": int(decision.batch_size),
        "reasoning": decision.reasoning,
        "strategy": {"kind": type(decision.strategy).__name__} | _strategy_out(decision.strategy),
    }


def _strategy_out(strategy: AxisStrategy) -> dict[str, Any]:
    match strategy:
        case SafeMap(batch_size):
            return {"batch_size": batch_size}
        case Bucket(boundaries):
            return {"boundaries": list(boundaries)}
        case Scan():
            return {
                "ordered_sinks": strategy.ordered_sinks,
                "collect_outputs": strategy.collect_outputs,
                "has_carry": strategy.transition is not None or strategy.init is not None,
            }
        case WhileCarry():
            return {"has_carry": any(field is not None for field in (strategy.body, strategy.cond, strategy.init))}
        case DedupGather():
            return {
                "k": strategy.k,
                "k_bucket": strategy.k_bucket,
                "n": strategy.index_map.size,
                "sha256": _digest(strategy),
                "has_dedup_fn": strategy.dedup_fn is not None,
                "has_gather_fn": strategy.gather_fn is not None,
                "batch_size": strategy.batch_size,
            }
    return {}


def _decision_in(where: str, entry: Any, specs: _Specs) -> AxisDecision:
    fields = _fields(where, entry, ("spec", "batch_size", "reasoning", "strategy"))
    names = tuple(field.name for field in dataclasses.fields(AxisSpec))
    values: dict[str, Any] = dict(zip(names, _fields(f"{where}.spec", fields[0], names), strict=True))
    role = AxisRole.__members__.get(values["role"]) if isinstance(values["role"], str) else None
    if role is None:
        raise ValueError(f"{where}.spec.role must be one of {[*AxisRole.__members__]}, but is {values['role']!r}.")
    if not isinstance(fields[2], str):
        raise ValueError(f"{where}.reasoning must be a string, but is {fields[2]!r}.")
    # The constructors tell a wrong type from a wrong value; within a text that was edited, all of it is its value.
    try:
        values["role"] = role
        spec = AxisSpec(**values)
        decision = AxisDecision(spec, fields[1], fields[2], _strategy_in(f"{where}.strategy", fields[3], spec, specs))
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error
    _check_at_once(decision)
    return decision


def _check_at_once(decision: AxisDecision) -> None:
    """Refuse a decision that is shown with another number of elements at once than its strategy computes."""
    if not decision.spec.cardinality:
        return
    match decision.strategy:
        case SafeMap(batch_size):
            meant = batch_size
        case DedupGather():
            meant = decision.strategy.at_once
        case Scan() | WhileCarry():
            meant = 1
        case Vmap():
            meant = decision.spec.cardinality
        case Bucket():
            return
    if decision.batch_size != meant:
        raise ValueError(
            f"batch_size of axis {decision.spec.name!r} is {decision.batch_size}, but its "
            f"{type(decision.strategy).__name__} computes {meant} at once; set both to the same number."
        )


def _strategy_in(where: str, entry: Any, spec: AxisSpec, specs: _Specs) -> AxisStrategy:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    rest = {key: value for key, value in entry.items() if key != "kind"} if isinstance(entry, dict) else {}
    match kind:
        case "Vmap":
            _fields(where, rest, ())
            return Vmap()
        case "SafeMap":
            return SafeMap(*_fields(where, rest, ("batch_size",)))
        case "Bucket":
            return Bucket(*_fields(where, rest, ("boundaries",)))
        case "Scan":
            ordered, collect, has_carry = _fields(where, rest, ("ordered_sinks", "collect_outputs", "has_carry"))
            if not check_bool(f"{where}.has_carry", has_carry):
                return Scan(None, None, ordered, collect)
            carry = specs.carry(spec.name, kind)
            given = (carry.ordered_sinks, carry.collect_outputs, carry.cond is not None)
            if given != (ordered, collect, False):
                raise ValueError(
                    f"axis {spec.name!r} was planned with ordered_sinks={ordered}, collect_outputs={collect} and no "
                    f"cond, but its CarrySpec has ordered_sinks={given[0]}, collect_outputs={given[1]} and "
                    f"{'a' if given[2] else 'no'} cond; pass the one that it was planned with."
                )
            return Scan(carry.transition, carry.init, ordered, collect)
        case "WhileCarry":
            (has_carry,) = _fields(where, rest, ("has_carry",))
            if not check_bool(f"{where}.has_carry", has_carry):
                return WhileCarry()
            carry = specs.carry(spec.name, kind)
            if carry.cond is None:
                raise ValueError(f"axis {spec.name!r} was planned with a cond, but its CarrySpec has none.")
            return WhileCarry(carry.transition, carry.cond, carry.init)
        case "DedupGather":
            return _dedup_in(where, rest, spec, specs)
    raise ValueError(f"{where}.kind is {kind!r}, which this release does not know.")


def _dedup_in(where: str, rest: Any, spec: AxisSpec, specs: _Specs) -> DedupGather:
    names = ("k", "k_bucket", "n", "sha256", "has_dedup_fn", "has_gather_fn", "batch_size")
    k, k_bucket, n, digest, has_dedup_fn, has_gather_fn, batch_size = _fields(where, rest, names)
    given = specs.dedup(spec.name)
    found = (given.k, given.index_map.size, given.dedup_fn is not None, given.gather_fn is not None)
    if found != (k, n, has_dedup_fn, has_gather_fn):
        raise ValueError(
            f"axis {spec.name!r} was planned with k={k}, {n} elements, dedup_fn {_given(has_dedup_fn)} and gather_fn "
            f"{_given(has_gather_fn)}, but its DedupSpec has k={found[0]}, {found[1]} elements, dedup_fn "
            f"{_given(found[2])} and gather_fn {_given(found[3])}; pass the one that it was planned with, or plan "
            "again."
        )
    k_bucket = check_int(f"{where}.k_bucket", k_bucket, given.k)
    unique = np.pad(given.unique_indices, (0, k_bucket - given.k), mode="edge")
    strategy = DedupGather(unique, given.index_map, given.k, k_bucket, given.dedup_fn, given.gather_fn, batch_size)
    if _digest(strategy) != digest:
        raise ValueError(
            f"the DedupSpec of axis {spec.name!r} has other indices than the plan was made with (their digests "
            "differ); pass the one that it was planned with, or plan again."
        )
    return strategy


def _memory_in(entry: Any) -> PlanMemory:
    where = "memory of the plan"
    names = tuple(field.name for field in dataclasses.fields(PlanMemory))
    values = dict(zip(names, _fields(where, entry, names), strict=True))
    slopes = values["slope_by_axis"]
    if not isinstance(slopes, dict):
        raise ValueError(f"slope_by_axis in the {where} must map axis names to bytes, but is {slopes!r}.")
    try:
        for name, minimum in (("budget", 1), ("estimate", 0), ("compiles", 0)):
            check_int(f"{name} in the {where}", values[name], minimum)
        if isinstance(values["fixed_bytes"], bool) or not isinstance(values["fixed_bytes"], int):
            raise TypeError(f"fixed_bytes in the {where} must be an integer, but is {values['fixed_bytes']!r}.")
        for name, slope in slopes.items():
            check_name(f"a name in slope_by_axis in the {where}", name)
            if isinstance(slope, bool) or not isinstance(slope, (int, float)) or not math.isfinite(slope):
                raise TypeError(f"slope_by_axis[{name!r}] in the {where} must be a number, but is {slope!r}.")
    except TypeError as error:
        raise ValueError(str(error)) from error
    return PlanMemory(**values)


def _digest(strategy: DedupGather) -> str:
    """Of the indices, as little-endian int32, whatever the machine."""
    digest = hashlib.sha256()
    for array in (strategy.unique_indices, strategy.index_map):
        digest.update(np.asarray(array, "<i4").tobytes())
    return digest.hexdigest()


def _fields(where: str, entry: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The values of exactly these keys."""
    if not isinstance(entry, dict) or set(entry) != set(names):
        found = sorted(entry) if isinstance(entry, dict) else entry
        raise ValueError(f"{where} must have the keys {list(names)}, but has {found!r}.")
    return tuple(entry[name] for name in names)


def _given(there: bool) -> str:
    return "given" if there else "not given"


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number that a plan holds")
