"""Compiled functions and the log of their traces."""

from collections.abc import Callable
from typing import Any

import jax

from xtrax.jit._budget import TraceLog
from xtrax.jit._context import entered
from xtrax.jit._naming import present_as

_LOG = "_xtrax_trace_log"  # the attribute that holds the log; JAX's own function objects accept attributes


def attach(compiled: Any, log: TraceLog) -> None:
    """Let `log_of` find the log of a compiled function."""
    setattr(compiled, _LOG, log)


def log_of(wrapped: Any) -> TraceLog:
    """The log of a compiled function.

    Raises:
        TypeError: If it has none.
    """
    log = getattr(wrapped, _LOG, None)
    if not isinstance(log, TraceLog):
        raise TypeError(
            f"wrapped must be what bounded_jit, batched_jit or filter_bounded_jit returned, got {wrapped!r} of type "
            f"{type(wrapped).__name__}, whose traces nobody counts."
        )
    return log


def assemble(
    call: Callable[..., Any],
    function: Callable[..., Any],
    log: TraceLog,
    *,
    lower: Callable[..., Any],
    trace: Callable[..., Any],
    eval_shape: Callable[..., Any],
    clear_cache: Callable[[], None],
) -> Any:
    """Make a plain function, which also binds as a method does, look like a compiled one."""
    present_as(call, function)
    vars(call).update(lower=lower, trace=trace, eval_shape=eval_shape, clear_cache=clear_cache)
    attach(call, log)
    return call


def within_mesh(compiled: Any, mesh: jax.sharding.Mesh, function: Callable[..., Any], log: TraceLog) -> Any:
    """`compiled` with `mesh` entered around its calls and around every method that may trace."""

    def bind(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            with entered(mesh, log.function):
                return run(*args, **kwargs)

        return call

    return assemble(
        bind(compiled),
        function,
        log,
        lower=bind(compiled.lower),
        trace=bind(compiled.trace),
        eval_shape=bind(compiled.eval_shape),
        clear_cache=compiled.clear_cache,
    )
