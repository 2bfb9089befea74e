"""What is known about axes by their names."""

from collections.abc import Collection, Sequence
from typing import TypeVar

from xtrax.tiling.carry import CarrySpec
from xtrax.tiling.dedup import DedupSpec

_Claim = TypeVar("_Claim", CarrySpec, DedupSpec)


def by_axis(name: str, specs: Sequence[_Claim] | None, kind: type[_Claim]) -> dict[str, _Claim]:
    """The specs by the axis that they name."""
    if specs is None:
        return {}
    if not isinstance(specs, Collection) or isinstance(specs, str):
        raise TypeError(f"{name} must be a sequence, but is {specs!r}; put a single spec into a list.")
    for spec in specs:
        if not isinstance(spec, kind):
            raise TypeError(f"{name} must hold {kind.__name__} objects, but one is {spec!r}.")
    refuse_duplicates(name, [spec.axis_name for spec in specs])
    return {spec.axis_name: spec for spec in specs}


def refuse_duplicates(source: str, names: Sequence[str]) -> None:
    """Refuse a name that is given twice."""
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"{source} names axis {name!r} twice; each axis is named once.")
