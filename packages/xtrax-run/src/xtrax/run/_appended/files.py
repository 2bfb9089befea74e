"""The files of a tiled run, apart from its shards."""

import hashlib
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from xtrax.run._appended.commit_log import is_sealed, put_in_place, write_file
from xtrax.run._appended.shards import PARTIAL
from xtrax.run._names import HIDDEN

FORMAT = 1
LAYOUT = "appended-1"
COMMITS = "commits.jsonl"
HEADER = "run.json"
MANIFEST = "manifest.json"
FOLDER = "is a folder, where a run keeps a file"
LOOKS = 10  # at most, at a run that is written meanwhile


class DamagedRunError(ValueError):
    """A run's own files are not what was written, or a committed tile is damaged that cannot be computed again."""


def picture_of(folder: Path) -> list[tuple[int, ...] | None]:
    """What differs if a run has started or gone on in between; then what does not fit together may be no damage."""
    seen: list[tuple[int, ...] | None] = []
    for file in (folder / HIDDEN / HEADER, folder / HIDDEN / MANIFEST, folder / HIDDEN / COMMITS, folder / "zarr.json"):
        try:
            found = os.stat(file)
        except (FileNotFoundError, NotADirectoryError):
            seen.append(None)
        else:
            seen.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return seen


def read_header(folder: Path) -> dict[str, Any] | None:
    """The header of a run; None if there is none.

    Raises:
        DamagedRunError: If it is not what was written, or written by a version that is not known here.
    """
    return read_sealed(folder / HIDDEN / HEADER)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a run; None if the run is not finished.

    Raises:
        DamagedRunError: If it is not what was written, or written by a version that is not known here.
    """
    return read_sealed(folder / HIDDEN / MANIFEST)


def read_sealed(path: Path) -> dict[str, Any] | None:
    """A JSON file with a checksum of itself; None if it is not there."""
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        raise DamagedRunError(f"{path} {FOLDER}") from None
    try:
        value = json.loads(data)
    except ValueError as error:
        raise DamagedRunError(f"{path} is no JSON ({error}); it was changed after it was written") from None
    if not is_sealed(value):
        raise DamagedRunError(f"{path} does not fit its own checksum; it was changed after it was written")
    if value.get("format") != FORMAT:
        raise DamagedRunError(f"{path} has format {value.get('format')!r}; this version of xtrax.run knows {FORMAT}")
    return value


def put_json(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Replace a folder's `zarr.json`; durable once the folder is flushed."""
    temporary = folder / f"zarr.json{PARTIAL}"
    write_file(temporary, json.dumps(metadata, allow_nan=False).encode())
    put_in_place(temporary, folder / "zarr.json")


def group_metadata(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """What `zarr.json` says of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def group_folders(root: Path, name: str) -> list[Path]:
    """The groups in which an array of a name with `/` lies, the outermost first."""
    parts = name.split("/")
    return [root.joinpath(*parts[:i]) for i in range(1, len(parts))]


def is_group(folder: Path) -> bool:
    """Whether a folder's `zarr.json` says that it is a group, and nothing else."""
    try:
        return read_metadata(folder) == group_metadata({})
    except (FileNotFoundError, ValueError):
        return False


def run_root(run_id: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What the root's `zarr.json` says."""
    return group_metadata({"run_id": run_id, "layout": LAYOUT, **provenance})


def layout_of(folder: Path) -> Any:
    """The layout that the root's `zarr.json` names; None if it names none, or is not there."""
    try:
        return read_metadata(folder)["attributes"]["layout"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def metadata_of(header: Mapping[str, Any], name: str, rows: int | None = None) -> dict[str, Any]:
    """What `zarr.json` says of an array of a run, when it has so many rows (None: it has no row axis)."""
    metadata = header["metadata"][name]
    return metadata if rows is None else {**metadata, "shape": [rows, *metadata["shape"][1:]]}


def read_metadata(folder: Path) -> Any:
    """What a folder's `zarr.json` says.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no JSON.
    """
    return json.loads((folder / "zarr.json").read_bytes())


def count_tiles(header: Mapping[str, Any]) -> int:
    """How many tiles a run has."""
    return -(-header["rows"] // header["tile_rows"])


def count_first(committed: Container[int], tiles: int) -> int:
    """How many tiles are committed before the first that is not."""
    return next(i for i in range(tiles + 1) if i not in committed)


def digest_of_file(path: Path) -> str:
    """The sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
