"""States of the reducers that add: sums, means, variances and logsumexp, over the leading axis of one leaf.

A state has three methods: `of` reduces a chunk, `merged` joins the states of two consecutive stretches of an axis, and
`result` finishes. `of` a chunk without elements is the state that a reduction starts from.

Floating sums are kept as two words, the rounded sum and the sum of all rounding errors (Ogita, Rump and Oishi, Accurate
Sum and Dot Product, SIAM J. Sci. Comput. 26, 2005), so that their error does not grow with the number of elements.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def element_dtype(reduction: Callable[..., Any], values: Any) -> Any:
    """The dtype that a reduction of jax.numpy gives these values."""
    return jax.eval_shape(reduction, jax.ShapeDtypeStruct((1,), values.dtype)).dtype


def count_of(values: Any, mask: Any) -> jax.Array:
    """How many elements a chunk has."""
    return jnp.full((), values.shape[0], int) if mask is None else jnp.sum(mask, dtype=int)


def only(mask: Any, values: jax.Array, otherwise: Any) -> jax.Array:
    """The values, with `otherwise` for what is masked."""
    if mask is None:
        return values
    return jnp.where(mask.reshape(mask.shape + (1,) * (values.ndim - 1)), values, jnp.asarray(otherwise, values.dtype))


def _accumulated(values: jax.Array, dtype: Any) -> jax.Array:
    """The values in the dtype in which results of `dtype` are accumulated: at least single precision."""
    return values.astype(jnp.promote_types(dtype, jnp.float32))


@jax.custom_jvp
def two_sum(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rounded sum and its exact rounding error (Knuth); without a meaning where the sum is not finite."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


@two_sum.defjvp
def _two_sum_jvp(primals: Any, tangents: Any) -> Any:
    # The exact sum is the first word plus the second, so the second has no derivative of its own.
    total, error = two_sum(*primals)
    return (total, error), (tangents[0] + tangents[1], jnp.zeros_like(error))


@jax.custom_jvp
def _chunk_sum(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum over the leading axis and the sum of its rounding errors, each without that axis."""
    if values.shape[0] == 0:
        return jnp.zeros(values.shape[1:], values.dtype), jnp.zeros(values.shape[1:], values.dtype)
    # On a CPU a loop over rows is vectorised across the row, and several times as fast as a reduction of pairs.
    return lax.platform_dependent(values, cpu=_sum_rows, default=_sum_pairs)


@_chunk_sum.defjvp
def _chunk_sum_jvp(primals: Any, tangents: Any) -> Any:
    total, error = _chunk_sum(*primals)
    return (total, error), (jnp.sum(tangents[0], axis=0), jnp.zeros_like(error))


def _sum_rows(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(sums: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        return _join(sums, (row, jnp.zeros_like(row))), None

    zeros = jnp.zeros_like(values[0])
    return lax.scan(step, (zeros, zeros), values, unroll=8)[0]


def _sum_pairs(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros((), values.dtype)
    # The errors start at zero. Written as a difference they have a tangent, without which the derivative of a reduction
    # of pairs fails on older versions of JAX; they are NaN where a value, and so the sum, is not finite.
    return lax.reduce((values, values - values), (zero, zero), _join, (0,))


def _join(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    total, error = two_sum(a[0], b[0])
    return total, a[1] + b[1] + error


def _both_words(total: jax.Array, error: jax.Array) -> jax.Array:
    """The sum itself; where it is infinite or NaN, or overflowed on the way, the errors mean nothing."""
    return jnp.where(jnp.isfinite(error), total + error, total)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum: `total` and its rounding errors, which are None for integers."""

    total: jax.Array
    error: jax.Array | None
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array, mask: Any) -> "Sum":
        """Sum a chunk."""
        dtype = element_dtype(jnp.sum, values)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return cls(jnp.sum(only(mask, values, 0), axis=0), None, dtype)
        return cls(*_chunk_sum(only(mask, _accumulated(values, dtype), 0)), dtype)

    def merged(self, other: "Sum") -> "Sum":
        """Add two sums."""
        if self.error is None or other.error is None:
            return Sum(self.total + other.total, None, self.dtype)
        return Sum(*_join((self.total, self.error), (other.total, other.error)), self.dtype)

    def result(self) -> jax.Array:
        """Round the sum to its dtype."""
        return self.total if self.error is None else _both_words(self.total, self.error).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean, as a sum and the number of elements."""

    total: jax.Array
    error: jax.Array
    count: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array, mask: Any) -> "Mean":
        """Sum and count a chunk."""
        dtype = element_dtype(jnp.mean, values)
        return cls(*_chunk_sum(only(mask, _accumulated(values, dtype), 0)), count_of(values, mask), dtype)

    def merged(self, other: "Mean") -> "Mean":
        """Add sums and counts."""
        total, error = _join((self.total, self.error), (other.total, other.error))
        return Mean(total, error, self.count + other.count, self.dtype)

    def result(self) -> jax.Array:
        """Divide; NaN for no elements."""
        total = _both_words(self.total, self.error)
        return (total / self.count.astype(total.dtype)).astype(self.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Variance:
    """A mean and the sum of squared distances to it, each in two words.

    Chunks are joined as by Chan, Golub and LeVeque (Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979), in which no large numbers cancel.
    """

    mean: jax.Array
    mean_error: jax.Array
    squares: jax.Array
    squares_error: jax.Array
    count: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array, mask: Any) -> "Variance":
        """Two passes over a chunk."""
        exact = _accumulated(values, element_dtype(jnp.mean, values))
        count = count_of(values, mask)
        divisor = jnp.maximum(count, 1).astype(exact.real.dtype)
        # Neither the mean nor the squares depend on what the values are measured from, so it needs no derivative.
        # Divided before they are added, finite values have a finite mean.
        pivot = lax.stop_gradient(_both_words(*_chunk_sum(only(mask, exact / divisor, 0))))
        distances = only(mask, exact - pivot, 0)
        # Where squares overflow, the variance is infinite, whatever a difference of two of them would be.
        left = _or_zero(_both_words(*_chunk_sum(distances)) / divisor)
        squares, error = _chunk_sum(_squared(distances))
        correction = jnp.where(jnp.isfinite(squares), _squared(left) * divisor, jnp.zeros_like(squares))
        squares, rounding = two_sum(squares, -correction)
        return cls(pivot, left, squares, error + rounding, count, element_dtype(jnp.var, values))

    def merged(self, other: "Variance") -> "Variance":
        """Join two stretches."""
        count = self.count + other.count
        real = self.squares.dtype
        share = other.count.astype(real) / jnp.maximum(count, 1).astype(real)
        step, low = two_sum(other.mean, -self.mean)
        # Means of opposite signs may be further apart than the dtype can tell, though what lies between them is not.
        near = jnp.isfinite(step)
        low = jnp.where(near, low, jnp.zeros_like(low)) + (other.mean_error - self.mean_error)
        mean, rounding = two_sum(self.mean, jnp.where(near, step * share, other.mean * share - self.mean * share))
        mean_error = self.mean_error + rounding + low * share
        between = _scaled_square(step + low, self.count.astype(real) * share)
        squares, error = _join((self.squares, self.squares_error), (other.squares, other.squares_error))
        squares, last = two_sum(squares, between)
        return Variance(mean, mean_error, squares, error + last, count, self.dtype)

    def result(self) -> jax.Array:
        """Divide by the number of elements; NaN for none."""
        squares = _both_words(self.squares, self.squares_error)
        # Rounding may leave a constant a little below zero.
        squares = jnp.where(squares < 0, jnp.zeros_like(squares), squares)
        return (squares / self.count.astype(squares.dtype)).astype(self.dtype)


def _squared(values: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(values):
        return jnp.square(values.real) + jnp.square(values.imag)
    return jnp.square(values)


def _scaled_square(values: jax.Array, scale: jax.Array) -> jax.Array:
    """`scale * |values|**2`, zero for a scale of zero where the square alone would overflow."""
    if jnp.iscomplexobj(values):
        return (scale * values.real) * values.real + (scale * values.imag) * values.imag
    return (scale * values) * values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogSumExp:
    """The largest value, and the sum of `exp(value - largest)` in two words."""

    largest: jax.Array
    total: jax.Array
    error: jax.Array
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, values: jax.Array, mask: Any) -> "LogSumExp":
        """Sum a chunk's exponentials."""
        dtype = element_dtype(jax.nn.logsumexp, values)
        exact = only(mask, _accumulated(values, dtype), -jnp.inf)
        largest = lax.stop_gradient(jnp.max(exact, axis=0, initial=-jnp.inf))
        # An infinite value has a term of infinity, and the finite ones beside it of zero.
        start = jnp.where(exact == largest, _or_zero(largest), largest)
        return cls(largest, *_chunk_sum(jnp.exp(exact - start)), dtype)

    def merged(self, other: "LogSumExp") -> "LogSumExp":
        """Measure both from the larger of the two largest values, and add."""
        largest = jnp.maximum(self.largest, other.largest)
        mine, others = _scale(self.largest, largest), _scale(other.largest, largest)
        total, error = _join((self.total * mine, self.error * mine), (other.total * others, other.error * others))
        return LogSumExp(largest, total, error, self.dtype)

    def result(self) -> jax.Array:
        """The logarithm; -inf for no elements."""
        return (jnp.log(_both_words(self.total, self.error)) + _or_zero(self.largest)).astype(self.dtype)


def _scale(before: jax.Array, after: jax.Array) -> jax.Array:
    """What a sum measured from `before` is multiplied by to be measured from `after`; 1 if both are one infinity."""
    same = before == after
    return jnp.where(same, jnp.ones_like(after), jnp.exp(before - after))


def _or_zero(values: jax.Array) -> jax.Array:
    """Zero in place of what is not finite, and so cannot be subtracted."""
    return jnp.where(jnp.isfinite(values), values, jnp.zeros_like(values))
