"""Counting the traces of one function, from inside it."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from xtrax.jit._context import in_trace
from xtrax.jit._difference import ADVICE, difference, distance
from xtrax.jit._errors import TraceBudgetExceededError
from xtrax.jit._signature import Signer, TraceSignature

# Held only to compare and append, once a trace; one lock for all keeps `TraceLog` free of unpicklable state.
_lock = threading.Lock()


class TraceLog:
    """The traces of one wrapped function, held against its budget."""

    def __init__(self, function: str, max_traces: int) -> None:
        self.function = function
        self.max_traces = max_traces
        self._signatures: list[TraceSignature] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy, such as one sent to another process, has traced nothing there.
        return TraceLog, (self.function, self.max_traces)

    def signatures(self) -> list[TraceSignature]:
        """The signatures traced so far, oldest first."""
        with _lock:
            return list(self._signatures)

    def admit(self, signature: TraceSignature) -> None:
        """Raise `TraceBudgetExceededError` if a trace of this signature would be one too many."""
        earlier = self.signatures()
        if len(earlier) >= self.max_traces:
            raise self._exceeded(signature, earlier)

    def record(self, signature: TraceSignature) -> None:
        """Count a finished trace, unless others that ran meanwhile (threads, recursion) have used up the budget."""
        with _lock:
            full = len(self._signatures) >= self.max_traces
            if not full:
                self._signatures.append(signature)
        if full:
            raise self._exceeded(signature, self.signatures())

    def _exceeded(self, signature: TraceSignature, earlier: list[TraceSignature]) -> TraceBudgetExceededError:
        if not earlier:
            return TraceBudgetExceededError(self.function, self.max_traces, advice=(ADVICE["none permitted"],))
        changes = [difference(before, signature) for before in earlier]
        # Of equally similar traces the latest is the one that the user has just seen work.
        nearest = min(reversed(range(len(earlier))), key=lambda i: distance(changes[i]))
        kinds = dict.fromkeys(change.kind for change in changes[nearest]) or {"nothing": None}
        return TraceBudgetExceededError(
            self.function,
            self.max_traces,
            nearest + 1,
            tuple(map(str, changes[nearest])),
            (*(ADVICE[kind] for kind in kinds), ADVICE["intended"]),
        )


class Counter:
    """Runs a function and enters each trace of it in a log."""

    def __init__(
        self,
        function: Callable[..., Any],
        log: TraceLog,
        static_argnames: tuple[str, ...] = (),
        *,
        any_output: bool = False,
    ) -> None:
        """Count in `log`, under the parameter names of `function`.

        Args:
            function: What the user wrapped.
            log: Where the traces are entered.
            static_argnames: Parameters whose values are static.
            any_output: Whether a result that is no JAX value is allowed, because the caller takes it out.
        """
        self._signer = Signer(log.function, function, static_argnames)
        self._log = log
        self._any_output = any_output

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, as the body of what JAX traces."""
        __tracebackhide__ = True
        # JAX runs a jitted function by value under `jax.disable_jit`, and to locate a NaN under `jax.debug_nans`.
        if jax.config.jax_disable_jit or not in_trace():
            return function(*args, **kwargs)
        signature = self._signer.sign(args, kwargs)
        self._log.admit(signature)
        output = function(*args, **kwargs)
        # JAX is about to refuse a result that is no JAX value, so that trace fails and is not counted.
        if self._any_output or all(map(_is_jax_value, jax.tree.leaves(output))):
            self._log.record(signature)
        return output


def _is_jax_value(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except (TypeError, OverflowError, ValueError):
        return False
    return True
