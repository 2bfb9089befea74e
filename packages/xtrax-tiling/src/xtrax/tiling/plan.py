"""Declare axes, and decide how each is mapped, with a reason."""

import dataclasses
import warnings
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np

from xtrax.tiling._check import check_bool, check_boundaries, check_int, check_name, check_names
from xtrax.tiling._layout import Chunks
from xtrax.tiling._render import html_table, text_table
from xtrax.tiling.carry import CarrySpec
from xtrax.tiling.dedup import DedupSpec
from xtrax.tiling.errors import AmbiguousAxisError, RemainderWarning
from xtrax.tiling.roles import AxisRole
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry

_Claim = TypeVar("_Claim", CarrySpec, DedupSpec)


@dataclasses.dataclass(frozen=True)
class AxisSpec:
    """An axis of a computation: its name, its size, and what is known about its elements.

    Args:
        name: by which plans, carries and dedup specs refer to it.
        cardinality: how many elements it has, at least 0.
        default_batch_size: how many are mapped at once where nothing decides otherwise, at least 1.
        tile_granularity: chunks that a budget chooses are a multiple of this, at least 1.
        heterogeneous: whether the elements differ in length.
        dedup_eligible: whether many elements may be copies of one another.
        bucket_boundaries: the lengths that elements are padded to, strictly ascending; a list is stored as a tuple.
        role: whether the elements are known to be independent.

    Raises:
        TypeError: a field of the wrong type; bools are not integers.
        ValueError: an empty name, a number below its minimum, or boundaries that are empty or not ascending.

    >>> AxisSpec("batch", cardinality=100, default_batch_size=32).cardinality
    100
    """

    name: str
    cardinality: int
    default_batch_size: int
    tile_granularity: int = 1
    heterogeneous: bool = False
    dedup_eligible: bool = False
    bucket_boundaries: Sequence[int] | None = None
    role: AxisRole = AxisRole.KNOWN

    def __post_init__(self) -> None:
        """Check every field, and store integers and boundaries in one form."""
        check_name("name", self.name)
        for field, minimum in (("cardinality", 0), ("default_batch_size", 1), ("tile_granularity", 1)):
            value = check_int(f"{field} of axis {self.name!r}", getattr(self, field), minimum)
            object.__setattr__(self, field, value)
        check_bool(f"heterogeneous of axis {self.name!r}", self.heterogeneous)
        check_bool(f"dedup_eligible of axis {self.name!r}", self.dedup_eligible)
        if self.bucket_boundaries is not None:
            boundaries = check_boundaries(f"bucket_boundaries of axis {self.name!r}", self.bucket_boundaries)
            object.__setattr__(self, "bucket_boundaries", boundaries)
        if not isinstance(self.role, AxisRole):
            raise TypeError(f"role of axis {self.name!r} must be an AxisRole, but is {self.role!r}.")

    @property
    def batch_size(self) -> int:
        """The old name of `default_batch_size`."""
        warnings.warn("AxisSpec.batch_size is now default_batch_size.", DeprecationWarning, stacklevel=2)
        return self.default_batch_size

    @property
    def granularity(self) -> int:
        """The old name of `tile_granularity`."""
        warnings.warn("AxisSpec.granularity is now tile_granularity.", DeprecationWarning, stacklevel=2)
        return self.tile_granularity


@dataclasses.dataclass(frozen=True)
class AxisDecision:
    """How one axis is mapped, and why.

    Args:
        spec: the axis.
        batch_size: how many elements are computed at once, at most: all for `Vmap`, `k_bucket` for `DedupGather`,
            1 for `Scan` and `WhileCarry`.
        reasoning: the rule that decided, with its numbers.
        strategy: what it decided on.
    """

    spec: AxisSpec
    batch_size: int
    reasoning: str
    strategy: AxisStrategy


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """The decisions for a set of axes, in the order in which the axes were given.

    `print(plan)` shows them as a table; notebooks show an HTML one.

    Args:
        decisions: one `AxisDecision` for each axis; a list is stored as a tuple.

    Raises:
        TypeError: an entry that is no `AxisDecision`.
        ValueError: two decisions for one axis name.
    """

    decisions: tuple[AxisDecision, ...]

    def __post_init__(self) -> None:
        """Store a tuple, and refuse what is no decision."""
        object.__setattr__(self, "decisions", tuple(self.decisions))
        for decision in self.decisions:
            if not isinstance(decision, AxisDecision):
                raise TypeError(f"decisions must hold AxisDecision objects, but one is {decision!r}.")
        _refuse_duplicates("decisions", [decision.spec.name for decision in self.decisions])

    def __str__(self) -> str:
        """The plan as a table."""
        return text_table(_HEADER, self._rows()) if self.decisions else "BatchPlan without axes"

    def _repr_html_(self) -> str:
        return html_table(_HEADER, self._rows())

    def _rows(self) -> list[list[str]]:
        return [
            [d.spec.name, str(d.spec.cardinality), _label(d.strategy), str(d.batch_size), d.reasoning]
            for d in self.decisions
        ]


_HEADER = ("axis", "size", "strategy", "at once", "because")


class BatchPlanner:
    """Decides how axes are mapped. For each axis the first rule that applies wins:

    1. it is named by a `CarrySpec`: `Scan`, or `WhileCarry` where the spec has a `cond`;
    2. it is named by a `DedupSpec`: `DedupGather`; it has `bucket_boundaries`: `Bucket`;
    3. `cardinality <= default_batch_size`: `Vmap`;
    4. otherwise `SafeMap(default_batch_size)`, whatever the cardinality.

    Args:
        carry_specs: the axes that are walked in order.
        dedup_specs: the axes whose distinct elements are known.
        heterogeneous_axes: names of axes whose elements differ in length, in addition to those whose spec says so.

    Raises:
        TypeError: an entry of the wrong type.
        ValueError: two carry specs or two dedup specs for one axis.

    >>> plan = BatchPlanner().plan([AxisSpec("batch", cardinality=128, default_batch_size=32)])
    >>> print(plan)
    axis   size  strategy     at once  because
    -----  ----  -----------  -------  -------
    batch  128   SafeMap(32)  32       cardinality 128 > default_batch_size 32: 4 chunks of 32
    """

    def __init__(
        self,
        *,
        carry_specs: Sequence[CarrySpec] | None = None,
        dedup_specs: Sequence[DedupSpec] | None = None,
        heterogeneous_axes: Collection[str] | None = None,
    ) -> None:
        """Check and index what the planner knows about axes by name."""
        self._carries = _by_axis("carry_specs", carry_specs, CarrySpec)
        self._dedups = _by_axis("dedup_specs", dedup_specs, DedupSpec)
        self._heterogeneous = check_names("heterogeneous_axes", heterogeneous_axes)

    def plan(self, specs: Sequence[AxisSpec]) -> BatchPlan:
        """Decide for each axis.

        Args:
            specs: the axes, with names that differ.

        Returns:
            A plan with one decision for each, in the same order.

        Raises:
            TypeError: `specs` is not a sequence of `AxisSpec`.
            AmbiguousAxisError: an axis of role `UNKNOWN` that no carry or dedup spec names.
            ValueError: duplicate names; a carry spec, dedup spec or heterogeneous name without an axis; a
                heterogeneous axis that has a carry, or that nothing says how to map; a dedup spec of another size.

        Warns:
            RemainderWarning: once, naming every axis whose cardinality is no multiple of its batch size.
        """
        if isinstance(specs, AxisSpec) or not isinstance(specs, Sequence):
            raise TypeError(f"specs must be a sequence of AxisSpec, but is {specs!r}; put a single one into a list.")
        for spec in specs:
            if not isinstance(spec, AxisSpec):
                raise TypeError(f"specs must hold AxisSpec objects, but one is {spec!r} ({type(spec).__name__}).")
        names = [spec.name for spec in specs]
        _refuse_duplicates("specs", names)
        for source, claimed in (
            ("carry_specs", self._carries),
            ("dedup_specs", self._dedups),
            ("heterogeneous_axes", self._heterogeneous),
        ):
            for name in sorted(set(claimed) - set(names)):
                raise ValueError(f"{source} names axis {name!r}, which is not planned; the planned axes are {names}.")
        decisions = tuple(self._decide(spec) for spec in specs)
        remainders = [d for d in decisions if isinstance(d.strategy, SafeMap) and d.spec.cardinality % d.batch_size]
        if remainders:
            listed = "; ".join(f"axis {d.spec.name!r}: {d.reasoning}" for d in remainders)
            warnings.warn(f"{listed}. The results are those of jax.vmap.", RemainderWarning, stacklevel=2)
        return BatchPlan(decisions)

    def _decide(self, spec: AxisSpec) -> AxisDecision:
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
        return _by_size(spec)


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
            f"the DedupSpec of axis {spec.name!r} maps {dedup.index_map.size} elements, but the axis has cardinality "
            f"{spec.cardinality}; index_map needs one entry for each element."
        )
    last = int(np.max(dedup.unique_indices))
    if dedup.dedup_fn is None and last >= spec.cardinality:
        raise ValueError(
            f"the DedupSpec of axis {spec.name!r} has the unique index {last}, but the axis has cardinality "
            f"{spec.cardinality}; unique_indices are positions of elements."
        )
    strategy = dedup.to_dedup_gather()
    reasoning = (
        f"named by a DedupSpec: {dedup.k} of {spec.cardinality} elements are distinct, {strategy.k_bucket} are computed"
    )
    if spec.bucket_boundaries is not None:
        reasoning += "; its bucket_boundaries not used"
    return AxisDecision(spec, strategy.k_bucket, reasoning, strategy)


def _by_size(spec: AxisSpec) -> AxisDecision:
    size, limit = spec.cardinality, spec.default_batch_size
    if size <= limit:
        strategy: AxisStrategy = Vmap()
        batch_size = size
        reasoning = f"cardinality {size} <= default_batch_size {limit}: all at once"
    else:
        strategy = SafeMap(limit)
        batch_size = limit
        chunks = Chunks.balanced(size, limit)
        reasoning = f"cardinality {size} > default_batch_size {limit}: {chunks.count} chunks of {chunks.size}"
        if size % limit:
            reasoning += f", balanced because {size} is not a multiple of {limit} (remainder {size % limit})"
        if chunks.overlap:
            reasoning += f", elements computed twice: {chunks.overlap}"
    if spec.dedup_eligible:
        reasoning += "; dedup_eligible, but no DedupSpec names the axis, so it is planned by its size"
    return AxisDecision(spec, batch_size, reasoning, strategy)


def _label(strategy: AxisStrategy) -> str:
    """The strategy in a few words, without its arrays and functions."""
    if isinstance(strategy, SafeMap):
        return f"SafeMap({strategy.batch_size})"
    if isinstance(strategy, Bucket):
        return f"Bucket({', '.join(map(str, strategy.boundaries))})"
    if isinstance(strategy, DedupGather):
        return f"DedupGather({strategy.k} of {strategy.index_map.size})"
    return type(strategy).__name__


def _by_axis(name: str, specs: Sequence[_Claim] | None, kind: type[_Claim]) -> dict[str, _Claim]:
    """The specs by the axis that they name."""
    if specs is None:
        return {}
    if not isinstance(specs, Collection) or isinstance(specs, str):
        raise TypeError(f"{name} must be a sequence, but is {specs!r}; put a single spec into a list.")
    for spec in specs:
        if not isinstance(spec, kind):
            raise TypeError(f"{name} must hold {kind.__name__} objects, but one is {spec!r}.")
    _refuse_duplicates(name, [spec.axis_name for spec in specs])
    return {spec.axis_name: spec for spec in specs}


def _refuse_duplicates(source: str, names: Sequence[str]) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{source} names axis {name!r} twice; each axis is named once.")
