"""Checkpoints: a state and how far its run is, on orbax."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from xtrax.training._checks import check_int
from xtrax.training._state import ResumableState, StateSpec

FORMAT_VERSION = 1
"""The version of the checkpoint format that this package writes, and the newest that it reads."""

_T = TypeVar("_T")


def get_checkpoint_manager(
    directory: str | Path, max_to_keep: int | None = 5, keep_period: int | None = None
) -> ocp.CheckpointManager:
    """An orbax manager for the checkpoints of one run.

    Saves are asynchronous and atomic: a checkpoint that was being written when the process was killed is ignored.
    Call `.close()`, or `.wait_until_finished()`, before the process ends.

    Args:
        directory: the folder, made if it does not exist.
        max_to_keep: how many of the latest to keep; None keeps all.
        keep_period: steps that this divides are kept besides.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `max_to_keep` or `keep_period` below 1.
        OSError: the folder cannot be made or read.

    Example:
        >>> import tempfile
        >>> from xtrax.training import get_checkpoint_manager
        >>> with get_checkpoint_manager(tempfile.mkdtemp()) as manager:
        ...     print(manager.latest_step())
        None
    """
    if not isinstance(directory, str | Path):
        raise TypeError(f"directory must be a path, got {directory!r} ({type(directory).__name__})")
    if max_to_keep is not None:
        check_int("max_to_keep", max_to_keep, at_least=1)
    if keep_period is not None:
        check_int("keep_period", keep_period, at_least=1)
    path = Path(directory).expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=max_to_keep, keep_period=keep_period)
    with _quiet_scan():
        return ocp.CheckpointManager(path, options=options, item_names=("state", "progress"))


def save_checkpoint(
    manager: ocp.CheckpointManager,
    state: ResumableState,
    step: int | None = None,
    *,
    progress: Mapping[str, Any] | None = None,
) -> None:
    """Saves a state, and how far its run is, as one checkpoint.

    The item `state` is a flat dict from leaf path (`.model.layers[0].weight`) to array, keys as their raw data. The
    item `progress` is JSON: `format_version`, `epoch`, `batches` (done in that epoch), `iterator` (the data iterator's
    state, or null) with `iterator_batches` (the batches done when it was taken), `metrics`, and `leaves` (path to dtype
    and shape).

    Args:
        manager: from `get_checkpoint_manager`.
        state: what to save; it is copied before this returns, so that its buffers may be reused.
        step: the number to save it under; by default `state.step`.
        progress: what `Engine` records; by default the start of epoch 0.

    Raises:
        TypeError: `state` is not a `ResumableState`, or `progress` cannot be written as JSON.
        ValueError: there is a checkpoint of this step or a later one.

    Example:
        >>> import equinox as eqx, jax, optax, tempfile
        >>> from xtrax.training import get_checkpoint_manager, init_state, load_checkpoint, save_checkpoint
        >>> state = init_state(eqx.nn.Linear(3, 1, key=jax.random.key(0)), optax.sgd(0.1), seed=0)
        >>> with get_checkpoint_manager(tempfile.mkdtemp()) as manager:
        ...     save_checkpoint(manager, state)
        ...     manager.wait_until_finished()
        ...     loaded = load_checkpoint(manager, state)
        >>> bool((loaded.model.weight == state.model.weight).all())
        True
    """
    if not isinstance(state, ResumableState):
        raise TypeError(f"state must be a ResumableState, got {type(state).__name__}")
    number = int(state.step) if step is None else check_int("step", step, at_least=0)
    latest = manager.latest_step()
    if latest is not None and number <= latest:
        raise ValueError(f"cannot save step {number} in {manager.directory}: the latest checkpoint there is {latest}")
    spec = StateSpec.of(state)
    named = dict(zip(spec.names, spec.arrays(state), strict=True))
    record = {"epoch": 0, "batches": 0, "iterator": None, "iterator_batches": 0, "metrics": {}}
    record |= dict(progress or {})
    record |= {"format_version": FORMAT_VERSION, "leaves": {name: _describe(leaf) for name, leaf in named.items()}}
    try:
        json.dumps(record)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the progress of a run must be JSON ({error}); a data iterator's get_state() must return "
            "dicts, lists, strings and numbers"
        ) from error
    # orbax cannot store arrays without elements; their shape says all.
    arrays = {name: _plain(leaf) for name, leaf in named.items() if leaf.size}
    args = ocp.args.Composite(state=ocp.args.StandardSave(arrays), progress=ocp.args.JsonSave(record))
    _outside_event_loop(lambda: manager.save(number, args=args, force=True))


def load_checkpoint(
    manager: ocp.CheckpointManager, state_template: ResumableState, step: int | None = None
) -> ResumableState:
    """Loads a state.

    Args:
        manager: from `get_checkpoint_manager`.
        state_template: a state of the same structure, shapes and dtypes, such as a freshly initialised one; arrays
            come back with its shardings, and what is not an array is taken from it.
        step: which checkpoint; by default the latest.

    Raises:
        FileNotFoundError: there is no checkpoint, or none of this step.
        ValueError: the checkpoint has another structure, shape or dtype (the message names the leaf), or a newer
            format.
    """
    if not isinstance(state_template, ResumableState):
        raise TypeError(f"state_template must be a ResumableState, got {type(state_template).__name__}")
    number = _existing_step(manager, step)
    record = load_progress(manager, number)
    spec = StateSpec.of(state_template)
    named = dict(zip(spec.names, spec.arrays(state_template), strict=True))
    _check_leaves(
        record["leaves"], {name: _describe(leaf) for name, leaf in named.items()}, manager.directory / str(number)
    )
    target = {name: _abstract(leaf) for name, leaf in named.items() if leaf.size}
    args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    loaded = _outside_event_loop(lambda: manager.restore(number, args=args))["state"]
    return spec.state([_like(loaded.get(name), leaf) for name, leaf in named.items()])


def load_progress(manager: ocp.CheckpointManager, step: int | None = None) -> dict[str, Any]:
    """How far the run of a checkpoint was: the item `progress`, as `save_checkpoint` describes it.

    Raises:
        FileNotFoundError: there is no checkpoint, or none of this step.
        ValueError: the checkpoint has a newer format.
    """
    number = _existing_step(manager, step)
    args = ocp.args.Composite(progress=ocp.args.JsonRestore())
    record = _outside_event_loop(lambda: manager.restore(number, args=args))["progress"]
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"the checkpoint {manager.directory / str(number)} has format version {version}, and this xtrax-train "
            f"reads version {FORMAT_VERSION}; install the version that wrote it"
        )
    return record


def _existing_step(manager: ocp.CheckpointManager, step: int | None) -> int:
    steps = sorted(manager.all_steps())
    if not steps:
        raise FileNotFoundError(f"no checkpoint in {manager.directory}")
    if step is None:
        return steps[-1]
    if check_int("step", step, at_least=0) not in steps:
        raise FileNotFoundError(f"no checkpoint of step {step} in {manager.directory}; there are {steps}")
    return step


def _check_leaves(saved: Mapping[str, list[Any]], wanted: Mapping[str, list[Any]], where: Any) -> None:
    faults = [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    faults += [f"{name} is in the checkpoint only" for name in saved if name not in wanted]
    for name, (dtype, shape) in wanted.items():
        if name in saved and saved[name] != [dtype, shape]:
            faults.append(
                f"{name} is {saved[name][0]}{saved[name][1]} in the checkpoint, {dtype}{shape} in the template"
            )
    if faults:
        more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise ValueError(
            f"the checkpoint {where} does not fit the state: {'; '.join(faults[:5])}{more}. Build the model and the "
            "optimizer as they were when it was saved"
        )


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> list[Any]:
    return [str(leaf.dtype), list(leaf.shape)]


def _plain(leaf: Any) -> jax.Array:
    if _is_key(leaf):
        return jnp.copy(jax.random.key_data(leaf))
    # orbax reads in the background, and on CPU it may read the very buffer that the next step is given to reuse.
    return jnp.array(leaf, copy=True)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else jnp.zeros(()).sharding
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _like(loaded: Any, leaf: Any) -> Any:
    if loaded is None:
        return jnp.zeros(leaf.shape, leaf.dtype) if not isinstance(leaf, np.ndarray) else leaf
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(loaded), impl=jax.random.key_impl(leaf))
    return loaded


def _outside_event_loop(function: Callable[[], _T]) -> _T:
    """Calls what runs an event loop of its own, which is not allowed inside a running one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@contextlib.contextmanager
def _quiet_scan() -> Generator[None]:
    """Silences what older orbax says, at a level above its own, of each folder that it looks at."""
    absl = logging.getLogger("absl")

    def unidentified(record: logging.LogRecord) -> bool:
        return "could not be identified as a" not in record.getMessage()

    absl.addFilter(unidentified)
    try:
        yield
    finally:
        absl.removeFilter(unidentified)
