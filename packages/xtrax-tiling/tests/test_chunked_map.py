"""Chunked maps against jax.vmap and plain loops."""

import functools
import subprocess
import sys
import textwrap
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import JaxScanIterator, MapIterator, SafeMapIterator, ScanIterator, VmapIterator, safe_map
from xtrax.tiling._map.layout import Chunks

# For a tile of B = 4: nothing, one, B - 1, B, B + 1, a multiple, and primes.
SIZES = [0, 1, 3, 4, 5, 8, 13, 23]


@given(total=st.integers(1, 10_000), limit=st.integers(1, 10_000))
@settings(max_examples=50)
def test_chunks_cover_every_element_and_stay_within_the_limit(total, limit):
    chunks = Chunks.balanced(total, limit)
    assert chunks.size <= limit
    assert chunks.count == -(-total // limit)
    assert 0 <= chunks.overlap <= chunks.count - 1
    starts = [min(i * chunks.size, total - chunks.size) for i in range(chunks.count)]
    covered = {i for start in starts for i in range(start, start + chunks.size)}
    assert covered == set(range(total))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tile", [1, 4, 100])
def test_values_equal_a_plain_loop(size, tile):
    xs = np.arange(size * 3, dtype=np.int32).reshape(size, 3)

    def fn(x):
        return {"square": x * x, "sum": jnp.sum(x)}

    out = SafeMapIterator(tile)(fn, xs)
    assert out["square"].shape == (size, 3)
    assert out["square"].tolist() == [[int(v) ** 2 for v in row] for row in xs]
    assert out["sum"].tolist() == [int(row.sum()) for row in xs]
    assert out["sum"].dtype == jnp.int32


@given(size=st.sampled_from(SIZES), tile=st.sampled_from([1, 2, 4, 7]), axis=st.sampled_from([0, 1, -1]))
@settings(max_examples=20, deadline=None)
def test_pytrees_and_axes_are_those_of_vmap(size, tile, axis):
    shapes = {0: (size, 3), 1: (3, size), -1: (3, size)}
    xs = {
        "moved": np.random.default_rng(size).normal(size=shapes[axis]).astype(np.float32),
        "rows": (np.arange(size, dtype=np.float32), np.full((2,), 3.0, np.float32)),
        "nothing": None,
    }
    in_axes = {"moved": axis, "rows": (0, None), "nothing": None}

    def fn(x):
        first, same = x["rows"]
        return jnp.sin(x["moved"]) * first, (same[0] + first, None)

    expected = jax.vmap(fn, in_axes=(in_axes,))(xs)
    for iterator in (SafeMapIterator(tile), VmapIterator()):
        out = iterator(fn, xs, in_axes)
        assert jax.tree.structure(out) == jax.tree.structure(expected)
        for got, want in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("size", [7, 8])
def test_every_dtype_passes_through_unchanged(dtype, size):
    xs = jnp.arange(size).astype(dtype)
    out = SafeMapIterator(3)(lambda x: (x, x == x), xs)
    assert out[0].dtype == xs.dtype
    assert out[0].tolist() == xs.tolist()
    assert out[1].tolist() == [True] * size


@pytest.mark.parametrize("size", [7, 8])
def test_typed_keys_in_and_out(size):
    keys = jax.random.split(jax.random.key(3), size)

    def fn(key):
        return jax.random.fold_in(key, 5), jax.random.normal(key, (2,))

    new, draws = SafeMapIterator(3)(fn, keys)
    expected, expected_draws = jax.vmap(fn)(keys)
    assert new.dtype == keys.dtype
    assert jax.random.key_data(new).tolist() == jax.random.key_data(expected).tolist()
    np.testing.assert_array_equal(draws, expected_draws)


def test_double_precision():
    with jax.enable_x64(True):
        xs = np.linspace(0, 1, 7)
        out = SafeMapIterator(3)(lambda x: x / 3, xs)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, xs / 3, rtol=1e-15)


def _loss(iterator, weights, xs):
    ys = iterator(lambda x: jnp.tanh(x @ weights), xs)
    return jnp.sum(ys**2 * jnp.arange(1.0, 1 + ys.shape[0])[:, None])


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args)),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
    "hessian": lambda f: jax.hessian(f, 1),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f, 0), 1),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), 1),
    "outer vmap": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x),
    "outer vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), x),
    "grad through scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda c, _: (c + f(w * c, x), None), jnp.float32(1), None, length=2)[0]
    ),
}


@pytest.mark.parametrize("size", [7, 8])  # chunks that overlap, and chunks that come out even
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations_are_those_of_vmap(name, size):
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32)
    xs = jnp.asarray(rng.normal(size=(size, 3)), jnp.float32)
    transform = TRANSFORMS[name]
    got = transform(functools.partial(_loss, SafeMapIterator(4)))(weights, xs)
    want = transform(functools.partial(_loss, VmapIterator()))(weights, xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_each_element_is_differentiated_once_although_chunks_overlap(axis):
    # The derivative of sum(x**3) is 3 x**2, also for the elements that two chunks compute.
    xs = np.arange(1.0, 12.0, dtype=np.float32).reshape((11, 1) if axis == 0 else (1, 11))
    gradient = jax.grad(lambda x: jnp.sum(SafeMapIterator(4)(lambda v: v**3, x, axis)))(xs)
    np.testing.assert_allclose(gradient, 3 * xs**2)


def test_integer_outputs_and_arguments_do_not_hinder_differentiation():
    @jax.jit
    @jax.grad
    def slope(scale, count):
        products, flags = SafeMapIterator(4)(lambda x: (scale * count * x, x > 3), jnp.arange(11))
        return jnp.sum(products) + jnp.sum(flags)

    assert slope(1.5, 2) == 2 * sum(range(11))


def test_a_module_that_holds_arrays_is_a_function_of_one_element():
    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    xs = jnp.ones((11, 3))
    assert SafeMapIterator(4)(layer, xs).shape == (11, 2)
    gradient = eqx.filter_grad(lambda m: jnp.sum(SafeMapIterator(4)(m, xs)))(layer)
    np.testing.assert_allclose(gradient.weight, np.full((2, 3), 11.0), rtol=1e-6)
    np.testing.assert_allclose(gradient.bias, np.full((2,), 11.0), rtol=1e-6)


def test_outer_collectives_see_the_outer_axis():
    def inner(x):
        return SafeMapIterator(4)(lambda v: jax.lax.psum(v, "outer"), x)

    xs = np.arange(22.0).reshape(2, 11)
    out = jax.vmap(inner, axis_name="outer")(xs)
    np.testing.assert_allclose(out, np.stack([xs.sum(0)] * 2))


def _temporaries(mapped, size, gradient=False):
    w1, w2 = jnp.ones((64, 256)), jnp.ones((256, 64))

    def run(xs, w1, w2):
        return mapped(lambda x: jnp.tanh(x @ w1) @ w2, xs)

    slope = jax.grad(lambda *args: jnp.sum(run(*args)), argnums=(0, 1, 2))
    compiled = (
        jax.jit(slope if gradient else run).lower(jax.ShapeDtypeStruct((size, 64), jnp.float32), w1, w2).compile()
    )
    return _temporary_bytes(compiled)


def _temporary_bytes(compiled):
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def test_a_remainder_takes_no_more_memory_than_none():
    ours = _temporaries(SafeMapIterator(256), 16_385)
    peer = _temporaries(functools.partial(jax.lax.map, batch_size=256), 16_385)
    assert ours <= 0.15 * peer
    assert ours <= 1.05 * _temporaries(SafeMapIterator(256), 16_384)
    # An axis that is not the leading one is sliced where it lies, not transposed as a whole.
    moved = jax.jit(lambda x: SafeMapIterator(256)(jnp.sin, x, 1)).lower(jnp.ones((64, 16_384))).compile()
    assert _temporary_bytes(moved) < 0.1 * 64 * 16_384 * 4


def test_the_gradient_of_a_checkpointed_function_takes_less_memory_than_that_of_vmap():
    def checkpointed(fn, xs):
        return SafeMapIterator(256)(jax.checkpoint(fn), xs)

    for size in (16_384, 16_385):
        assert _temporaries(checkpointed, size, gradient=True) < 0.5 * _temporaries(VmapIterator(), size, gradient=True)


def test_each_step_of_the_gradient_works_on_one_chunk():
    # The transpose of slicing a loop-invariant array would add a whole array in each step: quadratic time.
    gradient = jax.grad(lambda x: jnp.sum(SafeMapIterator(8)(lambda v: v * v, x)))
    jaxpr = jax.make_jaxpr(gradient)(jax.ShapeDtypeStruct((1_001,), jnp.float32)).jaxpr
    bodies = [eqn.params["jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "chunked_map"]
    assert len(bodies) == 2  # the values, and the transpose of their derivative
    assert {v.aval.shape for body in bodies for eqn in body.eqns for v in eqn.outvars} == {(8,)}


def test_shards_keep_their_sharding():
    program = """
        import os
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from xtrax.tiling import SafeMapIterator
        x = jnp.arange(14.0 * 4).reshape(14, 4)
        auto = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
        split = jax.shard_map(
            lambda x: SafeMapIterator(3)(lambda v: v * 2, x), mesh=auto, in_specs=P("d"), out_specs=P("d"))
        np.testing.assert_array_equal(jax.jit(split)(x), 2 * x)
        np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: split(x).sum()))(x), np.full((14, 4), 2.0))
        explicit = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(explicit):
            placed = jax.device_put(x, NamedSharding(explicit, P(None, "d")))
            for tile in (4, 7):
                out = jax.jit(lambda x: SafeMapIterator(tile)(lambda v: v * 2, x))(placed)
                assert jax.typeof(out).sharding.spec == P(None, "d"), jax.typeof(out)
                np.testing.assert_array_equal(out, 2 * x)
        print("held")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "held\n", done.stderr


def test_map_iterators_satisfy_the_protocol():
    assert isinstance(SafeMapIterator(1), MapIterator)
    assert isinstance(VmapIterator(), MapIterator)
    assert isinstance(JaxScanIterator(), ScanIterator)


@pytest.mark.parametrize("iterator", [VmapIterator(), SafeMapIterator(2)])
@pytest.mark.parametrize(
    ("xs", "in_axes", "error", "message"),
    [
        ({"a": np.ones(3), "b": np.ones(4)}, 0, ValueError, r"axis 0 of xs\['a'\] has 3 .* xs\['b'\] has 4"),
        (np.ones((3, 2)), 2, ValueError, r"xs has shape \(3, 2\), and so no axis 2"),
        (np.ones((3, 2)), -3, ValueError, r"no axis -3"),
        (np.float32(1), 0, ValueError, r"xs has shape \(\), and so no axis 0"),
        (np.ones(3), None, ValueError, "no array of xs is mapped"),
        ({}, 0, ValueError, "no array of xs is mapped"),
        (np.ones(3), True, TypeError, "must be an int or None, but is True"),
        (np.ones(3), 0.0, TypeError, "must be an int or None, but is 0.0"),
        ({"a": "text"}, 0, TypeError, r"xs\['a'\] is mapped along axis 0, but is no array \(str\)"),
    ],
)
def test_bad_axes_are_refused_by_name(iterator, xs, in_axes, error, message):
    with pytest.raises(error, match=message):
        iterator(lambda x: x, xs, in_axes)


@pytest.mark.parametrize("iterator", [VmapIterator(), SafeMapIterator(2)])
@pytest.mark.parametrize(
    ("xs", "in_axes", "found"),
    [
        (np.ones(3), (0,), r"in_axes is a tuple of 1, where xs is a single leaf"),
        (np.ones(3), (), r"in_axes is a tuple of 0, where xs is a single leaf"),
        ((np.ones(3),), (0, 0), r"in_axes is a tuple of 2, where xs is a tuple of 1"),
        ((np.ones(3), np.ones(3)), [0, 0], r"in_axes is a list of 2, where xs is a tuple of 2"),
        ((np.ones(3), np.ones(3)), (0, (0, None)), r"in_axes\[1\] is a tuple of 2, where xs\[1\] is a single leaf"),
        ({"a": np.ones(3)}, {"b": 0}, r"in_axes is a dict with the keys \['b'\], where xs is .* \['a'\]"),
        ({"a": [np.ones(3)]}, {"a": (0,)}, r"in_axes\['a'\] is a tuple of 1, where xs\['a'\] is a list of 1"),
        ((np.ones(3), None), (0, (0,)), r"in_axes\[1\] is a tuple of 1, where xs\[1\] is None"),
    ],
)
def test_axes_of_another_structure_are_refused_in_plain_words(iterator, xs, in_axes, found):
    with pytest.raises(ValueError, match=rf"in_axes must be an int, None, or .* a prefix of xs, but {found}") as error:
        iterator(lambda x: x, xs, in_axes)
    assert "PyTree" not in str(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    ("tile", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), (None, TypeError)]
)
def test_bad_tiles_are_refused(tile, error):
    with pytest.raises(error, match="tile must be"):
        SafeMapIterator(tile)


def test_a_function_that_is_none_is_refused():
    missing: Any = None
    for run in (VmapIterator(), SafeMapIterator(2), safe_map):
        with pytest.raises(TypeError, match="fn must be callable"):
            run(missing, np.ones(3))


@pytest.mark.parametrize("batch_size", [None, 1, 3, 7, 100])
def test_safe_map_equals_a_loop(batch_size):
    xs = np.arange(7, dtype=np.float32)
    assert safe_map(lambda x: x / 2, xs, batch_size).tolist() == [i / 2 for i in range(7)]


def test_safe_map_refuses_an_empty_axis_and_bad_batch_sizes():
    with pytest.raises(ValueError, match=r"no elements .* SafeMapIterator maps none"):
        safe_map(lambda x: x, np.ones((0, 2)))
    assert SafeMapIterator(2)(lambda x: x, np.ones((0, 2))).shape == (0, 2)
    with pytest.raises(ValueError, match="batch_size must be at least 1, but is 0"):
        safe_map(lambda x: x, np.ones(3), 0)
    with pytest.raises(TypeError, match="batch_size must be an integer"):
        safe_map(lambda x: x, np.ones(3), True)


def test_errors_of_the_function_reach_the_caller():
    def broken(x):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        SafeMapIterator(2)(broken, np.ones(5))
