"""A figure as SVG, in the colours that the reader's screen prefers."""

import html

from xtrax.eda._figure import WIDTH, Box, Figure, Label
from xtrax.eda._palette import DARK, LIGHT, blend
from xtrax.eda._words import printable

_SANS = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def svg(figure: Figure) -> str:
    """The document, self-contained."""
    tints = sorted({(item.colour, item.tint) for item in figure.items if isinstance(item, Box) and item.tint < 1})
    hatched = sorted({item.colour for item in figure.items if isinstance(item, Box) and item.style == "hatch"})
    patterns = "".join(
        f'<pattern id="hatch-{colour}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)">'
        f'<rect class="{colour}" width="2" height="5"/></pattern>'
        for colour in hatched
    )
    body = "\n".join(_box(item) if isinstance(item, Box) else _label(item) for item in figure.items)
    size = f'width="{WIDTH}" height="{figure.height:.0f}" viewBox="0 0 {WIDTH} {figure.height:.0f}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title description">
<title id="title">{_text(figure.title)}</title>
<desc id="description">{_text(figure.description)}</desc>
<style>
text {{ font-family: {_SANS}; white-space: pre; }} .mono {{ font-family: {_MONO}; }} .bold {{ font-weight: 600; }}
.right {{ text-anchor: end; }}
{_colours(LIGHT, tints)}
@media (prefers-color-scheme: dark) {{
{_colours(DARK, tints)}
}}
</style>
<defs>{patterns}</defs>
<rect class="panel" width="{WIDTH}" height="{figure.height:.0f}"/>
{body}
</svg>
"""


def _colours(palette: dict[str, str], tints: list[tuple[str, float]]) -> str:
    rules = [f".{name} {{ fill: {colour}; }} .line-{name} {{ stroke: {colour}; }}" for name, colour in palette.items()]
    rules += [
        f".{name}-{round(100 * tint)} {{ fill: {blend(palette[name], palette['panel'], tint)}; }}"
        for name, tint in tints
    ]
    return "\n".join(rules)


def _box(box: Box) -> str:
    place = f'x="{box.x:.2f}" y="{box.y:.2f}" width="{max(box.width, 0):.2f}" height="{max(box.height, 0):.2f}" rx="2"'
    if box.style == "fill":
        suffix = "" if box.tint == 1 else f"-{round(100 * box.tint)}"
        return f'<rect class="{box.colour}{suffix}" {place}/>'
    fill, dashes = (f"url(#hatch-{box.colour})", "") if box.style == "hatch" else ("none", ' stroke-dasharray="4 3"')
    return f'<rect class="line-{box.colour}" style="fill:{fill}"{dashes} {place}/>'


def _label(label: Label) -> str:
    classes = " ".join([label.colour, *(name for name in ("bold", "mono", "right") if getattr(label, name))])
    place = f'x="{label.x:.2f}" y="{label.y:.2f}" font-size="{label.size}"'
    return f'<text class="{classes}" {place}>{_text(label.text)}</text>'


def _text(text: str) -> str:
    return html.escape(printable(text))
