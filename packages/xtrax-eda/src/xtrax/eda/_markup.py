"""Pieces of HTML that more than one panel has."""

import html
from collections.abc import Iterable

from xtrax.eda._strip import Mark
from xtrax.eda._words import printable
from xtrax.eda.types import Panel


def text(value: str) -> str:
    """Text that cannot be mistaken for markup, in an element or in a quoted attribute."""
    return html.escape(printable(value))


def section(name: Panel, heading: str, content: str) -> str:
    """A panel under its heading."""
    return (
        f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{heading}</h2>'
        f"{content}</section>"
    )


def marks(drawn: Iterable[Mark]) -> str:
    """The rectangles of a strip."""
    return "".join(
        f'<i class="{m.style}" style="left:{100 * m.x:.3f}%;top:{100 * m.y:.3f}%;'
        f'width:{100 * m.width:.3f}%;height:{100 * m.height:.3f}%"></i>'
        for m in drawn
    )


def part(cls: str, start: float, end: float, data: str = "") -> str:
    """A part of a bar, from and to in fractions of it."""
    return f'<i class="{cls}"{data} style="left:{100 * start:.3f}%;width:{100 * max(end - start, 0):.3f}%"></i>'


def row(left: str, right: str, *parts: str) -> str:
    """A bar under a line of text, which says all that the bar shows."""
    return (
        f'<li><div class="row-head"><span>{text(left)}</span><span>{text(right)}</span></div>'
        f'<div class="bar" aria-hidden="true">{"".join(parts)}</div></li>'
    )
