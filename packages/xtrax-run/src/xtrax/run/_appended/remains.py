"""What is left of a run whose own files are gone, so that no other run is written over its results."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from xtrax.run._appended.files import COMMITS, HEADER, MANIFEST, DamagedRunError
from xtrax.run._appended.shards import state_folder
from xtrax.run._names import HIDDEN

_SHARD = re.compile(r"c(\.\d+)+")


def refuse_remains(folder: Path, *, has_header: bool) -> None:
    """Raise if results of a run lie in a folder without the header or the log, which say what they are.

    The log is made before the header, and a shard is written after it. So without a line in the log, a shard, a state
    and a manifest nothing is lost: the making of the run was cut short.

    Args:
        folder: The root of a tiled run, or of what may be one.
        has_header: Whether its header was there.

    Raises:
        DamagedRunError: If there are any; it names what is missing and what is there.
    """
    log = folder / HIDDEN / COMMITS
    if has_header and log.is_file():
        return
    there = [str(path.relative_to(folder)) for path in _remains(folder, has_header=has_header)]
    missing = log if has_header else folder / HIDDEN / HEADER
    if there and not missing.is_file():  # a live run may have made it meanwhile
        what = "is a folder" if missing.exists() else "is missing"
        raise DamagedRunError(
            f"{missing} {what}, but {' and '.join(there)} of a run are there; without it nobody can tell what was "
            "committed. Restore it from a copy, or move the folder away (or choose another output_dir) to begin anew"
        )


def _remains(folder: Path, *, has_header: bool) -> Iterator[Path]:
    """One of each kind of file that a run writes once it has a header."""
    log, manifest, states = folder / HIDDEN / COMMITS, folder / HIDDEN / MANIFEST, state_folder(folder)
    if not has_header and not any(path.exists() for path in (folder / "zarr.json", log, manifest, states)):
        return  # no run was ever made in this folder, which may hold very many other files
    if log.is_file() and log.stat().st_size:
        yield log
    if manifest.exists():
        yield manifest
    yield from sorted(states.glob("*.bin"))[:1]
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != HIDDEN)
        for name in sorted(files):
            if _SHARD.fullmatch(name):
                yield Path(where, name)
                return
