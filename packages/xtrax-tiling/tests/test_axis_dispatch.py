"""Strategies, and what runs them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import (
    Bucket,
    CarryMismatchError,
    CarryShape,
    DedupGather,
    DedupSpec,
    DispatchRejected,
    JaxScanIterator,
    SafeMap,
    SafeMapIterator,
    Scan,
    Vmap,
    VmapIterator,
    WhileCarry,
    WhileLoopIterator,
    axis_dispatch,
    get_k_bucket,
    make_axis_dispatch,
    safe_scan,
)


def running_sum(carry, x):
    return carry + x, carry


DEDUP = DedupSpec("batch", np.array([0, 2, 3]), np.array([0, 0, 1, 2, 1]), k=3).to_dedup_gather()


def test_each_strategy_has_its_iterator():
    assert make_axis_dispatch(Vmap()) == VmapIterator()
    assert make_axis_dispatch(SafeMap(3)) == SafeMapIterator(3)
    assert make_axis_dispatch(Scan()) == JaxScanIterator()
    assert make_axis_dispatch(Scan(collect_outputs=False)) == JaxScanIterator(collect_outputs=False)
    assert make_axis_dispatch(WhileCarry()) == WhileLoopIterator()
    assert make_axis_dispatch(Vmap(), axis="a", heterogeneous_axes={"a"}) == VmapIterator()


@pytest.mark.parametrize("strategy", [Scan(), WhileCarry()])
def test_loops_refuse_heterogeneous_axes(strategy):
    with pytest.raises(DispatchRejected, match=r"heterogeneous axis 'a'.*select_bucket"):
        make_axis_dispatch(strategy, axis="a", heterogeneous_axes={"a"})
    make_axis_dispatch(strategy, axis="a", heterogeneous_axes={"b"})


def test_dedup_has_no_iterator():
    with pytest.raises(DispatchRejected, match=r"of axis 'a'.*axis_dispatch"):
        make_axis_dispatch(DEDUP, axis="a")


def test_the_recipe_for_buckets_runs_as_printed():
    with pytest.raises(DispatchRejected) as refused:
        make_axis_dispatch(Bucket((2, 4)), axis="a")
    with pytest.raises(DispatchRejected, match="select_bucket"):
        axis_dispatch(Bucket((2, 4)), lambda x: x, np.ones(3))
    recipe = "\n".join(line[4:] for line in str(refused.value).splitlines() if line.startswith("    "))
    elements = [np.arange(n, dtype=np.float32) for n in (1, 4, 2, 3)]
    collected: dict[int, float] = {}
    recipe += "\n    collected.update(zip(indices, results.tolist()))"
    exec(
        recipe, {"elements": elements, "fn": lambda x, m: jnp.sum(x * m), "jax": jax, "np": np, "collected": collected}
    )
    assert collected == {i: float(x.sum()) for i, x in enumerate(elements)}


def test_what_is_no_strategy_is_refused():
    refused: list[Any] = [None, "vmap", Vmap, 3]
    for wrong in refused:
        with pytest.raises(TypeError, match="strategy must be one of Vmap"):
            make_axis_dispatch(wrong)
    wrong_names: Any = "batch"
    with pytest.raises(TypeError, match="heterogeneous_axes must be a set"):
        make_axis_dispatch(Vmap(), heterogeneous_axes=wrong_names)
    wrong_axis: Any = None
    with pytest.raises(TypeError, match="axis must be a string"):
        make_axis_dispatch(Vmap(), axis=wrong_axis)


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(2), DEDUP])
def test_mapping_strategies_equal_a_loop(strategy):
    xs = np.array([3, 3, 5, 7, 5], np.int32)
    assert axis_dispatch(strategy, lambda x: x * x, xs).tolist() == [9, 9, 25, 49, 25]
    assert jax.jit(lambda v: axis_dispatch(strategy, lambda x: x * x, v))(xs).tolist() == [9, 9, 25, 49, 25]


@given(labels=st.lists(st.integers(0, 5), min_size=1, max_size=12))
@settings(max_examples=20, deadline=None)
def test_dedup_computes_each_distinct_element_once(labels):
    first = [i for i, label in enumerate(labels) if label not in labels[:i]]
    unique = [labels[i] for i in first]
    inverse = [unique.index(label) for label in labels]
    strategy = DedupSpec("a", np.array(first), np.array(inverse), k=len(unique)).to_dedup_gather()
    widths = []

    def fn(x):
        return {"double": 2 * x["v"], "keys": x["v"][None] + 1}

    def select(xs, indices):
        widths.append(len(indices))
        return jax.tree.map(lambda leaf: leaf[indices], xs)

    strategy = DedupGather(strategy.unique_indices, strategy.index_map, strategy.k, strategy.k_bucket, dedup_fn=select)
    out = axis_dispatch(strategy, fn, {"v": np.array(labels)})
    assert out["double"].tolist() == [2 * v for v in labels]
    assert out["keys"].tolist() == [[v + 1] for v in labels]
    assert widths == [get_k_bucket(len(unique))]


def test_dedup_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"xs has 4 elements .* made for 5"):
        axis_dispatch(DEDUP, lambda x: x, np.ones(4))


def test_scan_runs_its_transition_on_what_the_function_computes():
    xs = np.array([1, 2, 3], np.int32)
    strategy = Scan(running_sum, jnp.int32(10))
    carry, ys = axis_dispatch(strategy, None, xs)
    assert (carry.tolist(), ys.tolist()) == (16, [10, 11, 13])
    carry, ys = axis_dispatch(strategy, lambda x: 2 * x, xs, init=jnp.int32(0))
    assert (carry.tolist(), ys.tolist()) == (12, [0, 2, 6])
    carry, ys = axis_dispatch(Scan(init=jnp.int32(1)), running_sum, xs)
    assert (carry.tolist(), ys.tolist()) == (7, [1, 2, 4])
    carry, ys = axis_dispatch(Scan(running_sum, CarryShape("sum", (), "int32"), collect_outputs=False), None, xs)
    assert (carry.tolist(), ys) == (6, None)


def test_while_steps_its_carry():
    strategy = WhileCarry(lambda c: 2 * c, lambda c: c < 50, 3)
    assert axis_dispatch(strategy, None, None) == 96
    assert axis_dispatch(strategy, None, None, init=7) == 56
    assert axis_dispatch(WhileCarry(cond=lambda c: c < 3), lambda c: c + 1, None, init=0) == 3


@pytest.mark.parametrize(
    ("strategy", "fn", "xs", "init", "error", "message"),
    [
        (Vmap(), lambda x: x, np.ones(3), 0, ValueError, "Vmap has no carry"),
        (DEDUP, lambda x: x, np.ones(5), 0, ValueError, "DedupGather has no carry"),
        (Vmap(), None, np.ones(3), None, TypeError, "fn must be callable"),
        (Scan(), None, np.ones(3), 0, TypeError, "the Scan has no transition"),
        (Scan(running_sum), None, np.ones(3), None, ValueError, "the Scan has no init"),
        (WhileCarry(cond=lambda c: c), None, None, 0, ValueError, "neither fn nor"),
        (WhileCarry(body=lambda c: c), None, None, 0, ValueError, "has no cond"),
        (WhileCarry(lambda c: c, lambda c: c), lambda c: c, None, 0, ValueError, "has a body"),
        (WhileCarry(lambda c: c, lambda c: c), None, np.ones(3), 0, ValueError, "has no elements"),
    ],
)
def test_arguments_that_do_not_fit_the_strategy_are_refused(strategy, fn, xs, init, error, message):
    with pytest.raises(error, match=message):
        axis_dispatch(strategy, fn, xs, init)


@given(size=st.sampled_from([0, 1, 5]), reverse=st.booleans(), unroll=st.sampled_from([1, 2]))
@settings(max_examples=12, deadline=None)
def test_scans_equal_a_loop(size, reverse, unroll):
    xs = np.arange(3, 3 + size, dtype=np.int32)
    total, before = 0, {}
    for i in reversed(range(size)) if reverse else range(size):
        before[i] = total
        total += int(xs[i])
    expected = [before[i] for i in range(size)]
    if size == 0:
        with pytest.raises(ValueError, match="no elements"):
            safe_scan(running_sum, jnp.int32(0), xs, reverse=reverse, unroll=unroll)
    else:
        carry, ys = safe_scan(running_sum, jnp.int32(0), xs, reverse=reverse, unroll=unroll)
        assert (int(carry), ys.tolist()) == (total, expected)
    if not reverse:
        carry, ys = JaxScanIterator()(running_sum, jnp.int32(0), xs)
        assert (int(carry), ys.tolist()) == (total, expected)


def test_a_scan_without_elements_needs_a_length():
    carry, ys = safe_scan(lambda c, _: (2 * c, c), jnp.int32(1), None, length=4)
    assert (int(carry), ys.tolist()) == (16, [1, 2, 4, 8])
    with pytest.raises(ValueError, match="pass length"):
        safe_scan(lambda c, _: (c, c), 1, None)
    with pytest.raises(ValueError, match="at least one step"):
        safe_scan(lambda c, _: (c, c), 1, None, length=0)
    with pytest.raises(ValueError, match="length is 2, but xs has 3"):
        safe_scan(running_sum, jnp.float32(0), jnp.ones(3), length=2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"length": True}, TypeError),
        ({"length": -1}, ValueError),
        ({"reverse": 1}, TypeError),
        ({"unroll": 0}, ValueError),
        ({"unroll": 1.0}, TypeError),
    ],
)
def test_bad_scan_options_are_refused(options, error):
    with pytest.raises(error):
        safe_scan(running_sum, jnp.float32(0), jnp.ones(3), **options)


def test_a_python_number_is_a_carry():
    carry, _ = JaxScanIterator()(running_sum, 0, jnp.array([0.5, 0.25]))
    assert carry == 0.75


@pytest.mark.parametrize(
    ("init", "after", "message"),
    [
        ({"h": jnp.zeros(3)}, {"h": jnp.zeros(2)}, r"carry\['h'\] is float32\[3\] before .* float32\[2\] after"),
        ({"h": jnp.zeros(3)}, {"h": jnp.zeros(3, int)}, r"carry\['h'\] is float32\[3\] before .* int32\[3\] after"),
        ({"h": jnp.zeros(3)}, {"g": jnp.zeros(3)}, "the carry changes its structure"),
        (jnp.zeros(3), None, "the carry changes its structure"),
        (jnp.zeros(3), "text", r"float32\[3\] before the step and 'text' \(str\) after"),
        (jnp.int32(0), jnp.float32(0), r"int32\[\] before .* float32\[\] after"),
    ],
)
def test_a_carry_that_changes_is_named(init, after, message):
    assert issubclass(CarryMismatchError, TypeError)
    with pytest.raises(CarryMismatchError, match=message):
        JaxScanIterator()(lambda c, x: (after, x), init, jnp.ones(2))
    with pytest.raises(CarryMismatchError, match=message):
        WhileLoopIterator()(lambda c: jnp.bool_(True), lambda c: after, init)


def test_steps_of_another_form_are_refused():
    with pytest.raises(TypeError, match=r"must return a pair \(carry, output\), but returned float32\[\]"):
        JaxScanIterator()(lambda c, x: c + x, jnp.float32(0), jnp.ones(2))
    with pytest.raises(TypeError, match=r"cond must return a bool scalar, but returned int32\[\]"):
        WhileLoopIterator()(lambda c: c, lambda c: c, jnp.int32(0))
    with pytest.raises(TypeError, match=r"but returned bool\[2\]"):
        WhileLoopIterator()(lambda c: c > 0, lambda c: c, jnp.ones(2))


def test_buckets_of_k_waste_little_and_are_few():
    sizes = [get_k_bucket(k) for k in range(1, 5_000)]
    for k, size in enumerate(sizes, start=1):
        assert size >= k
        assert size < 2 * k if k <= 256 else size <= 1.125 * k
    assert sizes == sorted(sizes)
    assert sorted({s for s in sizes if s <= 256}) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert sorted({s for s in sizes if 256 < s <= 512}) == [288, 320, 352, 384, 416, 448, 480, 512]
    assert len(set(sizes)) == 9 + 8 * 4 + 2  # 4,999 lies in the second eighth above 4,096


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (-3, ValueError), (True, TypeError), (2.0, TypeError)])
def test_bad_k_is_refused(k, error):
    with pytest.raises(error, match="k must be"):
        get_k_bucket(k)


@pytest.mark.parametrize(
    ("unique", "mapping", "k", "error", "message"),
    [
        ([0, 1], [0, 1], 1, ValueError, "k is 1, but unique_indices has 2"),
        ([0, 1], [0, 0], 2, ValueError, r"exactly \[0, k\) with k = 2, but \[1\] is missing"),
        ([0], [0, 1], 1, ValueError, r"\[1\] is missing from it or out of range"),
        ([0, 0], [0, 1], 2, ValueError, "names an element twice"),
        ([-1], [0], 1, ValueError, "unique_indices must lie in"),
        ([0], [-1], 1, ValueError, "index_map must lie in"),
        ([0.0], [0], 1, TypeError, "unique_indices must hold integers"),
        ([0], [False], 1, TypeError, "index_map must hold integers"),
        ([[0]], [0], 1, ValueError, "one dimension"),
        ([], [], 0, ValueError, "k must be at least 1"),
        ([0], [0], True, TypeError, "k must be an integer"),
        ([0, 9], [0, 0, 1, 0], 2, ValueError, r"unique_indices holds 9, but must lie in \[0, n\) with n = 4"),
        ([0, 4], [0, 0, 1, 0], 2, ValueError, r"unique_indices holds 4, but must lie in \[0, n\) with n = 4"),
        ([0, 2], [1, 1, 0, 1], 2, ValueError, r"unique_indices\[0\] is element 0, but index_map\[0\] is 1: .* be 0;"),
        ([0, 1], [0, 0, 1, 0], 2, ValueError, r"unique_indices\[1\] is element 1, but index_map\[1\] is 0: .* be 1;"),
    ],
)
def test_bad_dedup_specs_are_refused(unique, mapping, k, error, message):
    with pytest.raises(error, match=message):
        DedupSpec("a", unique, mapping, k)


def test_padding_repeats_the_last_distinct_element():
    assert DEDUP.k_bucket == 4
    assert DEDUP.unique_indices.tolist() == [0, 2, 3, 3]
    with pytest.raises(ValueError, match="read-only"):
        DEDUP.index_map[0] = 1


def test_dedup_gathers_compare_by_bytes():
    same = DedupGather(np.array([0, 2, 3, 3]), np.array([0, 0, 1, 2, 1]), 3, 4)
    other = DedupGather(np.array([0, 4, 3, 3]), np.array([0, 0, 1, 2, 1]), 3, 4)
    assert same == DEDUP
    assert hash(same) == hash(DEDUP)
    assert other != DEDUP
    assert Vmap() != DEDUP


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_dedup_spec_is_accepted_exactly_where_it_gives_every_element_its_own_result(data):
    n = data.draw(st.integers(1, 5))
    k = data.draw(st.integers(1, n))
    unique = data.draw(st.permutations(range(n + 1)))[:k]
    mapping = [*data.draw(st.permutations(range(k))), *data.draw(st.lists(st.integers(0, k - 1), max_size=n - k))]
    # Elements that share an entry of index_map are copies; what stands for a class must be one of it.
    consistent = all(u < len(mapping) and mapping[u] == i for i, u in enumerate(unique))
    try:
        strategy = DedupSpec("a", np.array(unique), np.array(mapping), k).to_dedup_gather()
    except ValueError:
        assert not consistent
        return
    assert consistent
    assert axis_dispatch(strategy, lambda x: -x, np.array(mapping)).tolist() == [-c for c in mapping]


@pytest.mark.parametrize("kept", [3, 5])
def test_a_dedup_fn_that_returns_another_number_of_elements_is_refused(kept):
    strategy = dataclasses.replace(DEDUP, dedup_fn=lambda xs, _: {"v": xs["v"][:kept]})
    with pytest.raises(ValueError, match=rf"dedup_fn returned .* shape \({kept},\) at \['v'\], .* k_bucket = 4"):
        axis_dispatch(strategy, lambda x: x, {"v": np.arange(5)})


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([0], [0], 1, 2), ValueError),
        (([0, 1], [0], 2, 1), ValueError),
        (([0], [1], 1, 1), ValueError),
        (([0], [0], 0, 1), ValueError),
        (([5], [0], 1, 1), ValueError),
        (([0, 1, 9, 9], [0, 1, 1], 2, 4), ValueError),
        (([0, 2, 2, 2], [1, 1, 0], 2, 4), ValueError),
        (([0.5], [0], 1, 1), TypeError),
        (([0], [0], 1, 1, 3), TypeError),
        (([0], [0], 1, 1, None, 3), TypeError),
    ],
)
def test_bad_dedup_gathers_are_refused(arguments, error):
    with pytest.raises(error):
        DedupGather(*arguments)


def test_bad_strategies_are_refused():
    wrong: Any = 3
    sizes: list[tuple[Any, type[Exception]]] = [(0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError)]
    for size, error in sizes:
        with pytest.raises(error, match="batch_size must be"):
            SafeMap(size)
    for make in (lambda: Scan(wrong), lambda: WhileCarry(wrong), lambda: WhileCarry(None, wrong)):
        with pytest.raises(TypeError, match="must be callable"):
            make()
    with pytest.raises(TypeError, match="collect_outputs must be True or False"):
        Scan(collect_outputs=wrong)
    with pytest.raises(ValueError, match="boundaries is empty"):
        Bucket(())


def test_strategies_with_arrays_compare_by_their_bits():
    nan = np.array([np.nan, 0.0])
    assert Scan(running_sum, nan) == Scan(running_sum, nan.copy())
    assert Scan(running_sum, nan) != Scan(running_sum, np.array([np.nan, -0.0]))
    assert Scan(running_sum, jax.random.key(1)) == Scan(running_sum, jax.random.key(1))
    assert WhileCarry(init={"a": 1}) != WhileCarry(init={"b": 1})
    assert len({Scan(running_sum, nan), Scan(running_sum, nan.copy()), WhileCarry(), Vmap()}) == 3
