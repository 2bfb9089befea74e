"""What a store says when the disk fails it: the cause, what is safe, and what to do."""

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping
from pathlib import Path
from typing import Any

from xtrax.run._appended.commit_log import read_log
from xtrax.run._appended.files import COMMITS, HEADER, DamagedRunError, count_tiles, read_header
from xtrax.run._appended.shards import ArraySpec, find_lost
from xtrax.run._errors import SinkError
from xtrax.run._names import HIDDEN


@contextlib.contextmanager
def as_sink_error(folder: Path, what: str, known: Callable[[], tuple[Collection[int], int]]) -> Generator[None]:
    """Turn an `OSError` into a `SinkError` that says which tiles are committed.

    Args:
        folder: The store.
        what: What failed, as in "could not be written to".
        known: Returns the committed tiles as far as the caller knows any, and how many tiles there are.
    """
    try:
        yield
    except SinkError:
        raise
    except OSError as error:
        saved, safe = _safe(folder, *known())
        message = f"{folder} {what}: {error}. {safe}"
        raise SinkError(message, path=folder, saved=[(tile,) for tile in saved]) from error


def _safe(folder: Path, committed: Collection[int], tiles: int) -> tuple[list[int], str]:
    """The tiles that are committed, as the disk shows it now, and a sentence about them and those that are gone."""
    try:
        header = read_header(folder)
        log = () if header is None else read_log(folder / HIDDEN / COMMITS).records
    except (OSError, DamagedRunError) as error:
        if committed and not isinstance(error, FileNotFoundError | DamagedRunError):
            return [], (
                f"{len(committed)} of {tiles} tiles were committed, but cannot be looked at now ({error}); remove the "
                "cause and run again"
            )
        if not committed:
            return [], "What was committed there is as it was; remove the cause and run again"
        header, log = None, ()
    if header is None and not committed:
        return [], "Nothing is committed there; remove the cause and run again, or choose another output_dir"
    safe, gone = {}, set(committed)
    if header is not None:
        tiles = count_tiles(header)
        safe = {record["tile"]: record for record in log if 0 <= record["tile"] < tiles}
        gone |= safe.keys()
        for tile, _ in find_lost_tiles(folder, header, safe):
            safe.pop(tile, None)
        gone -= safe.keys()
    told = f"{len(safe)} of {tiles} tiles are committed and safe"
    if not gone:
        return sorted(safe), f"{told}; remove the cause and run again with the same run_id to go on from there"
    told += f", and {len(gone)} that were committed are gone, for their files were removed or changed. Restore them"
    if header is None:
        return [], f"{told} from a copy, or run anew in another output_dir: {HIDDEN}/{HEADER} is gone too"
    return sorted(safe), f"{told} from a copy, or remove the cause and run again to compute them anew"


def find_lost_tiles(
    folder: Path, header: Mapping[str, Any], records: Mapping[int, Mapping[str, Any]]
) -> list[tuple[int, str]]:
    """Committed tiles of which a shard is not there, or has another size, and what is wrong with it."""
    lost = []
    for spec in map(ArraySpec.from_json, header["arrays"]):
        if spec.tile_rows is not None:
            sizes = {tile: record["arrays"][spec.name]["bytes"] for tile, record in records.items()
                     if spec.name in record["arrays"]}  # fmt: skip
            lost += find_lost(folder, spec, sizes)
    return lost
