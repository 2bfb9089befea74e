"""Training steps with checks: on a failure the state before it is kept, inside the program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify

Arrays = list[Any]
Step = Callable[[Arrays, Any], tuple[Arrays, Any]]
Loop = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]


class Verdict:
    """What the checks of one call found, on the device until somebody asks."""

    def __init__(self, error: checkify.Error, done: jax.Array):
        self._error = error
        self._done = done

    @property
    def done(self) -> int:
        """The steps that were done before the first that failed. Waits for the device."""
        return int(self._done)

    @property
    def message(self) -> str:
        """What failed."""
        return str(self._error.get()).removesuffix(" (`check` failed)")


def check_values(
    step: jax.Array, loss: jax.Array, grads: Any, params: Any, *, check_nans: bool, check_infs: bool
) -> None:
    """Checks, with checkify, the loss, then each leaf of the gradients, then each of the updated parameters.

    Args:
        step: the number of the step, integer of shape `()`.
        loss: real of shape `()`.
        grads: a pytree of arrays.
        params: a pytree of arrays.
        check_nans: look for NaN.
        check_infs: look for infinities.
    """
    values = [("the loss", loss)]
    for kind, tree in (("the gradient of", grads), ("the parameter", params)):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        values += [(f"{kind} {jax.tree_util.keystr(path) or 'the model'}", leaf) for path, leaf in leaves]
    for name, value in values:
        # checkify formats the message, so braces in a path are doubled.
        name = name.replace("{", "{{").replace("}", "}}")
        if check_nans:
            checkify.check(~jnp.any(jnp.isnan(value)), f"{name} has NaN at step {{step}}", step=step)
        if check_infs:
            checkify.check(~jnp.any(jnp.isinf(value)), f"{name} is infinite at step {{step}}", step=step)


def checked_loop(step: Step, loop: Loop) -> Callable[[Arrays, Any, jax.Array], tuple[Arrays, Any, Verdict]]:
    """A loop of steps that changes nothing more once a check has failed.

    Args:
        step: one training step, with checks of checkify in it.
        loop: `loop(step, carry, batches, steps)`.

    Returns:
        A function of `(arrays, batches, steps)` to the arrays of the last good state, the metrics of all steps, and
        the error with the number of good steps.
    """

    def guarded(carry: tuple[Arrays, jax.Array, jax.Array], batch: Any) -> tuple[Any, Any]:
        arrays, failed, done = carry
        error, (after, metrics) = checkify.checkify(step, errors=checkify.user_checks)(arrays, batch)
        # Only the first failure counts; what follows starts from the kept state and says nothing new.
        checkify.check_error(_unless(error, failed))
        failed = failed | _failed(error)
        kept = [jnp.where(failed, old, new) for old, new in zip(arrays, after, strict=True)]
        return (kept, failed, done + ~failed), metrics

    def run(arrays: Arrays, batches: Any, steps: jax.Array) -> tuple[Arrays, jax.Array, Any]:
        start = (arrays, jnp.zeros((), bool), jnp.zeros((), jnp.int32))
        (arrays, _, done), metrics = loop(guarded, start, batches, steps)
        return arrays, done, metrics

    def checked(arrays: Arrays, batches: Any, steps: jax.Array) -> tuple[Arrays, Any, Any]:
        error, (arrays, done, metrics) = checkify.checkify(run, errors=checkify.user_checks)(arrays, batches, steps)
        return arrays, metrics, (error, done)

    return checked


def _failed(error: checkify.Error) -> jax.Array:
    # checkify has no public way to ask, in a traced function, whether a check failed.
    return jnp.any(jnp.stack([jnp.zeros((), bool), *error._pred.values()]))


def _unless(error: checkify.Error, failed: jax.Array) -> checkify.Error:
    return error._replace(_pred={effect: pred & ~failed for effect, pred in error._pred.items()})
