"""Compute a plan over more rows than fit, tile by tile, into output that survives being killed."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax

from xtrax.run._tiled.interrupts import deferred_interrupts
from xtrax.run._tiled.local import run_tiles
from xtrax.run._tiled.report import RunReport, peak_memory
from xtrax.run._tiled.request import check_request
from xtrax.run._tiled.session import Session, open_session
from xtrax.run.sink import SinkSpec
from xtrax.run.zarr_sink import AppendedZarrSink
from xtrax.stages import AxisBoundary
from xtrax.tiling.plan import AxisSpec, BatchPlan

__all__ = ["RunReport", "run_tiled"]


def run_tiled(
    fn: Callable[..., Any] | None,
    *inputs: Any,
    plan: BatchPlan | None = None,
    specs: Sequence[AxisSpec] | None = None,
    axes: Sequence[Sequence[str] | None] | None = None,
    boundaries: Mapping[str, AxisBoundary | None] | Sequence[AxisBoundary | None] | None = None,
    tile_size: int | None = None,
    sink: SinkSpec | AppendedZarrSink | None = None,
    run_id: str | None = None,
    resume: Literal["auto", "never", "require"] = "auto",
    prefetch: int = 2,
    progress: Literal["auto", "off"] = "auto",
    client: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
    verify_inputs: bool = False,
) -> RunReport:
    """Run a function of one element over all axes of a plan, a tile of the outermost axis at a time.

    It computes what `xtrax.stages.execute_plan` does. The outermost axis is cut into tiles; each is read, computed and
    written while the next one is read and the last one written, so that no more than `prefetch + 2` tiles are in
    memory. There is one compiled program for each number of rows: that of a tile, and that of a shorter last one.

    **It survives being killed.** A tile is committed when its data are durable. The same call again skips what is
    committed, computes the rest, and leaves, byte for byte on a deterministic backend, the data of a run that was
    never stopped. Host effects of tiles that were not committed fire again; those of committed ones never do. On
    resuming, what is committed is read and compared with its digests: a damaged tile is computed again, with a warning
    in the log (`xtrax.run`), and its effects fire again. A run of something else is refused: another function, first
    carry, `index_map` or Reducer, or other inputs. Of these, shapes, dtypes and the digests of the first and the last
    committed tile are compared; a change between these tiles is noticed with `verify_inputs=True` alone. What a
    `jax.pure_callback`, `io_callback` or `HostTap` inside `fn` calls is not compared; a constant that it is handed as
    an operand is. Another jax, jaxlib, device or XLA_FLAGS is told by a warning, and refused if its program differs.

    The strategy of the outermost axis:

    - `Vmap` is cut anywhere, `SafeMap` by default into whole chunks;
    - `DedupGather`: a tile computes the distinct elements that occur in it, as many for every tile. The effects of a
      boundary fire for all elements; an `fn` with side effects of its own is refused;
    - `Scan`: the carry is committed with each tile;
    - with a `Reducer` as its fuse, the state of each tile is committed; the states are merged in the order of the tiles
      and finalized once. With a tap or sink and no other output, there are only commits.

    Args:
        fn: A function of one element of each input; with `key`, also of the keyword `key`. None stands for the
            elements.
        *inputs: Pytrees of numpy, JAX or Zarr arrays, or of objects with `__len__` and slices. Those with the outermost
            axis are read tile by tile, the others once. Where JAX has 32 bits (without `jax_enable_x64`), integers of
            64 bits that do not fit are refused when they are read, and floats that lose digits warn once an input.
        plan: How the axes are mapped; or
        specs: the axes, to be planned by `BatchPlanner`.
        axes: For each input, the names of its leading dimensions, as in `execute_plan`.
        boundaries: What happens at the edges of axes: `AxisBoundary` by axis name, or one (or None) for each axis.
        tile_size: Rows of a tile, which is a shard of the output. None: the multiple of the outermost chunk whose
            output is nearest to 64 MiB. A run that is resumed keeps its own.
        sink: Where the output goes: `SinkSpec(output_dir)`, or `AppendedZarrSink` to have it compressed. None: into
            `RunReport.outputs`. The outputs are arrays named by their path, `"loss"`, `"aux/loss"`, `"output"` for a
            single one; carries are `"carries/<axis>"`.
        run_id: The run, which `output_dir` holds alone. None: the sink's, or that of the run that is there, or a new
            one.
        resume: `"auto"` goes on with the run if it is there; `"never"` refuses one that has committed anything;
            `"require"` refuses to start one.
        prefetch: How many tiles are read ahead.
        progress: `"auto"`: a bar on a terminal, else a line a minute, on standard error; `"off"`: nothing.
        client: A `dask.distributed.Client`, on whose workers the tiles are computed (`xtrax-run[dask]`).
        mesh: Devices over which each tile is split, as in `execute_plan`.
        key: A PRNG key, as in `execute_plan`: an element's key does not depend on the tiles.
        verify_inputs: Whether the inputs of all committed tiles are read again on resuming, and compared with what was
            read then. False: those of the first and the last one.

    Returns:
        What was done.

    Raises:
        TypeError: An argument of the wrong kind, or an output that Zarr cannot hold.
        ValueError: An argument with a wrong value, an outermost axis that cannot be cut, an `fn` with side effects on
            a DedupGather axis, integers that JAX would wrap around, another run in `output_dir`, a run of another
            function or other inputs (the message says what differs), or no run where one is required.
        FileExistsError: `resume="never"`, and the run has committed tiles.
        DamagedRunError: What the run keeps of itself was changed or is lost, or a tile is damaged that only all tiles
            before it could replace.
        KeyboardInterrupt: For Ctrl-C, when the current tile is done; for the second one, at once.
        SinkError: The output cannot be written, or another live run writes there. What is committed is safe; the same
            call goes on from there. A finished run needs no writable disk, and is skipped.
        BaseException: What a host function or an input raises, with a note of the axis and element.

    Examples:
        >>> import tempfile, warnings, jax.numpy as jnp, numpy as np
        >>> from xtrax.run import SinkSpec, open_results, run_tiled
        >>> from xtrax.tiling import AxisSpec
        >>> folder = tempfile.mkdtemp()
        >>> def run():
        ...     with warnings.catch_warnings():
        ...         warnings.simplefilter("ignore")  # no git repository here
        ...         return run_tiled(
        ...             lambda x: {"norm": jnp.linalg.norm(x)}, np.ones((10, 4), np.float32),
        ...             specs=[AxisSpec("row", 10, default_batch_size=5)], tile_size=5,
        ...             sink=SinkSpec(folder, run_id="demo"), progress="off",
        ...         )
        >>> report = run()
        >>> report.tiles_done, report.tiles_skipped, open_results(folder)["norm"][:3].tolist()
        (2, 0, [2.0, 2.0, 2.0])
        >>> run().tiles_skipped
        2
    """
    begun = time.perf_counter()
    request = check_request(
        fn, inputs, plan=plan, specs=specs, axes=axes, boundaries=boundaries, tile_size=tile_size, sink=sink,
        run_id=run_id, resume=resume, prefetch=prefetch, progress=progress, client=client, mesh=mesh, key=key,
        verify_inputs=verify_inputs,
    )  # fmt: skip
    with deferred_interrupts() as interrupts, open_session(request, interrupts) as session:
        if client is not None:
            from xtrax.run._tiled.dask import run_on_workers  # needs an optional extra

            report = run_on_workers(session)
        else:
            report = run_tiles(session)
        outputs = finish(session)
    return dataclasses.replace(
        report,
        outputs=outputs,
        seconds_starting=report.seconds_starting - begun,
        seconds=time.perf_counter() - begun,
        peak_memory=peak_memory(),
    )


def finish(session: Session) -> Any:
    """Merge what tiles left for the end, and write it, or return all outputs if there is no sink."""
    work = session.request.work
    reduced, state = None, None
    if session.has_state:
        if work.reducer is not None:
            merge = jax.jit(work.reducer.merge)
            for state in session.states():
                part = state["reduced"]
                reduced = part if reduced is None else merge(reduced, part)
            if reduced is None:  # an axis without elements
                reduced = work.reducer.init(session.element)
            reduced = jax.jit(work.reducer.finalize)(reduced)
        state = session.last_state(state)
    return session.finalize(reduced, state)
