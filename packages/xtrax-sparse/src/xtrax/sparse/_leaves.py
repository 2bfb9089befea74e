"""Which leaves of a model can be sparse matrices, and why the others cannot."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO

from xtrax.sparse._checks import check_callable

# These modules index, normalise or add their arrays instead of multiplying by them with `@`.
_DENSE_ONLY = (
    eqx.nn.Embedding,
    eqx.nn.LayerNorm,
    eqx.nn.RMSNorm,
    eqx.nn.GroupNorm,
    eqx.nn.BatchNorm,
    eqx.nn.SpectralNorm,
    eqx.nn.WeightNorm,
)


@dataclass(frozen=True)
class Leaf:
    """An array leaf of a model: its path as `jax.tree_util.keystr` writes it, and why it must stay dense, if so."""

    path: str
    array: Any
    obstacle: str | None


def is_sparse(node: Any) -> bool:
    """Whether a node of a tree is a BCOO matrix."""
    return isinstance(node, BCOO)


def paths_and_leaves(tree: Any, is_leaf: Callable[[Any], bool] = is_sparse) -> list[tuple[str, Any]]:
    """`(path, leaf)` of each leaf, in the order of `jax.tree.leaves`; a BCOO matrix is one leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [(jax.tree_util.keystr(keys), leaf) for keys, leaf in flat]


def array_leaves(model: Any, leaf_filter: Callable[[Any], bool]) -> Iterator[Leaf]:
    """Yield each array leaf that the filter selects.

    Raises:
        TypeError: `leaf_filter` is not callable.
        ValueError: A leaf is sparse already.
    """
    check_callable("leaf_filter", leaf_filter, "leaf -> bool, as equinox.is_array is")
    owners = [
        (keys, type(node).__name__)
        for keys, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda n: isinstance(n, _DENSE_ONLY))[0]
        if isinstance(node, _DENSE_ONLY)
    ]
    for keys, leaf in jax.tree_util.tree_flatten_with_path(model, is_leaf=is_sparse)[0]:
        path = jax.tree_util.keystr(keys)
        if is_sparse(leaf):
            raise ValueError(f"the leaf {path} is a BCOO matrix already; pass the dense model, as it was before")
        if not eqx.is_array(leaf) or not leaf_filter(leaf):
            continue
        owner = next((name for prefix, name in owners if keys[: len(prefix)] == prefix), None)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            obstacle = f"its dtype is {leaf.dtype}"
        elif leaf.ndim != 2:
            obstacle = f"it is {leaf.ndim}-D"
        elif leaf.size == 0:
            obstacle = "it is empty"
        elif owner is not None:
            obstacle = f"{owner} does not multiply by it with @"
        else:
            obstacle = None
        yield Leaf(path, leaf, obstacle)


def matrices(model: Any, leaf_filter: Callable[[Any], bool]) -> dict[str, jax.Array]:
    """The leaves that can be sparse matrices, by path.

    Raises:
        ValueError: There is none.
    """
    found = {leaf.path: leaf.array for leaf in array_leaves(model, leaf_filter) if leaf.obstacle is None}
    if not found:
        raise ValueError("the model has no 2-D floating-point leaf that leaf_filter selects; nothing can be pruned")
    return found
