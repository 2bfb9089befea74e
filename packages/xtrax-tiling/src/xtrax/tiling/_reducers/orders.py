"""States of the reducers that compare: extremes, argmax, the k largest and histograms, over one leaf's leading axis.

They have the three methods that `sums` describes. Positions count the elements that are not masked, and are
relative to the stretch that a state stands for, so `merged` moves those of the later one.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xtrax.tiling._reducers.sums import count_of, only


def _limit(dtype: Any, greatest: bool) -> Any:
    """The greatest or the least value of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf if greatest else -np.inf, dtype)
    if dtype == jnp.bool_:
        return np.asarray(greatest)
    return np.asarray(jnp.iinfo(dtype).max if greatest else jnp.iinfo(dtype).min, dtype)


def _is_nan(values: jax.Array) -> jax.Array:
    return values != values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extreme:
    """The greatest or the least value; NaN once there was one.

    `ties` is how many elements are equal to it, so that they share its derivative equally however they were cut into
    chunks, as in `jnp.max` of them all; None where there are no derivatives.
    """

    value: jax.Array
    ties: jax.Array | None
    greatest: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array, mask: Any, greatest: bool) -> "Extreme":
        """The extreme of a chunk."""
        if not jnp.issubdtype(values.dtype, jnp.floating):
            return cls(_extreme(values, mask, greatest), None, greatest)
        value = _chunk_extreme(values, mask, greatest)
        return cls(value, jnp.sum(only(mask, values == value, False), axis=0, dtype=int), greatest)

    def merged(self, other: "Extreme") -> "Extreme":
        """The more extreme of two."""
        pick = jnp.maximum if self.greatest else jnp.minimum
        if self.ties is None or other.ties is None:
            return Extreme(pick(self.value, other.value), None, self.greatest)
        value = _more_extreme(self.value, other.value, self.ties, other.ties, self.greatest)
        ties = jnp.where(self.value == value, self.ties, 0) + jnp.where(other.value == value, other.ties, 0)
        return Extreme(value, ties, self.greatest)

    def result(self) -> jax.Array:
        """The extreme; the least extreme value of the dtype if all elements were masked."""
        return self.value


def _extreme(values: jax.Array, mask: Any, greatest: bool) -> jax.Array:
    worst = _limit(values.dtype, not greatest)
    reduction = jnp.max if greatest else jnp.min
    return reduction(only(mask, values, worst), axis=0, initial=worst)


_chunk_extreme = jax.custom_jvp(_extreme, nondiff_argnums=(2,))


@_chunk_extreme.defjvp
def _chunk_extreme_jvp(greatest: bool, primals: Any, tangents: Any) -> Any:
    values, mask = primals
    value = _chunk_extreme(values, mask, greatest)
    equal = only(mask, values == value, False)
    share = _share(value, jnp.sum(equal, axis=0, dtype=int))
    return value, jnp.sum(tangents[0] * share(equal), axis=0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
def _more_extreme(a: jax.Array, b: jax.Array, a_ties: jax.Array, b_ties: jax.Array, greatest: bool) -> jax.Array:
    return (jnp.maximum if greatest else jnp.minimum)(a, b)


@_more_extreme.defjvp
def _more_extreme_jvp(greatest: bool, primals: Any, tangents: Any) -> Any:
    a, b, a_ties, b_ties = primals
    value = _more_extreme(a, b, a_ties, b_ties, greatest)
    a_ties, b_ties = jnp.where(a == value, a_ties, 0), jnp.where(b == value, b_ties, 0)
    share = _share(value, a_ties + b_ties)
    return value, tangents[0] * share(a_ties) + tangents[1] * share(b_ties)


def _share(value: jax.Array, ties: jax.Array) -> Callable[[Any], jax.Array]:
    """What part of the derivative some of the ties have; NaN of NaN, which nothing is equal to, as in `jnp.max`."""
    wide = jnp.promote_types(value.dtype, jnp.float32)  # half precision cannot count
    divisor = jnp.where(_is_nan(value), value.astype(wide), jnp.maximum(ties, 1).astype(wide))
    return lambda some: (jnp.asarray(some, wide) / divisor).astype(value.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArgMax:
    """The greatest value, its first position (-1: none yet), and the number of elements."""

    value: jax.Array
    index: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: Any) -> "ArgMax":
        """The first greatest value of a chunk."""
        size = values.shape[0]
        least = _limit(values.dtype, greatest=False)
        value = jnp.max(only(mask, values, least), axis=0, initial=least)
        positions = jnp.arange(size) if mask is None else jnp.cumsum(mask, dtype=int) - 1
        positions = positions.reshape((size,) + (1,) * (values.ndim - 1))
        # NaN is the maximum, and so compares equal to it here.
        equal = only(mask, (values == value) | (_is_nan(values) & _is_nan(value)), False)
        index = jnp.min(jnp.where(equal, positions, size), axis=0, initial=size)
        return cls(value, jnp.where(index == size, -1, index), count_of(values, mask))

    def merged(self, other: "ArgMax") -> "ArgMax":
        """The earlier one of two equal values."""
        greater = (other.value > self.value) | (_is_nan(other.value) & ~_is_nan(self.value))
        later = (other.index >= 0) & ((self.index < 0) | (greater & ~_is_nan(self.value)))
        return ArgMax(
            jnp.where(later, other.value, self.value),
            jnp.where(later, other.index + self.count, self.index),
            self.count + other.count,
        )

    def result(self) -> jax.Array:
        """The position; -1 if all elements were masked."""
        return self.index


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """The `k` greatest values, greatest first, their positions (-1: fewer than `k` yet), and the number of elements."""

    values: jax.Array
    indices: jax.Array
    count: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: Any, k: int) -> "TopK":
        """The greatest values of a chunk."""
        count = count_of(values, mask)
        if mask is not None:  # What is masked goes last, so that ranks among the others are positions.
            values = jnp.take(values, jnp.argsort(~mask, stable=True), axis=0)
        if values.shape[0] < k:
            padding = jnp.zeros((k - values.shape[0], *values.shape[1:]), values.dtype)
            values = jnp.concatenate([values, padding])
        at = _greatest(values, count, k)
        return cls(_fill(at < count, jnp.take_along_axis(values, at, axis=0)), jnp.where(at < count, at, -1), count)

    def merged(self, other: "TopK") -> "TopK":
        """The greatest values of two; the earlier ones first where they are equal."""
        k = self.values.shape[0]
        mine, others = jnp.minimum(self.count, k), jnp.minimum(other.count, k)
        slots = jnp.arange(k)
        filled_first = jnp.argsort(jnp.concatenate([slots >= mine, slots >= others]), stable=True)
        values = jnp.take(jnp.concatenate([self.values, other.values]), filled_first, axis=0)
        indices = jnp.take(jnp.concatenate([self.indices, other.indices + self.count]), filled_first, axis=0)
        at = _greatest(values, mine + others, k)
        filled = at < mine + others
        return TopK(
            _fill(filled, jnp.take_along_axis(values, at, axis=0)),
            jnp.where(filled, jnp.take_along_axis(indices, at, axis=0), -1),
            self.count + other.count,
        )

    def result(self) -> tuple[jax.Array, jax.Array]:
        """Values and positions."""
        return self.values, self.indices


def _greatest(values: jax.Array, count: jax.Array, k: int) -> jax.Array:
    """Where the `k` greatest of the first `count` values are, `(k, ...)`; past them, if there are fewer."""
    keys = values.astype(jnp.int32) if values.dtype == jnp.bool_ else values
    if jnp.issubdtype(keys.dtype, jnp.floating):
        # `lax.top_k` orders by sign bit first: it would put -NaN last, and 0.0 before -0.0.
        keys = jnp.where(_is_nan(keys), jnp.asarray(jnp.nan, keys.dtype), keys)
        keys = jnp.where(keys == 0, jnp.zeros_like(keys), keys)
    filled = jnp.arange(values.shape[0]) < count
    # Equal keys are taken in order, and so what is filled before what is not.
    keys = only(filled, keys, _limit(keys.dtype, greatest=False))
    return jnp.moveaxis(lax.top_k(jnp.moveaxis(keys, 0, -1), k)[1], -1, 0).astype(count.dtype)


def _fill(filled: jax.Array, values: jax.Array) -> jax.Array:
    return jnp.where(filled, values, jnp.asarray(_limit(values.dtype, greatest=False)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histogram:
    """The number of values in each bin, `(bins, ...)`."""

    counts: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: Any, edges: np.ndarray) -> "Histogram":
        """Count a chunk."""
        exact, lower, upper = _comparable(values, edges)
        bins, positions = len(edges) - 1, math.prod(values.shape[1:])
        at = jnp.searchsorted(jnp.asarray(lower), exact, side="right") - 1
        inside = only(mask, (at >= 0) & (exact <= upper), False) if upper is not None else jnp.zeros(values.shape, bool)
        flat = at.reshape(-1, positions) * positions + jnp.arange(positions)
        flat = jnp.where(inside.reshape(-1, positions), flat, bins * positions)
        counts = jnp.zeros(bins * positions, int).at[flat].add(1, mode="drop")
        return cls(counts.reshape(bins, *values.shape[1:]))

    def merged(self, other: "Histogram") -> "Histogram":
        """Add counts."""
        return Histogram(self.counts + other.counts)

    def result(self) -> jax.Array:
        """The counts."""
        return self.counts


def _comparable(values: jax.Array, edges: np.ndarray) -> tuple[jax.Array, np.ndarray, Any]:
    """The values, and in their dtype the least value of each bin and the greatest of all (None: there is none).

    A double-precision edge is rounded up to the next value of the dtype, and the last one down, so that a value falls
    where a comparison in double precision puts it.
    """
    if not jnp.issubdtype(values.dtype, jnp.floating):
        exact = values.astype(jnp.int32) if values.dtype == jnp.bool_ else values
        info = jnp.iinfo(exact.dtype)
        least = [math.ceil(edge) if math.isfinite(edge) else edge for edge in edges[:-1].tolist()]
        # An edge above all values is the lower end of no value's bin, and can be left out.
        lower = np.asarray([_at_least(edge, info.min) for edge in least if edge <= info.max], exact.dtype)
        last = edges[-1].item()
        last = info.max if last >= info.max else math.floor(last) if last >= info.min else None
        return exact, lower, None if last is None else np.asarray(last, exact.dtype)
    exact = values.astype(jnp.promote_types(values.dtype, jnp.float32))
    dtype = np.dtype(exact.dtype)
    with np.errstate(over="ignore"):
        near = edges.astype(dtype)
    lower = np.where(near.astype(np.float64) < edges, np.nextafter(near, dtype.type(np.inf)), near)[:-1]
    upper = np.where(near.astype(np.float64) > edges, np.nextafter(near, dtype.type(-np.inf)), near)[-1]
    return exact, lower, upper


def _at_least(edge: Any, least: int) -> int:
    """`edge`, but at least `least`, which -inf is not."""
    return least if edge < least else int(edge)
