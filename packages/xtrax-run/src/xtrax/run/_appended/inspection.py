"""Everything on the disk of a tiled run against what was written down when it was committed. Changes nothing."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xtrax.run._appended.commit_log import read_log
from xtrax.run._appended.files import (
    COMMITS,
    FOLDER,
    HEADER,
    LAYOUT,
    LOOKS,
    MANIFEST,
    DamagedRunError,
    count_first,
    count_tiles,
    digest_of_file,
    group_folders,
    group_metadata,
    layout_of,
    metadata_of,
    picture_of,
    read_header,
    read_manifest,
    read_metadata,
    run_root,
)
from xtrax.run._appended.remains import refuse_remains
from xtrax.run._appended.shards import ArraySpec, state_folder
from xtrax.run._names import HIDDEN


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was written.

    Attributes:
        path: The file.
        what: What is wrong with it.
        tile: The tile that it belongs to, or None.
        array: The array that it belongs to, or None.
    """

    path: Path
    what: str
    tile: int | None = None
    array: str | None = None

    def __str__(self) -> str:
        """A line: tile, array, file, what is wrong."""
        where = f"tile {self.tile}: " if self.tile is not None else ""
        return f"{where}{self.path} {self.what}"


@dataclass(frozen=True)
class Inspection:
    """What is on the disk.

    Attributes:
        header: What `run.json` says.
        records: The log's record of each tile that it names, by tile.
        problems: What is wrong.
        bytes_checked: How much was read and digested.
        finished: Whether there is a manifest that fits.
    """

    header: dict[str, Any]
    records: dict[int, dict[str, Any]]
    problems: tuple[Problem, ...]
    bytes_checked: int
    finished: bool

    @property
    def damaged_tiles(self) -> frozenset[int]:
        """The tiles that something is wrong with."""
        return frozenset(problem.tile for problem in self.problems if problem.tile is not None)


def inspect_store(folder: Path) -> Inspection:
    """Check a run's files. Reads every committed byte.

    Raises:
        FileNotFoundError: If there is no tiled run.
        DamagedRunError: If its header is lost or cannot be trusted, so that nothing else can be judged.
    """
    header = read_header(folder)
    if header is None:
        if layout_of(folder) == LAYOUT or not (folder / "zarr.json").exists():
            refuse_remains(folder, has_header=False)
        raise FileNotFoundError(f"{folder} holds no tiled run: it has no {HIDDEN}/{HEADER}")
    specs = [ArraySpec.from_json(value) for value in header["arrays"]]
    by_name = {spec.name: spec for spec in specs}
    for _ in range(LOOKS):
        before = picture_of(folder)
        problems: list[Problem] = []
        others: list[Problem] = []
        records, log_sha256 = read_records(folder, header, problems)
        rows = min(header["rows"], header["tile_rows"] * count_first(records, len(records)))
        finished = _check_manifest(folder, header, by_name, len(records), log_sha256, others)
        others += find_metadata_problems(folder, header, specs, rows, finished=finished)
        if not (problems or others) or picture_of(folder) == before:
            break
    tiles = sorted(records)

    def check(tile: int) -> list[Problem]:
        return list(_tile_problems(folder, header, by_name, records[tile], last=tile == tiles[-1]))

    with ThreadPoolExecutor(2) as pool:  # sha256 lets other threads run
        for found in pool.map(check, tiles):
            problems += found
    if (
        header.get("sequential")
        and problems
        and tiles
        and max(read_records(folder, header, [])[0], default=-1) > tiles[-1]
    ):
        # The run has gone on meanwhile, and has removed what it needs no more.
        problems = [problem for problem in problems if problem.path.parent != state_folder(folder)]
    problems += others
    size = sum(file["bytes"] for record in records.values() for file in record["arrays"].values())
    return Inspection(header, records, tuple(problems), size, finished)


def read_records(
    folder: Path, header: dict[str, Any], problems: list[Problem]
) -> tuple[dict[int, dict[str, Any]], str | None]:
    """The log's record of each tile that it names, and the sha256 of the log (None if it cannot be read).

    Args:
        folder: The root.
        header: What `run.json` says.
        problems: What is wrong with the log is added to them.
    """
    path = folder / HIDDEN / COMMITS
    names = {spec["name"] for spec in header["arrays"] if spec["tile_rows"] is not None}
    try:
        content = read_log(path)
    except FileNotFoundError:
        problems.append(Problem(path, "is missing"))
        return {}, None
    except IsADirectoryError:
        problems.append(Problem(path, FOLDER))
        return {}, None
    for line in content.damaged:
        problems.append(Problem(path, f"line {line} does not fit its checksum; the tile that it named is given up"))
    tiles = count_tiles(header)
    records = {}
    for record in content.records:
        if not 0 <= record["tile"] < tiles or set(record["arrays"]) != names:
            problems.append(Problem(path, f"names tile {record['tile']} with arrays {sorted(record['arrays'])}, which "
                                    f"is not of this run of {tiles} tiles of {sorted(names)}"))  # fmt: skip
            continue
        records[record["tile"]] = record
    return records, content.sha256


def _tile_problems(
    folder: Path, header: dict[str, Any], specs: dict[str, ArraySpec], record: dict[str, Any], *, last: bool
) -> Iterator[Problem]:
    tile = record["tile"]
    for name, file in record["arrays"].items():
        path = specs[name].folder(folder) / specs[name].shard_name(tile)
        if file["bytes"] and (what := _file_problem(path, file)):
            yield Problem(path, what, tile, name)
    if "state" in record and (last or not header.get("sequential")):
        path = state_folder(folder) / f"{tile}.bin"
        if what := _file_problem(path, record["state"]):
            yield Problem(path, what, tile)


def _file_problem(path: Path, file: dict[str, Any]) -> str | None:
    try:
        if path.is_dir():
            return FOLDER
        size = path.stat().st_size
        if size != file["bytes"]:
            return f"has {size} bytes and not {file['bytes']}: it was truncated or replaced"
        if digest_of_file(path) != file["sha256"]:
            return "holds other bits than were committed"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    return None


def find_metadata_problems(
    folder: Path, header: dict[str, Any], specs: list[ArraySpec], rows: int, *, finished: bool
) -> Iterator[Problem]:
    """What differs from what was written in the `zarr.json` of any node.

    Args:
        folder: The root.
        header: What `run.json` says.
        specs: The arrays.
        rows: Rows that are committed without a gap.
        finished: Whether the run is.
    """
    yield from check_metadata(folder, run_root(header["run_id"], header["provenance"]))
    yield from check_metadata(folder / HIDDEN, group_metadata({}))
    made = [spec.name for spec in specs if spec.tile_rows is not None or finished]
    for group in dict.fromkeys(group for name in made for group in group_folders(folder, name)):
        yield from check_metadata(group, group_metadata({}))
    for spec in specs:
        if spec.tile_rows is None:
            if finished:
                yield from check_metadata(spec.folder(folder), metadata_of(header, spec.name), spec.name)
            continue
        # While a run goes on, an array's length is behind what is committed; never ahead of it.
        yield from check_metadata(
            spec.folder(folder), metadata_of(header, spec.name, rows), spec.name, at_most=not finished
        )


def check_metadata(
    folder: Path, expected: dict[str, Any], name: str | None = None, *, at_most: bool = False
) -> Iterator[Problem]:
    """What differs in a folder's `zarr.json` from what it should say, but for attributes that were added.

    Args:
        folder: Of the node.
        expected: What it should say.
        name: Of the array, if it is one.
        at_most: Whether it may have fewer rows.
    """
    path = folder / "zarr.json"
    try:
        found = read_metadata(folder)
    except (FileNotFoundError, NotADirectoryError):
        yield Problem(path, "is missing", array=name)
        return
    except IsADirectoryError:
        yield Problem(path, FOLDER, array=name)
        return
    except ValueError as error:
        yield Problem(path, f"is no JSON ({error})", array=name)
        return
    if not isinstance(found, dict):
        yield Problem(path, f"holds a JSON {type(found).__name__}, where a node of Zarr is an object", array=name)
        return
    if at_most and _is_shape(found.get("shape")):
        if not 0 <= found["shape"][0] <= expected["shape"][0]:
            yield Problem(path, f"says {found['shape'][0]} rows where {expected['shape'][0]} are committed", array=name)
            return
        found = {**found, "shape": [expected["shape"][0], *found["shape"][1:]]}
    attributes, own = found.get("attributes"), expected.get("attributes")
    if isinstance(attributes, dict):  # such as units, which anybody may add
        kept = {key: attributes[key] for key in own or {} if key in attributes}
        found = {**found, "attributes": kept if kept or own is not None else None}
    # Versions of zarr differ in whether they write out that there is nothing.
    differing = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    if differing:
        yield Problem(path, f"was changed: {', '.join(sorted(differing))}", array=name)


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, list) and bool(shape) and all(type(n) is int for n in shape)


def _check_manifest(
    folder: Path,
    header: dict[str, Any],
    specs: dict[str, ArraySpec],
    tiles: int,
    log_sha256: str | None,
    problems: list[Problem],
) -> bool:
    path = folder / HIDDEN / MANIFEST
    try:
        manifest = read_manifest(folder)
    except DamagedRunError as error:
        problems.append(Problem(path, str(error).removeprefix(f"{path} ")))
        return True
    if manifest is None:
        return False
    expected = {"run_id": header["run_id"], "rows": header["rows"], "tiles": tiles}
    if log_sha256 is not None:
        expected["log_sha256"] = log_sha256
    differing = [name for name, value in expected.items() if manifest.get(name) != value]
    if differing:
        problems.append(Problem(path, f"does not fit the log and the header: {', '.join(differing)}"))
    for name, file in manifest["finals"].items():
        shard = specs[name].folder(folder) / specs[name].shard_name(0)
        if what := _file_problem(shard, file):
            problems.append(Problem(shard, what, array=name))
    return True
