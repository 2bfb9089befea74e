"""Two plans side by side."""

from collections.abc import Mapping, Sequence

from xtrax.eda._stats import explain_plan
from xtrax.eda._strip import caption
from xtrax.eda._words import printable
from xtrax.eda.types import ComparedRow, PlanComparison, PlanLike, PlanStats


def compare_plans(
    a: PlanLike | PlanStats,
    b: PlanLike | PlanStats,
    *,
    names: Sequence[str] = ("a", "b"),
    lengths: Mapping[str, object] | None = None,
) -> PlanComparison:
    """Hold two plans for the same work against each other: memory, compilations, steps, waste, and each axis.

    Args:
        a: a plan, or what `explain_plan` made of one.
        b: another. An axis that only one of them has is compared with nothing.
        names: what to call the two.
        lengths: as for `explain_plan`, for whichever of the plans has buckets along an axis.

    Returns:
        The rows of the comparison, and the statistics of both plans. `print` it, or show it in a notebook.

    Raises:
        TypeError: no plans, or names that are not two strings.
        ValueError: equal or empty names, statistics together with lengths, or lengths for an axis that has buckets in
            neither plan.

    >>> from xtrax.tiling import AxisSpec, BatchPlanner
    >>> wide, narrow = (BatchPlanner().plan([AxisSpec("batch", 1000, size)]) for size in (500, 125))
    >>> print(compare_plans(wide, narrow, names=("wide", "narrow")))
                         wide             narrow           change
    memory               not known        not known
    programs to compile  1                1                1x
    one after another    2                8                4x
    at once, at most     500              125              0.25x
    elements computed    1,000            1,000            1x
    padding and repeats  0 %              0 %
    batch                2 chunks of 500  8 chunks of 125
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"names must be two strings, one for each plan, but is {names!r}.")
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise ValueError(f"names must be two different strings that are not empty, but is {names!r}.")
    first, second = _read("a", a, lengths), _read("b", b, lengths)
    for name in lengths or ():
        if name not in first.bucket_stats and name not in second.bucket_stats:
            raise ValueError(f"lengths names axis {name!r}, which has buckets in neither plan.")
    both = (first, second)
    rows = [
        ComparedRow("memory", "bytes", *(None if s.memory is None else s.memory.estimate for s in both)),
        ComparedRow("programs to compile", "count", *(s.programs for s in both)),
        ComparedRow("one after another", "count", *(s.sequential_steps for s in both)),
        ComparedRow("at once, at most", "count", *(s.elements_at_once for s in both)),
        ComparedRow("elements computed", "count", *(s.elements_computed for s in both)),
        ComparedRow("padding and repeats", "fraction", *(s.waste for s in both)),
    ]
    axes = [{axis.name: caption(axis, s) for axis in s.axes} for s in both]
    for name in dict.fromkeys([*axes[0], *axes[1]]):
        rows.append(ComparedRow(name, "text", axes[0].get(name), axes[1].get(name)))
    return PlanComparison((printable(names[0]), printable(names[1])), first, second, tuple(rows))


def _read(where: str, plan: PlanLike | PlanStats, lengths: Mapping[str, object] | None) -> PlanStats:
    if isinstance(plan, PlanStats):
        if lengths is not None:
            raise ValueError(f"lengths cannot be added to statistics, which {where} is; give them to explain_plan.")
        return plan
    if not isinstance(lengths, Mapping):
        return explain_plan(plan, lengths=lengths)
    padded = explain_plan(plan).bucket_stats
    return explain_plan(plan, lengths={name: known for name, known in lengths.items() if name in padded})
