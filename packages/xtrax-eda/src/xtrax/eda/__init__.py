"""Look at a plan before paying for it."""

from xtrax.eda._bucket import analyze_bucket
from xtrax.eda._compare import compare_plans
from xtrax.eda._dedup import analyze_dedup
from xtrax.eda._frame import plan_to_dataframe
from xtrax.eda._render import render
from xtrax.eda._stats import explain_plan, extract_plan_stats
from xtrax.eda._version import __version__
from xtrax.eda.types import (
    AxisStats,
    BucketStats,
    BucketUse,
    ComparedRow,
    DedupStats,
    MemoryStats,
    PlanComparison,
    PlanLike,
    PlanStats,
)

__all__ = [
    "AxisStats",
    "BucketStats",
    "BucketUse",
    "ComparedRow",
    "DedupStats",
    "MemoryStats",
    "PlanComparison",
    "PlanLike",
    "PlanStats",
    "__version__",
    "analyze_bucket",
    "analyze_dedup",
    "compare_plans",
    "explain_plan",
    "extract_plan_stats",
    "plan_to_dataframe",
    "render",
]
