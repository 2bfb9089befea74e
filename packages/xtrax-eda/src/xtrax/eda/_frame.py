"""A plan as a table of pandas."""

import dataclasses
from typing import TYPE_CHECKING

from xtrax.eda._stats import extract_plan_stats
from xtrax.eda.types import AxisStats, PlanLike, PlanStats

if TYPE_CHECKING:
    import pandas as pd

VIZ_HINT = "install matplotlib and pandas, the extra viz of xtrax-eda (its README says how)"


def plan_to_dataframe(plan_or_stats: PlanLike | PlanStats) -> "pd.DataFrame":
    """One row for each axis of a plan, the outermost first.

    Args:
        plan_or_stats: a plan, or what `extract_plan_stats` or `explain_plan` made of one.

    Returns:
        A frame with the fields of `AxisStats` as columns; `steps`, `computed` and `memory_estimate_bytes` are of
        pandas' nullable `Int64` where they fit it, and missing where they are not known.

    Raises:
        ImportError: pandas, of the extra `viz`, is not installed.
        TypeError: neither a plan nor the statistics of one.

    >>> from xtrax.tiling import AxisSpec, BatchPlanner
    >>> frame = plan_to_dataframe(BatchPlanner().plan([AxisSpec("batch", 128, 32)]))
    >>> frame.loc[0, "strategy"], int(frame.loc[0, "steps"])
    ('SafeMap', 4)
    """
    stats = plan_or_stats if isinstance(plan_or_stats, PlanStats) else extract_plan_stats(plan_or_stats)
    try:
        import pandas as pd  # an optional extra
    except ImportError as error:
        raise ImportError(f"plan_to_dataframe needs pandas; {VIZ_HINT}.") from error
    columns = [field.name for field in dataclasses.fields(AxisStats)]
    frame = pd.DataFrame([dataclasses.asdict(axis) for axis in stats.axes], columns=columns)
    for column in ("cardinality", "batch_size", "steps", "computed", "memory_estimate_bytes", "tile_granularity"):
        values = [getattr(axis, column) for axis in stats.axes]
        fits = all(value is None or value < 2**63 for value in values)
        frame[column] = pd.array(values, dtype="Int64") if fits else pd.Series(values, dtype=object)
    return frame
