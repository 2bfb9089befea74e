"""What needs Equinox; imported when `filter_bounded_jit` is first called."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from xtrax.jit._budget import Counter, TraceLog
from xtrax.jit._wrapper import assemble


class _Counted(eqx.Module):
    """A function as a tree, so that Equinox traces the arrays in it, with its counter as the static part."""

    __wrapped__: Callable[..., Any]  # by this name Equinox finds the function's signature and name
    counter: Counter = eqx.field(static=True)  # compared by identity, which makes it the key of Equinox's cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.counter.run(self.__wrapped__, args, kwargs)


def filter_jit(function: Callable[..., Any], log: TraceLog, donate: Any) -> Any:
    """`equinox.filter_jit(function, donate=donate)`, with its traces entered in `log`."""

    def fresh() -> Any:
        return eqx.filter_jit(_Counted(function, Counter(function, log, any_output=True)), donate=donate)

    compiled = fresh()

    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return compiled(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        return compiled.lower(*args, **kwargs)

    def trace(*args: Any, **kwargs: Any) -> jax.stages.Traced:
        arrays, static = eqx.partition((args, kwargs), eqx.is_array)

        def arrays_only(arrays: Any) -> Any:
            args, kwargs = eqx.combine(arrays, static)
            return eqx.filter(compiled(*args, **kwargs), eqx.is_array)

        return jax.jit(arrays_only).trace(arrays)

    def eval_shape(*args: Any, **kwargs: Any) -> Any:
        return eqx.filter_eval_shape(compiled, *args, **kwargs)

    def clear_cache() -> None:
        nonlocal compiled
        compiled = fresh()

    return assemble(call, function, log, lower=lower, trace=trace, eval_shape=eval_shape, clear_cache=clear_cache)
