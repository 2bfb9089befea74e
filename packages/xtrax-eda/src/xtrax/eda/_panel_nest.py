"""The panels about every axis: the nest as it runs, and the table."""

from xtrax.eda._markup import marks, section, text
from xtrax.eda._strip import caption, strip
from xtrax.eda._words import byte_text, count_text, plural
from xtrax.eda.types import PlanStats

_LABELS = {
    "vectorized": "vectorized",
    "chunked": "chunked",
    "sequential": "sequential",
    "deduplicated": "deduplicated",
    "padded": "padded on the host",
    "other": "other",
}
_KEY = (
    '<ul class="key other"><li><i class="fill"></i>computed</li>'
    '<li><i class="hatch"></i>padding, or computed twice</li>'
    '<li><i class="ghost"></i>not computed, or not known beforehand</li></ul>'
)
_STEPPER = """<fieldset class="stepper" id="stepper" hidden>
<legend class="hidden-text">Step through the run</legend>
<div class="control"><label for="step">Step through the run</label>
<input type="range" id="step" min="1" max="1" value="1">
<input type="number" min="1" max="1" value="1" aria-label="Step"></div>
<div class="buttons"><button type="button" class="back">Back</button><button type="button" class="next">Next</button>
<button type="button" class="play">Play</button></div>
<output for="step" aria-live="polite"></output>
</fieldset>"""


def nest_panel(stats: PlanStats) -> str:
    """The axes inside one another, with a control to step through the run."""
    at_once = plural(stats.elements_at_once, "element")
    inner = f'<p class="body">your function, on at most {text(at_once)} at once</p>'
    for i, axis in reversed(list(enumerate(stats.axes))):
        drawn = strip(axis, stats)
        shown = text(caption(axis, stats))
        picture = (
            f'<div class="strip" role="img" aria-label="{shown}">{marks(drawn)}<i class="at"></i></div>'
            f'<p class="now" aria-hidden="true"></p>'
            if drawn
            else '<div class="strip" hidden><i class="at"></i></div><p class="now" hidden></p>'
        )
        reason = f'<p class="reason">{text(axis.reasoning)}</p>' if axis.reasoning else ""
        inner = (
            f'<ol class="nest"><li class="axis {axis.kind}" id="axis-{i}"><div class="axis-head">'
            f"<h3><bdi>{text(axis.name)}</bdi></h3><span>{text(plural(axis.cardinality, 'element'))}</span>"
            f'<span class="tag">{_LABELS[axis.kind]}: {shown}</span></div>{picture}{reason}\n{inner}</li></ol>'
        )
    legend = (
        "The outermost axis first. In each strip, left to right is one after another, top to bottom is at once; "
        "where there are many, a block stands for several."
    )
    if any(axis.kind in ("deduplicated", "padded") for axis in stats.axes):
        legend += " Strips of deduplicated and padded axes show shares of their elements."
    return section("nest", "How it runs", f'<p class="muted">{legend}</p>{_KEY}{_STEPPER}{inner}')


def axes_panel(stats: PlanStats) -> str:
    """Every axis in a row."""
    if not stats.axes:
        return section("axes", "All axes", "<p>This plan has no axes: the function is called as it is.</p>")
    with_memory = any(axis.memory_estimate_bytes is not None for axis in stats.axes)
    head = ["Axis", "Size", "Strategy", "At once", "Steps", *(["Memory"] if with_memory else []), "Because"]
    numbers = {"Size", "At once", "Steps", "Memory"}
    rows = ""
    for axis in stats.axes:
        cells = [
            count_text(axis.cardinality),
            axis.strategy,
            count_text(axis.batch_size),
            "not known" if axis.steps is None else count_text(axis.steps),
            *([_bytes_or_dash(axis.memory_estimate_bytes)] if with_memory else []),
            axis.reasoning,
        ]
        rows += f'<tr><th scope="row"><bdi>{text(axis.name)}</bdi></th>' + "".join(
            f'<td data-label="{label}"{_num(label in numbers)}>{text(cell)}</td>'
            for label, cell in zip(head[1:], cells, strict=True)
        )
        rows += "</tr>"
    header = "".join(f'<th scope="col"{_num(label in numbers)}>{label}</th>' for label in head)
    table = f'<table class="cards"><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>'
    return section("axes", "All axes", table)


def _num(number: bool) -> str:
    return ' class="num"' if number else ""


def _bytes_or_dash(size: int | None) -> str:
    return "–" if size is None else byte_text(size)
