"""A plan as a list of boxes and labels, which SVG and matplotlib draw alike."""

import dataclasses
import textwrap
from typing import TypeAlias

from xtrax.eda._palette import TINT
from xtrax.eda._strip import Style, caption, strip
from xtrax.eda._summary import grouped_copies, verdict_of, worst
from xtrax.eda._words import byte_text, count_text, percent_text, plural, shorten
from xtrax.eda.types import Panel, PlanStats

WIDTH = 900
_MARGIN = 28
_STRIP = 36
_LINE = 20
_MOST_LINES = 4  # of a reason
_MOST_ROWS = 24  # of a list


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle in pixels, filled with a colour of the palette (`tint` of it), hatched or outlined."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    style: Style = "fill"
    tint: float = 1.0


@dataclasses.dataclass(frozen=True)
class Label:
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    colour: str = "ink"
    size: int = 14
    bold: bool = False
    mono: bool = False
    right: bool = False


Item: TypeAlias = Box | Label


@dataclasses.dataclass(frozen=True)
class Figure:
    """What is drawn, in order, and what it is called."""

    title: str
    description: str
    height: float
    items: tuple[Item, ...]


def figure(stats: PlanStats, panels: tuple[Panel, ...], title: str) -> Figure:
    """Lay the panels out below one another."""
    drawing = _Drawing()
    drawing.y = _MARGIN + 20
    drawing.label(_MARGIN, shorten(title, 60), size=22, bold=True)
    kind, verdict = verdict_of(stats.memory)
    drawing.y += 28
    colour = kind if kind in ("fits", "over") else "muted"
    for line in _wrap(verdict, WIDTH - 2 * _MARGIN, 14):
        drawing.label(_MARGIN, line, colour=colour, bold=True)
        drawing.y += _LINE
    makers = {"nest": _nest, "memory": _memory, "buckets": _buckets, "duplicates": _duplicates}
    for panel in panels:
        if panel in makers:
            drawing.y += 14
            makers[panel](drawing, stats)
    description = f"{verdict} " + "; ".join(
        f"{axis.name}: {plural(axis.cardinality, 'element')}, {caption(axis, stats)}" for axis in stats.axes
    )
    return Figure(title, description, drawing.y + _MARGIN - 8, tuple(drawing.items))


class _Drawing:
    """The items so far, and how far down they reach."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.y = 0.0

    def label(
        self,
        x: float,
        text: str,
        *,
        colour: str = "ink",
        size: int = 14,
        bold: bool = False,
        mono: bool = False,
        right: bool = False,
    ) -> None:
        self.items.append(Label(x, self.y, text, colour, size, bold, mono, right))

    def heading(self, text: str) -> None:
        self.y += 18
        self.label(_MARGIN, text, size=16, bold=True)
        self.y += 14

    def box(self, x: float, width: float, height: float, colour: str, style: Style = "fill", tint: float = 1.0) -> None:
        self.items.append(Box(x, self.y, width, height, colour, style, tint))


def _wrap(text: str, width: float, size: int) -> list[str]:
    """Lines that fit, by a width per letter that most fonts stay under."""
    lines = textwrap.wrap(text, max(int(width / (0.58 * size)), 8)) or [""]
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[: _MOST_LINES - 1], shorten(lines[_MOST_LINES - 1], len(lines[_MOST_LINES - 1]) - 1)]


def _nest(drawing: _Drawing, stats: PlanStats) -> None:
    drawing.heading("How it runs: left to right one after another, top to bottom at once")
    indent = min(14.0, 220 / max(stats.total_axes, 1))
    x, width = float(_MARGIN), float(WIDTH - 2 * _MARGIN)
    opened: list[tuple[int, float, float, float, str]] = []
    for axis in stats.axes:
        opened.append((len(drawing.items), x, drawing.y, width, axis.kind))
        x, width = x + indent + 5, width - 2 * indent - 5
        drawing.y += 24
        letters = int(width / 9.5)
        name = shorten(axis.name, max(letters - 24, 8))
        drawing.label(x, name, size=15, bold=True, mono=True)
        drawing.label(x + width, plural(axis.cardinality, "element"), colour="muted", right=True)
        drawing.y += _LINE
        drawing.label(x, shorten(f"{axis.kind}: {caption(axis, stats)}", int(width / 8)), colour=axis.kind, bold=True)
        drawing.y += 10
        marks = strip(axis, stats)
        for mark in marks:
            box = Box(
                x + mark.x * width,
                drawing.y + mark.y * _STRIP,
                mark.width * width,
                mark.height * _STRIP,
                axis.kind,
                mark.style,
            )
            drawing.items.append(box)
        drawing.y += (_STRIP if marks else 0) + 20
        for line in _wrap(axis.reasoning, width, 13):
            drawing.label(x, line, size=13)
            drawing.y += _LINE - 2
        drawing.y -= 6
    drawing.y += 6
    drawing.box(x, width, 34, "muted", "ghost")
    drawing.y += 22
    inner = f"your function, on at most {plural(stats.elements_at_once, 'element')} at once"
    drawing.label(x + 12, shorten(inner, int(width / 8)))
    drawing.y += 12
    grounds: list[tuple[int, list[Box]]] = []
    for at, left, top, wide, kind in reversed(opened):
        drawing.y += 12
        tall = drawing.y - top
        grounds.append((at, [Box(left, top, wide, tall, kind, tint=TINT), Box(left, top, 5, tall, kind)]))
    for at, boxes in grounds:  # from the innermost, so that earlier positions stay valid
        drawing.items[at:at] = boxes
    drawing.y += 10


def _row(drawing: _Drawing, left: str, right: str, marks: list[tuple[float, float, str, Style]]) -> None:
    """A line of text above a bar; marks are `(from, to, colour, style)` in fractions of its width."""
    width = WIDTH - 2 * _MARGIN
    drawing.y += 18
    drawing.label(_MARGIN, shorten(left, 50), size=13)
    drawing.label(_MARGIN + width, right, size=13, right=True)
    drawing.y += 7
    drawing.box(_MARGIN, width, 14, "muted", tint=TINT)
    for start, end, colour, style in marks:
        if end > start:
            drawing.box(_MARGIN + start * width, (end - start) * width, 14, colour, style)
    drawing.y += 18


def _memory(drawing: _Drawing, stats: PlanStats) -> None:
    memory = stats.memory
    drawing.heading("Memory")
    if memory is None:
        drawing.y += 10
        drawing.label(_MARGIN, "The plan was made without a budget, so its memory is not known.", colour="muted")
        drawing.y += 10
        return
    scale = max(memory.estimate, memory.budget or 0) or 1
    parts = [
        (axis.name, axis.kind, memory.slope_by_axis[axis.name] * axis.batch_size, axis.batch_size)
        for axis in stats.axes
        if axis.name in memory.slope_by_axis
    ]
    rest = memory.estimate - sum(part for _, _, part, _ in parts)
    limit = None if memory.budget is None else memory.budget / scale
    marks: list[tuple[float, float, str, Style]] = []
    x = 0.0
    shares = [("other", rest), *((kind, part) for _, kind, part, _ in parts)]
    for colour, part in shares if rest >= 0 else [("other", memory.estimate)]:  # below zero, the shares overlap
        marks.append((x, x + max(part, 0) / scale, colour, "fill"))
        x += max(part, 0) / scale
    if limit is not None and memory.over:
        marks.append((limit, memory.estimate / scale, "over", "fill"))
    budget = "no budget" if memory.budget is None else f"budget {byte_text(memory.budget)}"
    _row(drawing, "the whole plan", f"{byte_text(memory.estimate)}, {budget}", marks)
    if limit is not None:
        drawing.items.append(Box(_MARGIN + limit * (WIDTH - 2 * _MARGIN) - 1.5, drawing.y - 24, 3, 26, "ink"))
    if rest >= 0:
        _row(drawing, "not moved by any batch size", byte_text(rest), [(0, rest / scale, "other", "fill")])
    for name, kind, part, size in parts:
        _row(
            drawing,
            name,
            f"{byte_text(part)} at {count_text(size)} at once",
            [(0, min(max(part, 0) / scale, 1), kind, "fill")],
        )


def _buckets(drawing: _Drawing, stats: PlanStats) -> None:
    drawing.heading("Padding by bucket")
    for name, bucket in stats.bucket_stats.items():
        most = max((use.padded or 0 for use in bucket.buckets), default=0) or 1
        for use in bucket.buckets[:_MOST_ROWS]:
            left = f"{shorten(name, 24)}, up to {count_text(use.boundary)}"
            if use.count is None:
                part = 1 - use.worst_waste
                _row(drawing, left, worst(use.worst_waste), [(0, part, "padded", "fill"), (part, 1, "padded", "hatch")])
                continue
            data, padded = (use.data or 0) / most, (use.padded or 0) / most
            right = plural(use.count, "element")
            right += f", {percent_text(use.waste or 0)} padding" if use.count else ""
            _row(drawing, left, right, [(0, data, "padded", "fill"), (data, padded, "padded", "hatch")])
        _more(drawing, len(bucket.buckets) - _MOST_ROWS)


def _duplicates(drawing: _Drawing, stats: PlanStats) -> None:
    drawing.heading("Duplicates: how often a distinct element occurs")
    for name, dedup in stats.dedup_stats.items():
        groups = grouped_copies(dedup)
        most = max(distinct for _, _, distinct in groups)
        for low, high, distinct in groups[:_MOST_ROWS]:
            times = "once" if high == 1 else f"{count_text(low)} times" if low == high else f"{low} to {high} times"
            right = plural(distinct, "distinct element")
            _row(drawing, f"{shorten(name, 24)}, {times}", right, [(0, distinct / most, "deduplicated", "fill")])
        _more(drawing, len(groups) - _MOST_ROWS)


def _more(drawing: _Drawing, number: int) -> None:
    if number > 0:
        drawing.y += 14
        drawing.label(_MARGIN, f"and {number} more", colour="muted", size=13)
        drawing.y += 6
