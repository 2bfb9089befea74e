"""The ranked table of a sweep as one self-contained HTML page."""

import html
from collections.abc import Sequence

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --back: #fbfbf9; --line: #d5d7db; --best: #1a6b2f; --bad: #a61b1b }
@media (prefers-color-scheme: dark) {
  :root { --text: #e8e6e3; --back: #17181a; --line: #3c4046; --best: #7fd494; --bad: #ff9a8f }
}
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: var(--text); background: var(--back);
       font: 16px/1.5 system-ui, sans-serif }
div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .5rem }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:last-child, td:last-child { text-align: left; font-family: ui-monospace, monospace }
.best { color: var(--best); font-weight: 600 }
.failed { color: var(--bad) }
"""


def page(title: str, caption: str, header: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> str:
    """The document.

    Args:
        title: The heading.
        caption: What the table is ranked by.
        header: The columns' names.
        rows: The cells of each row, and its class: `"best"`, `"failed"` or nothing.

    Returns:
        HTML that loads nothing from anywhere.
    """
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in header)
    body = "\n".join(
        f'<tr class="{kind}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        for cells, kind in rows
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<div><table>
<caption>{html.escape(caption)}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
</body>
</html>
"""
