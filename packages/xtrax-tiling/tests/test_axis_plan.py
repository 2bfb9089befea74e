"""Axis specs, and the rules by which they are planned."""

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import (
    AmbiguousAxisError,
    AxisDecision,
    AxisRole,
    AxisSpec,
    BatchPlan,
    BatchPlanner,
    Bucket,
    CarryShape,
    CarrySpec,
    DedupSpec,
    RemainderWarning,
    SafeMap,
    Scan,
    Vmap,
    WhileCarry,
    make_axis_dispatch,
)

anything: Any = None  # an argument of the wrong type, on purpose


def step(carry, x):
    return carry + x, x


def advance(carry):
    return carry + 1


def go_on(carry):
    return carry < 3


def decide(spec, **planner):
    return BatchPlanner(**planner).plan([spec]).decisions[0]


@given(cardinality=st.integers(0, 200), limit=st.integers(1, 50))
@settings(max_examples=50)
def test_size_decides_between_vmap_and_safe_map(cardinality, limit):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decision = decide(AxisSpec("batch", cardinality, limit))
    if cardinality <= limit:
        assert decision.strategy == Vmap()
        assert decision.batch_size == cardinality
    else:
        assert decision.strategy == SafeMap(limit)
        assert decision.batch_size == limit
    remainder = cardinality > limit and cardinality % limit != 0
    assert [w.category for w in caught] == [RemainderWarning] * remainder
    assert str(cardinality) in decision.reasoning
    assert str(limit) in decision.reasoning


def test_every_plan_runs():
    with pytest.warns(RemainderWarning):
        plan = BatchPlanner().plan([AxisSpec("a", 7, 8), AxisSpec("b", 7, 3)])
    for decision in plan.decisions:
        assert make_axis_dispatch(decision.strategy)(lambda x: -x, np.arange(7)).tolist() == [-i for i in range(7)]


@pytest.mark.filterwarnings("ignore::xtrax.tiling.RemainderWarning")
@pytest.mark.parametrize(("size", "how"), [
    # 2 chunks of 4 hold one element more than 7; 3 chunks of 3 hold 9.
    (7, "2 chunks of 4, the first two overlapping because 7 is not a multiple of 4 (remainder 3), elements computed "
        "twice: 1"),
    (9, "3 chunks of 3, balanced because 9 is not a multiple of 4 (remainder 1)"),
])  # fmt: skip
def test_the_reasoning_says_how_chunks_come_out(size, how):
    assert decide(AxisSpec("batch", size, 4)).reasoning == f"cardinality {size} > default_batch_size 4: {how}"


def test_one_warning_names_every_axis_with_a_remainder_and_points_at_the_caller():
    specs = [AxisSpec("a", 10, 4), AxisSpec("b", 8, 4), AxisSpec("c", 9, 2)]
    with pytest.warns(RemainderWarning) as caught:
        BatchPlanner().plan(specs)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert "'a'" in message
    assert "'b'" not in message
    assert "'c'" in message
    assert "remainder 2" in message
    assert issubclass(RemainderWarning, RuntimeWarning)


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (
            [AxisSpec("batch", 100, 32)],
            "axis 'batch' runs as 4 chunks of 25, since 100 elements are no multiple of 32 (remainder 4). "
            "Results are those of jax.vmap; nothing needs to be done.",
        ),
        (
            # ceil(10 / 3) = 4 chunks of ceil(10 / 4) = 3 hold 12 places, ceil(5 / 2) = 3 chunks of 2 hold 6.
            [AxisSpec("a", 10, 3), AxisSpec("b", 5, 2)],
            "axis 'a' runs as 4 chunks of 3, since 10 elements are no multiple of 3 (remainder 1). "
            "axis 'b' runs as 3 chunks of 2, since 5 elements are no multiple of 2 (remainder 1). "
            "Results are those of jax.vmap; nothing needs to be done. "
            "Elements computed twice: 3, or none where the function has side effects.",
        ),
    ],
)
def test_a_remainder_warning_says_whether_anything_needs_to_be_done(specs, text):
    with pytest.warns(RemainderWarning) as caught:
        BatchPlanner().plan(specs)
    assert [str(w.message) for w in caught] == [text]


def test_an_empty_axis_is_planned_and_runs_as_under_vmap():
    plan = BatchPlanner().plan([AxisSpec("a", 0, 8)])
    (decision,) = plan.decisions
    assert decision.strategy == Vmap()
    assert make_axis_dispatch(decision.strategy)(lambda x: x.sum(), np.ones((0, 3))).shape == (0,)


def test_a_carry_makes_a_scan():
    init = jnp.zeros(3)
    spec = AxisSpec("time", 10, 4)
    decision = decide(spec, carry_specs=[CarrySpec("time", init, step, ordered_sinks=False)])
    assert decision.strategy == Scan(step, init, ordered_sinks=False)
    assert decision.batch_size == 1
    decision = decide(spec, carry_specs=[CarrySpec("time", init, step, collect_outputs=False)])
    assert decision.strategy == Scan(step, init, collect_outputs=False)
    decision = decide(spec, carry_specs=[CarrySpec("time", 0, advance, collect_outputs=False, cond=go_on)])
    assert decision.strategy == WhileCarry(advance, go_on, 0)


def test_a_dedup_spec_makes_a_dedup_gather():
    dedup = DedupSpec("batch", np.array([0, 2, 3]), np.array([0, 0, 1, 2, 1]), k=3)
    decision = decide(AxisSpec("batch", 5, 2), dedup_specs=[dedup])
    assert decision.strategy == dedup.to_dedup_gather()
    assert decision.batch_size == 4
    assert "3 of 5" in decision.reasoning


def test_boundaries_make_a_bucket():
    decision = decide(AxisSpec("sequence", 5, 2, heterogeneous=True, bucket_boundaries=[8, 16]))
    assert decision.strategy == Bucket((8, 16))
    assert decision.batch_size == 2


def test_the_first_rule_wins_and_says_what_it_leaves_unused():
    spec = AxisSpec("a", 2, 4, bucket_boundaries=(8,))
    carry = CarrySpec("a", (), step)
    dedup = DedupSpec("a", np.array([0]), np.array([0, 0]), k=1)
    both = decide(spec, carry_specs=[carry], dedup_specs=[dedup])
    assert isinstance(both.strategy, Scan)
    assert "DedupSpec and its bucket_boundaries not used" in both.reasoning
    second = decide(spec, dedup_specs=[dedup])
    assert second.strategy == dedup.to_dedup_gather()
    assert "bucket_boundaries not used" in second.reasoning


def test_an_eligible_axis_without_a_dedup_spec_is_planned_by_size():
    decision = decide(AxisSpec("batch", 8, 4, dedup_eligible=True))
    assert decision.strategy == SafeMap(4)
    assert "no DedupSpec" in decision.reasoning


def test_decisions_keep_the_order_of_the_specs():
    specs = [AxisSpec(name, 4, 8) for name in "zax"]
    assert [d.spec for d in BatchPlanner().plan(specs).decisions] == specs
    assert BatchPlanner().plan(()).decisions == ()


def test_unknown_axes_need_a_carry_or_dedup_spec():
    spec = AxisSpec("batch", 2, 8, role=AxisRole.UNKNOWN)
    with pytest.raises(AmbiguousAxisError, match=r"axis 'batch' has the role UNKNOWN.*@axis_config"):
        decide(spec)
    with pytest.raises(AmbiguousAxisError):
        decide(dataclasses.replace(spec, bucket_boundaries=(4,)))
    assert isinstance(decide(spec, carry_specs=[CarrySpec("batch", (), step)]).strategy, Scan)
    dedup = DedupSpec("batch", np.array([0]), np.array([0, 0]), k=1)
    assert decide(spec, dedup_specs=[dedup]).strategy == dedup.to_dedup_gather()


@pytest.mark.parametrize(
    ("spec", "planner"),
    [(AxisSpec("s", 2, 8, heterogeneous=True), {}), (AxisSpec("s", 2, 8), {"heterogeneous_axes": {"s"}})],
)
def test_heterogeneous_axes_need_a_way_to_one_length(spec, planner):
    with pytest.raises(ValueError, match=r"axis 's' is heterogeneous.*bucket_boundaries"):
        decide(spec, **planner)
    with pytest.raises(ValueError, match="axis 's' is heterogeneous and has a CarrySpec"):
        decide(spec, carry_specs=[CarrySpec("s", (), step)], **planner)
    assert decide(dataclasses.replace(spec, bucket_boundaries=(4,)), **planner).strategy == Bucket((4,))
    dedup = DedupSpec("s", np.array([0]), np.array([0, 0]), k=1)
    assert decide(spec, dedup_specs=[dedup], **planner).strategy == dedup.to_dedup_gather()


@pytest.mark.parametrize(
    "planner",
    [
        {"carry_specs": [CarrySpec("bach", (), step)]},
        {"dedup_specs": [DedupSpec("bach", np.array([0]), np.array([0]), k=1)]},
        {"heterogeneous_axes": ["bach"]},
    ],
)
def test_a_name_without_an_axis_is_refused(planner):
    with pytest.raises(ValueError, match=r"names axis 'bach', which is not planned; .*\['batch'\]"):
        decide(AxisSpec("batch", 2, 8), **planner)


def test_dedup_specs_of_another_size_are_refused():
    with pytest.raises(ValueError, match="maps 2 elements, but the axis has cardinality 3"):
        decide(AxisSpec("a", 3, 8), dedup_specs=[DedupSpec("a", np.array([0]), np.array([0, 0]), k=1)])
    strategy = DedupSpec("a", np.array([0]), np.array([0, 0]), k=1).to_dedup_gather()
    with pytest.raises(ValueError, match="DedupGather of axis 'a' maps 2 elements, but the axis has cardinality 3"):
        AxisDecision(AxisSpec("a", 3, 8), 1, "by hand", strategy)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (("a", 8, "", Vmap()), TypeError, "spec must be an AxisSpec, but is 'a'"),
        ((AxisSpec("a", 3, 8), 8.0, "", Vmap()), TypeError, "batch_size of axis 'a' must be an integer"),
        ((AxisSpec("a", 3, 8), True, "", Vmap()), TypeError, "batch_size of axis 'a' must be an integer"),
        ((AxisSpec("a", 3, 8), 0, "", SafeMap(2)), ValueError, "batch_size of axis 'a' must be at least 1, but is 0"),
        ((AxisSpec("a", 0, 8), -1, "", Vmap()), ValueError, "batch_size of axis 'a' must be at least 0, but is -1"),
        ((AxisSpec("a", 3, 8), 3, None, Vmap()), TypeError, "reasoning of axis 'a' must be a string, but is None"),
        ((AxisSpec("a", 3, 8), 3, "", "vmap"), TypeError, r"strategy of axis 'a' must be a Vmap, .*'vmap'.*Vmap\(\)"),
        ((AxisSpec("a", 3, 8), 3, "", Vmap), TypeError, r"strategy of axis 'a' must be a Vmap, .*pass an object"),
    ],
)
def test_decisions_of_another_type_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        AxisDecision(*fields)


def test_names_are_given_once():
    with pytest.raises(ValueError, match="specs names axis 'a' twice"):
        BatchPlanner().plan([AxisSpec("a", 1, 1), AxisSpec("a", 2, 2)])
    with pytest.raises(ValueError, match="carry_specs names axis 'a' twice"):
        BatchPlanner(carry_specs=[CarrySpec("a", (), step)] * 2)
    decision = decide(AxisSpec("a", 1, 1))
    with pytest.raises(ValueError, match="decisions names axis 'a' twice"):
        BatchPlan((decision, decision))


@pytest.mark.parametrize("specs", [None, AxisSpec("a", 1, 1), "a", [None], ["a"], 3])
def test_specs_of_another_type_are_refused(specs):
    with pytest.raises(TypeError, match="specs must"):
        BatchPlanner().plan(specs)


def test_planner_arguments_of_another_type_are_refused():
    carry = CarrySpec("a", (), step)
    refused: list[Any] = [carry, "a", ["a"], [AxisSpec("a", 1, 1)]]
    for wrong in refused:
        with pytest.raises(TypeError, match="carry_specs must"):
            BatchPlanner(carry_specs=wrong)
    with pytest.raises(TypeError, match="dedup_specs must hold DedupSpec"):
        BatchPlanner(dedup_specs=refused[3])
    with pytest.raises(TypeError, match="heterogeneous_axes must be a set of axis names"):
        BatchPlanner(heterogeneous_axes="batch")
    with pytest.raises(TypeError, match="decisions must hold"):
        BatchPlan((anything,))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": ""}, ValueError, "name is empty"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"cardinality": -1}, ValueError, "cardinality of axis 'a' must be at least 0, but is -1"),
        ({"cardinality": 2.0}, TypeError, "cardinality of axis 'a' must be an integer"),
        ({"cardinality": True}, TypeError, "cardinality of axis 'a' must be an integer"),
        ({"cardinality": float("nan")}, TypeError, "cardinality"),
        ({"default_batch_size": 0}, ValueError, "default_batch_size of axis 'a' must be at least 1"),
        ({"default_batch_size": False}, TypeError, "default_batch_size"),
        ({"tile_granularity": 0}, ValueError, "tile_granularity"),
        ({"tile_granularity": "8"}, TypeError, "tile_granularity"),
        ({"heterogeneous": 1}, TypeError, "heterogeneous of axis 'a' must be True or False"),
        ({"dedup_eligible": None}, TypeError, "dedup_eligible of axis 'a' must be True or False"),
        ({"bucket_boundaries": ()}, ValueError, "bucket_boundaries of axis 'a' is empty"),
        ({"bucket_boundaries": (4, 4)}, ValueError, "strictly ascending, but 4 follows 4"),
        ({"bucket_boundaries": (8, 4)}, ValueError, "strictly ascending, but 4 follows 8"),
        ({"bucket_boundaries": (0, 4)}, ValueError, r"bucket_boundaries of axis 'a'\[0\] must be at least 1"),
        ({"bucket_boundaries": (1, 2.5)}, TypeError, "must be an integer"),
        ({"bucket_boundaries": (True, 2)}, TypeError, "must be an integer"),
        ({"bucket_boundaries": 8}, TypeError, "must be a sequence"),
        ({"bucket_boundaries": "8"}, TypeError, "must be a sequence"),
        ({"role": "known"}, TypeError, "role of axis 'a' must be an AxisRole"),
    ],
)
def test_bad_specs_are_refused(change, error, message):
    arguments: dict[str, Any] = {"name": "a", "cardinality": 1, "default_batch_size": 1}
    with pytest.raises(error, match=message):
        AxisSpec(**arguments | change)


def test_specs_are_frozen_hashable_and_plain():
    spec = AxisSpec("a", np.int64(3), np.int32(2), bucket_boundaries=[2, np.int64(4)])  # ty: ignore[invalid-argument-type]
    assert spec == AxisSpec("a", 3, 2, bucket_boundaries=(2, 4))
    assert hash(spec) == hash(AxisSpec("a", 3, 2, bucket_boundaries=(2, 4)))
    assert type(spec.cardinality) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, "name", "b")  # noqa: B010


def test_old_names_read_with_a_warning():
    spec = AxisSpec("a", 3, 2, tile_granularity=5)
    with pytest.warns(DeprecationWarning, match="default_batch_size"):
        assert spec.batch_size == 2
    with pytest.warns(DeprecationWarning, match="tile_granularity"):
        assert spec.granularity == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decision = AxisDecision(spec, 2, "", SafeMap(2))
        assert decision.batch_size == 2
        assert SafeMap(2).batch_size == 2


def test_plans_are_shown_as_tables():
    plan = BatchPlanner(carry_specs=[CarrySpec("<time>", (), step)]).plan(
        [AxisSpec("batch", 64, 32), AxisSpec("<time>", 10, 4)]
    )
    lines = str(plan).splitlines()
    assert lines[0].split() == ["axis", "size", "strategy", "at", "once", "because"]
    assert lines[2].split()[:4] == ["batch", "64", "SafeMap(32)", "32"]
    assert lines[3].split()[:4] == ["<time>", "10", "Scan", "1"]
    assert len(lines) == 4
    html = plan._repr_html_()
    assert html.count("<tr>") == 3
    assert "&lt;time&gt;" in html
    assert "<time>" not in html
    assert "without axes" in str(BatchPlan(()))


def test_plans_compare_by_what_they_decide():
    def made(value):
        carry = CarrySpec("a", {"x": jnp.full(3, value)}, step)
        return BatchPlanner(carry_specs=[carry]).plan([AxisSpec("a", 3, 2)])

    assert made(1.0) == made(1.0)
    assert hash(made(1.0)) == hash(made(1.0))
    assert made(1.0) != made(2.0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"axis_name": ""}, ValueError, "axis_name is empty"),
        ({"init": None}, ValueError, "init of the carry of axis 'a' is None"),
        ({"transition": 3}, TypeError, "transition must be callable"),
        ({"ordered_sinks": 1}, TypeError, "ordered_sinks must be True or False"),
        ({"collect_outputs": None}, TypeError, "collect_outputs must be True or False"),
        ({"cond": 3, "collect_outputs": False}, TypeError, "cond must be callable"),
        ({"cond": go_on}, ValueError, "collect_outputs=False"),
    ],
)
def test_bad_carry_specs_are_refused(change, error, message):
    arguments: dict[str, Any] = {"axis_name": "a", "init": 0, "transition": step}
    with pytest.raises(error, match=message):
        CarrySpec(**arguments | change)


def test_carry_shapes():
    shape = CarryShape("h", [2, 3], jnp.bfloat16)
    zeros = shape.materialize()
    assert (zeros.shape, zeros.dtype) == ((2, 3), jnp.bfloat16)
    assert not zeros.any()
    assert hash(shape) == hash(CarryShape("h", (2, 3), "bfloat16"))
    refused: list[tuple[Any, type[Exception]]] = [
        (("", (1,), "float32"), ValueError),
        (("h", 3, "float32"), TypeError),
        (("h", (-1,), "float32"), ValueError),
        (("h", (True,), "float32"), TypeError),
        (("h", (1,), None), TypeError),
        (("h", (1,), "no dtype"), TypeError),
    ]
    for wrong, error in refused:
        with pytest.raises(error):
            CarryShape(*wrong)
