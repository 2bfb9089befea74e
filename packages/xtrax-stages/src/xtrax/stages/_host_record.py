"""What the calls of a host function did, and what it raised."""

import functools
import logging
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.core
from jax.extend.core import get_opaque_trace_state

from xtrax.stages._callback import io_callback
from xtrax.stages._errors import ExecutorError

_T = TypeVar("_T")

_jax_log = logging.getLogger(io_callback.__module__)
_changing_filters = threading.Lock()


class HostRun:
    """One outermost call of xtrax: how many rows its host functions took, and the first exception that one raised.

    Args:
        to_the_end: Whether the program runs to its end once a host function has raised, its later effects left out.
            Over several devices it must: the others would wait in a collective for the one that has failed, until XLA
            ends the process.
    """

    def __init__(self, to_the_end: bool = False) -> None:
        self.to_the_end = to_the_end
        self.thread = threading.get_ident()
        self.failure: BaseException | None = None
        self.fired: dict[int, int] = {}


class HostCallError(RuntimeError):
    """What JAX is told when a host function raised; the text says what and where.

    Attributes:
        run: The call of xtrax that will raise the exception itself; None in the user's own program.
    """

    def __init__(self, text: str, run: HostRun | None = None) -> None:
        super().__init__(text)
        self.run = run


class HostRecord:
    """The state of one host function: its calls never overlap, and stop once the run that they belong to has failed."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self.run: HostRun | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process, as in a copy, nothing has happened yet."""
        return HostRecord, (self._kind,)

    def call(self, hand_over: Callable[[Callable[[str], None]], None], rows: int) -> None:
        """Run `hand_over`, which says by its argument which element is next.

        Raises:
            HostCallError: If it raises, with its text and the element; or, in a run that has failed already. Neither
                in a run that goes on to its end.
        """
        where = [""]

        def report(element: str) -> None:
            where[0] = element

        with self._lock:
            run = self.run
            if run is not None and run.failure is not None:
                if run.to_the_end:
                    return
                raise HostCallError("not called, because a host function of this run has raised", run)
            try:
                hand_over(report)
            except BaseException as error:  # what stops the run is raised again, where the run was started
                note = f"raised by the function of a {self._kind}, at {where[0]}"
                error.add_note(note)
                if run is not None and run.failure is None:
                    run.failure = error
                if run is not None and run.to_the_end:
                    return
                # JAX passes on the text of what is raised here, and neither its notes nor its cause.
                raise HostCallError(f"{type(error).__name__}: {error} ({note})", run) from error
            if run is not None:
                run.fired[id(self)] = run.fired.get(id(self), 0) + rows


def run_watched(
    call: Callable[[], _T],
    records: Sequence[HostRecord],
    expected: Mapping[HostRecord, int] | None = None,
    *,
    several_devices: bool = False,
) -> _T:
    """Make an outermost call: wait for its effects, and raise what a host function raised.

    Args:
        call: What runs the program. It is not inside a trace.
        records: Those of the host functions that the program calls.
        expected: How many rows each must have taken at the end.
        several_devices: Whether the program runs on more than one.

    Returns:
        What `call` returns, ready.

    Raises:
        ExecutorError: If a host function took fewer or more rows than expected, or is in use by another thread.
        BaseException: Whatever a host function raised, with a note of the axis and element.
    """
    with _watch(records, HostRun(several_devices)) as (run, watched), _unlogged(run):
        try:
            result = jax.block_until_ready(call())
            jax.effects_barrier()
        except Exception:  # whatever JAX makes of what a host function raised, which is raised itself below
            if run.failure is None:
                raise
        if run.failure is not None:
            _settle()
            raise run.failure from None
        for record, rows in (expected or {}).items():
            if record not in watched:
                continue
            fired = run.fired.get(id(record), 0)
            if fired != rows:
                raise ExecutorError(
                    f"a host function took {fired} elements where {rows} were due: effects were lost or repeated. "
                    "JAX drops effects in loops that are differentiated; record in a separate forward pass."
                )
        return result


@contextmanager
def _watch(records: Sequence[HostRecord], run: HostRun) -> Generator[tuple[HostRun, list[HostRecord]], None, None]:
    """Watch these functions; those that a call around this one watches already are left to it."""
    mine: list[HostRecord] = []
    try:
        for record in dict.fromkeys(records):
            if record.run is None:
                record.run = run
                mine.append(record)
            elif record.run.thread != run.thread:
                raise ExecutorError(
                    "a HostTap or HostSink is in use by a call in another thread; give each its own, or wait"
                )
        yield run, mine
    finally:
        for record in mine:
            record.run = None


@contextmanager
def _unlogged(run: HostRun) -> Generator[None]:
    """Keep JAX from logging, with its traceback, what this run raises itself; all else is logged."""

    def is_logged(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, HostCallError) and error.run is run)

    # The list is replaced, not changed: other threads may be going through it.
    with _changing_filters:
        _jax_log.filters = [*_jax_log.filters, is_logged]
    try:
        yield
    finally:
        with _changing_filters:
            _jax_log.filters = [each for each in _jax_log.filters if each is not is_logged]


def _settle() -> None:
    """Wait until the effects of a failed program are over; they fail as it did."""
    try:
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError:
        # The barrier repeats the failure whose original exception is about to be raised.
        return


def outside_traces(*trees: Any) -> bool:
    """Whether a call with these arguments runs at once, instead of being part of a trace of the user's."""
    if get_opaque_trace_state(convention="flax") != _no_trace():
        return False  # such as an eager `jax.vmap`, whose lanes may come by closure
    return not any(isinstance(value, jax.core.Tracer) for value in jax.tree.leaves(trees))


@functools.cache
def _no_trace() -> Any:
    """The state of a new thread, which no trace has entered."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(get_opaque_trace_state, convention="flax").result()


def on_several_devices(*trees: Any) -> bool:
    """Whether an array among these lies on more than one device."""
    arrays = (leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array))
    return any(len(array.sharding.device_set) > 1 for array in arrays)
