"""What a run knows of the taps, sinks and fuses at the edges of its axes."""

from collections.abc import Mapping
from typing import Any

from xtrax.stages import AxisBoundary, HostSink, HostTap


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
