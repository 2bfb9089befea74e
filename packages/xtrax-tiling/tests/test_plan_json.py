"""Plans as text and back, and as tables."""

import json
import warnings
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import (
    AxisDecision,
    AxisRole,
    AxisSpec,
    BatchPlan,
    BatchPlanner,
    Bucket,
    CarryShape,
    CarrySpec,
    DedupSpec,
    MemoryBudget,
    PlanMemory,
    RemainderWarning,
    SafeMap,
    Scan,
    Vmap,
    WhileCarry,
)


def step(carry, x):
    return carry, x


def advance(carry):
    return carry + 1


def small(carry):
    return carry < 3


TIME = CarrySpec("time", CarryShape("total", (2,), "float32"), step, ordered_sinks=False)
TAIL = CarrySpec("tail", np.zeros(3), step, collect_outputs=False)
LOOP = CarrySpec("loop", np.int32(0), advance, collect_outputs=False, cond=small)
COPIES = DedupSpec("copies", np.array([0, 2, 3]), np.array([0, 0, 1, 2, 1]), k=3)


def full_plan() -> BatchPlan:
    """A plan with a decision of each kind, and a memory."""
    specs = [
        AxisSpec("time", 7, 2),
        AxisSpec("tail", 7, 2),
        AxisSpec("loop", 3, 1),
        AxisSpec("copies", 5, 2, dedup_eligible=True),
        AxisSpec("ragged", 40, 8, heterogeneous=True, bucket_boundaries=(4, 9)),
        AxisSpec("größe <b>", 100, 30, tile_granularity=2),
        AxisSpec("few", 4, 30),
    ]
    budget = MemoryBudget(60, lambda decisions: 0.3 * decisions[5].batch_size + 40)
    planner = BatchPlanner(carry_specs=[TIME, TAIL, LOOP], dedup_specs=[COPIES], budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemainderWarning)
        return planner.plan(specs)


def reread(plan, text=None):
    return BatchPlan.from_json(text or plan.to_json(), carry_specs=[TIME, TAIL, LOOP], dedup_specs=[COPIES])


def edited(plan, *path_and_value) -> str:
    """The plan's text with one value replaced; without a value, with it taken out."""
    document: Any = json.loads(plan.to_json())
    *path, last, value = path_and_value
    node = document
    for key in path:
        node = node[key]
    node[last] = value
    return json.dumps(document)


def test_every_kind_of_decision_comes_back():
    plan = full_plan()
    kinds = [type(d.strategy) for d in plan.decisions]
    assert [kind.__name__ for kind in kinds] == [
        "Scan",
        "Scan",
        "WhileCarry",
        "DedupGather",
        "Bucket",
        "SafeMap",
        "Vmap",
    ]
    copy = reread(plan)
    assert copy == plan
    assert hash(copy) == hash(plan)
    assert copy.decisions[0].strategy == Scan(step, TIME.init, False, True)
    assert copy.decisions[2].strategy == WhileCarry(advance, small, LOOP.init)
    assert copy.memory == plan.memory != None  # noqa: E711
    assert str(copy) == str(plan)
    assert copy.to_json() == plan.to_json()


def test_the_text_is_a_versioned_document():
    document = json.loads(full_plan().to_json())
    assert document["format"] == "xtrax.tiling.BatchPlan"
    assert document["schema_version"] == 1
    assert document["decisions"][5]["spec"]["name"] == "größe <b>"
    assert document["decisions"][5]["strategy"] == {"kind": "SafeMap", "batch_size": 30}
    assert document["decisions"][3]["strategy"]["k"] == 3
    assert document["decisions"][3]["strategy"]["batch_size"] is None
    assert "unique_indices" not in json.dumps(document)
    assert document["memory"]["estimate"] == 49
    assert document["memory"]["slope_by_axis"] == {"größe <b>": pytest.approx(0.3, rel=0.1)}


names = st.text(min_size=1, max_size=6)
counts = st.integers(1, 10**9)


@st.composite
def decisions(draw, name):
    strategy = draw(
        st.one_of(
            st.just(Vmap()),
            st.builds(SafeMap, counts),
            st.builds(Bucket, st.lists(counts, min_size=1, max_size=4, unique=True).map(sorted)),
            st.builds(Scan, st.none(), st.none(), st.booleans(), st.booleans()),
            st.just(WhileCarry()),
        )
    )
    spec = AxisSpec(
        name,
        draw(st.integers(0, 10**12)),
        draw(counts),
        draw(counts),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.none() | st.lists(counts, min_size=1, max_size=3, unique=True).map(sorted)),
        draw(st.sampled_from(AxisRole)),
    )
    at_once = {Vmap: spec.cardinality, SafeMap: getattr(strategy, "batch_size", 1), Bucket: draw(counts)}
    return AxisDecision(spec, at_once.get(type(strategy), 1), draw(st.text()), strategy)


@st.composite
def plans(draw):
    axes = draw(st.lists(names, max_size=4, unique=True))
    slopes = draw(st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=2))
    sizes = st.integers(0, 10**15)
    memory = st.builds(PlanMemory, counts, st.integers(-(10**15), 10**15), st.just(slopes), sizes, sizes)
    return BatchPlan(tuple(draw(decisions(name)) for name in axes), draw(st.none() | memory))


@given(plans())
@settings(max_examples=60)
def test_any_plan_is_equal_to_what_its_text_gives(plan):
    copy = BatchPlan.from_json(plan.to_json())
    assert copy == plan
    assert copy.to_json() == plan.to_json()


@given(plan=plans(), cut=st.integers(0, 10**6))
@settings(max_examples=30)
def test_a_torn_text_is_refused(plan, cut):
    text = plan.to_json()
    with pytest.raises(ValueError, match="text is no JSON"):
        BatchPlan.from_json(text[: cut % len(text)])


def test_specs_that_are_missing_are_named():
    plan = full_plan()
    with pytest.raises(ValueError, match=r"axis 'loop' is a WhileCarry with a transition.*pass its CarrySpec"):
        BatchPlan.from_json(plan.to_json(), carry_specs=[TIME, TAIL], dedup_specs=[COPIES])
    with pytest.raises(ValueError, match="axis 'time' is a Scan with a transition"):
        BatchPlan.from_json(plan.to_json(), dedup_specs=[COPIES])
    with pytest.raises(ValueError, match=r"axis 'copies' is a DedupGather.*pass its DedupSpec"):
        BatchPlan.from_json(plan.to_json(), carry_specs=[TIME, TAIL, LOOP])


def test_specs_that_no_axis_needs_are_refused():
    plan = BatchPlanner().plan([AxisSpec("time", 4, 8)])
    with pytest.raises(ValueError, match="carry_specs names axis 'time', but the plan has no such axis that needs it"):
        BatchPlan.from_json(plan.to_json(), carry_specs=[TIME])
    with pytest.raises(ValueError, match="dedup_specs names axis 'copies'"):
        BatchPlan.from_json(plan.to_json(), dedup_specs=[COPIES])
    with pytest.raises(ValueError, match="dedup_specs names axis 'copies' twice"):
        BatchPlan.from_json(plan.to_json(), dedup_specs=[COPIES, COPIES])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DedupSpec("copies", np.array([0, 2, 3]), np.array([0, 1, 1, 2, 1]), k=3), "other indices"),
        (DedupSpec("copies", np.array([0, 2]), np.array([0, 0, 1, 0, 1]), k=2), "has k=2, 5 elements"),
        (DedupSpec("copies", np.array([0, 2, 3]), np.array([0, 0, 1, 2]), k=3), "has k=3, 4 elements"),
        (
            DedupSpec("copies", np.array([0, 2, 3]), np.array([0, 0, 1, 2, 1]), k=3, gather_fn=lambda ys, i: ys),
            "gather_fn not given, but its DedupSpec has.*gather_fn given",
        ),
    ],
)
def test_other_duplicates_than_were_planned_are_refused(other, message):
    plan = BatchPlanner(dedup_specs=[COPIES]).plan([AxisSpec("copies", 5, 2)])
    assert BatchPlan.from_json(plan.to_json(), dedup_specs=[COPIES]) == plan
    with pytest.raises(ValueError, match=message):
        BatchPlan.from_json(plan.to_json(), dedup_specs=[other])


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        (TIME, CarrySpec("time", TIME.init, step)),  # sinks in order
        (TIME, CarrySpec("time", TIME.init, advance, ordered_sinks=False, collect_outputs=False, cond=small)),
        (LOOP, CarrySpec("loop", LOOP.init, step, collect_outputs=False)),
    ],
)
def test_other_carries_than_were_planned_are_refused(spec, other):
    plan = BatchPlanner(carry_specs=[spec]).plan([AxisSpec(spec.axis_name, 5, 2)])
    with pytest.raises(ValueError, match=f"axis '{spec.axis_name}' was planned with"):
        BatchPlan.from_json(plan.to_json(), carry_specs=[other])


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_unknown_versions_are_refused(version):
    text = edited(full_plan(), "schema_version", version)
    with pytest.raises(ValueError, match=r"schema_version .*, and this release reads 1"):
        reread(None, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("format", "other"), "text is no plan: its format is not"),
        (("more", 1), "the plan must have the keys"),
        (("decisions", {}), "decisions of the plan must be a list"),
        (("decisions", 5, "extra", 1), r"decisions\[5\] must have the keys"),
        (("decisions", 5, "spec", "cardinality", -1), "cardinality of axis .* must be at least 0"),
        (("decisions", 5, "spec", "cardinality", 2.0), "cardinality of axis .* must be an integer"),
        (("decisions", 5, "spec", "name", ""), "name is empty"),
        (("decisions", 5, "spec", "role", ["KNOWN"]), r"spec.role must be one of \['KNOWN', 'UNKNOWN'\]"),
        (("decisions", 5, "spec", "heterogeneous", 1), "heterogeneous of axis .* must be True or False"),
        (("decisions", 5, "batch_size", True), "batch_size of axis .* must be an integer"),
        (("decisions", 5, "batch_size", 0), "batch_size of axis .* must be at least 1"),
        (("decisions", 5, "batch_size", 999), "batch_size of axis .* is 999, but its SafeMap computes 30 at once"),
        (("decisions", 5, "strategy", "batch_size", 8), "batch_size of axis .* is 30, but its SafeMap computes 8"),
        (("decisions", 0, "batch_size", 7), "batch_size of axis 'time' is 7, but its Scan computes 1"),
        (("decisions", 2, "batch_size", 3), "batch_size of axis 'loop' is 3, but its WhileCarry computes 1"),
        (("decisions", 3, "batch_size", 3), "batch_size of axis 'copies' is 3, but its DedupGather computes 4"),
        (("decisions", 6, "batch_size", 5), "batch_size of axis 'few' is 5, but its Vmap computes 4"),
        (("decisions", 4, "batch_size", 0), "batch_size of axis 'ragged' must be at least 1"),
        (("decisions", 5, "reasoning", 3), r"decisions\[5\].reasoning must be a string"),
        (("decisions", 5, "strategy", "kind", "Pmap"), "kind is 'Pmap', which this release does not know"),
        (("decisions", 5, "strategy", None), "kind is None"),
        (("decisions", 5, "strategy", "batch_size", 0), "batch_size must be at least 1"),
        (("decisions", 4, "strategy", "boundaries", [3, 2]), "strictly ascending"),
        (("decisions", 0, "strategy", "has_carry", 1), "has_carry must be True or False"),
        (("decisions", 3, "strategy", "k_bucket", 2), "k_bucket must be at least 3"),
        (("decisions", 3, "strategy", "batch_size", 0), "batch_size must be at least 1"),
        (("decisions", 3, "strategy", "batch_size", True), "batch_size must be an integer"),
        (("decisions", 6, "spec", "name", "time"), "names axis 'time' twice"),
        (("memory", "budget", 0), "budget in the memory of the plan must be at least 1"),
        (("memory", "estimate", "12"), "estimate in the memory of the plan must be an integer"),
        (("memory", "fixed_bytes", 1.5), "fixed_bytes in the memory of the plan must be an integer"),
        (("memory", "slope_by_axis", []), "slope_by_axis in the memory of the plan must map"),
        (("memory", "slope_by_axis", "few", True), r"slope_by_axis\['few'\] .* must be a number"),
        (("memory", "slope_by_axis", "few", float("nan")), "NaN is no number that a plan holds"),
    ],
)
def test_a_text_that_was_edited_is_refused_where_it_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        reread(None, edited(full_plan(), *change))


def test_a_decision_that_would_not_be_read_is_not_written():
    plan = BatchPlan((AxisDecision(AxisSpec("a", 100, 8), 999, "by hand", SafeMap(8)),))
    with pytest.raises(ValueError, match="batch_size of axis 'a' is 999, but its SafeMap computes 8 at once; set both"):
        plan.to_json()


@pytest.mark.parametrize("text", ["[]", "null", "3", '{"decisions": []}'])
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="text is no plan"):
        BatchPlan.from_json(text)


@pytest.mark.parametrize("wrong", [None, b"{}", {"decisions": []}])
def test_what_is_no_text_is_refused(wrong):
    with pytest.raises(TypeError, match="text must be the string that to_json returned"):
        BatchPlan.from_json(wrong)
    with pytest.raises(TypeError, match="carry_specs must hold CarrySpec"):
        BatchPlan.from_json("{}", carry_specs=[COPIES])  # ty: ignore[invalid-argument-type]


class Cells(HTMLParser):
    """The texts of a table's cells, and the names of all tags."""

    def __init__(self):
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.rows:
            self.rows[-1].append(data)


def test_the_notebook_table_has_the_rows_of_the_printed_one_escaped():
    plan = full_plan()
    page = Cells()
    page.feed(plan._repr_html_())
    assert page.tags == {"table", "thead", "tbody", "tr", "th", "td", "p"}
    assert page.rows[0] == ["axis", "size", "strategy", "at once", "because"]
    for row, decision in zip(page.rows[1:], plan.decisions, strict=True):
        assert row[0] == decision.spec.name
        assert row[4].startswith(decision.reasoning)
    assert page.rows[-1][5:] == [f"memory: {plan.memory}"]
    printed = str(plan).splitlines()
    assert len(printed) == 2 + len(plan.decisions) + 1
    assert printed[-1] == f"memory: {plan.memory}"
