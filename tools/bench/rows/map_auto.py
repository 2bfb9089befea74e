"""How good the chunk size is that `tune_batch_size` finds."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tools.bench.harness import Line, Row, check_equal
from xtrax.tiling import tiled_vmap, tune_batch_size

_ROUNDS = 9


def _attention(x: jax.Array) -> jax.Array:
    """Self-attention over 256 tokens of 32 features, without projections."""
    return jax.nn.softmax(x @ x.T / 32**0.5) @ x


def _measure() -> Iterator[Line]:
    keys = jax.random.split(jax.random.key(0), 4)
    first, second = jax.random.normal(keys[0], (64, 256)) / 8, jax.random.normal(keys[1], (256, 64)) / 16
    yield from _lines("mlp", lambda x: jnp.tanh(jnp.tanh(x @ first) @ second), jax.random.normal(keys[2], (65_536, 64)))
    yield from _lines("attention", _attention, jax.random.normal(keys[3], (1024, 256, 32)))


def _lines(name: str, fn: Callable[..., Any], xs: jax.Array) -> Iterator[Line]:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    try:
        tuned = tune_batch_size(fn, xs)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    took = time.perf_counter() - start
    sizes = [2**k for k in range(xs.shape[0].bit_length())]
    programs = {size: tiled_vmap(fn, batch_size=size) for size in {*sizes, tuned.batch_size}}
    expected = programs[xs.shape[0]](xs)
    least = dict.fromkeys(programs, float("inf"))
    for program in programs.values():
        check_equal(program(xs), expected, rtol=1e-4, atol=1e-5)
    for turn in range(_ROUNDS):
        for size in sorted(programs, reverse=bool(turn % 2)):
            begin = time.perf_counter()
            jax.block_until_ready(programs[size](xs))
            least[size] = min(least[size], time.perf_counter() - begin)
    best = min(sizes, key=lambda size: least[size])
    detail = (
        f"{tuned.batch_size} takes {least[tuned.batch_size] * 1e3:.3g} ms, the best power of two, {best}, "
        f"{least[best] * 1e3:.3g} ms, all at once {least[xs.shape[0]] * 1e3:.3g} ms; tuning took {took:.1f} s"
    )
    yield Line(f"map-auto/{name}", least[best] / least[tuned.batch_size], 0.85, at_least=True, detail=detail)
    yield Line(f"map-auto/{name}-compiles", len(compiled), 6, detail=f"{sorted(tuned.measurements)}")


ROW = Row(
    "map-auto",
    "throughput with the chunk size that tune_batch_size finds, tuning time apart",
    "the best of all powers of two, by exhaustive search",
    _measure,
)
