"""Jacobians in chunks against jax.jacfwd, jax.jacrev and jax.hessian, and against formulas."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from xtrax.tiling import MemoryBudget, tiled_hessian, tiled_jacfwd, tiled_jacrev

PAIRS = {
    "jacfwd": (tiled_jacfwd, jax.jacfwd),
    "jacrev": (tiled_jacrev, jax.jacrev),
    "hessian": (tiled_hessian, jax.hessian),
}
pairs = pytest.mark.parametrize(("tiled", "peer"), PAIRS.values(), ids=PAIRS)
anything: Any = tiled_jacfwd  # What a type checker would refuse is called through it.


def assert_same(got: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=atol)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def layer(params: Any, x: Any, scale: Any = 2.0) -> Any:
    h = jnp.tanh(x @ params["w"] + params["b"]) * params["s"]
    return {"h": h, "loss": (jnp.sum(h**2) * scale, None)}


def inputs() -> Any:
    return {"w": draw(2, 3), "b": draw(3), "s": 1.5, "none": None}, draw(2)


@given(
    pair=st.sampled_from(list(PAIRS.values())),
    argnums=st.sampled_from([0, 1, -1, (0, 1), (1, 0), [1]]),
    batch_size=st.sampled_from([None, 1, 3, 5, 100]),
)
@settings(max_examples=15, deadline=None)
def test_pytrees_and_argnums_are_those_of_jax(pair, argnums, batch_size):
    tiled, peer = pair
    params, x = inputs()
    got = jax.jit(tiled(layer, argnums, batch_size=batch_size))(params, x, scale=3.0)
    argnums = tuple(argnums) if isinstance(argnums, list) else argnums
    assert_same(got, jax.jit(peer(layer, argnums))(params, x, scale=3.0))


def test_values_are_those_of_the_formula():
    x = draw(5)
    outer = np.outer(x, x)
    assert_same(tiled_hessian(lambda x: jnp.prod(x), batch_size=2)(x), np.where(np.eye(5), 0, x.prod() / outer))
    for jacobian in (tiled_jacfwd, tiled_jacrev):
        assert_same(jacobian(lambda x: jnp.cumsum(x**2), batch_size=2)(x), np.tril(np.ones((5, 5), np.float32)) * 2 * x)


@pairs
def test_fn_is_evaluated_once_whatever_the_chunks(tiled, peer):
    calls = []

    def fn(x):
        jax.debug.callback(lambda _: calls.append(1), x[0])
        return jnp.sin(x)

    jax.block_until_ready(jax.jit(tiled(fn, batch_size=1))(draw(6)))
    jax.effects_barrier()
    assert len(calls) == 1


@pairs
def test_aux_is_passed_on(tiled, peer):
    def fn(x):
        return jnp.sin(x), {"n": jnp.arange(3), "head": x[:2]}

    got = tiled(fn, batch_size=2, has_aux=True)(draw(4))
    assert_same(got, peer(fn, has_aux=True)(draw(4)))


def test_dtypes_are_those_of_jax():
    xs = (jnp.ones(2, jnp.bfloat16), jnp.ones(3, jnp.float32))

    def fn(xs):
        return xs[0] * jnp.sum(xs[1]).astype(jnp.bfloat16), xs[1] * 2

    assert_same(tiled_jacrev(fn, batch_size=2)(xs), jax.jacrev(fn)(xs))
    assert_same(tiled_jacfwd(fn, batch_size=2)(xs), jax.jacfwd(fn)(xs))

    def with_integers(xs):
        return fn(xs), jnp.arange(2), jnp.sum(xs[1]) * 1j

    got, want = tiled_jacfwd(with_integers, batch_size=2)(xs), jax.jacfwd(with_integers)(xs)
    assert_same(got[:2], want[:2])
    np.testing.assert_array_equal(got[2][1], want[2][1])  # complex outputs of real inputs
    with jax.enable_x64(True):
        for tiled, peer in PAIRS.values():
            got = tiled(lambda x: x**3, batch_size=2)(np.arange(3.0))
            assert_same(got, peer(lambda x: x**3)(np.arange(3.0)), rtol=1e-14)


@pairs
@pytest.mark.parametrize("batch_size", [None, 2, "auto"])
def test_nothing_in_and_nothing_out(tiled, peer, batch_size):
    empty = np.zeros(0, np.float32)
    for fn, x in (
        (lambda x: jnp.concatenate([x, jnp.ones(2)]), empty),
        (lambda x: x[:0], draw(3)),
        (lambda x: x, empty),
        (lambda x: jnp.ones(2), draw(3)),
    ):
        assert_same(tiled(fn, batch_size=batch_size)(x), peer(fn)(x))


@pytest.mark.parametrize("jacobian", [tiled_jacfwd, tiled_jacrev])
def test_memory_is_that_of_a_chunk(jacobian):
    weights = draw(256, 512), draw(512, 256)

    def temporaries(batch_size):
        def of_network(x, a, b):
            return jacobian(lambda x: jnp.tanh(x @ a) @ b, batch_size=batch_size)(x)

        analysis: Any = jax.jit(of_network).lower(draw(256), *weights).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    result = 256 * 256 * 4
    chunk = 8 * (512 + 256) * 4
    assert temporaries(8) <= 4 * chunk < result
    assert temporaries(None) > temporaries(8)


@pytest.mark.parametrize("jacobian", [tiled_jacfwd, tiled_jacrev, tiled_hessian])
def test_the_jacobian_of_many_leaves_is_held_once(jacobian):
    sizes = [900, 5, 600, 1, 4]  # the large ones are found apart, and the small ones together

    def fn(xs):
        parts = [x * jnp.sum(jnp.concatenate(xs) ** 2) for x in xs]
        return jnp.sum(jnp.concatenate(parts)) if jacobian is tiled_hessian else parts

    def of(xs):
        return jacobian(fn, batch_size=16)(xs)

    xs = [draw(size) for size in sizes]
    every = np.concatenate(xs)
    got = [np.concatenate(row, -1) for row in jax.jit(of)(xs)]
    want = np.dot(every, every) * np.eye(1510) + 2 * np.outer(every, every)
    if jacobian is tiled_hessian:  # of sum(x) * sum(x**2)
        want = 2 * every.sum() * np.eye(1510) + 2 * (every[:, None] + every)
    np.testing.assert_allclose(np.concatenate(got, 0), want, rtol=1e-4, atol=1e-2)
    analysis: Any = jax.jit(of).lower(xs).compile().memory_analysis()
    assert analysis.temp_size_in_bytes <= 0.2 * 1510**2 * 4


TRANSFORMS = {
    "vmap": lambda f: jax.vmap(f),
    "grad": lambda f: jax.grad(lambda xs: jnp.sum(f(xs[0]) ** 3)),
    "grad of checkpoint": lambda f: jax.grad(lambda xs: jnp.sum(jax.checkpoint(f)(xs[0]) ** 3)),
    "jvp": lambda f: lambda xs: jax.jvp(f, (xs[0],), (xs[1],)),
    "jacfwd": lambda f: lambda xs: jax.jacfwd(f)(xs[0]),
    "jacrev": lambda f: lambda xs: jax.jacrev(f)(xs[0]),
    "itself": lambda f: lambda xs: tiled_jacfwd(f, batch_size=2)(xs[0]),
    "scan": lambda f: lambda xs: jax.lax.scan(lambda _, x: (None, f(x)), None, xs)[1],
}


@pairs
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_under_transformations(tiled, peer, transform):
    weights = draw(3, 4)

    def fn(x):
        return jnp.tanh(x @ weights)

    xs = draw(2, 3)
    got = jax.jit(transform(tiled(fn, batch_size=2)))(xs)
    assert_same(got, jax.jit(transform(peer(fn)))(xs), rtol=1e-4)


def test_with_respect_to_what_fn_closes_over():
    x = draw(3)

    def loss(jacobian):
        return lambda w: jnp.sum(jacobian(lambda x: jnp.tanh(x @ w))(x) ** 3)

    for tiled, peer in PAIRS.values():
        got = jax.jit(jax.grad(loss(lambda fn, tiled=tiled: tiled(fn, batch_size=2))))(draw(3, 4))
        assert_same(got, jax.jit(jax.grad(loss(peer)))(draw(3, 4)), rtol=1e-4)


@pairs
def test_on_each_device_of_a_mesh(tiled, peer):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    xs, spec = draw(8, 3), PartitionSpec("x")

    def fn(x):
        return jnp.cumsum(x) * x

    def of_share(share):
        return tiled(fn, batch_size=2)(share[0])[None]

    got = jax.jit(jax.shard_map(of_share, mesh=mesh, in_specs=spec, out_specs=spec))(xs)
    assert_same(got, jax.vmap(peer(fn))(xs))


def test_a_module_is_a_function_and_its_arrays_an_input():
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    x = draw(3)
    assert_same(tiled_jacrev(model, batch_size=1)(x), jax.jacrev(model)(x))
    arrays, rest = eqx.partition(model, eqx.is_array)

    def of_arrays(arrays, x):
        return eqx.combine(arrays, rest)(x)

    assert_same(tiled_jacrev(of_arrays, batch_size=1)(arrays, x), jax.jacrev(of_arrays)(arrays, x))


@pairs
def test_the_size_by_measurement(tiled, peer):
    x = draw(40)

    def fn(x):
        return jnp.sin(x) * jnp.sum(x)

    assert_same(tiled(fn, batch_size="auto", budget=MemoryBudget(2**30, lambda decisions: 0))(x), peer(fn)(x))
    with pytest.raises(ValueError, match=r"inside a trace.*tune outside"):
        jax.jit(tiled(fn, batch_size="auto"))(x)


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: anything(3), TypeError, "fn must be callable"),
    (lambda: anything(jnp.sin, True), TypeError, "argnums .*True"),
    (lambda: anything(jnp.sin, "0"), TypeError, "argnums .*'0'"),
    (lambda: anything(jnp.sin, (0, 1.0)), TypeError, "argnums .*1.0"),
    (lambda: anything(jnp.sin, ()), ValueError, "argnums is empty"),
    (lambda: anything(jnp.sin, (0, -1))(1.0), ValueError, r"argnums is \(0, -1\), which names an argument twice"),
    (lambda: anything(jnp.sin, 1)(1.0), ValueError, "argnums has 1, but .*called with 1 positional"),
    (lambda: anything(jnp.sin, -2)(1.0), ValueError, "argnums has -2"),
    (lambda: anything(jnp.sin, batch_size=0), ValueError, "batch_size must be at least 1, but is 0"),
    (lambda: anything(jnp.sin, batch_size=True), TypeError, "batch_size must be an integer .*True"),
    (lambda: anything(jnp.sin, batch_size="fast"), ValueError, "batch_size must be .*'fast'"),
    (lambda: anything(jnp.sin, batch_size=8, budget=100), ValueError, "budget limits .*batch_size is 8"),
    (lambda: anything(jnp.sin, batch_size="auto", budget=0), ValueError, "budget must be at least 1"),
    (lambda: anything(jnp.sin, has_aux=1), TypeError, "has_aux must be True or False"),
    (lambda: tiled_jacfwd(jnp.sin, has_aux=True)(np.ones(4, np.float32)), TypeError,
     r"^tiled_jacfwd .*has_aux=True.* pair \(output, aux\), but it returned one array, float32\[4\]; return both"),
    (lambda: tiled_jacrev(lambda x: (x, x, x), has_aux=True)(1.0), TypeError, "^tiled_jacrev .*returned a tuple of 3"),
    (lambda: tiled_hessian(lambda x: {"a": x}, has_aux=True)(1.0), TypeError, "^tiled_hessian .*returned a dict;"),
    (lambda: anything(jnp.sin)(1), TypeError, r"tiled_jacfwd takes real floating .*args\[0\] is int32\[\]; convert"),
    (lambda: anything(jnp.sin)(True), TypeError, r"args\[0\] is bool"),
    (lambda: tiled_jacrev(jnp.sum)({"a": np.ones(2, np.complex64)}), TypeError, r"args\[0\]\['a'\] is complex64\[2\]"),
    (lambda: tiled_hessian(lambda x: x)(np.arange(3)), TypeError, r"tiled_hessian .*args\[0\] is int32\[3\]"),
    (lambda: tiled_jacfwd(lambda x: x)({"a": "text"}), TypeError, r"args\[0\]\['a'\] .*no array \(str\)"),
    (lambda: tiled_jacrev(lambda x: {"n": jnp.arange(2), "x": x})(1.0), TypeError, r"output\['n'\] is int32\[2\]"),
    (lambda: tiled_hessian(lambda x: x * 1j)(1.0), TypeError, "tiled_hessian .*output is complex64"),
])  # fmt: skip
def test_bad_input_is_refused_with_its_name(make, error, words):
    with pytest.raises(error, match=words):
        make()
