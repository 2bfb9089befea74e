"""Plans of axes whose data is given, so that duplicates can be found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import (
    AmbiguousAxisError,
    AxisRole,
    AxisSpec,
    BatchPlanner,
    Bucket,
    BudgetInfeasibleError,
    CarrySpec,
    DedupGather,
    DedupSpec,
    MemoryBudget,
    RemainderWarning,
    SafeMap,
    Scan,
    Vmap,
    axis_dispatch,
    find_duplicates,
    get_k_bucket,
)


def decide(spec, xs, **planner):
    return BatchPlanner(**planner).plan([spec], data={spec.name: xs}).decisions[0]


def eligible(size, limit=1 << 20, **fields):
    return AxisSpec("batch", size, limit, dedup_eligible=True, **fields)


def repeating(size, k):
    return np.arange(size) % k


def test_duplicates_make_a_dedup_gather_that_computes_the_same():
    xs = {"x": np.tile(np.arange(12.0, dtype=np.float32).reshape(4, 3), (25, 1))}
    decision = decide(eligible(100), xs)
    assert decision.strategy == find_duplicates(xs).to_dedup_gather()
    assert decision.batch_size == 4
    assert decision.reasoning.startswith("4 of the 100 elements of its data are distinct: computing 4 saves 96")
    ys = axis_dispatch(decision.strategy, lambda row: row["x"].sum(), xs)
    np.testing.assert_array_equal(ys, xs["x"].sum(axis=1))


@given(size=st.integers(1, 1000), k=st.integers(1, 1000))
@settings(max_examples=60, deadline=None)
def test_it_pays_if_four_times_what_is_saved_exceeds_what_is_moved(size, k):
    k = min(k, size)
    decision = decide(eligible(size), repeating(size, k))
    pays = 4 * (size - get_k_bucket(k)) > size + get_k_bucket(k)
    assert isinstance(decision.strategy, DedupGather if pays else Vmap)
    assert f"{k} of the {size} elements of its data are distinct" in decision.reasoning
    assert f"computing {get_k_bucket(k)} saves {max(size - get_k_bucket(k), 0)}" in decision.reasoning


def test_what_does_not_pay_is_planned_by_its_size():
    with pytest.warns(RemainderWarning):
        decision = decide(eligible(100, 32), repeating(100, 90))
    assert decision.strategy == SafeMap(32)
    assert decision.reasoning == (
        "cardinality 100 > default_batch_size 32: 4 chunks of 25, balanced because 100 is not a multiple of 32 "
        "(remainder 4); dedup_eligible, but 90 of the 100 elements of its data are distinct: computing 128 saves 0, "
        "no more than gathering costs (100 + 128 moves, 4 to an element)"
    )


def test_no_more_than_the_default_are_computed_at_once():
    xs = repeating(4096, 60)
    assert decide(eligible(4096, 64), xs).strategy == find_duplicates(xs).to_dedup_gather()
    decision = decide(eligible(4096, 30), xs)
    assert decision.strategy == find_duplicates(xs).to_dedup_gather(30)
    assert decision.batch_size == 30
    chunks = (
        "; 64 > default_batch_size 30: 3 chunks of 22, balanced because 64 is not a multiple of 30 (remainder 4), "
        "elements computed twice: 2"
    )
    assert decision.reasoning == (
        "60 of the 4096 elements of its data are distinct: computing 64 saves 4032, more than gathering costs "
        "(4096 + 64 moves, 4 to an element)" + chunks
    )
    given = BatchPlanner(dedup_specs=[find_duplicates(xs)]).plan([eligible(4096, 30)]).decisions[0]
    assert given.strategy == find_duplicates(xs).to_dedup_gather()  # what the caller gave stays as it is


def elements(decisions):
    return 100 * decisions[0].batch_size


def test_a_budget_decides_whether_the_distinct_elements_fit():
    xs = repeating(4096, 64)
    plan = BatchPlanner(budget=MemoryBudget(6_400, elements)).plan([eligible(4096, 32)], data={"batch": xs})
    assert isinstance(plan.decisions[0].strategy, DedupGather)
    assert plan.memory is not None
    assert plan.memory.estimate == 6_400
    plan = BatchPlanner(budget=MemoryBudget(6_399, elements)).plan([eligible(4096, 32)], data={"batch": xs})
    assert plan.decisions[0].strategy == find_duplicates(xs).to_dedup_gather(32)
    assert plan.memory is not None
    assert plan.memory.estimate == 3_200
    with pytest.raises(BudgetInfeasibleError):
        BatchPlanner(budget=MemoryBudget(3_199, elements)).plan([eligible(4096, 32)], data={"batch": xs})


def step(carry, x):
    return carry, x


def test_a_spec_wins_over_the_data_and_says_so():
    xs = repeating(8, 2)
    dedup = DedupSpec("batch", np.arange(8), np.arange(8), k=8)
    decision = decide(eligible(8), xs, dedup_specs=[dedup])
    assert decision.strategy == dedup.to_dedup_gather()
    assert decision.reasoning.endswith("; its data not searched for duplicates")
    decision = decide(eligible(8), xs, carry_specs=[CarrySpec("batch", 0, step)])
    assert isinstance(decision.strategy, Scan)
    assert decision.reasoning.endswith("; its data not searched for duplicates")
    decision = decide(eligible(8, bucket_boundaries=(4,)), xs)
    assert decision.strategy == Bucket((4,))
    assert decision.reasoning.endswith("; its data not searched for duplicates")


def test_an_axis_that_is_not_eligible_is_not_searched():
    decision = decide(AxisSpec("batch", 8, 8), repeating(8, 2))
    assert decision.strategy == Vmap()
    assert "not searched for duplicates, since the axis is not dedup_eligible" in decision.reasoning


def test_an_eligible_axis_without_data_says_so():
    plan = BatchPlanner().plan([eligible(8), AxisSpec("other", 8, 8)], data={"other": repeating(8, 2)})
    assert plan.decisions[0].strategy == Vmap()
    assert "no DedupSpec and no data were given" in plan.decisions[0].reasoning
    assert BatchPlanner().plan([eligible(8)], data={}) == BatchPlanner().plan([eligible(8)])


def test_several_axes_are_looked_at_each():
    specs = [eligible(100), AxisSpec("time", 64, 64, dedup_eligible=True), AxisSpec("unit", 4, 8)]
    data = {"batch": repeating(100, 3), "time": jnp.arange(64)}
    batch, time, unit = BatchPlanner().plan(specs, data=data).decisions
    assert isinstance(batch.strategy, DedupGather)
    assert time.strategy == Vmap()
    assert unit.strategy == Vmap()


def test_empty_data_is_planned_as_an_empty_axis():
    decision = decide(eligible(0), np.ones((0, 3)))
    assert decision.strategy == Vmap()
    assert "its data is empty" in decision.reasoning


def test_data_claims_no_unknown_axis():
    with pytest.raises(AmbiguousAxisError):
        decide(eligible(8, role=AxisRole.UNKNOWN), repeating(8, 2))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"bach": np.ones(8)}, ValueError, r"data names axis 'bach', which is not planned; .*\['batch'\]"),
        ({"batch": np.ones(7)}, ValueError, r"data\['batch'\] has 7 elements .* axis 'batch' has cardinality 8"),
        ({"batch": [np.ones(8), np.ones(7)]}, ValueError, r"data\['batch'\]\[0\] has 8 elements .*\[1\] has 7"),
        ({"batch": {}}, ValueError, r"data\['batch'\] has no leaves"),
        ({"batch": 3}, TypeError, r"data\['batch'\] must be a numpy or JAX array"),
        ({"batch": np.array([None] * 8)}, TypeError, "dtype object"),
        (np.ones(8), TypeError, "data must be a mapping"),
        ([("batch", np.ones(8))], TypeError, "data must be a mapping"),
    ],
)
def test_bad_data_is_refused(data, error, message):
    with pytest.raises(error, match=message):
        BatchPlanner().plan([eligible(8)], data=data)


def test_traced_data_is_refused():
    with pytest.raises(TypeError, match=r"data\['batch'\] is being traced"):
        jax.jit(lambda x: decide(eligible(8), x))(jnp.ones(8))
