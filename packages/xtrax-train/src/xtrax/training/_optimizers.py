"""Optimizers on optax, and trees that say which parameter belongs to what."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from xtrax.training._checks import check_int
from xtrax.training._paths import PathRules, path_text

_NORMS = (eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm, eqx.nn.BatchNorm)


def make_optimizer(base: optax.GradientTransformation, clip_norm: float | None = 1.0) -> optax.GradientTransformation:
    """An optimizer after clipping by the global norm of the gradients.

    Args:
        base: any optax optimizer.
        clip_norm: the largest global norm that reaches `base`; None does not clip.

    Returns:
        An optax optimizer.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `clip_norm` is not positive and finite.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from xtrax.training import make_optimizer
        >>> optimizer = make_optimizer(optax.sgd(1.0), clip_norm=1.0)
        >>> updates, _ = optimizer.update(jnp.array([3.0, 4.0]), optimizer.init(jnp.zeros(2)))
        >>> print(updates.round(3))
        [-0.6 -0.8]
    """
    if not isinstance(base, optax.GradientTransformation):
        raise TypeError(f"base must be an optax optimizer such as optax.adam(1e-3), got {base!r}")
    if clip_norm is None:
        return base
    _check_number("clip_norm", clip_norm, above=0)
    return optax.chain(optax.clip_by_global_norm(clip_norm), base)


def adamw_with_schedule(
    peak_lr: float | jax.Array,
    warmup_steps: int,
    total_steps: int,
    weight_decay: float | jax.Array = 1e-2,
    clip_norm: float | None = 1.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    wd_mask: Callable[[Any], Any] | Any | None = None,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with linear warm-up from 0 and cosine decay to 0, after clipping by global norm.

    `peak_lr` and `weight_decay` are kept in the optimizer's state (`optax.inject_hyperparams`), and the schedule is a
    unit one times the peak. So either may be a traced value, as where a sweep is mapped with `jax.vmap`, and another
    value is not another program. The rate of the step before is `hyperparams["learning_rate"]` in the state.

    Args:
        peak_lr: the learning rate after the warm-up, a number or an array of shape `()`.
        warmup_steps: steps of warm-up, from 0.
        total_steps: steps until the rate is 0 again, the warm-up included.
        weight_decay: the decoupled decay, multiplied by the learning rate as in AdamW (Loshchilov and Hutter, 2019).
        clip_norm: the largest global norm of the gradients; None does not clip.
        b1: decay of the mean of the gradients.
        b2: decay of the mean of their squares.
        eps: added to the root of the latter.
        wd_mask: which parameters decay: a tree of bools, or a function from parameters to one, such as
            `no_bias_wd_mask`. By default all.

    Returns:
        An optax optimizer.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a number out of range, or `total_steps` not larger than `warmup_steps`.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.training import adamw_with_schedule, no_bias_wd_mask
        >>> optimizer = adamw_with_schedule(1e-3, warmup_steps=10, total_steps=100, wd_mask=no_bias_wd_mask)
        >>> state = optimizer.init({"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)})
        >>> round(float(state.hyperparams["peak_lr"]), 6)
        0.001
    """
    peak = _check_number("peak_lr", peak_lr, at_least=0)
    decay = _check_number("weight_decay", weight_decay, at_least=0)
    check_int("warmup_steps", warmup_steps, at_least=0)
    check_int("total_steps", total_steps, at_least=1)
    if total_steps <= warmup_steps:
        raise ValueError(f"total_steps must be larger than warmup_steps={warmup_steps}, got {total_steps}")
    if clip_norm is not None:
        _check_number("clip_norm", clip_norm, above=0)
    for name, value in (("b1", b1), ("b2", b2)):
        if _check_number(name, value, at_least=0) >= 1:
            raise ValueError(f"{name} must be below 1, got {value}")
    _check_number("eps", eps, at_least=0)
    unit = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup_steps, total_steps)

    def make(peak_lr: Any, weight_decay: Any) -> optax.GradientTransformation:
        def rate(count: Any) -> Any:
            return peak_lr * unit(count)

        return optax.chain(
            optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm),
            optax.scale_by_adam(b1, b2, eps),
            optax.add_decayed_weights(weight_decay, wd_mask),
            optax.inject_hyperparams(optax.scale_by_learning_rate, static_args="flip_sign")(rate),
        )

    return optax.inject_hyperparams(make)(peak_lr=peak, weight_decay=decay)


def no_bias_wd_mask(params: Any) -> Any:
    """True for the parameters that weight decay should act on: those that are neither biases nor of a normalisation.

    Left out are leaves named `bias`, leaves with fewer than two axes, and the parameters of equinox's LayerNorm,
    RMSNorm, GroupNorm and BatchNorm.

    Args:
        params: a pytree of arrays, such as `eqx.filter(model, eqx.is_inexact_array)`.

    Returns:
        A pytree of bools of the same structure.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.training import no_bias_wd_mask
        >>> no_bias_wd_mask({"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)})
        {'bias': False, 'weight': True}
    """

    def decays(path: tuple[Any, ...], node: Any) -> Any:
        if isinstance(node, _NORMS):
            return jax.tree.map(lambda _: False, node)
        return jnp.ndim(node) >= 2 and path_text(path[-1:]) != "bias"

    return jax.tree_util.tree_map_with_path(decays, params, is_leaf=lambda node: isinstance(node, _NORMS))


def partition_labels(params: Any, rules: Mapping[str, str], *, default: str | None = None) -> Any:
    """A label for each parameter, for `optax.partition`.

    Args:
        params: a pytree of arrays.
        rules: regular expressions to labels. A parameter gets the label of the first that is found in its path, whose
            parts stand between slashes, such as `layers/0/weight`.
        default: the label of those that no rule fits; None refuses them.

    Returns:
        A pytree of strings of the same structure.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a parameter that no rule fits, a rule that fits no parameter, or a bad expression.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from xtrax.training import partition_labels
        >>> params = {"encoder": {"weight": jnp.ones(2)}, "head": {"weight": jnp.ones(2)}}
        >>> labels = partition_labels(params, {"^encoder/": "frozen"}, default="trained")
        >>> optimizer = optax.partition({"frozen": optax.set_to_zero(), "trained": optax.adam(1e-3)}, labels)
        >>> labels["head"]["weight"]
        'trained'
    """
    compiled = PathRules("rules", rules)
    for pattern, label in rules.items():
        if not isinstance(label, str):
            raise TypeError(f"rules: the label of {pattern!r} must be a string, got {label!r}")
    if default is not None and not isinstance(default, str):
        raise TypeError(f"default must be a label or None, got {default!r}")
    used: set[str] = set()
    unmatched: list[str] = []

    def label_of(path: tuple[Any, ...], _: Any) -> str:
        text = path_text(path)
        found = compiled.find(text)
        if found is None:
            unmatched.append(text)
            return default or ""
        used.add(found[0])
        return found[1]

    labels = jax.tree_util.tree_map_with_path(label_of, params)
    paths = [path_text(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if unmatched and default is None:
        raise ValueError(f"no rule fits {', '.join(unmatched)}; add a rule, or pass default=")
    if unused := [pattern for pattern in rules if pattern not in used]:
        raise ValueError(f"rules {unused} fit no parameter that an earlier rule does not; the paths are {paths}")
    return labels


def _check_number(name: str, value: Any, *, at_least: float | None = None, above: float | None = None) -> Any:
    """Returns `value`; what is traced is checked for its shape only."""
    if isinstance(value, Tracer):
        if value.shape != ():
            raise ValueError(f"{name} must be a number or an array of shape (), got shape {value.shape}")
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number:
        if not isinstance(value, jax.Array | np.ndarray | np.number) or value.dtype == bool:
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
        if value.shape != ():
            raise ValueError(f"{name} must be a number or an array of shape (), got shape {value.shape}")
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    if above is not None and number <= above:
        raise ValueError(f"{name} must be above {above}, got {value}")
    return value
