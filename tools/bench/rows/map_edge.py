"""A chunked map of just more than one chunk."""

from collections.abc import Iterator

from tools.bench._map import ATOL, BATCH, RTOL, network, operands, tiled, vmap
from tools.bench.harness import Line, Row, compare_times


def _measure() -> Iterator[Line]:
    for name, size in (("B+1", BATCH + 1), ("2B-1", 2 * BATCH - 1)):
        args = operands(size)
        ours, peer = network(tiled), network(vmap)
        times = compare_times(
            lambda ours=ours, args=args: ours(*args), lambda peer=peer, args=args: peer(*args), rtol=RTOL, atol=ATOL
        )
        yield Line(f"map-edge/{name}", times.ratio, 1.15, detail=str(times))


ROW = Row("map-edge", "tiled_vmap of an MLP over B + 1 and 2B - 1 rows, chunks of B = 1,024", "jax.vmap", _measure)
