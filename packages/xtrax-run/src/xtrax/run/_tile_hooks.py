"""The boundaries of a plan's axes as hooks of its executor."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from xtrax.stages import AxisBoundary, HostSink, HostTap
from xtrax.stages._effects import all_on_host, emit_lanes, has_effects, keeps_values
from xtrax.stages._host_call import NO_TOKEN, fire_lanes
from xtrax.stages._host_record import HostRecord
from xtrax.stages._place import Place
from xtrax.tiling._hooks import AxisHook
from xtrax.tiling.plan import AxisDecision


@dataclasses.dataclass(frozen=True)
class EmitRows:
    """The tap and sink of a boundary, for the rows that are computed at once."""

    boundary: AxisBoundary
    axes: tuple[str, ...]

    def __call__(self, values: Any, index: Any, mask: Any) -> tuple[Any, Any]:
        """`(values, token)`, as `xtrax.tiling._hooks` asks."""
        if not all_on_host(self.boundary):
            emitted, token = emit_lanes(self.boundary, values, Place(index, self.axes))
            return (emitted if keeps_values(self.boundary) else values), token
        token = NO_TOKEN
        for effect in (self.boundary.tap, self.boundary.sink):
            if isinstance(effect, HostTap | HostSink):
                token |= fire_lanes(effect, values, index, mask, axes=self.axes)
        return values, token


def axis_hooks(decisions: Sequence[AxisDecision], boundaries: Mapping[str, AxisBoundary | None]) -> dict[str, AxisHook]:
    """The hook of each axis that has something at its edge."""
    names = [decision.spec.name for decision in decisions]
    hooks = {}
    for i, name in enumerate(names):
        boundary = boundaries.get(name)
        if boundary is not None:
            emit = EmitRows(boundary, tuple(names[: i + 1])) if has_effects(boundary) else None
            hooks[name] = AxisHook(emit, boundary.fuse, keeps_values(boundary))
    return hooks


def expected_rows(
    decisions: Sequence[AxisDecision], boundaries: Mapping[str, AxisBoundary | None], rows: int
) -> dict[HostRecord, int]:
    """How many elements each host function takes of a tile of some rows."""
    sizes = [rows, *(decision.spec.cardinality for decision in decisions[1:])]
    expected: dict[HostRecord, int] = {}
    for i, decision in enumerate(decisions):
        boundary = boundaries.get(decision.spec.name)
        for effect in () if boundary is None else (boundary.tap, boundary.sink):
            if isinstance(effect, HostTap | HostSink):
                due = math.prod(sizes[: i + 1])
                expected[effect.record] = expected.get(effect.record, 0) + due
    return expected


def host_names(boundaries: Mapping[str, AxisBoundary | None]) -> list[str]:
    """What a run's host functions are called: a program does not hold their code."""
    found = []
    for axis, boundary in sorted(boundaries.items()):
        for role in ("fuse", "tap", "sink"):
            effect = getattr(boundary, role, None)
            if effect is not None:
                found.append(f"{axis}.{role}: {_name(effect)}")
    return found


def _name(effect: Any) -> str:
    if isinstance(effect, HostTap | HostSink):
        return f"{type(effect).__name__}({_name(effect.fn)}, ordered={effect.ordered}, batched={effect.batched})"
    named = effect if hasattr(effect, "__qualname__") else type(effect)
    return f"{named.__module__}.{named.__qualname__}"
