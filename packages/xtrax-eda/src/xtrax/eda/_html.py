"""A plan as one self-contained page: no network, and readable without its script."""

import json
from importlib.resources import files

from xtrax.eda._markup import text
from xtrax.eda._palette import DARK, LIGHT
from xtrax.eda._panel_data import buckets_panel, duplicates_panel, lengths_for_trial
from xtrax.eda._panel_memory import memory_panel
from xtrax.eda._panel_nest import axes_panel, nest_panel
from xtrax.eda._summary import verdict_of
from xtrax.eda._version import __version__
from xtrax.eda._words import byte_text, ceil_div, count_text, percent_text, plural
from xtrax.eda.types import Panel, PlanStats

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_ICON = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg'/%3E"


def page(stats: PlanStats, panels: tuple[Panel, ...], title: str) -> str:
    """The document."""
    makers = {
        "nest": nest_panel,
        "memory": memory_panel,
        "buckets": buckets_panel,
        "duplicates": duplicates_panel,
        "axes": axes_panel,
    }
    sections = "\n".join(makers[panel](stats) for panel in panels)
    assets = files("xtrax.eda")
    css, js = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("_page.css", "_page.js"))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="{_ICON}">
<title>{text(title)}</title>
<style>
{_variables(LIGHT)}
@media (prefers-color-scheme: dark) {{ {_variables(DARK)} }}
{css}</style>
</head>
<body>
<a class="skip" href="#content">Skip to the plan</a>
{_header(stats, title)}
<main id="content">
{sections}
</main>
<footer>Made by xtrax-eda {text(__version__)}. Sizes in decimal units, 1 GB = 10<sup>9</sup> bytes.</footer>
<script type="application/json" id="plan">{_data(stats)}</script>
<script>
{js}</script>
</body>
</html>
"""


def _variables(palette: dict[str, str]) -> str:
    return ":root { " + " ".join(f"--{name}: {colour};" for name, colour in palette.items()) + " }"


def _data(stats: PlanStats) -> str:
    """What the script needs, as JSON that cannot end the element that it stands in."""
    axes = []
    for i, axis in enumerate(stats.axes):
        bucket = stats.bucket_stats.get(axis.name)
        batches = None
        if bucket is not None and bucket.occupancy is not None and axis.batch_size:
            uses = zip(bucket.boundaries, bucket.occupancy, strict=True)
            batches = [[boundary, ceil_div(count, axis.batch_size), count] for boundary, count in uses if count]
        axes.append(
            {
                "index": i,
                "name": axis.name,
                "kind": axis.kind,
                "strategy": axis.strategy,
                "cardinality": axis.cardinality,
                "batch_size": axis.batch_size,
                "steps": axis.steps,
                "tile_granularity": axis.tile_granularity,
                "batches": batches,
            }
        )
    memory = None
    if stats.memory is not None:
        memory = {
            "estimate": stats.memory.estimate,
            "budget": stats.memory.budget,
            "slope_by_axis": stats.memory.slope_by_axis,
        }
    buckets = [{"lengths": lengths_for_trial(bucket)} for bucket in stats.bucket_stats.values()]
    encoded = json.dumps({"axes": axes, "memory": memory, "buckets": buckets}, allow_nan=False)
    return encoded.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _header(stats: PlanStats, title: str) -> str:
    kind, verdict = verdict_of(stats.memory)
    warnings = "".join(f"<li>{text(warning)}</li>" for warning in stats.memory_warnings if warning != verdict)
    listed = f'<ul class="warnings">{warnings}</ul>' if warnings else ""
    figures = "".join(
        f'<div><dt>{label}</dt><dd class="{"over" if over else ""}">{text(value)}<small>{text(note)}</small></dd></div>'
        for label, value, note, over in _figures(stats)
    )
    return (
        f"<header>\n<h1>{text(title)}</h1>\n"
        f'<p class="verdict {kind}">{text(verdict)}</p>{listed}\n<dl class="figures">{figures}</dl>\n</header>'
    )


def _figures(stats: PlanStats) -> list[tuple[str, str, str, bool]]:
    """`(label, value, note, alarming)` for the head of the page."""
    steps = stats.sequential_steps
    unknown = [axis.name for axis in stats.axes if axis.steps is None]
    figures = [
        (
            "One after another",
            "not known" if steps is None else plural(steps, "step"),
            f"depends on {', '.join(unknown)}" if unknown else "the product over all axes",
            False,
        ),
        ("At once, at most", plural(stats.elements_at_once, "element"), "of the innermost function", False),
    ]
    memory = stats.memory
    if memory is not None:
        note = "no budget" if memory.budget is None else f"of {byte_text(memory.budget)}"
        if memory.compiles:
            note += f"; {plural(memory.compiles, 'program')} compiled to find out"
        figures.append(("Memory", byte_text(memory.estimate), note, memory.over > 0))
    for name, dedup in stats.dedup_stats.items():
        note = f"{count_text(dedup.unique)} of {count_text(dedup.total)} along {name}"
        figures.append(("Distinct", percent_text(dedup.ratio), note, False))
    for name, bucket in stats.bucket_stats.items():
        if bucket.waste is not None:
            figures.append(("Padding", percent_text(bucket.waste), f"of the lengths along {name}", False))
    return figures
