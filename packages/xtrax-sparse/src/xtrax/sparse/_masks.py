"""Masks: which weights stay. `True` keeps a weight, `False` makes it zero."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from xtrax.sparse._checks import as_fraction, as_int, check_weights, is_mask
from xtrax.sparse._leaves import is_sparse, matrices, paths_and_leaves


def largest(weights: jax.Array, count: int) -> jax.Array:
    """Mask of the `count` largest magnitudes, ties to the lower flat index; NaN counts as the largest.

    A NaN that reaches a traced call is kept so that it stays visible in the outputs, not silently pruned.
    """
    magnitudes = jnp.abs(weights).reshape(-1)
    magnitudes = jnp.where(jnp.isnan(magnitudes), jnp.inf, magnitudes)
    order = jnp.argsort(-magnitudes, stable=True)
    return jnp.zeros(magnitudes.shape, bool).at[order[:count]].set(True).reshape(weights.shape)


def nm_mask(weights: jax.Array, n: int = 2, m: int = 4, *, axis: int = -1) -> jax.Array:
    """Mask of the `n` largest magnitudes in each `m` consecutive weights along an axis ("N:M sparsity").

    The weight of `equinox.nn.Linear` is `(out, in)`, so that the default axis is the one that is summed over, as
    hardware with 2:4 support wants it. JAX itself has no 2:4 matrix product: the mask saves no time by itself.

    Args:
        weights: Floating-point array of any shape, whose size along `axis` is a multiple of `m`.
        n: How many weights of each block stay, `1 <= n <= m`. Ties go to the lower index.
        m: Block length.
        axis: The axis the blocks lie along.

    Returns:
        Bool array of the shape of `weights`, with exactly `n` entries `True` in each block.

    Raises:
        TypeError: `weights` is not a floating-point array, or `n`, `m` or `axis` is not an int.
        ValueError: `n` or `m` is out of range, `axis` does not exist or is not a multiple of `m`, or there is a NaN.

    >>> nm_mask(jnp.array([[3.0, -4.0, 1.0, 0.5, 0.0, 0.0, 2.0, 0.0]])).astype(int)
    Array([[1, 1, 0, 0, 1, 0, 1, 0]], dtype=int32)

    Source: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv:2104.08378.
    """
    weights = check_weights("weights", weights)
    m = as_int("m", m, minimum=1)
    n = as_int("n", n, minimum=1)
    if n > m:
        raise ValueError(f"n is {n}, more than the block length m = {m}; keep at most m of every m weights")
    axis = as_int("axis", axis, minimum=-weights.ndim)
    if axis >= weights.ndim:
        raise ValueError(f"axis is {axis}, but weights have {weights.ndim} axes")
    size = weights.shape[axis]
    if size % m:
        raise ValueError(f"weights have {size} entries along axis {axis}, which is no multiple of m = {m}")
    moved = jnp.moveaxis(weights, axis, -1)
    blocks = jax.vmap(lambda block: largest(block, n))(moved.reshape(-1, m))
    return jnp.moveaxis(blocks.reshape(moved.shape), -1, axis)


def nm_masks(
    model: Any, n: int = 2, m: int = 4, *, leaf_filter: Callable[[Any], bool] = eqx.is_array
) -> dict[str, jax.Array]:
    """`nm_mask` along the last axis of every matrix of a model.

    Args:
        model: A pytree. Its matrices are the 2-D floating-point leaves that are multiplied by (not those of
            `equinox.nn.Embedding` or of normalisation layers).
        n: How many weights of each block stay.
        m: Block length.
        leaf_filter: `leaf -> bool`; leaves it refuses get no mask.

    Returns:
        Mask by leaf path, as `jax.tree_util.keystr` writes it; see `apply_masks`.

    Raises:
        TypeError, ValueError: As `nm_mask`, naming the leaf; `ValueError` if the model has no matrix.
    """
    masks: dict[str, jax.Array] = {}
    for path, weights in matrices(model, leaf_filter).items():
        try:
            masks[path] = nm_mask(weights, n, m)
        except ValueError as error:
            raise ValueError(f"the leaf {path}: {error}; a leaf_filter can leave it out") from error
    return masks


def global_masks(
    model: Any, density: float, *, leaf_filter: Callable[[Any], bool] = eqx.is_array
) -> dict[str, jax.Array]:
    """Keep the largest magnitudes of a whole model, wherever they lie.

    Args:
        model: A pytree; its matrices are compared with one another (see `nm_masks` for which those are).
        density: Share of all their weights that stays, above 0 and at most 1.
        leaf_filter: `leaf -> bool`; leaves it refuses get no mask and do not count.

    Returns:
        Mask by leaf path. Together the masks hold exactly `max(1, round(density * weights))` entries `True`; ties go
        to the earlier leaf, then to the lower index. A leaf of small weights may lose all of them.

    Raises:
        TypeError: `density` is not a number, or `leaf_filter` is not callable.
        ValueError: `density` is out of range, a weight is NaN, or the model has no matrix.

    >>> model = {"a": jnp.array([[1.0, 5.0]]), "b": jnp.array([[-4.0, 0.0]])}
    >>> {path: mask.astype(int).tolist() for path, mask in global_masks(model, 0.5).items()}
    {"['a']": [[0, 1]], "['b']": [[1, 0]]}

    Source: Han et al., "Learning both Weights and Connections", 2015, arXiv:1506.02626.
    """
    density = as_fraction("density", density, one_allowed=True)
    found = matrices(model, leaf_filter)
    magnitudes = [jnp.abs(check_weights(f"the leaf {path}", weights)).reshape(-1) for path, weights in found.items()]
    flat = jnp.concatenate(magnitudes)
    kept = largest(flat, max(1, round(density * flat.size)))
    masks, start = {}, 0
    for path, weights in found.items():
        masks[path] = kept[start : start + weights.size].reshape(weights.shape)
        start += weights.size
    return masks


def apply_masks(model: Any, masks: Mapping[str, jax.Array]) -> Any:
    """A model whose masked-out weights are zero, with the shapes and dtypes it had.

    Args:
        model: A pytree of dense leaves.
        masks: Bool mask by leaf path, each of the shape of its leaf. Leaves without one are unchanged.

    Returns:
        The model with `where(mask, leaf, 0)` at each path.

    Raises:
        ValueError: A path is not in the model, or a mask is not a bool array of the shape of its leaf.

    >>> apply_masks({"w": jnp.array([1.0, 2.0])}, {"['w']": jnp.array([False, True])})
    {'w': Array([0., 2.], dtype=float32)}
    """
    leaves = dict(paths_and_leaves(model))
    for path, mask in masks.items():
        if path not in leaves:
            raise ValueError(f"masks name the leaf {path}, which the model does not have; it has {sorted(leaves)}")
        if not is_mask(mask) or jnp.shape(mask) != jnp.shape(leaves[path]):
            found = f"{getattr(mask, 'dtype', type(mask).__name__)}{list(jnp.shape(mask))}"
            raise ValueError(
                f"the mask of {path} is {found}; it must be bool{list(jnp.shape(leaves[path]))}, as the leaf is"
            )
    masked = [jnp.where(masks[path], leaf, 0) if path in masks else leaf for path, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(model, is_leaf=is_sparse), masked)
