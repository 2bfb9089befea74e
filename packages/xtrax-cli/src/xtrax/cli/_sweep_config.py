"""What `xtrax sweep` reads: a training run's TOML file with a `[sweep]` table, and the grid of points that it spans."""

import copy
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from xtrax.cli._folder import run_id_of
from xtrax.cli._imports import near
from xtrax.cli.config import SCHEMA_VERSION, ConfigError, TrainConfig
from xtrax.config import (
    TomlDocument,
    apply_overrides,
    check_schema_version,
    load_toml_document,
    structure_dataclass,
)

_MOST_POINTS = 10_000


@dataclass(frozen=True, kw_only=True)
class SweepTable:
    """`[sweep]`.

    Attributes:
        axes: From the dotted key of the file to the array of its values; nested tables stand for dotted keys.
        mode: `"sequential"`, one point after another.
        rank_by: `"loss"` or one of `[metrics]`: of the last evaluation, or of training where there is no evaluation.
        goal: Whether a smaller or a larger value is better.
    """

    axes: dict[str, Any]
    mode: Literal["sequential", "vectorized", "dask"] = "sequential"
    rank_by: str = "loss"
    goal: Literal["min", "max"] = "min"


@dataclass(frozen=True, kw_only=True)
class _File:
    sweep: SweepTable = field()


@dataclass(frozen=True)
class Point:
    """One combination of values: the configuration of a training run.

    Attributes:
        run_id: The id of its run.
        values: From the dotted key to the value.
        config: The configuration.
        document: The document that it came from.
    """

    run_id: str
    values: Mapping[str, Any]
    config: TrainConfig
    document: TomlDocument


@dataclass(frozen=True)
class Sweep:
    """A grid of training runs.

    Attributes:
        run_id: `sweep-` and 12 hex digits, the same for the same points.
        table: The `[sweep]` table.
        axes: From the dotted key to its values.
        points: Their combinations, the last axis changing fastest.
        document: The file, overrides applied.
    """

    run_id: str
    table: SweepTable
    axes: Mapping[str, list[Any]]
    points: tuple[Point, ...]
    document: TomlDocument


def load_sweep(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Sweep:
    """Read a sweep's TOML file.

    Args:
        path: The file.
        overrides: `key=value` texts, as for a run; `sweep.axes.KEY=[...]` changes an axis.

    Raises:
        ConfigError: With every fault of the table, or else every fault of the points, at once.
    """
    loaded = load_toml_document(path, ConfigError)
    changed = apply_overrides(loaded, overrides, ConfigError)
    document = TomlDocument(changed, loaded.path, getattr(changed, "origins", loaded.origins))
    check_schema_version(document, SCHEMA_VERSION, ConfigError)
    if "sweep" not in document:
        raise ConfigError(f"{document.path}: sweep: missing; list values under [sweep.axes], such as seed = [0, 1, 2]")
    only = TomlDocument({"sweep": document["sweep"]}, document.path, document.origins)
    table = structure_dataclass(only, _File, ConfigError).sweep
    if table.mode != "sequential":
        where = document.where(("sweep", "mode"))
        raise ConfigError(
            f"{where}: sweep.mode: this version has no {table.mode!r} sweeps; leave it out, or write 'sequential'"
        )
    axes, lines = _axes(table, document)
    points = _points(axes, lines, document)
    known = ["loss", *points[0].config.metrics]
    if table.rank_by not in known:
        hint = near(table.rank_by, known, "") or f"; it can be {', '.join(known)}"
        raise ConfigError(
            f"{document.where(('sweep', 'rank_by'))}: sweep.rank_by: there is no metric {table.rank_by!r}{hint}"
        )
    digest = hashlib.sha256("\n".join(point.run_id for point in points).encode()).hexdigest()
    return Sweep(f"sweep-{digest[:12]}", table, axes, points, document)


def _axes(table: SweepTable, document: TomlDocument) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """The axes by dotted key, and the line of each."""
    axes: dict[str, list[Any]] = {}
    lines: dict[str, Any] = {}
    faults: list[str] = []
    for key, value in _flat(("sweep", "axes"), table.axes):
        name, where = ".".join(key[2:]), document.where(key)
        if not isinstance(value, list):
            faults.append(f"{where}: {'.'.join(key)}: must be an array of values, found {value!r}")
        elif not value:
            faults.append(f"{where}: {'.'.join(key)}: has no values; give one or more, or leave the axis out")
        elif name.split(".")[0] in ("sweep", "schema_version", "kind"):
            faults.append(f"{where}: {'.'.join(key)}: {name} is the same for every point; it cannot be an axis")
        elif name in axes:
            faults.append(f"{where}: {'.'.join(key)}: {name} is given twice, with and without quotes")
        else:
            axes[name] = value
            lines[name] = _line(document, key)
    if not axes and not faults:
        where = document.where(("sweep", "axes"))
        faults.append(f"{where}: sweep.axes: has no axes; list values, such as seed = [0, 1, 2]")
    names = list(axes)
    for inner in names:
        faults += [
            f"{document.path}: sweep.axes: {outer} and {inner} set the same key; leave one of them out"
            for outer in names
            if inner.startswith(f"{outer}.")
        ]
    if math.prod(map(len, axes.values())) > _MOST_POINTS:
        count = math.prod(map(len, axes.values()))
        faults.append(f"{document.path}: sweep.axes: they span {count} points, and at most {_MOST_POINTS} are allowed")
    if faults:
        raise ConfigError("\n".join(faults))
    return axes, lines


def _flat(key: tuple[str, ...], table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat((*key, name), value)
        else:
            yield (*key, name), value


def _line(document: TomlDocument, key: tuple[str, ...]) -> int | str:
    """Where an axis stands, for the faults of its values."""
    for length in range(len(key), 0, -1):
        if key[:length] in document.origins:
            return document.origins[key[:length]]
    return "sweep"


def _points(axes: Mapping[str, list[Any]], lines: Mapping[str, Any], document: TomlDocument) -> tuple[Point, ...]:
    points: list[Point] = []
    faults: list[str] = []
    base = {name: value for name, value in document.items() if name != "sweep"}
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        try:
            points.append(_point(base, values, lines, document))
        except ConfigError as error:
            faults += str(error).splitlines()
    if faults:
        raise ConfigError("\n".join(dict.fromkeys(faults)))
    seen: dict[str, Point] = {}
    for point in points:
        if twin := seen.get(point.run_id):
            raise ConfigError(
                f"{document.path}: sweep.axes: {_told(twin.values)} and {_told(point.values)} are the same "
                "configuration; give each value once"
            )
        seen[point.run_id] = point
    return tuple(points)


def _point(
    base: Mapping[str, Any], values: Mapping[str, Any], lines: Mapping[str, Any], document: TomlDocument
) -> Point:
    tables = copy.deepcopy(dict(base))
    origins = dict(document.origins)
    for key, value in values.items():
        parts = tuple(key.split("."))
        here = tables
        for depth, part in enumerate(parts[:-1], 1):
            inner = here.setdefault(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"{document.path}: sweep.axes: {key} leads through {'.'.join(parts[:depth])}, which is no table"
                )
            here = inner
        here[parts[-1]] = copy.deepcopy(value)
        origins = {other: line for other, line in origins.items() if other[: len(parts)] != parts}
        origins[parts] = lines[key]
    data = tables.get("data")
    if "seed" in values and isinstance(data, dict):
        data.setdefault("seed", base.get("seed", 0))  # the examples stay the same, so that points differ in one thing
    point = TomlDocument(tables, document.path, origins)
    config = structure_dataclass(point, TrainConfig, ConfigError)
    return Point(run_id_of(config), dict(values), config, point)


def _told(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
