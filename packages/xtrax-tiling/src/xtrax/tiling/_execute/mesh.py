"""The outermost axis of a plan, split over the devices of a mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xtrax.tiling._execute.axes import (
    PADDING,
    Nest,
    Result,
    finish,
    hand_out,
    run_nest,
    run_unfinished,
    take_distinct,
)
from xtrax.tiling._execute.hooks import NO_HOOK
from xtrax.tiling._execute.lanes import Operand, axis_size
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.strategy import DedupGather, SafeMap, Scan


def check_mesh(mesh: Any, decision: AxisDecision) -> None:
    """Refuse what is no mesh, and an outermost axis that cannot be split."""
    if mesh is None:
        return
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, but is {mesh!r} ({type(mesh).__name__}).")
    if isinstance(decision.strategy, Scan):
        raise DispatchRejected(
            f"mesh is given, and the outermost axis {decision.spec.name!r} is a Scan, whose elements follow one "
            "another; plan an axis to be split over the devices first, or leave out mesh."
        )


def run_on_mesh(nest: Nest, operands: Sequence[Operand], mesh: jax.sharding.Mesh) -> Result:
    """A nest, each device running it over its part of the outermost axis.

    The axis is padded by repetition to a multiple of the devices, and results of the padding are cut off.
    """
    axis, inside = nest.axes[0], operands
    if axis_size(operands, axis.name) == 0:
        return run_nest(nest, operands)
    dedup = isinstance(axis.strategy, DedupGather)
    local = nest
    if dedup:
        if nest.emits(1):
            raise DispatchRejected(
                f"the DedupGather axis {axis.name!r} is split over a mesh, and an axis inside it has effects, which "
                "occur for each of its original elements and not on one device; leave out mesh, or the DedupSpec."
            )
        # Each device computes some of the distinct elements; results are handed out, and effects occur, afterwards.
        inside = take_distinct(nest, operands, axis)
        distinct = dataclasses.replace(axis, strategy=SafeMap(axis.strategy.at_once), hook=NO_HOOK)
        local = dataclasses.replace(nest, axes=(distinct, *nest.axes[1:]))
    size = axis_size(inside, axis.name)
    inside = [_padded(op, axis.name, -size % mesh.size, number=i in nest.positions[:1]) for i, op in enumerate(inside)]
    # JAX wants the mesh in context if there is one; else the sharding of what is padded, cut and merged is left to it.
    explicit = AxisType.Explicit in mesh.axis_types and jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    if not explicit:
        auto = (AxisType.Auto,) * len(mesh.axis_names)
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    split = PartitionSpec(mesh.axis_names)
    streamed = local.axes[0].hook.streamed

    def of_device(values: list[Any]) -> Any:
        ops = [op._replace(value=value) for op, value in zip(inside, values, strict=True)]
        result = run_unfinished(local, ops)
        first = _stacked(result.values) if streamed is not None else result.values
        return first, result.carries, _stacked(result.token)

    specs = [PartitionSpec(*(mesh.axis_names if name == axis.name else None for name in op.dims)) for op in inside]
    arrays = [op.value for op in inside]
    if explicit:
        arrays = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    run = jax.shard_map(of_device, mesh=mesh, in_specs=(specs,), out_specs=split, check_vma=False)
    values, carries, token = run(arrays)
    if explicit and (dedup or streamed is not None or size % mesh.size):
        values, carries, token = jax.reshard((values, carries, token), NamedSharding(mesh, PartitionSpec()))
    carries = _cut(carries, size)
    token = None if token is None else jnp.sum(token, dtype=jnp.int32)
    if streamed is not None:
        states = [jax.tree.map(lambda state, i=i: state[i], values) for i in range(mesh.size)]
        return finish(axis, Result(functools.reduce(streamed.merge, states), carries, token))
    result = Result(_cut(values, size), carries, token)
    return finish(axis, hand_out(nest, 0, result, operands, ()) if dedup else result)


def _padded(op: Operand, name: str, missing: int, number: bool) -> Operand:
    """The operand with its last element repeated; numbers of elements are padded as such."""
    if name not in op.dims or not missing:
        return op
    dim = op.dims.index(name)
    last = op.value[(slice(None),) * dim + (slice(-1, None),)]
    shape = [missing if i == dim else n for i, n in enumerate(last.shape)]
    more = jnp.full(shape, PADDING) if number else jnp.broadcast_to(last, shape)
    return op._replace(value=jnp.concatenate([op.value, more], dim))


def _stacked(tree: Any) -> Any:
    """A stack of one, to which the devices add theirs."""
    return jax.tree.map(lambda x: jnp.expand_dims(x, 0), tree)


def _cut(tree: Any, size: int) -> Any:
    return jax.tree.map(lambda y: y[:size], tree)
