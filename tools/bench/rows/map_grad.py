"""The gradient of a chunked map that computes each chunk anew."""

from collections.abc import Iterator

import jax.numpy as jnp

from tools.bench._map import ATOL, BATCH, RTOL, gradient, lax_map_checkpoint, operands, tiled_remat, vmap
from tools.bench.harness import Line, Row, compare_times, temp_bytes


def _measure() -> Iterator[Line]:
    for name, size in (("even", 65_536), ("odd", 65_537)):
        args = operands(size)
        ours, all_at_once = gradient(tiled_remat, jnp.sum), gradient(vmap, jnp.sum)
        for label, peer, goal in (("vmap", all_at_once, 0.85), ("lax.map", gradient(lax_map_checkpoint, jnp.sum), 1.0)):
            # The gradients of weights are sums over all rows, some near zero by cancellation.
            times = compare_times(
                lambda ours=ours, args=args: ours(*args),
                lambda peer=peer, args=args: peer(*args),
                rtol=RTOL,
                atol=ATOL * size**0.5,
            )
            yield Line(f"map-grad/{name}-time-{label}", times.ratio, goal, detail=str(times))
        mine, other = temp_bytes(ours, *args), temp_bytes(all_at_once, *args)
        yield Line(f"map-grad/{name}-temp", mine / other, 0.03, detail=f"{mine} against {other} bytes")
        # A loss that needs the outputs keeps them and their cotangents, 64 numbers a row each, and one chunk.
        needed = temp_bytes(gradient(tiled_remat, lambda y: jnp.sum(y**2)), *args)
        bound = 2 * 4 * 64 * size + 0.03 * other
        yield Line(
            f"map-grad/{name}-temp-outputs", needed / bound, 1.0, detail=f"{needed} of {bound:.0f} bytes, B = {BATCH}"
        )


ROW = Row(
    "map-grad",
    "the gradient of a sum through tiled_vmap(remat=True), by rows and weights",
    "jax.grad of vmap, and of lax.map over jax.checkpoint",
    _measure,
)
