"""Ctrl-C during `run_tiled`: what is raised, what is committed, and that nothing is left behind."""

import contextlib
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.run import SinkSpec, open_results, run_tiled, verify_store
from xtrax.run._appended import store as append_store
from xtrax.stages import AxisBoundary, HostTap
from xtrax.tiling import AxisSpec

pytestmark = [
    pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning"),
    pytest.mark.filterwarnings("ignore::xtrax.tiling.errors.RemainderWarning"),
]
N, TILE = 24, 4
VALUES = np.arange(N, dtype=np.float32)


class Pressing:
    """Rows at one of which Ctrl-C is pressed, while the main thread waits for them."""

    shape, dtype = VALUES.shape, VALUES.dtype

    def __init__(self, at, times=1):
        self.at, self.times, self.done = at, times, threading.Event()

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index.start == self.at:
            for _ in range(self.times):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.01)
            self.done.set()
        return VALUES[index]


def run(folder, x=VALUES, fn=lambda x: 2 * x, **options):
    return run_tiled(
        fn, x, specs=[AxisSpec("n", N, 2)], tile_size=TILE, sink=SinkSpec(folder), progress="off", **options
    )


def goes_on(folder, **options):
    """What is committed stays so, nothing of the first call still runs, and the second one ends it."""
    deadline = time.monotonic() + 5
    while names := [thread.name for thread in threading.enumerate() if thread.name.startswith("xtrax")]:
        assert time.monotonic() < deadline, names
        time.sleep(0.001)
    try:
        committed = verify_store(folder).committed
    except FileNotFoundError:
        committed = 0
    report = run(folder, **options)
    assert (report.tiles_skipped, report.tiles_done) == (committed, N // TILE - committed)
    np.testing.assert_array_equal(open_results(folder)["output"][:], 2 * VALUES)
    return committed


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 12, 20])
def test_while_a_tile_is_read(at, times, tmp_path):
    x = Pressing(at, times)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", x)
    while not x.done.is_set():
        with contextlib.suppress(KeyboardInterrupt):
            x.done.wait()
    assert goes_on(tmp_path / "out") <= at // TILE


def pressed(*_):
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.mark.parametrize("of", ["HostTap", "pure_callback"])
def test_in_a_host_function_it_is_a_keyboard_interrupt_and_the_tile_is_done(of, tmp_path):
    calls = []

    def press(values, *_):
        calls.append(None)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.05)
        return np.asarray(values)

    def fn(x):
        if of == "HostTap":
            return 2 * x
        return 2 * jax.pure_callback(press, jax.ShapeDtypeStruct((), jnp.float32), x, vmap_method="broadcast_all")

    options = {"fn": fn}
    if of == "HostTap":
        options["boundaries"] = [AxisBoundary(tap=HostTap(press))]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", **options)
    assert goes_on(tmp_path / "out", **options) >= 1


@pytest.mark.parametrize("step", ["FolderLock", "make_folder", "put_json", "write_json_atomic", "refuse_remains"])
def test_while_the_store_is_opened_or_made_or_ended(step, tmp_path, monkeypatch):
    """A lock that outlived the call would keep a notebook out of its own folder."""
    of_step, visits = getattr(append_store, step), []

    def pressing(*arguments, **options):
        visits.append(None)
        signal.raise_signal(signal.SIGINT)
        return of_step(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(append_store, step, pressing)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "out")
    assert visits
    goes_on(tmp_path / "out")


def test_at_any_moment(tmp_path):
    run(tmp_path / "warm")
    for i in range(20):
        folder, armed = tmp_path / str(i), threading.Event()
        presser = threading.Timer((i + 1) * 0.002, lambda armed=armed: armed.is_set() and pressed())
        armed.set()
        try:
            presser.start()
            run(folder)
            armed.clear()
            presser.join()
            time.sleep(0.001)
        except KeyboardInterrupt:  # in the run, or just after it
            presser.join()
        goes_on(folder)


def test_in_another_thread_and_with_a_handler_of_ones_own_nothing_is_changed(tmp_path):
    mine, seen = (lambda *_: seen.append(None)), []
    before = signal.signal(signal.SIGINT, mine)
    try:
        run(tmp_path / "mine", Pressing(8))
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) == 1
    thread = threading.Thread(target=run, args=(tmp_path / "thread",))
    thread.start()
    thread.join()
    assert verify_store(tmp_path / "thread").ok
    assert signal.getsignal(signal.SIGINT) is before
