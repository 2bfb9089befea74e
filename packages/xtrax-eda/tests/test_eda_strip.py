"""The pictures of axes: where marks lie, and how much of a strip has which meaning."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.eda import explain_plan
from xtrax.eda._strip import strip


def extent(marks, style):
    """The width that marks of a style cover, gaps between blocks not counted."""
    spans = sorted({(m.x, m.x + m.width) for m in marks if m.style == style})
    return sum(end - start for start, end in spans)


def strips(foreign, *decisions, **lengths):
    stats = explain_plan(foreign.plan(*decisions), lengths=lengths or None)
    return [strip(axis, stats) for axis in stats.axes]


@given(copies=st.lists(st.integers(1, 6), min_size=1, max_size=20))
@settings(max_examples=40, deadline=None)
def test_a_deduplicated_axis_shows_its_shares(foreign, copies):
    index_map = [i for i, times in enumerate(copies) for _ in range(times)]
    n, k = len(index_map), len(copies)
    padded = 2 ** math.ceil(math.log2(k))
    (marks,) = strips(foreign, foreign.decision("x", n, padded, foreign.DedupGather(index_map, k, padded)))
    whole = max(n, padded)
    assert extent(marks, "fill") == pytest.approx(k / whole)
    assert extent(marks, "hatch") == pytest.approx((padded - k) / whole)
    assert extent(marks, "ghost") == pytest.approx(max(n - padded, 0) / whole)


@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_buckets_show_how_many_elements_they_hold_and_how_full_they_are(foreign, lengths):
    decision = foreign.decision("x", len(lengths), 4, foreign.Bucket([8, 32]))
    (marks,) = strips(foreign, decision, x=lengths)
    inside = {8: [n for n in lengths if n <= 8], 32: [n for n in lengths if n > 8]}
    x = 0.0
    for boundary, held in inside.items():
        if not held:
            continue
        here = [m for m in marks if m.x == pytest.approx(x)]
        share = len(held) / len(lengths)
        assert all(0 < m.width <= share for m in here)
        fill = sum(m.height for m in here if m.style == "fill")
        hatch = sum(m.height for m in here if m.style == "hatch")
        assert fill + hatch == pytest.approx(boundary / 32)
        assert fill / (fill + hatch) == pytest.approx(sum(held) / (boundary * len(held)))
        x += share


def test_chunks_stand_beside_and_lanes_below_one_another(foreign):
    (marks,) = strips(foreign, foreign.decision("x", 10, 4, foreign.SafeMap(4)))
    # three chunks of four elements; two of the last were computed before
    assert sorted({round(m.x, 3) for m in marks}) == [0, 0.333, 0.667]
    assert [m.style for m in marks] == ["fill"] * 2 + ["hatch"] * 2 + ["fill"] * 8
    assert sorted({m.y for m in marks}) == [0, 0.25, 0.5, 0.75]


def test_other_kinds(foreign):
    vmap, one, scan, loop, stranger = strips(
        foreign,
        foreign.decision("vmap", 3, 3),
        foreign.decision("one", 1, 1),
        foreign.decision("scan", 5, 1, foreign.Scan()),
        foreign.decision("loop", 5, 1, foreign.WhileCarry()),
        foreign.decision("stranger", 5, 1, object()),
    )
    assert [(m.x, m.width) for m in vmap] == [(0, 1)] * 3
    assert [(m.x, m.y, m.width, m.height) for m in one] == [(0, 0, 1, 1)]
    assert [m.x for m in scan] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    assert len({m.y for m in scan}) == 1
    assert {m.style for m in loop} == {"fill", "ghost"}  # how often it turns is not known
    assert [m.style for m in stranger] == ["ghost"]


def test_nothing_is_drawn_of_no_elements(foreign):
    drawn = strips(
        foreign,
        foreign.decision("a", 0, 0),
        foreign.decision("b", 0, 4, foreign.SafeMap(4)),
        foreign.decision("c", 0, 1, foreign.Scan()),
    )
    assert drawn == [[], [], []]


@given(
    n=st.integers(0, 10**9),
    batch=st.integers(1, 10**6),
    kind=st.sampled_from(["SafeMap", "Scan", "WhileCarry", "Vmap"]),
)
@settings(max_examples=60, deadline=None)
def test_marks_lie_inside_and_do_not_overlap(foreign, n, batch, kind):
    strategy = foreign.SafeMap(batch) if kind == "SafeMap" else getattr(foreign, kind)()
    (marks,) = strips(foreign, foreign.decision("x", n, batch, strategy))
    assert len(marks) <= 300
    for m in marks:
        assert 0 <= m.x <= m.x + m.width <= 1 + 1e-9
        assert 0 <= m.y <= m.y + m.height <= 1 + 1e-9
    for row in {m.y for m in marks}:
        spans = sorted((m.x, m.x + m.width) for m in marks if m.y == row)
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
