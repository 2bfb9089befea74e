"""Draw a plan."""

import logging
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, get_args, overload

from xtrax.eda._figure import figure
from xtrax.eda._html import page
from xtrax.eda._png import png
from xtrax.eda._stats import explain_plan
from xtrax.eda._svg import svg
from xtrax.eda._words import plural, printable
from xtrax.eda.types import Format, Panel, PlanLike, PlanStats

_PANELS: tuple[Panel, ...] = get_args(Panel)
_FORMATS: tuple[Format, ...] = get_args(Format)
_SUFFIXES = {".html": "html", ".htm": "html", ".svg": "svg", ".png": "png"}


@overload
def render(
    plan: PlanLike | PlanStats,
    fmt: Literal["html", "svg"] = "html",
    path: str | os.PathLike[str] | None = None,
    *,
    panels: Iterable[Panel] | None = None,
    logger: logging.Logger | None = None,
    lengths: Mapping[str, object] | None = None,
    title: str | None = None,
) -> str: ...


@overload
def render(
    plan: PlanLike | PlanStats,
    fmt: Literal["png"],
    path: str | os.PathLike[str] | None = None,
    *,
    panels: Iterable[Panel] | None = None,
    logger: logging.Logger | None = None,
    lengths: Mapping[str, object] | None = None,
    title: str | None = None,
) -> bytes: ...


def render(
    plan: PlanLike | PlanStats,
    fmt: Format = "html",
    path: str | os.PathLike[str] | None = None,
    *,
    panels: Iterable[Panel] | None = None,
    logger: logging.Logger | None = None,
    lengths: Mapping[str, object] | None = None,
    title: str | None = None,
) -> str | bytes:
    """Draw a plan: as an interactive page, or as a figure.

    The page is one file without a network: the nest of axes as it runs, step by step; memory against the budget, with
    sliders for the batch sizes; padding by bucket; duplicates; and the reasons. An infeasible plan is drawn too, with
    what is over in red.

    Args:
        plan: what `BatchPlanner.plan` returned, the `.plan` of a `BudgetInfeasibleError`, any object with the same
            attributes, or what `explain_plan` returned.
        fmt: `"html"`, `"svg"`, or `"png"`, which needs matplotlib (the extra `viz`).
        path: also write it to this file, whole or not at all. Its folder has to exist.
        panels: which of `"nest"`, `"memory"`, `"buckets"`, `"duplicates"` and `"axes"` to show, in this order; None
            shows those that the plan has something for. Figures have no `"axes"`: the nest says it all.
        logger: gets each memory warning, and the path written, at the levels WARNING and INFO; None is
            `logging.getLogger("xtrax.eda")`.
        lengths: by name, for axes with buckets: `(n,)` integers, the length of each element.
        title: the heading; None counts the axes.

    Returns:
        The document: text, or the bytes of a PNG.

    Raises:
        TypeError: no plan, or an argument of the wrong type.
        ValueError: an unknown format or panel, no panels or one twice, a path whose suffix is that of another format,
            statistics together with lengths, or a plan that `extract_plan_stats` refuses.
        ImportError: `"png"` without matplotlib.
        OSError: the file cannot be written; an earlier one is then still whole.

    >>> from xtrax.tiling import AxisSpec, BatchPlanner
    >>> page = render(BatchPlanner().plan([AxisSpec("batch", 128, 32)]), title="Inference")
    >>> page.startswith("<!DOCTYPE html>") and "<title>Inference</title>" in page
    True
    """
    if not isinstance(fmt, str):
        raise TypeError(f"fmt must be one of {', '.join(map(repr, _FORMATS))}, but is {fmt!r}.")
    if fmt not in _FORMATS:
        raise ValueError(f"fmt must be one of {', '.join(map(repr, _FORMATS))}, but is {fmt!r}.")
    target = _target(path, fmt)
    chosen = _chosen(panels)
    if logger is not None and not isinstance(logger, (logging.Logger, logging.LoggerAdapter)):
        raise TypeError(f"logger must be a logging.Logger or None, but is {logger!r}.")
    if title is not None and not isinstance(title, str):
        raise TypeError(f"title must be a string or None, but is {title!r}.")
    if isinstance(plan, PlanStats):
        if lengths is not None:
            raise ValueError("lengths cannot be added to statistics; give them to explain_plan, or render the plan.")
        stats = plan
    else:
        stats = explain_plan(plan, lengths=lengths)
    log = logger or logging.getLogger("xtrax.eda")
    for warning in stats.memory_warnings:
        log.warning("%s", warning)
    if chosen is None:
        chosen = _worthwhile(stats)
    heading = printable(title) if title else f"Plan of {plural(stats.total_axes, 'axis')}"

    document: str | bytes
    if fmt == "html":
        document = page(stats, chosen, heading)
    else:
        drawing = figure(stats, chosen, heading)
        document = svg(drawing) if fmt == "svg" else png(drawing)
    if target is not None:
        _write(target, document)
        log.info("wrote %s", target)
    return document


def _target(path: str | os.PathLike[str] | None, fmt: Format) -> Path | None:
    if path is None:
        return None
    if isinstance(path, (bytes, int)) or not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a string or a path, but is {path!r}.")
    if not os.fspath(path):
        raise ValueError("path is empty; name a file, or pass None to write none.")
    target = Path(path)
    meant = _SUFFIXES.get(target.suffix.lower(), fmt)
    if meant != fmt:
        raise ValueError(f"path {str(target)!r} is that of a {meant} file, but fmt is {fmt!r}; pass fmt={meant!r}.")
    return target


def _chosen(panels: Iterable[Panel] | None) -> tuple[Panel, ...] | None:
    if panels is None:
        return None
    allowed = ", ".join(map(repr, _PANELS))
    if isinstance(panels, str) or not isinstance(panels, Iterable):
        raise TypeError(f"panels must be a sequence of {allowed}, but is {panels!r}; put a single one into a list.")
    chosen = tuple(panels)
    if not chosen:
        raise ValueError(f"panels is empty; name some of {allowed}, or pass None.")
    for i, panel in enumerate(chosen):
        if panel not in _PANELS:
            raise ValueError(f"panels[{i}] must be one of {allowed}, but is {panel!r}.")
        if panel in chosen[:i]:
            raise ValueError(f"panels names {panel!r} twice.")
    return chosen


def _worthwhile(stats: PlanStats) -> tuple[Panel, ...]:
    has = {
        "memory": stats.memory is not None,
        "buckets": bool(stats.bucket_stats),
        "duplicates": bool(stats.dedup_stats),
    }
    return tuple(panel for panel in _PANELS if has.get(panel, True))


def _write(target: Path, document: str | bytes) -> None:
    """By a temporary file beside it, so that a full disk leaves no half of a page."""
    data = document.encode("utf-8") if isinstance(document, str) else document
    if target.is_dir():
        raise IsADirectoryError(f"path {str(target)!r} is a folder; name a file in it.")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path {str(target)!r} lies in {str(target.parent)!r}, which is no folder; make it first."
        )
    if target.exists() and not target.is_file():  # a device such as /dev/stdout cannot be replaced
        target.write_bytes(data)
        return
    target = target.resolve()  # a link stays a link
    temporary = target.with_name(f".{target.name[:64]}.{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
