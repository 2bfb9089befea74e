"""Steps of a loop that name the leaf of the carry that they change."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xtrax.tiling._split import type_text
from xtrax.tiling.errors import CarryMismatchError


def checked_transition(
    fn: Callable[[Any, Any], tuple[Any, Any]], collect_outputs: bool
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """`fn` as a body of `lax.scan`, checked when it is traced."""

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        result = fn(carry, x)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise TypeError(f"the transition must return a pair (carry, output), but returned {_describe(result)}.")
        after, output = result
        check_carry(carry, after)
        return after, (output if collect_outputs else None)

    return step


def checked_step(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`body` as a body of `lax.while_loop`, checked when it is traced."""

    def step(carry: Any) -> Any:
        after = body(carry)
        check_carry(carry, after)
        return after

    return step


def checked_cond(cond: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`cond` as a condition of `lax.while_loop`, checked when it is traced."""

    def go_on(carry: Any) -> Any:
        result = cond(carry)
        if _describe(result) != "bool[]":
            raise TypeError(f"cond must return a bool scalar, but returned {_describe(result)}.")
        return result

    return go_on


def check_carry(before: Any, after: Any) -> None:
    """Refuse a carry of another structure, shape or dtype.

    Raises:
        CarryMismatchError: names the first leaf that differs, before and after.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(before)
    leaves, treedef_after = jax.tree.flatten(after)
    if treedef != treedef_after:
        raise CarryMismatchError(
            f"the carry changes its structure: {treedef} before the step, {treedef_after} after it; "
            "a step must return a carry like the one that it was given."
        )
    for (path, leaf), new in zip(named, leaves, strict=True):
        if not _keeps_type(leaf, new):
            raise CarryMismatchError(
                f"the leaf carry{jax.tree_util.keystr(path)} is {_describe(leaf)} before the step and "
                f"{_describe(new)} after it; give init that shape and dtype, or convert in the step."
            )


def _keeps_type(before: Any, after: Any) -> bool:
    try:
        old, new = jax.typeof(before), jax.typeof(after)
    except TypeError:
        return False
    if old.shape != new.shape:
        return False
    # A Python number as the first carry is weakly typed, and JAX lets the step decide its dtype.
    return old.dtype == new.dtype or (old.weak_type and jnp.promote_types(old.dtype, new.dtype) == new.dtype)


def _describe(value: Any) -> str:
    """Such as `float32[2,3]`."""
    try:
        return type_text(jax.typeof(value))
    except TypeError:
        return f"{value!r} ({type(value).__name__})"
