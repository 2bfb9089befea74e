"""tiled_vmap against jax.vmap."""

import contextlib
import functools
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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xtrax.tiling import reducers, safe_map, tiled_vmap

# For chunks of 4: nothing, one, B - 1, B, B + 1, a prime with an overlap.
SIZES = [0, 1, 3, 4, 5, 13]


def mesh_of(count=8):
    return jax.make_mesh((count,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_trees_close(got, want, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@given(
    size=st.sampled_from(SIZES),
    batch_size=st.sampled_from([None, 1, 4, 100]),
    axis=st.sampled_from([0, 1, -1, -2]),
    out=st.sampled_from([0, 1, -1]),
    on_devices=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_arguments_axes_and_pytrees_are_those_of_vmap(size, batch_size, axis, out, on_devices):
    shape = (size, 3) if axis in (0, -2) else (3, size)
    tree = {"moved": random(*shape), "shared": random(2, seed=1), "nothing": None}
    in_axes = ({"moved": axis, "shared": None, "nothing": None}, 0, None)
    out_axes = {"rows": out, "sum": 0, "shared": None}

    def fn(tree, count, scale, *, bias):
        rows = jnp.sin(tree["moved"]) * tree["shared"][0] + bias
        return {"rows": rows * scale, "sum": (jnp.sum(rows), count + 1), "shared": tree["shared"] * 2}

    args = (tree, np.arange(size), 0.5)
    bias = random(size, seed=2)
    want = jax.vmap(fn, in_axes, out_axes)(*args, bias=bias)
    mesh = mesh_of() if on_devices else None
    tiled = tiled_vmap(fn, in_axes, out_axes, batch_size=batch_size, mesh=mesh)
    assert_trees_close(tiled(*args, bias=bias), want)


@given(
    places=st.sampled_from([(0, 1), (1, -1), (-2, 2), (-1, -3)]),
    shared=st.sampled_from([None, (None, None)]),
    options=st.sampled_from([{}, {"remat": True}, {"grad_batch_size": 3}]),
    on_devices=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_out_axes_with_derivatives_and_an_outer_vmap(places, shared, options, on_devices):
    xs, w = jnp.asarray(random(13, 3)), jnp.asarray(random(2, 3, 2))
    out_axes = {"two": places[0], "three": [places[1]], "shared": shared, "keys": -1}

    def fn(x, w):
        h = jnp.tanh(x @ w)
        key = jax.random.fold_in(jax.random.key(0), jnp.int32(10 * x[0]))
        return {"two": h, "three": [h[:, None] * x], "shared": (w**2, jnp.sum(w)), "keys": jax.random.split(key, 2)}

    def outer(mapped):
        def value(x, w):
            ys = mapped(x, w)
            keys = jax.random.key_data(ys.pop("keys"))
            weights = jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size)).reshape(y.shape), ys)
            return sum(jax.tree.leaves(jax.tree.map(lambda y, c: jnp.sum(y**2 * c), ys, weights))), (ys, keys)

        return jax.vmap(jax.value_and_grad(value, (0, 1), has_aux=True), (None, 0))(xs, w)

    tiled = tiled_vmap(fn, (0, None), out_axes, batch_size=4, mesh=mesh_of(3) if on_devices else None, **options)
    assert_trees_close(outer(tiled), outer(jax.vmap(fn, (0, None), out_axes)), rtol=1e-4, atol=1e-5)
    assert_trees_close(tiled(xs, w[0]), jax.vmap(fn, (0, None), out_axes)(xs, w[0]))


def test_a_shared_result_is_computed_once_and_never_stacked():
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    x = jax.ShapeDtypeStruct((4_096,), jnp.float32)
    tiled = tiled_vmap(lambda x, w: (x * 2, jnp.sin(w)), (0, None), (0, None), batch_size=64)
    memory = jax.jit(tiled).lower(x, w).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 512 * 512 * 4
    with pytest.raises(TypeError, match="out_axes must hold ints and None, but has 'last'"):
        tiled_vmap(lambda x: x, out_axes="last", batch_size=2)(np.ones(5))
    with pytest.raises(TypeError, match="out_axes must hold ints and None, but has True"):
        tiled_vmap(lambda x: x, out_axes=True, batch_size=2, mesh=mesh_of(2))(np.ones(5))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "float32", "complex64"])
def test_single_operations_are_bit_equal_in_every_dtype(dtype):
    xs = jnp.arange(13).astype(dtype)
    fn = jnp.logical_not if dtype == "bool" else lambda x: x + x
    got, want = tiled_vmap(fn, batch_size=4)(xs), jax.vmap(fn)(xs)
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def test_double_precision():
    with jax.enable_x64(True):
        out = tiled_vmap(lambda x: x / 3, batch_size=4)(np.linspace(0, 1, 13))
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, np.linspace(0, 1, 13) / 3, rtol=1e-15)


@pytest.mark.parametrize("on_devices", [False, True])
def test_typed_keys_in_and_out(on_devices):
    keys = jax.random.split(jax.random.key(3), 13)
    mesh = mesh_of() if on_devices else None
    got = tiled_vmap(lambda k: jax.random.fold_in(k, 5), batch_size=4, mesh=mesh)(keys)
    assert_trees_close(got, jax.vmap(lambda k: jax.random.fold_in(k, 5))(keys))


def loss(mapped, w, xs):
    ys = mapped(lambda x, w: jnp.tanh(x @ w), (0, None))(xs, w)
    return jnp.sum(ys**2 * jnp.arange(1.0, 1 + ys.shape[0])[:, None])


TRANSFORMS = {
    "jit": jax.jit,
    "grad": lambda f: jax.grad(f, (0, 1)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1))),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, jax.tree.map(jnp.cos, args)),
    "hessian": lambda f: jax.hessian(f, 0),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f), 1),
    "outer vmap of grad": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), x),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "remat": {"remat": True},
    "backward": {"grad_batch_size": 3},
    "backward of one chunk": {"batch_size": None, "grad_batch_size": 3},
}


ON_DEVICES = [
    ("jit of grad", "chunks"),
    ("jit of grad", "backward"),
    ("jvp", "chunks"),
    ("grad of checkpoint", "remat"),
]
CASES = [(name, "chunks", False) for name in TRANSFORMS]
CASES += [("grad", options, False) for options in ("remat", "backward", "backward of one chunk")]
CASES += [(name, options, True) for name, options in ON_DEVICES]


@pytest.mark.parametrize(("name", "options", "on_devices"), CASES)
def test_transformations_are_those_of_vmap(name, options, on_devices):
    w, xs = jnp.asarray(random(3, 2)), jnp.asarray(random(21, 3, seed=1))  # 3 elements for a device
    kwargs = {"batch_size": 2 if on_devices else 4, "mesh": mesh_of() if on_devices else None, **OPTIONS[options]}
    got = TRANSFORMS[name](functools.partial(loss, functools.partial(tiled_vmap, **kwargs)))(w, xs)
    want = TRANSFORMS[name](functools.partial(loss, jax.vmap))(w, xs)
    assert_trees_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_module_is_differentiated_and_trained_in_place():
    xs = jnp.asarray(random(13, 3))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer, batch_size):
        return jnp.sum(tiled_vmap(layer, batch_size=batch_size)(xs) ** 2)

    layer = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    assert_trees_close(gradient(layer, 4), gradient(layer, None))
    assert_trees_close(tiled_vmap(layer, batch_size=4)(xs), jax.vmap(layer)(xs))
    # Another model of the same structure runs the same program, with its own arrays.
    other = eqx.nn.Linear(3, 2, key=jax.random.key(1))
    assert_trees_close(tiled_vmap(other, batch_size=4)(xs), jax.vmap(other)(xs))


def test_eager_calls_are_traced_once_for_each_signature():
    traces = []

    def fn(x, scale, power):
        traces.append(1)
        return x * scale**power

    tiled = tiled_vmap(fn, (0, None, None), batch_size=4)
    xs = jnp.arange(13.0)
    np.testing.assert_allclose(tiled(xs, jnp.float32(2), 2), 4 * xs)
    first = len(traces)
    for scale in (3.0, 4.0):
        np.testing.assert_allclose(tiled(xs + 1, jnp.float32(scale), 2), scale**2 * (xs + 1))
        np.testing.assert_allclose(
            tiled_vmap(fn, (0, None, None), batch_size=4)(xs, jnp.float32(scale), 2), scale**2 * xs
        )
    assert len(traces) == first
    np.testing.assert_allclose(tiled(xs, jnp.float32(2), 3), 8 * xs)  # a Python number is static
    assert len(traces) > first
    second = len(traces)
    np.testing.assert_allclose(tiled_vmap(fn, (0, None, None), batch_size=5)(xs, jnp.float32(2), 3), 8 * xs)
    assert len(traces) > second


def test_reducers_of_the_same_parts_are_the_same_program():
    traces, counts = [], []

    def fn(x):
        traces.append(1)
        return {"a": x, "b": (2 * x, x)}

    for i in range(3):
        parts = {"a": reducers.mean, "b": (reducers.max, reducers.sum)}
        got = tiled_vmap(fn, batch_size=4, reduce=parts)(np.arange(9.0) + i)
        assert_trees_close(got, {"a": np.float32(4 + i), "b": (np.float32(16 + 2 * i), np.float32(36 + 9 * i))})
        counts.append(len(traces))
    assert len(set(counts)) == 1
    other = tiled_vmap(fn, batch_size=4, reduce={"a": reducers.sum, "b": (reducers.max, reducers.sum)})
    assert other(np.arange(9.0))["a"] == 36
    assert reducers.as_reducer((reducers.max,)) != reducers.as_reducer([reducers.max])


def test_arrays_are_no_constants_of_the_program(tmp_path):
    table = jnp.asarray(random(512, 512))
    layer = eqx.nn.Linear(512, 512, key=jax.random.key(0))
    xs = jnp.asarray(random(13, 512))
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        got = [tiled_vmap(fn, batch_size=4)(xs) for fn in (lambda x: jnp.sin(x @ table), layer)]
    finally:
        jax.config.update("jax_dump_ir_to", None)
    np.testing.assert_allclose(got[0], jnp.sin(xs @ table), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1], jax.vmap(layer)(xs), rtol=1e-4, atol=1e-4)
    programs = [text for text in (path.read_text() for path in tmp_path.iterdir()) if "dot_general" in text]
    assert len(programs) >= 2
    assert max(map(len, programs)) < 50_000  # the table alone would be two megabytes


@pytest.mark.parametrize("batch_size", [None, 4])
def test_every_element_has_its_own_key_whatever_the_chunk_and_the_device(batch_size):
    key, xs = jax.random.key(7), jnp.zeros(13)

    def draw(x, *, key):
        return x + jax.random.normal(key)

    want = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(13)]
    for mesh in (None, mesh_of(), mesh_of(3)):
        got = tiled_vmap(draw, batch_size=batch_size, mesh=mesh, key=key)(xs)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    jitted = jax.jit(lambda k: tiled_vmap(draw, batch_size=batch_size, key=k)(xs))
    np.testing.assert_allclose(jitted(key), want, rtol=1e-6)


REDUCE = {
    "mean": lambda y: y.mean(0),
    "sum": lambda y: y.sum(0),
    "max": lambda y: y.max(0),
    "argmax": lambda y: y.argmax(0),
}


@pytest.mark.parametrize(("size", "mesh_size"), [(1, None), (4, None), (13, None), (13, 8), (4, 3)])
@pytest.mark.parametrize("name", REDUCE)
def test_reducers_see_every_element_once(name, size, mesh_size):
    xs = random(size, 3)
    reducer = getattr(reducers, name)
    mesh = None if mesh_size is None else mesh_of(mesh_size)
    tiled = tiled_vmap(lambda x: {"a": x**2, "b": jnp.sum(x)}, batch_size=4, reduce=reducer, mesh=mesh)
    got = tiled(xs)
    want = REDUCE[name](xs.astype(np.float64) ** 2), REDUCE[name](xs.astype(np.float64).sum(1))
    np.testing.assert_allclose(got["a"], want[0], rtol=1e-5)
    np.testing.assert_allclose(got["b"], want[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "on_devices"), [("chunks", False), ("chunks", True), ("remat", False), ("backward", False)]
)
def test_reductions_are_differentiated(options, on_devices):
    xs, w = jnp.asarray(random(13, 3)), jnp.asarray(random(3, seed=1))
    kwargs: dict[str, Any] = {"batch_size": 4, "mesh": mesh_of() if on_devices else None, **OPTIONS[options]}

    def of(w, xs):
        both = {"mean": reducers.mean, "spread": reducers.var}
        fn = tiled_vmap(lambda x: {"mean": jnp.sin(x) * w, "spread": x @ w}, reduce=both, **kwargs)
        out = fn(xs)
        return jnp.sum(out["mean"] ** 2) + out["spread"]

    def want(w, xs):
        return jnp.sum(jnp.mean(jnp.sin(xs) * w, 0) ** 2) + jnp.var(xs @ w)

    assert_trees_close(jax.grad(of, (0, 1))(w, xs), jax.grad(want, (0, 1))(w, xs), rtol=1e-4)
    if options == "chunks" and not on_devices:
        assert_trees_close(jax.hessian(of)(w, xs), jax.hessian(want)(w, xs), rtol=1e-3, atol=1e-5)


def test_a_reduction_takes_neither_the_memory_of_the_outputs_nor_of_a_state_for_each_chunk():
    def fn(x):
        return jnp.sin(x * jnp.arange(512.0))

    x = jax.ShapeDtypeStruct((65_537,), jnp.float32)
    memory = jax.jit(tiled_vmap(fn, batch_size=256, reduce=reducers.mean)).lower(x).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 4 * 256 * 512 * 4


def test_a_reducer_with_too_few_elements_is_refused_and_none_are_the_state_at_the_start():
    assert float(tiled_vmap(lambda x: x, batch_size=4, reduce=reducers.sum)(jnp.zeros(0))) == 0
    with pytest.raises(ValueError, match="needs at least 1 element, but there are 0"):
        tiled_vmap(lambda x: x, batch_size=4, reduce=reducers.max)(jnp.zeros(0))


def test_collectives_need_all_elements_at_once():
    xs = jnp.asarray(random(13))
    fns = (
        lambda x: x - jax.lax.pmean(x, "batch"),
        lambda x: jax.jit(lambda y: jax.lax.cond(y > 0, lambda: y, lambda: jax.lax.psum(y, "batch")))(x),
        lambda x: x * jax.lax.axis_index("batch"),
    )
    for fn in fns[::2]:
        for batch_size in (None, 13, 100):
            got = tiled_vmap(fn, axis_name="batch", batch_size=batch_size)(xs)
            np.testing.assert_allclose(got, jax.vmap(fn, axis_name="batch")(xs), rtol=1e-6)
    for fn in fns:
        with pytest.raises(ValueError, match=r"collective.* axis_name='batch', but sees only 4 of the 13 elements"):
            tiled_vmap(fn, axis_name="batch", batch_size=4)(xs)
    with pytest.raises(ValueError, match="sees only 2 of the 13 elements"):
        tiled_vmap(fns[0], axis_name="batch", mesh=mesh_of())(xs)
    # A name that nothing uses does no harm, and an outer axis is another matter.
    np.testing.assert_allclose(tiled_vmap(jnp.sin, axis_name="batch", batch_size=4)(xs), jnp.sin(xs), rtol=1e-6)
    outer = jax.vmap(
        lambda x: tiled_vmap(lambda v: jax.lax.psum(v, "outer"), axis_name="batch", batch_size=4)(x), axis_name="outer"
    )
    np.testing.assert_allclose(outer(jnp.stack([xs, 2 * xs])), jnp.stack([3 * xs] * 2), rtol=1e-6)


def test_shared_results_are_those_of_vmap_or_refused():
    xs, w = jnp.arange(13.0), jnp.arange(3.0)
    got = tiled_vmap(lambda x, w: (x, w * 2), (0, None), (0, None), batch_size=4)(xs, w)
    assert_trees_close(got, (xs, w * 2))
    with pytest.raises(ValueError, match="out_axes"):
        tiled_vmap(lambda x: x, out_axes=None, batch_size=4)(xs)


def test_explicitly_sharded_axes_that_are_not_mapped_keep_their_sharding():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    x = jnp.asarray(random(13, 4))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))
        tiled = tiled_vmap(lambda v: jnp.sin(v) * 2, batch_size=4, remat=True)
        out = jax.jit(tiled)(placed)
        assert jax.typeof(out).sharding.spec == PartitionSpec(None, "d")
        np.testing.assert_allclose(out, 2 * np.sin(x), rtol=1e-6)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(tiled(x))))(placed)
        np.testing.assert_allclose(gradient, 2 * np.cos(x), rtol=1e-5)


@pytest.mark.parametrize("context", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_both_kinds_with_and_without_a_context(kind, context):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    xs, w = jnp.asarray(random(13, 3)), jnp.asarray(random(3, seed=1))
    want = np.sin(xs) * w
    outer = contextlib.nullcontext() if context is None else jax.set_mesh(jax.make_mesh((8,), ("d",), (context,)))
    with outer:
        options: dict[str, Any] = {"batch_size": 2, "mesh": mesh}
        tiled = tiled_vmap(lambda x: jnp.sin(x) * w, **options)
        np.testing.assert_allclose(tiled(xs), want, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(tiled)(xs[:8]), want[:8], rtol=1e-5)
        gradient = jax.jit(jax.grad(lambda xs: jnp.sum(tiled(xs) ** 2)))(xs)
        np.testing.assert_allclose(gradient, 2 * want * np.cos(xs) * w, rtol=1e-4, atol=1e-5)
        for size in (8, 13):
            total = tiled_vmap(lambda x: jnp.sin(x) * w, reduce=reducers.sum, **options)(xs[:size])
            np.testing.assert_allclose(total, want[:size].sum(0), rtol=1e-5, atol=1e-6)
        # What was made outside the context is not typed as part of it.
        np.testing.assert_allclose(tiled_vmap(jnp.sin, batch_size=4)(xs), np.sin(xs), rtol=1e-6)
        np.testing.assert_allclose(jax.jit(tiled_vmap(jnp.sin, batch_size=4))(xs), np.sin(xs), rtol=1e-6)


@pytest.mark.parametrize("in_context", [False, True])
def test_chunks_of_an_explicitly_sharded_axis_are_refused_without_the_mesh(in_context):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
    xs = random(16, 3)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        placed = jax.device_put(xs, NamedSharding(mesh, PartitionSpec("d")))
        for reduce in (None, reducers.sum):
            tiled = tiled_vmap(jnp.sin, batch_size=4, reduce=reduce)
            for fn in (tiled, jax.jit(tiled)):
                with pytest.raises(ValueError, match=r"axis 0 in chunks of 4, .* over 'd'.* pass the mesh as mesh="):
                    fn(placed)
        np.testing.assert_allclose(tiled_vmap(jnp.sin, batch_size=1, mesh=mesh)(placed), np.sin(xs), rtol=1e-6)
        np.testing.assert_allclose(tiled_vmap(jnp.sin)(placed), np.sin(xs), rtol=1e-6)


def test_elements_are_split_over_one_axis_of_a_mesh():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    xs = jnp.asarray(random(13, 3))
    np.testing.assert_allclose(tiled_vmap(jnp.sin, mesh=mesh, mesh_axis="a", batch_size=2)(xs), np.sin(xs), rtol=1e-6)
    with pytest.raises(ValueError, match=r"axes \('a', 'b'\); say by mesh_axis"):
        tiled_vmap(jnp.sin, mesh=mesh)
    with pytest.raises(ValueError, match="mesh_axis is 'c', but the mesh has"):
        tiled_vmap(jnp.sin, mesh=mesh, mesh_axis="c")


def test_auto_is_measured_once_and_not_inside_a_trace_that_the_function_depends_on():
    xs = jnp.asarray(random(200, 3))
    tiled = tiled_vmap(lambda x: jnp.tanh(x), batch_size="auto")
    np.testing.assert_allclose(tiled(xs), np.tanh(xs), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(lambda x: tiled(2 * x))(xs), np.tanh(2 * xs), rtol=1e-5)
    with pytest.raises(ValueError, match="tune outside"):
        jax.jit(lambda w, x: tiled_vmap(lambda v: v * w, batch_size="auto")(x))(jnp.ones(3), xs)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
        ({"batch_size": -3}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
        ({"batch_size": "all"}, ValueError, "None or \"auto\", but is 'all'"),
        ({"grad_batch_size": 0}, ValueError, "grad_batch_size must be at least 1"),
        ({"grad_batch_size": False}, TypeError, "grad_batch_size must be an integer"),
        ({"remat": 1}, TypeError, "remat must be True or False"),
        ({"budget": 100}, ValueError, "budget limits the sizes"),
        ({"budget": True, "batch_size": "auto"}, TypeError, "budget must be an integer"),
        ({"in_axes": True}, TypeError, "in_axes must be an int, None or a tuple.* write a Python int, such as 0"),
        ({"in_axes": np.int64(0)}, TypeError, r"but is np.int64\(0\).* write a Python int, such as 0"),
        ({"in_axes": {"a": 0}}, TypeError, r"for one argument that is a pytree write \(\{'a': 0\},\)"),
        ({"in_axes": {"x": 0}}, TypeError, r"write \(\{'x': 0\},\)"),
        ({"reduce": "mean"}, TypeError, "must be a Reducer"),
        ({"reduce": reducers.mean, "out_axes": 1}, ValueError, "out_axes is 1, but with reduce"),
        ({"mesh": "d"}, TypeError, "mesh must be a jax.sharding.Mesh"),
        ({"mesh_axis": "d"}, ValueError, "there is no mesh"),
        ({"axis_name": []}, TypeError, "axis_name must be hashable"),
        ({"key": 3}, TypeError, "key must be a PRNG key"),
    ],
)
def test_bad_options_are_refused_when_a_function_is_wrapped(kwargs, error, message):
    with pytest.raises(error, match=message):
        tiled_vmap(lambda x: x, **kwargs)
    with pytest.raises(TypeError, match="fn must be callable"):
        tiled_vmap(3, batch_size=2)  # ty: ignore[invalid-argument-type]


@pytest.mark.parametrize(
    ("in_axes", "args", "kwargs", "error", "message"),
    [
        (
            0,
            (np.ones(3), np.ones(4)),
            {},
            ValueError,
            r"axis 0 of args\[0\] has 3 elements, but axis 0 of args\[1\] has 4",
        ),
        (0, (np.ones(3),), {"b": np.ones(4)}, ValueError, r"kwargs\['b'\] has 4"),
        ((0, 0), (np.ones(3),), {}, ValueError, "in_axes has 2 entries, but 1 arguments"),
        (None, (np.ones(3),), {}, ValueError, "nothing is mapped"),
        (2, (np.ones((3, 2)),), {}, ValueError, r"args\[0\] has shape \(3, 2\), and so no axis 2"),
        (0, (np.float32(1),), {}, ValueError, r"args\[0\] has shape \(\)"),
        ((0, True), (np.ones(3), np.ones(3)), {}, TypeError, r"axis of args\[1\] must be an int or None, but is True"),
        (({"a": 0},), ({"b": np.ones(3)},), {}, ValueError, "a prefix of args"),
        (0, ("text",), {}, TypeError, r"args\[0\] is mapped along axis 0, but is no array \(str\)"),
        (0, (np.ones(3),), {"flag": "text"}, TypeError, r"kwargs\['flag'\] .*; pass it by position, with the axis"),
        (
            0,
            (np.ones(3),),
            {"s": 1.0},
            ValueError,
            r"kwargs\['s'\] has shape \(\).*; pass it by position, with the axis",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(in_axes, args, kwargs, error, message):
    with pytest.raises(error, match=message):
        tiled_vmap(lambda *args, **kwargs: args[0], in_axes, batch_size=2)(*args, **kwargs)


def test_bad_results_and_errors_of_the_function_reach_the_caller():
    with pytest.raises(ValueError, match="out_axes has 2 for result 0, which has 1 dimensions"):
        tiled_vmap(lambda x: x, out_axes=2, batch_size=2)(np.ones(5))
    with pytest.raises(ValueError, match=r"out_axes must be .* a prefix of the output"):
        tiled_vmap(lambda x: x, out_axes=(0, 0), batch_size=2)(np.ones(5))
    with pytest.raises(ValueError, match="given to tiled_vmap and in the call"):
        tiled_vmap(lambda x, key: x, batch_size=2, key=jax.random.key(0))(np.ones(5), key=np.ones(5))

    def broken(x):
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"):
        tiled_vmap(broken, batch_size=2)(np.ones(5))
    assert getattr(tiled_vmap(broken, batch_size=2), "__name__", None) == "broken"


# Side effects.


def watched(seen, sign=1.0):
    """The square of an element, which is put down on the host."""

    def fn(x):
        io_callback(lambda v: seen.append(float(v)), None, lax.stop_gradient(x))
        return sign * x * x

    return fn


MAPPED = {
    "tiled_vmap": lambda fn, x, batch_size: tiled_vmap(fn, batch_size=batch_size)(x),
    "reduce": lambda fn, x, batch_size: tiled_vmap(fn, batch_size=batch_size, reduce=reducers.sum)(x),
    "safe_map": lambda fn, x, batch_size: safe_map(fn, x, batch_size),
    "jit": lambda fn, x, batch_size: jax.jit(tiled_vmap(fn, batch_size=batch_size))(x),
}


@settings(max_examples=12, deadline=None)
@given(
    how=st.sampled_from(sorted(MAPPED)), shape=st.sampled_from([(1, 1), (5, 2), (5, 3), (6, 4), (7, 7), (9, 1), (3, 8)])
)
def test_side_effects_occur_once_for_each_element_of_uneven_chunks(how, shape):
    size, batch_size = shape
    x, seen = np.arange(size, dtype=np.float32), []
    result = MAPPED[how](watched(seen), x, batch_size)
    jax.effects_barrier()
    np.testing.assert_array_equal(result, (x * x).sum() if how == "reduce" else x * x)
    assert sorted(seen) == x.tolist()


def test_results_of_uneven_chunks_with_side_effects_are_those_of_vmap():
    def fn(x):
        jax.debug.callback(lambda v: None, x)
        return {
            "pair": jnp.stack([x, -x]),
            "key": jax.random.key(x.astype(jnp.uint32)),
            "shared": 3.0,
            "n": jnp.int8(x),
        }

    out_axes = {"pair": -1, "key": 0, "shared": None, "n": 0}
    x = jnp.arange(5.0)
    got = tiled_vmap(fn, out_axes=out_axes, batch_size=2)(x)
    want = jax.vmap(fn, out_axes=out_axes)(x)
    got["key"], want["key"] = jax.random.key_data(got["key"]), jax.random.key_data(want["key"])
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
        assert jnp.asarray(got[name]).dtype == jnp.asarray(value).dtype


@pytest.mark.parametrize("reduce", [None, reducers.sum])
@pytest.mark.parametrize("size", [5, 6])
def test_side_effects_of_what_is_differentiated_occur_once_or_are_refused(reduce, size):
    x, seen = np.arange(size, dtype=np.float32), []

    def loss(w, **options):
        return tiled_vmap(lambda x: watched(seen)(w * x), batch_size=2, reduce=reduce, **options)(x).sum()

    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss)), jax.jacfwd(loss)):
        seen.clear()
        np.testing.assert_allclose(transformed(2.0), 4 * (x * x).sum(), rtol=1e-6)
        jax.effects_barrier()
        assert sorted(seen) == (2 * x).tolist()
    seen.clear()
    for transformed in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(ValueError, match=r"fn has side effects.*reverse mode with remat=True"):
            transformed(functools.partial(loss, remat=True))(2.0)
    assert seen == []
