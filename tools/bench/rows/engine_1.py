"""What the engine adds to single training steps."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from tools.bench._engine import compare, line
from tools.bench.harness import Line, Row


def _loop(step: Any, carry: Any, batches: Any) -> Callable[[], Any]:
    jitted = jax.jit(step)

    def run() -> Any:
        now, losses = carry, []
        for batch in batches:
            now, loss = jitted(now, batch)
            losses.append(loss)
        return now[0], np.asarray([float(loss) for loss in losses])

    return run


def _measure() -> Iterator[Line]:
    yield line("engine-1", compare(1, _loop), 1.10)


ROW = Row("engine-1", "Engine.fit_sync, 2,000 steps, one callback", "a jax.jit loop over partitioned arrays", _measure)
