"""Declare axes, and decide how each is mapped, with a reason."""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from xtrax.tiling._check import check_callable, check_names, plural
from xtrax.tiling._plan.account import PlanMemory, byte_text, check_estimate
from xtrax.tiling._plan.batch_plan import BatchPlan, label
from xtrax.tiling._plan.claims import by_axis, refuse_duplicates
from xtrax.tiling._plan.spec import AxisDecision, AxisSpec
from xtrax.tiling._planner.by_size import by_limit, by_size, distinct_by_size, remainder_text
from xtrax.tiling._planner.dedup_data import search, without
from xtrax.tiling._planner.fit import fit
from xtrax.tiling._planner.memory import MemoryBudget
from xtrax.tiling.carry import CarrySpec
from xtrax.tiling.dedup import DedupSpec
from xtrax.tiling.errors import AmbiguousAxisError, BudgetInfeasibleError, RemainderWarning
from xtrax.tiling.estimators import device_memory_budget
from xtrax.tiling.roles import AxisRole
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry

__all__ = ["AxisDecision", "AxisSpec", "BatchPlan", "BatchPlanner", "MemoryBudget", "PlanMemory"]


class BatchPlanner:
    """Decides how axes are mapped. For each axis the first rule that applies wins:

    1. it is named by a `CarrySpec`: `Scan`, or `WhileCarry` where the spec has a `cond`;
    2. it is named by a `DedupSpec`: `DedupGather` of all distinct elements at once; it has `bucket_boundaries`:
       `Bucket`;
    3. `cardinality <= default_batch_size`: `Vmap`;
    4. otherwise `SafeMap(default_batch_size)`, whatever the cardinality.

    A `memory_estimator` or a `budget` takes the place of the comparison between rules 3 and 4.

    Args:
        memory_estimator: `spec -> bytes`, what all elements of an axis take at once, such as
            `xtrax.tiling.estimators.memory_estimator` makes. An axis is mapped by rule 3 if that is within
            `device_memory_budget()`, else by rule 4; one that is no larger than its default gets the share of its
            elements that fits. If it raises, the planner warns and compares the sizes.
        carry_specs: the axes that are walked in order.
        dedup_specs: the axes whose distinct elements are known.
        heterogeneous_axes: names of axes whose elements differ in length, in addition to those whose spec says so.
        budget: what the whole plan may take. Every axis of rules 3 and 4 begins as `Vmap`, and they become
            `SafeMap(default_batch_size)`, one after another in the order given, until the plan fits. An axis that is
            no larger than its default stays. A `DedupGather` whose duplicates were found in `data`, or that the budget
            solves, is cut into chunks of its distinct elements in the same way. The estimate is called once at first,
            once after each such step, and then for each axis at its other size, for `PlanMemory.slope_by_axis`. Axes
            that the budget solves, as those of `MemoryBudget.for_function`, get the largest chunk that fits: a
            multiple of their `tile_granularity`, found with three estimates where memory is affine in the chunk size.

    Raises:
        TypeError: an argument or an entry of the wrong type.
        ValueError: two carry specs or two dedup specs for one axis, or `budget` together with `memory_estimator`.

    >>> plan = BatchPlanner().plan([AxisSpec("batch", cardinality=128, default_batch_size=32)])
    >>> print(plan)
    axis   size  strategy     at once  because
    -----  ----  -----------  -------  -------
    batch  128   SafeMap(32)  32       cardinality 128 > default_batch_size 32: 4 chunks of 32

    With a budget:

    >>> budget = MemoryBudget(5000, lambda decisions: 100 * decisions[0].batch_size)
    >>> plan = BatchPlanner(budget=budget).plan([AxisSpec("batch", cardinality=128, default_batch_size=32)])
    >>> print(plan.decisions[0].strategy, plan.memory)
    SafeMap(batch_size=32) estimate 3200 bytes of a budget of 5000 bytes
    """

    def __init__(
        self,
        memory_estimator: Callable[[AxisSpec], float] | None = None,
        carry_specs: Sequence[CarrySpec] | None = None,
        dedup_specs: Sequence[DedupSpec] | None = None,
        heterogeneous_axes: Collection[str] | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        """Check and index what the planner knows about axes by name."""
        if memory_estimator is not None:
            check_callable("memory_estimator", memory_estimator, "spec -> bytes")
        if budget is not None and not isinstance(budget, MemoryBudget):
            raise TypeError(f"budget must be a MemoryBudget or None, but is {budget!r} ({type(budget).__name__}).")
        if budget is not None and memory_estimator is not None:
            raise ValueError(
                "budget and memory_estimator are both given, and each decides between Vmap and SafeMap; pass budget "
                "to fit the plan as a whole, or memory_estimator to look at each axis by itself."
            )
        self._memory_estimator = memory_estimator
        self._budget = budget
        self._solved = frozenset() if budget is None or isinstance(budget.solve, bool) else frozenset(budget.solve)
        self._carries = by_axis("carry_specs", carry_specs, CarrySpec)
        self._dedups = by_axis("dedup_specs", dedup_specs, DedupSpec)
        self._heterogeneous = check_names("heterogeneous_axes", heterogeneous_axes)

    def plan(self, specs: Sequence[AxisSpec], *, data: Mapping[str, Any] | None = None) -> BatchPlan:
        """Decide for each axis.

        Args:
            specs: the axes, with names that differ.
            data: for some axes, by name, a pytree of arrays whose leading axis is that one. Where the axis is
                `dedup_eligible` and rules 1 and 2 leave it open, duplicates are looked for as by `find_duplicates`,
                and it becomes `DedupGather` if that pays: four times the `n - k_bucket` elements that are not
                computed must exceed the `n + k_bucket` that are moved to select the distinct ones and to hand out
                their results. (A function dearer than that repays it earlier: pass a `DedupSpec`.) The distinct ones
                are computed at most `default_batch_size` at once, or in the chunks that fit the budget. The reasoning
                has the numbers either way.

        Returns:
            A plan with one decision for each, in the same order.

        Raises:
            TypeError: `specs` is not a sequence of `AxisSpec`, or `data` is no mapping of trees of arrays.
            AmbiguousAxisError: an axis of role `UNKNOWN` that no carry or dedup spec names.
            ValueError: duplicate names; a carry spec, dedup spec or heterogeneous name without an axis; a
                heterogeneous axis that has a carry, or that nothing says how to map; a dedup spec of another size;
                data without an axis, or of another size; an estimate that is negative or not finite.
            BudgetInfeasibleError: nothing is left to demote, and the plan does not fit. Its `.plan` is that plan.

        Warns:
            RemainderWarning: once, naming every axis whose cardinality is no multiple of its batch size.
            RuntimeWarning: once, if the `memory_estimator` raised or the limit of the device is unknown.
        """
        if isinstance(specs, AxisSpec) or not isinstance(specs, Sequence):
            raise TypeError(f"specs must be a sequence of AxisSpec, but is {specs!r}; put a single one into a list.")
        for spec in specs:
            if not isinstance(spec, AxisSpec):
                raise TypeError(f"specs must hold AxisSpec objects, but one is {spec!r} ({type(spec).__name__}).")
        names = [spec.name for spec in specs]
        refuse_duplicates("specs", names)
        for source, claimed in (
            ("carry_specs", self._carries),
            ("dedup_specs", self._dedups),
            ("heterogeneous_axes", self._heterogeneous),
            ("budget.solve", self._solved),
        ):
            for name in sorted(set(claimed) - set(names)):
                raise ValueError(f"{source} names axis {name!r}, which is not planned; the planned axes are {names}.")
        claimed = [self._claimed(spec) for spec in specs]
        searched = search(specs, claimed, data)
        decisions = _open(specs, claimed, searched[0])
        memory = None
        if self._budget is not None:
            decisions, memory = fit(self._budget, decisions, self._movable(decisions))
            if not memory.fits and searched[0]:
                searched = without(searched)
                decisions = _open(specs, claimed, searched[0])
                decisions, memory = fit(self._budget, decisions, self._movable(decisions))
            if not memory.fits:
                raise _infeasible(BatchPlan(decisions, memory), memory, self._budget)
        else:
            by_rule = [d.spec for d in decisions if isinstance(d.strategy, (Vmap, SafeMap))]
            if self._memory_estimator is not None and by_rule:
                moved, failures = _by_estimator(self._memory_estimator, by_rule)
                decisions = tuple(moved.get(decision.spec.name, decision) for decision in decisions)
                if failures:
                    warnings.warn("; ".join(failures), RuntimeWarning, stacklevel=2)
            decisions = tuple(distinct_by_size(d) if i in searched[0] else d for i, d in enumerate(decisions))
        decisions = tuple(
            dataclasses.replace(decision, reasoning=decision.reasoning + searched[1].get(i, ""))
            for i, decision in enumerate(decisions)
        )
        remainders = [d for d in decisions if isinstance(d.strategy, SafeMap) and d.spec.cardinality % d.batch_size]
        if remainders:
            warnings.warn(remainder_text(remainders), RemainderWarning, stacklevel=2)
        return BatchPlan(decisions, memory)

    def _movable(self, decisions: Sequence[AxisDecision]) -> list[int]:
        """The positions of the axes that the budget may cut into chunks."""

        def movable(decision: AxisDecision) -> bool:
            if not isinstance(decision.strategy, DedupGather):
                return isinstance(decision.strategy, (Vmap, SafeMap))
            name = decision.spec.name
            solves = self._budget is not None and self._budget.solve is True
            return solves or name in self._solved or name not in self._dedups

        return [i for i, decision in enumerate(decisions) if movable(decision)]

    def _claimed(self, spec: AxisSpec) -> AxisDecision | None:
        """The decision by rules 1 and 2; None for an axis that its size or memory decides about."""
        heterogeneous = spec.heterogeneous or spec.name in self._heterogeneous
        if carry := self._carries.get(spec.name):
            unused = [
                text
                for text, given in (
                    ("its DedupSpec", spec.name in self._dedups),
                    ("its bucket_boundaries", spec.bucket_boundaries is not None),
                )
                if given
            ]
            return _carried(spec, carry, heterogeneous, unused)
        if dedup := self._dedups.get(spec.name):
            return _deduplicated(spec, dedup)
        if spec.role is AxisRole.UNKNOWN:
            raise AmbiguousAxisError(
                f"axis {spec.name!r} has the role UNKNOWN, and no CarrySpec or DedupSpec names it, so nothing says "
                "that its elements are independent; declare it with @axis_config, or pass role=AxisRole.KNOWN."
            )
        if spec.bucket_boundaries is not None:
            reasoning = f"bucket_boundaries given: elements are padded on the host to one of {spec.bucket_boundaries}"
            return AxisDecision(spec, spec.default_batch_size, reasoning, Bucket(spec.bucket_boundaries))
        if heterogeneous:
            raise ValueError(
                f"axis {spec.name!r} is heterogeneous, and nothing says how its elements are brought to one length; "
                "give it bucket_boundaries, a DedupSpec, or pad the elements and leave out heterogeneous."
            )
        return None


def _open(
    specs: Sequence[AxisSpec], claimed: Sequence[AxisDecision | None], found: Mapping[int, AxisDecision]
) -> tuple[AxisDecision, ...]:
    """The decisions, those that nothing claims by size."""
    decided = [decision or found.get(i) for i, decision in enumerate(claimed)]
    return tuple(decision or by_size(spec) for spec, decision in zip(specs, decided, strict=True))


def _carried(spec: AxisSpec, carry: CarrySpec, heterogeneous: bool, unused: list[str]) -> AxisDecision:
    if heterogeneous:
        raise ValueError(
            f"axis {spec.name!r} is heterogeneous and has a CarrySpec, but every step of a scan has the same shape; "
            "pad the elements to one length and leave out heterogeneous, or give bucket_boundaries and no CarrySpec."
        )
    strategy: AxisStrategy
    if carry.cond is not None:
        strategy = WhileCarry(carry.transition, carry.cond, carry.init)
        reasoning = "named by a CarrySpec with a cond: the carry is stepped until it fails"
    else:
        strategy = Scan(carry.transition, carry.init, carry.ordered_sinks, carry.collect_outputs)
        reasoning = "named by a CarrySpec: one element after another"
        if not carry.collect_outputs:
            reasoning += ", outputs not collected"
    if unused:
        reasoning += f"; {' and '.join(unused)} not used"
    return AxisDecision(spec, 1, reasoning, strategy)


def _deduplicated(spec: AxisSpec, dedup: DedupSpec) -> AxisDecision:
    if dedup.index_map.size != spec.cardinality:
        raise ValueError(
            f"the DedupSpec of axis {spec.name!r} maps {plural(dedup.index_map.size, 'element')}, but the axis has "
            f"cardinality {spec.cardinality}; index_map needs one entry for each element."
        )
    strategy = dedup.to_dedup_gather()
    reasoning = (
        f"named by a DedupSpec: {dedup.k} of {spec.cardinality} elements are distinct, {strategy.k_bucket} are computed"
    )
    if spec.bucket_boundaries is not None:
        reasoning += "; its bucket_boundaries not used"
    return AxisDecision(spec, strategy.k_bucket, reasoning, strategy)


def _by_estimator(
    estimator: Callable[[AxisSpec], float], specs: Sequence[AxisSpec]
) -> tuple[dict[str, AxisDecision], list[str]]:
    """Decisions by the limit of the device, and a sentence for each axis, or all of them, that has none."""
    try:
        limit = device_memory_budget()
    except RuntimeError as error:
        return {}, [f"memory_estimator is not used, and the axes are planned by their sizes: {error}"]
    decisions: dict[str, AxisDecision] = {}
    failures: list[str] = []
    for spec in specs:
        try:
            estimate = estimator(spec)
        except Exception as error:  # noqa: BLE001 - whatever a user's estimator raises, the rules still decide
            failures.append(
                f"memory_estimator raised {type(error).__name__} for axis {spec.name!r}, which is planned by its "
                f"size instead: {error}"
            )
        else:
            checked = check_estimate(f"memory_estimator for axis {spec.name!r}", estimate)
            decisions[spec.name] = by_limit(spec, checked, limit)
    return decisions, failures


def _infeasible(plan: BatchPlan, memory: PlanMemory, budget: MemoryBudget) -> BudgetInfeasibleError:
    states = "; ".join(
        f"{d.spec.name!r}: {label(d.strategy)}, {d.batch_size} of {d.spec.cardinality} at once" for d in plan.decisions
    )
    fixed = f", {byte_text(memory.fixed_bytes)} of it whatever the chunks" if budget.solve else ""
    lower = (
        "Lower a default_batch_size, or raise"
        if any(not budget.solves(d.spec.name) for d in plan.decisions)
        else "Raise"
    )
    return BudgetInfeasibleError(
        f"the plan needs {byte_text(memory.estimate)} where every axis that can be is in chunks{fixed}, and the budget "
        f"is {byte_text(memory.budget)}. The axes are {states or 'none'}. {lower} the budget; the plan is this error's "
        ".plan.",
        plan,
    )
