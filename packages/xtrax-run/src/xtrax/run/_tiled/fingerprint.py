"""What a run computes, so that a resumed run notices if it is something else."""

import hashlib
import importlib.metadata
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xtrax.run._tiled.inputs import Source, digest_arrays
from xtrax.run._tiled.program import TileProgram, Work, trace_without_consts
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.strategy import DedupGather

_PARTS = {
    "carry_sha256": "the first carry (init) of the outermost axis",
    "index_map_sha256": "the index_map of the outermost axis, which says which elements are equal",
    "reducer_sha256": "merge or finalize of the Reducer at the edge of the outermost axis",
}

_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""Settings that change numbers. Each does so by changing the program, so they only explain why that differs."""

_AROUND = {"jax": "jax", "jaxlib": "jaxlib", "backend": "the backend", "device": "the device", "xla_flags": "XLA_FLAGS"}
"""What is not in the program of a tile, and may change the last bits of what it computes."""


def fingerprint(
    program: TileProgram, work: Work, sources: Sequence[Source], hosts: Sequence[str], carry: Any, state: Any
) -> dict[str, Any]:
    """What the header of a run keeps of its computation.

    Args:
        program: Of a whole tile.
        work: What is computed of a tile.
        sources: The inputs that have the outermost axis.
        hosts: Names of host functions.
        carry: Before the first tile; None without.
        state: What a tile leaves for later, abstractly; None without.
    """
    strategy = work.outermost.strategy
    index_map = [strategy.index_map] if isinstance(strategy, DedupGather) else []
    return {
        "program_sha256": program.digest(),
        "arrays_sha256": digest_arrays(program.consts),
        "carry_sha256": digest_arrays(jax.tree.leaves(carry)),
        "index_map_sha256": digest_arrays(index_map),
        "reducer_sha256": None if work.reducer is None else _reducer_digest(work.reducer, state["reduced"]),
        "host_functions": list(hosts),
        "inputs": [source.describe() for source in sources],
        "settings": {name: getattr(jax.config, name, None) for name in _SETTINGS},
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _reducer_digest(reducer: Reducer, state: Any) -> str:
    """Of what is done with the states of tiles; how a tile reduces its rows is in its program."""
    digest = hashlib.sha256()
    for fn, args in ((reducer.merge, (state, state)), (reducer.finalize, (state,))):
        lowered, consts, _ = trace_without_consts(fn, args)
        digest.update(hashlib.sha256(lowered.as_text().encode()).digest())
        digest.update(digest_arrays(consts).encode())
    return digest.hexdigest()


def refuse_changes(folder: Any, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that computed something else.

    Raises:
        ValueError: It says what differs.

    Warns:
        UserWarning: If the program is the same, and what compiles or runs it is not.
    """
    changes = []
    if kept["program_sha256"] != now["program_sha256"]:
        before, after = ({"jax": of["jax"], **of.get("settings", {})} for of in (kept, now))
        others = [f"{name} was {it}, and is {after.get(name)}" for name, it in before.items() if it != after.get(name)]
        reasons = f" ({', '.join(others)})" if others else ""
        changes.append(f"the program of a tile: fn, its axes or the shapes of its inputs{reasons}")
    if kept["arrays_sha256"] != now["arrays_sha256"]:
        changes.append(
            "the values of arrays that fn holds or closes over, of inputs without the outermost axis, or of key"
        )
    for name, what in _PARTS.items():
        if name in kept and kept[name] != now[name]:  # a run that was begun by an older version has none
            changes.append(what)
    if kept["host_functions"] != now["host_functions"]:
        changes.append(f"the host functions: they were {kept['host_functions']}, and are {now['host_functions']}")
    for before, after in zip(kept["inputs"], now["inputs"], strict=False):
        if before != after:
            changes.append(f"{after['name']}: it was {_text(before)}, and is {_text(after)}")
    if len(kept["inputs"]) != len(now["inputs"]):
        changes.append(f"the number of inputs: it was {len(kept['inputs'])}, and is {len(now['inputs'])}")
    if changes:
        raise ValueError(
            f"{folder} holds a run of something else. What differs: {'; '.join(changes)}. Resume it with what it was "
            "started with, or choose another output_dir for a new run"
        )
    for name, what in _AROUND.items():
        if kept.get(name, now[name]) != now[name]:
            warnings.warn(
                f"{folder} was begun with {what} {kept[name] or 'unset'}, and goes on with {now[name] or 'unset'}: the "
                "program is the same, but the last bits of its results may differ",
                UserWarning,
                stacklevel=4,
            )


def _text(described: Mapping[str, Any]) -> str:
    return f"{described['dtype']}{described['shape']}"
