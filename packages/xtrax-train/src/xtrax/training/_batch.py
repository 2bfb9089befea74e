"""Batches: what one must have, checked on the host before anything is traced."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

Batch = dict[str, Any]

_ALLOWED = ("inputs", "targets", "weight")


class BatchCheck:
    """Checks batches; one whose shapes were seen before costs a few microseconds."""

    def __init__(self, *, accumulate: int = 1):
        self._accumulate = accumulate
        self._seen: set[Any] = set()

    def __call__(self, batch: Any) -> tuple[Batch, Any]:
        """The batch as a dict, and its signature: equal for batches of equal structure, shapes and dtypes.

        Raises:
            TypeError: not a mapping, or a leaf that is not an array of numbers.
            ValueError: no inputs or targets, an unknown key, leading axes that differ, no examples, a weight of the
                wrong shape, negative or not finite weights, weights that are all 0, or a batch that `accumulate` does
                not divide.
        """
        if not isinstance(batch, Mapping):
            raise TypeError(f'a batch must be a dict with "inputs" and "targets", got {type(batch).__name__}')
        batch = dict(batch)
        leaves, treedef = jax.tree.flatten(batch)
        try:
            signature = (treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        except AttributeError:
            signature = None
        if signature not in self._seen:
            self._check_shapes(batch)
            self._seen.add(signature)
        weight = batch.get("weight")
        if isinstance(weight, np.ndarray):
            _check_weight(weight)
        return batch, signature

    def _check_shapes(self, batch: Batch) -> None:
        for name in ("inputs", "targets"):
            if name not in batch:
                raise ValueError(f'a batch must have "inputs" and "targets", got {sorted(map(str, batch))}')
        unknown = sorted(str(name) for name in batch if name not in _ALLOWED)
        if unknown:
            raise ValueError(f"a batch may have {', '.join(_ALLOWED)}, got {unknown} too; put more arrays in inputs")
        sizes = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            name = _leaf_name(path)
            if not eqx.is_array(leaf):
                raise TypeError(f"{name} must be a numpy or JAX array, got {type(leaf).__name__}")
            if not (jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool or _is_key(leaf)):
                raise TypeError(f"{name} must hold numbers, got dtype {leaf.dtype}")
            if not leaf.shape:
                raise ValueError(f"{name} must have a leading axis of examples, got shape ()")
            sizes[name] = leaf.shape[0]
        if not any(name.startswith("inputs") for name in sizes):
            raise ValueError("inputs must have at least one array, got none")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all arrays of a batch must have the same leading axis, got {sizes}")
        n = next(iter(sizes.values()))
        if n == 0:
            raise ValueError("a batch must have at least one example, got arrays with a leading axis of 0")
        weight = batch.get("weight")
        if "weight" in batch and getattr(weight, "shape", None) != (n,):
            raise ValueError(f"weight must be one array of shape ({n},), got {getattr(weight, 'shape', weight)}")
        if weight is not None and jnp.issubdtype(weight.dtype, jnp.complexfloating):
            raise TypeError(f"weight must be real, got {weight.dtype}")
        if n % self._accumulate:
            raise ValueError(
                f"a batch of {n} examples cannot be split into accumulate={self._accumulate} equal micro-batches; "
                "choose a batch size that it divides, or drop the remainder"
            )


def _check_weight(weight: np.ndarray) -> None:
    total = float(weight.sum(dtype=np.float64))
    if not np.isfinite(total) or float(weight.min()) < 0:
        index = int(np.flatnonzero(~(np.isfinite(weight) & (weight >= 0)))[0])
        raise ValueError(f"weight must be finite and at least 0, got {weight[index]} at index {index}")
    if total == 0:
        raise ValueError("weight is 0 for every example of a batch; leave such a batch out")


def check_scalar_weight(batch: Batch, scalars: set[str]) -> None:
    """Refuses weights that a scalar loss or metric, an average already, would ignore.

    Weights on a device are not looked at: the loop would wait for them.

    Raises:
        ValueError: a weight is 0 while a loss or metric is a scalar; a loss needs equal weights besides.
    """
    weight = batch.get("weight")
    if not isinstance(weight, np.ndarray) or not scalars:
        return
    if (weight == 0).any() or ("loss" in scalars and (weight != weight[0]).any()):
        raise ValueError(
            f"{', '.join(sorted(scalars))}: a scalar over the batch cannot respect batch['weight'] (lowest "
            f"{weight.min()}, highest {weight.max()}); return one value per example, of shape ({weight.shape[0]},)"
        )


def stack(batches: list[Batch]) -> Batch:
    """Batches of equal shapes as one, with a new leading axis."""

    def join(*leaves: Any) -> Any:
        return np.stack(leaves) if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp.stack(leaves)

    return jax.tree.map(join, *batches)


def num_examples(batch: Batch) -> int:
    """The length of the leading axis."""
    return jax.tree.leaves(batch["inputs"])[0].shape[0]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaf_name(path: tuple[Any, ...]) -> str:
    return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"
