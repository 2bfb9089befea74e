"""Reducers, fed in chunks under masks, against float64 numpy over the elements that count."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from xtrax.tiling import Reducer, reducers, tiled_vmap
from xtrax.tiling._reducers.sums import _chunk_sum, _sum_pairs

UNIT = 2.0**-24  # the unit roundoff of float32
EDGES = (-1e8, -1.0, 0.1, 0.3, 3.0, 1e8)
NAMED = ("sum", "mean", "var", "logsumexp", "max", "min", "argmax", "count")
ALL = (*NAMED, "topk", "histogram")


@functools.cache
def named(name: str) -> Reducer:
    return {"topk": lambda: reducers.topk(3), "histogram": lambda: reducers.histogram(EDGES)}.get(
        name, lambda: getattr(reducers, name)
    )()


@functools.cache
def jitted(reducer: Reducer) -> tuple[Any, Any, Any]:
    return jax.jit(reducer.update), jax.jit(reducer.merge), jax.jit(reducer.finalize)


def element(values: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), values)


def reduced(reducer: Reducer, values: Any, sizes: Any = None, mask: Any = None) -> Any:
    """The result over consecutive chunks of the given sizes, each with its part of the mask."""
    update, _, finalize = jitted(reducer)
    state = reducer.init(element(values))
    total = len(jax.tree.leaves(values)[0])
    start = 0
    for size in [total] if sizes is None else sizes:
        part = slice(start, start + size)
        state = update(state, jax.tree.map(lambda x, part=part: x[part], values), None if mask is None else mask[part])
        start += size
    assert start == total
    return finalize(state)


def floats(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def adverse(kind: str, n: int, seed: int) -> np.ndarray:
    """float32 data `(n, 2)` on which a plain sum, or a mean of squares, loses most of its digits."""
    rng = np.random.default_rng(seed)
    if kind == "offset":
        return (1e8 + 1e3 * rng.normal(size=(n, 2))).astype(np.float32)
    if kind == "cancelling":
        signs = rng.permuted(np.tile((-1.0) ** np.arange(n)[:, None], 2), axis=0)
        return (1e3 * rng.normal(size=(n, 2)) + 1e8 * signs).astype(np.float32)
    if kind == "ties":
        return rng.integers(-2, 3, size=(n, 2)).astype(np.float32)
    return (rng.normal(size=(n, 2)) * 10.0 ** rng.integers(-8, 8, size=(n, 2))).astype(np.float32)


def check_against_numpy(name: str, got: Any, kept: np.ndarray) -> None:
    """Hold a result against float64 numpy over `kept`, `(n, 2)` with n >= 1, within what the method promises."""
    n = len(kept)
    exact = np.array([math.fsum(column) for column in kept.T])
    bound = 2 * UNIT * np.abs(exact) + (n * UNIT) ** 2 * np.abs(kept).sum(0)
    if name == "sum":
        assert np.all(np.abs(got - exact) <= bound)
    elif name == "mean":
        assert np.all(np.abs(got - exact / n) <= bound / n + UNIT * np.abs(exact / n))
    elif name == "var":
        np.testing.assert_allclose(got, kept.var(0), rtol=16 * UNIT)
    elif name == "logsumexp":
        largest = kept.max(0)
        want = largest + np.log(np.exp(kept - largest).sum(0))
        np.testing.assert_allclose(got, want, rtol=8 * UNIT, atol=8 * UNIT)
    elif name == "topk":
        order = np.argsort(-kept, axis=0, kind="stable")[:3]
        filled = len(order)
        np.testing.assert_array_equal(got[1][:filled], order)
        np.testing.assert_array_equal(got[0][:filled], np.take_along_axis(kept, order, 0))
        assert (got[1][filled:] == -1).all()
    elif name == "histogram":
        want = np.stack([np.histogram(column, EDGES)[0] for column in kept.T], axis=1)
        np.testing.assert_array_equal(got, want)
    elif name == "count":
        assert got == n
    else:
        np.testing.assert_array_equal(got, getattr(np, name)(kept, axis=0))


chunkings = st.lists(st.tuples(st.sampled_from([1, 3, 8]), st.booleans()), min_size=1, max_size=6)


@pytest.mark.parametrize("name", ALL)
@given(
    parts=chunkings,
    kind=st.sampled_from(["offset", "cancelling", "ties", "scattered"]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@settings(max_examples=15, deadline=None)
def test_any_chunks_masks_and_merges_give_what_numpy_gives(name, parts, kind, seed, data):
    reducer = named(name)
    update, merge, finalize = jitted(reducer)
    values = adverse(kind, sum(size for size, _ in parts), seed)
    rng = np.random.default_rng(seed + 1)
    kept = np.ones(len(values), bool)
    initial = reducer.init(element(values))
    states, start = [], 0
    for size, masked in parts:
        part = slice(start, start + size)
        if masked:
            kept[part] = rng.random(size) < 0.6
            values[part][~kept[part]] = np.nan  # What is masked must not count, whatever it is.
        states.append((part, masked))
        start += size
    # Each stretch of consecutive chunks is one state, and they are merged in an order drawn.
    merged: list[Any] = []
    state = initial
    for part, masked in states:
        state = update(state, values[part], kept[part] if masked else None)
        if data.draw(st.booleans()):
            merged.append(state)
            state = initial
    merged.append(state)
    while len(merged) > 1:
        at = data.draw(st.integers(0, len(merged) - 2))
        merged[at : at + 2] = [merge(merged[at], merged[at + 1])]
    if kept.any():
        result = jax.tree.map(np.asarray, finalize(merged[0]))
        check_against_numpy(name, result, values[kept].astype(np.float64))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32"])
def test_states_keep_their_types_and_results_have_those_of_jax(name, dtype):
    reducer = named(name)
    values = {"a": jax.ShapeDtypeStruct((4, 2, 3), dtype), "b": (jax.ShapeDtypeStruct((4,), dtype), None)}

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    state = jax.eval_shape(lambda: reducer.init(element(values)))
    for mask in (None, jax.ShapeDtypeStruct((4,), bool)):
        assert types(jax.eval_shape(reducer.update, state, values, mask)) == types(state)
    assert types(jax.eval_shape(reducer.merge, state, state)) == types(state)
    result = jax.eval_shape(reducer.finalize, state)
    if name == "count":
        assert (result.shape, result.dtype) == ((), jnp.int32)
        return
    peers = {"logsumexp": jax.nn.logsumexp, "topk": lambda x, axis: lax.top_k(jnp.moveaxis(x, axis, -1), 3)[1]}
    for got, leaf in ((result["a"], values["a"]), (result["b"][0], values["b"][0])):
        if name == "topk":
            assert [(x.shape, x.dtype) for x in got] == [
                ((3, *leaf.shape[1:]), leaf.dtype), ((3, *leaf.shape[1:]), jnp.int32)
            ]  # fmt: skip
        elif name == "histogram":
            assert (got.shape, got.dtype) == ((len(EDGES) - 1, *leaf.shape[1:]), jnp.int32)
        else:
            peer = peers.get(name) or getattr(jnp, name)
            want = jax.eval_shape(functools.partial(peer, axis=0), leaf)
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert result["b"][1] is None


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32"])
def test_integers_are_exact(dtype):
    rng = np.random.default_rng(0)
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    values = rng.integers(low, high, size=(8, 3), endpoint=True).astype(dtype)
    values[0], values[1] = low, high
    wide = values.astype(np.int64)
    total = reduced(reducers.sum, values, [3, 5])
    np.testing.assert_array_equal(total, wide.sum(0).astype(total.dtype))  # modulo 2**32, as in jnp.sum
    np.testing.assert_array_equal(reduced(reducers.max, values, [3, 5]), values.max(0))
    np.testing.assert_array_equal(reduced(reducers.min, values, [3, 5]), values.min(0))
    np.testing.assert_array_equal(reduced(reducers.argmax, values, [3, 5]), values.argmax(0))
    order = np.argsort(-wide, axis=0, kind="stable")[:3]
    best, where = reduced(named("topk"), values, [3, 5])
    np.testing.assert_array_equal(where, order)
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, 0))
    np.testing.assert_allclose(reduced(reducers.mean, values, [3, 5]), wide.mean(0), rtol=1e-6)
    np.testing.assert_allclose(reduced(reducers.var, values, [3, 5]), wide.var(0), rtol=1e-5)


def test_half_precision_is_accumulated_in_single():
    # In bfloat16 a running sum of ones stops at 256; in float16 the sum of these overflows.
    assert reduced(reducers.sum, jnp.ones(2048, jnp.bfloat16), [1024, 1024]) == 2048
    large = jnp.full(16, 60000, jnp.float16)
    assert reduced(reducers.mean, large, [8, 8]) == 60000
    assert reduced(reducers.var, large, [8, 8]) == 0


def test_rounding_errors_do_not_grow_with_the_number_of_chunks():
    # Of 2**24 + n ones, a plain float32 sum never gets beyond 2**24.
    start = floats([2**24])
    ones = np.ones((512, 8), np.float32)

    @jax.jit
    def total(start, ones):
        state = reducers.sum.update(reducers.sum.init(jax.ShapeDtypeStruct((), jnp.float32)), start, None)
        return reducers.sum.finalize(lax.scan(lambda s, x: (reducers.sum.update(s, x, None), None), state, ones)[0])

    assert total(start, ones) == 2**24 + 4096


@pytest.mark.parametrize("special", [
    (np.inf, 1.0), (1.0, -np.inf), (np.inf, -np.inf), (-np.inf, -np.inf), (np.nan, 1.0), (np.inf, np.nan),
    (3e38, 3e38), (-0.0, 0.0), (1000.0, 1001.0), (-1000.0, -1001.0),
])  # fmt: skip
def test_infinities_and_nan_are_those_of_numpy(special):
    values = floats(special)
    with np.errstate(all="ignore"):
        largest = values.max() if np.isfinite(values.max()) else np.float32(0)
        wide = values.astype(np.float64)
        want = {name: getattr(np, name)(values) for name in ("sum", "mean", "max", "min", "argmax")}
        want["var"] = np.float32(wide.var())
        want["logsumexp"] = largest + np.log(np.sum(np.exp(wide - largest)))
    for name, expected in want.items():
        for sizes in ([2], [1, 1]):
            np.testing.assert_allclose(reduced(named(name), values, sizes), expected, rtol=1e-6, err_msg=name)


def test_the_first_nan_is_the_maximum_and_ties_go_to_the_first():
    values = floats([[1, 5, -np.inf], [np.nan, 2, -np.inf], [7, 5, -np.inf], [np.nan, 5, 0]])
    for sizes in ([4], [1, 3], [3, 1], [1, 1, 1, 1]):
        np.testing.assert_array_equal(reduced(reducers.argmax, values, sizes), [1, 0, 3])
        best, where = reduced(named("topk"), values, sizes)
        np.testing.assert_array_equal(where, [[1, 0, 3], [3, 2, 0], [2, 3, 1]])
        np.testing.assert_array_equal(best, np.take_along_axis(values, np.asarray(where), 0))


def test_topk_orders_by_value_and_not_by_sign_bit():
    values = floats([-0.0, 0.0, -np.inf, -np.nan, -0.0])
    values[3] = np.copysign(np.float32(np.nan), -1)
    _, where = reduced(reducers.topk(5), values, [5])
    assert where.tolist() == [3, 0, 1, 4, 2]


def test_a_mask_hides_elements_and_moves_positions():
    values = floats([9, -np.inf, 4, 9, -np.inf])
    mask = np.array([False, True, True, False, True])
    for sizes in ([5], [1, 4], [3, 2], [2, 2, 1]):
        assert reduced(reducers.argmax, values, sizes, mask) == 1  # of -inf, 4, -inf
        best, where = reduced(reducers.topk(5), values, sizes, mask)
        assert where.tolist() == [1, 0, 2, -1, -1]
        assert best.tolist() == [4] + [-np.inf] * 4
        assert reduced(reducers.count, values, sizes, mask) == 3


def test_all_masked_or_none_at_all():
    values, nothing = np.ones(3, np.float32), np.ones(0, np.float32)
    want = {
        "sum": 0, "mean": np.nan, "var": np.nan, "logsumexp": -np.inf, "max": -np.inf, "min": np.inf, "argmax": -1,
        "count": 0, "topk": (np.full(3, -np.inf), np.full(3, -1)), "histogram": np.zeros(5),
    }  # fmt: skip
    for name, expected in want.items():
        for got in (
            reduced(named(name), values, [3], np.zeros(3, bool)),
            reduced(named(name), nothing, []),
            reduced(named(name), nothing, [0]),
        ):
            jax.tree.map(lambda g, e, name=name: np.testing.assert_array_equal(g, e, err_msg=name), got, expected)


@pytest.mark.parametrize(
    ("name", "fewest"), [("sum", 0), ("mean", 0), ("max", 1), ("min", 1), ("argmax", 1), ("topk", 3)]
)
def test_an_axis_that_numpy_refuses_is_refused(name, fewest):
    reducer = named(name)
    assert reducer.at_least == fewest
    reducer.check_size(fewest)
    if fewest:
        with pytest.raises(ValueError, match=f"axis 'batch' needs at least {fewest} .*there are {fewest - 1}"):
            reducer.check_size(fewest - 1, "axis 'batch'")


@pytest.mark.parametrize("name", ["sum", "mean", "var"])
def test_complex(name):
    rng = np.random.default_rng(0)
    values = (1e4 + rng.normal(size=(8, 2)) + 1j * (rng.normal(size=(8, 2)) - 1e3)).astype(np.complex64)
    got = reduced(named(name), values, [3, 5])
    want = getattr(np, name)(values.astype(np.complex128), axis=0)
    assert got.dtype == (jnp.float32 if name == "var" else jnp.complex64)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_double_precision():
    with jax.enable_x64(True):
        values = 1e15 + np.random.default_rng(0).normal(size=8)
        got = reduced(reducers.var, values, [3, 5])
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, np.var(values - 1e15), rtol=1e-14)
        assert reduced(reducers.argmax, values, [3, 5]).dtype == jnp.int64


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int32", "uint8", "bool"])
def test_histogram_compares_as_in_double_precision(dtype):
    # 0.1 and 0.3 are no float32: the nearest lie above and above, 0.7's below. -1 and 1e300 lie outside some dtypes.
    edges = [-np.inf, -1.5, -1, 0.1, 0.3, 0.7, 1, 7, 200, 1e300]
    if dtype.startswith("float"):
        near = np.array(edges[1:-1], dtype)
        inf = np.array(np.inf, dtype)
        values = np.concatenate([near, np.nextafter(near, inf), np.nextafter(near, -inf), [inf, -inf, np.nan, 0]])
    else:
        values = np.arange(2) if dtype == "bool" else np.arange(-128, 128) if dtype != "uint8" else np.arange(256)
    values = values.astype(dtype)
    for used in (edges, edges[1:-1], edges[2:4], [5.0, 5.0, 6.5], [-3e9, 3e9], [1e10, 1e11], [-9.0, -8.5]):
        want = np.histogram(values[values == values].astype(np.float64), used)[0]
        got = reduced(reducers.histogram(used), values)
        np.testing.assert_array_equal(got, want, err_msg=str(used))


def _scanned(reducer: Reducer, values: jax.Array, size: int) -> Any:
    chunks = values.reshape(-1, size, *values.shape[1:])
    state = reducer.init(element(values))
    return reducer.finalize(lax.scan(lambda s, x: (reducer.update(s, x, None), None), state, chunks)[0])


@pytest.mark.parametrize("name", ["sum", "mean", "var", "logsumexp"])
def test_derivatives(name):
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=(6, 2)).astype(np.float32), floats([1, -2])
    direct = {"logsumexp": jax.nn.logsumexp}.get(name) or getattr(jnp, name)

    def peer(x):
        return jnp.sum(jnp.sin(direct(x, axis=0)) * weights)

    def streamed(x):
        return jnp.sum(jnp.sin(_scanned(named(name), x, 2)) * weights)

    gradient = jax.jit(jax.grad(jax.checkpoint(streamed) if name == "logsumexp" else streamed))(values)
    np.testing.assert_allclose(gradient, jax.grad(peer)(values), rtol=1e-4, atol=1e-6)
    dots = (values,), (np.cos(values),)
    np.testing.assert_allclose(
        jax.jit(lambda *dots: jax.jvp(streamed, *dots))(*dots), jax.jvp(peer, *dots), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        jax.jit(jax.hessian(streamed))(values), jax.hessian(peer)(values), rtol=1e-3, atol=1e-5
    )  # fmt: skip


def test_masked_elements_have_no_derivative():
    mask = np.array([True, False, True])

    def streamed(x):
        state = reducers.logsumexp.init(element(x))
        return reducers.logsumexp.finalize(reducers.logsumexp.update(state, x, mask))

    gradient = jax.grad(streamed)(floats([1.0, np.nan, 2.0]))
    np.testing.assert_allclose(gradient, [1 / (1 + np.e), 0, np.e / (1 + np.e)], rtol=1e-6)


@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_share_the_derivative_equally_however_they_are_chunked(name):
    direct = getattr(jnp, name)
    inf, nan = np.inf, np.nan
    rows = floats([[1, 1, 0, 1] * 3, [-inf] * 12, [inf] * 12, [2, nan, 3, 3] * 3, [0.0, -0.0, 0, 0] * 3]).T
    for batch_size in (1, 3, 5, 12):  # chunks of 5 overlap
        run = tiled_vmap(lambda row: row, batch_size=batch_size, reduce=named(name))
        want = jax.grad(lambda x: direct(x, axis=0).sum())(rows)
        np.testing.assert_allclose(jax.grad(lambda x, run=run: run(x).sum())(rows), want, rtol=1e-6)
        dots = (rows,), (np.arange(60, dtype=np.float32).reshape(12, 5),)
        got = jax.jvp(run, *dots)
        np.testing.assert_allclose(got, jax.jvp(lambda x: direct(x, axis=0), *dots), rtol=1e-6)
    many = np.ones(70_000, np.float16)  # more than float16 can count
    gradient = jax.grad(tiled_vmap(lambda x: x, batch_size=7_000, reduce=named(name)))(many)
    np.testing.assert_allclose(gradient.astype(np.float32), np.full(70_000, 1 / 70_000, np.float32), rtol=1e-2)


def test_ties_are_not_shared_with_what_is_masked():
    mask = np.array([False, True, True, False, False, False])

    def streamed(x):
        state = reducers.max.init(element(x))
        for part in (slice(0, 3), slice(3, 6)):
            state = reducers.max.update(state, x[part], mask[part])
        return reducers.max.finalize(state)

    for value in (1.0, -np.inf):
        np.testing.assert_array_equal(jax.grad(streamed)(floats([value] * 6)), [0, 0.5, 0.5, 0, 0, 0])


@pytest.mark.parametrize("size", [1, 2, 6])
def test_a_variance_past_the_dtype_is_infinite(size):
    big = floats([1e30, 2e30, -1e30, 3e30, 5e30, 0])
    greatest = np.float32(3.4e38)
    columns = [big, 1e30 + big, [greatest, -greatest] * 3, [1e25, 1, 2, 3, 4, 5], [1, np.inf, 2, 3, 4, 5]]
    rows = floats(columns).T
    got = reduced(reducers.var, rows, [size] * (6 // size))
    np.testing.assert_array_equal(got, [np.inf] * 4 + [np.nan])
    np.testing.assert_array_equal(reduced(reducers.var, 1e30 * np.ones((6, 1), np.float32), [size] * (6 // size)), [0])
    gradient = jax.grad(lambda x: _scanned(reducers.var, x, size))(big)
    np.testing.assert_allclose(gradient, (big - big.mean()) / 3, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "values", [[1, np.inf, 2, 200, -np.inf, 3], [-np.inf] * 6, [1, -np.inf, -np.inf, 2, 3, 4]], ids=str
)
def test_an_infinite_value_leaves_the_derivative_of_others(values, size):
    gradient = jax.grad(lambda x: _scanned(reducers.logsumexp, x, size))(floats(values))
    weights = np.exp(floats(values) - max(x for x in values if x < np.inf)) if max(values) > -np.inf else None
    if np.inf in values:
        want = np.where(floats(values) == np.inf, np.nan, 0)
    else:
        want = np.full(6, np.nan) if weights is None else weights / weights.sum()
    np.testing.assert_allclose(gradient, want, rtol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_under_vmap(name):
    values = adverse("ties", 12, 5).reshape(2, 6, 2)
    got = jax.jit(jax.vmap(lambda x: _scanned(named(name), x, 3)))(values)
    for lane in range(2):
        result = jax.tree.map(lambda x, lane=lane: np.asarray(x[lane]), got)
        check_against_numpy(name, result, values[lane].astype(np.float64))


@pytest.mark.parametrize("name", ["mean", "var", "logsumexp", "argmax", "topk"])
def test_states_of_devices_merge(name):
    values = adverse("ties", 24, 2)
    reducer = named(name)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

    def state_of_share(share):
        initial = jax.tree.map(lambda x: lax.pcast(x, ("x",), to="varying"), reducer.init(element(share)))
        chunks = share.reshape(2, 3, 2)
        state, _ = lax.scan(lambda s, x: (reducer.update(s, x, None), None), initial, chunks)
        return jax.tree.map(lambda x: x[None], state)

    spec = PartitionSpec("x")
    states = jax.jit(jax.shard_map(state_of_share, mesh=mesh, in_specs=spec, out_specs=spec))(values)
    merged = functools.reduce(jitted(reducer)[1], [jax.tree.map(lambda x, i=i: x[i], states) for i in range(4)])
    check_against_numpy(name, jax.tree.map(np.asarray, reducer.finalize(merged)), values.astype(np.float64))


@pytest.mark.parametrize("name", ALL)
def test_a_state_survives_as_its_arrays(name):
    reducer = named(name)
    values = {"a": adverse("ties", 3, 0), "b": adverse("offset", 3, 0)}
    update, _, finalize = jitted(reducer)
    state = update(reducer.init(element(values)), values, None)
    stored = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    treedef = jax.tree.structure(jax.eval_shape(lambda: reducer.init(element(values))))
    again = finalize(update(jax.tree.unflatten(treedef, stored), values, None))
    jax.tree.map(np.testing.assert_array_equal, again, finalize(update(state, values, None)))


def test_both_ways_to_sum_a_chunk_carry_the_errors():
    values = adverse("cancelling", 1000, 3)
    exact = [math.fsum(column) for column in values.T.astype(np.float64)]
    naive = np.abs(np.cumsum(values, axis=0)[-1] - exact)
    for sum_chunk in (_chunk_sum, _sum_pairs):
        total, error = (np.asarray(x, np.float64) for x in jax.jit(sum_chunk)(values))
        assert (np.abs(total + error - exact) <= 1e-7 * np.abs(exact)).all()
    assert (naive > 1e-4 * np.abs(exact)).any()


def test_a_pytree_of_reducers_is_a_prefix_of_the_output():
    values = {
        "loss": adverse("ties", 4, 0),
        "parts": (np.arange(4, dtype=np.int32), adverse("offset", 4, 1)),
        "none": None,
    }
    tree = {"loss": reducers.mean, "parts": reducers.max, "none": None}
    got = reduced(reducers.as_reducer(tree), values, [1, 3])
    np.testing.assert_allclose(got["loss"], values["loss"].mean(0), rtol=1e-6)
    assert got["parts"][0] == 3
    np.testing.assert_array_equal(got["parts"][1], values["parts"][1].max(0))
    assert reducers.as_reducer(tree).at_least == 1
    assert reducers.as_reducer(reducers.var) is reducers.var


def test_a_reducer_of_ones_own():
    product = Reducer(
        init=lambda element: jnp.ones(element.shape, element.dtype),
        update=lambda s, x, mask: s * jnp.prod(x if mask is None else jnp.where(mask, x, 1)),
        merge=lambda a, b: a * b,
        finalize=lambda s: s,
    )
    values = floats([2, 3, 5, 7])
    assert reduced(reducers.as_reducer([product]), [values], [1, 3]) == [210]


def test_equal_parameters_make_equal_reducers():
    assert reducers.topk(2) == reducers.topk(2) != reducers.topk(3)
    assert reducers.histogram([0, 1]) == reducers.histogram(np.array([0.0, 1.0]))


SCALAR = jax.ShapeDtypeStruct((), np.float32)

anything: Any = reducers  # What a type checker would refuse is called through it.


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: anything.topk(0), ValueError, "k must be at least 1, but is 0"),
    (lambda: anything.topk(True), TypeError, "k must be an integer .*True"),
    (lambda: anything.topk(2.0), TypeError, "k must be an integer .*2.0"),
    (lambda: anything.histogram([1]), ValueError, r"at least two numbers .*\(1,\)"),
    (lambda: anything.histogram([[0, 1]]), ValueError, r"one dimension.*\(1, 2\)"),
    (lambda: anything.histogram([0, [1]]), TypeError, "sequence of"),
    (lambda: anything.histogram([0, np.nan]), ValueError, r"edges\[1\] is NaN"),
    (lambda: anything.histogram([0, 2, 1]), ValueError, r"edges\[2\] = 1.0 follows edges\[1\] = 2.0; sort"),
    (lambda: anything.histogram("01"), TypeError, "real numbers.*'01'"),
    (lambda: anything.histogram([False, True]), TypeError, "real numbers"),
    (lambda: anything.histogram([1j, 2]), TypeError, "real numbers"),
    (lambda: jax.jit(lambda e: anything.histogram(e).init(SCALAR))(np.arange(3.0)), TypeError, "edges .*traced"),
    (lambda: anything.as_reducer({}), ValueError, "reduce is {}, which has no Reducer"),
    (lambda: anything.as_reducer({"a": np.mean}), TypeError, r"reduce\['a'\] must be a Reducer"),
    (lambda: anything.as_reducer({"a": reducers.sum}).init({"b": SCALAR}), ValueError, "prefix of the output"),
    (lambda: anything.as_reducer([reducers.sum]).init(SCALAR), ValueError, "prefix of the output"),
    (lambda: anything.mean.init({"a": [SCALAR, "x"]}), TypeError, r"output\['a'\]\[1\] must be an array .*mean.*str"),
    (lambda: anything.mean.init(None), ValueError, "None, which has no arrays for the reducer mean"),
    (lambda: anything.count.init(()), ValueError, "no arrays to count"),
    (lambda: anything.max.init(jax.ShapeDtypeStruct((), np.complex64)), TypeError, "max takes real .*complex64"),
    (lambda: anything.sum.init(jax.eval_shape(lambda: jax.random.key(0))), TypeError, "numbers and bools.*key"),
    (lambda: anything.Reducer(1, max, max, max), TypeError, r"init must be callable as init\(element\)"),
    (lambda: anything.Reducer(max, max, max, max, -1), ValueError, "at_least must be at least 0"),
    (lambda: anything.Reducer(max, max, max, max, True), TypeError, "at_least must be an integer"),
])  # fmt: skip
def test_bad_input_is_refused_with_its_name(make, error, words):
    with pytest.raises(error, match=words):
        make()
