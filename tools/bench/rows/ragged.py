"""What it gains to pad sequences to a few lengths."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.harness import Line, Row, check_equal
from xtrax.tiling import map_ragged, suggest_boundaries

_VOWELS = Path(__file__).parents[3] / "docs/examples/vowels/japanese_vowels.npz"
_WIDTH, _HEADS = 16, 2
_LONGEST = 2_048

Items = list[np.ndarray]
Run = Callable[[], Items]


def _measure() -> Iterator[Line]:
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield from _against("vowels", _vowels(), 2, 64, compiled, peer_repeats=7, to_max_goal=None)
    # Each of these peers takes minutes, and tens of times as long as the work: one run of each tells.
    yield from _against("long-tailed", _long_tailed(), 8, 16, compiled, peer_repeats=1, to_max_goal=0.5)


def _against(
    name: str,
    items: Items,
    buckets: int,
    batch_size: int,
    compiled: list[str],
    *,
    peer_repeats: int,
    to_max_goal: float | None,
) -> Iterator[Line]:
    layer = _layer(items[0].shape[1])
    boundaries = suggest_boundaries([len(item) for item in items], buckets)
    longest = (max(len(item) for item in items),)

    def run() -> Items:
        return map_ragged(_anew(layer), items, boundaries=boundaries, batch_size=batch_size)

    def per_length() -> Items:
        jitted = jax.jit(lambda x: layer(x, jnp.ones(len(x), bool)))
        return [np.asarray(jitted(item)) for item in items]

    def to_max() -> Items:
        return map_ragged(_anew(layer), items, boundaries=longest, batch_size=batch_size)

    peers: dict[str, tuple[Run, float]] = {"per length": (per_length, 0.35)}
    if to_max_goal is not None:
        peers["to max"] = (to_max, to_max_goal)
    expected, _ = _timed(run)
    before = len(compiled)
    _timed(run)
    compiles = len(compiled) - before
    times: dict[str, list[float]] = {key: [] for key in ("run", *peers)}
    for repeat in range(7):
        for key, work in [("run", run), *((key, peer) for key, (peer, _) in peers.items())]:
            if key == "run" or repeat < peer_repeats:
                got, seconds = _timed(work)
                times[key].append(seconds)
                check_equal(got, expected, rtol=1e-4, atol=1e-4)
    mine = statistics.median(times["run"])
    for key, (_, goal) in peers.items():
        other = statistics.median(times[key])
        yield Line(f"ragged/{name}/{key}", mine / other, goal, detail=f"{mine:.3g} s against {other:.3g} s")
    yield Line(f"ragged/{name}/compiles", compiles / len(boundaries), 1, detail=f"{compiles} for {boundaries}")


def _timed(run: Run) -> tuple[Items, float]:
    """What it returns and the seconds it takes, compiling included: it starts without programs."""
    jax.clear_caches()
    start = time.perf_counter()
    got = run()
    return got, time.perf_counter() - start


def _anew(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Another function, of which no program is kept."""
    return lambda x, mask: fn(x, mask)


def _layer(width: int) -> Callable[[Any, Any], Any]:
    """One layer of self-attention over the steps that there are."""
    rng = np.random.default_rng(0)
    inner = _WIDTH * _HEADS

    def weight(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((rows, columns)) / rows**0.5, jnp.float32)

    projections = [weight(width, inner) for _ in range(3)]
    out = weight(inner, width)

    def attend(x, mask):
        query, key, value = ((x @ projection).reshape(len(x), _HEADS, _WIDTH) for projection in projections)
        scores = jnp.einsum("ihd,jhd->hij", query, key) / _WIDTH**0.5
        scores = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return x + jnp.einsum("hij,jhd->ihd", scores, value).reshape(len(x), inner) @ out

    return attend


def _vowels() -> Items:
    with np.load(_VOWELS) as arrays:
        return [
            item.astype(np.float32)
            for part in ("train", "test")
            for item in np.split(arrays[f"{part}_values"], np.cumsum(arrays[f"{part}_lengths"])[:-1])
        ]


def _long_tailed() -> Items:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 1, 5_000), 8, _LONGEST).astype(int)
    lengths[0] = _LONGEST
    return [rng.standard_normal((length, 12), dtype=np.float32) for length in lengths]


ROW = Row(
    "ragged",
    "map_ragged of the vowel recordings, and of 5,000 log-normal lengths from 8 to 2,048, through one attention layer, "
    "compiles included",
    "jit for each length, and padding to the longest",
    _measure,
)
