"""What a cached call costs."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from tools.bench.harness import Line, Row, compare_times
from xtrax.jit import bounded_jit


def _measure() -> Iterator[Line]:
    def increment(x):
        return x + 1.0

    x = jnp.float32(1)
    bounded, jitted = bounded_jit(increment, max_traces=1), jax.jit(increment)
    times = compare_times(lambda: bounded(x), lambda: jitted(x), repeats=15)
    yield Line("jit-call", times.ratio, 1.03, detail=str(times))


ROW = Row("jit-call", "a cached call of bounded_jit(f, max_traces=1), f trivial", "jax.jit(f)", _measure)
