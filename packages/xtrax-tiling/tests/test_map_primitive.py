"""The primitive under every transformation, each held against the same transformation of jax.vmap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from xtrax.tiling._map.chunked import chunked_vmap, map_chunks
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._same_jaxpr import compiled_once

MODES: dict[str, Any] = {"saved": {}, "remat": {"remat": True}, "smaller backward": {"grad_chunk": 3}}
TURNED: dict[str, Any] = {name: {"out_axes": (1, -1, 0), **mode} for name, mode in MODES.items()}


def chunked(fn, xs, size=4, axis=0, **mode):
    leaves, treedef = jax.tree.flatten(xs)
    chunks = Chunks.balanced(leaves[0].shape[axis], size)
    return chunked_vmap(lambda x: fn(treedef.unflatten(x)), leaves, [axis] * len(leaves), chunks, **mode)


def turned(fn, xs, **mode):
    """Written along other axes, and turned back."""
    a, b, index = chunked(fn, xs, **mode)
    assert (a.shape[1], b.shape[-1]) == (xs.shape[0], xs.shape[0])
    return a.T, b.T, index


def plain(fn, xs, size=4, axis=0, **mode):
    return jax.vmap(fn, in_axes=axis)(xs)


def loss(mapped, w, xs):
    """Of what is closed over, of elements, of an integer result, and of a mapped and a shared intermediate."""

    def fn(x):
        h = jnp.tanh(x @ w)
        return h * jnp.sum(w**2), jnp.sum(h) * x, jnp.argmax(x)

    a, b, index = mapped(fn, xs)
    weights = jnp.arange(1.0, 1 + a.shape[0])[:, None]
    return jnp.sum(jnp.sin(a) ** 2 * weights) + jnp.sum(b * weights * (1 + index[:, None]))


def _scanned(f, w, x):
    return jax.lax.scan(lambda c, _: (c + f(w * jnp.cos(c), x), None), jnp.float32(1), None, length=2)[0]


TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args)),
    "jvp of one argument": lambda f: lambda w, x: jax.jvp(lambda x: f(w, x), (x,), (jnp.cos(x),)),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
    "jvp of grad": lambda f: lambda w, x: jax.jvp(jax.grad(f, (0, 1)), (w, x), (jnp.cos(w), jnp.cos(x))),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f, (0, 1)), (0, 1)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f, (0, 1)), 0),
    "third order": lambda f: jax.grad(
        lambda w, x: jnp.sum(jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x) ** 2))(w) ** 2)
    ),
    "vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x),
    "vmap of elements": lambda f: lambda w, x: jax.vmap(f, (None, 2))(w, jnp.stack([x, 2 * x], 2)),
    "vmap of both": lambda f: lambda w, x: jax.vmap(f, (1, 1))(jnp.stack([w, 2 * w], 1), jnp.stack([x, 2 * x], 1)),
    "vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(f, (0, 1)), (0, None))(jnp.stack([w, 2 * w]), x),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x)), (0, 1)),
    "vmap of vmap": lambda f: (
        lambda w, x: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(jnp.stack([w, 2 * w]), jnp.stack([x, 3 * x]))
    ),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
    "hessian of checkpoint": lambda f: jax.hessian(jax.checkpoint(f), 0),
    "grad of a named policy": lambda f: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable), (0, 1)
    ),
    "scan": lambda f: functools.partial(_scanned, f),
    "grad of scan": lambda f: jax.grad(functools.partial(_scanned, f), (0, 1)),
    "grad of cond": lambda f: jax.grad(lambda w, x: jax.lax.cond(x[0, 0] > 100, lambda: 0.0, lambda: f(w, x)), (0, 1)),
}


# What the other modes change: the transposes, and what maps, nests and repeats them.
TRANSPOSED = [
    "grad", "jvp of grad", "reverse over reverse", "vmap of both", "grad of vmap", "grad of checkpoint", "grad of scan",
]  # fmt: skip
CASES = [(name, mode) for name in TRANSFORMS for mode in MODES if mode == "saved" or name in TRANSPOSED]
TURNED_CASES = [(name, mode) for name in ("jvp of grad", "vmap of both") for mode in MODES] + [
    (name, "saved") for name in ("value", "hessian", "reverse over reverse", "vmap of elements", "vmap of vmap")
]


def assert_as_vmap(name, mapped):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    xs = jnp.asarray(rng.normal(size=(11, 3)), jnp.float32)  # 3 chunks of 4, and 4 of 3: both overlap
    transform = TRANSFORMS[name]
    got = jax.jit(transform(functools.partial(loss, mapped)))(w, xs)
    want = jax.jit(transform(functools.partial(loss, plain)))(w, xs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.max(jnp.abs(b))) if b.size else 0.0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_transformations_are_those_of_vmap(name, mode):
    assert_as_vmap(name, functools.partial(chunked, **MODES[mode]))


@pytest.mark.parametrize(("name", "mode"), TURNED_CASES)
def test_transformations_of_results_along_other_axes_are_those_of_vmap(name, mode):
    assert_as_vmap(name, functools.partial(turned, **TURNED[mode]))


@jax.custom_jvp
def odd_sine(x):
    return jnp.sin(x)


@odd_sine.defjvp
def _(primals, tangents):
    return jnp.sin(primals[0]), 3 * tangents[0]  # not the derivative, so that one sees which rule was used


@jax.custom_vjp
def odd_cosine(x):
    return jnp.cos(x)


odd_cosine.defvjp(lambda x: (jnp.cos(x), x), lambda x, ct: (5 * x * ct,))


@pytest.mark.parametrize("mode", MODES)
def test_custom_rules_inside_are_used(mode):
    xs = jnp.arange(1.0, 12.0)
    assert jax.grad(lambda x: jnp.sum(chunked(odd_sine, x, **MODES[mode])))(xs).tolist() == [3.0] * 11
    got = jax.grad(lambda x: jnp.sum(chunked(odd_cosine, x, **MODES[mode])))(xs)
    np.testing.assert_allclose(got, 5 * xs)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: chunked(odd_cosine, x, **MODES[mode]), (xs,), (xs,))


def _loop(x):
    last, path = jax.lax.scan(lambda c, k: (jnp.sin(c * x) + k, c), x, jnp.arange(3.0))
    return last, jax.lax.cond(x > 0, jnp.sin, jnp.cos, path)


@pytest.mark.parametrize("mode", MODES)
def test_loops_inside_are_differentiated(mode):
    xs = jnp.asarray(np.random.default_rng(1).normal(size=11), jnp.float32)

    def of(mapped):
        return lambda x: sum(jnp.sum(y**2) for y in mapped(_loop, x))

    for transform in (jax.grad, jax.hessian) if mode == "saved" else (jax.grad,):
        got = transform(of(functools.partial(chunked, **MODES[mode])))(xs)
        np.testing.assert_allclose(got, transform(of(plain))(xs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_random_function_is_differentiated_with_its_keys(mode):
    keys = jax.random.split(jax.random.key(3), 11)

    def fn(k):
        return lambda x: jnp.where(jax.random.bernoulli(k), jnp.sin(x), x) * jax.random.normal(k)

    xs = jnp.arange(11.0)
    chunks = Chunks.balanced(11, 4)
    got = jax.grad(
        lambda x: jnp.sum(chunked_vmap(lambda e: fn(e[1])(e[0]), [x, keys], [0, 0], chunks, **MODES[mode]) ** 2)
    )(xs)
    want = jax.grad(lambda x: jnp.sum(jax.vmap(lambda v, k: fn(k)(v))(x, keys) ** 2))(xs)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_keys_that_a_checkpoint_keeps_are_carried(mode):
    keys = jax.random.split(jax.random.key(3), 11)

    @jax.checkpoint
    def fn(x, k):
        return jnp.sin(x) * jax.random.normal(jax.random.fold_in(k, 2))

    def of(mapped):
        return jax.grad(lambda x: jnp.sum(mapped(x)))(jnp.arange(11.0))

    chunks = Chunks.balanced(11, 4)
    got = of(lambda x: chunked_vmap(lambda e: fn(*e), [x, keys], [0, 0], chunks, **MODES[mode]))
    np.testing.assert_allclose(got, of(lambda x: jax.vmap(fn)(x, keys)), rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_the_same_for_all_elements_is_neither_stacked_nor_lost(mode):
    scale = jnp.arange(1.0, 5.0)

    def fn(scale):
        return lambda x: x * jnp.exp(jnp.sin(scale)) + jnp.sum(x)  # exp(sin(scale)) is a residual without elements

    xs = jnp.asarray(np.random.default_rng(0).normal(size=(11, 4)), jnp.float32)
    got = jax.grad(lambda s, x: jnp.sum(chunked(fn(s), x, **MODES[mode]) ** 2), (0, 1))(scale, xs)
    want = jax.grad(lambda s, x: jnp.sum(jax.vmap(fn(s))(x) ** 2), (0, 1))(scale, xs)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_other_dtypes_are_differentiated(dtype, mode):
    xs = jnp.arange(1, 12).astype(dtype)

    def of(mapped):
        return jax.grad(lambda x: jnp.real(jnp.sum(mapped(lambda v: v * v, x))).astype(jnp.float32))(xs)

    got = of(functools.partial(chunked, **MODES[mode]))
    assert got.dtype == xs.dtype
    np.testing.assert_allclose(got.astype(np.complex64), of(plain).astype(np.complex64), rtol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_double_precision_is_kept_in_the_gradient(mode):
    with jax.enable_x64(True):
        xs = np.linspace(0.1, 1, 11)
        got = jax.grad(lambda x: jnp.sum(chunked(jnp.log, x, **MODES[mode])))(xs)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, 1 / xs, rtol=1e-15)


def _root(x):
    def newton(f, start):
        return jax.lax.fori_loop(0, 30, lambda _, y: y - f(y) / (3 * y**2 + 1e-3), start)

    return jax.lax.custom_root(lambda y: y**3 - x, 1.0, newton, lambda g, y: y / g(1.0))


def test_primitives_that_are_made_of_others_are_mapped_and_differentiated():
    """On newer JAX these are primitives that a loop takes in only once they are replaced by what they are made of."""

    def fn(x):
        knots = jnp.arange(5.0)
        return jnp.interp(x, knots, knots**2), _root(1 + x), jnp.searchsorted(knots, x)

    def loss(mapped, xs):
        a, b, index = mapped(fn, xs)
        return jnp.sum(a * b * (1 + index))

    xs = jnp.linspace(0.1, 3.9, 10)
    for transform in (lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.hessian(f))):
        got, want = (transform(functools.partial(loss, mapped))(xs) for mapped in (chunked, plain))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    got, want = (jax.vmap(lambda x, mapped=mapped: mapped(fn, x)[0])(xs[None]) for mapped in (chunked, plain))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("jit", [False, True])
def test_results_of_python_numbers_promote_as_those_of_vmap(jit):
    def products(mapped, xs, scale):
        sign = mapped(lambda x: jnp.where(x > 0, 1.0, -1.0), xs)
        assert sign.weak_type
        return sign * scale, mapped(lambda pair: pair[0] * pair[1], [sign, scale])

    args = jnp.arange(10.0), jnp.ones(10, jnp.bfloat16)
    for mapped in (chunked, functools.partial(chunked, size=3), plain):
        fn = functools.partial(products, mapped)
        assert [y.dtype for y in (jax.jit(fn) if jit else fn)(*args)] == [jnp.bfloat16, jnp.bfloat16]


def test_forward_mode_over_a_python_number():
    xs = jnp.arange(10.0)
    fn = lambda s: jnp.sum(chunked(lambda x: jnp.sin(s * x), xs))  # noqa: E731
    for s in (1.5, jnp.float32(1.5)):
        assert jnp.allclose(jax.jacfwd(fn)(s), jnp.sum(xs * jnp.cos(1.5 * xs)), rtol=1e-5)
        assert jnp.allclose(jax.hessian(fn)(s), -jnp.sum(xs**2 * jnp.sin(1.5 * xs)), rtol=1e-5)


@pytest.fixture
def compiled():
    """Grows with each program that is compiled."""
    found: list[str] = []

    def listen(event, *args, **kwargs):
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_derivatives_without_jit_are_compiled_once(compiled):
    xs, ws = jnp.asarray(np.random.default_rng(0).normal(size=(10, 3)), jnp.float32), jnp.linspace(0.5, 2.0, 3)

    def mapped(w, sign, **mode):  # a function that is made anew and closes over tracers
        return jnp.sum(chunked(lambda x: jnp.tanh(jax.nn.relu(x * w)) * sign, xs, **mode) ** 2)

    def reference(w, sign):
        return jnp.sum((jnp.tanh(jnp.maximum(xs * w, 0)) * sign) ** 2)

    transforms = [
        lambda w, s, **mode: jax.grad(mapped)(w, s, **mode),
        lambda w, s, **mode: jax.jvp(lambda w: mapped(w, s, **mode), (w,), (w,))[1] * jnp.ones(3),
        lambda w, s, **mode: jax.vmap(lambda w: mapped(w, s, **mode))(w[:, None]),
    ]
    plains = [
        jax.grad(reference),
        lambda w, s: jax.jvp(lambda w: reference(w, s), (w,), (w,))[1] * jnp.ones(3),
        lambda w, s: jax.vmap(lambda w: reference(w, s))(w[:, None]),
    ]
    for transform, plain in zip(transforms, plains, strict=True):
        want = plain(ws, 1.0)
        for mode in MODES.values():
            for _ in range(2):
                transform(ws, 1.0, **mode)
            before = len(compiled)
            np.testing.assert_allclose(transform(ws, 1.0, **mode), want, rtol=1e-4)
            assert len(compiled) == before
            # What is alike, but not the same, is told apart.
            np.testing.assert_allclose(transform(ws, 2.0, **mode), 4 * want, rtol=1e-4)
    for zero in (0.0, -0.0):
        zeros = chunked(lambda x, zero=zero: jnp.where(jnp.sum(x) > 1e6, 1.0, zero), xs)
        np.testing.assert_array_equal(np.signbit(zeros), np.signbit(zero))


def test_the_same_values_with_other_derivatives_are_not_the_same(compiled):
    def with_derivative(factor):
        double = jax.custom_jvp(lambda a: 2 * a)
        double.defjvp(lambda primals, tangents: (double(*primals), factor * tangents[0]))
        return double

    for factor in (2.0, 5.0):
        fn = with_derivative(factor)
        np.testing.assert_array_equal(jax.grad(lambda xs, fn=fn: jnp.sum(chunked(fn, xs)))(jnp.ones(10)), factor)
        np.testing.assert_array_equal(jax.grad(lambda x, fn=fn: compiled_once(fn, x))(1.0), factor)
    compiled.clear()
    for _ in range(2):  # of the same program, made anew
        assert float(compiled_once(lambda x, y: x * y + 7, np.float32(2), np.float32(3))) == 13
    assert len(compiled) == 1
    assert float(compiled_once(lambda x, y: x * y + 8, np.float32(2), np.float32(3))) == 14


def test_gradients_without_jit():
    with jax.disable_jit():
        got = jax.grad(lambda x: jnp.sum(chunked(lambda v: v**3, x)))(jnp.arange(1.0, 6.0))
    np.testing.assert_allclose(got, 3 * np.arange(1.0, 6.0) ** 2)


def test_integer_arguments_have_tangents_that_hold_nothing():
    xs = jnp.arange(11)
    y, dot = jax.jvp(lambda x: chunked(lambda v: v + 1, x), (xs,), (np.zeros(11, jax.dtypes.float0),))
    assert y.tolist() == list(range(1, 12))
    assert dot.dtype == jax.dtypes.float0
    grads = jax.grad(lambda x: jnp.sum(chunked(lambda v: 2.0 * v, x)), allow_int=True)(xs)
    assert grads.dtype == jax.dtypes.float0
    inside = chunked(jax.grad(lambda v: 2.0 * v, allow_int=True), xs)
    assert (inside.dtype, inside.shape) == (jax.dtypes.float0, (11,))


def test_the_derivative_along_another_axis_has_the_shape_of_the_argument():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11, 3)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(11, 2, 3)), jnp.float32)
    got = jax.grad(lambda x: jnp.sum(weights * chunked(jnp.sin, x, axis=1)))(xs)
    np.testing.assert_allclose(got, np.cos(xs) * jnp.moveaxis(weights, 0, 1), rtol=1e-5)


@pytest.mark.parametrize("n", [8, 11])
def test_a_callback_fires_for_each_element_once_also_under_jvp(n):
    seen = []

    def batched(xs):
        io_callback(lambda x: seen.extend(x.tolist()), None, jax.lax.stop_gradient(xs[0]))
        return jnp.sin(xs[0])

    xs = jnp.arange(float(n))
    chunks = Chunks.balanced(n, 4)
    y = jax.jit(lambda x: map_chunks(batched, [x], [0], chunks))(xs)
    jax.block_until_ready(y)
    jax.effects_barrier()
    assert sorted(seen) == list(range(n))
    seen.clear()
    y, dot = jax.jit(lambda x: jax.jvp(lambda x: map_chunks(batched, [x], [0], chunks), (x,), (x,)))(xs)
    jax.effects_barrier()
    assert sorted(seen) == list(range(n))
    np.testing.assert_allclose(dot, np.cos(xs) * xs, rtol=1e-6)


def test_ordered_callbacks_keep_their_order():
    seen = []

    def batched(xs):
        io_callback(lambda x: seen.append(float(x[0])), None, xs[0], ordered=True)
        return xs[0]

    jax.block_until_ready(jax.jit(lambda x: map_chunks(batched, [x], [0], Chunks.balanced(12, 3)))(jnp.arange(12.0)))
    jax.effects_barrier()
    assert seen == [0.0, 3.0, 6.0, 9.0]


def test_collectives_over_an_outer_axis_also_in_the_gradient():
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11)), jnp.float32)

    def of(mapped):
        def inner(x):
            return mapped(lambda v: jnp.sin(jax.lax.psum(v, "outer")) * jax.lax.axis_index("outer"), x)

        return jax.value_and_grad(lambda x: jnp.sum(jax.vmap(inner, axis_name="outer")(x) ** 2))(xs)

    for a, b in zip(of(chunked), of(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def _temporaries(fn, *args):
    memory = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.parametrize("n", [16_384, 16_385])
def test_rematerialised_gradients_take_the_memory_of_one_chunk(n):
    w1, w2 = jnp.ones((64, 256)), jnp.ones((256, 64))
    x = jax.ShapeDtypeStruct((n, 64), jnp.float32)

    def gradient(mapped, power):
        def of(x, w1, w2):
            return jnp.sum(mapped(lambda v: jnp.tanh(v @ w1) @ w2, x) ** power)

        return jax.grad(of, (0, 1, 2))

    ours = functools.partial(chunked, size=256, remat=True)
    peer = _temporaries(gradient(plain, 1), x, w1, w2)
    assert _temporaries(gradient(ours, 1), x, w1, w2) <= 0.03 * peer
    smaller = functools.partial(chunked, size=256, grad_chunk=64)
    assert _temporaries(gradient(smaller, 1), x, w1, w2) <= 0.015 * peer
    # A loss that needs the outputs keeps them, and their cotangents; and nothing else but a chunk.
    outputs = 2 * n * 64 * 4
    assert _temporaries(gradient(ours, 2), x, w1, w2) <= outputs + 0.03 * peer
    # Without rematerialisation, the residuals are those of vmap, and weights are not among them once an element.
    saved = functools.partial(chunked, size=256)
    assert _temporaries(gradient(saved, 1), x, w1, w2) <= 1.1 * peer


def test_no_result_is_turned_as_a_whole():
    n, width = 16_385, 64
    x = jax.ShapeDtypeStruct((width, n), jnp.float32)  # elements along axis 1, in the result, in the gradient too
    chunk = 256 * width * 4

    def along(out_axes):
        return functools.partial(chunked, lambda v: jnp.sin(v) * 2, size=256, axis=1, out_axes=out_axes, remat=True)

    assert _temporaries(along(1), x) <= 4 * chunk
    assert _temporaries(lambda x: jax.vjp(along(1), x)[1](x), x) <= 4 * chunk
    # A batch around it is in front of its results, as jax.vmap wants it.
    several = jax.ShapeDtypeStruct((4, width, n // 4), jnp.float32)
    assert _temporaries(jax.vmap(along(0)), several) <= 4 * 4 * chunk
    # The turning is of the chunk; a matrix product before it is none of the transposed operands, which is slower.
    w = jnp.ones((width, width))
    text = jax.jit(lambda x: chunked(lambda v: v @ w, x, size=256, axis=1, out_axes=1)).lower(x).compile().as_text()
    assert text is not None
    assert f"f32[{width},253]{{1,0}} dot(" not in text


def test_forward_mode_takes_the_memory_of_one_chunk():
    w = jnp.ones((64, 256))
    x = jax.ShapeDtypeStruct((16_385, 64), jnp.float32)

    def pushed(mapped):
        return lambda x: jax.jvp(lambda x: mapped(lambda v: jnp.sum(jnp.tanh(v @ w)), x), (x,), (x,))

    assert _temporaries(pushed(functools.partial(chunked, size=256)), x) <= 0.05 * _temporaries(pushed(plain), x)
