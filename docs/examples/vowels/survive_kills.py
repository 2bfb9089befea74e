"""Embed 100,000 recordings in a run that is killed twice and loses nothing.

    python docs/examples/vowels/survive_kills.py [FOLDER]

The recordings lie in a Zarr store, the embeddings go to another, a shard for each tile. The run is a process of its
own; this one kills it twice by SIGKILL, in the middle of its work, and starts it again. FOLDER keeps what was written;
without it all lies in a temporary folder.
"""

import argparse
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import zarr
from vowels import DATA, Classifier, read

from xtrax.run import SinkSpec, open_results, run_tiled, verify_store, zarr_content_digest
from xtrax.tiling import AxisSpec

RECORDINGS = 100_000
STEPS = 32
TILE = 2_000
KILLS = (15, 30)  # as soon as so many of the 50 tiles are committed


def main() -> None:
    """Write the input, run with and without kills, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        embed(arguments.folder, arguments.run)
    elif arguments.folder:
        demonstrate(arguments.folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            demonstrate(Path(folder))


def demonstrate(folder: Path) -> None:
    """Run it twice: killed and taken up again, and in one go."""
    write_input(folder)
    output, whole = folder / "embeddings", folder / "uninterrupted"
    command = [sys.executable, __file__, str(folder), "--run"]

    for kill_at in KILLS:
        process = subprocess.Popen([*command, output])
        while process.poll() is None and committed(output) < kill_at:
            time.sleep(0.01)
        process.kill()
        process.wait()
        print(f"killed: {committed(output)} of {RECORDINGS // TILE} tiles are committed\n")
        print(verify_store(output), end="\n\n")
    subprocess.run([*command, output], check=True)
    subprocess.run([*command, whole], check=True)

    report = verify_store(output)
    print(report)
    assert report.ok, "a committed tile was lost"
    assert report.finished, "the run did not end"
    digest, expected = zarr_content_digest(output), zarr_content_digest(whole)
    print(f"killed twice:  {digest}\nuninterrupted: {expected}")
    assert digest == expected, "the outputs differ"
    embeddings = open_results(output)["output"]
    print(f"{embeddings.shape} {embeddings.dtype}, in shards of {embeddings.shards}")


def embed(folder: Path, output: Path) -> None:
    """The run itself: the same call whether it begins or goes on."""
    logging.basicConfig(format="%(message)s")
    store = zarr.open_group(folder / "recordings.zarr", mode="r")
    model = Classifier(hidden=64, key=jax.random.key(0))
    specs = [AxisSpec("recording", RECORDINGS, default_batch_size=200)]
    before = committed(output)
    report = run_tiled(
        embedding(model),
        {"values": store["values"], "mask": store["mask"]},
        specs=specs,
        tile_size=TILE,
        sink=SinkSpec(output),
    )
    print(report, flush=True)
    assert report.tiles_skipped == before, "a committed tile was computed again"


def embedding(model: Classifier) -> Any:
    """The function of one recording: the pooled features of the model, `(128,)`."""
    pooled = eqx.tree_at(lambda m: m.out, model, eqx.nn.Identity())
    return lambda recording: pooled(recording)


def committed(output: Path) -> int:
    """How many tiles are safe, as another process sees it."""
    try:
        return open_results(output).state["committed"]
    except FileNotFoundError:  # nothing has begun
        return 0


def write_input(folder: Path) -> None:
    """The recordings of the data, over and over, normalised and padded: `values` and `mask` of a Zarr group."""
    train, test = read(DATA)
    steps = np.concatenate(train.values)
    distinct = [(x - steps.mean(axis=0)) / steps.std(axis=0) for x in (*train.values, *test.values)]
    values = np.zeros((len(distinct), STEPS, 12), np.float32)
    for row, x in zip(values, distinct, strict=True):
        row[: len(x)] = x
    lengths = np.array([len(x) for x in distinct])
    store = zarr.open_group(folder / "recordings.zarr", mode="w")
    which = np.arange(RECORDINGS) % len(distinct)
    store.create_array("values", data=values[which], chunks=(TILE, STEPS, 12), compressors=None)
    store.create_array("mask", data=np.arange(STEPS) < lengths[which, None], chunks=(TILE, STEPS), compressors=None)


if __name__ == "__main__":
    main()
