"""Two plans side by side, against what nested loops would do."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.eda import compare_plans, explain_plan


def row(comparison, label):
    (found,) = [row for row in comparison.rows if row.label == label]
    return found


def test_every_quantity(foreign):
    a = foreign.all_kinds()
    b = foreign.plan(
        foreign.decision("text", 4, 2, foreign.Bucket([8])),
        foreign.decision("sample", 10, 5, foreign.SafeMap(5)),
        foreign.decision("new", 2, 2),
        memory=foreign.memory(3_000, 4_000),
    )
    comparison = compare_plans(a, b, lengths=foreign.lengths, names=("old", "new"))
    assert (row(comparison, "memory").a, row(comparison, "memory").b) == (1_500, 3_000)
    assert row(comparison, "memory").change == 2
    # text fills two buckets of a, one of b
    assert (row(comparison, "programs to compile").a, row(comparison, "programs to compile").b) == (2, 1)
    # a: 2 batches, 3 chunks, 5 steps; b: 2 batches, 2 chunks
    assert (row(comparison, "one after another").a, row(comparison, "one after another").b) == (30, 4)
    assert (row(comparison, "at once, at most").a, row(comparison, "at once, at most").b) == (2 * 4 * 4 * 3, 2 * 5 * 2)
    # a: 4 texts, 4 ligands, 12 samples, 5 steps, 3 heads; b: 4, 10, 2
    assert (row(comparison, "elements computed").a, row(comparison, "elements computed").b) == (2_880, 80)
    # a: 18 of 24 of the length, 3 of 4 ligands, 10 of 12 samples; b: 18 of 32 of the length
    assert row(comparison, "padding and repeats").a == pytest.approx(1 - 18 / 24 * 3 / 4 * 10 / 12)
    assert row(comparison, "padding and repeats").b == pytest.approx(1 - 18 / 32)
    assert row(comparison, "padding and repeats").change is None
    assert (row(comparison, "time").a, row(comparison, "time").b) == ("one after another", None)
    assert [r.label for r in comparison.rows[6:]] == ["text", "ligand", "sample", "time", "head", "new"]
    lines = str(comparison).splitlines()
    assert lines[0].split() == ["old", "new", "change"]
    assert lines[1].split() == ["memory", "1.5", "kB", "3", "kB", "2x"]
    assert "no such axis" in lines[-1]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_waste_is_the_share_of_repeats_in_the_nested_loops(foreign, sizes):
    plan = foreign.plan(
        *(
            foreign.decision(f"a{i}", n, b if n > b else n, foreign.SafeMap(b) if n > b else foreign.Vmap())
            for i, (n, b) in enumerate(sizes)
        )
    )
    stats = explain_plan(plan)
    distinct = computed = 1
    for n, b in sizes:
        chunks = -(-n // b)
        distinct *= n
        computed *= sum(-(-n // chunks) for _ in range(chunks)) if n > b else n
    assert stats.elements_computed == computed
    if computed:
        assert stats.waste == pytest.approx(1 - distinct / computed)


def test_what_is_not_known_is_not_guessed(foreign):
    plan = foreign.plan(foreign.decision("solve", 5, 1, foreign.WhileCarry()))
    comparison = compare_plans(plan, plan)
    for label in ("memory", "one after another", "elements computed", "padding and repeats"):
        assert row(comparison, label).a is row(comparison, label).change is None


def test_a_plan_compared_with_itself_has_not_changed(foreign):
    plan = foreign.all_kinds()
    comparison = compare_plans(plan, explain_plan(plan))
    assert comparison.a == comparison.b
    assert {r.change for r in comparison.rows} == {None, 1.0}


def test_the_table_in_a_notebook_is_escaped(foreign):
    plan = foreign.plan(foreign.decision("<script>", 2, 2))
    table = compare_plans(plan, plan, names=("<a>", "b"))._repr_html_()
    assert "<script>" not in table
    assert "<a>" not in table
    assert "&lt;script&gt;" in table


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"names": "ab"}, TypeError, "names must be two strings"),
        ({"names": ("a", 1)}, TypeError, "names must be two strings"),
        ({"names": ("a",)}, ValueError, "names must be two different strings"),
        ({"names": ("a", "a")}, ValueError, "names must be two different strings"),
        ({"names": ("", "a")}, ValueError, "not empty"),
        ({"lengths": {"batch": [1]}}, ValueError, "'batch', which has buckets in neither plan"),
        ({"lengths": [1]}, TypeError, "lengths must map axis names"),
    ],
)
def test_bad_arguments(foreign, options, error, message):
    plan = foreign.plan(foreign.decision())
    with pytest.raises(error, match=message):
        compare_plans(plan, plan, **options)


def test_what_is_no_plan(foreign):
    with pytest.raises(TypeError, match=r"plan must have \.decisions"):
        compare_plans(foreign.plan(), None)  # ty: ignore[invalid-argument-type]
    with pytest.raises(ValueError, match="statistics, which b is"):
        compare_plans(foreign.all_kinds(), explain_plan(foreign.all_kinds()), lengths=foreign.lengths)
