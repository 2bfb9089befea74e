"""What an ordered sink costs on an axis that is mapped in chunks."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.harness import Line, Row, compare_times
from xtrax.stages import AxisBoundary, HostSink, execute_map_axis
from xtrax.tiling import SafeMap

_ROWS, _BATCH, _WIDTH = 2048, 128, 512


def _measure() -> Iterator[Line]:
    first, second = (jax.random.normal(jax.random.key(i), (_WIDTH, _WIDTH)) / 20 for i in range(2))
    xs = jax.random.normal(jax.random.key(2), (_ROWS, _WIDTH))
    received: list[np.ndarray] = []
    boundary = AxisBoundary(sink=HostSink(lambda values, index: received.append(values), ordered=True))

    def fn(x):
        return jnp.tanh(jnp.tanh(x @ first) @ second)

    sunk = jax.jit(lambda xs: execute_map_axis(fn, xs, SafeMap(_BATCH), boundary))
    silent = jax.jit(lambda xs: execute_map_axis(fn, xs, SafeMap(_BATCH)))

    def with_sink() -> np.ndarray:
        received.clear()
        sunk(xs)
        jax.effects_barrier()
        return np.concatenate(received)

    times = compare_times(with_sink, lambda: np.asarray(silent(xs)), rtol=1e-5, atol=1e-6)
    yield Line("sink-ordered", times.ratio, 1.6, detail=str(times))


ROW = Row(
    "sink-ordered",
    f"{_ROWS} rows through two {_WIDTH}-wide layers, in chunks of {_BATCH}, into an ordered HostSink",
    "the same with no sink, its stacked results copied to numpy",
    _measure,
)
