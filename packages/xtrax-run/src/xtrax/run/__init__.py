"""A run: what goes in, what comes out, and what survives. Importing it imports no jax."""

import importlib
from typing import TYPE_CHECKING, Any

from xtrax.config import __version__
from xtrax.run._json import write_json_atomic
from xtrax.run._provenance import collect_provenance

if TYPE_CHECKING:
    from xtrax.run.h5_sink import H5StagingSink
    from xtrax.run.jsonl_sink import JsonlStagingSink, Record, read_jsonl, read_jsonl_provenance
    from xtrax.run.pipeline import RunReport, run_tiled
    from xtrax.run.resolver import FeatureBatch, InputResolver, RuntimeBundle
    from xtrax.run.results import Results, open_results
    from xtrax.run.sink import SinkError, SinkSpec, StagingSink, derive_sink_spec, make_sink, new_run_id
    from xtrax.run.spec import RunSpec
    from xtrax.run.zarr_integrity import (
        DamagedRunError,
        IntegrityReport,
        canonical_json_bytes,
        fsync_directory,
        fsync_file,
        fsync_tree,
        normalize_json_value,
        update_array_digest,
        update_zarr_node_digest,
        verify_store,
        zarr_content_digest,
    )
    from xtrax.run.zarr_sink import AppendedZarrSink, ZarrStagingSink

__all__ = [
    "AppendedZarrSink",
    "DamagedRunError",
    "FeatureBatch",
    "H5StagingSink",
    "InputResolver",
    "IntegrityReport",
    "JsonlStagingSink",
    "Record",
    "Results",
    "RunReport",
    "RunSpec",
    "RuntimeBundle",
    "SinkError",
    "SinkSpec",
    "StagingSink",
    "ZarrStagingSink",
    "__version__",
    "canonical_json_bytes",
    "collect_provenance",
    "derive_sink_spec",
    "fsync_directory",
    "fsync_file",
    "fsync_tree",
    "make_sink",
    "new_run_id",
    "normalize_json_value",
    "open_results",
    "read_jsonl",
    "read_jsonl_provenance",
    "run_tiled",
    "update_array_digest",
    "update_zarr_node_digest",
    "verify_store",
    "write_json_atomic",
    "zarr_content_digest",
]

# Imported when asked for (PEP 562), because these modules need jax and zarr, and the command line must start without.
_MODULES = {
    "h5_sink": ("H5StagingSink",),
    "jsonl_sink": ("JsonlStagingSink", "Record", "read_jsonl", "read_jsonl_provenance"),
    "pipeline": ("RunReport", "run_tiled"),
    "resolver": ("FeatureBatch", "InputResolver", "RuntimeBundle"),
    "results": ("Results", "open_results"),
    "sink": ("SinkError", "SinkSpec", "StagingSink", "derive_sink_spec", "make_sink", "new_run_id"),
    "spec": ("RunSpec",),
    "zarr_integrity": (
        "DamagedRunError",
        "IntegrityReport",
        "canonical_json_bytes",
        "fsync_directory",
        "fsync_file",
        "fsync_tree",
        "normalize_json_value",
        "update_array_digest",
        "update_zarr_node_digest",
        "verify_store",
        "zarr_content_digest",
    ),
    "zarr_sink": ("AppendedZarrSink", "ZarrStagingSink"),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the module of a name, and keep the name."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"xtrax.run.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All public names, imported or not."""
    return sorted({*globals(), *__all__})
