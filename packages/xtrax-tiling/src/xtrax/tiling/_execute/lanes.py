"""Arrays with plan axes as leading dimensions, and functions mapped over those that are lanes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.tiling.strategy import DedupGather


class Operand(NamedTuple):
    """An array and the plan axes that are its leading dimensions: those that are lanes first, in plan order."""

    value: Any
    dims: tuple[str, ...]


class Lane(NamedTuple):
    """An axis whose elements are computed at once, as a dimension.

    `copies` is set for the distinct elements of a DedupGather axis, which stand for more elements than they are.
    """

    name: str
    size: int
    copies: DedupGather | None = None


def axis_size(operands: Sequence[Operand], name: str) -> int:
    """How many elements the operands have along an axis."""
    op = next(op for op in operands if name in op.dims)
    return op.value.shape[op.dims.index(name)]


def as_lane(operands: Sequence[Operand], name: str, lanes: Sequence[Lane]) -> list[Operand]:
    """The operands with an axis moved behind the lanes that they have."""
    around = {lane.name for lane in lanes}
    result = []
    for op in operands:
        if name in op.dims:
            have = [dim for dim in op.dims if dim in around]
            rest = [dim for dim in op.dims if dim not in around and dim != name]
            value = jnp.moveaxis(op.value, op.dims.index(name), len(have))
            op = Operand(value, (*have, name, *rest))
        result.append(op)
    return result


def split_off(operands: Sequence[Operand], name: str) -> tuple[list[int], list[int]]:
    """Which operands have an axis, and where."""
    mapped = [i for i, op in enumerate(operands) if name in op.dims]
    return mapped, [operands[i].dims.index(name) for i in mapped]


def of_lanes(call: Callable[[list[Any]], Any], operands: Sequence[Operand], lanes: Sequence[Lane]) -> Any:
    """`call` mapped over the lanes, the outermost first; operands without a lane are the same for all of it."""
    mapped: Callable[..., Any] = call
    for lane in reversed(lanes):
        in_axes = [0 if lane.name in op.dims else None for op in operands]
        mapped = jax.vmap(mapped, in_axes=(in_axes,), axis_size=lane.size)
    return mapped([op.value for op in operands])


def over(lanes: Sequence[Lane], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` mapped over arguments that all have the lanes in front."""
    for lane in reversed(lanes):
        fn = jax.vmap(fn, axis_size=lane.size)
    return fn


def mapped_over(depth: int, fn: Callable[..., Any]) -> Callable[..., Any]:
    for _ in range(depth):
        fn = jax.vmap(fn)
    return fn


def broadcast(tree: Any, lanes: Sequence[Lane]) -> Any:
    """The tree for every lane."""
    if not lanes:
        return tree
    shape = tuple(lane.size for lane in lanes)
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (*shape, *np.shape(x))), tree)


def moved(tree: Any, source: int, target: int) -> Any:
    return jax.tree.map(lambda y: jnp.moveaxis(y, source, target), tree)


def merge(y: jax.Array, dim: int) -> jax.Array:
    """Dimensions `dim` and `dim + 1` as one."""
    return y.reshape(*y.shape[:dim], y.shape[dim] * y.shape[dim + 1], *y.shape[dim + 2 :])


def taken(y: Any, indices: Any, dim: int) -> Any:
    return jnp.asarray(y)[(slice(None),) * dim + (indices,)]


def all_taken(tree: Any, indices: Any, dim: int) -> Any:
    return jax.tree.map(lambda y: taken(y, indices, dim), tree)
