"""A chunked map whose chunks come out even."""

from collections.abc import Iterator

from tools.bench._map import ATOL, RTOL, lax_map, network, operands, tiled
from tools.bench.harness import Line, Row, compare_times, temp_bytes


def _measure() -> Iterator[Line]:
    args = operands(65_536)
    ours, peer = network(tiled), network(lax_map)
    times = compare_times(lambda: ours(*args), lambda: peer(*args), rtol=RTOL, atol=ATOL)
    yield Line("map-even/time", times.ratio, 1.02, detail=str(times))
    mine, other = temp_bytes(ours, *args), temp_bytes(peer, *args)
    yield Line("map-even/temp", mine / other, 1.0, detail=f"{mine} against {other} bytes")


ROW = Row("map-even", "tiled_vmap of an MLP over 65,536 rows, chunks of 1,024", "jax.lax.map with batch_size", _measure)
