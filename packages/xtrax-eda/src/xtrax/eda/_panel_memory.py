"""The panel about memory: the plan against its budget, and sliders for other batch sizes."""

from xtrax.eda._markup import part, section, text
from xtrax.eda._summary import verdict_of
from xtrax.eda._words import byte_text, count_text, plural
from xtrax.eda.types import AxisStats, MemoryStats, PlanStats

_FIXED = "not moved by any batch size"


def memory_panel(stats: PlanStats) -> str:
    """The plan against its budget, and each axis."""
    memory = stats.memory
    if memory is None:
        advice = (
            "<p>The plan was made without a budget, so its memory is not known. To see it against a limit, plan with "
            "<code>BatchPlanner(budget=MemoryBudget.for_function(fn, *abstract_args))</code>.</p>"
        )
        return section("memory", "Memory", advice)
    moved = [(i, axis, memory.slope_by_axis.get(axis.name)) for i, axis in enumerate(stats.axes)]
    parts = {axis.name: slope * axis.batch_size for _, axis, slope in moved if slope is not None}
    rest = memory.estimate - sum(parts.values())
    scale = max(memory.estimate, memory.budget or 0) or 1
    overlapping = rest < 0  # the chunks of nested axes multiply, so the shares of the axes sum to more than there is
    x = (memory.estimate if overlapping else rest) / scale
    marks = [part("fill rest other", 0, x)]
    for i, axis, slope in moved:
        if slope is not None:
            end = x if overlapping else x + max(parts[axis.name], 0) / scale
            marks.append(part(f"fill {axis.kind}", x, end, f' data-axis="{i}"'))
            x = end
    kind, verdict = verdict_of(memory)
    return section(
        "memory",
        "Memory",
        f'<output id="memory-verdict" class="total {kind}" aria-live="polite">{text(verdict)}</output>'
        f'<div class="bar" id="memory-total" role="img" aria-label="{text(verdict)}">{"".join(marks)}'
        f"{_limits(memory, scale)}</div>{_memory_key(stats, memory, overlapping)}"
        f'<ul class="rows">{_memory_rows(stats, memory, parts, rest, scale)}</ul>{_WHAT_IF}',
    )


_WHAT_IF = """<div class="what-if" id="what-if" hidden>
<p class="muted small">Moved sliders show a linear estimate: each axis adds its bytes for each element at once, and the
rest stays. The plan's own sizes were estimated as they are.</p>
<p class="small-sizes small" hidden>Below 16 elements at once, memory need not follow a line: plan again to be sure.</p>
<div class="buttons"><button type="button" class="reset" disabled>Back to the plan</button></div>
<pre hidden aria-label="Axes with the chosen batch sizes"></pre>
</div>"""


def _limits(memory: MemoryStats, scale: float) -> str:
    if memory.budget is None:
        return '<i class="toomuch" hidden></i>'
    limit = memory.budget / scale
    excess = part("toomuch", limit, memory.estimate / scale) if memory.over else '<i class="toomuch" hidden></i>'
    return f'{excess}<i class="limit" style="left:{100 * limit:.3f}%"></i>'


def _memory_key(stats: PlanStats, memory: MemoryStats, overlapping: bool) -> str:
    items = [f'<li><i class="fill other"></i>{"the whole plan" if overlapping else _FIXED}</li>']
    if not overlapping:
        items += [
            f'<li><i class="fill {axis.kind}"></i><bdi>{text(axis.name)}</bdi></li>'
            for axis in stats.axes
            if axis.name in memory.slope_by_axis
        ]
    if memory.budget is not None:
        items.append('<li><i class="limit"></i>budget</li>')
    if memory.over:
        items.append('<li><i style="background:var(--over)"></i>over the budget</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def _memory_rows(stats: PlanStats, memory: MemoryStats, parts: dict[str, float], rest: float, scale: float) -> str:
    fixed = (
        f"<span>{_FIXED.capitalize()}</span><span><strong>{byte_text(rest)}</strong></span>"
        if rest >= 0
        else "<span>The sizes of nested axes multiply, so that the shares of the axes overlap: "
        "each is what its axis moves with the others as planned.</span>"
    )
    rows = [f'<li class="other"><div class="row-head">{fixed}</div></li>']
    for i, axis in enumerate(stats.axes):
        slope = memory.slope_by_axis.get(axis.name)
        if slope is None:
            continue
        name = text(axis.name)
        turns = f"{count_text(axis.batch_size)} at once"
        if axis.steps is not None:
            turns += f", {plural(axis.steps, 'step')}"
        width = min(max(100 * parts[axis.name] / scale, 0), 100)
        rows.append(
            f'<li class="{axis.kind}" id="memory-{i}"><div class="row-head"><span class="name"><bdi>{name}</bdi></span>'
            f'<span><span class="turns">{turns}</span> · <strong class="bytes">{byte_text(parts[axis.name])}</strong>'
            f'</span></div><div class="bar" aria-hidden="true"><i class="fill" style="left:0;width:{width:.3f}%"></i>'
            f'</div><p class="muted small">{byte_text(slope)} for each element at once</p>{_slider(i, axis)}</li>'
        )
    unknown = [
        f'<span class="name"><bdi>{text(axis.name)}</bdi></span>'
        for axis in stats.axes
        if axis.name not in memory.slope_by_axis
    ]
    if unknown:
        rows.append(f'<li class="muted">No share of its own is known for {", ".join(unknown)}.</li>')
    return "".join(rows)


def _slider(i: int, axis: AxisStats) -> str:
    """Moves the batch size of an axis whose batch size is a choice."""
    if axis.kind not in ("vectorized", "chunked") or axis.cardinality < 2:
        return ""
    limits = f'min="1" max="{axis.cardinality}" value="{axis.batch_size}"'
    name = text(axis.name)
    return (
        f'<div class="control" hidden><label for="size-{i}">Elements of <bdi>{name}</bdi> at once</label>'
        f'<input type="range" id="size-{i}" {limits}>'
        f'<input type="number" {limits} aria-label="Elements of {name} at once">'
        '<button type="button">Largest that fits</button></div>'
    )
