"""What happens at an axis's edge: reductions, side effects, and pipelines as data."""

from xtrax.stages._callback import IoCallbackSignatureError, io_callback
from xtrax.stages._version import __version__
from xtrax.stages.boundaries import AxisBoundary, BoundaryCallable, Fuse, Sink, Tap
from xtrax.stages.bundle import RollingFn, StageBundle, TransformFn
from xtrax.stages.executor import ExecutorError, execute_map_axis, execute_scan_axis
from xtrax.stages.graph import (
    AuditVerdict,
    BoundaryRefs,
    FrozenNodeError,
    Generator,
    GraphError,
    GraphValidationResult,
    NodeFailure,
    NodeMetadata,
    StageEdge,
    StageGraph,
    StageNode,
    TemplateGenerator,
    compile_graph,
    dump_graph,
    load_graph,
    validate_graph,
)
from xtrax.stages.host import HostSink, HostTap
from xtrax.stages.plan import execute_plan
from xtrax.stages.topology import PlanTopologyError, axis_boundaries_by_name, validate_plan_topology

__all__ = [
    "AuditVerdict",
    "AxisBoundary",
    "BoundaryCallable",
    "BoundaryRefs",
    "ExecutorError",
    "FrozenNodeError",
    "Fuse",
    "Generator",
    "GraphError",
    "GraphValidationResult",
    "HostSink",
    "HostTap",
    "IoCallbackSignatureError",
    "NodeFailure",
    "NodeMetadata",
    "PlanTopologyError",
    "RollingFn",
    "Sink",
    "StageBundle",
    "StageEdge",
    "StageGraph",
    "StageNode",
    "Tap",
    "TemplateGenerator",
    "TransformFn",
    "__version__",
    "axis_boundaries_by_name",
    "compile_graph",
    "dump_graph",
    "execute_map_axis",
    "execute_plan",
    "execute_scan_axis",
    "io_callback",
    "load_graph",
    "validate_graph",
    "validate_plan_topology",
]
