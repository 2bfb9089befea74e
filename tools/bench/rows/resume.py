"""What resuming a half-done run costs beside the other half of the work."""

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from tools.bench._disk import alternate, seconds
from tools.bench.harness import Line, Row
from xtrax.run import SinkSpec, open_results, run_tiled
from xtrax.tiling import AxisSpec, BatchPlanner

_TILES, _ROWS, _WIDTH = 1000, 64, 256
_HALF = _TILES // 2


class _Half(Exception):
    """Half of the run is done."""


class _Stopping:
    """The rows, up to the middle."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: slice) -> np.ndarray:
        if index.stop > _HALF * _ROWS:
            raise _Half
        return self.x[index]


def _run(x: Any, folder: Path, **options: Any) -> Any:
    plan = BatchPlanner().plan([AxisSpec("row", len(x), _ROWS)])
    sink = SinkSpec(folder)
    return run_tiled(lambda x: jnp.tanh(x) * 2, x, plan=plan, tile_size=_ROWS, sink=sink, progress="off", **options)


def _measure() -> Iterator[Line]:
    warnings.simplefilter("ignore")
    x = np.random.default_rng(0).random((_TILES * _ROWS, _WIDTH), np.float32)
    half = Path(tempfile.mkdtemp()) / "half"
    try:
        with contextlib.suppress(_Half):
            _run(_Stopping(x), half)

        def resumed(folder: Path) -> float:
            shutil.copytree(half, folder / "out")
            report = []
            took = seconds(lambda: report.append(_run(x, folder / "out", resume="require")))
            if (report[0].tiles_skipped, report[0].tiles_done) != (_HALF, _TILES - _HALF):
                raise AssertionError(f"finished tiles were computed again: {report[0]}")
            return took

        def other_half(folder: Path) -> float:
            return seconds(lambda: _run(x[_HALF * _ROWS :], folder / "out"))

        both = Path(tempfile.mkdtemp())
        resumed(both / "resumed")
        other_half(both / "other")
        np.testing.assert_array_equal(
            open_results(both / "resumed" / "out")["output"][_HALF * _ROWS :],
            open_results(both / "other" / "out")["output"][:],
        )
        shutil.rmtree(both)
        times = alternate(resumed, other_half)
        yield Line("resume", times.ratio, 1.05, detail=str(times))
    finally:
        shutil.rmtree(half.parent)


ROW = Row("resume", "resuming a half-done run of 1,000 tiles", "doing the other half", _measure)
