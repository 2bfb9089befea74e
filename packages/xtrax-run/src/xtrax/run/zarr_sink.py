"""Results as a Zarr v3 store: staged by key, or appended by a tiled run."""

import os
from dataclasses import dataclass
from typing import ClassVar

from xtrax.run._appended.shards import COMPRESSIONS, Compression
from xtrax.run._checks import check_output_dir, check_run_id
from xtrax.run._staged.sink import BufferedSink, Writer
from xtrax.run._staged.zarr_keyed import KeyedZarrWriter


class ZarrStagingSink(BufferedSink):
    """Stages results by key into a Zarr v3 store: the key is the group's path, `("fold", 3)` the group `fold/3`.

    `output_dir` is the store's root; the root's attributes are the run's provenance. A drained key is on the disk whole
    (`fsync`), or not at all: no kill or full disk leaves half a group. Arrays are not compressed.

    Each key costs several files and flushes, so this layout is for thousands of results, not millions.

    Args:
        output_dir: The store's root, made if missing.
        flush_every: Drain after this many calls of `stage`.
        run_id: The run; needed to go on with one that is there. `None`: a new id.
        extension_schema: Types of the attributes that callers may set, by name; `None`: any.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument has a wrong value, or the folder holds another run, format or layout.
        SinkError: If the folder cannot be written, or a live sink writes there.

    Examples:
        >>> import tempfile, warnings, numpy as np, zarr
        >>> folder = tempfile.mkdtemp()
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # no git repository here
        ...     with ZarrStagingSink(folder, run_id="demo") as sink:
        ...         sink.stage(("fold", 3), attrs={"loss": 0.25}, weights=np.arange(3.0))
        >>> group = zarr.open_group(folder, mode="r")
        >>> group["fold/3/weights"][:]
        array([0., 1., 2.])
        >>> group["fold/3"].attrs["loss"], group.attrs["run_id"]
        (0.25, 'demo')
    """

    _writer_class: ClassVar[type[Writer]] = KeyedZarrWriter


@dataclass(frozen=True)
class AppendedZarrSink:
    """Where `run_tiled` puts its output, with more to choose than a `SinkSpec` has. Touches no disk.

    The store has one growing array for each output, whose leading axis is the run's; a shard is a tile.

    Args:
        output_dir: The store's root, for one run.
        run_id: The run; None as in `run_tiled`.
        compression: `"zstd"`, `"lz4"` or `"gzip"` at their quickest, or None for none. Random-looking numbers do not
            shrink, and compressing them costs more than writing them.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If it has a wrong value.

    Examples:
        >>> AppendedZarrSink("results", compression="zstd").compression
        'zstd'
    """

    output_dir: str | os.PathLike[str]
    run_id: str | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        """Refuse bad arguments."""
        check_output_dir(self.output_dir)
        check_run_id(self.run_id)
        if self.compression is not None and not isinstance(self.compression, str):
            raise TypeError(f"compression must be a string or None, not {type(self.compression).__name__}")
        if self.compression is not None and self.compression not in COMPRESSIONS:
            raise ValueError(
                f"compression is {self.compression!r}; allowed are {', '.join(map(repr, COMPRESSIONS))} and None"
            )
