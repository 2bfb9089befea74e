"""A figure as PNG, by matplotlib."""

import io

from xtrax.eda._figure import WIDTH, Box, Figure
from xtrax.eda._frame import VIZ_HINT
from xtrax.eda._palette import LIGHT, blend

_DPI = 144
_PIXELS_PER_INCH = 96  # of the figure's own pixels
_TALLEST = 60_000  # pixels; matplotlib draws fewer than 2**16 in each direction


def png(figure: Figure) -> bytes:
    """The file's bytes, at one and a half times the size of the SVG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # an optional extra
        from matplotlib.figure import Figure as Canvas
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError(f"png needs matplotlib; {VIZ_HINT}, or render svg or html, which need nothing.") from error

    # pyplot is not used: it would keep the figure, and may want a screen.
    canvas = Canvas(figsize=(WIDTH / _PIXELS_PER_INCH, figure.height / _PIXELS_PER_INCH), facecolor=LIGHT["panel"])
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(figure.height, 0)
    axes.axis("off")
    for item in figure.items:
        colour = LIGHT[item.colour]
        if isinstance(item, Box):
            filled = item.style == "fill"
            box = Rectangle(
                (item.x, item.y),
                max(item.width, 0),
                max(item.height, 0),
                facecolor=blend(colour, LIGHT["panel"], item.tint) if filled else "none",
                edgecolor="none" if filled else colour,
                linewidth=0 if filled else 0.8,
                linestyle="--" if item.style == "ghost" else "-",
                hatch="/////" if item.style == "hatch" else None,
            )
            axes.add_patch(box)
        else:
            axes.text(
                item.x,
                item.y,
                item.text,
                color=colour,
                fontsize=item.size * 72 / _PIXELS_PER_INCH,
                fontweight="bold" if item.bold else "normal",
                family="monospace" if item.mono else "sans-serif",
                ha="right" if item.right else "left",
                va="baseline",
                parse_math=False,  # a name with dollar signs is a name
            )
    file = io.BytesIO()
    dpi = min(_DPI, _TALLEST * _PIXELS_PER_INCH / figure.height)
    canvas.savefig(file, format="png", dpi=dpi, metadata={"Title": figure.title, "Description": figure.description})
    return file.getvalue()
