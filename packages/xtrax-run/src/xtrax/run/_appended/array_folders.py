"""The folders of a run's arrays: what in them is the run's own, so that nothing else is ever removed."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from xtrax.run._appended.files import group_folders, group_metadata, is_group, put_json
from xtrax.run._appended.shards import PARTIAL, ArraySpec, array_metadata, flush
from xtrax.run._fsync import fsync_directory

_METADATA = ("zarr.json", f"zarr.json{PARTIAL}")
_SHARD = re.compile(rf"c(\.\d+)*({re.escape(PARTIAL)})?")


def find_foreign(root: Path, specs: Sequence[ArraySpec], before: Sequence[ArraySpec]) -> tuple[ArraySpec, Path] | None:
    """An array in whose folder lies what no run wrote, and what that is; None if there is none.

    Args:
        root: The store.
        specs: The arrays that are to be made.
        before: Those of the run that they replace.
    """
    own = {folder for spec in before for folder in (spec.folder(root), *spec.folder(root).parents)}
    had_run = (root / "zarr.json").exists()  # it is durable before the first shard is written
    for spec in specs:
        folder = spec.folder(root)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            is_file = path.name in _METADATA or (had_run and _is_shard(path))
            if path not in own and (path.is_dir() or not is_file):
                return spec, path
    return None


def make_array(root: Path, spec: ArraySpec) -> None:
    """Make an array's folder and groups, durably; without rows, if it has a row axis and is not there."""
    folder, groups = spec.folder(root), group_folders(root, spec.name)
    for group in groups:
        group.mkdir(exist_ok=True)
        if not is_group(group):
            put_json(group, group_metadata({}))
    folder.mkdir(exist_ok=True)
    if spec.tile_rows is not None and not (folder / "zarr.json").is_file():
        put_json(folder, array_metadata(spec, 0))
    flush({root, *groups, folder})


def remove_array(folder: Path) -> None:
    """Remove what a run wrote of an array, durably, and its folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if (path.name in _METADATA or _is_shard(path)) and not path.is_dir():
            path.unlink()
    fsync_directory(folder)
    with contextlib.suppress(OSError):  # something else is in it
        folder.rmdir()


def _is_shard(path: Path) -> bool:
    return _SHARD.fullmatch(path.name) is not None
