"""A stage graph as a JSON file."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtrax.stages._graph_refs import GraphError, resolve_ref, write_ref
from xtrax.stages._graph_types import AxisSpec, BoundaryRefs, NodeMetadata, StageEdge, StageGraph, StageNode

SCHEMA_VERSION = 1
"""The version of the format that is written and read."""

_TOO_DEEP = "lists and objects are nested too deeply for a graph, which needs no more than seven levels"


def dump_graph(graph: StageGraph, path: str | os.PathLike[str]) -> None:
    """Write a graph as JSON, callables as `module:symbol`.

    The file is replaced at once or not at all.

    Args:
        graph: The graph.
        path: The file. Its folder exists.

    Raises:
        GraphError: If a callable is a lambda, a closure or anything else that cannot be imported; it names the node.
        TypeError: If `graph` is not a `StageGraph`.
        OSError: If the file cannot be written.

    Example:
        >>> import pathlib, tempfile
        >>> from xtrax.stages.graph import StageGraph, StageNode, dump_graph, load_graph
        >>> graph = StageGraph([StageNode("squash", "jax.numpy:tanh", {"nl_description": "Squashes."})])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dump_graph(graph, pathlib.Path(folder, "graph.json"))
        ...     load_graph(pathlib.Path(folder, "graph.json")) == graph
        True
    """
    if not isinstance(graph, StageGraph):
        raise TypeError(f"graph must be a StageGraph; found {type(graph).__name__}")
    document = {
        "schema_version": SCHEMA_VERSION,
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "edges": [{"src": edge.src, "dst": edge.dst} for edge in graph.edges],
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_graph(path: str | os.PathLike[str]) -> StageGraph:
    """Read a graph from JSON, and import every callable that it names.

    A graph is as trusted as a script: reading it runs the modules that it names.

    Args:
        path: The file.

    Returns:
        The graph, its callables by reference.

    Raises:
        GraphError: If the file is not JSON of a graph, an object in it has a key twice, its `schema_version` is missing
            or not 1, a reference cannot be resolved or is not callable (the message names the node), or the graph is
            not a valid one.
        OSError: If the file cannot be read.
    """
    path = Path(path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise GraphError(
            f"{path}: line {error.lineno}, column {error.colno}: {error.msg}; the file is not JSON"
        ) from error
    except UnicodeDecodeError as error:
        raise GraphError(f"{path}: the file is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except ValueError as error:  # a key twice, or a number of too many digits
        raise GraphError(f"{path}: {error}") from error
    except RecursionError as error:
        raise GraphError(f"{path}: {_TOO_DEEP}") from error
    try:
        graph = _graph_from_json(document)
        for node in graph.nodes:
            resolve_ref(node.callable_ref, f"node {node.id!r}")
            for axis, refs in node.metadata.boundary.items():
                for role in ("fuse", "tap", "sink"):
                    if getattr(refs, role) is not None:
                        where = f"node {node.id!r}: boundary of axis {axis!r}: {role}"
                        resolve_ref(getattr(refs, role), where, or_reducer=role == "fuse")
    except (GraphError, TypeError, ValueError) as error:
        raise GraphError(f"{path}: {error}") from error
    except RecursionError as error:
        raise GraphError(f"{path}: {_TOO_DEEP}") from error
    return graph


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: of two the last would win, and the nodes in the first would be lost."""
    entry: dict[str, Any] = {}
    for key, value in pairs:
        if key in entry:
            raise GraphError(f"an object has the key {key!r} twice; its keys are {', '.join(k for k, _ in pairs)}")
        entry[key] = value
    return entry


def _graph_from_json(document: Any) -> StageGraph:
    if not isinstance(document, dict):
        raise GraphError(f"a graph is a JSON object; found {type(document).__name__}")
    if "schema_version" not in document:
        raise GraphError(f"schema_version is missing; this xtrax reads version {SCHEMA_VERSION}")
    version = document["schema_version"]
    if isinstance(version, bool) or not isinstance(version, int):
        raise GraphError(f"schema_version must be an integer; found {version!r}")
    if version != SCHEMA_VERSION:
        advice = "a newer xtrax-stages reads it" if version > SCHEMA_VERSION else "write the graph anew"
        raise GraphError(f"schema_version is {version}; this xtrax reads version {SCHEMA_VERSION}: {advice}")
    _keys(document, "the graph", required=("nodes", "edges"), optional=("schema_version",))
    nodes, edges = [], []
    for i, entry in enumerate(_list(document, "nodes")):
        _keys(entry, f"nodes[{i}]", required=("id", "callable_ref", "metadata"), optional=("frozen",))
        if not isinstance(entry["callable_ref"], str):
            raise GraphError(f"nodes[{i}]: callable_ref must be 'module:symbol'; found {entry['callable_ref']!r}")
        nodes.append(
            StageNode(entry["id"], entry["callable_ref"], _metadata_from_json(entry), entry.get("frozen", False))
        )
    for i, entry in enumerate(_list(document, "edges")):
        _keys(entry, f"edges[{i}]", required=("src", "dst"))
        edges.append(StageEdge(entry["src"], entry["dst"]))
    return StageGraph(tuple(nodes), tuple(edges))


def _list(document: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(document[name], list):
        raise GraphError(f"{name} must be a list; found {type(document[name]).__name__}")
    return document[name]


def _keys(entry: Any, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(entry, dict):
        raise GraphError(f"{where} must be an object; found {entry!r}")
    missing = [name for name in required if name not in entry]
    unknown = [name for name in entry if name not in required + optional]
    if missing or unknown:
        raise GraphError(
            f"{where} must have {', '.join(required)}"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; unknown: {', '.join(map(repr, unknown))}" if unknown else "")
        )


def _metadata_from_json(entry: dict[str, Any]) -> Mapping[str, Any]:
    metadata = entry["metadata"]
    if not isinstance(metadata, dict):
        raise GraphError(f"node {entry['id']!r}: metadata must be an object; found {metadata!r}")
    inputs = metadata.get("inputs")
    if inputs is None:
        return metadata
    if not isinstance(inputs, list):
        raise GraphError(f"node {entry['id']!r}: inputs must be a list; found {inputs!r}")
    for i, item in enumerate(inputs):
        _keys(item, f"node {entry['id']!r}: inputs[{i}]", required=("shape", "dtype"))
    return {**metadata, "inputs": [(item["shape"], item["dtype"]) for item in inputs]}


def _node_to_json(node: StageNode) -> dict[str, Any]:
    return {
        "id": node.id,
        "callable_ref": write_ref(node.callable_ref, f"node {node.id!r}"),
        "metadata": _metadata_to_json(node.metadata, node.id),
        "frozen": node.frozen,
    }


def _metadata_to_json(metadata: NodeMetadata, node_id: str) -> dict[str, Any]:
    """The slots that are filled."""
    written: dict[str, Any] = {"nl_description": metadata.nl_description}
    for slot in ("mathjax_label", "script_usage", "audit_verdict"):
        if getattr(metadata, slot) is not None:
            written[slot] = str(getattr(metadata, slot))
    if metadata.citations:
        written["citations"] = list(metadata.citations)
    if metadata.inputs is not None:
        written["inputs"] = [{"shape": list(s.shape), "dtype": s.dtype.name} for s in metadata.inputs]
    if metadata.axes:
        written["axes"] = [_axis_to_json(axis) for axis in metadata.axes]
    if metadata.boundary:
        written["boundary"] = {
            axis: _boundary_to_json(refs, f"node {node_id!r}: boundary of axis {axis!r}")
            for axis, refs in metadata.boundary.items()
        }
    return written


def _axis_to_json(axis: AxisSpec) -> dict[str, Any]:
    """The fields of an axis that are not at their defaults."""
    written = {}
    for field in dataclasses.fields(axis):
        value = getattr(axis, field.name)
        if value != field.default:
            written[field.name] = list(value) if isinstance(value, tuple) else value
    return written


def _boundary_to_json(refs: BoundaryRefs, where: str) -> dict[str, str]:
    return {
        role: write_ref(getattr(refs, role), f"{where}: {role}")
        for role in ("fuse", "tap", "sink")
        if getattr(refs, role) is not None
    }
