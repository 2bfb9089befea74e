"""The state of a training run, and how it is taken apart for `jax.jit`."""

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from xtrax.training._checks import check_int

MODEL_STATE = "model_state"
"""The key of `ResumableState.extras` under which an `eqx.nn.State` is carried."""


class ResumableState(eqx.Module):
    """Everything that a training step reads and writes.

    A Python `int` for `step` becomes an int32 array, because a Python number is part of the compiled program and
    would compile a new one at every step.

    Args:
        step: optimizer steps done, an `int` or an integer array of shape `()`.
        key: a typed key of shape `()` (`jax.random.key`) or a raw one, uint32 of shape `(2,)` or `(4,)`.
        model: an `eqx.Module` or any callable pytree.
        opt_state: the optimizer's state, from `optimizer.init(eqx.filter(model, eqx.is_inexact_array))`.
        extras: more to carry along and to save, by name. `extras["model_state"]` is the `eqx.nn.State` of a model with
            stateful layers.

    Raises:
        TypeError: `step` is not an integer, `key` is not a key, or `extras` is not a mapping with string keys.
        ValueError: `step` is negative or does not fit in int32, or `key` has the wrong shape.

    Example:
        >>> import jax
        >>> from xtrax.training import ResumableState
        >>> state = ResumableState(0, jax.random.key(0), model=None, opt_state=())
        >>> state.step.dtype
        dtype('int32')
    """

    step: jax.Array
    key: jax.Array
    model: Any
    opt_state: Any
    extras: dict[str, Any]

    def __init__(self, step: Any, key: Any, model: Any, opt_state: Any, extras: Mapping[str, Any] | None = None):
        self.step = _step_array(step)
        self.key = _check_key(key)
        self.model = model
        self.opt_state = opt_state
        extras = {} if extras is None else extras
        if not isinstance(extras, Mapping) or not all(isinstance(name, str) for name in extras):
            raise TypeError(f"extras must be a mapping with string keys, got {extras!r}")
        self.extras = dict(extras)


def _step_array(step: Any) -> jax.Array:
    if isinstance(step, numbers.Integral) and not isinstance(step, np.generic):
        value = check_int("step", step, at_least=0)
        if value > np.iinfo(np.int32).max:
            raise ValueError(f"step must fit in int32, got {value}")
        return jnp.asarray(value, jnp.int32)
    if not eqx.is_array(step) or not jnp.issubdtype(step.dtype, jnp.integer):
        raise TypeError(f"step must be an int or an integer array of shape (), got {step!r}")
    if step.shape != ():
        raise ValueError(f"step must have shape (), got {step.shape}")
    return jnp.asarray(step)


def _check_key(key: Any) -> jax.Array:
    if not eqx.is_array(key):
        raise TypeError(f"key must be a PRNG key, from jax.random.key(seed), got {key!r} ({type(key).__name__})")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape != ():
            raise ValueError(f"key must be one key, of shape (), got {key.shape}; split it and pass one")
        return key
    if key.dtype != jnp.uint32:
        raise TypeError(f"key must be a PRNG key, from jax.random.key(seed), got an array of {key.dtype}")
    if key.shape not in ((2,), (4,)):
        raise ValueError(f"a raw key must have shape (2,) or (4,), got {key.shape}; split it and pass one")
    return jnp.asarray(key)


def init_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    seed: int | jax.Array,
    *,
    model_state: eqx.nn.State | None = None,
    extras: Mapping[str, Any] | None = None,
) -> ResumableState:
    """The state of a run that has done no step yet.

    Args:
        model: an `eqx.Module` or any callable pytree; its inexact arrays are the parameters.
        optimizer: the optimizer that the `Trainer` will use.
        seed: an integer of at least 0, or a PRNG key.
        model_state: the second result of `eqx.nn.make_with_state(Model)(...)`, for a model with stateful layers.
        extras: more to carry along and to save, by name.

    Returns:
        A state with `step` 0.

    Raises:
        TypeError: `optimizer` is not an optax optimizer, or `seed` is neither an integer nor a key.
        ValueError: `seed` is negative, `model` has no parameters, or `extras` has `"model_state"` as well.

    Example:
        >>> import equinox as eqx, jax, optax
        >>> from xtrax.training import init_state
        >>> state = init_state(eqx.nn.Linear(3, 1, key=jax.random.key(0)), optax.adam(1e-3), seed=0)
        >>> int(state.step)
        0
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be an optax optimizer such as optax.adam(1e-3), got {optimizer!r}")
    params = eqx.filter(model, eqx.is_inexact_array)
    if not jax.tree.leaves(params):
        raise ValueError("model has no parameters: none of its leaves is a floating-point or complex array")
    key = seed if isinstance(seed, jax.Array) else jax.random.key(check_int("seed", seed, at_least=0))
    extras = dict(extras or {})
    if model_state is not None:
        if MODEL_STATE in extras:
            raise ValueError(f"extras has {MODEL_STATE!r} and model_state is given too; pass one of them")
        extras[MODEL_STATE] = model_state
    return ResumableState(0, key, model, optimizer.init(params), extras)


@dataclass(frozen=True, eq=False)
class StateSpec:
    """A state without its arrays: what is left when it is partitioned once, outside the loop.

    `jax.jit` on the flat list of arrays takes half the time per call that a filtered jit of the whole state takes.
    """

    treedef: Any
    static: tuple[Any, ...]
    is_array: tuple[bool, ...]

    @classmethod
    def of(cls, state: ResumableState) -> "StateSpec":
        leaves, treedef = jax.tree.flatten(state)
        is_array = tuple(bool(eqx.is_array(leaf)) for leaf in leaves)
        static = tuple(None if array else leaf for array, leaf in zip(is_array, leaves, strict=True))
        return cls(treedef, static, is_array)

    @property
    def names(self) -> tuple[str, ...]:
        """The path of each array leaf, such as `.model.layers[0].weight`."""
        marked = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.treedef, self.is_array))
        return tuple(jax.tree_util.keystr(path) for path, array in marked if array)

    def matches(self, other: "StateSpec") -> bool:
        """True if a program made for one state serves the other."""
        return (
            self.treedef == other.treedef
            and self.is_array == other.is_array
            and all(_same(a, b) for a, b in zip(self.static, other.static, strict=True))
        )

    def arrays(self, state: ResumableState) -> list[Any]:
        """The array leaves of a state of this structure, in order."""
        leaves = jax.tree.leaves(state)
        return [leaf for array, leaf in zip(self.is_array, leaves, strict=True) if array]

    def state(self, arrays: list[Any]) -> ResumableState:
        """The state that has these arrays."""
        rest = iter(arrays)
        leaves = [next(rest) if array else leaf for array, leaf in zip(self.is_array, self.static, strict=True)]
        return jax.tree.unflatten(self.treedef, leaves)

    def arrays_after_step(self, state: ResumableState, before: list[Any]) -> list[Any]:
        """The arrays of the state that a step returned, checked against those that it was given.

        Raises:
            TypeError: the step changed the structure of the state, or a leaf's shape or dtype.
        """
        if not self.matches(StateSpec.of(state)):
            raise TypeError(
                "the training step changed the structure of the state; the optimizer and the model's state must "
                "return what they were given, with other values"
            )
        after = self.arrays(state)
        for name, old, new in zip(self.names, before, after, strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise TypeError(
                    f"the training step changed {name} from {old.dtype}{list(old.shape)} to "
                    f"{new.dtype}{list(new.shape)}; initialise it as the step returns it"
                )
        return after


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


def fresh_arrays(arrays: list[Any]) -> list[jax.Array]:
    """Copies that may be donated, of strong type so that the first step and the second are one program."""
    return [jnp.array(array, dtype=array.dtype, copy=True) for array in arrays]
