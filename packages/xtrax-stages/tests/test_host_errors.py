"""A host function that raises: the original where xtrax makes the call, its text where the user's program does."""

import copy
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.stages import (
    AxisBoundary,
    ExecutorError,
    HostSink,
    HostTap,
    execute_map_axis,
    execute_scan_axis,
    io_callback,
)
from xtrax.stages._host_record import run_watched
from xtrax.tiling import DedupSpec, SafeMap, Vmap


class DiskFull(Exception):
    pass


class Failing:
    """Keeps values, and raises at one of them until it is mended."""

    def __init__(self, at):
        self.at = at
        self.seen = []

    def __call__(self, value, index):
        if value == self.at:
            raise DiskFull(f"no space for {int(value)}")
        self.seen.append(int(value))


def square(x):
    return x * x


def run_safe_map(boundary):
    return execute_map_axis(square, jnp.arange(6), SafeMap(2), boundary)


def run_vmap(boundary):
    return execute_map_axis(square, jnp.arange(6), Vmap(), boundary)


def run_scan(boundary):
    return execute_scan_axis(lambda c, x: (c + x, x * x), 0, jnp.arange(6), boundary)


def run_dedup(boundary):
    spec = DedupSpec("batch", [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], k=6)
    return execute_map_axis(square, jnp.arange(6), spec.to_dedup_gather(), boundary)


RUNS = pytest.mark.parametrize("run", [run_safe_map, run_vmap, run_scan, run_dedup])


@RUNS
@pytest.mark.parametrize("role", ["tap", "sink"])
@pytest.mark.parametrize("ordered", [True, False])
def test_the_original_exception_with_its_element_and_nothing_after_it(run, role, ordered):
    host = Failing(at=9)
    effect = (HostTap if role == "tap" else HostSink)(host, ordered=ordered, batched=False)
    with pytest.raises(DiskFull, match="no space for 9") as caught:
        run(AxisBoundary(**{role: effect}))
    assert any("element 3" in note for note in caught.value.__notes__)
    assert caught.value.__traceback__ is not None
    assert [frame.name for frame in caught.traceback][-1] == "__call__"
    if ordered:
        assert host.seen == [0, 1, 4]
    assert 9 not in host.seen
    # Mended, the same effect runs: the failure belongs to the call that failed.
    host.seen.clear()
    host.at = None
    run(AxisBoundary(**{role: effect}))
    assert sorted(host.seen) == [0, 1, 4, 9, 16, 25]


def test_a_batched_function_is_told_by_its_rows():
    def fail(values, index):
        if 2 in index[:, 0]:
            raise DiskFull("no space")

    with pytest.raises(DiskFull) as caught:
        run_safe_map(AxisBoundary(sink=HostSink(fail, ordered=True)))
    assert any("element 2 to" in note and "element 3" in note for note in caught.value.__notes__)


def test_no_other_effect_of_the_boundary_runs_after_a_failure():
    host, after = Failing(at=1), []
    boundary = AxisBoundary(
        tap=HostTap(host, ordered=True, batched=False),
        sink=HostSink(lambda values, index: after.extend(values.tolist()), ordered=True),
    )
    with pytest.raises(DiskFull):
        run_safe_map(boundary)
    assert host.seen == [0]
    assert after == []


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError, MemoryError])
def test_any_exception_comes_back_as_itself(kind):
    def fail(values, index):
        raise kind("stop")

    with pytest.raises(kind, match="stop"):
        run_safe_map(AxisBoundary(sink=HostSink(fail, ordered=True)))


@pytest.mark.parametrize("ordered", [True, False])
def test_inside_the_user_s_program_jax_s_error_carries_the_text(ordered):
    host = Failing(at=9)
    boundary = AxisBoundary(sink=HostSink(host, ordered=ordered, batched=False))

    @jax.jit
    def program():
        return run_safe_map(boundary)

    def call():
        jax.block_until_ready(program())
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"DiskFull: no space for 9.*HostSink.*element 3"):
        call()
    assert 9 not in host.seen
    host.at = None
    host.seen.clear()
    call()
    assert sorted(host.seen) == [0, 1, 4, 9, 16, 25]


def test_called_directly_jax_s_error_names_the_lane():
    tap = HostTap(Failing(at=2), ordered=True, batched=False)

    def call():
        jax.block_until_ready(jax.vmap(tap)(jnp.arange(4)))
        jax.effects_barrier()

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"DiskFull: no space for 2.*HostTap.*lane 2"):
        call()


@RUNS
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_raised_is_not_logged_by_jax_too(run, ordered, caplog):
    logger = logging.getLogger("jax._src.callback")
    before = list(logger.filters)
    with pytest.raises(DiskFull):
        run(AxisBoundary(sink=HostSink(Failing(at=9), ordered=ordered, batched=False)))
    assert caplog.text == ""
    assert logger.filters == before


def waited_for(call):
    jax.block_until_ready(call())
    jax.effects_barrier()


def test_what_is_not_xtrax_s_is_logged_by_jax_as_ever(caplog):
    tap = HostTap(Failing(at=2), batched=False)

    def fail(value):
        raise DiskFull("a callback of the user's")

    def mapped(x):
        io_callback(fail, None, x)
        return x

    seen = AxisBoundary(sink=HostSink(lambda values, index: None))
    for call, text in (
        (lambda: jax.jit(tap)(2), "DiskFull: no space for 2"),  # xtrax does not make the outermost call
        (lambda: execute_map_axis(mapped, jnp.arange(3), Vmap(), seen), "DiskFull: a callback of the user's"),
    ):
        caplog.clear()
        with pytest.raises(jax.errors.JaxRuntimeError):
            waited_for(call)
        assert "jax.io_callback failed" in caplog.text
        assert text in caplog.text


def test_runs_in_several_threads_each_keep_their_own_out_of_the_log(caplog):
    logger = logging.getLogger("jax._src.callback")
    before, together = list(logger.filters), threading.Barrier(4, timeout=30)

    def fail(values, index):
        raise DiskFull("no space")

    def attempt(number):
        together.wait()
        with pytest.raises(DiskFull):
            run_vmap(AxisBoundary(sink=HostSink(fail)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(attempt, range(4)))
    assert caplog.text == ""
    assert logger.filters == before


def test_an_exception_of_the_mapped_function_is_not_taken_for_one_of_the_host():
    def broken(x):
        raise DiskFull("in the trace")

    boundary = AxisBoundary(sink=HostSink(lambda values, index: None))
    with pytest.raises(DiskFull, match="in the trace"):
        execute_map_axis(broken, jnp.arange(3), SafeMap(2), boundary)
    run_safe_map(boundary)


def test_effects_are_over_when_the_call_returns():
    seen = []

    def slow(values, index):
        threading.Event().wait(0.02)
        seen.extend(values.tolist())

    for ordered in (True, False):
        seen.clear()
        run_safe_map(AxisBoundary(sink=HostSink(slow, ordered=ordered)))
        assert sorted(seen) == [0, 1, 4, 9, 16, 25]


def test_an_effect_in_use_by_another_thread_is_refused():
    entered, leave = threading.Event(), threading.Event()

    def hold(values, index):
        entered.set()
        assert leave.wait(30)

    boundary = AxisBoundary(sink=HostSink(hold, ordered=True))
    thread = threading.Thread(target=run_vmap, args=(boundary,))
    thread.start()
    try:
        assert entered.wait(30)
        with pytest.raises(ExecutorError, match="in use by a call in another thread"):
            run_vmap(boundary)
    finally:
        leave.set()
        thread.join()


def note(values, index):
    """At the top of a module, so that it can be pickled."""


@pytest.mark.parametrize("kind", [HostTap, HostSink])
def test_effects_travel_to_other_processes(kind):
    effect = kind(note, ordered=True, batched=False)
    for twin in (pickle.loads(pickle.dumps(effect)), copy.deepcopy(effect)):
        assert type(twin) is kind
        assert (twin.fn, twin.ordered, twin.batched) == (note, True, False)
        assert twin.record is not effect.record


def test_effects_that_are_lost_are_counted():
    seen = []
    sink = HostSink(lambda values, index: seen.append(index))

    def lossy():
        sink(jnp.float32(0))
        return jnp.zeros(())

    assert run_watched(lossy, [sink.record], {sink.record: 1}) == 0
    with pytest.raises(ExecutorError, match="took 1 elements where 2 were due"):
        run_watched(lossy, [sink.record], {sink.record: 2})
    assert len(seen) == 2


def test_calls_of_one_function_never_overlap():
    inside, most = [0], [0]

    def enter(values, index):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        threading.Event().wait(0.005)
        inside[0] -= 1

    tap = HostTap(enter)
    run = jax.jit(lambda x: [tap(x + i) for i in range(8)])
    jax.block_until_ready(run(np.float32(0)))
    jax.effects_barrier()
    assert most == [1]
