"""What a reduction costs that never stacks what it reduces."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from tools.bench.harness import Line, Row, compare_times, temp_bytes
from xtrax.stages import AxisBoundary, execute_map_axis
from xtrax.tiling import SafeMap, reducers

_ROWS, _WIDTH, _BATCH = 1_000_000, 512, 1024


def _measure() -> Iterator[Line]:
    weights = jax.random.normal(jax.random.key(0), (16, _WIDTH))
    xs = jax.random.normal(jax.random.key(1), (_ROWS, 16))
    boundary = AxisBoundary(fuse=reducers.mean)

    def fn(x, weights):
        return jnp.tanh(x @ weights)

    @jax.jit
    def streamed(xs, weights):
        return execute_map_axis(lambda x: fn(x, weights), xs, SafeMap(_BATCH), boundary)

    @jax.jit
    def stacked(xs, weights):
        return jnp.mean(jax.lax.map(lambda x: fn(x, weights), xs, batch_size=_BATCH), axis=0)

    mine, other = temp_bytes(streamed, xs, weights), temp_bytes(stacked, xs, weights)
    yield Line("fuse-stream/temp", mine / other, 0.005, detail=f"{mine / 1e6:.3g} MB against {other / 1e6:.4g} MB")
    times = compare_times(lambda: streamed(xs, weights), lambda: stacked(xs, weights), repeats=7, rtol=1e-4, atol=1e-5)
    yield Line("fuse-stream/time", times.ratio, 0.75, detail=str(times))


ROW = Row(
    "fuse-stream",
    f"the mean over {_ROWS:,} rows of {_WIDTH} outputs, as a streamed fuse",
    "lax.map, then the mean",
    _measure,
)
