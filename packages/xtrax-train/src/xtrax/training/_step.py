"""What one training step and one evaluation step compute, as pure functions that are traced."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from xtrax.tiling import JaxScanIterator
from xtrax.training._batch import Batch, num_examples
from xtrax.training._state import MODEL_STATE, ResumableState

if TYPE_CHECKING:
    from xtrax.training._trainer import Trainer

Metric = Callable[[Any, Any], Any]


def takes_key(model: Any) -> bool:
    """True if the model can be called with `key=`."""
    try:
        return "key" in inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable without a signature, such as a built-in
        return False


def predict(
    trainer: "Trainer", model: Any, model_state: Any, inputs: Any, key: jax.Array | None, index: jax.Array
) -> tuple[Any, Any]:
    """Calls the model on a batch of inputs.

    Args:
        trainer: says whether to map over examples.
        model: the model.
        model_state: its `eqx.nn.State`, or None.
        inputs: a pytree of arrays `(n, ...)`.
        key: a key if the model takes one, or None.
        index: int32 of shape `(n,)`, the position of each example in the batch; with `vmap`, example i is given
            `fold_in(key, i)`, whatever the micro-batch that it is in.

    Returns:
        The predictions of the whole batch, and the new model state.
    """

    def call(inputs: Any, model_state: Any, key: Any) -> tuple[Any, Any]:
        kwargs = {} if key is None else {"key": key}
        if model_state is None:
            return model(inputs, **kwargs), None
        return model(inputs, model_state, **kwargs)

    if not trainer.vmap:
        return call(inputs, model_state, key)
    keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(index)
    in_axes = (0, None, None if keys is None else 0)
    return jax.vmap(call, in_axes=in_axes, out_axes=(0, None), axis_name="batch")(inputs, model_state, keys)


def train_step(
    trainer: "Trainer",
    state: ResumableState,
    batch: Batch,
    scalars: set[str],
    check: Callable[[jax.Array, jax.Array, Any, Any], None] | None = None,
) -> tuple[ResumableState, dict[str, jax.Array]]:
    """One update. Writes into `scalars` which of the loss and the aux are scalars over the batch.

    `check` is given the number of the step, the loss, the gradients and the updated parameters.
    """
    n = num_examples(batch)
    if takes_key(state.model):
        key, step_key = jax.random.split(state.key)
    else:
        key, step_key = state.key, None
    params, rest = eqx.partition(state.model, eqx.is_inexact_array)
    weight = batch.get("weight")
    total = jnp.asarray(n, jnp.float32) if weight is None else jnp.sum(_real(weight))

    def objective(params: Any, model_state: Any, part: dict[str, Any], part_key: Any) -> tuple[jax.Array, Any]:
        model = eqx.combine(params, rest)
        predictions, model_state = predict(trainer, model, model_state, part["inputs"], part_key, part["index"])
        values = _loss_values(trainer, predictions, part["targets"], part["index"].shape[0])
        scalars.update(name for name, value in values.items() if value.ndim == 0)
        shares = {name: _share(value, part, total, trainer.accumulate) for name, value in values.items()}
        return shares["loss"], (shares, model_state)

    grad = jax.value_and_grad(objective, has_aux=True)
    whole = {**batch, "index": jnp.arange(n, dtype=jnp.int32)}
    model_state = state.extras.get(MODEL_STATE)
    if trainer.accumulate == 1:
        (_, (metrics, model_state)), grads = grad(params, model_state, whole, step_key)
    else:
        parts = jax.tree.map(lambda x: x.reshape(trainer.accumulate, -1, *x.shape[1:]), whole)

        def micro(carry: Any, xs: Any) -> tuple[Any, Any]:
            sums, model_state = carry
            i, part = xs
            # With vmap the example's index makes its key; a whole-batch model needs another key for each part.
            part_key = step_key if step_key is None or trainer.vmap else jax.random.fold_in(step_key, i)
            (_, (metrics, model_state)), grads = grad(params, model_state, part, part_key)
            return (jax.tree.map(jnp.add, sums, grads), model_state), metrics

        zeros = jax.tree.map(jnp.zeros_like, params)
        steps = jnp.arange(trainer.accumulate)
        (grads, model_state), metrics = JaxScanIterator()(micro, (zeros, model_state), (steps, parts))
        metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), metrics)

    optimizer = optax.with_extra_args_support(trainer.optimizer)
    updates, opt_state = optimizer.update(grads, state.opt_state, params, value=metrics["loss"])
    params = eqx.apply_updates(params, updates)
    if check is not None:
        check(state.step + 1, metrics["loss"], grads, params)
    model = eqx.combine(params, rest)
    extras = state.extras if model_state is None else {**state.extras, MODEL_STATE: model_state}
    return ResumableState(state.step + 1, key, model, opt_state, extras), metrics


def eval_step(
    trainer: "Trainer", metrics: Mapping[str, Metric], state: ResumableState, batch: Batch, scalars: set[str]
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Loss and metrics of one batch, in inference mode: for each name the weighted sum and the weight."""
    n = num_examples(batch)
    model = eqx.nn.inference_mode(state.model)
    key = jax.random.fold_in(state.key, 0) if takes_key(model) else None
    index = jnp.arange(n, dtype=jnp.int32)
    predictions, _ = predict(trainer, model, state.extras.get(MODEL_STATE), batch["inputs"], key, index)
    values = {"loss": _loss_values(trainer, predictions, batch["targets"], n)["loss"]}
    for name, metric in metrics.items():
        values[name] = _as_values(f"metric {name!r}", metric(predictions, batch["targets"]), n)
    scalars.update(name for name, value in values.items() if value.ndim == 0)
    weight = _real(batch["weight"]) if "weight" in batch else jnp.ones(n)
    results = {}
    for name, value in values.items():
        if value.ndim == 0:
            results[name] = (_real(value) * n, jnp.asarray(n, jnp.float32))
        else:
            results[name] = (_weighted_sum(value, weight), jnp.sum(weight))
    return results


def _loss_values(trainer: "Trainer", predictions: Any, targets: Any, n: int) -> dict[str, jax.Array]:
    """The loss and the aux by name, each of shape () or (n,)."""
    result = trainer.loss_fn(predictions, targets)
    loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(aux, Mapping):
        raise TypeError(f"the aux of loss_fn must be a dict of names to values, got {type(aux).__name__}")
    if "loss" in aux:
        raise ValueError('the aux of loss_fn must not have the name "loss", which is taken by the loss itself')
    loss = _as_values("the loss", loss, n)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"loss_fn must return real floating-point values, got {loss.dtype}")
    return {"loss": loss, **{name: _as_values(f"aux {name!r}", value, n) for name, value in aux.items()}}


def _as_values(what: str, value: Any, n: int) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be a scalar or an array of shape ({n},), got {value!r}") from error
    if array.shape not in ((), (n,)):
        raise ValueError(f"{what} must have shape () or ({n},), one value per example, got {array.shape}")
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{what} must be real, got {array.dtype}")
    return array


def _share(value: jax.Array, part: dict[str, Any], total: jax.Array, accumulate: int) -> jax.Array:
    """What these examples add to the average over the whole batch."""
    value = _real(value)
    if value.ndim == 0:
        return value if accumulate == 1 else value / accumulate
    weight = part.get("weight")
    return (jnp.sum(value) if weight is None else _weighted_sum(value, _real(weight))) / total


def _weighted_sum(value: jax.Array, weight: jax.Array) -> jax.Array:
    # The mask keeps what is not finite in a padded example, times 0, from becoming NaN.
    return jnp.sum(jnp.where(weight != 0, _real(value) * weight, 0))


def _real(value: Any) -> jax.Array:
    value = jnp.asarray(value)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))
