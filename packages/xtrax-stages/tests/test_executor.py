"""One axis, run with a boundary, against plain Python loops and jax.vmap: values and the sequence of effects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.stages import AxisBoundary, ExecutorError, execute_map_axis, execute_scan_axis, io_callback
from xtrax.tiling import Bucket, DedupSpec, SafeMap, Scan, Vmap, WhileCarry

SIZES = [1, 5, 8]
BATCHES = [1, 3, 4, 9]


class Recorder:
    """Keeps what reaches it on the host; as a tap it passes the value on, as a sink it does not."""

    def __init__(self, *, ordered, returns=True, log=None, tag=None):
        self.ordered = ordered
        self.returns = returns
        self.log = [] if log is None else log
        self.tag = tag

    def __call__(self, value):
        io_callback(self._keep, None, value, ordered=self.ordered)
        return value if self.returns else None

    def _keep(self, value):
        row = jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), value)
        self.log.append(row if self.tag is None else (self.tag, row))

    @property
    def seen(self):
        jax.effects_barrier()
        return self.log


def tap(**kwargs):
    return Recorder(ordered=True, **kwargs)


def sink(**kwargs):
    return Recorder(ordered=True, returns=False, **kwargs)


def square(x):
    return x * x + 1


def values(n):
    return jnp.arange(n, dtype=jnp.int32) - 2


def expected(n):
    return [(i - 2) ** 2 + 1 for i in range(n)]


def dedup(labels, batch_size=None):
    """The strategy for an axis whose element i is a copy of the first one with the same label."""
    distinct = sorted(set(labels), key=labels.index)
    spec = DedupSpec(
        "batch",
        unique_indices=np.array([labels.index(label) for label in distinct]),
        index_map=np.array([distinct.index(label) for label in labels]),
        k=len(distinct),
    )
    return spec.to_dedup_gather(batch_size)


@settings(max_examples=20, deadline=None)
@given(n=st.sampled_from(SIZES), batch=st.sampled_from(BATCHES), jitted=st.booleans())
def test_ordered_tap_on_a_safe_map_sees_each_element_once_in_order(n, batch, jitted):
    recorder = tap()

    def run(xs):
        return execute_map_axis(square, xs, SafeMap(batch), AxisBoundary(tap=recorder))

    ys = (jax.jit(run) if jitted else run)(values(n))
    assert ys.tolist() == expected(n)
    assert recorder.seen == expected(n)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_seed_ordered_safe_map_keeps_its_batch_size(n, batch):
    widths = []

    @jax.custom_batching.custom_vmap
    def observed(x):
        return square(x)

    @observed.def_vmap
    def _(axis_size, in_batched, x):
        widths.append(axis_size)
        return square(x), True

    recorder = sink()
    assert execute_map_axis(observed, values(n), SafeMap(batch), AxisBoundary(sink=recorder)) is None
    assert recorder.seen == expected(n)
    full, rest = divmod(n, batch)
    # Traced once for the full chunks and once for the last, shorter one; SafeMap(1) runs its elements without vmap.
    assert widths == ([] if batch == 1 else [batch] * (full > 0) + [rest] * (rest > 0))


@settings(max_examples=20, deadline=None)
@given(
    n=st.sampled_from(SIZES),
    strategy=st.sampled_from([Vmap(), SafeMap(1), SafeMap(3), SafeMap(8)]),
    fused=st.booleans(),
    tapped=st.booleans(),
    sunk=st.booleans(),
)
def test_the_flow_of_a_mapped_axis(n, strategy, fused, tapped, sunk):
    log = []
    boundary = AxisBoundary(
        fuse=jnp.sum if fused else None,
        tap=Recorder(ordered=False, log=log, tag="tap") if tapped else None,
        sink=Recorder(ordered=False, returns=False, log=log, tag="sink") if sunk else None,
    )
    ys = jax.jit(lambda xs: execute_map_axis(square, xs, strategy, boundary))(values(n))
    jax.effects_barrier()
    if fused:
        assert int(ys) == sum(expected(n))
    elif sunk:
        assert ys is None
    else:
        assert ys.tolist() == expected(n)
    # Without order, what is promised is which effects occur, not when.
    wanted = [("tap", y) for y in expected(n)] * tapped + [("sink", y) for y in expected(n)] * sunk
    assert sorted(log) == sorted(wanted)


def test_seed_a_tap_fires_before_the_sink_of_the_same_element():
    log = []
    boundary = AxisBoundary(tap=tap(log=log, tag="tap"), sink=sink(log=log, tag="sink"))
    assert execute_map_axis(square, values(5), SafeMap(2), boundary) is None
    jax.effects_barrier()
    assert log == [(tag, y) for y in expected(5) for tag in ("tap", "sink")]


def test_effects_of_a_chunk_follow_its_compute_and_precede_the_next_chunk():
    log = []

    def fn(x):
        io_callback(lambda v: log.append(("fn", int(v))), None, x)
        return x

    recorder = tap(log=log, tag="tap")
    execute_map_axis(fn, jnp.arange(4), SafeMap(2), AxisBoundary(tap=recorder))
    jax.effects_barrier()
    assert [entry for entry in log if entry[0] == "tap"] == [("tap", i) for i in range(4)]
    assert log.index(("tap", 1)) < log.index(("fn", 2))
    assert log.index(("tap", 1)) < log.index(("fn", 3))


@settings(max_examples=12, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    batch_size=st.sampled_from([None, 1, 3]),
    sunk=st.booleans(),
    ordered=st.booleans(),
)
def test_effects_of_a_deduplicated_axis_fire_for_every_original_position_in_order(labels, batch_size, sunk, ordered):
    recorder = Recorder(ordered=ordered, returns=not sunk)
    boundary = AxisBoundary(sink=recorder) if sunk else AxisBoundary(tap=recorder)
    ys = execute_map_axis(square, jnp.asarray(labels), dedup(labels, batch_size), boundary)
    wanted = [label**2 + 1 for label in labels]
    assert recorder.seen == wanted if ordered else sorted(recorder.seen) == sorted(wanted)
    assert ys is None if sunk else ys.tolist() == wanted


@pytest.mark.parametrize("custom", [True, False])
def test_a_deduplicated_axis_of_pytrees_with_functions_of_its_own(custom):
    labels = np.array([3, 1, 3, 3, 1])
    calls = []

    def gather(ys, index_map):
        calls.append(len(index_map))
        return jax.tree.map(lambda y: y[index_map], ys)

    strategy = DedupSpec("batch", [0, 1], [0, 1, 0, 0, 1], k=2, gather_fn=gather if custom else None).to_dedup_gather()
    recorder = tap()
    ys = execute_map_axis(
        lambda x: {"a": x * 2, "b": (x, -x)}, jnp.asarray(labels), strategy, AxisBoundary(tap=recorder)
    )
    np.testing.assert_array_equal(ys["a"], labels * 2)
    assert recorder.seen == [{"a": 2 * x, "b": (x, -x)} for x in labels.tolist()]
    assert calls == [5] * custom


def test_fuse_on_a_deduplicated_axis_sees_every_original_position_and_no_padding():
    labels = [5, 5, 7, 5, 9]  # three distinct elements, padded to a bucket of four
    assert dedup(labels).k_bucket == 4
    total = execute_map_axis(square, jnp.asarray(labels), dedup(labels), AxisBoundary(fuse=jnp.sum))
    assert int(total) == sum(label**2 + 1 for label in labels)


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(3)])
def test_no_boundary_is_a_plain_map(strategy):
    xs = jnp.linspace(0.0, 1.0, 7)
    for boundary in (None, AxisBoundary()):
        np.testing.assert_array_equal(execute_map_axis(jnp.sin, xs, strategy, boundary), jax.vmap(jnp.sin)(xs))


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(3)])
def test_an_empty_axis_fires_nothing(strategy):
    recorder = Recorder(ordered=False)
    xs = jnp.zeros((0, 2))
    ys = execute_map_axis(square, xs, strategy, AxisBoundary(tap=recorder))
    assert ys.shape == (0, 2)
    assert recorder.seen == []
    silent = Recorder(ordered=False, returns=False)
    total = execute_map_axis(square, xs, strategy, AxisBoundary(fuse=jnp.sum, sink=silent))
    assert float(total) == 0.0
    assert silent.seen == []


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2)])
def test_pytrees_keys_and_small_dtypes_pass_through(strategy):
    xs = {
        "key": jax.random.split(jax.random.key(0), 5),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "flag": jnp.arange(5) % 2 == 0,
        "phase": jnp.exp(1j * jnp.arange(5)).astype(jnp.complex64),
    }

    def fn(x):
        return {"noise": jax.random.normal(x["key"], (2,)), "key": x["key"], "rest": (x["half"], x["flag"], x["phase"])}

    log = []

    def record(y):
        io_callback(lambda noise: log.append(noise.tolist()), None, y["noise"])
        return y

    ys = execute_map_axis(fn, xs, strategy, AxisBoundary(tap=record))
    jax.effects_barrier()
    reference = jax.vmap(fn)(xs)
    np.testing.assert_array_equal(jax.random.key_data(ys["key"]), jax.random.key_data(reference["key"]))
    for got, want in zip(jax.tree.leaves(ys["rest"]), jax.tree.leaves(reference["rest"]), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(ys["noise"], reference["noise"], rtol=1e-6)
    np.testing.assert_array_equal(sorted(log), sorted(ys["noise"].tolist()))


def test_a_sink_is_never_stacked():
    n, batch, width = 512, 16, 256

    def run(xs, boundary):
        return execute_map_axis(lambda x: jnp.full((width,), x), xs, SafeMap(batch), boundary)

    def temporaries(boundary):
        compiled = jax.jit(lambda xs: run(xs, boundary)).lower(jnp.zeros((n,))).compile()
        analysis = compiled.memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    stacked = n * width * 4
    assert temporaries(AxisBoundary(tap=tap())) >= stacked
    assert temporaries(AxisBoundary(sink=sink())) <= stacked / 8


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(2), "dedup"])
def test_numpy_arrays_are_elements_too(strategy):
    recorder = Recorder(ordered=False)
    xs = np.array([3.0, 1.0, 3.0])  # float64, which JAX narrows
    strategy = dedup([3, 1, 3]) if strategy == "dedup" else strategy
    ys = execute_map_axis(square, xs, strategy, AxisBoundary(tap=recorder))
    assert ys.tolist() == [10.0, 2.0, 10.0]
    assert sorted(recorder.seen) == [2.0, 10.0, 10.0]


def test_unordered_effects_work_under_an_outer_vmap():
    recorder = Recorder(ordered=False)
    xs = jnp.arange(6).reshape(2, 3)
    ys = jax.vmap(lambda row: execute_map_axis(square, row, SafeMap(2), AxisBoundary(tap=recorder)))(xs)
    np.testing.assert_array_equal(ys, np.arange(6).reshape(2, 3) ** 2 + 1)
    assert sorted(recorder.seen) == [x**2 + 1 for x in range(6)]


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(4), SafeMap(2), SafeMap(1)])
def test_a_batchable_effect_receives_all_lanes_of_a_chunk_at_once(strategy):
    batches = []

    @jax.custom_batching.custom_vmap
    def emit(x):
        return x

    @emit.def_vmap
    def _(axis_size, in_batched, x):
        io_callback(lambda v: batches.append(v.tolist()), None, x, ordered=True)
        return x, True

    class Batched:
        ordered = True
        batchable = True

        def __call__(self, value):
            return emit(value)

    ys = execute_map_axis(square, values(4), strategy, AxisBoundary(tap=Batched()))
    jax.effects_barrier()
    assert ys.tolist() == expected(4)
    size = 4 if isinstance(strategy, Vmap) else strategy.batch_size
    assert batches == [expected(4)[i : i + size] for i in range(0, 4, size)]


# Nested


@settings(max_examples=8, deadline=None)
@given(
    n=st.sampled_from([3, 5]),
    outer=st.sampled_from([Vmap(), SafeMap(2)]),
    inner=st.sampled_from([Vmap(), SafeMap(2)]),
)
def test_effects_of_an_inner_axis_fire_once_for_each_element(n, outer, inner):
    """The chunks of an outer axis without effects of its own must not overlap when the inner axis has some."""
    recorder = Recorder(ordered=False)
    xs = jnp.arange(n * 3).reshape(n, 3)

    def of_row(row):
        return execute_map_axis(square, row, inner, AxisBoundary(tap=recorder, fuse=jnp.sum))

    totals = jax.jit(lambda rows: execute_map_axis(of_row, rows, outer))(xs)
    np.testing.assert_array_equal(totals, (np.arange(n * 3).reshape(n, 3) ** 2 + 1).sum(axis=1))
    assert sorted(recorder.seen) == [x**2 + 1 for x in range(n * 3)]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_scan_of_chunks_fires_in_the_order_of_python_loops(batch):
    recorder = tap()
    xs = jnp.arange(15).reshape(3, 5)

    def step(total, row):
        ys = execute_map_axis(lambda x: x + total, row, SafeMap(batch), AxisBoundary(tap=recorder))
        return total + ys.sum(), ys

    total, _ = jax.jit(lambda rows: execute_scan_axis(step, jnp.int32(0), rows))(xs)
    running, wanted = 0, []
    for row in range(3):
        ys = [5 * row + i + running for i in range(5)]
        wanted += ys
        running += sum(ys)
    assert recorder.seen == wanted
    assert int(total) == running


@settings(max_examples=12, deadline=None)
@given(
    n=st.sampled_from([0, 1, 4]),
    inner=st.sampled_from([1, 2, 3, 9]),
    tapped=st.booleans(),
    jitted=st.booleans(),
)
def test_a_safe_map_of_one_around_ordered_effects_fires_in_the_order_of_python_loops(n, inner, tapped, jitted):
    log = []
    recorder, outer = tap(log=log, tag="inner"), tap(log=log, tag="outer") if tapped else None

    def of_row(row):
        return execute_map_axis(square, row, SafeMap(inner), AxisBoundary(tap=recorder))

    def run(rows):
        return execute_map_axis(of_row, rows, SafeMap(1), AxisBoundary(tap=outer))

    ys = (jax.jit(run) if jitted else run)(jnp.arange(n * 3).reshape(n, 3))
    jax.effects_barrier()
    wanted = []
    for row in range(n):
        squares = [x * x + 1 for x in range(3 * row, 3 * row + 3)]
        wanted += [("inner", y) for y in squares] + [("outer", squares)] * tapped
    assert log == wanted
    np.testing.assert_array_equal(ys, np.arange(n * 3).reshape(n, 3) ** 2 + 1)


def test_effects_of_an_inner_axis_of_a_deduplicated_one_are_refused():
    def of_row(row):
        return execute_map_axis(square, row, Vmap(), AxisBoundary(tap=Recorder(ordered=False)))

    with pytest.raises(ExecutorError, match="has side effects, and on a DedupGather axis"):
        execute_map_axis(of_row, jnp.ones((3, 2)), dedup([0, 0, 1]))


# Scans


@settings(max_examples=10, deadline=None)
@given(n=st.sampled_from(SIZES), fused=st.booleans(), tapped=st.booleans(), sunk=st.booleans())
def test_the_flow_of_a_scanned_axis(n, fused, tapped, sunk):
    log = []
    boundary = AxisBoundary(
        fuse=jnp.max if fused else None,
        tap=tap(log=log, tag="tap") if tapped else None,
        sink=sink(log=log, tag="sink") if sunk else None,
    )

    def step(total, x):
        return total + x, total + x

    carry, ys = jax.jit(lambda xs: execute_scan_axis(step, jnp.int32(0), xs, boundary))(values(n))
    jax.effects_barrier()
    sums = np.cumsum(np.arange(n) - 2).tolist()
    assert int(carry) == sums[-1]
    if fused:
        assert int(ys) == max(sums)
    elif sunk:
        assert ys is None
    else:
        assert ys.tolist() == sums
    assert log == [(tag, y) for y in sums for tag in ["tap"] * tapped + ["sink"] * sunk]


def test_a_boundary_sees_the_output_of_a_step_and_never_the_carry():
    recorder = tap()
    carry, ys = execute_scan_axis(
        lambda c, x: (c + 100, x * 2), 0, jnp.arange(3), AxisBoundary(tap=recorder, fuse=lambda stack: stack.sum())
    )
    assert (int(carry), int(ys)) == (300, 6)
    assert recorder.seen == [0, 2, 4]


def test_scan_without_a_boundary_is_lax_scan():
    def step(c, x):
        return jnp.sin(c) + x, c * x

    xs = jnp.linspace(0.0, 1.0, 5)
    for boundary in (None, AxisBoundary()):
        got = execute_scan_axis(step, 0.5, xs, boundary)
        jax.tree.map(np.testing.assert_array_equal, got, jax.lax.scan(step, 0.5, xs))


def test_scan_of_an_empty_axis_is_refused():
    with pytest.raises(ValueError, match="the axis has no elements"):
        execute_scan_axis(lambda c, x: (c, x), 0.0, jnp.zeros((0,)))


# Derivatives


def quadratic(boundary, strategy):
    return lambda xs: jnp.sum(execute_map_axis(lambda x: x * x, xs, strategy, boundary))


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2)])
@pytest.mark.parametrize("boundary", [AxisBoundary(fuse=jnp.sum), AxisBoundary(tap=lambda x: x)])
def test_boundaries_without_effects_are_differentiated_in_both_modes(strategy, boundary):
    xs = jnp.arange(5.0)
    np.testing.assert_allclose(jax.grad(quadratic(boundary, strategy))(xs), 2 * xs)
    np.testing.assert_allclose(jax.jacfwd(quadratic(boundary, strategy))(xs), 2 * xs)


def test_a_chunked_axis_with_a_fuse_is_differentiated_twice():
    hessian = jax.hessian(quadratic(AxisBoundary(fuse=jnp.sum), SafeMap(2)))(jnp.arange(5.0))
    np.testing.assert_allclose(hessian, 2 * np.eye(5))


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2)])
@pytest.mark.parametrize("stopped", [True, False])
def test_no_effect_is_lost_silently_when_it_is_differentiated(strategy, stopped):
    def record(x):
        # Even stopped, its effects would be dropped from a differentiated loop.
        io_callback(lambda v: None, None, jax.lax.stop_gradient(x) if stopped else x)
        return x

    with pytest.raises(ExecutorError, match="the tap has side effects and lies in a function that is differentiated"):
        jax.grad(quadratic(AxisBoundary(tap=record), strategy))(jnp.arange(4.0))

    def scanned(xs):
        return execute_scan_axis(lambda c, x: (c + x * x, x), 0.0, xs, AxisBoundary(tap=record))[0]

    def scanned_output(xs):
        return execute_scan_axis(lambda c, x: (c, x * x), 0.0, xs, AxisBoundary(tap=record))[1].sum()

    for fn in (scanned, scanned_output):
        with pytest.raises(ExecutorError, match="differentiated"):
            jax.grad(fn)(jnp.arange(4.0))

    def sunk(xs):
        boundary = AxisBoundary(sink=lambda x: record(x) if x is None else io_callback(lambda v: None, None, x))
        execute_map_axis(lambda x: x * x, xs, strategy, boundary)
        return jnp.sum(xs)

    with pytest.raises(ExecutorError, match="the sink has side effects"):
        jax.grad(sunk)(jnp.arange(4.0))


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2)])
@pytest.mark.parametrize("role", ["tap", "sink"])
def test_effects_of_the_user_s_own_in_a_differentiated_loop_are_refused_whatever_their_values(strategy, role):
    seen = []

    def record(x):
        io_callback(lambda v: seen.append(float(v)), None, x)
        return x if role == "tap" else None

    def loss(w):
        def step(c, y):
            execute_map_axis(lambda x: x * y, jnp.arange(3.0), strategy, AxisBoundary(**{role: record}))
            return c * y, None

        return jax.lax.scan(step, w, jnp.arange(1.0, 3.0))[0]

    with pytest.raises(ExecutorError, match=f"the {role} has side effects and lies in .* or in a loop that is"):
        jax.grad(loss)(2.0)
    loss(2.0)
    jax.effects_barrier()
    assert sorted(seen) == [0.0, 0.0, 1.0, 2.0, 2.0, 4.0]


def test_effects_on_what_is_not_differentiated_fire_in_a_gradient():
    recorder = tap()

    def loss(w, xs):
        ys = execute_map_axis(square, xs, SafeMap(2), AxisBoundary(tap=recorder))
        return w * ys.sum()

    slope = jax.grad(loss)(2.0, values(5))
    assert float(slope) == sum(expected(5))
    assert recorder.seen == expected(5)


# What cannot run


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Scan(), "cannot run Scan: .*execute_scan_axis"),
        (WhileCarry(), "cannot run WhileCarry: it has no elements"),
        (Bucket((4, 8)), "cannot run Bucket: .*select_bucket and bucketize"),
    ],
)
def test_strategies_that_do_not_map_are_refused(strategy, message):
    with pytest.raises(ExecutorError, match=message):
        execute_map_axis(square, values(3), strategy)


@pytest.mark.parametrize("role", ["tap", "sink"])
def test_seed_ordered_effect_on_a_vmap_axis_halts_in_the_executor(role):
    boundary = AxisBoundary(tap=tap()) if role == "tap" else AxisBoundary(sink=sink())
    with pytest.raises(ExecutorError, match=f"the {role} is ordered, and Vmap runs all elements at once. Use SafeMap"):
        execute_map_axis(square, values(3), Vmap(), boundary)


@pytest.mark.parametrize("strategy", [Vmap, "Vmap", None, 3])
def test_what_is_no_strategy_is_refused(strategy):
    with pytest.raises(TypeError, match="strategy must be a Vmap, SafeMap or DedupGather"):
        execute_map_axis(square, values(3), strategy)


@pytest.mark.parametrize(
    "run", [lambda f, b: execute_map_axis(f, values(3), Vmap(), b), lambda f, b: execute_scan_axis(f, 0, values(3), b)]
)
def test_arguments_of_the_wrong_kind_are_refused(run):
    with pytest.raises(TypeError, match="fn must be callable; found 3"):
        run(3, None)
    with pytest.raises(TypeError, match="boundary must be an AxisBoundary or None; found dict"):
        run(square, {"tap": square})


@pytest.mark.parametrize(
    ("xs", "error", "message"),
    [
        ({}, ExecutorError, "no arrays"),
        (None, ExecutorError, "no arrays"),
        ({"a": np.zeros(3), "b": np.zeros(4)}, ExecutorError, r"xs\['a'\] has 3, xs\['b'\] has 4"),
        ([np.zeros(3), np.float32(1)], ExecutorError, r"xs\[1\] is a scalar"),
        ([1.0, 2.0], TypeError, r"xs\[0\] must be an array; found float"),
    ],
)
def test_elements_without_a_common_axis_are_refused(xs, error, message):
    for run in (
        lambda: execute_map_axis(square, xs, SafeMap(2), AxisBoundary(tap=tap())),
        lambda: execute_scan_axis(lambda c, x: (c, x), 0, xs),
    ):
        with pytest.raises(error, match=message):
            run()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda x: None, "the tap was given int32.* and returned None"),
        (lambda x: x.astype(jnp.float32), "given int32.* and returned float32"),
        (lambda x: x[None], r"given int32\[\] and returned int32\[1\]"),
        (lambda x: (x, x), "A Tap returns what it was given"),
    ],
)
def test_a_tap_that_does_not_return_what_it_was_given_is_refused(broken, message):
    with pytest.raises(ExecutorError, match=message):
        execute_map_axis(square, values(3), SafeMap(2), AxisBoundary(tap=broken))
    with pytest.raises(ExecutorError, match=message):
        execute_scan_axis(lambda c, x: (c, x), 0, values(3), AxisBoundary(tap=broken))


def test_a_sink_that_returns_something_is_refused():
    with pytest.raises(ExecutorError, match=r"the sink returned .* and a Sink returns None"):
        execute_map_axis(square, values(3), Vmap(), AxisBoundary(sink=lambda x: x))


@pytest.mark.parametrize("returned", [lambda c, x: c, lambda c, x: [c, x], lambda c, x: (c, x, x)])
def test_a_step_that_does_not_return_a_pair_is_refused(returned):
    with pytest.raises(TypeError, match=r"fn must return a pair \(carry, y\); it returned"):
        execute_scan_axis(returned, 0, values(3))


def test_an_error_in_a_host_function_reaches_the_caller():
    class Failing:
        ordered = True

        def __call__(self, value):
            def fail(v):
                if int(v) == expected(5)[2]:
                    raise OSError("the disk is full")

            io_callback(fail, None, value, ordered=True)

    def run():
        execute_map_axis(square, values(5), SafeMap(2), AxisBoundary(sink=Failing()))
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match="the disk is full"):
        run()
