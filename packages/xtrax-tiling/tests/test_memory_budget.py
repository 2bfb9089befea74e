"""Plans under a budget of memory, and plans whose axes an estimator decides about."""

import dataclasses
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import (
    AxisSpec,
    BatchPlan,
    BatchPlanner,
    Bucket,
    BudgetInfeasibleError,
    CarrySpec,
    DedupGather,
    DedupSpec,
    MemoryBudget,
    PlanMemory,
    RemainderWarning,
    SafeMap,
    Scan,
    Vmap,
    plan,
)

quiet = pytest.mark.filterwarnings("ignore::xtrax.tiling.RemainderWarning")


def affine(fixed, slopes):
    """Bytes that each axis adds to by itself."""
    return lambda decisions: fixed + sum(slopes[d.spec.name] * d.batch_size for d in decisions)


def product(decisions):
    """Bytes of nested axes."""
    return math.prod(d.batch_size for d in decisions)


def under(bytes, estimate, specs, **planner):
    return BatchPlanner(budget=MemoryBudget(bytes, estimate), **planner).plan(specs)


def strategies(plan):
    return [d.strategy for d in plan.decisions]


def test_the_names_are_where_the_planner_is():
    assert plan.MemoryBudget is MemoryBudget
    assert plan.PlanMemory is PlanMemory


def test_a_plan_that_fits_is_all_at_once_even_where_an_axis_exceeds_its_default():
    made = under(1000, affine(0, {"a": 10}), [AxisSpec("a", 100, 32)])
    assert strategies(made) == [Vmap()]
    assert made.decisions[0].batch_size == 100
    assert made.decisions[0].reasoning == "all 100 at once: the plan needs 1000 bytes, within the budget of 1000 bytes"


def test_one_byte_too_many_demotes():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = under(999, affine(0, {"a": 10}), [AxisSpec("a", 100, 25)])
    assert strategies(made) == [SafeMap(25)]
    reasoning = made.decisions[0].reasoning
    assert reasoning == (
        "demoted to fit the budget of 999 bytes: 4 chunks of 25; the plan needs 250 bytes instead of 1000 bytes"
    )


def test_seed_joint_budget_demotes_greedily_in_spec_order_until_the_plan_fits():
    slopes = {"a": 1, "b": 10, "c": 100}
    specs = [AxisSpec(name, 64, 16) for name in "abc"]
    # 64 + 640 + 6400 = 7104 at first; with a in chunks 7056; with a and b 6576; with all 1776.
    assert strategies(under(7104, affine(0, slopes), specs)) == [Vmap(), Vmap(), Vmap()]
    assert strategies(under(7100, affine(0, slopes), specs)) == [SafeMap(16), Vmap(), Vmap()]
    assert strategies(under(7000, affine(0, slopes), specs)) == [SafeMap(16), SafeMap(16), Vmap()]
    assert strategies(under(6000, affine(0, slopes), specs)) == [SafeMap(16)] * 3
    assert strategies(under(7100, affine(0, slopes), specs[::-1])) == [SafeMap(16), Vmap(), Vmap()]


@quiet
@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.integers(0, 9)), max_size=4),
    nested=st.booleans(),
    share=st.floats(0.01, 1.2),
)
@settings(max_examples=100)
def test_the_first_axes_that_suffice_are_demoted(sizes, nested, share):
    specs = [AxisSpec(f"axis{i}", size, default) for i, (size, default, _) in enumerate(sizes)]

    def cost(chunks):
        return math.prod(chunks) if nested else 5 + sum(c * s for c, (_, _, s) in zip(chunks, sizes, strict=True))

    # Reference: the shortest run of axes, from the first, whose demotion brings the cost within the budget.
    candidates = []
    choices = [i for i, (size, default, _) in enumerate(sizes) if size > default]
    for n in range(len(choices) + 1):
        demoted = choices[:n]
        candidates.append([default if i in demoted else size for i, (size, default, _) in enumerate(sizes)])
    budget = max(1, int(share * cost(candidates[0])))
    expected = next((chunks for chunks in candidates if cost(chunks) <= budget), None)

    try:
        made = under(budget, lambda decisions: cost([d.batch_size for d in decisions]), specs)
    except BudgetInfeasibleError as error:
        assert expected is None
        made = error.plan
        assert not made.memory.fits
        assert [d.batch_size for d in made.decisions] == candidates[-1]
    else:
        assert [d.batch_size for d in made.decisions] == expected
        assert made.memory.fits
    for decision in made.decisions:
        chunked = decision.batch_size < decision.spec.cardinality
        assert decision.strategy == (SafeMap(decision.batch_size) if chunked else Vmap())
    memory = made.memory
    assert memory.estimate == cost([d.batch_size for d in made.decisions])
    assert memory.budget == budget
    assert memory.compiles == 0
    # At the plan the line through it gives the estimate; a slope is the way to the axis's other size.
    chunks = {d.spec.name: d.batch_size for d in made.decisions}
    line = memory.fixed_bytes + sum(slope * chunks[name] for name, slope in memory.slope_by_axis.items())
    assert line == pytest.approx(memory.estimate, abs=0.5001)
    assert list(memory.slope_by_axis) == [specs[i].name for i in choices]
    for i in choices:
        other = [d.batch_size for d in made.decisions]
        step = specs[i].default_batch_size if other[i] == specs[i].cardinality else specs[i].cardinality
        moved = memory.slope_by_axis[specs[i].name] * (step - other[i])
        other[i] = step
        assert moved == pytest.approx(cost(other) - memory.estimate)


def test_memory_of_an_affine_estimate_is_that_line():
    made = under(1000, affine(700, {"a": 3, "b": 20}), [AxisSpec("a", 100, 10), AxisSpec("b", 50, 5)])
    assert made.memory == PlanMemory(1000, 700, {"a": 3.0, "b": 20.0}, 700 + 30 + 100, compiles=0)
    assert hash(made) == hash(under(1000, affine(700, {"a": 3, "b": 20}), [d.spec for d in made.decisions]))
    assert BatchPlanner().plan([AxisSpec("a", 1, 1)]).memory is None


def test_an_axis_no_larger_than_its_default_is_not_demoted():
    specs = [AxisSpec("small", 8, 8), AxisSpec("large", 64, 16)]
    made = under(600, affine(0, {"small": 10, "large": 10}), specs)
    assert strategies(made) == [Vmap(), SafeMap(16)]
    assert list(made.memory.slope_by_axis) == ["large"]


def test_seed_joint_budget_leaves_carries_duplicates_and_buckets_to_their_rules():
    carry = CarrySpec("time", (), lambda carry, x: (carry, x))
    dedup = DedupSpec("copies", np.array([0, 2, 3]), np.array([0, 0, 1, 2, 1]), k=3)
    specs = [
        AxisSpec("time", 100, 8),
        AxisSpec("copies", 5, 2),
        AxisSpec("ragged", 50, 10, bucket_boundaries=(4, 8)),
        AxisSpec("batch", 64, 16),
    ]
    seen = []

    def estimate(decisions):
        seen.append([(type(d.strategy), d.batch_size) for d in decisions])
        return 1000 if decisions[3].batch_size == 64 else 10

    made = under(500, estimate, specs, carry_specs=[carry], dedup_specs=[dedup])
    assert seen[:2] == [
        [(Scan, 1), (DedupGather, 4), (Bucket, 10), (Vmap, 64)],
        [(Scan, 1), (DedupGather, 4), (Bucket, 10), (SafeMap, 16)],
    ]
    assert list(made.memory.slope_by_axis) == ["batch"]
    assert "budget" not in made.decisions[0].reasoning


def test_a_plan_that_cannot_fit_says_so_and_can_be_looked_at():
    specs = [AxisSpec("batch", 100, 50), AxisSpec("head", 8, 8), AxisSpec("time", 10, 2)]
    carry = CarrySpec("time", (), lambda carry, x: (carry, x))
    with pytest.raises(BudgetInfeasibleError) as caught:
        under(123, affine(7, {"batch": 10, "head": 1, "time": 0}), specs, carry_specs=[carry])
    message = str(caught.value)
    assert "515 bytes" in message
    assert "123 bytes" in message
    for state in ("'batch': SafeMap(50), 50 of 100", "'head': Vmap, 8 of 8", "'time': Scan, 1 of 10"):
        assert state in message
    made = caught.value.plan
    assert isinstance(made, BatchPlan)
    assert strategies(made)[:2] == [SafeMap(50), Vmap()]
    assert (made.memory.estimate, made.memory.budget, made.memory.fits) == (515, 123, False)
    assert "leaves no choice" in made.decisions[1].reasoning
    assert "over by 392 bytes" in str(made)
    assert isinstance(caught.value, ValueError)


def test_an_infeasible_plan_survives_pickling():
    with pytest.raises(BudgetInfeasibleError) as caught:
        under(1, affine(7, {"a": 1}), [AxisSpec("a", 4, 2)])
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.plan == caught.value.plan


def test_an_empty_plan_is_held_to_the_budget_too():
    assert under(10, lambda decisions: 10, []).memory == PlanMemory(10, 10, {}, 10, 0)
    with pytest.raises(BudgetInfeasibleError, match="axes are none"):
        under(10, lambda decisions: 11, [])


def test_what_the_estimate_raises_reaches_the_caller():
    def broken(decisions):
        raise KeyError("no such table")

    with pytest.raises(KeyError, match="no such table"):
        under(10, broken, [AxisSpec("a", 4, 2)])


@pytest.mark.parametrize("wrong", [None, "12", True, [1], 2j])
def test_estimates_that_are_no_numbers_are_refused(wrong):
    with pytest.raises(TypeError, match="the budget's estimate must return a number of bytes"):
        under(10, lambda decisions: wrong, [AxisSpec("a", 4, 2)])


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), np.float32("nan")])
def test_estimates_that_are_no_size_are_refused(wrong):
    with pytest.raises(ValueError, match="finite and not negative"):
        under(10, lambda decisions: wrong, [AxisSpec("a", 4, 2)])


def test_estimates_are_rounded_up():
    assert under(10, lambda decisions: np.float32(9.2), []).memory.estimate == 10
    with pytest.raises(BudgetInfeasibleError):
        under(10, lambda decisions: 10.001, [])


@pytest.mark.parametrize(
    ("bytes", "estimate", "error", "message"),
    [
        (0, product, ValueError, "bytes must be at least 1, but is 0"),
        (-5, product, ValueError, "bytes must be at least 1"),
        (1e9, product, TypeError, "bytes must be an integer"),
        (True, product, TypeError, "bytes must be an integer"),
        ("1GB", product, TypeError, "bytes must be an integer"),
        (None, product, TypeError, "bytes must be an integer"),
        (10, 10, TypeError, "estimate must be callable as decisions -> bytes"),
        (10, None, TypeError, "estimate must be callable"),
    ],
)
def test_bad_budgets_are_refused(bytes, estimate, error, message):
    with pytest.raises(error, match=message):
        MemoryBudget(bytes, estimate)


def test_bad_planners_are_refused():
    wrong: Any = 10**9
    with pytest.raises(TypeError, match="budget must be a MemoryBudget"):
        BatchPlanner(budget=wrong)
    with pytest.raises(TypeError, match="memory_estimator must be callable"):
        BatchPlanner(wrong)
    with pytest.raises(ValueError, match="budget and memory_estimator are both given"):
        BatchPlanner(lambda spec: 1, budget=MemoryBudget(10, product))
    with pytest.raises(TypeError, match="memory must be a PlanMemory"):
        BatchPlan((), wrong)


def test_remainders_under_a_budget_warn_once():
    with pytest.warns(RemainderWarning) as caught:
        made = under(40, product, [AxisSpec("a", 10, 4), AxisSpec("b", 10, 10)])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "remainder 2" in made.decisions[0].reasoning


def test_budgeted_plans_show_their_memory():
    made = under(20_000_000, affine(0, {"<a>": 1000}), [AxisSpec("<a>", 30_000, 10_000)])
    assert str(made).splitlines()[-1] == (
        "memory: estimate 10000000 bytes (10 MB) of a budget of 20000000 bytes (20 MB)"
    )
    html = made._repr_html_()
    assert "20 MB" in html
    assert "<a>" not in html


def test_plan_memory_keeps_its_own_slopes():
    slopes = {"a": 1.0}
    memory = PlanMemory(10, 5, slopes, 6, 0)
    slopes["b"] = 2.0
    assert memory.slope_by_axis == {"a": 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(memory, "estimate", 3)  # noqa: B010


# An estimator for one axis at a time, held against the limit of the device.


@pytest.fixture
def limit(monkeypatch):
    monkeypatch.setattr(plan, "device_memory_budget", lambda: 1000)
    return 1000


@quiet
@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(
    ("size", "default", "granularity", "estimate", "strategy"),
    [
        (100, 32, 1, 1000, Vmap()),  # fits, though larger than the default
        (100, 32, 1, 1001, SafeMap(32)),
        (100, 32, 1, 10**15, SafeMap(32)),
        (100, 128, 1, 1000, Vmap()),
        (100, 128, 1, 4000, SafeMap(25)),  # the default would be all, so a quarter of the elements
        (100, 128, 8, 4000, SafeMap(24)),
        (100, 128, 1, 10**15, SafeMap(1)),
        (100, 128, 64, 4000, SafeMap(64)),
        (100, 128, 100, 4000, Vmap()),  # no smaller multiple of the granularity
        (1, 8, 1, 10**15, Vmap()),
        (0, 8, 1, 0, Vmap()),
    ],
)
def test_the_device_limit_decides_between_vmap_and_safe_map(size, default, granularity, estimate, strategy):
    made = BatchPlanner(lambda spec: estimate).plan([AxisSpec("a", size, default, granularity)])
    assert strategies(made) == [strategy]
    assert f"{estimate} bytes" in made.decisions[0].reasoning
    assert "1000 bytes" in made.decisions[0].reasoning
    assert made.memory is None


@pytest.mark.usefixtures("limit")
def test_an_estimator_that_raises_is_told_about_and_the_sizes_decide():
    def estimator(spec):
        if spec.name == "bad":
            raise LookupError("no table for bad")
        return 10**6

    specs = [AxisSpec("bad", 8, 8), AxisSpec("good", 64, 16)]
    with pytest.warns(RuntimeWarning, match=r"raised LookupError for axis 'bad'.*no table for bad") as caught:
        made = BatchPlanner(estimator).plan(specs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert strategies(made) == [Vmap(), SafeMap(16)]
    assert "cardinality 8 <= default_batch_size 8" in made.decisions[0].reasoning


def test_an_unknown_limit_is_told_about_and_the_sizes_decide(monkeypatch):
    def unknown():
        raise RuntimeError("the memory of this device is not known")

    monkeypatch.setattr(plan, "device_memory_budget", unknown)
    with pytest.warns(RuntimeWarning, match="planned by their sizes: the memory of this device is not known"):
        made = BatchPlanner(lambda spec: 1).plan([AxisSpec("a", 64, 16)])
    assert strategies(made) == [SafeMap(16)]


@pytest.mark.usefixtures("limit")
def test_an_estimator_is_asked_about_axes_that_nothing_else_decides():
    asked = []

    def estimator(spec):
        asked.append(spec.name)
        return 1

    carry = CarrySpec("time", (), lambda carry, x: (carry, x))
    specs = [AxisSpec("time", 9, 3), AxisSpec("ragged", 9, 3, bucket_boundaries=(4,)), AxisSpec("batch", 9, 3)]
    BatchPlanner(estimator, carry_specs=[carry]).plan(specs)
    assert asked == ["batch"]


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize(("wrong", "error"), [(None, TypeError), (True, TypeError), (-1, ValueError)])
def test_estimators_that_return_no_size_are_refused(wrong, error):
    with pytest.raises(error, match="memory_estimator for axis 'a' must return a number of bytes"):
        BatchPlanner(lambda spec: wrong).plan([AxisSpec("a", 9, 3)])
