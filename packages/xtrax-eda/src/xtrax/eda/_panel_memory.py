"""The panel about memory: the plan against its budget, and sliders for other batch sizes."""

from xtrax.eda._markup import section, text
from xtrax.eda._summary import verdict_of
from xtrax.eda._words import byte_text, count_text, plural
from xtrax.eda.types import AxisStats, MemoryStats, PlanStats


def memory_panel(stats: PlanStats) -> str:
    memory = stats.memory
    if memory is None:
        advice = (
            "<p>The plan was made without a budget, so its memory is not known. To see it against a limit, plan with "
            "<code>BatchPlanner(budget=MemoryBudget.for_function(fn, *abstract_args))</code>.</p>"
        )
        return section("memory", "Memory", advice)
    parts = {axis.name: memory.slope_by_axis.get(axis.name, 0.0) * axis.batch_size for axis in stats.axes}
    rest = memory.estimate - sum(parts.values())
    scale = max(memory.estimate, memory.budget or 0) or 1
    x, marks = 0.0, []
    for cls, data, part in [
        ("rest other", "", rest),
        *((axis.kind, f' data-axis="{i}"', parts[axis.name]) for i, axis in enumerate(stats.axes)),
    ]:
        part = max(part, 0.0)
        if data == "" or memory.slope_by_axis.get(stats.axes[int(data.split('"')[1])].name) is not None:
            marks.append(
                f'<i class="fill {cls}"{data} style="left:{100 * x / scale:.3f}%;width:{100 * part / scale:.3f}%"></i>'
            )
        x += part
    kind, verdict = verdict_of(stats)
    return section(
        "memory",
        "Memory",
        f'<output id="memory-verdict" class="total {kind}" aria-live="polite">{text(verdict)}</output>'
        f'<div class="bar" id="memory-total" role="img" aria-label="{text(verdict)}">{"".join(marks)}'
        f"{_limits(memory, scale)}</div>{_memory_key(stats, memory)}"
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
    limit = 100 * memory.budget / scale
    excess = (
        f'<i class="toomuch" style="left:{limit:.3f}%;width:{100 * memory.over / scale:.3f}%"></i>'
        if memory.over
        else '<i class="toomuch" hidden></i>'
    )
    return f'{excess}<i class="limit" style="left:{limit:.3f}%"></i>'


def _memory_key(stats: PlanStats, memory: MemoryStats) -> str:
    items = ['<li><i class="fill other"></i>not moved by any batch size</li>']
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
    fixed = memory.fixed_bytes
    note = f", {byte_text(fixed)} of it arguments, outputs and the like" if fixed is not None and fixed < rest else ""
    rows = [
        f'<li class="other"><div class="row-head"><span>Not moved by any batch size</span>'
        f"<span>{text(byte_text(max(rest, 0)))}{text(note)}</span></div></li>"
    ]
    for i, axis in enumerate(stats.axes):
        name = text(axis.name)
        slope = memory.slope_by_axis.get(axis.name)
        if slope is None:
            rows.append(
                f'<li><div class="row-head"><span class="name"><bdi>{name}</bdi></span>'
                '<span class="muted">its share is not known</span></div></li>'
            )
            continue
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
