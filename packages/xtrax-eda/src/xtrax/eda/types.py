"""What the analyses return, and what they need of a plan."""

import dataclasses
import html
from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from xtrax.eda._words import byte_text, ceil_div, count_text, percent_text, plural

Kind: TypeAlias = Literal["vectorized", "chunked", "sequential", "deduplicated", "padded", "other"]
"""How the elements of an axis are run."""

Format: TypeAlias = Literal["html", "svg", "png"]
"""What `render` can make."""

Panel: TypeAlias = Literal["nest", "memory", "buckets", "duplicates", "axes"]
"""The parts of a rendered plan."""


class SpecLike(Protocol):
    """What is read of an axis: `xtrax.tiling.AxisSpec` has it."""

    @property
    def name(self) -> str:
        """The axis, by a name that no other axis of the plan has."""
        ...

    @property
    def cardinality(self) -> int:
        """How many elements it has."""
        ...


class DecisionLike(Protocol):
    """What is read of a decision: `xtrax.tiling.AxisDecision` has it."""

    @property
    def spec(self) -> SpecLike:
        """The axis."""
        ...

    @property
    def batch_size(self) -> int:
        """How many elements are computed at once."""
        ...

    @property
    def reasoning(self) -> str:
        """Why."""
        ...

    @property
    def strategy(self) -> object:
        """How: an object whose class, or a base of it, is named as one of the strategies of `xtrax.tiling` is."""
        ...


class PlanLike(Protocol):
    """What is read of a plan: `xtrax.tiling.BatchPlan` has it. A `memory` attribute is read where there is one."""

    @property
    def decisions(self) -> Sequence[DecisionLike]:
        """One for each axis, the outermost first."""
        ...


@dataclasses.dataclass(frozen=True)
class AxisStats:
    """How one axis is run.

    Args:
        name: the axis.
        strategy: the class of its strategy, such as `"SafeMap"`.
        kind: what that comes to.
        cardinality: how many elements it has.
        batch_size: how many are computed at once.
        steps: how many times one after another, within one turn of the axes outside; None where the plan cannot tell.
        computed: how many elements are computed, those that are computed twice or as padding included; None where the
            plan cannot tell.
        reasoning: why, in words.
        memory_estimate_bytes: what the axis adds to the memory of the plan at this batch size; None if unknown.
        tile_granularity: what its batch size should be a multiple of.
    """

    name: str
    strategy: str
    kind: Kind
    cardinality: int
    batch_size: int
    steps: int | None
    computed: int | None
    reasoning: str
    memory_estimate_bytes: int | None = None
    tile_granularity: int = 1

    @property
    def chunk(self) -> int:
        """How many elements a step computes: less than `batch_size` where chunks are balanced."""
        if self.kind == "deduplicated" and self.steps and self.computed:
            return ceil_div(self.computed, self.steps)
        return ceil_div(self.cardinality, self.steps) if self.kind == "chunked" and self.steps else self.batch_size


@dataclasses.dataclass(frozen=True)
class DedupStats:
    """How many elements of an axis are copies of one another.

    Args:
        axis: its name; None where only a strategy was given.
        unique: how many elements are distinct.
        padded: how many are computed; those beyond `unique` are padding, so that few sizes are compiled.
        total: how many elements there are.
        ratio: `unique / total`, 1 where nothing is a copy.
        waste: the fraction of the computed elements that is padding, `(padded - unique) / padded`.
        saved: the fraction of the elements that need not be computed, `1 - padded / total`; negative if the padding
            costs more than the copies save.
        copies: pairs `(m, d)`, ascending: `d` of the distinct elements occur `m` times.
    """

    axis: str | None
    unique: int
    padded: int
    total: int
    ratio: float
    waste: float
    saved: float
    copies: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class BucketUse:
    """One bucket.

    Args:
        boundary: the length that its elements are padded to.
        shortest: the shortest length that falls into it, at least 1.
        worst_waste: the fraction of an element of that length that is padding.
        count: how many elements fall into it; None without lengths, as all below.
        data: the sum of their lengths.
        padded: the sum of their padded lengths, `count * boundary`.
        waste: `(padded - data) / padded`, 0 if the bucket is empty.
    """

    boundary: int
    shortest: int
    worst_waste: float
    count: int | None = None
    data: int | None = None
    padded: int | None = None
    waste: float | None = None


@dataclasses.dataclass(frozen=True)
class BucketStats:
    """How elements of differing length fall into buckets.

    Args:
        axis: its name; None where only a strategy was given.
        boundaries: the lengths that elements are padded to.
        total: how many elements there are; None where only a strategy was given, without lengths.
        buckets: one entry for each boundary.
        worst_waste: the largest fraction of any one element, of length 1 or more, that can be padding.
        occupancy: how many elements fall into each bucket; None without lengths, as all below.
        data: the sum of the lengths.
        padded: the sum of the padded lengths.
        waste: `(padded - data) / padded`, 0 without elements.
        lengths: pairs `(length, count)`, ascending.
    """

    axis: str | None
    boundaries: tuple[int, ...]
    total: int | None
    buckets: tuple[BucketUse, ...]
    worst_waste: float
    occupancy: tuple[int, ...] | None = None
    data: int | None = None
    padded: int | None = None
    waste: float | None = None
    lengths: tuple[tuple[int, int], ...] | None = None


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """The memory of a plan, in bytes.

    Args:
        estimate: what the plan needs, at its batch sizes.
        budget: what it may need; None if there was no limit.
        fixed_bytes: what does not move with any batch size; below zero where the sizes of nested axes multiply, so that
            their shares overlap; None if unknown.
        slope_by_axis: bytes for each element more at once, by axis; empty if unknown.
        compiles: how many programs were compiled to find out; None if unknown.
    """

    estimate: int
    budget: int | None = None
    fixed_bytes: int | None = None
    slope_by_axis: dict[str, float] = dataclasses.field(default_factory=dict)
    compiles: int | None = None

    @property
    def over(self) -> int:
        """By how many bytes the estimate exceeds the budget; 0 if it fits."""
        return 0 if self.budget is None else max(0, self.estimate - self.budget)


@dataclasses.dataclass(frozen=True)
class PlanStats:
    """A plan in numbers and words.

    `print` explains it, and `dataclasses.asdict` makes plain data of it, which `json.dumps` takes.

    Args:
        axes: in the order of the plan, the outermost first.
        strategy_counts: how many axes have each strategy.
        total_axes: how many axes there are.
        memory_warnings: what is wrong or tight about the memory; empty if nothing is.
        dedup_stats: by name, for each deduplicated axis.
        bucket_stats: by name, for each axis with buckets.
        memory: the bytes of the plan; None where it was planned without a budget.
    """

    axes: tuple[AxisStats, ...]
    strategy_counts: dict[str, int]
    total_axes: int
    memory_warnings: tuple[str, ...]
    dedup_stats: dict[str, DedupStats]
    bucket_stats: dict[str, BucketStats]
    memory: MemoryStats | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the estimate is within the budget; None where there is none."""
        return None if self.memory is None or self.memory.budget is None else self.memory.over == 0

    @property
    def sequential_steps(self) -> int | None:
        """How many turns follow one another in the whole nest; None if an axis cannot tell its own."""
        steps = 1
        for axis in self.axes:
            if axis.steps is None:
                return None
            steps *= axis.steps
        return steps

    @property
    def elements_at_once(self) -> int:
        """How many elements of the innermost function are computed at once, at most."""
        product = 1
        for axis in self.axes:
            product *= axis.chunk
        return product

    @property
    def elements_computed(self) -> int | None:
        """How many elements of the innermost function are computed in the whole nest; None if an axis cannot tell."""
        product = 1
        for axis in self.axes:
            if axis.computed is None:
                return None
            product *= axis.computed
        return product

    @property
    def programs(self) -> int:
        """How many programs the plan compiles, at most: one for each combination of buckets that are not empty."""
        product = 1
        for bucket in self.bucket_stats.values():
            used = bucket.boundaries if bucket.occupancy is None else [n for n in bucket.occupancy if n]
            product *= len(used)
        return product

    @property
    def waste(self) -> float | None:
        """The fraction of what is computed that is padding, or computed before; None if an axis cannot tell."""
        useful = 1.0
        for axis in self.axes:
            if axis.computed is None:
                return None
            if axis.computed == 0:
                continue
            if dedup := self.dedup_stats.get(axis.name):
                useful *= dedup.unique / axis.computed
                continue
            useful *= axis.cardinality / axis.computed
            if bucket := self.bucket_stats.get(axis.name):
                useful *= 1 - (bucket.waste or 0.0)
        return 1 - useful

    def __str__(self) -> str:
        """The plan explained, a few lines for each axis."""
        lines = [f"{plural(self.total_axes, 'axis')}, the outermost first"] if self.axes else ["A plan without axes"]
        for axis in self.axes:
            steps = "steps unknown" if axis.steps is None else plural(axis.steps, "step")
            at_once = f"{count_text(axis.batch_size)} at once"
            lines.append(f"{axis.name}: {plural(axis.cardinality, 'element')}, {axis.strategy}, {at_once}, {steps}")
            if axis.reasoning:
                lines.append(f"    {axis.reasoning}")
            if dedup := self.dedup_stats.get(axis.name):
                lines.append(f"    {percent_text(dedup.ratio)} distinct, {percent_text(dedup.waste)} padding")
            if (bucket := self.bucket_stats.get(axis.name)) and bucket.waste is not None:
                lines.append(f"    {percent_text(bucket.waste)} of the padded length is padding")
        if self.memory is not None:
            budget = "" if self.memory.budget is None else f" of {byte_text(self.memory.budget)}"
            lines.append(f"memory: {byte_text(self.memory.estimate)}{budget}")
        lines += [f"warning: {warning}" for warning in self.memory_warnings]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class ComparedRow:
    """One thing about two plans.

    Args:
        label: what it is, or the name of an axis.
        unit: of what `a` and `b` are.
        a: of the first plan; None if it is not known, or if the plan has no such axis.
        b: of the second plan.
    """

    label: str
    unit: Literal["bytes", "count", "fraction", "text"]
    a: int | float | str | None
    b: int | float | str | None

    @property
    def change(self) -> float | None:
        """`b / a` of bytes and counts; None where that says nothing."""
        if self.unit not in ("bytes", "count") or isinstance(self.a, str) or isinstance(self.b, str):
            return None
        return None if not self.a or self.b is None else self.b / self.a

    def cells(self) -> tuple[str, str, str, str]:
        """The row as text: label, both values, change."""
        change = "" if self.change is None else f"{self.change:.3g}x"
        return self.label, self._text(self.a), self._text(self.b), change

    def _text(self, value: int | float | str | None) -> str:
        if value is None:
            return "no such axis" if self.unit == "text" else "not known"
        if isinstance(value, str):
            return value
        if self.unit == "bytes":
            return byte_text(value)
        return percent_text(value) if self.unit == "fraction" else count_text(int(value))


@dataclasses.dataclass(frozen=True)
class PlanComparison:
    """Two plans side by side.

    Args:
        names: what the two are called.
        a: the statistics of the first.
        b: the statistics of the second.
        rows: what is compared, the whole plans first, then each axis.
    """

    names: tuple[str, str]
    a: PlanStats
    b: PlanStats
    rows: tuple[ComparedRow, ...]

    def __str__(self) -> str:
        """The rows as a table."""
        table = [("", *self.names, "change"), *(row.cells() for row in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        )

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in ("", *self.names, "change"))
        body = "".join(
            f'<tr><th scope="row">{html.escape(label)}</th>'
            + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            + "</tr>"
            for label, *cells in (row.cells() for row in self.rows)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
