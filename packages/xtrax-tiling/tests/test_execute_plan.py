"""What one call of execute_plan does: values, keys, derivatives, compiles, meshes, buckets, and the edges of axes."""

import dataclasses
import functools
import logging
import operator
import sys
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback

from xtrax.tiling import (
    AxisDecision,
    AxisSpec,
    BatchPlan,
    BatchPlanner,
    Bucket,
    CarrySpec,
    DedupGather,
    DedupSpec,
    SafeMap,
    Scan,
    Vmap,
    execute_plan,
    tiled_vmap,
)
from xtrax.tiling import reducers as rd
from xtrax.tiling._execute import program
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.execute import _run_plan


def decision(name: str, size: int, strategy: Any, batch_size: int | None = None) -> AxisDecision:
    return AxisDecision(AxisSpec(name, size, max(size, 1)), batch_size or max(size, 1), "by hand", strategy)


def plan_of(*decisions: AxisDecision) -> BatchPlan:
    return BatchPlan(decisions)


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Values.


@given(
    size=st.sampled_from([0, 1, 2, 3, 5]),
    inner=st.sampled_from([1, 3]),
    outer_strategy=st.sampled_from([Vmap(), SafeMap(1), SafeMap(2)]),
    inner_strategy=st.sampled_from([Vmap(), SafeMap(2)]),
    swapped=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_a_plan_is_a_nest_of_vmaps(size, inner, outer_strategy, inner_strategy, swapped):
    x = floats(inner, size, 2) if swapped else floats(size, inner, 2)
    tree = {"of_outer": floats(size), "nothing": None}
    plan = plan_of(decision("a", size, outer_strategy), decision("b", inner, inner_strategy))

    def fn(x, tree, scale):
        return x * tree["of_outer"] * scale, jnp.int32(7)

    got = execute_plan(fn, plan, x, tree, np.float32(3), axes=[("b", "a") if swapped else ("a", "b"), ("a",), None])
    ordered = np.swapaxes(x, 0, 1) if swapped else x
    np.testing.assert_allclose(got[0], ordered * tree["of_outer"][:, None, None] * 3, rtol=1e-6)
    np.testing.assert_array_equal(got[1], np.full((size, inner), 7))


def test_arguments_that_share_no_axis_form_the_outer_product():
    plan = plan_of(decision("a", 3, SafeMap(2)), decision("b", 4, Vmap()))
    got = execute_plan(lambda a, b: 10 * a + b, plan, np.arange(3), np.arange(4), axes=[("a",), ("b",)])
    assert got.tolist() == [[10 * a + b for b in range(4)] for a in range(3)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "bool", "complex64", "key"])
def test_every_dtype_passes_through_every_strategy(dtype):
    x = jax.random.split(jax.random.key(0), (5, 3)) if dtype == "key" else jnp.ones((5, 3)).astype(dtype)
    dedup = DedupSpec("b", np.array([0]), np.zeros(3, int), k=1).to_dedup_gather()
    for first, second in [(SafeMap(2), dedup), (Vmap(), SafeMap(2))]:
        plan = plan_of(decision("a", 5, first), decision("b", 3, second))
        got = execute_plan(None, plan, x, axes=[("a", "b")])
        assert got.dtype == x.dtype
        assert got.shape == x.shape


def test_no_function_is_plain_scan():
    def transition(carry, x):
        return carry + x, carry * x

    xs = floats(6)
    plan = BatchPlanner(carry_specs=[CarrySpec("time", jnp.float32(1), transition)]).plan([AxisSpec("time", 6, 6)])
    outputs, carries = execute_plan(None, plan, xs)
    carry, ys = lax.scan(transition, jnp.float32(1), xs)
    np.testing.assert_array_equal(outputs, ys)
    np.testing.assert_array_equal(carries["time"], carry)


def test_outputs_that_are_not_collected_are_none_and_the_carry_remains():
    spec = CarrySpec("time", jnp.float32(0), lambda c, y: (c + y, y), collect_outputs=False)
    plan = BatchPlanner(carry_specs=[spec]).plan([AxisSpec("batch", 3, 3), AxisSpec("time", 4, 4)])
    x = floats(3, 4)
    outputs, carries = execute_plan(lambda x: 2 * x, plan, x, axes=[("batch", "time")])
    assert outputs is None
    np.testing.assert_allclose(carries["time"], 2 * x.sum(axis=1), rtol=1e-6)


def test_a_step_sees_all_of_the_axes_inside_it():
    def transition(carry, y):  # y is (4,), the whole inner axis
        return carry + y[-1], jnp.cumsum(y)

    plan = plan_of(decision("time", 3, Scan(transition, 0.0)), decision("space", 4, SafeMap(3)))
    x = floats(3, 4)
    outputs, carries = execute_plan(lambda x: x + 1, plan, x, axes=[("time", "space")])
    np.testing.assert_allclose(outputs, np.cumsum(x + 1, axis=1), rtol=1e-5)
    np.testing.assert_allclose(carries["time"], (x + 1)[:, -1].sum(), rtol=1e-5)


def test_dedup_functions_get_what_the_axis_gives_them():
    index_map = np.array([0, 1, 0, 1])
    given: list[tuple[int, ...]] = []

    def dedup_fn(xs, unique):
        given.append(xs["x"].shape)
        return {"x": xs["x"][unique]}

    def gather_fn(ys, mapping):
        return 100 * ys[mapping]

    spec = DedupSpec("b", np.array([0, 1]), index_map, k=2, dedup_fn=dedup_fn, gather_fn=gather_fn)
    plan = plan_of(decision("a", 3, Vmap()), decision("b", 4, spec.to_dedup_gather()))
    x = floats(3, 2)[:, index_map]
    got = execute_plan(lambda d: d["x"] + 1, plan, {"x": x}, axes=[("a", "b")])
    np.testing.assert_allclose(got, 100 * (x + 1), rtol=1e-6)
    assert given == [(4,)]  # of one element of the axis outside


def test_only_the_distinct_elements_are_computed():
    rows: list[int] = []

    @jax.custom_batching.custom_vmap
    def counted(x):
        return 2 * x

    @counted.def_vmap
    def _(size, batched, x):
        rows.append(size)
        return 2 * x, True

    index_map = np.arange(1000) % 3
    plan = plan_of(decision("a", 1000, DedupSpec("a", np.arange(3), index_map, k=3).to_dedup_gather()))
    got = execute_plan(counted, plan, index_map.astype(np.float32))
    np.testing.assert_array_equal(got, 2 * index_map)
    assert set(rows) == {4}  # the bucket of three


# Keys.


@pytest.mark.parametrize("strategies", [(Vmap(), SafeMap(2)), (SafeMap(2), Vmap())])
@pytest.mark.parametrize("devices", [None, 8])
def test_each_element_has_the_key_of_its_row_major_index(strategies, devices):
    key = jax.random.key(3)
    plan = plan_of(decision("a", 5, strategies[0]), decision("b", 3, strategies[1]))
    mesh = None if devices is None else jax.make_mesh((devices,), ("d",))
    got = execute_plan(
        lambda a, b, key: jax.random.bits(key),
        plan,
        np.zeros(5),
        np.zeros(3),
        axes=[("a",), ("b",)],
        key=key,
        mesh=mesh,
    )
    expected = [[int(jax.random.bits(jax.random.fold_in(key, 3 * i + j))) for j in range(3)] for i in range(5)]
    assert got.tolist() == expected


# Inside other transformations.


def nested(W, x, ys):
    """A Scan inside chunks, with a matrix that everything closes over."""
    transition = functools.partial(lambda carry, y: (carry / 2 + y.sum(), carry * y))
    plan = plan_of(decision("batch", 5, SafeMap(2)), decision("time", 3, Scan(transition, jnp.float32(1))))
    outputs, carries = execute_plan(lambda x, y: jnp.tanh(W @ x + y), plan, x, ys, axes=[("batch",), ("time",)])
    return outputs.sum() + (carries["time"] ** 2).sum()


def nested_loops(W, x, ys):
    total = 0.0
    for i in range(5):
        carry = jnp.float32(1)
        for t in range(3):
            y = jnp.tanh(W @ x[i] + ys[t])
            total += (carry * y).sum()
            carry = carry / 2 + y.sum()
        total += carry**2
    return total


def test_derivatives_batches_and_jit_are_those_of_loops():
    args = (jnp.asarray(floats(4, 4)), jnp.asarray(floats(5, 4, seed=1)), jnp.asarray(floats(3, 4, seed=2)))
    for argnum in range(3):
        got = jax.jit(jax.grad(nested, argnums=argnum))(*args)
        np.testing.assert_allclose(got, jax.grad(nested_loops, argnums=argnum)(*args), rtol=1e-4, atol=1e-5)
    tangents = jax.tree.map(jnp.ones_like, args)
    np.testing.assert_allclose(jax.jvp(nested, args, tangents)[1], jax.jvp(nested_loops, args, tangents)[1], rtol=1e-4)
    several = jnp.stack([args[0], 2 * args[0]])
    expected = [nested_loops(W, *args[1:]) for W in several]
    np.testing.assert_allclose(jax.vmap(lambda W: nested(W, *args[1:]))(several), expected, rtol=1e-4)


# Programs.


def compiles(caplog: Any, call: Any, name: str = "fn") -> int:
    """How many programs of this name a call compiles."""
    caplog.clear()
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        jax.block_until_ready(call())
    return sum(f"Finished XLA compilation of jit({name})" in record.getMessage() for record in caplog.records)


def test_other_duplicates_and_other_first_carries_need_no_other_program(caplog):
    def fn(x):
        return 2 * x

    def distinct(seed: int) -> None:
        rng = np.random.default_rng(seed)
        xs = rng.permutation(np.concatenate([np.arange(10), rng.integers(0, 10, 40)])).astype(np.float32)
        spec = AxisSpec("a", 50, 16, dedup_eligible=True)
        plan = BatchPlanner().plan([spec], data={"a": xs})
        assert isinstance(plan.decisions[0].strategy, DedupGather)
        np.testing.assert_array_equal(execute_plan(fn, plan, xs), 2 * xs)

    def add(carry, y):
        return carry + y, carry

    def scanned(first: float) -> None:
        plan = plan_of(decision("t", 3, Scan(add, jnp.float32(first))))
        outs, carries = execute_plan(fn, plan, jnp.ones(3))
        assert outs.tolist() == [first, first + 2, first + 4]
        assert float(carries["t"]) == first + 6

    assert compiles(caplog, lambda: distinct(0)) == 1
    assert compiles(caplog, lambda: [distinct(seed) for seed in (1, 2)]) == 0
    assert compiles(caplog, lambda: scanned(0.0)) == 1
    assert compiles(caplog, lambda: [scanned(first) for first in (1.0, 7.0)]) == 0


def test_a_repeated_eager_call_compiles_once(caplog):
    def fn(x):
        return jnp.sin(x)

    def call(size, batch):
        return execute_plan(fn, plan_of(decision("a", size, SafeMap(batch))), floats(size))

    assert compiles(caplog, lambda: call(10, 3)) == 1
    assert compiles(caplog, lambda: call(10, 3)) == 0  # an equal plan and arrays of equal type
    assert compiles(caplog, lambda: call(11, 3)) == 1
    assert compiles(caplog, lambda: call(10, 4)) == 1
    assert compiles(caplog, lambda: call(10, 3)) == 0


def test_modules_are_told_apart_by_structure_and_their_arrays_are_arguments(caplog):
    class Scaled(eqx.Module):
        weight: jax.Array
        flip: bool = False

        def __call__(self, x):
            return -self.weight * x if self.flip else self.weight * x

    plan, x = plan_of(decision("a", 4, SafeMap(3))), floats(4)

    def call(*fields):
        return execute_plan(Scaled(*fields), plan, x)

    assert compiles(caplog, lambda: call(jnp.float32(2)), "Scaled") == 1
    assert compiles(caplog, lambda: call(jnp.float32(5)), "Scaled") == 0
    np.testing.assert_allclose(call(jnp.float32(5)), 5 * x)
    assert compiles(caplog, lambda: call(jnp.float32(2), True), "Scaled") == 1
    np.testing.assert_allclose(call(jnp.float32(2), True), -2 * x)


def test_a_function_is_traced_anew_when_what_it_closes_over_is_replaced():
    scale = np.float32(2)

    def fn(x):
        return scale * x

    plan, x = plan_of(decision("a", 4, Vmap())), floats(4)
    np.testing.assert_allclose(execute_plan(fn, plan, x), 2 * x)
    scale = np.float32(3)
    np.testing.assert_allclose(execute_plan(fn, plan, x), 3 * x)


def test_a_transition_is_traced_anew_when_what_it_closes_over_is_replaced():
    scale = 2.0

    def transition(carry, y):
        return carry + scale * y, None

    plan, x = plan_of(decision("a", 4, Scan(transition, 0.0))), floats(4)
    for scale in (2.0, 3.0):
        _, carries = execute_plan(None, plan, x)
        np.testing.assert_allclose(carries["a"], scale * x.sum(), rtol=1e-5)


SCALE = 2.0


def scaled(carry, y):
    return carry + SCALE * y, None


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A transition that is an object, and calls one of its own."""

    step: Any

    def __call__(self, carry, y):
        carry, _ = self.step(carry, y)
        return SCALE * carry, None


class Weighted(eqx.Module):
    def __call__(self, x):
        return SCALE * x


TRANSITIONS = {
    "function": (scaled, lambda total, y: total + SCALE * y),
    "partial": (
        functools.partial(lambda k, carry, y: (carry + k * SCALE * y, None), 3),
        lambda t, y: t + 3 * SCALE * y,
    ),
    "object": (Scaled(scaled), lambda total, y: SCALE * (total + SCALE * y)),
    "method": (Scaled(scaled).__call__, lambda total, y: SCALE * (total + SCALE * y)),
}


@pytest.mark.parametrize("name", TRANSITIONS)
def test_what_runs_at_the_edges_is_traced_anew_when_a_global_is_replaced(name, monkeypatch):
    transition, step = TRANSITIONS[name]
    plan, x = plan_of(decision("a", 4, Scan(transition, 0.0))), floats(4)
    for value in (2.0, 5.0):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", value)
        want = 0.0
        for y in x:
            want = step(want, y)
        for fn in (None, jnp.negative):
            _, carries = execute_plan(fn, plan, x)
            np.testing.assert_allclose(carries["a"], want if fn is None else -want, rtol=1e-5)


def test_modules_reducers_and_gathers_are_traced_anew_when_a_global_is_replaced(monkeypatch):
    x = floats(4)
    total = rd.Reducer(
        lambda element: jnp.zeros(element.shape), lambda state, values, mask: state + SCALE * values.sum(0), jnp.add,
        lambda state: state,
    )  # fmt: skip
    spec = DedupSpec("a", np.array([0, 1]), np.array([0, 1, 1, 0]), 2, gather_fn=lambda ys, index: SCALE * ys[index])
    gathered = plan_of(decision("a", 4, spec.to_dedup_gather()))
    for value in (2.0, 5.0):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", value)
        np.testing.assert_allclose(tiled_vmap(Weighted(), batch_size=3)(x), value * x, rtol=1e-6)
        np.testing.assert_allclose(
            tiled_vmap(jnp.negative, batch_size=2, reduce=total)(x), -value * x.sum(), rtol=1e-5
        )  # fmt: skip
        np.testing.assert_allclose(execute_plan(jnp.negative, gathered, x), -value * x[[0, 1, 1, 0]], rtol=1e-6)


def test_programs_have_the_name_of_the_function(caplog):
    def velocity(x):
        return 2 * x

    plan, x = plan_of(decision("a", 4, SafeMap(3))), floats(4)
    for fn, name in (
        (velocity, "velocity"),
        (functools.partial(velocity), "velocity"),
        (Weighted(), "Weighted"),
        (Weighted().__call__, "Weighted"),
    ):
        assert compiles(caplog, lambda fn=fn: execute_plan(fn, plan, x), name) == 1, name
    scan = plan_of(decision("a", 4, Scan(lambda carry, y: scaled(carry, y), 0.0)))
    assert compiles(caplog, lambda: execute_plan(None, scan, x), "<lambda>") == 1


def test_builtins_of_one_module_are_told_apart():
    plan, x = plan_of(decision("a", 4, SafeMap(3))), floats(4)
    for fn in (operator.neg, operator.abs, operator.pos):
        np.testing.assert_allclose(execute_plan(fn, plan, x), fn(x))


def test_programs_do_not_keep_their_function_alive():
    matrix = jnp.asarray(floats(3, 3))

    def fn(x):
        return matrix @ x

    execute_plan(fn, plan_of(decision("a", 4, SafeMap(3))), floats(4, 3))
    reference = weakref.ref(fn)
    del fn
    assert reference() is None


def test_arrays_that_the_function_closes_over_are_no_constants_of_the_program(monkeypatch):
    matrix = jnp.asarray(floats(400, 400))
    plan = plan_of(decision("a", 6, SafeMap(4)), decision("t", 2, Scan(lambda c, y: (c, y), 0.0)))
    x = floats(6, 2, 400)
    programs: list[str] = []
    jit = jax.jit

    def spied(fn):
        def call(*args):
            programs.append(jit(fn).lower(*args).as_text())
            return jit(fn)(*args)

        return call

    monkeypatch.setattr(program.jax, "jit", spied)
    outputs, _ = execute_plan(lambda x: matrix @ x, plan, x, axes=[("a", "t")])
    np.testing.assert_allclose(outputs, x @ np.asarray(matrix).T, rtol=1e-3, atol=1e-3)
    assert len(programs) == 1
    assert len(programs[0]) < 20_000  # the matrix alone would be 1.3 MB of text


# Meshes.


@pytest.mark.parametrize(
    ("kind", "size"), [("vmap", 0), ("vmap", 3), ("safemap", 8), ("safemap", 13), ("dedup", 3), ("dedup", 13)]
)
def test_a_mesh_changes_no_value_and_no_derivative(kind, size):
    index_map = np.arange(size) % 3
    strategy = {"vmap": Vmap(), "safemap": SafeMap(1)}.get(kind) or DedupSpec(
        "a", np.arange(3), index_map, k=3
    ).to_dedup_gather()
    x = floats(3, 2)[index_map] if kind == "dedup" else floats(size, 2)
    matrix = jnp.asarray(floats(2, 2, seed=1))
    plan = plan_of(decision("a", size, strategy), decision("b", 2, Scan(lambda c, y: (c + y, c + y), 0.0)))

    def loss(matrix, mesh):
        fn = lambda row, b: jnp.sin(matrix @ row).sum() * b  # noqa: E731
        outputs, carries = execute_plan(fn, plan, x, np.arange(2.0), axes=[("a",), ("b",)], mesh=mesh)
        return outputs.sum() + carries["b"].sum(), outputs

    mesh = jax.make_mesh((4, 2), ("d", "e"))
    got, expected = (jax.value_and_grad(loss, has_aux=True)(matrix, m) for m in (mesh, None))
    np.testing.assert_allclose(got[0][1], expected[0][1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [16, 13])
@pytest.mark.parametrize("fuse", [None, rd.mean], ids=["stacked", "streamed"])
def test_a_mesh_of_explicit_shardings_that_is_in_context(size, fuse):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    plan, x = plan_of(decision("a", size, SafeMap(1))), floats(size, 2)
    with jax.set_mesh(mesh):
        split = jax.sharding.PartitionSpec("d") if size == 16 else jax.sharding.PartitionSpec()
        got = run(jnp.sin, plan, jax.device_put(x, split), mesh=mesh, a=AxisHook(fuse=fuse))
    np.testing.assert_allclose(got, np.sin(x) if fuse is None else np.sin(x).mean(axis=0), rtol=1e-5, atol=1e-6)


# Buckets.


def ragged(*lengths: int) -> list[np.ndarray]:
    return [floats(length, 2, seed=length) for length in lengths]


@pytest.mark.parametrize("devices", [None, 8])
def test_a_bucket_axis_returns_each_result_in_order_and_unpadded(devices):
    items, scales = ragged(3, 5, 0, 8, 4, 4, 2), np.array([1, 2, 3], np.float32)
    plan = plan_of(decision("s", 7, Bucket((4, 8)), 2), decision("e", 3, SafeMap(2)))

    def fn(x, scale, mask):
        return {"sum": jnp.sum(jnp.where(mask[:, None], x, 0), axis=0) * scale, "each": x * scale}

    mesh = None if devices is None else jax.make_mesh((devices,), ("d",))
    results = execute_plan(fn, plan, items, scales, axes=[("s",), ("e",)], mesh=mesh)
    assert len(results) == 7
    for item, result in zip(items, results, strict=True):
        np.testing.assert_allclose(result["each"], item[None] * scales[:, None, None], rtol=1e-6)
        np.testing.assert_allclose(result["sum"], item.sum(axis=0) * scales[:, None], rtol=1e-4, atol=1e-5)


def test_a_bucket_axis_compiles_one_program_for_each_bucket_used(caplog):
    plan = plan_of(decision("s", 9, Bucket((4, 8, 16)), 2))

    def fn(x, mask):
        return jnp.sum(jnp.where(mask[:, None], x, 0))

    items = ragged(1, 2, 3, 4, 4, 5, 6, 7, 8)
    assert compiles(caplog, lambda: execute_plan(fn, plan, items)) == 2
    assert compiles(caplog, lambda: execute_plan(fn, plan, items)) == 0


def test_a_bucket_axis_cuts_every_axis_of_the_length_and_refuses_what_follows_it_otherwise():
    items = ragged(3, 5)
    plan = plan_of(decision("s", 2, Bucket((8,)), 2))
    for item, square in zip(items, execute_plan(lambda x, mask: x @ x.T, plan, items), strict=True):
        np.testing.assert_allclose(square, item @ item.T, rtol=1e-5)
    with pytest.raises(ValueError, match=r"outputs\['d'\] has shape \(7, 2\) .* but \(3, 2\).*cannot be cut off"):
        execute_plan(lambda x, mask: {"d": jnp.diff(x, axis=0)}, plan, items)


def test_a_function_of_one_bucket_size_alone_returns_what_it_returns():
    weight = jnp.eye(4)
    (result,) = execute_plan(lambda x, mask: weight @ x, plan_of(decision("s", 1, Bucket((4,)), 1)), ragged(3))
    assert result.shape == (4, 2)


def test_a_scan_inside_a_bucket_and_a_derivative_of_what_is_shared():
    items = ragged(3, 5, 2)
    plan = plan_of(decision("s", 3, Bucket((4, 8)), 2), decision("t", 2, Scan(lambda c, y: (c + y, y), 0.0)))

    def loss(w):
        fn = lambda x, t, mask: w * t * jnp.sum(jnp.where(mask[:, None], x, 0))  # noqa: E731
        outputs, carries = execute_plan(fn, plan, items, np.array([1.0, 2.0]), axes=[("s",), ("t",)])
        assert [o.shape for o in outputs] == [(2,)] * 3
        return sum(carries["t"])

    value, slope = jax.value_and_grad(loss)(jnp.float32(2))
    total = 3 * sum(item.sum() for item in items)
    np.testing.assert_allclose([value, slope], [2 * total, total], rtol=1e-4)


def test_keys_of_a_bucket_axis_are_those_of_the_order_given():
    plan, key = plan_of(decision("s", 5, Bucket((4, 8)), 2)), jax.random.key(1)
    got = execute_plan(lambda x, mask, key: jax.random.bits(key), plan, ragged(5, 1, 8, 2, 3), key=key)
    assert [int(bits) for bits in got] == [int(jax.random.bits(jax.random.fold_in(key, i))) for i in range(5)]


# The edges of axes.


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """An unordered effect that keeps the index and value of each row that its mask lets through."""

    rows: list[Any]

    def __call__(self, values: Any, index: Any, mask: Any) -> Any:
        def host(values: Any, index: Any, mask: Any) -> Any:
            self.rows.extend(
                (*map(int, row), float(value)) for value, row, real in zip(values, index, mask, strict=True) if real
            )
            return np.int32(0)

        mask = jnp.ones(len(index), bool) if mask is None else mask
        token = jax.ShapeDtypeStruct((), jnp.int32)
        return values, io_callback(host, token, lax.stop_gradient(values), index, mask)


def run(fn, plan, *args, axes=None, mesh=None, **hooks):
    return _run_plan(fn, plan, args, axes, mesh, None, hooks)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        *((s, None) for s in (Vmap(), SafeMap(1), SafeMap(4), "scan", "dedup")),
        (SafeMap(1), 8),
        (Vmap(), 8),
        ("dedup", 8),
    ],
    ids=str,
)
def test_a_reducer_is_streamed_over_any_axis(strategy, devices):
    x = floats(10, 2)
    carried = strategy == "scan"
    if carried:
        strategy = Scan(lambda c, y: (c, y), ())
    if strategy == "dedup":
        x = x[np.arange(10) % 3]
        strategy = DedupSpec("a", np.arange(3), np.arange(10) % 3, k=3).to_dedup_gather()
    reduce = rd.as_reducer({"mean": rd.mean, "most": rd.max})
    mesh = None if devices is None else jax.make_mesh((devices,), ("d",))
    plan = plan_of(decision("a", 10, strategy))
    got = run(lambda x: {"mean": 2 * x, "most": x}, plan, x, mesh=mesh, a=AxisHook(fuse=reduce))
    got = got[0] if carried else got
    np.testing.assert_allclose(got["mean"], 2 * x.mean(axis=0), rtol=1e-5)
    np.testing.assert_array_equal(got["most"], x.max(axis=0))


@pytest.mark.parametrize("outer", [Vmap(), SafeMap(2)], ids=str)
@pytest.mark.parametrize("fuse", [rd.mean, functools.partial(jnp.mean, axis=0)], ids=["streamed", "stacked"])
def test_a_fuse_inside_is_of_one_element_outside(outer, fuse):
    x = floats(5, 7, 2)
    plan = plan_of(decision("a", 5, outer), decision("b", 7, SafeMap(3)))
    got = run(lambda x: x * x, plan, x, axes=[("a", "b")], b=AxisHook(fuse=fuse))
    np.testing.assert_allclose(got, (x * x).mean(axis=1), rtol=1e-5)
    got = run(lambda x: x * x, plan, x, axes=[("a", "b")], a=AxisHook(fuse=fuse), b=AxisHook(fuse=fuse))
    np.testing.assert_allclose(got, (x * x).mean(axis=(0, 1)), rtol=1e-5)


def test_a_streamed_reduction_never_holds_the_stack():
    x = jnp.zeros((4096, 8))
    plan = plan_of(decision("a", 4096, SafeMap(64)))

    def temporaries(**hooks):
        call = jax.jit(lambda x: jax.tree.map(jnp.sum, run(lambda x: jnp.tile(x, 64), plan, x, **hooks)))
        analysis: Any = call.lower(x).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporaries() >= 4096 * 512 * 4
    assert temporaries(a=AxisHook(fuse=rd.mean)) < 4 * 64 * 512 * 4
    assert temporaries(a=AxisHook(emit=Kept([]), keeps=False)) < 0.1 * 4096 * 512 * 4


@pytest.mark.parametrize("devices", [None, 8])
@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(2), Bucket((4,))], ids=str)
def test_padding_reaches_no_effect(strategy, devices):
    size = 5
    mesh = None if devices is None else jax.make_mesh((devices,), ("d",))
    plan = plan_of(decision("a", size, strategy, 2), decision("b", 3, SafeMap(2)))
    outer: list[Any] = []
    inner: list[Any] = []
    args = (ragged(1, 2, 3, 1, 2) if isinstance(strategy, Bucket) else np.arange(5.0), np.arange(3.0))
    hooks = {"a": AxisHook(emit=Kept(outer), keeps=False), "b": AxisHook(emit=Kept(inner), fuse=rd.sum)}
    assert run(lambda a, b, *mask: b, plan, *args, axes=[("a",), ("b",)], mesh=mesh, **hooks) is None
    jax.effects_barrier()
    assert sorted(outer) == [(i, 3.0) for i in range(5)]
    assert sorted(inner) == [(i, j, float(j)) for i in range(5) for j in range(3)]


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(2), "scan", "dedup"], ids=str)
def test_effects_of_a_differentiated_plan_occur_once_for_each_element(strategy):
    rows: list[Any] = []
    carried = strategy == "scan"
    if carried:
        strategy = Scan(lambda c, y: (c + y, y), 0.0)
    elif strategy == "dedup":
        strategy = DedupSpec("a", np.arange(3), np.arange(5) % 3, k=3).to_dedup_gather()
    plan, x = plan_of(decision("a", 5, strategy)), np.arange(5.0) % 3

    def loss(w):
        result = run(lambda x: w * x * x, plan, x, a=AxisHook(emit=Kept(rows)))
        return (result[0] if carried else result).sum()

    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss))):
        rows.clear()
        slope = transformed(2.0)
        jax.effects_barrier()
        np.testing.assert_allclose(slope, (x * x).sum())
        assert sorted(rows) == [(i, 2 * v * v) for i, v in enumerate(x.tolist())]


def test_effects_of_the_function_itself_occur_once_for_each_element_of_uneven_chunks():
    seen: list[float] = []

    def fn(x):
        io_callback(lambda v: seen.append(float(v)), None, x)
        return x

    execute_plan(fn, plan_of(decision("a", 7, SafeMap(3))), np.arange(7.0))
    jax.effects_barrier()
    assert sorted(seen) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_effects_of_a_transition_occur_once_for_each_step_of_uneven_chunks():
    seen: list[float] = []

    def transition(carry, total):  # of the sum over the innermost axis
        io_callback(lambda v: seen.append(float(v)), None, total)
        return carry + total, total

    scan = Scan(transition, jnp.float32(0))
    decisions = [decision("a", 7, SafeMap(3)), decision("t", 2, scan), decision("b", 3, SafeMap(2))]
    hooks = {"b": AxisHook(fuse=jnp.sum)}
    x = np.arange(42.0, dtype=np.float32).reshape(7, 2, 3)
    _, carries = _run_plan(lambda x: x, plan_of(*decisions), [x], [("a", "t", "b")], None, None, hooks)
    jax.effects_barrier()
    assert sorted(seen) == sorted(x.sum(2).ravel().tolist())
    np.testing.assert_array_equal(carries["t"], x.sum((1, 2)))


def effectful(kind):
    def note(value):
        """On the host."""

    def fn(x):
        if kind == "io":
            io_callback(note, None, x)
        else:
            jax.debug.callback(note, x, ordered=kind == "ordered debug")
        return 2 * x

    return fn


@pytest.mark.parametrize("kind", ["io", "ordered debug"])
@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2), "scan inside", "bucket outside", "tiled_vmap"])
def test_effects_of_the_function_itself_are_refused_over_a_mesh(kind, strategy):
    mesh, fn, x = jax.make_mesh((4,), ("d",)), effectful(kind), np.arange(5.0)

    def call():
        if strategy == "tiled_vmap":
            return tiled_vmap(fn, batch_size=2, mesh=mesh)(x)
        if strategy == "scan inside":
            scan = Scan(lambda c, y: (c, fn(y)), 0.0)
            plan = plan_of(decision("a", 5, Vmap()), decision("t", 3, scan))
            return execute_plan(None, plan, np.ones((5, 3)), axes=[("a", "t")], mesh=mesh)
        if strategy == "bucket outside":
            plan = plan_of(decision("a", 5, Bucket((4,)), 5))
            return execute_plan(lambda x, mask: fn(x), plan, [np.ones(3, np.float32)] * 5, mesh=mesh)
        return execute_plan(fn, plan_of(decision("a", 5, strategy)), x, mesh=mesh)

    with pytest.raises(DispatchRejected, match=r"side effects.*devices of a mesh.*boundar"):
        call()


def test_what_is_printed_for_debugging_is_not_refused_over_a_mesh():
    fn, x, seen = effectful("debug"), np.arange(5.0), []
    mesh = jax.make_mesh((4,), ("d",))

    def shown(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return fn(x)

    plan = plan_of(decision("a", 5, SafeMap(2)))
    for run_over in (lambda: execute_plan(shown, plan, x, mesh=mesh), lambda: tiled_vmap(shown, mesh=mesh)(x)):
        seen.clear()
        np.testing.assert_array_equal(run_over(), 2 * x)
        jax.effects_barrier()
        assert set(seen) == set(x.tolist())
