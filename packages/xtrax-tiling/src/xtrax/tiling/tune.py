"""The fastest chunk size of a map, by measurement."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from xtrax.tiling._axes import resolve_axes
from xtrax.tiling._check import check_budget, check_callable, check_int
from xtrax.tiling._planner.memory import MemoryBudget
from xtrax.tiling._programs import Program, as_abstract
from xtrax.tiling._tuning.cache import keep, recall
from xtrax.tiling._tuning.measure import TunedBatchSize, search
from xtrax.tiling.iterator import SafeMapIterator

__all__ = ["TunedBatchSize", "tune_batch_size"]


def tune_batch_size(
    fn: Callable[..., Any],
    *args: Any,
    in_axes: Any = 0,
    budget: int | MemoryBudget | None = None,
    candidates: Sequence[int] | npt.NDArray[np.integer] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> TunedBatchSize:
    """The chunk size with which a map of `fn` runs fastest, timed on the device that would run it.

    Neither all at once nor any fixed size is best: a chunk that stays in cache can run twice as fast as `jax.vmap`, and
    too small a one pays for the loop. Up to six sizes are compiled, a coarse choice and two around the best of it, and
    the whole map is timed with each in turn, which takes a few seconds. The result is kept for the process, by the
    program (its StableHLO text), the kind of device, and the version of jax.

    Args:
        fn: a function of one element of each argument.
        *args: its arguments with all elements, pytrees of arrays or `jax.ShapeDtypeStruct`. Instead of the latter,
            random data is timed: standard normal floats, integers from 0 to 7; pass arrays where the time depends on
            the values.
        in_axes: the mapped axis of each argument, as of `jax.vmap`.
        budget: the most bytes that the program may take by the compiler's account, arguments and outputs included, or
            a `MemoryBudget`, whose bytes count; None for no limit.
        candidates: the sizes to time; one above the number of elements stands for all of them. None to choose them.
        cache: a folder to keep results in beyond the process; it is made where it does not exist. None for none.

    Returns:
        The size and the times.

    Raises:
        TypeError: an argument of the wrong type, or a leaf without shape and dtype.
        ValueError: no arguments or nothing mapped; candidates that are empty, repeated or below 1; a budget below 1;
            or values that are not known yet, inside a trace.
        BudgetInfeasibleError: no size that was tried fits the budget.

    Warns:
        RuntimeWarning: a file in `cache` that cannot be read or is no measurement, which is measured anew; or a folder
            that cannot be written to.

    >>> import jax.numpy as jnp
    >>> tuned = tune_batch_size(jnp.tanh, jax.ShapeDtypeStruct((64, 8), "float32"), candidates=[8, 64])
    >>> sorted(tuned.measurements), tuned.batch_size in tuned.measurements
    ([8, 64], True)
    """
    check_callable("fn", fn, "(*elements) -> outputs")
    limit = check_budget(budget)
    sizes = _check_candidates(candidates)
    folder = _check_cache(cache)
    if not args:
        raise ValueError("tune_batch_size needs the arguments of fn, with all elements, but got none.")
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((fn, args))):
        raise _inside_a_trace()
    abstract = as_abstract(args, "args")
    prefix = tuple(in_axes) if isinstance(in_axes, (list, tuple)) else in_axes
    # Made here, random data is no part of a trace that the caller may be in.
    with jax.ensure_compile_time_eval():
        data = tuple(jax.tree.map(_materialised, args))
    total = resolve_axes(data, prefix).size
    if total <= 1:
        return TunedBatchSize(1, {})

    def run_at(size: int) -> Callable[..., Any]:
        return lambda *xs: SafeMapIterator(size)(lambda element: fn(*element), xs, prefix)

    program = Program.of(run_at(total), abstract)
    if any(isinstance(const, Tracer) for const in program.consts):
        raise _inside_a_trace()
    device = jax.local_devices()[0]
    key = {
        "program": program.digest(),
        "device": f"{device.platform}: {device.device_kind}",
        "jax": jax.__version__,
        "budget": limit,
        "candidates": sizes,
    }
    found = recall(key, folder)
    if found is None:
        found = search(run_at, data, total, limit, sizes)
        keep(key, found, folder)
    return found


def _check_candidates(candidates: Any) -> list[int] | None:
    if candidates is None:
        return None
    if isinstance(candidates, str) or not isinstance(candidates, (Sequence, np.ndarray)):
        raise TypeError(f"candidates must be a sequence of integers, such as [64, 512], but is {candidates!r}.")
    sizes = [check_int(f"candidates[{i}]", size, 1) for i, size in enumerate(candidates)]
    if not sizes:
        raise ValueError("candidates is empty; give at least one size, or None to choose them.")
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"candidates must differ, but are {sizes}.")
    return sizes


def _check_cache(cache: Any) -> Path | None:
    if cache is None:
        return None
    if not isinstance(cache, (str, os.PathLike)) or not str(cache):
        raise TypeError(f"cache must be the path of a folder or None, but is {cache!r}.")
    return Path(cache)


def _inside_a_trace() -> ValueError:
    return ValueError(
        "the chunk size cannot be measured inside a trace, where arguments, or arrays that fn closes over, have no "
        "values yet; tune outside, and pass batch_size= the result."
    )


def _materialised(leaf: Any) -> Any:
    """The leaf itself, or random data of its shape and dtype."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    rng = np.random.default_rng(0)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _random_keys(leaf, rng)
    if jnp.issubdtype(leaf.dtype, np.bool_):
        data = rng.integers(0, 2, leaf.shape, np.int8)
    elif jnp.issubdtype(leaf.dtype, np.integer):
        data = rng.integers(0, 8, leaf.shape, np.int8)
    else:
        data = rng.standard_normal(leaf.shape, np.float32)
        if jnp.issubdtype(leaf.dtype, np.complexfloating):
            data = data + 1j * rng.standard_normal(leaf.shape, np.float32)
    return jax.device_put(data.astype(leaf.dtype))  # converted by numpy, since JAX would compile a program for it


def _random_keys(leaf: jax.ShapeDtypeStruct, rng: np.random.Generator) -> jax.Array:
    impls = []  # which implementation a dtype is of can only be asked of an array, or of a tracer

    def data_of(keys: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data = jax.eval_shape(data_of, leaf)
    return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, data.shape, np.uint32)), impl=impls[0])
