"""A run whose computing and writing take as long, against the longer of the two alone."""

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.harness import Line, Row

_TILES, _ROWS, _WIDTH = 12, 512, 16384  # 32 MiB a tile


def _measure() -> Iterator[Line]:
    # XLA reads its flags once, before its first use: a process of its own holds it to one thread.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    code = "import json; from tools.bench.rows import sink_overlap; print(json.dumps(sink_overlap.in_this_process()))"
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": flags}, cwd=root, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    detail = f"{found['both']:.2f} s; computing alone {found['compute']:.2f} s, writing alone {found['write']:.2f} s"
    yield Line("sink-overlap", found["ratio"], 1.3, detail=detail)


def in_this_process() -> dict[str, Any]:
    """Measure computing alone, writing alone, and both."""
    import statistics

    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    from tools.bench._disk import once, seconds
    from xtrax.run import SinkSpec, run_tiled
    from xtrax.run._appended.shards import ArraySpec, TileData
    from xtrax.run._appended.store import AppendStore
    from xtrax.run._tiled.writer import TileWriter
    from xtrax.tiling import AxisSpec, BatchPlanner

    warnings.simplefilter("ignore")
    rows = _TILES * _ROWS
    x = np.linspace(0, 1, rows, dtype=np.float32)
    plan = BatchPlanner().plan([AxisSpec("row", rows, 8)])
    spec = ArraySpec("output", (_WIDTH,), "float32", _ROWS, ("row", None))
    tile = np.random.default_rng(0).random((_ROWS, _WIDTH), np.float32)

    def fn(steps: int) -> Any:
        def of_row(start: Any) -> Any:
            row = start + jnp.linspace(0, 1, _WIDTH, dtype=jnp.float32)
            return lax.fori_loop(0, steps, lambda _, y: jnp.sin(y) + y * 0.5, row)

        return of_row

    def write(folder: Path) -> float:
        def stream() -> None:
            store = AppendStore(folder / "out")
            store.create({"run_id": "bench", "rows": rows, "tile_rows": _ROWS}, [spec], {})
            writer = TileWriter(store, lambda tiles: None, lambda: None)
            for i in range(_TILES):
                writer.submit(functools.partial(TileData, i, {"output": tile}, None, {}))
            writer.end()
            writer.join()
            writer.check()
            store.finalize({})
            store.close()

        return seconds(stream)

    def compute(steps: int) -> float:
        return run_tiled(fn(steps), x, plan=plan, tile_size=_ROWS, progress="off").seconds_computing

    once(write)
    wanted = statistics.median(once(write) for _ in range(3))
    probe = compute(8)
    steps = max(1, round(8 * wanted / probe))

    def both(folder: Path) -> float:
        report = run_tiled(fn(steps), x, plan=plan, tile_size=_ROWS, sink=SinkSpec(folder / "out"), progress="off")
        return report.seconds - report.seconds_starting  # compiling is on neither side

    measures = []
    for _ in range(7):
        alone = (compute(steps), once(write))
        measures.append((once(both), *alone))
    medians = [statistics.median(column) for column in zip(*measures, strict=True)]
    ratio = statistics.median(b / max(c, w) for b, c, w in measures)
    return {"both": medians[0], "compute": medians[1], "write": medians[2], "ratio": ratio}


ROW = Row("sink-overlap", "computing on one thread and writing as long", "the longer of the two alone", _measure)
