"""A plan as text and as HTML."""

import html
from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width under a rule, the last one as long as it is."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    rule = "  ".join("-" * width for width in widths[:-1]) + "  " + "-" * len(header[-1])
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table, every cell escaped."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"
