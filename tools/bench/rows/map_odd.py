"""A chunked map whose chunks do not come out even.

`python tools/bench/rows/map_odd.py --netket` measures against netket's `vmap_chunked`, in an environment of its own.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_TOP = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(_TOP))  # as tools/bench/run.py does

from tools.bench._map import ATOL, BATCH, RTOL, lax_map, network, operands, tiled  # noqa: E402
from tools.bench.harness import Line, Row, compare_times, temp_bytes  # noqa: E402

_SIZE = 65_537


def _measure() -> Iterator[Line]:
    args = operands(_SIZE)
    ours, peer = network(tiled), network(lax_map)
    times = compare_times(lambda: ours(*args), lambda: peer(*args), rtol=RTOL, atol=ATOL)
    yield Line("map-odd/time", times.ratio, 0.98, detail=str(times))
    mine, other = temp_bytes(ours, *args), temp_bytes(peer, *args)
    yield Line("map-odd/temp", mine / other, 0.15, detail=f"{mine} against {other} bytes")


ROW = Row("map-odd", "tiled_vmap of an MLP over 65,537 rows, chunks of 1,024", "jax.lax.map with batch_size", _measure)


def _measure_netket() -> None:
    """Against netket, in the environment that has it."""
    from netket.jax import vmap_chunked  # only in an environment of its own  # ty: ignore[import-not-found]

    args = operands(_SIZE)
    ours, peer = network(tiled), network(lambda fn, x: vmap_chunked(fn, chunk_size=BATCH)(x))
    times = compare_times(lambda: ours(*args), lambda: peer(*args), rtol=RTOL, atol=ATOL)
    print(Line("map-odd/netket-time", times.ratio, 0.98), times, sep="\n    ")
    mine, other = temp_bytes(ours, *args), temp_bytes(peer, *args)
    print(Line("map-odd/netket-temp", mine / other, 1.0), f"{mine} against {other} bytes", sep="\n    ")


def _in_own_environment() -> int:
    with tempfile.TemporaryDirectory() as folder:
        python = str(Path(folder) / "bin" / "python")
        uv = [shutil.which("uv") or sys.exit("uv is not on the path; python3 -m pip install uv")]
        subprocess.run([*uv, "venv", "--quiet", "--clear", folder], check=True)
        packages = [str(_TOP / "packages" / name) for name in ("xtrax-jit", "xtrax-tiling")]
        subprocess.run([*uv, "pip", "install", "--quiet", "--python", python, "netket", *packages], check=True)
        # -P, since the rows beside this file would be found before the packages that they are named like.
        return subprocess.run([python, "-P", __file__, "--netket-here"], check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--netket", action="store_true", help="measure in a throw-away environment, made with uv")
    parser.add_argument("--netket-here", action="store_true", help="measure in this environment, which has netket")
    chosen = parser.parse_args()
    if chosen.netket_here:
        _measure_netket()
    elif chosen.netket:
        sys.exit(_in_own_environment())
    else:
        parser.error("give --netket, or run the row by tools/bench/run.py")
