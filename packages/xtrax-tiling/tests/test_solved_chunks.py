"""Chunks that a budget chooses: the largest that fits, in few estimates."""

import math
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import AxisSpec, BatchPlanner, BudgetInfeasibleError, MemoryBudget, RemainderWarning, SafeMap, Vmap


class Counted:
    """An estimate that is called with what runs at once on each axis, and counts its calls."""

    def __init__(self, cost):
        self.cost = cost
        self.seen = []

    def __call__(self, decisions):
        sizes = [at_once(d) for d in decisions]
        self.seen.append(sizes)
        return self.cost(*sizes)


def balanced(total, limit):
    """The size of the chunks that `limit` leads to, by hand."""
    return math.ceil(total / math.ceil(total / limit))


def at_once(decision):
    if isinstance(decision.strategy, Vmap):
        return decision.spec.cardinality
    assert decision.strategy == SafeMap(decision.batch_size)
    return balanced(decision.spec.cardinality, decision.batch_size)


def solved(bytes, estimate, specs, solve=True) -> Any:
    """The plan, also where it does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemainderWarning)
        try:
            return BatchPlanner(budget=MemoryBudget(bytes, estimate, solve)).plan(specs)
        except BudgetInfeasibleError as error:
            return error.plan


@given(
    total=st.integers(0, 3000),
    step=st.sampled_from([1, 1, 1, 3, 8, 128]),
    fixed=st.integers(0, 5000),
    slope=st.integers(1, 50),
    share=st.floats(0.001, 1.1),
)
@settings(max_examples=200)
def test_an_affine_axis_gets_the_largest_chunk_that_fits(total, step, fixed, slope, share):
    estimate = Counted(lambda size: fixed + slope * size)
    budget = max(1, int(share * (fixed + slope * total)))
    made = solved(budget, estimate, [AxisSpec("a", total, 7, step)])
    (decision,) = made.decisions
    if fixed + slope * total <= budget:
        assert decision.strategy == Vmap()
        assert len(estimate.seen) == 1
        return
    # Every limit that may be chosen, by brute force.
    limits = range(step, total, step)
    fitting = [limit for limit in limits if fixed + slope * balanced(total, limit) <= budget]
    assert made.memory.fits == bool(fitting)
    assert made.memory.estimate == fixed + slope * at_once(decision)
    if fitting:
        assert decision.batch_size % step == 0
        assert at_once(decision) == max(balanced(total, limit) for limit in fitting)
    elif limits:
        assert at_once(decision) == min(balanced(total, limit) for limit in limits)
    else:
        assert decision.strategy == Vmap()
        assert "leave no choice" in decision.reasoning or total <= 1
    if fitting and at_once(decision) >= 32 and total > 128:
        assert len(estimate.seen) <= 1 + 3
    if limits:
        # The line of the plan is that of the estimate.
        assert made.memory.slope_by_axis["a"] == pytest.approx(slope)
        assert made.memory.fixed_bytes + slope * decision.batch_size == pytest.approx(made.memory.estimate, abs=1)
        assert made.decisions[0].reasoning.count("instead of") == 1


@given(
    total=st.integers(2, 5000),
    cost=st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 10**6)), max_size=4),
    share=st.floats(0.001, 1.0),
)
@settings(max_examples=200)
def test_no_plan_that_is_returned_is_over_whatever_the_estimate_does(total, cost, share):
    """Steps up and down at arbitrary sizes: then the largest chunk may be missed, but not the budget."""

    def steps(size):
        return 3 * size + sum(extra for start, extra in cost if size >= start)

    estimate = Counted(steps)
    budget = max(1, int(share * steps(total)))
    made = solved(budget, estimate, [AxisSpec("a", total, 7)])
    assert made.memory.estimate == steps(at_once(made.decisions[0]))
    # Steps up cannot hide the smallest chunk, which is tried before giving up.
    assert made.memory.fits == (steps(1) <= budget)
    assert len(estimate.seen) < 30


def test_a_line_that_bends_is_drawn_anew():
    """Memory that grows faster beyond 200 elements fails the first confirmation; slower, it leaves room."""
    faster = Counted(lambda size: 10 * size + 5 * max(size - 200, 0))
    made = solved(20_000, faster, [AxisSpec("a", 100_000, 7)])
    assert 10 * 1400 + 5 * 1200 == 20_000
    assert 1350 <= at_once(made.decisions[0]) <= 1400
    assert made.memory.fits
    slower = Counted(lambda size: 10 * min(size, 200) + 4 * max(size - 200, 0))
    made = solved(20_000, slower, [AxisSpec("a", 100_000, 7)])
    assert made.memory.fits
    assert made.memory.estimate >= 0.8 * 20_000
    assert max(len(faster.seen), len(slower.seen)) <= 7


def test_small_sizes_are_tried_and_not_extrapolated():
    """Below 16 elements this program takes much less, or much more, than the line says."""
    less = Counted(lambda size: 10 * size + (10_000 if size >= 16 else 0))
    made = solved(1000, less, [AxisSpec("a", 10_000, 7)])
    assert at_once(made.decisions[0]) == 15
    more = Counted(lambda size: 10 * size + (10_000 if size < 16 else 0))
    made = solved(1000, more, [AxisSpec("a", 10_000, 7)])
    assert at_once(made.decisions[0]) == 100
    assert [size for (size,) in more.seen if size < 16] == []


def test_a_nest_is_solved_in_order():
    estimate = Counted(lambda a, b: 100 + 4 * a * b)
    specs = [AxisSpec("a", 1000, 7), AxisSpec("b", 50, 7)]
    made = solved(100 + 4 * 600 * 50, estimate, specs)
    assert [at_once(d) for d in made.decisions] == [500, 50]
    assert isinstance(made.decisions[1].strategy, Vmap)
    assert made.memory.slope_by_axis == {"a": pytest.approx(200)}
    # Even one element of a is too much with all of b, so b is cut as well.
    made = solved(100 + 4 * 30, estimate, specs)
    assert [at_once(d) for d in made.decisions] == [1, 25]
    assert made.memory.slope_by_axis == {"a": pytest.approx(100), "b": pytest.approx(4)}
    assert "no chunk of this axis" in made.decisions[0].reasoning


def test_an_axis_whose_chunks_need_no_less_stays_all_at_once():
    made = solved(1000, Counted(lambda a, b: 2000 + 0 * a), [AxisSpec("a", 100, 7), AxisSpec("b", 100, 7)])
    assert [d.strategy for d in made.decisions] == [Vmap(), Vmap()]
    assert "chunks of this axis need no less" in made.decisions[0].reasoning
    assert "instead of" not in str(made)
    made = solved(
        1000, Counted(lambda a, b: 10 * b + (50 if a < 100 else 0)), [AxisSpec("a", 100, 7), AxisSpec("b", 200, 7)]
    )
    assert [at_once(d) for d in made.decisions] == [100, 100]


def test_axes_that_are_named_are_solved_and_the_others_take_their_default():
    specs = [AxisSpec("a", 1000, 10), AxisSpec("b", 1000, 10)]
    made = solved(3000, Counted(lambda a, b: 4 * a + 8 * b), specs, solve={"b"})
    assert [at_once(d) for d in made.decisions] == [10, 334]
    made = solved(3000, Counted(lambda a, b: 4 * a + 8 * b), specs, solve=["a"])
    assert [at_once(d) for d in made.decisions] == [1, 10]


def test_names_that_are_not_planned_are_refused():
    budget = MemoryBudget(10, lambda decisions: 1, solve=["c"])
    with pytest.raises(ValueError, match=r"budget.solve names axis 'c', which is not planned"):
        BatchPlanner(budget=budget).plan([AxisSpec("a", 4, 2)])


@pytest.mark.parametrize("wrong", ["a", 3, None, [3]])
def test_what_is_no_set_of_names_is_refused(wrong):
    with pytest.raises(TypeError, match="solve"):
        MemoryBudget(10, lambda decisions: 1, solve=wrong)


def test_what_no_chunk_moves_is_told_where_a_plan_cannot_fit():
    budget = MemoryBudget(5000, Counted(lambda size: 7000 + 10 * size), solve=True)
    with pytest.raises(BudgetInfeasibleError) as caught:
        BatchPlanner(budget=budget).plan([AxisSpec("a", 1000, 7)])
    message = str(caught.value)
    assert "the plan needs 7010 bytes" in message
    assert "7000 bytes of it whatever the chunks" in message
    assert "Raise the budget" in message
    assert caught.value.plan.decisions[0].strategy == SafeMap(1)
