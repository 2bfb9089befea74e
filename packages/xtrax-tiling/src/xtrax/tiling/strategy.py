"""The ways in which one axis can be mapped: a closed union of frozen dataclasses."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from xtrax.tiling._check import check_bool, check_boundaries, check_callable, check_int
from xtrax.tiling._identity import fields_key


@runtime_checkable
class ScanTransition(Protocol):
    """One step of a scan: `(carry, x) -> (carry, output)`, the carry keeping its structure, shapes and dtypes."""

    def __call__(self, carry: Any, x: Any, /) -> tuple[Any, Any]:
        """Return the next carry and the output of this element."""
        ...


@runtime_checkable
class WhileBodyFn(Protocol):
    """One step of a while loop: `carry -> carry`."""

    def __call__(self, carry: Any, /) -> Any:
        """Return the next carry."""
        ...


@runtime_checkable
class WhileCondFn(Protocol):
    """Whether a while loop goes on: `carry -> bool`, a scalar."""

    def __call__(self, carry: Any, /) -> Any:
        """Return True to take another step."""
        ...


@runtime_checkable
class DedupFn(Protocol):
    """Select the distinct elements: `(xs, unique_indices) -> xs` of `k_bucket` elements."""

    def __call__(self, xs: Any, unique_indices: npt.NDArray[np.integer], /) -> Any:
        """Return the distinct elements."""
        ...


@runtime_checkable
class GatherFn(Protocol):
    """Give every element the result of its representative: `(ys, index_map) -> ys` of `n` elements."""

    def __call__(self, ys: Any, index_map: npt.NDArray[np.integer], /) -> Any:
        """Return the results of all elements."""
        ...


@dataclasses.dataclass(frozen=True)
class Vmap:
    """All elements at once, by `jax.vmap`."""


@dataclasses.dataclass(frozen=True)
class SafeMap:
    """Chunks of at most `batch_size` elements, one after another; any number of elements.

    Args:
        batch_size: elements mapped at once, at least 1.

    Raises:
        TypeError: `batch_size` is not an integer (a bool is none).
        ValueError: `batch_size` is below 1.

    >>> SafeMap(32)
    SafeMap(batch_size=32)
    """

    batch_size: int

    def __post_init__(self) -> None:
        """Check the batch size."""
        object.__setattr__(self, "batch_size", check_int("batch_size", self.batch_size, 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Scan:
    """One element after another, with a carry.

    Args:
        transition: the step, a `ScanTransition`, or None where the caller of the iterator gives it.
        init: the first carry, a pytree; `CarryShape` leaves stand for zeros. None where the caller gives it.
        ordered_sinks: whether outputs leave the device in the order of the elements.
        collect_outputs: whether the outputs are stacked; if not, they are `None`.

    Raises:
        TypeError: `transition` is not callable, or a flag is not a bool.
    """

    transition: ScanTransition | None = None
    init: Any = None
    ordered_sinks: bool = True
    collect_outputs: bool = True

    def __post_init__(self) -> None:
        """Check the callable and the flags."""
        if self.transition is not None:
            check_callable("transition", self.transition, "(carry, x) -> (carry, output)")
        check_bool("ordered_sinks", self.ordered_sinks)
        check_bool("collect_outputs", self.collect_outputs)

    def __eq__(self, other: object) -> bool:
        """Equal if every field is; arrays by their bytes."""
        return isinstance(other, Scan) and fields_key(self) == fields_key(other)

    def __hash__(self) -> int:
        """Consistent with equality; arrays by a digest."""
        return hash(fields_key(self))


@dataclasses.dataclass(frozen=True, eq=False)
class WhileCarry:
    """A carry that is stepped until a condition fails; there are no elements and no outputs.

    Args:
        body: the step, a `WhileBodyFn`, or None where the caller of the iterator gives it.
        cond: the condition to go on, a `WhileCondFn`, or None where the caller gives it.
        init: the first carry, a pytree; `CarryShape` leaves stand for zeros. None where the caller gives it.

    Raises:
        TypeError: `body` or `cond` is not callable.
    """

    body: WhileBodyFn | None = None
    cond: WhileCondFn | None = None
    init: Any = None

    def __post_init__(self) -> None:
        """Check the callables."""
        if self.body is not None:
            check_callable("body", self.body, "carry -> carry")
        if self.cond is not None:
            check_callable("cond", self.cond, "carry -> bool")

    def __eq__(self, other: object) -> bool:
        """Equal if every field is; arrays by their bytes."""
        return isinstance(other, WhileCarry) and fields_key(self) == fields_key(other)

    def __hash__(self) -> int:
        """Consistent with equality; arrays by a digest."""
        return hash(fields_key(self))


@dataclasses.dataclass(frozen=True, eq=False)
class DedupGather:
    """The distinct elements once, and their results handed to all `n`. Made by `DedupSpec.to_dedup_gather`.

    Two of them are equal if their arrays are equal by bytes and the rest is equal; the hash is of a digest.

    Args:
        unique_indices: `(k_bucket,)` int32, positions of the distinct elements, the last one repeated as padding.
        index_map: `(n,)` int32, for each element its representative, a position in `unique_indices`.
        k: how many elements are distinct.
        k_bucket: how many are computed, at least `k`, so that few sizes are compiled.
        dedup_fn: selects the distinct elements; None takes them along the leading axis.
        gather_fn: hands out the results; None takes them along the leading axis.
        batch_size: distinct elements computed at once, at least 1, in chunks as those of `SafeMap`; None for all.

    Raises:
        TypeError: an array that is not integer, a count that is not an integer, a function that is not callable.
        ValueError: sizes that disagree, indices out of range, a representative that `index_map` gives to another, or a
            `batch_size` below 1.
    """

    unique_indices: npt.NDArray[np.integer]
    index_map: npt.NDArray[np.integer]
    k: int
    k_bucket: int
    dedup_fn: DedupFn | None = None
    gather_fn: GatherFn | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Store read-only int32 copies, and check that they fit together."""
        object.__setattr__(self, "k", check_int("k", self.k, 1))
        object.__setattr__(self, "k_bucket", check_int("k_bucket", self.k_bucket, self.k))
        object.__setattr__(self, "unique_indices", index_array("unique_indices", self.unique_indices))
        object.__setattr__(self, "index_map", index_array("index_map", self.index_map))
        if self.unique_indices.size != self.k_bucket:
            raise ValueError(f"unique_indices has {self.unique_indices.size} entries, but k_bucket is {self.k_bucket}.")
        if np.any(self.index_map >= self.k):
            raise ValueError(f"index_map holds {np.max(self.index_map)}, but must lie in [0, k) with k = {self.k}.")
        check_representatives(self.unique_indices, self.index_map, self.k)
        if self.dedup_fn is not None:
            check_callable("dedup_fn", self.dedup_fn, "(xs, unique_indices) -> xs")
        if self.gather_fn is not None:
            check_callable("gather_fn", self.gather_fn, "(ys, index_map) -> ys")
        if self.batch_size is not None:
            object.__setattr__(self, "batch_size", check_int("batch_size", self.batch_size, 1))

    @property
    def at_once(self) -> int:
        """How many distinct elements are computed at once, at most."""
        return self.k_bucket if self.batch_size is None else min(self.batch_size, self.k_bucket)

    def __eq__(self, other: object) -> bool:
        """Equal if every field is; arrays by their bytes."""
        return isinstance(other, DedupGather) and self._key == other._key

    def __hash__(self) -> int:
        """Consistent with equality; arrays by a digest."""
        return hash(self._key)

    @functools.cached_property  # the arrays may be large, and are never written to
    def _key(self) -> tuple[Hashable, ...]:
        return fields_key(self)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Elements of differing length, each padded on the host to the next of a few lengths.

    Args:
        boundaries: the lengths padded to, strictly ascending and positive; stored as a tuple.

    Raises:
        TypeError: an entry that is not an integer.
        ValueError: no entries, or entries that are not positive and strictly ascending.

    >>> Bucket([16, 32])
    Bucket(boundaries=(16, 32))
    """

    boundaries: Sequence[int]

    def __post_init__(self) -> None:
        """Store the boundaries as a checked tuple."""
        object.__setattr__(self, "boundaries", check_boundaries("boundaries", self.boundaries))


AxisStrategy: TypeAlias = Vmap | SafeMap | Scan | WhileCarry | DedupGather | Bucket


def check_representatives(unique_indices: npt.NDArray[Any], index_map: npt.NDArray[Any], k: int) -> None:
    """Refuse positions of elements that do not exist, and representatives that do not stand for themselves."""
    n = index_map.size
    if np.any(unique_indices >= n):
        raise ValueError(
            f"unique_indices holds {np.max(unique_indices)}, but must lie in [0, n) with n = {n}, the length of "
            "index_map: they are positions of elements."
        )
    representatives = unique_indices[:k]  # what follows them is padding
    given = index_map[representatives]
    for i in np.flatnonzero(given != np.arange(k))[:1]:
        element = representatives[i]
        raise ValueError(
            f"unique_indices[{i}] is element {element}, but index_map[{element}] is {given[i]}: a distinct element "
            f"stands for itself, so that it must be {i}; index_map holds positions in unique_indices, in their order."
        )


def index_array(name: str, value: Any) -> npt.NDArray[np.int32]:
    """`value` as a read-only one-dimensional int32 array of non-negative entries."""
    array = np.asarray(value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, but has dtype {array.dtype}.")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, but has shape {array.shape}.")
    if array.size and (array.min() < 0 or array.max() > np.iinfo(np.int32).max):
        raise ValueError(f"{name} must lie in [0, 2**31), but ranges from {array.min()} to {array.max()}.")
    indices = array.astype(np.int32)  # a copy, so that a later write to the caller's array does not reach it
    indices.setflags(write=False)
    return indices
