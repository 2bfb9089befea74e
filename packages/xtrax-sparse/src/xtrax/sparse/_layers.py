"""The Equinox layers whose sizes pruning may change: the roles of their arrays, and the sizes they record."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax

_RESIZABLE = (eqx.nn.MLP, eqx.nn.MultiheadAttention, eqx.nn.Linear, eqx.nn.Conv)


@dataclass(frozen=True)
class Owned:
    """An array leaf of a model and the layer it belongs to.

    Args:
        path: Leaf path, as `jax.tree_util.keystr` writes it.
        array: The leaf.
        owner: The node of the model that holds it as a field, or `None`.
        attention: The attention layer it lies in, or `None`.
        made: For the weight of a Linear or Conv layer: the axis of its output units.
        taken: Likewise, the axis of its inputs.
        resizable: The axes whose length may change.
    """

    path: str
    array: jax.Array
    owner: Any
    attention: eqx.nn.MultiheadAttention | None
    made: int | None
    taken: int | None
    resizable: frozenset[int]


def owned_leaves(model: Any) -> list[Owned]:
    """Each array leaf, in the order of `jax.tree.leaves(equinox.filter(model, equinox.is_array))`."""
    found = []
    for keys, array in jax.tree_util.tree_flatten_with_path(eqx.filter(model, eqx.is_array))[0]:
        chain = [model]
        for key in keys:
            chain.append(_child(chain[-1], key))
        owner = chain[-2] if len(chain) > 1 else None
        attention = next((node for node in reversed(chain) if isinstance(node, eqx.nn.MultiheadAttention)), None)
        name = getattr(keys[-1], "name", "") if keys else ""
        made = taken = None
        resizable: frozenset[int] = frozenset()
        if isinstance(owner, eqx.nn.Linear | eqx.nn.Conv):
            window = owner.num_spatial_dims if isinstance(owner, eqx.nn.Conv) else 0
            if name == "weight":
                made, taken = array.ndim - window - 2, array.ndim - window - 1
                resizable = frozenset((made, taken))
            elif name == "bias":
                resizable = frozenset((array.ndim - window - 1,))
        elif isinstance(owner, eqx.nn.PReLU):
            resizable = frozenset(range(array.ndim))
        path = jax.tree_util.keystr(keys)
        found.append(Owned(path, array, owner, attention, made, taken, resizable))
    return found


def resized(model: Any) -> Any:
    """A copy of the model whose layers record the sizes that their arrays have."""
    return jax.tree.map(_resized_layer, model, is_leaf=lambda node: isinstance(node, _RESIZABLE))


def _child(node: Any, key: Any) -> Any:
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(node, key.name, None)
    if isinstance(key, jax.tree_util.SequenceKey | jax.tree_util.DictKey) and isinstance(node, list | tuple | dict):
        return node[key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key]
    if isinstance(key, jax.tree_util.SequenceKey) and isinstance(node, eqx.nn.Sequential):
        return node[key.idx]
    return None


def _resized_layer(node: Any) -> Any:
    if not isinstance(node, _RESIZABLE):
        return node
    copy = jax.tree.map(lambda leaf: leaf, node)
    sizes: dict[str, Any] = {}
    if isinstance(node, eqx.nn.Linear) and eqx.is_array(node.weight):
        made, taken = node.weight.shape[-2:]
        sizes = {"out_features": made, "in_features": taken}
    elif isinstance(node, eqx.nn.Conv) and eqx.is_array(node.weight):
        made, taken = node.weight.shape[-node.num_spatial_dims - 2 :][:2]
        sizes = {"out_channels": made, "in_channels": taken * node.groups}
    elif isinstance(node, eqx.nn.MLP):
        layers = resized(node.layers)
        hidden = [layer.out_features for layer in layers[:-1]]
        sizes = {
            "layers": layers,
            "in_size": layers[0].in_features,
            "out_size": layers[-1].out_features,
            # Hidden layers may have come to differ; the recorded width is then the largest.
            "width_size": max(hidden, default=node.width_size),
        }
    elif isinstance(node, eqx.nn.MultiheadAttention):
        parts = {name: resized(getattr(node, name)) for name in ("query_proj", "key_proj", "value_proj", "output_proj")}
        sizes = {
            **parts,
            "num_heads": parts["query_proj"].out_features // node.qk_size,
            "query_size": parts["query_proj"].in_features,
            "key_size": parts["key_proj"].in_features,
            "value_size": parts["value_proj"].in_features,
            "output_size": parts["output_proj"].out_features,
        }
    for name, size in sizes.items():
        if getattr(node, name) != "scalar":
            # Fields of an Equinox module are frozen and sizes are static, so that tree_at cannot set them; the copy
            # is not yet visible to anyone.
            object.__setattr__(copy, name, size)
    return copy
