"""What a signature cannot say about an axis, said beside the function."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from xtrax.inference._inputs import innermost
from xtrax.tiling import AxisRole, AxisSpec

_ATTRIBUTE = "__axis_overrides__"
_Fn = TypeVar("_Fn", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class AxisOverride:
    """The name of an axis and how it is to be planned. The fields are those of `xtrax.tiling.AxisSpec`.

    Args:
        name: what the axis is called. Arguments whose axes have one name are mapped together.
        default_batch_size: how many elements are mapped at once where nothing decides otherwise, at least 1.
        cardinality: how many elements the axis has; None takes the size of the abstract inputs.
        tile_granularity: chunks that a budget chooses are a multiple of this, at least 1.
        heterogeneous: whether the elements differ in length.
        dedup_eligible: whether many elements may be copies of one another.
        bucket_boundaries: the lengths that elements are padded to, strictly ascending; a list is stored as a tuple.

    Raises:
        TypeError: a field of the wrong type; bools are not integers.
        ValueError: an empty name, a number below its minimum, or boundaries that are empty or not ascending.
    """

    name: str
    default_batch_size: int
    cardinality: int | None = None
    tile_granularity: int = 1
    heterogeneous: bool = False
    dedup_eligible: bool = False
    bucket_boundaries: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """Check every field as `AxisSpec` does, and store them in its form."""
        spec = self.to_spec(0)
        for field in dataclasses.fields(self):
            if field.name != "cardinality" or self.cardinality is not None:
                object.__setattr__(self, field.name, getattr(spec, field.name))

    def to_spec(self, size: int) -> AxisSpec:
        """The axis of role `KNOWN`, of `size` elements where `cardinality` is None."""
        return AxisSpec(
            self.name,
            size if self.cardinality is None else self.cardinality,
            self.default_batch_size,
            self.tile_granularity,
            self.heterogeneous,
            self.dedup_eligible,
            self.bucket_boundaries,
            AxisRole.KNOWN,
        )


def axis_config(*overrides: AxisOverride) -> Callable[[_Fn], _Fn]:
    """Say what the axes of a function are; `infer_bundle` reads it.

    The first override is for the first input leaf that has a leading axis, the second for the second, and so on; the
    axes of further leaves stay unknown. The elements of an axis that is named here are taken to be independent.

    Args:
        *overrides: one for each axis.

    Returns:
        A decorator that notes the overrides on the function and returns it unchanged. Applied again, the new ones
        replace the old.

    Raises:
        TypeError: something that is no `AxisOverride`; or, when applied, an object that takes no attributes.
        ValueError: no overrides, or two that give one name to different axes.

    >>> @axis_config(AxisOverride("batch", default_batch_size=32))
    ... def double(x):
    ...     return 2 * x
    >>> double(2)
    4
    """
    if not overrides:
        raise ValueError("axis_config needs at least one AxisOverride, such as AxisOverride('batch', 32).")
    by_name: dict[str, AxisOverride] = {}
    for i, override in enumerate(overrides):
        if not isinstance(override, AxisOverride):
            raise TypeError(
                f"axis_config takes AxisOverride objects, but overrides[{i}] is {override!r}; write "
                "@axis_config(AxisOverride('batch', 32)) above the function."
            )
        if by_name.setdefault(override.name, override) != override:
            raise ValueError(
                f"axis_config names axis {override.name!r} twice, as {by_name[override.name]} and as {override}; "
                "arguments that share an axis share all that is said about it."
            )

    def decorate(fn: _Fn) -> _Fn:
        if not callable(fn):
            raise TypeError(f"axis_config decorates a function, but got {fn!r} ({type(fn).__name__}).")
        try:
            setattr(fn, _ATTRIBUTE, overrides)
        except AttributeError as error:
            raise TypeError(
                f"axis_config cannot note anything on {fn!r} ({type(fn).__name__}), which takes no attributes; "
                "decorate its __call__ method, or a function that calls it."
            ) from error
        return fn

    return decorate


def overrides_of(fn: Callable[..., Any]) -> tuple[AxisOverride, ...]:
    """What `axis_config` noted on a function or around it: on a wrapper, a partial's function, a method, `__call__`."""
    return getattr(fn, _ATTRIBUTE, None) or getattr(innermost(fn), _ATTRIBUTE, ())
