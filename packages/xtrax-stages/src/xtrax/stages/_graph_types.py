"""A pipeline as data: nodes, edges, and what is said about each node."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from xtrax.stages._graph_refs import GraphError, check_ref
from xtrax.tiling.plan import AxisSpec
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.roles import AxisRole

CallableRef: TypeAlias = str | Callable[..., Any]
"""A callable, or where to import it from: `"module.path:symbol"`."""

_T = TypeVar("_T")


class FrozenNodeError(GraphError):
    """A node that is frozen was to be replaced."""


class AuditVerdict(StrEnum):
    """What `validate_graph` found about a node."""

    PASS = "PASS"
    FAIL = "FAIL"
    NEEDS_WORK = "NEEDS_WORK"


@dataclasses.dataclass(frozen=True)
class BoundaryRefs:
    """The fuse, tap and sink of one axis, each by reference or as a callable.

    Args:
        fuse: Reference to a `Fuse` or to a `Reducer`, such as `"xtrax.tiling.reducers:mean"`, or None.
        tap: Reference to a `Tap`, or None.
        sink: Reference to a `Sink`, or None.
    """

    fuse: CallableRef | Reducer | None = None
    tap: CallableRef | None = None
    sink: CallableRef | None = None

    def __post_init__(self) -> None:
        """Check the form of the references."""
        for role in ("fuse", "tap", "sink"):
            if getattr(self, role) is not None:
                check_ref(getattr(self, role), f"boundary {role}", or_reducer=role == "fuse")


@dataclasses.dataclass(frozen=True, init=False)
class NodeMetadata:
    """What is said about a node.

    Args:
        nl_description: What the node does, in words. Required.
        mathjax_label: Its formula, in MathJax.
        citations: Where it comes from.
        script_usage: How it is used in a script.
        audit_verdict: What `validate_graph` found, or None before it ran.
        inputs: The abstract arguments of a source node: each a `jax.ShapeDtypeStruct` or a pair `(shape, dtype)`.
        axes: The axes over which the node's callable, then a function of one element, is mapped: the leading
            dimensions of each of its arguments, the outermost first. Each an `AxisSpec` or a mapping of its fields.
        boundary: From the name of an axis to its `BoundaryRefs`, or a mapping of its fields.

    Raises:
        GraphError: If a value is empty where it may not be, or unknown.
        TypeError: If a value is of the wrong kind.
    """

    nl_description: str
    mathjax_label: str | None
    citations: tuple[str, ...]
    script_usage: str | None
    audit_verdict: AuditVerdict | None
    inputs: tuple[jax.ShapeDtypeStruct, ...] | None
    axes: tuple[AxisSpec, ...]
    boundary: Mapping[str, BoundaryRefs]

    def __init__(
        self,
        nl_description: str,
        mathjax_label: str | None = None,
        citations: Iterable[str] = (),
        script_usage: str | None = None,
        audit_verdict: AuditVerdict | str | None = None,
        inputs: Iterable[jax.ShapeDtypeStruct | tuple[Sequence[int], Any]] | None = None,
        axes: Iterable[AxisSpec | Mapping[str, Any]] = (),
        boundary: Mapping[str, BoundaryRefs | Mapping[str, Any]] | None = None,
    ) -> None:
        """See the class."""
        if not isinstance(nl_description, str):
            raise TypeError(f"nl_description must be a string; found {nl_description!r}")
        if not nl_description.strip():
            raise GraphError("nl_description must say what the node does; found an empty string")
        for slot, value in (("mathjax_label", mathjax_label), ("script_usage", script_usage)):
            if not isinstance(value, str | None):
                raise TypeError(f"{slot} must be a string or None; found {value!r}")
        citations = _sequence("citations", citations)
        for citation in citations:
            if not isinstance(citation, str):
                raise TypeError(f"citations must be strings; found {citation!r}")
        if audit_verdict is not None and audit_verdict not in list(AuditVerdict):
            raise GraphError(f"audit_verdict must be one of {', '.join(AuditVerdict)} or None; found {audit_verdict!r}")
        axes = tuple(_from_fields(AxisSpec, axis, f"axes[{i}]") for i, axis in enumerate(_sequence("axes", axes)))
        for axis in axes:
            if axis.role is not AxisRole.KNOWN:
                raise GraphError(f"axis {axis.name!r} must have the role KNOWN; found {axis.role.name}")
        if not isinstance(boundary, Mapping | None):
            raise TypeError(f"boundary must map axis names to fuse, tap and sink; found {type(boundary).__name__}")
        _set(
            self,
            nl_description=nl_description,
            mathjax_label=mathjax_label,
            citations=citations,
            script_usage=script_usage,
            audit_verdict=None if audit_verdict is None else AuditVerdict(audit_verdict),
            inputs=None if inputs is None else _inputs(inputs),
            axes=axes,
            boundary={n: _from_fields(BoundaryRefs, r, f"boundary[{n!r}]") for n, r in (boundary or {}).items()},
        )


def _set(instance: Any, **values: Any) -> None:
    """Set the fields of a frozen dataclass from its `__init__`."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)


def _sequence(slot: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{slot} must be a sequence; found {value!r}")
    return tuple(value)


def _inputs(value: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    inputs = []
    for i, entry in enumerate(_sequence("inputs", value)):
        if hasattr(entry, "shape") and hasattr(entry, "dtype"):
            shape, dtype = entry.shape, entry.dtype
        elif isinstance(entry, (tuple, list)) and len(entry) == 2:
            shape, dtype = entry
        else:
            raise TypeError(f"inputs[{i}] must be a jax.ShapeDtypeStruct or a pair (shape, dtype); found {entry!r}")
        for size in _sequence(f"inputs[{i}].shape", shape):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"inputs[{i}].shape must hold integers; found {size!r}")
            if size < 0:
                raise GraphError(f"inputs[{i}].shape must hold sizes of at least 0; found {size}")
        try:
            dtype = jnp.dtype(dtype)
        except TypeError as error:
            raise GraphError(f"inputs[{i}].dtype must be the name of an array's dtype; found {dtype!r}") from error
        inputs.append(jax.ShapeDtypeStruct(tuple(shape), dtype))
    return tuple(inputs)


def _from_fields(cls: type[_T], value: Any, where: str) -> _T:
    """An instance of the dataclass `cls`, from itself or from a mapping of its fields."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{where} must be a {cls.__name__} or a mapping of its fields; found {value!r}")
    parameters = inspect.signature(cls).parameters
    known = list(parameters)
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise GraphError(
                f"{where} has no field {name!r}; it has {', '.join(known)}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in value]
    if missing:
        raise GraphError(f"{where} must say {', '.join(missing)}; found only {', '.join(map(str, value)) or 'nothing'}")
    return cls(**value)


@dataclasses.dataclass(frozen=True, init=False)
class StageNode:
    """One stage of a graph.

    Args:
        id: Its name, unique in the graph.
        callable_ref: The callable, or `"module.path:symbol"`. Only what can be written in that form can be dumped.
        metadata: `NodeMetadata`, or a mapping of its slots.
        frozen: Whether `StageGraph.replace_node` refuses to replace it.

    Raises:
        GraphError: If the id is empty, the reference is not of that form, or a slot of the metadata is unknown or
            wrong.
        TypeError: If a value is of the wrong kind.

    Example:
        >>> from xtrax.stages.graph import StageNode
        >>> StageNode("squash", "jax.numpy:tanh", {"nl_description": "Squashes to (-1, 1)."}).frozen
        False
    """

    id: str
    callable_ref: CallableRef
    metadata: NodeMetadata
    frozen: bool

    def __init__(
        self,
        id: str,
        callable_ref: CallableRef,
        metadata: NodeMetadata | Mapping[str, Any],
        frozen: bool = False,
    ) -> None:
        """See the class."""
        if not isinstance(id, str):
            raise TypeError(f"a node's id must be a string; found {id!r}")
        if not id.strip():
            raise GraphError("a node's id must not be empty")
        if not isinstance(frozen, bool):
            raise TypeError(f"node {id!r}: frozen must be a bool; found {frozen!r}")
        check_ref(callable_ref, f"node {id!r}: callable_ref")
        try:
            metadata = _from_fields(NodeMetadata, metadata, "metadata")
        except GraphError as error:
            raise GraphError(f"node {id!r}: {error}") from error
        except (TypeError, ValueError) as error:
            raise type(error)(f"node {id!r}: {error}") from error
        _set(self, id=id, callable_ref=callable_ref, metadata=metadata, frozen=frozen)


@dataclasses.dataclass(frozen=True)
class StageEdge:
    """What node `src` yields is an argument of node `dst`.

    Args:
        src: The id of the node that yields.
        dst: The id of the node that is called. Its arguments come in the order of the graph's edges.

    Raises:
        TypeError: If an id is not a string.
    """

    src: str
    dst: str

    def __post_init__(self) -> None:
        """Check the ids."""
        for end in ("src", "dst"):
            if not isinstance(getattr(self, end), str):
                raise TypeError(f"an edge's {end} must be a node's id; found {getattr(self, end)!r}")


@dataclasses.dataclass(frozen=True, init=False)
class StageGraph:
    """A pipeline as data: a directed graph without cycles, whose nodes are callables.

    A node is called with what its predecessors yield, positionally, in the order of the edges; a source node with its
    own inputs. Two edges between the same nodes pass the value twice.

    Args:
        nodes: The `StageNode`s.
        edges: The `StageEdge`s.

    Raises:
        GraphError: If two nodes share an id, an edge names an unknown node, or the edges close a cycle.
        TypeError: If an entry is of the wrong kind.

    Example:
        >>> from xtrax.stages.graph import StageEdge, StageGraph, StageNode
        >>> squash = StageNode(
        ...     "squash", "jax.numpy:tanh", {"nl_description": "Squashes.", "inputs": [((4,), "float32")]}
        ... )
        >>> total = StageNode("total", "jax.numpy:sum", {"nl_description": "Adds up."})
        >>> StageGraph([squash, total], [StageEdge("squash", "total")]).order()
        ('squash', 'total')
    """

    nodes: tuple[StageNode, ...]
    edges: tuple[StageEdge, ...]

    def __init__(self, nodes: Iterable[StageNode], edges: Iterable[StageEdge] = ()) -> None:
        """See the class."""
        _set(self, nodes=_sequence("nodes", nodes), edges=_sequence("edges", edges))
        ids: list[str] = []
        for i, node in enumerate(self.nodes):
            if not isinstance(node, StageNode):
                raise TypeError(f"nodes[{i}] must be a StageNode; found {type(node).__name__}")
            if node.id in ids:
                raise GraphError(f"node {node.id!r} is given twice; each id names one node")
            ids.append(node.id)
        for i, edge in enumerate(self.edges):
            if not isinstance(edge, StageEdge):
                raise TypeError(f"edges[{i}] must be a StageEdge; found {type(edge).__name__}")
            for end in (edge.src, edge.dst):
                if end not in ids:
                    near = difflib.get_close_matches(end, ids, n=1)
                    raise GraphError(
                        f"edge {edge.src!r} -> {edge.dst!r}: there is no node {end!r}; there are "
                        + (", ".join(map(repr, ids)) or "none")
                        + (f". Did you mean {near[0]!r}?" if near else "")
                    )
        try:
            self.order()
        except CycleError as error:
            raise GraphError(f"the edges close a cycle: {' -> '.join(map(repr, error.args[1]))}; remove one") from None

    def order(self) -> tuple[str, ...]:
        """Return the ids such that each node comes after its predecessors, and else in the order of the nodes."""
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for node in self.nodes:
            sorter.add(node.id, *self.predecessors(node.id))
        sorter.prepare()
        place = {node.id: i for i, node in enumerate(self.nodes)}
        ordered: list[str] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=place.__getitem__)
            ordered += ready
            sorter.done(*ready)
        return tuple(ordered)

    def node(self, node_id: str) -> StageNode:
        """Return the node of this id.

        Raises:
            GraphError: If there is none.
        """
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise GraphError(
            f"there is no node {node_id!r}; there are {', '.join(repr(n.id) for n in self.nodes) or 'none'}"
        )

    def predecessors(self, node_id: str) -> tuple[str, ...]:
        """Return the ids of the nodes whose values are the arguments of this one, in the order of its arguments."""
        return tuple(edge.src for edge in self.edges if edge.dst == node_id)

    def replace_node(self, node: StageNode) -> "StageGraph":
        """Return a graph in which this node stands in place of the one with the same id.

        Args:
            node: The new node.

        Raises:
            FrozenNodeError: If the one that it replaces is frozen.
            GraphError: If there is none.
        """
        if self.node(node.id).frozen:
            raise FrozenNodeError(
                f"node {node.id!r} is frozen; replace it under a new id, or build the graph from an unfrozen node"
            )
        return self._with(node)

    def _with(self, node: StageNode) -> "StageGraph":
        return dataclasses.replace(self, nodes=tuple(node if n.id == node.id else n for n in self.nodes))

    def with_verdicts(self, verdicts: Mapping[str, AuditVerdict]) -> "StageGraph":
        """Return the graph with these verdicts in its nodes, the frozen ones too: a verdict is a finding, not a change.

        Args:
            verdicts: From a node's id to its verdict.

        Raises:
            GraphError: If there is no such node.
        """
        graph = self
        for node_id, verdict in verdicts.items():
            node = graph.node(node_id)
            metadata = dataclasses.replace(node.metadata, audit_verdict=verdict)
            graph = graph._with(dataclasses.replace(node, metadata=metadata))
        return graph
