"""A plan: what was decided about each axis. What runs plans imports it from here, since budgets run them too."""

import dataclasses
import html
from collections.abc import Sequence

from xtrax.tiling._plan.account import PlanMemory
from xtrax.tiling._plan.as_json import plan_from_json, plan_to_json
from xtrax.tiling._plan.claims import refuse_duplicates
from xtrax.tiling._plan.render import html_table, text_table
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling.carry import CarrySpec
from xtrax.tiling.dedup import DedupSpec
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The decisions for a set of axes, in the order in which the axes were given.

    `print(plan)` shows them as a table; notebooks show an HTML one.

    Args:
        decisions: one `AxisDecision` for each axis; a list is stored as a tuple.
        memory: what the plan takes of its budget; None where it was made without one.

    Raises:
        TypeError: an entry that is no `AxisDecision`, or a `memory` that is no `PlanMemory`.
        ValueError: two decisions for one axis name.
    """

    decisions: tuple[AxisDecision, ...]
    memory: PlanMemory | None = None

    def __post_init__(self) -> None:
        """Store a tuple, and refuse what is no decision."""
        object.__setattr__(self, "decisions", tuple(self.decisions))
        for decision in self.decisions:
            if not isinstance(decision, AxisDecision):
                raise TypeError(f"decisions must hold AxisDecision objects, but one is {decision!r}.")
        refuse_duplicates("decisions", [decision.spec.name for decision in self.decisions])
        if self.memory is not None and not isinstance(self.memory, PlanMemory):
            raise TypeError(f"memory must be a PlanMemory or None, but is {self.memory!r}.")

    def __str__(self) -> str:
        """The plan as a table, and its memory in a line below."""
        table = text_table(_HEADER, self._rows()) if self.decisions else "BatchPlan without axes"
        return table if self.memory is None else f"{table}\nmemory: {self.memory}"

    def _repr_html_(self) -> str:
        table = html_table(_HEADER, self._rows())
        return table if self.memory is None else f"{table}<p>memory: {html.escape(str(self.memory))}</p>"

    def to_json(self) -> str:
        """The plan as JSON, so that a plan that was looked at is the plan that runs.

        Functions, carries and the arrays of `DedupGather` are not in it: `from_json` finds them by the axis's name.

        Raises:
            ValueError: a decision made by hand whose `batch_size` is not what its strategy computes at once.

        >>> from xtrax.tiling import AxisSpec, BatchPlan, BatchPlanner
        >>> plan = BatchPlanner().plan([AxisSpec("batch", cardinality=128, default_batch_size=32)])
        >>> BatchPlan.from_json(plan.to_json()) == plan
        True
        """
        return plan_to_json(self.decisions, self.memory)

    @classmethod
    def from_json(
        cls, text: str, *, carry_specs: Sequence[CarrySpec] = (), dedup_specs: Sequence[DedupSpec] = ()
    ) -> "BatchPlan":
        """The plan that `to_json` wrote.

        Args:
            text: what it wrote.
            carry_specs: for each `Scan` and `WhileCarry` axis that had a transition, the spec that it was planned with.
            dedup_specs: for each `DedupGather` axis, the spec that it was planned with; its indices are held against
                a digest of those that were planned.

        Returns:
            An equal plan.

        Raises:
            TypeError: `text` is no string, or a spec of another type.
            ValueError: a text that is no plan, or of a version that this release does not know; a `batch_size` that is
                not what its strategy computes at once; an axis whose spec is missing, or is not the one that was
                planned; a spec that no axis of the plan needs.
        """
        return cls(*plan_from_json(text, carry_specs, dedup_specs))

    def _rows(self) -> list[list[str]]:
        return [
            [d.spec.name, str(d.spec.cardinality), label(d.strategy), str(d.batch_size), d.reasoning]
            for d in self.decisions
        ]


_HEADER = ("axis", "size", "strategy", "at once", "because")


def label(strategy: AxisStrategy) -> str:
    """The strategy in a few words, without its arrays and functions."""
    if isinstance(strategy, SafeMap):
        return f"SafeMap({strategy.batch_size})"
    if isinstance(strategy, Bucket):
        return f"Bucket({', '.join(map(str, strategy.boundaries))})"
    if isinstance(strategy, DedupGather):
        chunks = f", {strategy.at_once} at once" if strategy.at_once < strategy.k_bucket else ""
        return f"DedupGather({strategy.k} of {strategy.index_map.size}{chunks})"
    return type(strategy).__name__
