"""A whole plan with boundaries: values, effects, exceptions, and what is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.stages import (
    AxisBoundary,
    ExecutorError,
    HostSink,
    HostTap,
    PlanTopologyError,
    execute_plan,
    io_callback,
)
from xtrax.tiling import AxisDecision, AxisSpec, BatchPlan, Bucket, DedupSpec, SafeMap, Scan, Vmap, WhileCarry, reducers

# Must come before JAX starts its devices; repeating it with the same number is harmless.
jax.config.update("jax_num_cpu_devices", 8)


def decision(name: str, size: int, strategy: Any, batch_size: int | None = None) -> AxisDecision:
    return AxisDecision(AxisSpec(name, size, max(size, 1)), batch_size or max(size, 1), "by hand", strategy)


def plan_of(*decisions: AxisDecision) -> BatchPlan:
    return BatchPlan(decisions)


class Rows:
    """A host function that keeps what it is given, row by row."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, values: Any, index: np.ndarray) -> None:
        assert index.dtype == np.int64
        self.rows.extend((tuple(i), v) for i, v in zip(index.tolist(), values.tolist(), strict=True))


TWO = plan_of(decision("a", 5, SafeMap(2)), decision("b", 3, Vmap()))
AXES = [("a",), ("b",)]


def product(a: Any, b: Any) -> Any:
    return 10 * a + b


def test_taps_keep_and_sinks_take_and_fuses_reduce_at_each_axis():
    seen, taken = Rows(), Rows()
    boundaries = {
        "b": AxisBoundary(tap=HostTap(seen, ordered=True), fuse=reducers.sum),
        "a": AxisBoundary(sink=HostSink(taken, ordered=True)),
    }
    assert execute_plan(product, TWO, np.arange(5), np.arange(3), axes=AXES, boundaries=boundaries) is None
    assert seen.rows == [((i, j), 10 * i + j) for i in range(5) for j in range(3)]
    assert taken.rows == [((i,), 30 * i + 3) for i in range(5)]


def test_boundaries_may_be_given_in_the_order_of_the_axes():
    seen = Rows()
    got = execute_plan(
        product,
        TWO,
        np.arange(5),
        np.arange(3),
        axes=AXES,
        boundaries=[AxisBoundary(tap=HostTap(seen)), AxisBoundary(fuse=functools.partial(jnp.max, axis=0))],
    )
    assert got.tolist() == [10 * i + 2 for i in range(5)]
    assert sorted(seen.rows) == [((i,), 10 * i + 2) for i in range(5)]


def test_no_boundary_is_the_executor_of_tiling():
    got = execute_plan(product, TWO, np.arange(5), np.arange(3), axes=AXES)
    assert got.tolist() == [[10 * i + j for j in range(3)] for i in range(5)]


def test_lanes_are_the_innermost_loop_around_a_scan():
    seen = Rows()
    plan = plan_of(decision("a", 5, SafeMap(2)), decision("t", 3, Scan(lambda c, y: (c + y, c + y), jnp.int32(0))))
    outputs, carries = execute_plan(
        product,
        plan,
        np.arange(5, dtype=np.int32),
        np.arange(3, dtype=np.int32),
        axes=[("a",), ("t",)],
        boundaries={"t": AxisBoundary(tap=HostTap(seen, ordered=True))},
    )
    expected = np.cumsum([[10 * i + t for t in range(3)] for i in range(5)], axis=1)
    np.testing.assert_array_equal(outputs, expected)
    np.testing.assert_array_equal(carries["t"], expected[:, -1])
    order = [(i, t) for chunk in ([0, 1], [2, 3], [4]) for t in range(3) for i in chunk]
    assert seen.rows == [(index, expected[index]) for index in order]


def test_effects_of_copies_occur_for_each_original_position_inside_and_outside():
    index_map = np.array([0, 1, 0, 1, 1])
    strategy = DedupSpec("a", np.array([0, 1]), index_map, k=2).to_dedup_gather()
    inner, outer = Rows(), Rows()
    plan = plan_of(decision("a", 5, strategy), decision("b", 3, SafeMap(2)))
    boundaries = {
        "a": AxisBoundary(sink=HostSink(outer, ordered=True)),
        "b": AxisBoundary(tap=HostTap(inner, ordered=True), fuse=reducers.sum),
    }
    execute_plan(product, plan, index_map, np.arange(3), axes=AXES, boundaries=boundaries)
    assert outer.rows == [((i,), 30 * v + 3) for i, v in enumerate(index_map)]
    assert inner.rows == [((i, j), 10 * index_map[i] + j) for chunk in ([0, 1], [2]) for i in range(5) for j in chunk]


def test_a_bucket_axis_and_what_is_inside_it():
    items = [np.arange(n, dtype=np.int32) for n in (3, 5, 1, 4, 2)]
    plan = plan_of(decision("s", 5, Bucket((4, 8)), 2), decision("e", 3, SafeMap(2)))
    inner, outer = Rows(), Rows()
    got = execute_plan(
        lambda x, e, mask: jnp.sum(jnp.where(mask, x, 0)) + 100 * e,
        plan,
        items,
        np.arange(3, dtype=np.int32),
        axes=[("s",), ("e",)],
        boundaries={"s": AxisBoundary(tap=HostTap(outer)), "e": AxisBoundary(tap=HostTap(inner, ordered=True))},
    )
    expected = [[int(item.sum()) + 100 * e for e in range(3)] for item in items]
    assert [result.tolist() for result in got] == expected
    assert sorted(outer.rows) == [((i,), row) for i, row in enumerate(expected)]
    batches = [[0, 2], [3, 4], [1]]  # of at most two, the bucket of four first
    order = [(i, e) for batch in batches for chunk in ([0, 1], [2]) for i in batch for e in chunk]
    assert inner.rows == [(index, expected[index[0]][index[1]]) for index in order]


def test_a_mesh_runs_unordered_effects_once_for_each_element():
    mesh = jax.make_mesh((8,), ("d",))
    seen = Rows()
    got = execute_plan(
        product,
        TWO,
        np.arange(5),
        np.arange(3),
        axes=AXES,
        boundaries={"b": AxisBoundary(tap=HostTap(seen))},
        mesh=mesh,
    )
    assert got.tolist() == [[10 * i + j for j in range(3)] for i in range(5)]
    assert sorted(seen.rows) == [((i, j), 10 * i + j) for i in range(5) for j in range(3)]


def test_users_own_ordered_effects_keep_the_chunks_of_an_outermost_axis():
    class Kept:
        ordered = True

        def __init__(self) -> None:
            self.rows: list[int] = []

        def __call__(self, x: Any) -> None:
            io_callback(lambda v: self.rows.append(int(v)), None, x, ordered=True)

    kept = Kept()
    plan = plan_of(decision("a", 5, SafeMap(2)))
    assert execute_plan(lambda a: a * a, plan, np.arange(5), boundaries=[AxisBoundary(sink=kept)]) is None
    jax.effects_barrier()
    assert kept.rows == [0, 1, 4, 9, 16]


def test_each_element_has_its_own_key():
    key, plan = jax.random.key(2), plan_of(decision("a", 4, SafeMap(3)))
    seen = Rows()
    got = execute_plan(
        lambda a, key: jax.random.bits(key),
        plan,
        np.arange(4),
        key=key,
        boundaries=[AxisBoundary(tap=HostTap(seen))],
    )
    assert got.tolist() == [int(jax.random.bits(jax.random.fold_in(key, i))) for i in range(4)]


def test_effects_of_a_differentiated_plan_are_not_lost():
    seen = Rows()
    boundaries = {"b": AxisBoundary(tap=HostTap(seen, ordered=True))}

    def loss(w):
        outputs = execute_plan(lambda a, b: w * a * b, TWO, np.arange(5.0), np.arange(3.0), axes=AXES,
                               boundaries=boundaries)  # fmt: skip
        return outputs.sum()

    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        seen.rows.clear()
        assert float(grad(2.0)) == 30.0
        jax.effects_barrier()
        assert seen.rows == [((i, j), 2.0 * i * j) for i in range(5) for j in range(3)]


def test_a_repeated_call_takes_new_data_and_fires_again():
    seen = Rows()
    boundary = AxisBoundary(tap=HostTap(seen, ordered=True))
    plan = plan_of(decision("a", 3, Vmap()))
    for factor in (1, 2):
        execute_plan(jnp.negative, plan, factor * np.arange(3), boundaries=[boundary])
    assert [value for _, value in seen.rows] == [0, -1, -2, 0, -2, -4]


# Exceptions.


class StopHereError(Exception):
    pass


@pytest.mark.parametrize("ordered", [True, False])
def test_an_exception_surfaces_as_itself_with_axis_and_element(ordered):
    seen: list[Any] = []

    def host(value, index):
        if index == (2, 1):
            raise StopHereError("no more")
        seen.append(index)

    boundaries = {"b": AxisBoundary(tap=HostTap(host, ordered=ordered, batched=False))}
    with pytest.raises(StopHereError, match="no more") as caught:
        execute_plan(product, TWO, np.arange(5), np.arange(3), axes=AXES, boundaries=boundaries)
    notes = "".join(caught.value.__notes__)
    assert "axis 'a' element 2" in notes
    assert "axis 'b' element 1" in notes
    if ordered:
        assert seen == [(i, j) for i in range(3) for j in range(3)][:7]


def test_after_an_exception_the_next_call_is_as_usual():
    fail = [True]
    rows = Rows()

    def host(values, index):
        if fail[0]:
            raise StopHereError
        rows(values, index)

    boundary = AxisBoundary(sink=HostSink(host, ordered=True))
    plan = plan_of(decision("a", 3, SafeMap(2)))
    with pytest.raises(StopHereError):
        execute_plan(lambda a: a, plan, np.arange(3), boundaries=[boundary])
    fail[0] = False
    execute_plan(lambda a: a, plan, np.arange(3), boundaries=[boundary])
    assert rows.rows == [((i,), i) for i in range(3)]


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), "dedup", "sharded"])
@pytest.mark.parametrize("role", ["tap", "sink"])
def test_an_exception_on_several_devices_surfaces_as_itself_and_ends_no_process(strategy, role):
    seen: list[Any] = []

    def host(value, index):
        if index[0] == 3:
            raise StopHereError("no more")
        seen.append(index)

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = np.arange(8.0)
    if strategy == "sharded":  # over devices by its own placement
        x, mesh, strategy = jax.device_put(x, jax.NamedSharding(mesh, jax.P("d"))), None, Vmap()
    elif strategy == "dedup":
        strategy = DedupSpec("a", np.arange(8), np.arange(8), k=8).to_dedup_gather()
    effect = (HostTap if role == "tap" else HostSink)(host, batched=False)
    call = functools.partial(execute_plan, lambda x: x, plan_of(decision("a", 8, strategy)), x, mesh=mesh)
    with pytest.raises(StopHereError, match="no more") as caught:
        call(boundaries=[AxisBoundary(**{role: effect})])
    assert "axis 'a' element 3" in "".join(caught.value.__notes__)
    assert (3,) not in seen


# What is refused.


class Ordered:
    """A sink whose effects must be in order, and that has no batching rule."""

    ordered = True

    def __call__(self, x: Any) -> None: ...


def untraced(*args: Any) -> Any:
    raise AssertionError("traced")


call: Any = execute_plan  # what is wrong is wrong for a type checker too


def test_bad_plans_and_boundaries_are_refused_before_any_trace():
    tap = AxisBoundary(tap=HostTap(lambda v, i: None, ordered=True))
    x = np.arange(5)
    one = plan_of(decision("a", 5, Vmap()))
    scan = Scan(lambda c, y: (c, y), 0, collect_outputs=False)
    with pytest.raises(TypeError, match="plan must be a BatchPlan"):
        call(untraced, one.decisions, x)
    with pytest.raises(PlanTopologyError, match="axis 'c' has a boundary, but the plan has no such axis"):
        call(untraced, one, x, boundaries={"c": tap})
    with pytest.raises(PlanTopologyError, match=r"1 axes .* 2 boundaries"):
        call(untraced, one, x, boundaries=[tap, None])
    with pytest.raises(TypeError, match="boundary of axis 'a' must be an AxisBoundary or None"):
        call(untraced, one, x, boundaries={"a": functools.partial(jnp.sum)})
    ordered = AxisBoundary(sink=Ordered())
    with pytest.raises(PlanTopologyError, match="'a': its sink is ordered, and Vmap"):
        call(untraced, one, x, boundaries=[ordered])
    with pytest.raises(ExecutorError, match="'a': its tap is ordered, and a mesh is given"):
        call(untraced, one, x, boundaries=[tap], mesh=jax.make_mesh((2,), ("d",)))
    with pytest.raises(ExecutorError, match="axis 'w' is a WhileCarry"):
        call(untraced, plan_of(decision("w", 5, WhileCarry())), x)
    with pytest.raises(ExecutorError, match=r"'a': its fuse needs the stack.*collect_outputs=False"):
        call(untraced, plan_of(decision("a", 5, scan)), x, boundaries=[AxisBoundary(fuse=jnp.sum)])
    inside = plan_of(decision("a", 5, Vmap()), decision("s", 2, Bucket((4,))))
    with pytest.raises(ExecutorError, match="'s' is a Bucket"):
        call(untraced, inside, x, axes=[("a",)])
