"""Plans that xtrax.tiling made under a budget, feasible or not."""

import math

import pytest

from xtrax.eda import explain_plan, extract_plan_stats, render
from xtrax.tiling import AxisSpec, BatchPlanner, BudgetInfeasibleError, MemoryBudget

SPECS = [AxisSpec("sample", 1000, 50), AxisSpec("head", 8, 2)]


def additive(decisions):
    """1,000 bytes, and 100 for each sample and 10 for each head at once."""
    sample, head = (decision.batch_size for decision in decisions)
    return 1_000 + 100 * sample + 10 * head


def test_a_plan_under_a_budget_tells_its_memory():
    plan = BatchPlanner(budget=MemoryBudget(20_000, additive)).plan(SPECS)
    stats = extract_plan_stats(plan)
    assert stats.fits is True
    assert stats.memory is not None
    assert stats.memory.budget == 20_000
    assert stats.memory.estimate == additive(plan.decisions) <= 20_000
    for axis, decision, per_element in zip(stats.axes, plan.decisions, (100, 10), strict=True):
        assert axis.memory_estimate_bytes == per_element * decision.batch_size
    assert stats.memory_warnings == ()


def test_an_infeasible_plan_can_be_looked_at():
    with pytest.raises(BudgetInfeasibleError) as caught:
        BatchPlanner(budget=MemoryBudget(2_000, additive)).plan(SPECS)
    plan = caught.value.plan
    stats = explain_plan(plan)
    assert stats.fits is False
    assert stats.memory is not None
    assert stats.memory.over == additive(plan.decisions) - 2_000
    assert all(axis.reasoning for axis in stats.axes)
    page = render(plan)
    assert '<p class="verdict over">Does not fit: ' in page
    assert 'class="toomuch" style' in page


def test_nested_axes_whose_sizes_multiply():
    def product(decisions):
        return 100 + 7 * math.prod(decision.batch_size for decision in decisions)

    plan = BatchPlanner(budget=MemoryBudget(10**6, product)).plan(SPECS)
    stats = extract_plan_stats(plan)
    assert stats.memory is not None
    assert stats.memory.estimate == product(plan.decisions)
    assert "the shares of the axes overlap" in render(plan)
