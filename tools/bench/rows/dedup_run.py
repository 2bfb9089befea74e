"""What it gains to compute each distinct element once."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.harness import Line, Row, compare_times
from xtrax.tiling import AxisSpec, BatchPlanner, DedupGather, execute_plan, get_k_bucket
from xtrax.tiling.tiled import tiled_vmap

_ROWS, _DISTINCT, _BATCH = 100_000, 1_000, 1_024
_WIDTH, _HIDDEN = 64, 256
_STEPS = 80  # of the costly function; what a row of it takes is printed with --verbose


Work = Callable[[], Any]


def _measure() -> Iterator[Line]:
    rng = np.random.default_rng(0)
    first = jnp.asarray(rng.standard_normal((_WIDTH, _HIDDEN)) / 8, jnp.float32)
    second = jnp.asarray(rng.standard_normal((_HIDDEN, _WIDTH)) / 16, jnp.float32)
    distinct = rng.standard_normal((_DISTINCT, _WIDTH), dtype=np.float32)
    xs = distinct[rng.permutation(np.arange(_ROWS) % _DISTINCT)]

    def light(x):
        return jnp.tanh(x @ first) @ second

    def costly(x):
        return jax.lax.fori_loop(0, _STEPS, lambda _, y: light(y) + x, x)

    spec = AxisSpec("batch", _ROWS, _BATCH, dedup_eligible=True)

    def planned():
        plan = BatchPlanner().plan([spec], data={"batch": xs})
        assert isinstance(plan.decisions[0].strategy, DedupGather)
        return plan

    plan = planned()

    def light_work():
        return execute_plan(light, planned(), xs)

    def costly_work():
        return execute_plan(costly, plan, xs)

    for name, work, fn, goal in (
        ("light, finding included", light_work, light, 1.8),
        ("costly", costly_work, costly, 0.5 * _ROWS / get_k_bucket(_DISTINCT)),
    ):
        times = compare_times(work, _all_of_them(fn, xs), repeats=7, rtol=1e-4, atol=1e-5)
        detail = f"{times}; {times.peer / _ROWS * 1e6:.1f} us a row"
        yield Line(f"dedup-run/{name}", 1 / times.ratio, goal, at_least=True, detail=detail)


def _all_of_them(fn: Callable[[Any], Any], xs: np.ndarray) -> Work:
    mapped = jax.jit(tiled_vmap(fn, batch_size=_BATCH))
    return lambda: mapped(xs)


ROW = Row(
    "dedup-run",
    f"{_ROWS} rows of which {_DISTINCT} are distinct through an MLP, finding included, and through a costly function",
    "tiled_vmap over all rows, as often as much faster",
    _measure,
)
