"""`HostTap` called in any JAX function: what the host sees, in which order, and values and derivatives as they were."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.stages import AxisBoundary, HostSink, HostTap, Tap, execute_plan
from xtrax.tiling import AxisDecision, AxisSpec, BatchPlan, SafeMap, reducers, tiled_vmap


class Rows:
    """A host function that keeps each row with its index, and the size of each call."""

    def __init__(self):
        self.rows = []
        self.calls = []

    def __call__(self, values, index):
        assert index.dtype == np.int64
        self.calls.append(len(index))
        for i, number in enumerate(index.tolist()):
            self.rows.append((tuple(number), jax.tree.map(lambda leaf, i=i: leaf[i].tolist(), values)))

    @property
    def seen(self):
        jax.effects_barrier()
        return self.rows


def tap_into(rows, *, ordered=True):
    return HostTap(rows, ordered=ordered)


BOTH = pytest.mark.parametrize("ordered", [True, False])


@BOTH
@pytest.mark.parametrize("jitted", [True, False])
def test_without_a_map_a_tap_sees_one_row_that_no_axis_numbers(ordered, jitted):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)
    run = jax.jit(lambda x: tap(x) + 1) if jitted else lambda x: tap(x) + 1
    assert float(run(jnp.float32(2))) == 3.0
    assert rows.seen == [((), 2.0)]


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.sampled_from([(3,), (1,), (2, 3), (3, 1), (2, 1, 3)]),
    ordered=st.booleans(),
    jitted=st.booleans(),
    reverse=st.booleans(),
)
def test_a_nest_of_vmaps_is_one_call_in_the_order_of_python_loops(sizes, ordered, jitted, reverse):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)
    xs = np.arange(np.prod(sizes), dtype=np.int32).reshape(sizes)

    def run(x):
        return tap(x) * 2

    for k in range(len(sizes)):
        # Mapped from the last dimension inwards, the loops run over the dimensions the other way round.
        run = jax.vmap(
            run, in_axes=len(sizes) - 1 - (len(sizes) - 1 - k) if reverse else 0, out_axes=k if reverse else 0
        )
    ys = (jax.jit(run) if jitted else run)(xs)
    np.testing.assert_array_equal(ys, xs * 2)
    order = sizes[::-1] if reverse else sizes
    wanted = [(i, int(xs[i[::-1] if reverse else i])) for i in itertools.product(*map(range, order))]
    assert rows.seen == wanted
    assert rows.calls == [xs.size]


@BOTH
def test_a_scan_of_lanes_delivers_step_by_step(ordered):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)

    def of_lane(row):
        return jax.lax.scan(lambda total, x: (total + tap(x), None), 0, row)[0]

    xs = jnp.arange(6).reshape(2, 3)
    assert jax.jit(jax.vmap(of_lane))(xs).tolist() == [3, 12]
    wanted = [((lane,), 3 * lane + step) for step in range(3) for lane in range(2)]
    assert rows.seen == wanted if ordered else sorted(rows.seen) == sorted(wanted)
    assert rows.calls == [2, 2, 2]


@BOTH
def test_loops_and_branches_fire_as_python_would(ordered):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)

    @jax.jit
    def run(x):
        x = jax.lax.fori_loop(0, 3, lambda i, c: tap(c) + i, x)
        x = jax.lax.while_loop(lambda c: c < 9, lambda c: tap(c) + 3, x)
        return jax.lax.cond(x > 0, lambda c: tap(-c), lambda c: c, x)

    assert int(run(jnp.int32(1))) == -10
    values = [1, 1, 2, 4, 7, -10]
    assert (
        [value for _, value in rows.seen] == values
        if ordered
        else sorted(rows.seen) == [((), v) for v in sorted(values)]
    )


def test_without_batched_the_function_takes_one_element_at_a_time():
    seen = []
    tap = HostTap(lambda value, index: seen.append((index, value)), ordered=True, batched=False)
    jax.vmap(lambda x: tap({"a": x, "b": (2 * x,)}))(jnp.arange(3))
    jax.effects_barrier()
    assert seen == [((i,), {"a": i, "b": (2 * i,)}) for i in range(3)]
    assert all(type(number) is int for index, _ in seen for number in index)


@BOTH
def test_where_removes_lanes_on_the_host(ordered):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)
    xs = jnp.arange(6).reshape(2, 3)
    ys = jax.jit(jax.vmap(jax.vmap(lambda x: tap(x, where=x % 2 == 0) + 1)))(xs)
    np.testing.assert_array_equal(ys, xs + 1)
    assert rows.seen == [((i, j), 3 * i + j) for i in range(2) for j in range(3) if (3 * i + j) % 2 == 0]


def test_where_nothing_is_left_the_function_is_not_called():
    rows = Rows()
    tap = tap_into(rows)
    jax.vmap(lambda x: tap(x, where=False))(jnp.arange(3))
    tap(jnp.float32(1), where=np.bool_(False))
    assert rows.seen == []
    assert rows.calls == []


def test_lanes_that_share_a_value_and_differ_in_where_each_get_it():
    rows = Rows()
    tap = tap_into(rows)
    jax.vmap(lambda keep: tap(jnp.float32(7), where=keep))(jnp.array([True, False, True]))
    assert rows.seen == [((0,), 7.0), ((2,), 7.0)]


def test_a_value_that_all_lanes_share_fires_once():
    """Nothing about such a call depends on the lane, so JAX does not map it."""
    rows = Rows()
    tap = tap_into(rows)
    ys = jax.vmap(lambda x: x + tap(jnp.int32(5)))(jnp.arange(3))
    assert ys.tolist() == [5, 6, 7]
    assert rows.seen == [((), 5)]


def test_a_value_of_one_of_two_vmaps_is_numbered_by_that_one():
    rows = Rows()
    tap = tap_into(rows)
    result = jax.vmap(lambda x: jax.vmap(lambda y: tap(x) + y)(jnp.arange(3)))(10 * jnp.arange(2))
    assert result.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert rows.seen == [((0,), 0), ((1,), 10)]
    rows.rows.clear()
    jax.vmap(lambda x: jax.vmap(lambda y: x + tap(y))(jnp.arange(3)))(jnp.arange(2))
    assert rows.seen == [((i,), i) for i in range(3)]


def test_inside_the_function_of_a_plan_it_numbers_the_rows_of_a_chunk_and_at_its_edge_those_of_the_axis():
    rows = Rows()
    tap, xs = tap_into(rows), jnp.array([3.0, 4.0, 5.0])
    plan = BatchPlan((AxisDecision(AxisSpec("r", 3, 2), 2, "by hand", SafeMap(2)),))
    execute_plan(lambda x: tap(x), plan, xs)
    assert rows.seen == [((0,), 3.0), ((1,), 4.0), ((0,), 5.0)]
    rows.rows.clear()
    execute_plan(lambda x: x, plan, xs, boundaries=[AxisBoundary(tap=tap)])
    assert rows.seen == [((0,), 3.0), ((1,), 4.0), ((2,), 5.0)]


def test_a_pytree_with_a_leaf_that_lanes_share():
    rows = Rows()
    tap = tap_into(rows)
    jax.vmap(lambda x: tap({"own": x, "shared": jnp.array([8, 9])}))(jnp.arange(2))
    assert rows.seen == [((i,), {"own": i, "shared": [8, 9]}) for i in range(2)]


def test_keys_small_dtypes_and_empty_leaves():
    kept = []
    tap = HostTap(lambda values, index: kept.append(values), ordered=True)
    keys = jax.random.split(jax.random.key(3), 4)
    value = {
        "key": keys,
        "half": jnp.arange(4, dtype=jnp.bfloat16),
        "flag": jnp.arange(4) % 2 == 0,
        "phase": jnp.exp(1j * jnp.arange(4)).astype(jnp.complex64),
        "empty": jnp.zeros((4, 0, 2), jnp.int8),
    }
    returned = jax.jit(jax.vmap(tap))(value)
    jax.effects_barrier()
    assert returned["key"].dtype == keys.dtype
    for given_leaf, leaf in zip(jax.tree.leaves(value), jax.tree.leaves(returned), strict=True):
        assert leaf.dtype == given_leaf.dtype
    (host,) = kept
    np.testing.assert_array_equal(host.pop("key"), jax.random.key_data(keys))
    for name, leaf in host.items():
        assert isinstance(leaf, np.ndarray)
        assert leaf.dtype == value[name].dtype
        np.testing.assert_array_equal(leaf, value[name])


@pytest.mark.parametrize("value", [None, {}, ()])
def test_a_value_without_arrays_is_an_event(value):
    events = []
    tap = HostTap(lambda values, index: events.append((values, index.shape)), ordered=True)
    assert jax.jit(lambda: tap(value))() == value
    jax.effects_barrier()
    assert events == [(value, (1, 0))]


def test_no_lanes_no_call():
    rows = Rows()
    assert jax.vmap(tap_into(rows))(jnp.zeros((0, 2))).shape == (0, 2)
    assert rows.seen == []
    assert rows.calls == []


@BOTH
def test_the_host_owns_what_it_gets(ordered):
    kept = []

    def keep(values, index):
        values += 1
        index += 1
        kept.append((values, index))

    tap = HostTap(keep, ordered=ordered)
    run = jax.jit(lambda c: jax.lax.fori_loop(0, 4, lambda i, c: tap(c) * 2, c))
    assert run(jnp.arange(1, 3)).tolist() == [16, 32]
    jax.effects_barrier()
    assert sorted(values.tolist() for values, _ in kept) == [[[2**i + 1, 2 ** (i + 1) + 1]] for i in range(4)]


# Derivatives


def cubed(tap):
    return lambda x: tap(x) ** 3


@BOTH
@pytest.mark.parametrize("jitted", [True, False])
def test_a_tap_is_the_identity_for_derivatives_and_fires_once_with_the_primal(ordered, jitted):
    transforms = {
        "grad": (lambda f: jax.grad(f), 12.0),
        "value_and_grad": (lambda f: lambda x: jax.value_and_grad(f)(x)[1], 12.0),
        "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (jnp.float32(1),))[1], 12.0),
        "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](jnp.float32(1)), 12.0),
        "vjp": (lambda f: lambda x: jax.vjp(f, x)[1](jnp.float32(1))[0], 12.0),
        "hessian": (lambda f: jax.hessian(f), 12.0),
        "grad of grad": (lambda f: jax.grad(jax.grad(f)), 12.0),
    }
    for name, (transform, slope) in transforms.items():
        rows = Rows()
        run = transform(cubed(tap_into(rows, ordered=ordered)))
        got = (jax.jit(run) if jitted else run)(jnp.float32(2))
        assert float(got) == slope, name
        assert rows.seen == [((), 2.0)], name


@BOTH
@pytest.mark.parametrize("jitted", [True, False])
def test_a_differentiated_scan_loses_no_effect(ordered, jitted):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)

    def loss(xs):
        return jax.lax.scan(lambda total, x: (total + tap(x) ** 2, None), 0.0, xs)[0]

    xs = jnp.arange(1.0, 4.0)
    for transform, wanted in [(jax.grad, 2 * xs), (jax.jacfwd, 2 * xs), (jax.hessian, 2 * jnp.eye(3))]:
        rows.rows.clear()
        run = transform(loss)
        np.testing.assert_allclose((jax.jit(run) if jitted else run)(xs), wanted)
        assert sorted(rows.seen) == [((), 1.0), ((), 2.0), ((), 3.0)]


@BOTH
@pytest.mark.parametrize("batch_size", [2, 3])
@pytest.mark.parametrize("reduce", [None, reducers.sum])
def test_a_chunked_map_fires_once_for_each_element(ordered, batch_size, reduce):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)
    xs = jnp.arange(5.0)

    def loss(w):
        return tiled_vmap(lambda x: tap(w * x) * x, batch_size=batch_size, reduce=reduce)(xs).sum()

    wanted = [((i % batch_size,), float(i)) for i in range(5)]  # with the number of the lane: its row in the chunk
    for run in (loss, jax.jit(loss), lambda w: jax.value_and_grad(loss)(w)[1], jax.jit(jax.grad(loss))):
        rows.rows.clear()
        assert float(run(1.0)) == 30.0
        assert sorted(rows.seen) == sorted(wanted)
        assert rows.seen == wanted or not ordered


@BOTH
def test_a_batched_jacobian_fires_once_for_each_row(ordered):
    rows = Rows()
    tap = tap_into(rows, ordered=ordered)
    jacobian = jax.jacrev(jax.vmap(cubed(tap)))(jnp.arange(3.0))
    np.testing.assert_allclose(jacobian, np.diag(3 * np.arange(3.0) ** 2))
    assert rows.seen == [((i,), float(i)) for i in range(3)]


def test_a_gradient_for_each_lane():
    rows = Rows()
    tap = tap_into(rows)
    grads = jax.vmap(jax.grad(cubed(tap)))(jnp.arange(3.0))
    np.testing.assert_allclose(grads, 3 * np.arange(3.0) ** 2)
    assert rows.seen == [((i,), float(i)) for i in range(3)]


def test_the_forward_pass_of_a_checkpoint_fires():
    rows = Rows()
    tap = tap_into(rows)
    assert float(jax.checkpoint(cubed(tap))(jnp.float32(2))) == 8.0
    assert rows.seen == [((), 2.0)]


def test_what_jax_refuses_it_refuses_in_its_own_words():
    tap = tap_into(Rows())
    with pytest.raises(NotImplementedError, match="checkpoint"):
        jax.grad(jax.checkpoint(cubed(tap)))(2.0)
    with pytest.raises(NotImplementedError, match="vmap-of-cond"):
        jax.vmap(lambda x: jax.lax.cond(x > 0, tap, lambda x: x, x))(jnp.arange(3.0))


# Bad input


@pytest.mark.parametrize("kind", [HostTap, HostSink])
def test_what_cannot_be_a_host_effect_is_refused(kind):
    name = kind.__name__
    for fn in (None, 3, "print", Rows):
        with pytest.raises(TypeError, match=f"{name}: fn must be a function of \\(values, index\\)"):
            kind(fn)
    for flag in ("ordered", "batched"):
        for value in (1, None, "yes", np.True_):
            with pytest.raises(TypeError, match=f"{name}: {flag} must be True or False; found"):
                kind(print, **{flag: value})


@pytest.mark.parametrize("kind", [HostTap, HostSink])
def test_values_and_masks_of_the_wrong_kind_are_refused(kind):
    effect = kind(lambda values, index: None)
    with pytest.raises(TypeError, match=rf"{kind.__name__}: value\['name'\] must be an array; found str"):
        effect({"name": "batch"})
    with pytest.raises(TypeError, match=f"{kind.__name__}: value must be an array; found str"):
        effect("bool")
    with pytest.raises(
        OverflowError, match=rf"{kind.__name__}: value\['n'\] must be an array; found {2**40}, which is"
    ):
        effect({"n": 2**40})
    found = {
        "int32": (1, jnp.int32(1)), "float32": (1.0,), r"bool\[3\]": (np.zeros(3, bool),), r"bool\[1\]": ([True],),
        r"'a' \(str\)": ("a",), r"'bool' \(str\)": ("bool",), "<class 'bool'>": (bool,), str(2**40): (2**40,),
        r"\{'mask': True\} \(dict\)": ({"mask": True},), "key<fry>": (jax.random.key(0),),
        r"array\('a', .* \(ndarray\)": (np.array("a"),),
    }  # fmt: skip
    for what, wheres in found.items():
        for where in wheres:
            message = f"{kind.__name__}: where must be a bool scalar or None; found {what}"
            with pytest.raises(TypeError, match=message):
                effect(jnp.float32(1), where=where)
    with pytest.raises(TypeError, match="where must be a bool scalar"):
        jax.jit(lambda mask: effect(jnp.float32(1), where=mask))(jnp.zeros(2, bool))


def test_taps_are_told_apart_by_identity_and_say_what_they_are():
    def fn(values, index):
        pass

    tap = HostTap(fn, ordered=True)
    assert tap == tap
    assert tap != HostTap(fn, ordered=True)
    assert hash(tap) == hash(tap)
    assert isinstance(tap, Tap)
    assert tap.batchable
    assert not HostTap(fn).ordered
    assert "ordered=True" in repr(tap)
