"""Gradients of a large batch, a part at a time."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from xtrax.tiling import JaxScanIterator
from xtrax.training._checks import check_bool, check_int


def accumulate_grads(
    loss_fn: Callable[..., Any], num_microbatches: int, *, has_aux: bool = False
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`eqx.filter_value_and_grad` of an average over examples, in the memory of one micro-batch.

    The batch is split along the leading axis into equal parts, one after another in a `lax.scan`. The value and the
    gradient are the averages over the parts: those of the whole batch, to rounding, if `loss_fn` is an average over
    examples.

    Args:
        loss_fn: `(params, batch)` to a real scalar, or to `(scalar, aux)` with `has_aux`. Gradients are taken of the
            inexact arrays of `params`.
        num_microbatches: parts.
        has_aux: whether `loss_fn` returns more than the loss.

    Returns:
        A function of `(params, batch)` that returns `(value, grads)`, or `((value, aux), grads)` with the leaves of aux
        stacked along a new axis of length `num_microbatches`. `batch` is a pytree of arrays `(n, ...)`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `num_microbatches` below 1; when called, arrays whose leading axes differ or cannot be split.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.training import accumulate_grads
        >>> value_and_grad = accumulate_grads(lambda w, x: jnp.mean((w * x) ** 2), 2)
        >>> value, grad = value_and_grad(jnp.array(3.0), jnp.array([1.0, 1.0, 2.0, 2.0]))
        >>> print(value, grad)
        22.5 15.0
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (params, batch) -> loss, got {loss_fn!r}")
    parts = check_int("num_microbatches", num_microbatches, at_least=1)
    check_bool("has_aux", has_aux)
    value_and_grad = eqx.filter_value_and_grad(loss_fn, has_aux=has_aux)

    def accumulated(params: Any, batch: Any) -> tuple[Any, Any]:
        split = _split(batch, parts)
        first = jax.tree.map(lambda x: x[0], split)
        shapes = eqx.filter_eval_shape(value_and_grad, params, first)[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def step(sums: Any, part: Any) -> tuple[Any, Any]:
            value, grads = value_and_grad(params, part)
            return jax.tree.map(jnp.add, sums, grads), value

        sums, values = JaxScanIterator()(step, zeros, split)
        grads = jax.tree.map(lambda x: x / parts, sums)
        if has_aux:
            losses, aux = values
            return (jnp.mean(losses), aux), grads
        return jnp.mean(values), grads

    return accumulated


def _split(batch: Any, parts: int) -> Any:
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("batch must have at least one array, got none")
    sizes = {}
    for path, leaf in leaves:
        name = f"batch{jax.tree_util.keystr(path)}"
        if not eqx.is_array(leaf):
            raise TypeError(f"{name} must be a numpy or JAX array, got {type(leaf).__name__}")
        if not leaf.shape:
            raise ValueError(f"{name} must have a leading axis of examples, got shape ()")
        sizes[name] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"all arrays of a batch must have the same leading axis, got {sizes}")
    n = next(iter(sizes.values()))
    if n == 0 or n % parts:
        raise ValueError(f"a batch of {n} examples cannot be split into num_microbatches={parts} equal parts")
    return jax.tree.map(lambda x: x.reshape(parts, n // parts, *x.shape[1:]), batch)
