"""The arguments of `run_tiled`, checked before anything is traced, read or written."""

import dataclasses
import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from xtrax.run._appended.shards import Compression
from xtrax.run._checks import check_output_dir, check_run_id
from xtrax.run._tiled.hooks import host_names
from xtrax.run._tiled.inputs import Source, source, whole
from xtrax.run._tiled.program import Work
from xtrax.run._tiled.tiles import check_outermost, check_tile_size
from xtrax.run.sink import SinkSpec
from xtrax.run.zarr_sink import AppendedZarrSink
from xtrax.stages import AxisBoundary, axis_boundaries_by_name, validate_plan_topology
from xtrax.stages._effects import axis_hooks
from xtrax.stages._host_record import outside_traces
from xtrax.tiling import BatchPlanner
from xtrax.tiling._execute.args import check_axes, check_key, check_plan, check_sizes
from xtrax.tiling._execute.mesh import check_mesh
from xtrax.tiling.plan import AxisSpec, BatchPlan
from xtrax.tiling.strategy import DedupGather, Scan

_RESUME = ("auto", "never", "require")
_PROGRESS = ("auto", "off")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be run, checked.

    Attributes:
        work: What is computed.
        boundaries: By axis.
        hosts: Names of host functions.
        sources: The leaves of the inputs that have the outermost axis.
        rebuild: The inputs, from these leaves.
        groups: For each input that has the outermost axis, which leaves are its own, and its tree.
        tile_size: As it was given.
        output_dir: Where the output goes; None without a sink.
        compression: Of the output.
        run_id: The run, if it was given.
        resume: As it was given.
        prefetch: As it was given.
        progress: As it was given.
        client: As it was given.
        verify_inputs: As it was given.
    """

    work: Work
    boundaries: Mapping[str, AxisBoundary | None]
    hosts: list[str]
    sources: tuple[Source, ...]
    rebuild: Callable[[Sequence[Any]], list[Any]]
    groups: tuple[tuple[tuple[int, ...], Any], ...]
    tile_size: int | None
    output_dir: Path | None
    compression: Compression | None
    run_id: str | None
    resume: str
    prefetch: int
    progress: str
    client: Any
    verify_inputs: bool

    @property
    def rows(self) -> int:
        """Elements of the outermost axis."""
        return self.work.outermost.spec.cardinality


def check_request(
    fn: Any,
    inputs: Sequence[Any],
    *,
    plan: Any,
    specs: Any,
    axes: Any,
    boundaries: Any,
    tile_size: Any,
    sink: Any,
    run_id: Any,
    resume: Any,
    prefetch: Any,
    progress: Any,
    client: Any,
    mesh: Any,
    key: Any,
    verify_inputs: Any,
) -> Request:
    """Check the arguments of `run_tiled`; its docstring says what they are and what is raised."""
    if not outside_traces(inputs, key):
        raise TypeError(
            "run_tiled is called inside a trace (jax.jit, grad, vmap), but it reads, computes and writes on the host; "
            "call it outside, or use execute_plan there"
        )
    decisions = check_plan(fn, _plan(plan, specs))
    names = check_axes(decisions, inputs, axes)
    key = check_key(fn, decisions, key)
    check_mesh(mesh, decisions[0])
    by_name = _boundaries(decisions, boundaries)
    validate_plan_topology(decisions, by_name)
    check_outermost(decisions[0], by_name)
    hooks = axis_hooks([d.spec.name for d in decisions], by_name, yields_carries=True)
    if mesh is not None or client is not None:
        _refuse_order(by_name, "mesh" if client is None else "client")
    _check_dedup(decisions, hooks)
    outer = decisions[0].spec.name
    reducer = hooks[outer].streamed if outer in hooks else None
    if reducer is not None:
        reducer.check_size(decisions[0].spec.cardinality, f"axis {outer!r}")
    sources, rebuild, groups = _sources(inputs, names, outer)
    _check_sizes(decisions, names, sources, rebuild)
    output_dir, spec_id, compression = _sink(sink)
    run_id = check_run_id(run_id)
    if run_id is not None and spec_id is not None and run_id != spec_id:
        raise ValueError(f"run_id is {run_id!r}, but the sink's is {spec_id!r}; give one of them")
    _check_choice("resume", resume, _RESUME)
    _check_choice("progress", progress, _PROGRESS)
    if output_dir is None:
        if run_id is not None:
            raise ValueError(f"run_id is {run_id!r}, but sink is None, so nothing is kept that could be resumed; pass "
                             "sink=SinkSpec(output_dir), or leave out run_id")  # fmt: skip
        if resume == "require":
            raise ValueError(
                "resume is 'require', but sink is None, so there is no run; pass sink=SinkSpec(output_dir)"
            )
    if not isinstance(verify_inputs, bool):
        raise TypeError(f"verify_inputs must be a bool, not {type(verify_inputs).__name__}: {verify_inputs!r}")
    _check_client(client, decisions, mesh, output_dir)
    return Request(
        work=Work(fn, decisions, names, hooks, mesh, key),
        boundaries=by_name,
        hosts=host_names(by_name),
        sources=sources,
        rebuild=rebuild,
        groups=groups,
        tile_size=check_tile_size(tile_size),
        output_dir=output_dir,
        compression=compression,
        run_id=run_id or spec_id,
        resume=resume,
        prefetch=_check_prefetch(prefetch),
        progress=progress,
        client=client,
        verify_inputs=verify_inputs,
    )


def _plan(plan: Any, specs: Any) -> BatchPlan:
    if (plan is None) == (specs is None):
        given = "both are" if plan is not None else "neither is"
        raise ValueError(f"exactly one of plan and specs says how the axes are mapped, but {given} given")
    if plan is not None:
        return plan
    if isinstance(specs, AxisSpec):
        raise TypeError(f"specs must be a sequence of AxisSpec, but is {specs!r}; put a single one into a list")
    return BatchPlanner().plan(specs)


def _boundaries(decisions: Sequence[Any], boundaries: Any) -> dict[str, AxisBoundary | None]:
    if boundaries is None:
        return {}
    if isinstance(boundaries, Mapping):
        return dict(boundaries)
    if isinstance(boundaries, AxisBoundary) or not isinstance(boundaries, Sequence):
        raise TypeError(
            f"boundaries must map axis names to AxisBoundary, or be a sequence with one (or None) for each axis, but "
            f"is {boundaries!r}"
        )
    return dict(axis_boundaries_by_name([decision.spec for decision in decisions], boundaries))


def _refuse_order(boundaries: Mapping[str, AxisBoundary | None], given: str) -> None:
    for axis, boundary in boundaries.items():
        for role in ("tap", "sink"):
            if getattr(getattr(boundary, role, None), "ordered", False):
                raise ValueError(
                    f"{given} is given, and the {role} of axis {axis!r} is ordered, but devices and workers have no "
                    f"order among them; leave out {given}, or make it ordered=False, and sort by the index"
                )


def _check_dedup(decisions: Sequence[Any], hooks: Mapping[str, Any]) -> None:
    if not isinstance(decisions[0].strategy, DedupGather):
        return
    for decision in decisions[1:]:
        hook = hooks.get(decision.spec.name)
        if hook is not None and hook.emit is not None:
            raise ValueError(
                f"axis {decision.spec.name!r} has a tap or sink, and lies inside the DedupGather axis "
                f"{decisions[0].spec.name!r}, of which a tile computes the distinct elements alone; put it at the edge "
                f"of {decisions[0].spec.name!r}, or plan that axis without its DedupSpec"
            )


def _sources(inputs: Sequence[Any], names: Sequence[tuple[str, ...]], outer: str) -> tuple[Any, Any, Any]:
    """The leaves with the outermost axis, and how to put the inputs together again."""
    sources: list[Source] = []
    parts: list[Any] = []
    groups = []
    for i, (tree, dims) in enumerate(zip(inputs, names, strict=True)):
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
        named = [(f"inputs[{i}]{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
        if outer not in dims:
            parts.append(treedef.unflatten([whole(where, leaf) for where, leaf in named]))
            continue
        if tree is None:
            raise TypeError(
                f"inputs[{i}] is None, and has axis {outer!r}; pass an array, or leave the input out of fn's arguments"
            )
        first = len(sources)
        sources += [source(where, leaf, dims.index(outer)) for where, leaf in named]
        parts.append((treedef, first, len(leaves)))
        groups.append((tuple(range(first, first + len(leaves))), treedef))
    tiled = [outer in dims for dims in names]

    def rebuild(leaves: Sequence[Any]) -> list[Any]:
        return [
            part[0].unflatten(leaves[part[1] : part[1] + part[2]]) if is_tiled else part
            for part, is_tiled in zip(parts, tiled, strict=True)
        ]

    return tuple(sources), rebuild, tuple(groups)


def _check_sizes(decisions: Sequence[Any], names: Any, sources: Sequence[Source], rebuild: Any) -> None:
    try:
        check_sizes(decisions, rebuild([source.placeholder for source in sources]), names)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("args[", "inputs[")) from None


def _sink(sink: Any) -> tuple[Path | None, str | None, Compression | None]:
    if sink is None or (isinstance(sink, SinkSpec) and sink.format == "none"):
        return None, None, None
    if isinstance(sink, AppendedZarrSink):
        return Path(sink.output_dir), sink.run_id, sink.compression
    if not isinstance(sink, SinkSpec):
        hint = f"SinkSpec({os.fspath(sink)!r})" if isinstance(sink, str | os.PathLike) else "SinkSpec(output_dir)"
        raise TypeError(
            f"sink must be a SinkSpec, an AppendedZarrSink or None, not {type(sink).__name__}; a run appends rows to "
            f"one array for each output, which sinks with keys do not. Pass {hint}"
        )
    if sink.format != "zarr":
        raise ValueError(f"the sink's format is {sink.format!r}; run_tiled writes Zarr only (the others serve stage): "
                         "SinkSpec(output_dir, format='zarr')")  # fmt: skip
    if sink.output_dir is None:
        raise ValueError("the sink's output_dir is None; name a folder for the run: SinkSpec(output_dir)")
    if sink.flush_every != 1 or sink.extension_schema is not None:
        raise ValueError(
            "the sink has a flush_every or an extension_schema, which are about staging by key; run_tiled commits "
            "every tile and has no attributes of callers. Leave them out, and choose the size of a commit by tile_size"
        )
    return check_output_dir(sink.output_dir), sink.run_id, None


def _check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}: {value!r}")
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


def _check_prefetch(prefetch: Any) -> int:
    try:
        number = operator.index(prefetch)
    except TypeError:
        number = None
    if number is None or isinstance(prefetch, bool | np.bool_):
        raise TypeError(f"prefetch must be an int, not {type(prefetch).__name__}: {prefetch!r}")
    if number < 0:
        raise ValueError(f"prefetch is {number}; it must be at least 0, the number of tiles that are read ahead")
    return number


def _check_client(client: Any, decisions: Sequence[Any], mesh: Any, output_dir: Path | None) -> None:
    if client is None:
        return
    distributed = sys.modules.get("distributed")  # an optional extra, imported by whoever has a client
    if distributed is None or not isinstance(client, distributed.Client):
        raise TypeError(f"client must be a dask.distributed.Client or None, not {type(client).__name__}: {client!r}")
    if client.asynchronous:
        raise TypeError("client is asynchronous, and run_tiled waits for its tiles; make it with asynchronous=False")
    if isinstance(decisions[0].strategy, Scan):
        raise ValueError(
            f"client is given, and the outermost axis {decisions[0].spec.name!r} is a Scan, whose tiles follow one "
            "another; leave out client, or plan an axis of independent elements first"
        )
    if mesh is not None:
        raise ValueError("client and mesh are both given; each worker computes on its own devices, so leave out mesh")
    if output_dir is None:
        raise ValueError("client is given, and sink is None; workers write their tiles, so pass sink=SinkSpec(folder) "
                         "with a folder that all of them see")  # fmt: skip
