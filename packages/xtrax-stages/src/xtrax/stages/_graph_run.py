"""Evaluate a stage graph: abstractly, to judge it, or for real."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xtrax.stages._graph_refs import GraphError, resolve_ref
from xtrax.stages._graph_types import AuditVerdict, StageGraph, StageNode
from xtrax.stages.boundaries import AxisBoundary
from xtrax.stages.plan import execute_plan
from xtrax.stages.topology import validate_plan_topology
from xtrax.tiling.plan import AxisDecision, BatchPlan, BatchPlanner
from xtrax.tiling.strategy import Bucket


@dataclasses.dataclass(frozen=True)
class NodeFailure:
    """Why a node did not pass.

    Args:
        node_id: The node.
        verdict: FAIL, or NEEDS_WORK where it could not be judged.
        reason: What is wrong and what to change.
    """

    node_id: str
    verdict: AuditVerdict
    reason: str


@dataclasses.dataclass(frozen=True)
class GraphValidationResult:
    """What `validate_graph` found.

    Args:
        graph: The graph with each node's verdict in its metadata.
        failures: Why nodes did not pass, in the order of evaluation.
        passed: Whether every node passed.
    """

    graph: StageGraph
    failures: tuple[NodeFailure, ...]
    passed: bool


class _CannotJudge(Exception):
    """A node cannot be evaluated yet; the message says what is missing."""


def validate_graph(graph: StageGraph) -> GraphValidationResult:
    """Evaluate each node abstractly on what its predecessors yield, and check the topology of its axes.

    Each callable is traced with `jax.eval_shape`, so nothing is computed and no callback is issued. A node's verdict is
    PASS if that works; FAIL if the callable cannot be imported, refuses its arguments, or its axes and boundary cannot
    run; NEEDS_WORK if it cannot be judged, because a source has no `inputs` or a predecessor did not pass.

    Args:
        graph: The graph.

    Returns:
        The graph with the verdicts written into it, and why nodes did not pass.

    Raises:
        GraphError: If the graph has no nodes.
        TypeError: If `graph` is not a `StageGraph`.

    Example:
        >>> from xtrax.stages.graph import StageEdge, StageGraph, StageNode, validate_graph
        >>> def source(name, *shape):
        ...     inputs = [(shape, "float32")]
        ...     return StageNode(name, "jax.numpy:tanh", {"nl_description": "Squashes.", "inputs": inputs})
        >>> add = StageNode("add", "jax.numpy:add", {"nl_description": "Adds."})
        >>> edges = [StageEdge("left", "add"), StageEdge("right", "add")]
        >>> result = validate_graph(StageGraph([source("left", 3, 4), source("right", 5), add], edges))
        >>> [(failure.node_id, failure.verdict.value) for failure in result.failures]
        [('add', 'FAIL')]
    """
    _require_graph(graph)
    outputs: dict[str, Any] = {}
    verdicts: dict[str, AuditVerdict] = {}
    failures: list[NodeFailure] = []
    for node_id in graph.order():
        node = graph.node(node_id)
        try:
            outputs[node_id] = _evaluate_abstractly(node, graph, outputs)
            verdicts[node_id] = AuditVerdict.PASS
        except _CannotJudge as error:
            verdicts[node_id] = AuditVerdict.NEEDS_WORK
            failures.append(NodeFailure(node_id, AuditVerdict.NEEDS_WORK, str(error)))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a node's callable may raise anything, and the result reports it
            verdicts[node_id] = AuditVerdict.FAIL
            reason = str(error) if isinstance(error, GraphError) else f"{type(error).__name__}: {error}"
            failures.append(NodeFailure(node_id, AuditVerdict.FAIL, reason))
    return GraphValidationResult(graph.with_verdicts(verdicts), tuple(failures), not failures)


def _evaluate_abstractly(node: StageNode, graph: StageGraph, outputs: Mapping[str, Any]) -> Any:
    predecessors = graph.predecessors(node.id)
    if predecessors and node.metadata.inputs is not None:
        raise GraphError("inputs are those of a source node, and this one has predecessors; remove inputs or the edges")
    call = _node_callable(node)
    waiting = [p for p in dict.fromkeys(predecessors) if p not in outputs]
    if waiting:
        raise _CannotJudge(f"not evaluated, because {', '.join(map(repr, waiting))} did not pass")
    if not predecessors and node.metadata.inputs is None:
        raise _CannotJudge("not evaluated: a source node needs `inputs`, the shapes and dtypes of its arguments")
    arguments = [outputs[p] for p in predecessors] if predecessors else list(node.metadata.inputs or ())
    return jax.eval_shape(call, *arguments)


def _node_callable(node: StageNode) -> Callable[..., Any]:
    """What a node does to its arguments: its callable, mapped over its axes."""
    where = f"node {node.id!r}"
    fn = resolve_ref(node.callable_ref, where)
    boundaries = {
        axis: AxisBoundary(
            **{
                role: resolve_ref(
                    getattr(refs, role), f"{where}: boundary of axis {axis!r}: {role}", or_reducer=role == "fuse"
                )
                for role in ("fuse", "tap", "sink")
                if getattr(refs, role) is not None
            }
        )
        for axis, refs in node.metadata.boundary.items()
    }
    plan = BatchPlanner().plan(node.metadata.axes) if node.metadata.axes else BatchPlan(())
    validate_plan_topology(plan.decisions, boundaries)
    if not plan.decisions:
        return fn
    for decision in plan.decisions:
        if isinstance(decision.strategy, Bucket):
            raise GraphError(
                f"{where}: a graph cannot run Bucket, which axis {decision.spec.name!r} is planned as: its elements "
                "differ in length, and a node's arguments are arrays. Pad them before the graph, and give no "
                "bucket_boundaries."
            )
    names = tuple(decision.spec.name for decision in plan.decisions)

    def mapped(*arguments: Any) -> Any:
        _check_sizes(arguments, plan.decisions, where)
        return execute_plan(fn, plan, *arguments, axes=[names] * len(arguments), boundaries=boundaries)

    return mapped


def _check_sizes(arguments: tuple[Any, ...], decisions: tuple[AxisDecision, ...], where: str) -> None:
    for i, argument in enumerate(arguments):
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            for dimension, decision in enumerate(decisions):
                found = leaf.shape[dimension] if dimension < leaf.ndim else "no such dimension"
                if found != decision.spec.cardinality:
                    raise GraphError(
                        f"{where}: argument {i}{jax.tree_util.keystr(path)}, dimension {dimension} is axis "
                        f"{decision.spec.name!r} of size {decision.spec.cardinality}; found {found}"
                    )


def compile_graph(graph: StageGraph) -> Callable[..., Any]:
    """Make one function of a graph: its callables imported, its axes planned, its topology checked, once.

    Args:
        graph: A graph whose source nodes all say their `inputs`.

    Returns:
        A function that may be jitted, differentiated and mapped. Its arguments are those of the source nodes, in the
        order of the nodes, for each as many as its `inputs`. It returns what the graph's only last node yields, or a
        dict from id to value where several nodes have no successor.

    Raises:
        GraphError: If the graph has no nodes, a callable cannot be imported, or a source node does not say its
            `inputs`.
        PlanTopologyError: If the axes and boundaries of a node cannot run.
        TypeError: If `graph` is not a `StageGraph`; when the function is called, if there are not as many arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages.graph import StageEdge, StageGraph, StageNode, compile_graph
        >>> square = StageNode(
        ...     "square", "jax.numpy:square", {"nl_description": "Squares.", "inputs": [((4,), "float32")]}
        ... )
        >>> total = StageNode("total", "jax.numpy:sum", {"nl_description": "Adds up."})
        >>> run = compile_graph(StageGraph([square, total], [StageEdge("square", "total")]))
        >>> float(run(jnp.arange(4.0)))
        14.0
    """
    _require_graph(graph)
    order = graph.order()
    calls = {node.id: _node_callable(node) for node in graph.nodes}
    predecessors = {node_id: graph.predecessors(node_id) for node_id in order}
    arity: dict[str, int] = {}
    for node in graph.nodes:
        if predecessors[node.id]:
            continue
        if node.metadata.inputs is None:
            raise GraphError(f"node {node.id!r}: a source node needs `inputs`, the shapes and dtypes of its arguments")
        arity[node.id] = len(node.metadata.inputs)
    used = {edge.src for edge in graph.edges}
    last = [node.id for node in graph.nodes if node.id not in used]

    def run(*inputs: Any) -> Any:
        if len(inputs) != sum(arity.values()):
            wanted = ", ".join(f"{count} for {node_id!r}" for node_id, count in arity.items())
            raise TypeError(f"the graph takes {sum(arity.values())} arguments ({wanted}); found {len(inputs)}")
        given = iter(inputs)
        own = {node_id: [next(given) for _ in range(count)] for node_id, count in arity.items()}
        outputs: dict[str, Any] = {}
        for node_id in order:
            arguments = own[node_id] if node_id in own else [outputs[p] for p in predecessors[node_id]]
            outputs[node_id] = calls[node_id](*arguments)
        return outputs[last[0]] if len(last) == 1 else {node_id: outputs[node_id] for node_id in last}

    return run


def _require_graph(graph: Any) -> None:
    if not isinstance(graph, StageGraph):
        raise TypeError(f"graph must be a StageGraph; found {type(graph).__name__}")
    if not graph.nodes:
        raise GraphError("the graph has no nodes; add at least one")
