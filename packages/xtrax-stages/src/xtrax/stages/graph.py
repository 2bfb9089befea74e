"""A pipeline as data: build it, write and read it, judge it, run it."""

from xtrax.stages._graph_author import Generator, TemplateGenerator
from xtrax.stages._graph_io import SCHEMA_VERSION, dump_graph, load_graph
from xtrax.stages._graph_refs import GraphError
from xtrax.stages._graph_run import GraphValidationResult, NodeFailure, compile_graph, validate_graph
from xtrax.stages._graph_types import (
    AuditVerdict,
    BoundaryRefs,
    FrozenNodeError,
    NodeMetadata,
    StageEdge,
    StageGraph,
    StageNode,
)

__all__ = [
    "SCHEMA_VERSION",
    "AuditVerdict",
    "BoundaryRefs",
    "FrozenNodeError",
    "Generator",
    "GraphError",
    "GraphValidationResult",
    "NodeFailure",
    "NodeMetadata",
    "StageEdge",
    "StageGraph",
    "StageNode",
    "TemplateGenerator",
    "compile_graph",
    "dump_graph",
    "load_graph",
    "validate_graph",
]
