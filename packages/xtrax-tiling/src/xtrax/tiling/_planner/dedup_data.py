"""Data given to the planner: which axes repeat themselves enough that computing copies once pays."""

from collections.abc import Mapping, Sequence
from typing import Any

from xtrax.tiling._check import plural
from xtrax.tiling._duplicates import group_rows, host_leaves
from xtrax.tiling._plan.spec import AxisDecision, AxisSpec
from xtrax.tiling.dedup import DedupSpec, get_k_bucket

# How many elements can be moved in memory in the time of computing one. The lightest functions worth a plan, such as
# one layer of a network, take longer than this; one that does not should not be deduplicated.
_MOVES = 4

Decisions = tuple[dict[int, AxisDecision], dict[int, str]]


def search(
    specs: Sequence[AxisSpec], claimed: Sequence[AxisDecision | None], data: Mapping[str, Any] | None
) -> Decisions:
    """Look for duplicates in the data of the axes that may have them.

    Args:
        specs: all axes.
        claimed: their decisions by now; None for those that their size or memory decides about.
        data: the data by the name of its axis.

    Returns:
        The decisions for the axes whose duplicates pay, with all distinct elements at once, and what is to be added to
        the reasoning of others, both by position.

    Raises:
        TypeError: `data` is no mapping, or a leaf is no array that can be searched.
        ValueError: data of an axis that is not planned, or of another size than its axis.
    """
    sizes = _check(specs, data)
    found: dict[int, AxisDecision] = {}
    notes: dict[int, str] = {}
    for i, spec in enumerate(specs):
        if claimed[i] is not None or not spec.dedup_eligible:
            if spec.name in sizes:
                because = "" if claimed[i] is not None else ", since the axis is not dedup_eligible"
                notes[i] = f"; its data not searched for duplicates{because}"
        elif spec.name not in sizes:
            notes[i] = "; dedup_eligible, but no DedupSpec and no data were given, so it is planned by its size"
        elif spec.cardinality == 0:
            notes[i] = "; dedup_eligible, but its data is empty"
        else:
            first, groups = group_rows(sizes[spec.name], spec.cardinality)
            why_not = _why_not(spec, first.size)
            if why_not is None:
                found[i] = _decision(DedupSpec(spec.name, first, groups, first.size), spec)
            else:
                notes[i] = f"; dedup_eligible, but {why_not}"
    return found, notes


def without(searched: Decisions) -> Decisions:
    """The same with no axis deduplicated, for a budget that the distinct elements do not fit in any chunks."""
    found, notes = searched
    too_large = {
        i: f"; dedup_eligible, but no chunks of its {decision.batch_size} elements to compute fit the budget, besides "
        "what selecting them and handing out their results takes"
        for i, decision in found.items()
    }
    return {}, notes | too_large


def _check(specs: Sequence[AxisSpec], data: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """The leaves of the data of each axis, its names and sizes checked."""
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise TypeError(
            f"data must be a mapping from the name of an axis to its arrays, but is a {type(data).__name__}; write "
            'data={"batch": xs}.'
        )
    cardinality = {spec.name: spec.cardinality for spec in specs}
    leaves = {}
    for name, xs in data.items():
        if name not in cardinality:
            raise ValueError(f"data names axis {name!r}, which is not planned; the planned axes are {[*cardinality]}.")
        leaves[name], size = host_leaves(f"data[{name!r}]", xs)
        if size != cardinality[name]:
            raise ValueError(
                f"data[{name!r}] has {plural(size, 'element')} along its leading axis, but axis {name!r} has "
                f"cardinality {cardinality[name]}; give the data of the whole axis."
            )
    return leaves


def _why_not(spec: AxisSpec, k: int) -> str | None:
    """Why computing `k` distinct elements and handing out the results does not pay; None where it does."""
    n, computed = spec.cardinality, get_k_bucket(k)
    if _pays(n, computed):
        return None
    return (
        f"{_counts(n, k)}: computing {computed} saves {max(n - computed, 0)}, no more than gathering costs "
        f"({n} + {computed} moves, {_MOVES} to an element)"
    )


def _pays(n: int, computed: int) -> bool:
    """Whether the elements that are not computed cost more than selecting these and handing out the results."""
    return _MOVES * (n - computed) > n + computed


def _decision(dedup: DedupSpec, spec: AxisSpec) -> AxisDecision:
    strategy = dedup.to_dedup_gather()
    n, computed = spec.cardinality, strategy.k_bucket
    reasoning = (
        f"{_counts(n, dedup.k)}: computing {computed} saves {n - computed}, more than gathering costs "
        f"({n} + {computed} moves, {_MOVES} to an element)"
    )
    return AxisDecision(spec, computed, reasoning, strategy)


def _counts(n: int, k: int) -> str:
    return f"{k} of the {n} elements of its data are distinct"
