"""What is known about an axis, and what was decided about it."""

import dataclasses
import warnings
from collections.abc import Sequence

from xtrax.tiling._check import check_bool, check_boundaries, check_int, check_name, plural
from xtrax.tiling.roles import AxisRole
from xtrax.tiling.strategy import AxisStrategy, DedupGather


@dataclasses.dataclass(frozen=True)
class AxisSpec:
    """An axis of a computation: its name, its size, and what is known about its elements.

    Args:
        name: by which plans, carries and dedup specs refer to it.
        cardinality: how many elements it has, at least 0; an empty axis is planned as `Vmap`.
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
        batch_size: how many elements are computed at once, at most: all for `Vmap`, all distinct ones, `k_bucket`,
            or its `batch_size` for `DedupGather`, 1 for `Scan` and `WhileCarry`. At least 1, or 0 of an empty axis.
        reasoning: the rule that decided, with its numbers.
        strategy: what it decided on.

    Raises:
        TypeError: a field of the wrong type; strategies are objects, such as `Vmap()`.
        ValueError: a `batch_size` below 1, or a `DedupGather` for another number of elements than the axis has.
    """

    spec: AxisSpec
    batch_size: int
    reasoning: str
    strategy: AxisStrategy

    def __post_init__(self) -> None:
        """Check every field, and refuse a strategy that was made for another size."""
        if not isinstance(self.spec, AxisSpec):
            raise TypeError(
                f"spec must be an AxisSpec, but is {self.spec!r} ({type(self.spec).__name__}); such as "
                "AxisSpec('batch', cardinality=100, default_batch_size=32)."
            )
        where = f"of axis {self.spec.name!r}"
        batch_size = check_int(f"batch_size {where}", self.batch_size, min(self.spec.cardinality, 1))
        object.__setattr__(self, "batch_size", batch_size)
        if not isinstance(self.reasoning, str):
            raise TypeError(
                f"reasoning {where} must be a string, but is {self.reasoning!r} ({type(self.reasoning).__name__})."
            )
        if not isinstance(self.strategy, AxisStrategy):
            raise TypeError(
                f"strategy {where} must be a Vmap, SafeMap, Scan, WhileCarry, DedupGather or Bucket, but is "
                f"{self.strategy!r} ({type(self.strategy).__name__}); pass an object, such as Vmap() or SafeMap(32)."
            )
        if isinstance(self.strategy, DedupGather) and self.strategy.index_map.size != self.spec.cardinality:
            raise ValueError(
                f"the DedupGather of axis {self.spec.name!r} maps "
                f"{plural(self.strategy.index_map.size, 'element')}, but the axis has cardinality "
                f"{self.spec.cardinality}; index_map needs one entry for each element."
            )
