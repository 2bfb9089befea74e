"""Where results go: what describes a sink, and the sink that it makes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, runtime_checkable

import numpy as np

from xtrax.run._checks import check_flush_every, check_output_dir, check_run_id, new_run_id
from xtrax.run._errors import Key, SinkError
from xtrax.run._staged.sink import BufferedSink
from xtrax.run._values import check_schema
from xtrax.run.h5_sink import H5StagingSink
from xtrax.run.jsonl_sink import JsonlStagingSink
from xtrax.run.spec import RunSpec
from xtrax.run.zarr_sink import ZarrStagingSink

__all__ = ["SinkError", "SinkSpec", "StagingSink", "derive_sink_spec", "make_sink", "new_run_id"]

SinkFormat = Literal["jsonl", "h5", "zarr", "none"]
_SINKS: dict[str, type[BufferedSink]] = {"jsonl": JsonlStagingSink, "h5": H5StagingSink, "zarr": ZarrStagingSink}


@runtime_checkable
class StagingSink(Protocol):
    """Buffers named arrays by key and writes them durably, a few at a time.

    Keys are tuples of ints and strings, `("fold", 3)`; one that could leave the folder is refused. Every drain is
    durable when it returns. A killed process, a full disk or a vanished folder harms nothing that was drained.
    """

    def stage(self, key: Key, attrs: Mapping[str, Any] | None = None, **arrays: Any) -> None:
        """Buffer arrays and attributes of a key, merging with what it has; drain when it is time."""
        ...

    def take(self, key: Key) -> dict[str, np.ndarray]:
        """Return and drop the buffered arrays of a key; `KeyError` if there are none."""
        ...

    def drain(self) -> None:
        """Write all that is buffered; `SinkError` if the disk does not take it."""
        ...

    def finalize(self) -> None:
        """Drain and let other writers in; `stage` raises `RuntimeError` from then on."""
        ...

    def __len__(self) -> int:
        """How many keys are buffered."""
        ...

    def __enter__(self) -> Self:
        """The sink itself."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finalize."""
        ...


@dataclass(frozen=True)
class SinkSpec:
    """Describes a sink; touches no disk. `make_sink` opens it.

    Args:
        output_dir: The folder for the output of one run; needed by every format but `"none"`.
        format: `"zarr"` (a group a key), `"jsonl"` (a line a key), `"h5"` (a group a key in one file; needs h5py),
            or `"none"`.
        flush_every: Drain after this many calls of `stage`.
        run_id: The run; needed to go on with one that is there. `None`: `make_sink` chooses a new id.
        extension_schema: Types of the attributes that callers may set, by name, such as `{"loss": float}`; an
            attribute that is not in it, or of another type, is refused. `None`: any.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument has a wrong value.

    Examples:
        >>> SinkSpec("results", format="jsonl", flush_every=100).format
        'jsonl'
    """

    output_dir: str | os.PathLike[str] | None = None
    format: SinkFormat = "zarr"
    flush_every: int = 1
    run_id: str | None = None
    extension_schema: Mapping[str, type | tuple[type, ...]] | None = None

    def __post_init__(self) -> None:
        """Refuse bad arguments."""
        if self.output_dir is not None:
            check_output_dir(self.output_dir)
        if not isinstance(self.format, str):
            raise TypeError(f"format must be a string, not {type(self.format).__name__}: {self.format!r}")
        if self.format not in (*_SINKS, "none"):
            raise ValueError(f"format is {self.format!r}; allowed are {', '.join(map(repr, (*_SINKS, 'none')))}")
        check_flush_every(self.flush_every)
        check_run_id(self.run_id)
        check_schema(self.extension_schema)


def make_sink(spec: SinkSpec) -> StagingSink | None:
    """Open the sink that a spec describes.

    Args:
        spec: The description.

    Returns:
        The sink, which holds the folder's lock until it is finalized; `None` for the format `"none"`.

    Raises:
        TypeError: If `spec` is no `SinkSpec`.
        ValueError: If it has no `output_dir`, or the folder holds another run, format or layout.
        SinkError: If the folder cannot be written, or a live sink writes there.
        ImportError: If the format is `"h5"` and h5py is not installed.

    Examples:
        >>> make_sink(SinkSpec(format="none")) is None
        True
    """
    if not isinstance(spec, SinkSpec):
        raise TypeError(f"spec must be a SinkSpec, not {type(spec).__name__}: {spec!r}")
    if spec.format == "none":
        return None
    if spec.output_dir is None:
        raise ValueError(f"output_dir is None; the format {spec.format!r} needs a folder: SinkSpec(output_dir=...)")
    return _SINKS[spec.format](
        spec.output_dir,
        flush_every=spec.flush_every,
        run_id=spec.run_id,
        extension_schema=spec.extension_schema,
    )


def derive_sink_spec(
    run_spec: RunSpec,
    *,
    output_dir: str | os.PathLike[str] | None,
    format: SinkFormat = "zarr",
    run_id: str | None = None,
) -> SinkSpec:
    """The sink of a run, with the run's id.

    Args:
        run_spec: The run.
        output_dir: The folder for its output.
        format: As in `SinkSpec`.
        run_id: The id; if `None` the run spec's, and if that is `None` too a new one.

    Returns:
        A `SinkSpec` whose `run_id` is set.

    Raises:
        TypeError: If `run_spec` is no `RunSpec`, or another argument of the wrong type.
        ValueError: If both ids are given and differ, or another argument has a wrong value.

    Examples:
        >>> from xtrax.run.spec import RunSpec
        >>> spec = derive_sink_spec(RunSpec(seed=0, axes=[], run_id="demo"), output_dir="results")
        >>> spec.run_id, spec.format
        ('demo', 'zarr')
    """
    if not isinstance(run_spec, RunSpec):
        raise TypeError(f"run_spec must be a RunSpec, not {type(run_spec).__name__}: {run_spec!r}")
    check_run_id(run_id)
    if run_id is not None and run_spec.run_id is not None and run_id != run_spec.run_id:
        raise ValueError(f"run_id is {run_id!r}, but run_spec.run_id is {run_spec.run_id!r}; give one of them")
    return SinkSpec(output_dir=output_dir, format=format, run_id=run_id or run_spec.run_id or new_run_id())
