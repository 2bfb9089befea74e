"""Plan how axes are mapped, then map them."""

from xtrax.tiling._version import __version__
from xtrax.tiling.apply import tiled_apply
from xtrax.tiling.bucket import (
    bucketize,
    iter_ragged,
    map_ragged,
    padding_waste,
    select_bucket,
    suggest_boundaries,
)
from xtrax.tiling.carry import CarryShape, CarrySpec
from xtrax.tiling.dedup import DedupSpec, find_duplicates, get_k_bucket
from xtrax.tiling.dispatch import axis_dispatch, make_axis_dispatch
from xtrax.tiling.errors import (
    AmbiguousAxisError,
    BudgetInfeasibleError,
    CarryMismatchError,
    DispatchRejected,
    RemainderWarning,
)
from xtrax.tiling.estimators import device_memory_budget, lowered_memory_estimate, memory_estimator
from xtrax.tiling.execute import execute_plan
from xtrax.tiling.iterator import (
    JaxScanIterator,
    MapIterator,
    SafeMapIterator,
    ScanIterator,
    VmapIterator,
    WhileLoopIterator,
    safe_map,
    safe_scan,
)
from xtrax.tiling.jacobian import tiled_hessian, tiled_jacfwd, tiled_jacrev
from xtrax.tiling.plan import AxisDecision, AxisSpec, BatchPlan, BatchPlanner, MemoryBudget, PlanMemory
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.roles import AxisRole
from xtrax.tiling.strategy import (
    AxisStrategy,
    Bucket,
    DedupFn,
    DedupGather,
    GatherFn,
    SafeMap,
    Scan,
    ScanTransition,
    Vmap,
    WhileBodyFn,
    WhileCarry,
    WhileCondFn,
)
from xtrax.tiling.tiled import tiled_vmap
from xtrax.tiling.tune import TunedBatchSize, tune_batch_size

__all__ = [
    "AmbiguousAxisError",
    "AxisDecision",
    "AxisRole",
    "AxisSpec",
    "AxisStrategy",
    "BatchPlan",
    "BatchPlanner",
    "Bucket",
    "BudgetInfeasibleError",
    "CarryMismatchError",
    "CarryShape",
    "CarrySpec",
    "DedupFn",
    "DedupGather",
    "DedupSpec",
    "DispatchRejected",
    "GatherFn",
    "JaxScanIterator",
    "MapIterator",
    "MemoryBudget",
    "PlanMemory",
    "Reducer",
    "RemainderWarning",
    "SafeMap",
    "SafeMapIterator",
    "Scan",
    "ScanIterator",
    "ScanTransition",
    "TunedBatchSize",
    "Vmap",
    "VmapIterator",
    "WhileBodyFn",
    "WhileCarry",
    "WhileCondFn",
    "WhileLoopIterator",
    "__version__",
    "axis_dispatch",
    "bucketize",
    "device_memory_budget",
    "execute_plan",
    "find_duplicates",
    "get_k_bucket",
    "iter_ragged",
    "lowered_memory_estimate",
    "make_axis_dispatch",
    "map_ragged",
    "memory_estimator",
    "padding_waste",
    "safe_map",
    "safe_scan",
    "select_bucket",
    "suggest_boundaries",
    "tiled_apply",
    "tiled_hessian",
    "tiled_jacfwd",
    "tiled_jacrev",
    "tiled_vmap",
    "tune_batch_size",
]
