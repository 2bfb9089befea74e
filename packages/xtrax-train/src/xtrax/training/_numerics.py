"""Functions whose gradients are finite where the plain formula's are not."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xtrax.training._checks import check_bool


def safe_norm(
    x: Any, axis: int | Sequence[int] | None = None, *, keepdims: bool = False, min_norm: float = 0.0
) -> jax.Array:
    """The Euclidean norm, with the gradient 0 where the norm is at most `min_norm`.

    `jnp.linalg.norm` has the gradient NaN at 0. The entries are divided by the largest before they are squared, so
    that neither large ones overflow nor small ones vanish.

    Args:
        x: an array of real or complex numbers.
        axis: the axes to sum over; by default all.
        keepdims: keep them with length 1.
        min_norm: the least value that is returned.

    Returns:
        `max(norm(x), min_norm)`, real.

    Raises:
        TypeError: `x` does not hold numbers, or `min_norm` is not a number.
        ValueError: `min_norm` is negative or not finite, or `axis` is not an axis of `x`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xtrax.training import safe_norm
        >>> print(jax.grad(safe_norm)(jnp.zeros(2)), safe_norm(jnp.array([3.0, 4.0])))
        [0. 0.] 5.0
    """
    x = _inexact("x", x)
    check_bool("keepdims", keepdims)
    least = _at_least_zero("min_norm", min_norm)
    size = jnp.abs(x)
    largest = jax.lax.stop_gradient(jnp.max(size, axis=axis, keepdims=True, initial=0))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    scaled = x / scale
    squares = jnp.sum(jnp.real(scaled * jnp.conj(scaled)), axis=axis, keepdims=True)
    # Not <=, so that NaN takes the branch that computes.
    small = jax.lax.stop_gradient(scale * jnp.sqrt(squares) <= least)
    norm = jnp.where(small, jnp.asarray(least, size.dtype), scale * jnp.sqrt(jnp.where(small, 1, squares)))
    if keepdims:
        return norm
    return jnp.squeeze(norm, axis=tuple(range(norm.ndim)) if axis is None else axis)


def safe_reciprocal(x: Any, *, eps: float = 0.0) -> jax.Array:
    """`1 / x`, with the value and the gradient 0 where `abs(x) <= eps`.

    Args:
        x: an array of real or complex numbers; integers become floating-point numbers.
        eps: what counts as 0.

    Returns:
        An array of the shape of `x`.

    Raises:
        TypeError: `x` does not hold numbers, or `eps` is not a number.
        ValueError: `eps` is negative or not finite.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.training import safe_reciprocal
        >>> print(safe_reciprocal(jnp.array([0.0, 4.0])))
        [0.   0.25]
    """
    x = _inexact("x", x)
    zero = jnp.abs(x) <= _at_least_zero("eps", eps)
    return jnp.where(zero, 0, 1 / jnp.where(zero, 1, x))


def _inexact(name: str, x: Any) -> jax.Array:
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array of numbers, got {x!r}") from error
    if not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"{name} must be an array of numbers, got dtype {array.dtype}")
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.result_type(float))


def _at_least_zero(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")
    return float(value)
