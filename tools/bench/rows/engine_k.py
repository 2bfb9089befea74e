"""What the engine adds to training steps that are compiled 50 at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tools.bench._engine import compare, line
from tools.bench.harness import Line, Row

K = 50


def _fused(step: Any, carry: Any, batches: Any) -> Callable[[], Any]:
    scan = jax.jit(lambda carry, stacked: jax.lax.scan(step, carry, stacked))

    def run() -> Any:
        now, losses = carry, []
        for start in range(0, len(batches), K):
            group = batches[start : start + K]
            now, loss = scan(now, {name: np.stack([batch[name] for batch in group]) for name in group[0]})
            losses.append(loss)
        return now[0], np.concatenate(losses, dtype="float64")

    return run


def _measure() -> Iterator[Line]:
    yield line("engine-k", compare(K, _fused), 1.15)


ROW = Row("engine-k", "Engine.fit_sync, 2,000 steps, 50 a call, one callback", "a hand-fused lax.scan", _measure)
