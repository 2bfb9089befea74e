"""A boundary whose fuse is a Reducer: the reduction of all outputs, without the stack of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.stages import AxisBoundary, HostSink, HostTap, execute_map_axis, execute_scan_axis, validate_plan_topology
from xtrax.tiling import DedupSpec, SafeMap, Vmap, reducers
from xtrax.tiling.plan import AxisSpec, BatchPlanner

REFERENCES = {
    "mean": lambda y: np.mean(y, axis=0),
    "sum": lambda y: np.sum(y, axis=0),
    "max": lambda y: np.max(y, axis=0),
    "min": lambda y: np.min(y, axis=0),
    "var": lambda y: np.var(y, axis=0),
    "count": lambda y: len(y),
    "argmax": lambda y: np.argmax(y, axis=0),
}


def outputs(x):
    return jnp.stack([jnp.sin(3 * x), x * x])


def dedup(labels):
    distinct = sorted(set(labels), key=labels.index)
    return DedupSpec(
        "batch",
        unique_indices=np.array([labels.index(label) for label in distinct]),
        index_map=np.array([distinct.index(label) for label in labels]),
        k=len(distinct),
    ).to_dedup_gather()


def values(n):
    return jnp.asarray(np.random.default_rng(n).permutation(n) - n / 3, jnp.float32)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(REFERENCES)),
    n=st.sampled_from([1, 7, 8]),
    size=st.sampled_from([None, 1, 3, 4, 9]),
    effect=st.sampled_from([None, "tap", "sink"]),
)
def test_a_mapped_axis_is_reduced(name, n, size, effect):
    seen = []
    host = {"tap": HostTap, "sink": HostSink}.get(effect)
    boundary = AxisBoundary(
        fuse=getattr(reducers, name),
        **({} if host is None else {effect: host(lambda v, i: seen.extend(i[:, 0].tolist()), ordered=True)}),
    )
    run = jax.jit(lambda xs: execute_map_axis(outputs, xs, Vmap() if size is None else SafeMap(size), boundary))
    got = run(values(n))
    jax.effects_barrier()
    wanted = REFERENCES[name](np.asarray(jax.vmap(outputs)(values(n)), np.float64))
    np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
    assert seen == (list(range(n)) if effect else [])


@settings(max_examples=10, deadline=None)
@given(name=st.sampled_from(sorted(REFERENCES)), n=st.sampled_from([1, 7]))
def test_a_scanned_axis_is_reduced_as_it_goes(name, n):
    boundary = AxisBoundary(fuse=getattr(reducers, name))
    carry, got = jax.jit(
        lambda xs: execute_scan_axis(lambda c, x: (c + x, outputs(c + x)), jnp.float32(0), xs, boundary)
    )(values(n))
    sums = np.cumsum(np.asarray(values(n)))
    stack = np.asarray(jax.vmap(outputs)(jnp.asarray(sums)), np.float64)
    np.testing.assert_allclose(carry, sums[-1], rtol=1e-6)
    np.testing.assert_allclose(got, REFERENCES[name](stack), rtol=2e-5, atol=2e-5)


@settings(max_examples=10, deadline=None)
@given(
    labels=st.sampled_from([[2], [3, 1, 3, 3, 1], [5, 5, 7, 5, 9]]),
    name=st.sampled_from(sorted(REFERENCES)),
    tapped=st.booleans(),
)
def test_a_deduplicated_axis_is_reduced_over_every_original_position(labels, name, tapped):
    tap = HostTap(lambda values, index: None, ordered=True) if tapped else None
    boundary = AxisBoundary(fuse=getattr(reducers, name), tap=tap)
    xs = jnp.asarray(labels, jnp.float32)
    got = execute_map_axis(outputs, xs, dedup(labels), boundary)
    wanted = REFERENCES[name](np.asarray(jax.vmap(outputs)(xs), np.float64))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_more_positions_than_are_gathered_at_once():
    labels = (np.arange(2500) % 7).tolist()
    got = execute_map_axis(outputs, jnp.asarray(labels, jnp.float32), dedup(labels), AxisBoundary(fuse=reducers.sum))
    wanted = np.asarray(jax.vmap(outputs)(jnp.asarray(labels, jnp.float32)), np.float64).sum(axis=0)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(2), SafeMap(1)])
def test_a_pytree_of_reducers_is_matched_with_the_output(strategy):
    boundary = AxisBoundary(fuse={"loss": reducers.mean, "length": reducers.max})
    hash(boundary.fuse)

    def fn(x):
        return {"loss": x * x, "length": x.astype(jnp.int32)}

    got = jax.jit(lambda xs, b: execute_map_axis(fn, xs, strategy, b))(jnp.arange(5.0), boundary)
    assert (float(got["loss"]), int(got["length"])) == (6.0, 4)


def test_the_order_of_the_elements_is_kept():
    """The last element seen, which a reduction that took chunks out of order would get wrong."""
    last = reducers.Reducer(
        init=lambda element: jnp.zeros(element.shape, element.dtype),
        update=lambda state, values, mask: values[-1],
        merge=lambda a, b: b,
        finalize=lambda state: state,
    )
    for strategy in (Vmap(), SafeMap(1), SafeMap(3), SafeMap(5)):
        assert int(execute_map_axis(lambda x: 2 * x, jnp.arange(5), strategy, AxisBoundary(fuse=last))) == 8


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(2), SafeMap(3), SafeMap(1)])
def test_a_streamed_mean_is_differentiated(strategy):
    boundary = AxisBoundary(fuse=reducers.mean)
    xs = jnp.arange(6.0)

    def loss(xs):
        return execute_map_axis(lambda x: x**3, xs, strategy, boundary)

    np.testing.assert_allclose(jax.grad(loss)(xs), 3 * xs**2 / 6, rtol=1e-6)
    np.testing.assert_allclose(jax.jacfwd(loss)(xs), 3 * xs**2 / 6, rtol=1e-6)


def test_the_stack_never_exists():
    n, width = 4096, 128

    def temporaries(fuse, size):
        boundary = AxisBoundary(fuse=fuse)
        run = jax.jit(
            lambda xs: execute_map_axis(lambda x: jnp.sin(jnp.arange(width) + x), xs, SafeMap(size), boundary)
        )
        return run.lower(jnp.zeros((n,))).compile().memory_analysis().temp_size_in_bytes

    stacked = n * width * 4
    assert temporaries(lambda ys: jnp.mean(ys, axis=0), 64) >= stacked
    assert temporaries(reducers.mean, 64) <= stacked / 16
    assert temporaries(reducers.mean, 63) <= stacked / 16  # a remainder


def test_a_scan_with_a_streamed_fuse_never_stacks():
    n, width = 4096, 128

    def temporaries(fuse):
        boundary = AxisBoundary(fuse=fuse)

        def run(xs):
            return execute_scan_axis(lambda c, x: (c + x, jnp.sin(jnp.arange(width) + x)), 0.0, xs, boundary)

        return jax.jit(run).lower(jnp.zeros((n,))).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(lambda ys: jnp.mean(ys, axis=0)) >= n * width * 4
    assert temporaries(reducers.mean) <= n * width * 4 / 16


def test_an_axis_without_elements():
    empty = jnp.zeros((0,))
    for strategy in (Vmap(), SafeMap(1), SafeMap(2)):
        assert execute_map_axis(outputs, empty, strategy, AxisBoundary(fuse=reducers.sum)).tolist() == [0.0, 0.0]
        with pytest.raises(ValueError, match="needs at least 1 element, but there are 0"):
            execute_map_axis(outputs, empty, strategy, AxisBoundary(fuse=reducers.max))


@pytest.mark.parametrize("fuse", [{"a": reducers.mean, "b": 3}, [reducers.mean, None, "x"], {}, ()])
def test_what_is_not_made_of_reducers_is_refused(fuse):
    with pytest.raises(TypeError, match="AxisBoundary: fuse must be a callable of one argument"):
        AxisBoundary(fuse=fuse)


def test_a_reducer_is_no_tap_and_fits_the_plan():
    with pytest.raises(TypeError, match="AxisBoundary: tap must be a callable"):
        AxisBoundary(tap=reducers.mean)
    plan = BatchPlanner().plan([AxisSpec("batch", 8, 4)])
    validate_plan_topology(plan.decisions, {"batch": AxisBoundary(fuse=reducers.mean)})


def test_reducers_that_do_not_fit_the_output_are_refused():
    with pytest.raises(ValueError, match="prefix of the output"):
        execute_map_axis(outputs, values(3), SafeMap(2), AxisBoundary(fuse={"a": reducers.mean, "b": reducers.max}))
