"""Plans in numbers and words: what is read, what is worked out, and what is refused."""

import dataclasses
import json
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.eda import AxisStats, PlanStats, explain_plan, extract_plan_stats
from xtrax.eda.types import PlanLike
from xtrax.tiling import AxisSpec, BatchPlanner, CarrySpec, DedupSpec, get_k_bucket


def planned(*specs, **planner):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # remainders
        return BatchPlanner(**planner).plan(list(specs))


def test_a_plan_with_every_strategy():
    dedup = DedupSpec("ligand", np.array([0, 2, 3]), np.array([0, 0, 1, 2, 2]), k=3)
    carries = [
        CarrySpec("time", 0.0, lambda c, x: (c, x)),
        CarrySpec("solve", 1.0, lambda c: c / 2, collect_outputs=False, cond=lambda c: c > 0.1),
    ]
    plan = planned(
        AxisSpec("text", 7, 4, bucket_boundaries=[8, 32]),
        AxisSpec("ligand", 5, 2),
        AxisSpec("sample", 100, 32),
        AxisSpec("time", 20, 1),
        AxisSpec("solve", 50, 1),
        AxisSpec("head", 8, 8),
        carry_specs=carries,
        dedup_specs=[dedup],
    )
    stats = extract_plan_stats(plan)
    assert [axis.name for axis in stats.axes] == ["text", "ligand", "sample", "time", "solve", "head"]
    assert [axis.strategy for axis in stats.axes] == ["Bucket", "DedupGather", "SafeMap", "Scan", "WhileCarry", "Vmap"]
    assert [axis.kind for axis in stats.axes] == [
        "padded",
        "deduplicated",
        "chunked",
        "sequential",
        "sequential",
        "vectorized",
    ]
    assert [axis.cardinality for axis in stats.axes] == [7, 5, 100, 20, 50, 8]
    assert [axis.batch_size for axis in stats.axes] == [4, 4, 32, 1, 1, 8]
    assert [axis.steps for axis in stats.axes] == [None, 1, 4, 20, None, 1]
    assert [axis.computed for axis in stats.axes] == [None, 4, 100, 20, None, 8]
    assert [axis.reasoning for axis in stats.axes] == [decision.reasoning for decision in plan.decisions]
    assert stats.strategy_counts == dict.fromkeys(["Bucket", "DedupGather", "SafeMap", "Scan", "WhileCarry", "Vmap"], 1)
    assert stats.total_axes == 6
    assert stats.memory_warnings == ()
    assert list(stats.dedup_stats) == ["ligand"]
    assert list(stats.bucket_stats) == ["text"]
    assert stats.memory is None
    assert stats.fits is None
    assert stats.sequential_steps is None  # nobody knows how often a while loop turns
    assert stats.elements_at_once == 4 * 4 * 25 * 1 * 1 * 8


@given(
    sizes=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=0, max_size=4),
)
@settings(max_examples=50, deadline=None)
def test_steps_and_computed_elements_are_those_of_the_nested_loops(sizes):
    plan = planned(*(AxisSpec(f"a{i}", size, batch) for i, (size, batch) in enumerate(sizes)))
    stats = extract_plan_stats(plan)
    for axis, (size, batch) in zip(stats.axes, sizes, strict=True):
        starts = list(range(0, size, batch))  # a chunked loop, whatever its chunks are balanced to
        assert axis.steps == len(starts)
        if size > batch:
            assert axis.computed is not None
            assert size <= axis.computed < size + len(starts)
            assert axis.computed == axis.chunk * axis.steps
            assert axis.chunk <= batch
        else:
            assert axis.computed == size
    assert stats.sequential_steps == math.prod(len(range(0, size, batch)) for size, batch in sizes)


def test_lengths_make_the_steps_of_a_bucket_axis_known():
    plan = planned(AxisSpec("text", 7, 2, bucket_boundaries=[8, 32]))
    stats = extract_plan_stats(plan, lengths={"text": [1, 8, 9, 32, 10, 7, 12]})
    # three in the first bucket, four in the second, at most two at once: 2 + 2 batches of 2
    assert stats.axes[0].steps == 4
    assert stats.axes[0].computed == 8
    assert stats.bucket_stats["text"].occupancy == (3, 4)


def test_statistics_are_plain_data():
    dedup = DedupSpec("ligand", np.array([0, 2]), np.array([0, 0, 1]), k=2)
    plan = planned(AxisSpec("text", 3, 4, bucket_boundaries=[8]), AxisSpec("ligand", 3, 2), dedup_specs=[dedup])
    data = dataclasses.asdict(extract_plan_stats(plan, lengths={"text": np.array([1, 2, 8], np.uint8)}))
    again = json.loads(json.dumps(data))
    assert again["axes"][1]["name"] == "ligand"
    assert again["bucket_stats"]["text"]["data"] == 11
    assert again["dedup_stats"]["ligand"]["copies"] == [[1, 1], [2, 1]]


def test_a_plan_without_axes():
    stats = explain_plan(planned())
    assert stats.axes == ()
    assert stats.sequential_steps == 1  # the function runs once
    assert str(stats) == "A plan without axes"


def test_a_plan_of_another_library(foreign):
    plan = foreign.plan(
        foreign.decision("batch", 100, 32, foreign.SafeMap(32)),
        foreign.decision("time", 20, 1, foreign.Scan()),
        foreign.decision("ligand", 3, 2, foreign.DedupGather(index_map=[0, 0, 1], k=2, k_bucket=2)),
        foreign.decision("text", 5, 2, foreign.Bucket([4, 8])),
    )
    stats = extract_plan_stats(plan)
    assert [axis.kind for axis in stats.axes] == ["chunked", "sequential", "deduplicated", "padded"]
    assert stats.dedup_stats["ligand"].unique == 2
    assert stats.bucket_stats["text"].boundaries == (4, 8)


def test_a_subclass_counts_as_its_strategy_and_a_stranger_as_itself(foreign):
    class Chunked(foreign.SafeMap):
        pass

    class Wavefront:
        pass

    plan = foreign.plan(
        foreign.decision("batch", 100, 50, Chunked(50)), foreign.decision("grid", 9, 3, Wavefront(), reasoning="")
    )
    stats = explain_plan(plan)
    assert [axis.strategy for axis in stats.axes] == ["SafeMap", "Wavefront"]
    assert [axis.kind for axis in stats.axes] == ["chunked", "other"]
    assert stats.axes[1].steps is None
    assert stats.axes[1].reasoning == "Wavefront, 3 of 9 elements at once."


def test_explain_plan_gives_a_reason_to_every_axis(foreign):
    strategies = {
        "vmap": (8, 8, foreign.Vmap(), "All 8 elements at once."),
        "even": (100, 25, foreign.SafeMap(25), "4 chunks of 25 elements, one after another."),
        "odd": (
            10,
            4,
            foreign.SafeMap(4),
            "3 chunks of 4 elements, one after another; the first two overlap, so 2 are computed twice.",
        ),
        "scan": (20, 1, foreign.Scan(), "20 elements one after another, with a carry."),
        "while": (20, 1, foreign.WhileCarry(), "A carry is stepped until its condition fails."),
        "dedup": (
            4,
            4,
            foreign.DedupGather([0, 1, 2, 0], 3, 4),
            "3 distinct of 4: each is computed once with 1 of padding, the others copy it.",
        ),
        "bucket": (
            2,
            2,
            foreign.Bucket([4, 8]),
            "Padded on the host to 2 lengths, 2 elements at once; 25 % of what is computed is padding.",
        ),
    }
    for reasoning in ("", "  ", None):
        plan = foreign.plan(*(foreign.decision(n, s, b, how, reasoning) for n, (s, b, how, _) in strategies.items()))
        explained = explain_plan(plan, lengths={"bucket": [3, 6]})
        assert [axis.reasoning for axis in explained.axes] == [text for *_, text in strategies.values()]
        assert all(axis.reasoning == "" for axis in extract_plan_stats(plan).axes)


def test_distinct_elements_in_chunks(foreign):
    spec = AxisSpec("ligand", 4096, 30, dedup_eligible=True)
    (axis,) = extract_plan_stats(BatchPlanner().plan([spec], data={"ligand": np.arange(4096) % 60})).axes
    # 64 are computed: 3 balanced chunks of 22, of which one shares 2 elements with another.
    assert (axis.kind, axis.batch_size, axis.steps, axis.chunk, axis.computed) == ("deduplicated", 30, 3, 22, 66)
    strategy = foreign.DedupGather([0, 1, 2, 0], 3, 4)
    strategy.batch_size = 3
    stats = explain_plan(foreign.plan(foreign.decision("ligand", 4, 3, strategy, "")))
    assert stats.sequential_steps == 2
    assert stats.axes[0].reasoning == (
        "3 distinct of 4: each is computed once with 1 of padding in 2 chunks of 2 elements, the others copy it."
    )
    for wrong, error in ((0, ValueError), (True, TypeError), ("3", TypeError)):
        strategy.batch_size = wrong
        with pytest.raises(error, match=r"strategy\.batch_size of axis 'ligand'"):
            extract_plan_stats(foreign.plan(foreign.decision("ligand", 4, 3, strategy)))


def test_explain_plan_keeps_the_reasons_of_the_plan():
    plan = planned(AxisSpec("batch", 128, 32))
    assert explain_plan(plan) == extract_plan_stats(plan)
    assert explain_plan(plan).axes[0].reasoning == plan.decisions[0].reasoning


def test_printing_explains():
    text = str(explain_plan(planned(AxisSpec("model", 1, 8), AxisSpec("batch", 128, 32))))
    assert text.splitlines() == [
        "2 axes, the outermost first",
        "model: 1 element, Vmap, 1 at once, 1 step",
        "    cardinality 1 <= default_batch_size 8: all at once",
        "batch: 128 elements, SafeMap, 32 at once, 4 steps",
        "    cardinality 128 > default_batch_size 32: 4 chunks of 32",
    ]


class TestMemory:
    def test_what_a_plan_says_about_its_memory(self, foreign):
        memory = foreign.memory(estimate=700, budget=1000, slopes={"batch": 20.0}, fixed=60, compiles=3)
        stats = extract_plan_stats(foreign.plan(foreign.decision("batch", 100, 32, foreign.SafeMap(32)), memory=memory))
        assert stats.memory is not None
        assert (stats.memory.estimate, stats.memory.budget, stats.memory.fixed_bytes) == (700, 1000, 60)
        assert stats.memory.slope_by_axis == {"batch": 20.0}
        assert stats.memory.compiles == 3
        assert stats.axes[0].memory_estimate_bytes == 640  # 32 elements at 20 bytes each
        assert stats.fits is True
        assert stats.memory_warnings == ()

    def test_an_axis_may_bring_its_own_estimate(self, foreign):
        decision = foreign.decision()
        decision.memory_estimate_bytes = 12
        assert extract_plan_stats(foreign.plan(decision)).axes[0].memory_estimate_bytes == 12

    def test_an_infeasible_plan_is_described_and_warned_of(self, foreign):
        memory = foreign.memory(estimate=3_000_000, budget=2_000_000, slopes={"batch": 250_000}, fixed=500_000)
        stats = extract_plan_stats(foreign.plan(foreign.decision(), memory=memory))
        assert stats.fits is False
        assert stats.memory is not None
        assert stats.memory.over == 1_000_000
        assert stats.memory_warnings == (
            "Does not fit: 3 MB needed, 1 MB over the budget of 2 MB. Lower a batch size, or raise the budget.",
            "Axis 'batch' alone needs 2.5 MB at batch size 10, over the budget of 2 MB.",
        )

    def test_what_no_batch_size_can_help_is_said(self, foreign):
        memory = foreign.memory(estimate=3_000, budget=2_000, fixed=2_500)
        _, hopeless = extract_plan_stats(foreign.plan(foreign.decision(), memory=memory)).memory_warnings
        assert hopeless.startswith("What no batch size changes, 2.5 kB, is over the budget by itself")

    @pytest.mark.parametrize(("estimate", "warned"), [(949, 0), (951, 1), (1000, 1)])
    def test_a_tight_plan_is_warned_of(self, foreign, estimate, warned):
        memory = foreign.memory(estimate=estimate, budget=1000)
        stats = extract_plan_stats(foreign.plan(foreign.decision(), memory=memory))
        assert len(stats.memory_warnings) == warned
        assert stats.fits is True

    def test_nested_sizes_that_multiply_leave_a_negative_rest(self, foreign):
        plan = foreign.plan(
            foreign.decision("a", 10, 10),
            foreign.decision("b", 20, 20),
            memory=foreign.memory(estimate=200, budget=300, slopes={"a": 20, "b": 10}, fixed=-200),
        )
        stats = extract_plan_stats(plan)
        assert stats.memory is not None
        assert stats.memory.fixed_bytes == -200
        assert [axis.memory_estimate_bytes for axis in stats.axes] == [200, 200]

    def test_a_budget_may_be_an_object_with_bytes(self, foreign):
        class Budget:
            bytes = 1000

        memory = foreign.memory(estimate=10, budget=Budget())
        stats = extract_plan_stats(foreign.plan(foreign.decision(), memory=memory))
        assert stats.memory is not None
        assert stats.memory.budget == 1000

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"estimate": True}, TypeError, "plan.memory.estimate"),
            ({"estimate": -1}, ValueError, "plan.memory.estimate"),
            ({"estimate": math.nan}, TypeError, "finite"),
            ({"estimate": 10**400}, TypeError, "finite"),
            ({"estimate": np.ones(2)}, TypeError, "finite"),
            ({"budget": 0}, ValueError, "plan.memory.budget"),
            ({"budget": "2GB"}, TypeError, "plan.memory.budget"),
            ({"slopes": {"batch": math.inf}}, TypeError, r"slope_by_axis\['batch'\]"),
            ({"slopes": {"nobody": 1.0}}, ValueError, "'nobody'"),
            ({"slopes": 5}, TypeError, "slope_by_axis"),
            ({"compiles": 1.5}, TypeError, "plan.memory.compiles"),
            ({"fixed": math.nan}, TypeError, "fixed_bytes"),
        ],
    )
    def test_bad_memory_is_refused(self, foreign, changes, error, message):
        memory = foreign.memory(**{"estimate": 10, "budget": 100, **changes})
        with pytest.raises(error, match=message):
            extract_plan_stats(foreign.plan(foreign.decision(), memory=memory))


class TestBadPlans:
    @pytest.mark.parametrize("plan", [None, 3, "plan", [], {}, object(), PlanStats, PlanLike])
    def test_what_is_no_plan(self, plan):
        with pytest.raises(TypeError, match=r"plan must have \.decisions.*BatchPlanner\.plan"):
            extract_plan_stats(plan)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"name": 3}, TypeError, "name must be a string"),
            ({"name": ""}, ValueError, "name is empty"),
            ({"cardinality": -1}, ValueError, "cardinality of axis 'batch' must be at least 0, but is -1"),
            ({"cardinality": 2.0}, TypeError, "cardinality"),
            ({"cardinality": True}, TypeError, "cardinality"),
            ({"batch_size": -1}, ValueError, "batch_size of axis 'batch'"),
            ({"batch_size": None}, TypeError, "batch_size of axis 'batch'"),
            ({"reasoning": 7}, TypeError, "reasoning of axis 'batch'"),
        ],
    )
    def test_a_bad_attribute_is_named(self, foreign, changes, error, message):
        with pytest.raises(error, match=message):
            extract_plan_stats(foreign.plan(foreign.decision(**changes)))

    @pytest.mark.parametrize("attribute", ["spec", "batch_size", "strategy"])
    def test_a_missing_attribute_is_named(self, foreign, attribute):
        decision = foreign.decision()
        delattr(decision, attribute)
        with pytest.raises(TypeError, match=rf"plan\.decisions\[1\] must have \.{attribute}"):
            extract_plan_stats(foreign.plan(foreign.decision("first"), decision))

    def test_no_strategy(self, foreign):
        decision = foreign.decision()
        decision.strategy = None
        with pytest.raises(TypeError, match=r"strategy of axis 'batch' is None; it must be one of Vmap"):
            extract_plan_stats(foreign.plan(decision))

    def test_two_axes_of_one_name(self, foreign):
        with pytest.raises(ValueError, match=r"plan\.decisions\[1\] is about axis 'batch', as an earlier one is"):
            extract_plan_stats(foreign.plan(foreign.decision(), foreign.decision()))

    def test_an_index_map_of_another_size_than_its_axis(self, foreign):
        decision = foreign.decision("ligand", 4, 2, foreign.DedupGather([0, 1, 1], 2, 2))
        with pytest.raises(ValueError, match="'ligand' has 3 entries, but the axis has cardinality 4"):
            extract_plan_stats(foreign.plan(decision))

    def test_chunks_of_nothing(self, foreign):
        with pytest.raises(ValueError, match="axis 'batch' is chunked with batch_size 0"):
            extract_plan_stats(foreign.plan(foreign.decision(batch_size=0, strategy=foreign.SafeMap(0))))

    @pytest.mark.parametrize(
        ("lengths", "error", "message"),
        [
            ([1, 2], TypeError, "lengths must map axis names"),
            ({"nobody": [1]}, ValueError, r"'nobody', which has no buckets; those that do are \['text'\]"),
            ({"text": [1, 2]}, ValueError, "'text' has 2 entries, but the axis has cardinality 3"),
            ({"text": [1, 2, 99]}, ValueError, "length 99 is past the last boundary 8"),
            ({"text": 3}, TypeError, "lengths of axis 'text' must be a sequence of integers"),
        ],
    )
    def test_bad_lengths(self, lengths, error, message):
        plan = planned(AxisSpec("text", 3, 4, bucket_boundaries=[8]))
        with pytest.raises(error, match=message):
            extract_plan_stats(plan, lengths=lengths)


def test_padding_of_duplicates_follows_the_planner():
    k = 300
    dedup = DedupSpec("x", np.arange(k), np.arange(k), k=k)
    stats = extract_plan_stats(planned(AxisSpec("x", k, 8), dedup_specs=[dedup]))
    assert stats.axes[0].computed == stats.dedup_stats["x"].padded == get_k_bucket(k) == 320


def test_statistics_cannot_be_changed():
    axis = AxisStats("a", "Vmap", "vectorized", 1, 1, 1, 1, "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        axis.name = "b"  # ty: ignore[invalid-assignment]


def test_seed_minimal_working_pattern_is_explained():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        plan = BatchPlanner().plan([AxisSpec(name="batch", cardinality=100, default_batch_size=32)])
    (axis,) = explain_plan(plan).axes
    assert (axis.name, axis.strategy, axis.cardinality, axis.batch_size) == ("batch", "SafeMap", 100, 32)
    assert axis.reasoning == plan.decisions[0].reasoning
    assert axis.steps == 4
