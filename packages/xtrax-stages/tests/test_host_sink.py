"""`HostSink`, alone and at the edge of each kind of axis, against Python loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.stages import (
    AxisBoundary,
    ExecutorError,
    HostSink,
    HostTap,
    execute_map_axis,
    execute_scan_axis,
    io_callback,
)
from xtrax.tiling import DedupGather, DedupSpec, SafeMap, Vmap


class Log:
    """Host functions that write `(tag, index, value)` into one list."""

    def __init__(self):
        self.entries = []
        self.calls = []

    def __call__(self, tag):
        def keep(values, index):
            self.calls.append((tag, len(index)))
            self.entries.extend((tag, tuple(i), v) for i, v in zip(index.tolist(), values.tolist(), strict=True))

        return keep

    @property
    def seen(self):
        jax.effects_barrier()
        return self.entries


def square(x):
    return x * x + 1


def dedup(labels):
    distinct = sorted(set(labels), key=labels.index)
    return DedupSpec(
        "batch",
        unique_indices=np.array([labels.index(label) for label in distinct]),
        index_map=np.array([distinct.index(label) for label in labels]),
        k=len(distinct),
    ).to_dedup_gather()


def chunks(n, size):
    return [range(i, min(i + size, n)) for i in range(0, n, size)]


@settings(max_examples=25, deadline=None)
@given(
    n=st.sampled_from([1, 5, 8]),
    size=st.sampled_from([None, 1, 3, 4, 9]),
    ordered=st.booleans(),
    jitted=st.booleans(),
    fused=st.booleans(),
    tapped=st.booleans(),
)
def test_a_mapped_axis_delivers_chunk_by_chunk(n, size, ordered, jitted, fused, tapped):
    log = Log()
    boundary = AxisBoundary(
        fuse=jnp.sum if fused else None,
        tap=HostTap(log("tap"), ordered=ordered) if tapped else None,
        sink=HostSink(log("sink"), ordered=ordered),
    )

    def run(xs):
        return execute_map_axis(square, xs, Vmap() if size is None else SafeMap(size), boundary)

    result = (jax.jit(run) if jitted else run)(jnp.arange(n))
    values = [i * i + 1 for i in range(n)]
    assert result is None if not fused else int(result) == sum(values)
    tags = ["tap"] * tapped + ["sink"]
    parts = chunks(n, size or n)
    wanted = [(tag, (i,), values[i]) for part in parts for tag in tags for i in part]
    if ordered:
        assert log.seen == wanted
        assert log.calls == [(tag, len(part)) for part in parts for tag in tags]
    else:
        assert sorted(log.seen) == sorted(wanted)


@settings(max_examples=12, deadline=None)
@given(
    labels=st.sampled_from([[0], [3, 1, 3, 3, 1], [0, 0, 0, 0, 0], [4, 3, 2, 1, 0], [5, 5, 7, 5, 9]]),
    ordered=st.booleans(),
    jitted=st.booleans(),
    tapped=st.booleans(),
)
def test_a_deduplicated_axis_delivers_every_original_position(labels, ordered, jitted, tapped):
    log = Log()
    effect = (HostTap if tapped else HostSink)(log("it"), ordered=ordered)
    boundary = AxisBoundary(tap=effect) if tapped else AxisBoundary(sink=effect)

    def run(xs):
        return execute_map_axis(square, xs, dedup(labels), boundary)

    ys = (jax.jit(run) if jitted else run)(jnp.asarray(labels))
    values = [label * label + 1 for label in labels]
    assert ys.tolist() == values if tapped else ys is None
    assert log.seen == [("it", (i,), value) for i, value in enumerate(values)]


@settings(max_examples=10, deadline=None)
@given(n=st.sampled_from([1, 4]), ordered=st.booleans(), jitted=st.booleans(), tapped=st.booleans())
def test_a_scanned_axis_delivers_step_by_step_and_never_the_carry(n, ordered, jitted, tapped):
    log = Log()
    boundary = AxisBoundary(
        tap=HostTap(log("tap"), ordered=ordered) if tapped else None, sink=HostSink(log("sink"), ordered=ordered)
    )

    def run(xs):
        return execute_scan_axis(lambda total, x: (total + x, total * 10 + x), 0, xs, boundary)

    total, ys = (jax.jit(run) if jitted else run)(jnp.arange(1, n + 1))
    assert (int(total), ys) == (n * (n + 1) // 2, None)
    outputs = [10 * (i * (i + 1) // 2) + i + 1 for i in range(n)]
    wanted = [(tag, (i,), y) for i, y in enumerate(outputs) for tag in ["tap"] * tapped + ["sink"]]
    assert log.seen == wanted if ordered else sorted(log.seen) == sorted(wanted)


@pytest.mark.parametrize("size", [2, 8])
def test_the_vmaps_of_the_caller_come_first_in_the_index(size):
    log = Log()
    boundary = AxisBoundary(sink=HostSink(log("it"), ordered=True))
    rows = jnp.arange(10).reshape(2, 5)
    jax.vmap(lambda row: execute_map_axis(square, row, SafeMap(size), boundary))(rows)
    wanted = [("it", (lane, i), (5 * lane + i) ** 2 + 1) for part in chunks(5, size) for lane in range(2) for i in part]
    assert log.seen == wanted


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2)])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("jitted", [True, False])
def test_the_lanes_of_the_caller_s_vmap_may_come_by_closure(strategy, ordered, jitted):
    log = Log()
    boundary = AxisBoundary(tap=HostTap(log("it"), ordered=ordered))
    xs = jnp.arange(3)
    run = jax.vmap(lambda y: execute_map_axis(lambda x: x * y, xs, strategy, boundary))
    result = (jax.jit(run) if jitted else run)(jnp.arange(2))
    assert result.tolist() == [[0, 0, 0], [0, 1, 2]]
    assert sorted(log.seen) == [("it", (lane, i), lane * i) for lane in range(2) for i in range(3)]


def test_an_executor_inside_a_vmap_that_has_nothing_to_do_with_it_fires_for_one_lane():
    log = Log()
    boundary = AxisBoundary(tap=HostTap(log("it"), ordered=True))
    xs = jnp.arange(3)
    jax.vmap(lambda y: y + execute_map_axis(square, xs, Vmap(), boundary).sum())(jnp.arange(2))
    assert log.seen == [("it", (i,), i * i + 1) for i in range(3)]


def test_host_effects_beside_a_callable_of_the_user_s():
    log = Log()

    class Own:
        ordered = True

        def __call__(self, value):
            io_callback(lambda v: log.entries.append(("own", int(v))), None, value, ordered=True)
            return value

    boundary = AxisBoundary(tap=Own(), sink=HostSink(log("sink"), ordered=True))
    execute_map_axis(square, jnp.arange(5), SafeMap(2), boundary)
    wanted = [entry for i in range(5) for entry in (("own", i * i + 1), ("sink", (i,), i * i + 1))]
    assert log.seen == wanted


def test_a_host_tap_is_no_sink_and_a_host_sink_is_no_tap():
    with pytest.raises(TypeError, match=r"AxisBoundary: sink is a HostTap.*make it a HostSink, or give it as tap"):
        AxisBoundary(sink=HostTap(print))
    with pytest.raises(TypeError, match=r"AxisBoundary: tap is a HostSink.*make it a HostTap, or give it as sink"):
        AxisBoundary(tap=HostSink(print))


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2), "dedup", "scan"])
@pytest.mark.parametrize("role", ["tap", "sink", "user's tap"])
@pytest.mark.parametrize("jitted", [True, False])
def test_an_output_may_be_a_python_number(strategy, role, jitted):
    log, mine = Log(), []

    def own(tree):
        io_callback(lambda v: mine.append(int(v)), None, tree["n"])
        return tree

    def keep(values, index):
        log("n")(values["n"], index)
        log("x")(values["x"], index)

    effect = own if role == "user's tap" else (HostTap if role == "tap" else HostSink)(keep)
    boundary = AxisBoundary(**{"sink" if role == "sink" else "tap": effect})

    def run(xs):
        if strategy == "scan":
            return execute_scan_axis(lambda c, x: (c, {"n": 7, "x": x}), 0, xs, boundary)[1]
        chosen = dedup([0, 1, 0]) if strategy == "dedup" else strategy
        return execute_map_axis(lambda x: {"n": 7, "x": x}, xs, chosen, boundary)

    result = (jax.jit(run) if jitted else run)(jnp.array([1.0, 2.0, 1.0]))
    jax.effects_barrier()
    if role == "user's tap":
        assert mine == [7, 7, 7]
    else:
        wanted = [("n", (i,), 7) for i in range(3)] + [("x", (i,), x) for i, x in enumerate([1.0, 2.0, 1.0])]
        assert sorted(log.seen) == wanted
    if role == "sink":
        assert result is None
    else:
        assert jax.tree.map(lambda y: y.tolist(), result) == {"n": [7, 7, 7], "x": [1.0, 2.0, 1.0]}


def test_an_empty_axis_fires_nothing():
    log = Log()
    for strategy in (Vmap(), SafeMap(1), SafeMap(2)):
        boundary = AxisBoundary(tap=HostTap(log("it"), ordered=True))
        assert execute_map_axis(square, jnp.zeros((0, 2)), strategy, boundary).shape == (0, 2)
    assert log.seen == []


def test_one_compiled_program_serves_many_calls():
    log, traces = Log(), []
    boundary = AxisBoundary(sink=HostSink(log("it"), ordered=True))

    @jax.jit
    def run(xs):
        traces.append(xs.shape)
        return execute_map_axis(square, xs, SafeMap(2), boundary)

    for start in (0, 3):
        run(jnp.arange(start, start + 3))
    assert len(traces) == 1
    assert log.seen == [("it", (i,), (start + i) ** 2 + 1) for start in (0, 3) for i in range(3)]


def test_boundaries_of_the_same_effects_do_not_retrace():
    sink, traces = HostSink(lambda values, index: None), []

    @jax.jit
    def run(xs, boundary):
        traces.append(1)
        return execute_map_axis(square, xs, SafeMap(2), boundary)

    for _ in range(2):
        run(jnp.arange(3), AxisBoundary(sink=sink))
    assert len(traces) == 1


# Called directly


def test_a_sink_called_directly_is_numbered_by_the_vmaps_around_it():
    log = Log()
    sink = HostSink(log("it"), ordered=True)
    result = jax.vmap(jax.vmap(sink))(jnp.arange(6).reshape(2, 3))
    assert result is None
    assert log.seen == [("it", (i, j), 3 * i + j) for i in range(2) for j in range(3)]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(f))])
def test_a_sink_called_directly_cannot_be_differentiated(ordered, transform):
    sink = HostSink(lambda values, index: None, ordered=ordered)

    def flat(x):
        sink(x)
        return x * x

    def scanned(x):
        return jax.lax.scan(lambda c, i: (flat(c), None), x, jnp.arange(2))[0]

    def stopped(x):
        sink(jax.lax.stop_gradient(x))
        return x * x

    for fn in (flat, scanned):
        with pytest.raises(ExecutorError, match=r"a HostSink lies in a function that is differentiated.*HostTap"):
            transform(fn)(2.0)
    # What is not differentiated is not refused.
    assert float(transform(stopped)(2.0)) == 4.0


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("transform", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))])
def test_a_sink_in_a_differentiated_loop_is_refused_though_its_values_are_not_differentiated(
    ordered, masked, transform
):
    log = Log()
    sink = HostSink(log("it"), ordered=ordered)

    def loss(w):
        def step(c, y):
            if masked:
                sink(jnp.float32(7), where=y > 1)
            else:
                sink(y)
            return c * y, None

        return jax.lax.scan(step, w, jnp.arange(1.0, 3.0))[0]

    with pytest.raises(ExecutorError, match=r"a HostSink lies in .*a loop that is.*HostTap"):
        transform(loss)(2.0)
    assert log.seen == []
    # Without a derivative, and in forward mode, none are lost.
    wanted = [("it", (), 7.0)] if masked else [("it", (), 1.0), ("it", (), 2.0)]
    for call in (loss, jax.jit(loss), jax.jacfwd(loss), lambda w: jax.jvp(loss, (w,), (1.0,))):
        log.entries.clear()
        call(2.0)
        assert sorted(log.seen) == wanted


def test_a_sink_with_typed_keys_over_devices_and_in_lanes():
    seen = []
    sink = HostSink(lambda value, index: seen.append((index, value)), batched=False)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(xs, keys):
        jax.vmap(lambda x, key: sink({"x": x, "key": key}))(xs, keys)
        return xs

    keys = jax.random.split(jax.random.key(0), 2)
    run = jax.shard_map(fn, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    assert run(jnp.arange(2), keys).tolist() == [0, 1]
    jax.effects_barrier()
    found = [(index, int(value["x"]), value["key"].tolist()) for index, value in sorted(seen, key=lambda row: row[0])]
    assert found == [((i,), i, jax.random.key_data(keys)[i].tolist()) for i in range(2)]


# Derivatives at the edge of an axis


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2), SafeMap(3), "dedup"])
@pytest.mark.parametrize("role", ["tap", "sink and fuse"])
def test_a_differentiated_axis_fires_once_for_each_element(strategy, ordered, role):
    log = Log()
    strategy = dedup([0, 1, 0, 2]) if strategy == "dedup" else strategy
    xs = jnp.array([1.0, 2.0, 1.0, 3.0])
    if role == "tap":
        boundary = AxisBoundary(tap=HostTap(log("it"), ordered=ordered))
    else:
        boundary = AxisBoundary(sink=HostSink(log("it"), ordered=ordered), fuse=lambda ys: ys)

    def loss(xs):
        return jnp.sum(execute_map_axis(lambda x: x * x, xs, strategy, boundary))

    # A deduplicated axis reads each distinct element where it occurs first.
    slopes = [4, 4, 0, 6] if isinstance(strategy, DedupGather) else 2 * xs
    wanted = [("it", (i,), float(x * x)) for i, x in enumerate(xs)]
    for run in (jax.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))):
        log.entries.clear()
        value, grad = run(xs)
        assert float(value) == 15.0
        np.testing.assert_allclose(grad, slopes)
        assert sorted(log.seen) == sorted(wanted)
        assert log.seen == wanted or not ordered


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("jitted", [True, False])
def test_a_differentiated_scan_axis_fires_once_for_each_step(ordered, jitted):
    log = Log()
    boundary = AxisBoundary(sink=HostSink(log("it"), ordered=ordered))

    def loss(xs):
        return execute_scan_axis(lambda c, x: (c + x * x, x), 0.0, xs, boundary)[0]

    run = jax.grad(loss)
    xs = jnp.arange(1.0, 4.0)
    np.testing.assert_allclose((jax.jit(run) if jitted else run)(xs), 2 * xs)
    assert sorted(log.seen) == [("it", (i,), float(i + 1)) for i in range(3)]


def test_a_tapped_axis_inside_a_differentiated_scan_fires_in_every_step():
    log = Log()
    boundary = AxisBoundary(tap=HostTap(log("it"), ordered=True))

    def loss(xs):
        def step(total, row):
            return total + execute_map_axis(lambda x: x * x, row, SafeMap(2), boundary).sum(), None

        return jax.lax.scan(step, 0.0, xs)[0]

    xs = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(xs), 2 * xs)
    assert log.seen == [("it", (i,), float(3 * row + i) ** 2) for row in range(2) for i in range(3)]


def test_an_axis_that_yields_nothing_refuses_derivatives_instead_of_losing_effects():
    boundary = AxisBoundary(sink=HostSink(lambda values, index: None))

    def loss(xs, strategy):
        execute_map_axis(lambda x: x * x, xs, strategy, boundary)
        return xs.sum()

    for strategy in (Vmap(), SafeMap(2), dedup([0, 1, 1])):
        with pytest.raises(ExecutorError, match="a HostSink lies in a function that is differentiated"):
            jax.grad(loss)(jnp.arange(3.0), strategy)


@pytest.mark.parametrize("strategy", [Vmap(), SafeMap(1), SafeMap(2), "dedup"])
def test_an_axis_that_yields_nothing_inside_a_differentiated_loop_is_refused(strategy):
    log = Log()
    strategy = dedup([0, 1, 0]) if strategy == "dedup" else strategy
    boundary = AxisBoundary(sink=HostSink(log("it"), ordered=True))

    def loss(w, fused=False):
        edge = AxisBoundary(sink=boundary.sink, fuse=jnp.sum) if fused else boundary

        def step(c, y):
            total = execute_map_axis(lambda x: x * y, jnp.array([0.0, 1.0, 0.0]), strategy, edge)
            return c * y + (total if fused else 0.0), None

        return jax.lax.scan(step, w, jnp.arange(1.0, 3.0))[0]

    for transformed in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
        with pytest.raises(ExecutorError, match=r"a HostSink lies in .*a loop that is.*fuse"):
            transformed(2.0)
    assert log.seen == []
    wanted = [("it", (i,), y * x) for y in (1.0, 2.0) for i, x in enumerate([0.0, 1.0, 0.0])]
    for call in (loss, jax.jit(loss), lambda w: jax.grad(loss)(w, fused=True)):  # a fuse whose result is used keeps it
        log.entries.clear()
        call(2.0)
        assert log.seen == wanted


def test_a_sunk_axis_is_never_stacked():
    n, batch, width = 512, 16, 256

    def temporaries(boundary):
        run = jax.jit(lambda xs: execute_map_axis(lambda x: jnp.full((width,), x), xs, SafeMap(batch), boundary))
        analysis = run.lower(jnp.zeros((n,))).compile().memory_analysis()
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes

    stacked = n * width * 4

    def ignore(values, index):
        return None

    assert temporaries(AxisBoundary(tap=HostTap(ignore, ordered=True))) >= stacked
    assert temporaries(AxisBoundary(sink=HostSink(ignore, ordered=True))) <= stacked / 8
