"""Change one element of a batch, and see whether others move."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_logger = logging.getLogger("xtrax.tiling")


def moved_output(
    run: Callable[..., Any], mapped: Sequence[Any], axes: Sequence[int], size: int, out_axes: Sequence[int | None]
) -> tuple[int, str] | None:
    """The first output leaf that shows elements to depend on one another, and how; None if none does.

    Args:
        run: the function of the mapped leaves.
        mapped: them, concrete.
        axes: where the batch lies in each.
        size: how many elements it has.
        out_axes: where it lies in each output leaf, or None where an output has no such axis.
    """
    if size < 2:
        return None
    compiled = jax.jit(run)
    before = jax.tree.leaves(compiled(*mapped))
    if any(isinstance(leaf, Tracer) for leaf in before):
        return None
    before = [_values(leaf) for leaf in before]
    again = [_values(leaf) for leaf in jax.tree.leaves(compiled(*mapped))]
    if any(_differs(a, b).any() for a, b in zip(before, again, strict=True)):
        return None  # what is not the same twice shows nothing when it moves
    for element in sorted({0, size // 2, size - 1}):
        for changed in _variants(mapped, axes, size, element):
            after = [_values(leaf) for leaf in jax.tree.leaves(compiled(*changed))]
            for leaf, (old, new, axis) in enumerate(zip(before, after, out_axes, strict=True)):
                if (where := _moved(old, new, axis, element)) is not None:
                    return leaf, f"changing element {element} of the inputs moved {where}"
    return _by_gradient(run, mapped, axes, size, out_axes)


def _variants(mapped: Sequence[Any], axes: Sequence[int], size: int, element: int) -> Iterator[list[Any]]:
    """The inputs with one element replaced by another one, which any domain allows, and with its numbers changed."""
    source = np.arange(size)
    source[element] = (element + 1) % size
    yield [jnp.take(jnp.asarray(leaf), source, axis=axis) for leaf, axis in zip(mapped, axes, strict=True)]

    def shaken(leaf: Any, axis: int) -> Any:
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        at = jnp.expand_dims(jnp.arange(size) == element, [i for i in range(leaf.ndim) if i != axis])
        return jnp.where(at, leaf * 1.25 + 0.25, leaf).astype(leaf.dtype)

    yield [shaken(leaf, axis) for leaf, axis in zip(mapped, axes, strict=True)]


def _values(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays differ, a NaN being equal to a NaN."""
    return ~((a == b) | ((a != a) & (b != b)))


def _moved(old: np.ndarray, new: np.ndarray, axis: int | None, element: int) -> str | None:
    """Which part of an output moved that should not have."""
    differs = _differs(old, new)
    if axis is None:
        return "an output without a batch axis" if differs.any() else None
    rows = np.moveaxis(differs, axis, 0).reshape(differs.shape[axis], -1).any(axis=1)
    rows[element : element + 1] = False
    return f"element {int(np.argmax(rows))}" if rows.any() else None


def _by_gradient(
    run: Callable[..., Any], mapped: Sequence[Any], axes: Sequence[int], size: int, out_axes: Sequence[int | None]
) -> tuple[int, str] | None:
    """Pull one element of one output back to the inputs: a dependence too weak for rounding still has a gradient."""
    inexact = [i for i, leaf in enumerate(mapped) if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.floating)]

    def of_inexact(*values: jax.Array) -> list[jax.Array]:
        given = list(mapped)
        for i, value in zip(inexact, values, strict=True):
            given[i] = value
        return jax.tree.leaves(run(*given))

    if not inexact:
        return None
    try:
        outs, pull = jax.vjp(jax.jit(of_inexact), *(jnp.asarray(mapped[i]) for i in inexact))
    except (TypeError, ValueError, NotImplementedError) as error:
        _logger.debug("no gradient to look at: %s", error)  # a function need not be differentiable to be independent
        return None
    for leaf, axis in enumerate(out_axes):
        if axis is None or not jnp.issubdtype(outs[leaf].dtype, jnp.floating) or outs[leaf].shape[axis] != size:
            continue
        for element in sorted({0, size - 1}):
            cotangents = [jnp.zeros_like(out) if jnp.issubdtype(out.dtype, jnp.inexact)
                          else np.zeros(out.shape, jax.dtypes.float0) for out in outs]  # fmt: skip
            at = (slice(None),) * axis + (element,)
            cotangents[leaf] = jnp.zeros_like(outs[leaf]).at[at].set(1)
            for i, gradient in zip(inexact, pull(cotangents), strict=True):
                rows = np.moveaxis(np.asarray(gradient), axes[i], 0).reshape(size, -1)
                weights = np.where(np.isfinite(rows.astype(np.float64)), rows.astype(np.float64), 0).any(axis=1)
                weights[element] = False
                if weights.any():
                    other = int(np.argmax(weights))
                    return leaf, f"element {element} has a gradient with respect to element {other} of the inputs"
    return None
