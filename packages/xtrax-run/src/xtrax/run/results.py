"""Read a run's output back, whatever kind of run it was."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.storage import LocalStore, StorePath

from xtrax.run._appended.files import (
    COMMITS,
    HEADER,
    LAYOUT,
    LOOKS,
    MANIFEST,
    DamagedRunError,
    count_first,
    count_tiles,
    layout_of,
    metadata_of,
    picture_of,
    read_header,
    read_manifest,
)
from xtrax.run._appended.inspection import Problem, check_metadata, read_records
from xtrax.run._appended.remains import refuse_remains
from xtrax.run._appended.shards import ArraySpec, find_lost
from xtrax.run._checks import check_folder
from xtrax.run._names import HIDDEN
from xtrax.run._words import plural

if TYPE_CHECKING:
    import xarray

__all__ = ["Results", "open_results"]

_WHAT_TO_DO = "verify_store tells all that is damaged, and the run's own call of run_tiled computes it again"


@dataclass(frozen=True, eq=False)
class Results(Mapping[str, Any]):
    """A run's output: a mapping from the names of its arrays to the arrays.

    Attributes:
        path: The folder.
        arrays: The arrays by name (`"loss"`, `"aux/loss"`), lazy: a Zarr array is read where it is indexed.
        provenance: Where the results come from: `run_id`, `created_at`, `git`, `versions`, device.
        timings: Seconds, by what they were spent on, as far as the run recorded them.
        state: How far the run is. A tiled run: `finished`, `tiles`, `committed`. A training run: what its manifest
            says, and `checkpoints`, the steps that can be resumed from.
    """

    path: Path
    arrays: Mapping[str, Any]
    provenance: Mapping[str, Any]
    timings: Mapping[str, float]
    state: Mapping[str, Any]
    _dims: Mapping[str, tuple[str, ...]] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        """The array of a name."""
        try:
            return self.arrays[name]
        except KeyError:
            raise KeyError(f"{self.path} has no array {name!r}; it has {sorted(self.arrays)}") from None

    def __iter__(self) -> Iterator[str]:
        """The names of the arrays."""
        return iter(self.arrays)

    def __len__(self) -> int:
        """How many arrays there are."""
        return len(self.arrays)

    def __repr__(self) -> str:
        """What there is, a line for each array; none is read."""
        width = max(map(len, self.arrays), default=0)
        lines = [f"  {name:{width}}  {array.dtype} {array.shape}" for name, array in self.arrays.items()]
        head = ", ".join([f"run {self.provenance.get('run_id')} in {self.path}", *_told(self.state)])
        return "\n".join([f"{head}: {plural(len(lines), 'array')}", *lines])

    __eq__, __hash__ = object.__eq__, object.__hash__  # comparing arrays would read them

    @property
    def dataset(self) -> "xarray.Dataset":
        """The arrays as an xarray `Dataset`, loaded where they are used.

        Raises:
            ImportError: If xarray is not installed (`pip install "xtrax-run[xarray]"`).
        """
        try:
            import xarray  # an optional extra
        except ImportError as error:
            raise ImportError(
                "an xarray Dataset needs xarray, which is not installed; install xtrax-run[xarray], or use .arrays"
            ) from error
        from xarray.core import indexing

        variables = {}
        for name, array in self.arrays.items():
            lazy = array if isinstance(array, np.ndarray) else indexing.LazilyIndexedArray(_lazy(array))
            variables[name] = xarray.Variable(self._dims[name], lazy)
        return xarray.Dataset(variables, attrs=dict(self.provenance))


def _told(state: Mapping[str, Any]) -> Iterator[str]:
    """How far a run is, in words, as far as its state says."""
    if "finished" in state:
        yield "finished" if state["finished"] else "not finished"
    if "status" in state:
        yield str(state["status"])
    if "tiles" in state:
        yield f"{state['committed']} of {plural(state['tiles'], 'tile')} committed"
    if state.get("checkpoints"):
        yield f"checkpoints at {', '.join(map(str, state['checkpoints']))}"


def _lazy(array: zarr.Array) -> Any:
    """A Zarr array as xarray reads one."""
    from xarray.backends import BackendArray
    from xarray.core import indexing

    class Lazy(BackendArray):
        shape = array.shape
        dtype = array.dtype

        def __getitem__(self, key: Any) -> Any:
            return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, read)

    def read(index: tuple[Any, ...]) -> Any:
        # Numbers as slices of one, since zarr 3.1 confuses the dimensions of arrays and numbers in one index.
        numbers = [isinstance(part, int | np.integer) for part in index]
        kept = tuple(slice(part, part + 1) if one else part for part, one in zip(index, numbers, strict=True))
        values = array.get_orthogonal_selection(kept) if kept else array[()]
        return np.asarray(values)[tuple(0 if one else slice(None) for one in numbers)]

    return Lazy()


def open_results(output_dir: str | os.PathLike[str]) -> Results:
    """Open what a run has left, without reading its arrays. The run may be going on, killed or finished.

    Of a tiled run it is checked, once, that its header, log and manifest and the `zarr.json` of each array are what was
    written, and that the shards of the rows that are shown are there and have the sizes that were committed;
    `verify_store` reads them too.

    Args:
        output_dir: The folder: that of `run_tiled`, of a keyed Zarr sink, or of a training run of the command line.

    Returns:
        The results. Of a tiled run that is not finished, the rows that the log commits without a gap. A plain Zarr
        reader may see fewer: the length in `zarr.json` is behind while the run goes on, and after a kill.

    Raises:
        TypeError: If `output_dir` is no path.
        FileNotFoundError: If there is no such folder, or no run's output in it; also before a run has started, or if
            its start was killed.
        DamagedRunError: If a tiled run's header, log, manifest or `zarr.json` was changed, or a file of it is missing
            or has another size; `verify_store` tells more.

    Examples:
        >>> import tempfile, warnings, jax.numpy as jnp, numpy as np
        >>> from xtrax.run import SinkSpec, run_tiled
        >>> from xtrax.tiling import AxisSpec
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # no git repository here
        ...     _ = run_tiled(
        ...         lambda x: {"twice": 2 * x}, np.arange(4.0), specs=[AxisSpec("n", 4, 4)],
        ...         sink=SinkSpec(folder, run_id="demo"), progress="off",
        ...     )
        >>> results = open_results(folder)
        >>> results["twice"][:].tolist(), results.state["finished"], results.provenance["run_id"]
        ([0.0, 2.0, 4.0, 6.0], True, 'demo')
    """
    path = check_folder(output_dir, "output_dir", "the folder of a run")
    for _ in range(LOOKS - 1):
        before = picture_of(path)
        try:
            return _open(path)
        except (DamagedRunError, FileNotFoundError):
            # What does not fit together is wrong only if nobody has written meanwhile.
            if picture_of(path) == before:
                raise
    return _open(path)


def _open(path: Path) -> Results:
    header = read_header(path)  # the last file that is written when a run is made
    if header is not None:
        refuse_remains(path, has_header=True)
        return _tiled(path, header)
    # In this order: a run that is being made gets its root, with the layout, between any two looks at it.
    has_root, layout = (path / "zarr.json").exists(), layout_of(path)
    if has_root and layout != LAYOUT:
        return _keyed(path)
    refuse_remains(path, has_header=False)
    if layout == LAYOUT:
        raise FileNotFoundError(
            f"{path} holds a run that has not started: its {HIDDEN}/{HEADER} is not written yet, and nothing is "
            "committed. If run_tiled is not at it now, its start was stopped; the same call makes it anew"
        )
    if (path / "manifest.json").exists() or (path / "metrics.zarr").exists():
        return _training(path)
    raise FileNotFoundError(
        f"{path} holds no output that is known here: neither of run_tiled, nor of a Zarr sink, nor of a training run"
    )


def _tiled(path: Path, header: dict[str, Any]) -> Results:
    # The manifest is written last, so it is read first; the log before the shards: what it names is there.
    manifest = read_manifest(path)
    problems: list[Problem] = []
    records, log_sha256 = read_records(path, header, problems)
    _refuse(problems)
    if manifest is not None and (manifest["log_sha256"], manifest["tiles"]) != (log_sha256, len(records)):
        raise DamagedRunError(
            f"{path / HIDDEN / COMMITS} was cut or changed: it names {len(records)} tiles, and is not the log that "
            f"{HIDDEN}/{MANIFEST} was written for, when the run finished with {manifest['tiles']}; {_WHAT_TO_DO}"
        )
    shown = range(count_first(records, count_tiles(header)))
    rows = min(header["rows"], len(shown) * header["tile_rows"])
    arrays, dims = {}, {}
    for spec in map(ArraySpec.from_json, header["arrays"]):
        if spec.tile_rows is None and manifest is None:
            continue  # written when the run ends
        arrays[spec.name] = _open_array(path, header, spec, rows)
        dims[spec.name] = _dim_names(spec.name, spec.dims)
        if spec.tile_rows is not None:
            _check_sizes(path, spec, {tile: records[tile]["arrays"][spec.name]["bytes"] for tile in shown})
        elif manifest is not None and spec.name in manifest["finals"]:
            _check_sizes(path, spec, {0: manifest["finals"][spec.name]["bytes"]})
    timings: dict[str, float] = {}
    for record in records.values():
        for name, seconds in record.items():
            if name.startswith("seconds_"):
                kind = name.removeprefix("seconds_")
                timings[kind] = round(timings.get(kind, 0.0) + seconds, 6)
    state = {
        "finished": manifest is not None,
        "tiles": count_tiles(header),
        "committed": len(records),
        "rows": header["rows"],
    }
    provenance = {"run_id": header["run_id"], **header["provenance"]}
    return _results(path, arrays, provenance, timings, state, dims)


def _refuse(problems: Iterable[Problem]) -> None:
    for problem in problems:
        raise DamagedRunError(f"{problem}; {_WHAT_TO_DO}")


def _open_array(path: Path, header: dict[str, Any], spec: ArraySpec, rows: int) -> zarr.Array:
    """An array with the rows that the log has: those that `zarr.json` says are behind, for good after a kill."""
    folder, grows = spec.folder(path), spec.tile_rows is not None
    expected = metadata_of(header, spec.name, rows if grows else None)
    _refuse(check_metadata(folder, expected, spec.name, at_most=grows))
    return zarr.Array.from_dict(StorePath(LocalStore(folder, read_only=True)), expected)


def _check_sizes(path: Path, spec: ArraySpec, sizes: Mapping[int, int]) -> None:
    """Zarr reads a shard that is not there as zeros."""
    for tile, what in find_lost(path, spec, sizes):
        where = f"array {spec.name!r}" if spec.tile_rows is None else f"tile {tile} of array {spec.name!r}"
        raise DamagedRunError(f"{where} is damaged: {what}; {_WHAT_TO_DO}")


def _keyed(path: Path) -> Results:
    group = zarr.open_group(path, mode="r")
    arrays = dict(_walk(group, skip=HIDDEN))
    dims = {name: _dim_names(name, array.metadata.dimension_names or (None,) * array.ndim)
            for name, array in arrays.items()}  # fmt: skip
    return _results(path, arrays, dict(group.attrs), {}, {}, dims)


def _training(path: Path) -> Results:
    manifest = {}
    if (path / "manifest.json").exists():
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    arrays: dict[str, Any] = {}
    if (path / "metrics.zarr").is_dir():
        arrays = dict(_walk(zarr.open_group(path / "metrics.zarr", mode="r")))
    dims = {name: (f"{name.rpartition('/')[0] or name}_row",) for name in arrays}
    provenance = {"run_id": manifest.get("run_id", path.name), **manifest.get("provenance", {})}
    state = {name: value for name, value in manifest.items() if name != "provenance"}
    folder = path / "checkpoints"
    steps = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []
    timings = {name: value for name, value in manifest.items() if name.endswith("seconds") and _is_number(value)}
    return _results(path, arrays, provenance, timings, {**state, "checkpoints": steps}, dims)


def _results(path: Path, arrays: Any, provenance: Any, timings: Any, state: Any, dims: Any) -> Results:
    return Results(path, *map(MappingProxyType, (arrays, provenance, timings, state, dims)))


def _walk(group: zarr.Group, prefix: str = "", skip: str | None = None) -> Any:
    for name, node in sorted(group.members()):
        if isinstance(node, zarr.Array):
            yield prefix + name, node
        elif name != skip:
            yield from _walk(node, f"{prefix}{name}/")


def _dim_names(name: str, dims: Any) -> tuple[str, ...]:
    """Names that xarray needs, where an array has none."""
    return tuple(dim if dim is not None else f"{name}_dim_{i}" for i, dim in enumerate(dims))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
