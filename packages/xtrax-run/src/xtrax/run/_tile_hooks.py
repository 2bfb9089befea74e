"""What a run knows of the taps, sinks and fuses at the edges of its axes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from xtrax.stages import AxisBoundary, HostSink, HostTap
from xtrax.stages._host_record import HostRecord
from xtrax.tiling.plan import AxisDecision


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
