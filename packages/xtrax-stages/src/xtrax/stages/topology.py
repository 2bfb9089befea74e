"""Whether a plan and its boundaries can run, decided before any trace."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["PlanTopologyError", "axis_boundaries_by_name", "validate_plan_topology"]


class PlanTopologyError(ValueError):
    """A plan's strategies and boundaries cannot run together; the message names the axis and what to change."""


class _Axis(NamedTuple):
    """What the checks read of one decision."""

    name: str
    kind: str
    heterogeneous: bool
    strategy: Any

    @property
    def vectorised(self) -> bool:
        """Whether what is inside this axis is traced under `jax.vmap`."""
        if self.kind == "SafeMap":
            return getattr(self.strategy, "batch_size", None) != 1
        return self.kind in ("Vmap", "DedupGather")


def validate_plan_topology(decisions: Iterable[Any], boundaries_by_name: Mapping[str, Any] | None = None) -> None:
    """Refuse a plan whose strategies and boundaries cannot run together.

    Decisions are read structurally: each has a `spec` with a `name` (and perhaps `heterogeneous`) and a `strategy`, which
    is known by the name of its class (`Vmap`, `SafeMap`, `Scan`, `WhileCarry`, `DedupGather`, `Bucket`; any other kind is
    not judged). So another library's plans can be checked too.

    What passes is meant for `execute_plan`, `execute_map_axis` and `execute_scan_axis`. The iterators of `xtrax.tiling`
    use `jax.vmap` for every chunk of a `SafeMap`, even one of a single element, and JAX refuses ordered effects under
    it.

    Args:
        decisions: The plan's decisions, in the order in which the axes nest: the first is the outermost.
        boundaries_by_name: From an axis's name to its `AxisBoundary` (or anything with `fuse`, `tap` and `sink`), or to
            None. See `axis_boundaries_by_name`.

    Raises:
        PlanTopologyError: For
            - a `Scan` or `WhileCarry` on a heterogeneous axis;
            - an ordered tap or sink that is not `batchable` on a `Vmap` axis, or on any axis inside one that is
              vectorised (`Vmap`, a `SafeMap` whose chunks hold more than one element, `DedupGather`). A `HostTap` or
              `HostSink` is batchable;
            - a boundary of a `WhileCarry` inside a vectorised axis, since JAX refuses callbacks in loops whose length
              differs from lane to lane;
            - a boundary for an axis that the plan does not have;
            - a fuse on a `Bucket` axis with several boundaries, since its elements differ in length;
            - two decisions of the same name.
        TypeError: If an argument, a decision or a boundary is of the wrong kind.

    Example:
        >>> from xtrax.stages import AxisBoundary, validate_plan_topology
        >>> from xtrax.tiling.plan import AxisSpec, BatchPlanner
        >>> plan = BatchPlanner().plan([AxisSpec("batch", cardinality=8, default_batch_size=8)])
        >>> validate_plan_topology(plan.decisions, {"batch": AxisBoundary(tap=lambda x: x)})
        >>> validate_plan_topology(plan.decisions, {"bach": AxisBoundary(tap=lambda x: x)})
        Traceback (most recent call last):
            ...
        xtrax.stages.topology.PlanTopologyError: axis 'bach' has a boundary, but the plan has no such axis; it has 'batch'. Did you mean 'batch'?
    """  # noqa: E501 - a message is shown on one line
    axes = _read(decisions)
    boundaries = _read_boundaries(boundaries_by_name)
    names = [axis.name for axis in axes]
    for name in boundaries:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            raise PlanTopologyError(
                f"axis {name!r} has a boundary, but the plan has no such axis; it has "
                + (", ".join(map(repr, names)) or "none")
                + (f". Did you mean {near[0]!r}?" if near else ". Remove the boundary, or plan the axis.")
            )

    around: _Axis | None = None  # The outermost axis under which what follows is vectorised.
    for axis in axes:
        if axis.heterogeneous and axis.kind in ("Scan", "WhileCarry"):
            raise PlanTopologyError(
                f"axis {axis.name!r}: {axis.kind} needs elements of one shape, and the axis is heterogeneous. Give it "
                "bucket_boundaries and no CarrySpec, or pad its elements and declare it homogeneous."
            )
        boundary = boundaries.get(axis.name)
        if boundary is not None:
            _check_boundary(axis, boundary, around)
        if around is None and axis.vectorised:
            around = axis


def _check_boundary(axis: _Axis, boundary: Any, around: _Axis | None) -> None:
    if axis.kind == "WhileCarry" and around is not None:
        raise PlanTopologyError(
            f"axis {axis.name!r}: it is a WhileCarry inside {around.name!r}, whose elements {around.kind} runs several "
            "at once, each for as many steps as it needs, so nothing can happen at its edge. Remove its boundary and "
            f"call a HostTap with where= in a loop of fixed length, or plan {around.name!r} as SafeMap(1)."
        )
    for role in ("tap", "sink"):
        effect = getattr(boundary, role, None)
        if effect is None or not getattr(effect, "ordered", False) or getattr(effect, "batchable", False):
            continue
        if axis.kind == "Vmap":
            raise PlanTopologyError(
                f"axis {axis.name!r}: its {role} is ordered, and Vmap runs all elements at once. Plan the axis as "
                f"SafeMap (a default_batch_size below its cardinality; its chunks keep their size) or as Scan, or make "
                f"the {role} a Host{role.capitalize()}, which has a batching rule, or unordered."
            )
        if around is not None:
            raise PlanTopologyError(
                f"axis {axis.name!r}: its {role} is ordered, and the axis lies inside {around.name!r}, whose elements "
                f"{around.kind} runs several at once. Move {axis.name!r} outside {around.name!r}, plan {around.name!r} "
                f"as Scan or as SafeMap(1), or make the {role} a Host{role.capitalize()}, which has a batching rule, "
                "or unordered."
            )
    lengths = getattr(axis.strategy, "boundaries", ())
    if axis.kind == "Bucket" and getattr(boundary, "fuse", None) is not None and len(lengths) > 1:
        raise PlanTopologyError(
            f"axis {axis.name!r}: a fuse needs the stack of all outputs, and elements padded to different lengths "
            f"{tuple(lengths)} have none. Use one bucket boundary, or reduce the results of each bucket yourself."
        )


def _read(decisions: Iterable[Any]) -> list[_Axis]:
    if isinstance(decisions, (str, bytes, Mapping)) or not isinstance(decisions, Iterable):
        hint = " Pass plan.decisions." if hasattr(decisions, "decisions") else ""
        raise TypeError(f"decisions must be a sequence of axis decisions; found {type(decisions).__name__}.{hint}")
    axes: list[_Axis] = []
    for i, decision in enumerate(decisions):
        spec, strategy = getattr(decision, "spec", None), getattr(decision, "strategy", None)
        name = getattr(spec, "name", None)
        if not isinstance(name, str) or strategy is None:
            raise TypeError(
                f"decisions[{i}] must have a `spec` with a `name` and a `strategy`; found {type(decision).__name__} "
                f"with spec {spec!r} and strategy {strategy!r}"
            )
        if isinstance(strategy, type):
            raise TypeError(f"axis {name!r}: its strategy is the class {strategy.__name__}; pass an instance")
        if any(axis.name == name for axis in axes):
            raise PlanTopologyError(f"axis {name!r} is planned twice; give each axis its own name")
        axes.append(_Axis(name, type(strategy).__name__, bool(getattr(spec, "heterogeneous", False)), strategy))
    return axes


def _read_boundaries(boundaries_by_name: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if boundaries_by_name is None:
        return {}
    if not isinstance(boundaries_by_name, Mapping):
        raise TypeError(
            "boundaries_by_name must be a mapping from axis name to boundary; found "
            f"{type(boundaries_by_name).__name__}. axis_boundaries_by_name(axes, boundaries) makes one."
        )
    for name, boundary in boundaries_by_name.items():
        _require_boundary(f"boundaries_by_name[{name!r}]", boundary)
    return {name: boundary for name, boundary in boundaries_by_name.items() if boundary is not None}


def _require_boundary(where: str, boundary: Any) -> None:
    if boundary is not None and not any(hasattr(boundary, role) for role in ("fuse", "tap", "sink")):
        raise TypeError(f"{where} must be an AxisBoundary or None; found {type(boundary).__name__}")


def axis_boundaries_by_name(axes: Sequence[Any], boundaries: Sequence[Any] | None) -> dict[str, Any]:
    """Pair boundaries, given one for each axis in order, with the names of the axes.

    Args:
        axes: The axes: `AxisSpec`s (anything with a `name`) or names.
        boundaries: One `AxisBoundary` or None for each axis, in the same order; or None for no boundaries at all.

    Returns:
        From an axis's name to its boundary, for the axes that have one, in their order.

    Raises:
        PlanTopologyError: If there are not as many boundaries as axes, or two axes have the same name.
        TypeError: If an axis has no name or a boundary is of the wrong kind.

    Example:
        >>> from xtrax.stages import AxisBoundary, axis_boundaries_by_name
        >>> boundary = AxisBoundary(tap=lambda x: x)
        >>> list(axis_boundaries_by_name(["batch", "time"], [None, boundary]))
        ['time']
    """
    for argument, value in (("axes", axes), ("boundaries", boundaries)):
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            if argument == "boundaries" and value is None:
                continue
            raise TypeError(f"{argument} must be a sequence, in order; found {type(value).__name__}")
    names: list[str] = []
    for i, axis in enumerate(axes):
        name = axis if isinstance(axis, str) else getattr(axis, "name", None)
        if not isinstance(name, str) or not name:
            raise TypeError(f"axes[{i}] must have a name, or be one; found {axis!r}")
        if name in names:
            raise PlanTopologyError(f"axis {name!r} is given twice; give each axis its own name")
        names.append(name)
    if boundaries is None:
        return {}
    if len(boundaries) != len(names):
        raise PlanTopologyError(
            f"there are {len(names)} axes ({', '.join(map(repr, names)) or 'none'}) and {len(boundaries)} boundaries; "
            "give one for each axis, in order, and None for an axis without"
        )
    for name, boundary in zip(names, boundaries, strict=True):
        _require_boundary(f"the boundary of axis {name!r}", boundary)
    return {name: boundary for name, boundary in zip(names, boundaries, strict=True) if boundary is not None}
