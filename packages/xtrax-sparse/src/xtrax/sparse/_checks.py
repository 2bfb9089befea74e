"""Argument checks shared by the layer: each raises where the argument arrives, and names it."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def as_int(name: str, value: Any, *, minimum: int) -> int:
    """`value` as a Python int of at least `minimum`; a bool is not an int."""
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            pass
        else:
            if number < minimum:
                raise ValueError(f"{name} is {number}; it must be at least {minimum}")
            return number
    raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be an int of at least {minimum}")


def as_fraction(name: str, value: Any, *, one_allowed: bool) -> float:
    """`value` as a float in (0, 1), or in (0, 1] where one is allowed."""
    allowed = "above 0 and at most 1" if one_allowed else "above 0 and below 1"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a float {allowed}")
    if not (0 < value < 1 or (one_allowed and value == 1)):  # written so that NaN is refused too
        raise ValueError(f"{name} is {value!r}; it must be {allowed}")
    return float(value)


def check_callable(name: str, value: Any, form: str) -> None:
    """Refuse what cannot be called; `form` says how it will be."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be a callable, {form}")


def check_weights(name: str, value: Any) -> jax.Array:
    """`value` as an array of floating or complex numbers, with no NaN where its values are known."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); it must be an array of floating-point numbers")
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        raise TypeError(f"{name} has dtype {value.dtype}; only floating-point and complex weights have magnitudes")
    array = jnp.asarray(value)
    if not isinstance(array, Tracer) and bool(jnp.isnan(array).any()):
        raise ValueError(f"{name} contains NaN, which has no magnitude; repair the weights before pruning them")
    return array


def is_mask(value: Any) -> bool:
    """Whether a value is an array of bools."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.bool_)


def check_outside_trace(function: str, advice: str, tree: Any = None) -> None:
    """`RuntimeError` inside `jax.jit` (or another trace that stages everything), or if a leaf of `tree` is traced."""
    # Under a staging trace even a constant is traced, which shows a trace that no argument reveals.
    staged = isinstance(jnp.zeros(()), Tracer)
    if staged or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise RuntimeError(f"{function} was called inside a JAX trace (jit, grad, vmap, scan); {advice}")
