"""tiled_apply against the function itself, on the whole batch."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import lowered_memory_estimate, tiled_apply


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def model(w, x):
    return jnp.tanh(x @ w)


def close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(size=st.sampled_from([0, 1, 4, 5, 13]), batch_size=st.sampled_from([1, 4, 100]), jit=st.booleans())
def test_results_are_those_of_the_whole_batch(size, batch_size, jit):
    x, i = data(size, 3), np.arange(size, dtype=np.int32)

    def fn(x, i):
        return {"tanh": jnp.tanh(x), "sum": (x.sum(1), i * i, x > 0), "half": x.astype(jnp.bfloat16)}

    chunked = tiled_apply(fn, batch_size=batch_size)
    close((jax.jit(chunked) if jit else chunked)(x, i), fn(x, i))


@settings(max_examples=10, deadline=None)
@given(in_axis=st.sampled_from([0, 1, -1]), out_axis=st.sampled_from([0, 1, 2, -1]), size=st.sampled_from([5, 8]))
def test_axes_stay_where_the_function_expects_them(in_axis, out_axis, size):
    x = np.moveaxis(data(size, 2, 3), 0, in_axis)
    y = {"y": data(size)}

    def fn(x, y):
        rows = jnp.moveaxis(x, in_axis, 0) * y["y"][:, None, None]
        return jnp.moveaxis(rows, 0, out_axis), rows[:, 0]

    close(jax.jit(tiled_apply(fn, (in_axis, 0), (out_axis, 0), batch_size=3))(x, y), jax.jit(fn)(x, y))


def test_the_function_never_sees_more_than_a_chunk():
    seen = set()

    def fn(x):
        seen.add(x.shape[0])
        return x * 2

    tiled_apply(fn, batch_size=4, check="off")(jnp.ones((10, 3)))
    assert seen == {4}  # 10 = 4 + 4 + 2, of which the last overlaps the one before


def test_unmapped_arguments_keywords_and_static_values():
    w, x, b = data(3, 2), data(7, 3), data(7, 2, seed=1)

    def fn(w, x, activation, *, b):
        return activation(x @ w) + b

    close(tiled_apply(fn, (None, 0, None), batch_size=3)(w, x, jnp.tanh, b=b), fn(w, x, jnp.tanh, b=b))


def test_an_output_that_is_the_same_for_every_batch():
    w, x = data(3, 2), data(7, 3)

    def fn(w, x):
        return {"y": x @ w, "norm": jnp.sum(w**2), "table": jnp.arange(7)}

    chunked = tiled_apply(fn, (None, 0), {"y": 0, "norm": None, "table": None}, batch_size=3)
    close(chunked(w, x), fn(w, x))
    with pytest.raises(ValueError, match=r"out_axes is 0 for out\['table'\].*same for every batch.*give it None"):
        tiled_apply(fn, (None, 0), {"y": 0, "norm": None, "table": 0}, batch_size=3)(w, x)


def test_out_axes_that_do_not_fit_say_which_would():
    x = data(7, 3)
    with pytest.raises(ValueError, match=r"out_axes is 0 for out, whose elements are along axis 1; give it 1"):
        tiled_apply(lambda x: x.T, batch_size=3)(x)
    with pytest.raises(ValueError, match=r"out of a chunk of 3 elements has shape \(2,\)"):
        tiled_apply(lambda x: x[:2, 0], batch_size=3, check="off")(x)
    with pytest.raises(ValueError, match="out_axes must be"):
        tiled_apply(lambda x: x, out_axes=(0, 0), batch_size=3)(x)


def test_gradients_are_those_of_the_whole_batch():
    w, x = data(3, 2), data(11, 3)

    def loss(apply):
        return lambda w, x: jnp.sum(apply(w, x) ** 3)

    chunked = loss(tiled_apply(model, (None, 0), batch_size=4))
    close(jax.jit(jax.grad(chunked, (0, 1)))(w, x), jax.grad(loss(model), (0, 1))(w, x))
    close(jax.jvp(jax.jit(chunked), (w, x), (w, x)), jax.jvp(loss(model), (w, x), (w, x)))
    hessian = jax.jit(jax.hessian(lambda w: chunked(w, x)))(w)
    np.testing.assert_allclose(hessian, jax.hessian(lambda w: loss(model)(w, x))(w), rtol=1e-4, atol=1e-4)


def test_under_an_outer_vmap():
    w, x = data(3, 2), data(5, 9, 3)
    chunked = tiled_apply(model, (None, 0), batch_size=4)
    close(jax.jit(jax.vmap(chunked, (None, 0)))(w, x), model(w, x))


def test_a_module_with_arrays_and_typed_keys():
    class Model(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, keys, x):
            return jax.vmap(self.layer)(x) + jax.vmap(lambda k: jax.random.normal(k, (2,)))(keys)

    module = Model(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    keys, x = jax.random.split(jax.random.key(1), 7), data(7, 3)
    close(tiled_apply(module, batch_size=3)(keys, x), module(keys, x))


def test_arrays_that_the_function_holds_are_no_constants_of_the_loop():
    weights = jnp.arange(64.0 * 64).reshape(64, 64)
    chunked = tiled_apply(lambda x: x @ weights, batch_size=4)
    text = str(jax.make_jaxpr(chunked)(jnp.ones((10, 64))))
    assert "4095" not in text
    assert "f32[64,64]" in text


@pytest.mark.parametrize("size", [1024, 1031])
def test_memory_is_that_of_a_chunk_whatever_the_remainder(size):
    w1, w2 = jnp.ones((16, 256)), jnp.ones((256, 4))

    def fn(x):
        return jnp.tanh(x @ w1) @ w2

    x = jax.ShapeDtypeStruct((size, 16), jnp.float32)
    beyond = (16 + 4) * 4 * size
    whole = lowered_memory_estimate(fn, x) - beyond
    chunked = lowered_memory_estimate(tiled_apply(fn, batch_size=64), x) - beyond
    assert chunked < 0.2 * whole


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda x: x - x.mean(0), ["dependent", "reduce_sum", "test_tiled_apply.py:"]),
        (lambda x: jnp.sort(x, axis=0), ["dependent", "sort"]),
        (lambda x: x / x.shape[0], ["dependent", "constant", "div"]),
        (lambda x: x + np.arange(7.0)[:, None], ["runs on a batch of 7 but not on one of 3"]),
        (lambda x: jax.pure_callback(np.sin, jax.typeof(x), x), ["undecided", "pure_callback"]),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_functions_whose_elements_meet_are_refused(fn, words, jit):
    chunked = tiled_apply(fn, batch_size=3)
    with pytest.raises(ValueError, match="check='off'") as caught:
        (jax.jit(chunked) if jit else chunked)(jnp.asarray(data(7, 3)))
    for word in words:
        assert word in str(caught.value)


def test_a_batch_that_fits_is_checked_too():
    with pytest.raises(ValueError, match="reduce_sum"):
        tiled_apply(lambda x: x - x.mean(0), batch_size=100)(data(7, 3))


def test_off_trusts_the_caller():
    def fn(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = data(7, 3)
    np.testing.assert_allclose(tiled_apply(fn, batch_size=3, check="off")(x), np.sin(x), rtol=1e-6)


class Switched:
    """A model with a mode, as of batch norm."""

    training = False

    def __call__(self, x):
        return x - x.mean(0) if self.training else x * 2


@pytest.mark.parametrize("jit", [False, True])
def test_the_function_that_runs_is_the_one_that_was_checked(jit):
    model, x = Switched(), jnp.asarray(data(7, 3))
    chunked = tiled_apply(model, batch_size=3)

    def call(x):
        # A new function each time, since a jitted one keeps the program of its first trace.
        return jax.jit(lambda x: chunked(x))(x) if jit else chunked(x)

    close(call(x), x * 2)
    model.training = True
    with pytest.raises(ValueError, match="reduce_sum"):
        call(x)
    model.training = False
    close(call(x), x * 2)


@pytest.mark.parametrize("batch_size", [3, 100])
def test_a_result_that_is_one_number_is_refused(batch_size):
    with pytest.raises(ValueError, match="dependent in out by reduce_sum"):
        tiled_apply(lambda x: (x**2).mean(), batch_size=batch_size)(data(7, 3))


@pytest.mark.parametrize(
    ("value", "error"), [(False, TypeError), (np.float32(2), ValueError), (np.ones((2, 3)), ValueError)]
)
def test_a_keyword_that_is_shared_is_to_be_given_by_position(value, error):
    def fn(x, scale=1.0):
        return x * 2

    with pytest.raises(error, match=r"kwargs\['scale'\].*pass it by position, with None in in_axes") as caught:
        tiled_apply(fn, batch_size=3)(data(7, 3), scale=value)
    assert "axis None" not in str(caught.value)
    close(tiled_apply(fn, (0, None), batch_size=3)(data(7, 3), value), data(7, 3) * 2)


def test_each_static_argument_is_checked():
    def fn(x, axis):
        return x - x.mean(axis, keepdims=True)

    chunked = tiled_apply(fn, (0, None), batch_size=3)
    x = data(7, 3)
    close(chunked(x, 1), fn(jnp.asarray(x), 1))
    with pytest.raises(ValueError, match="reduce_sum"):
        chunked(x, 0)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": -2}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
        ({"batch_size": None}, TypeError, "batch_size must be an integer"),
        ({"batch_size": 2, "check": "perturbation"}, ValueError, "check must be 'jaxpr' or 'off'"),
        ({"batch_size": 2, "check": True}, ValueError, "check must be 'jaxpr' or 'off'"),
        ({"batch_size": 2, "in_axes": "0"}, TypeError, "in_axes must be"),
        ({"batch_size": 2, "in_axes": True}, TypeError, "in_axes must be"),
        ({"batch_size": 2, "in_axes": {"x": 0}}, TypeError, "in_axes must be"),
    ],
)
def test_bad_settings_are_refused_at_once(settings, error, words):
    with pytest.raises(error, match=words):
        tiled_apply(lambda x: x, **settings)


def test_what_is_no_function_is_refused():
    array: Any = np.ones(3)
    with pytest.raises(TypeError, match="fn must be callable"):
        tiled_apply(array, batch_size=2)


@pytest.mark.parametrize(
    ("args", "in_axes", "error", "words"),
    [
        ((np.ones((4, 3)), np.ones((5, 3))), 0, ValueError, [r"4 elements along axis 0 of args[0]", "5 along"]),
        ((np.ones((4, 3)),), (0, 0), ValueError, ["in_axes has 2 entries", "1 positional"]),
        ((np.ones((4, 3)),), None, ValueError, ["no input has a batch"]),
        ((np.ones((4, 3)),), (2,), ValueError, ["args[0]", "(4, 3)", "no axis 2"]),
        ((np.ones((4, 3)), 2.0), 0, TypeError, ["args[1]", "float", "None"]),
        (({"a": np.ones((4, 3))},), ({"b": 0},), ValueError, ["in_axes must be"]),
        ((np.ones((4, 3)),), ("0",), TypeError, ["args[0]", "int or None"]),
    ],
)
def test_bad_arguments_are_refused_before_the_function_is_traced(args, in_axes, error, words):
    def fn(*args):
        raise AssertionError("traced")

    with pytest.raises(error) as caught:
        tiled_apply(fn, in_axes, batch_size=2)(*args)
    for word in words:
        assert word in str(caught.value)
