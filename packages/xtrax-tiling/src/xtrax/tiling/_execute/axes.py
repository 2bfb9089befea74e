"""The recursion over the axes of a plan, on the device.

Axes that are mapped become lanes: leading dimensions, in plan order, that everything inside carries along. Loops (Scan
axes, chunks) run outside the lanes, whatever their place in the plan, and the function, the transitions and the fuses
are mapped over the lanes by `jax.vmap`. So effects are issued for all lanes at once, outside any `vmap`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xtrax.tiling._carry_check import checked_transition
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling._execute.lanes import (
    Lane,
    Operand,
    all_taken,
    as_lane,
    axis_size,
    broadcast,
    mapped_over,
    merge,
    moved,
    of_lanes,
    over,
    split_off,
    taken,
)
from xtrax.tiling._map.chunked import map_chunks
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling.carry import materialize_carry
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.strategy import DedupGather, SafeMap, Scan

PADDING = np.int32(2**31 - 1)
"""The number of an element that is only there to fill up."""


class Result(NamedTuple):
    """What a part of the nest yields, each leaf with the lanes around it in front."""

    values: Any
    carries: dict[str, Any]
    token: Any = None


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis of the plan and what happens at its edge."""

    name: str
    strategy: Any  # Vmap, SafeMap, Scan or DedupGather, which each function below takes apart
    hook: AxisHook


@dataclasses.dataclass(frozen=True)
class Nest:
    """The axes, the outermost first, and what is computed of one element of each.

    Args:
        axes: in plan order.
        call: from the list of one element of each operand to the outputs.
        groups: the operands of each argument and their tree, for the `dedup_fn` of a DedupGather.
        positions: for each axis, which operand numbers its elements; empty where nobody asks.
        padded: whether the outermost axis may have elements that are only padding, numbered `PADDING`.
        fires: whether `call` has side effects.
    """

    axes: tuple[Axis, ...]
    call: Callable[[list[Any]], Any]
    groups: tuple[tuple[tuple[int, ...], Any], ...] = ()
    positions: tuple[int, ...] = ()
    padded: bool = False
    fires: bool = False

    def emits(self, k: int) -> bool:
        """Whether axis `k`, or one inside it, has effects that return tokens."""
        return any(axis.hook.emit is not None for axis in self.axes[k:])


def run_nest(nest: Nest, operands: Sequence[Operand]) -> Result:
    """All axes of a nest."""
    return _run(nest, 0, operands, ())


def run_unfinished(nest: Nest, operands: Sequence[Operand]) -> Result:
    """All axes of a nest, but for the fuse of the outermost: its stack, or the state of its reducer."""
    return _axis(nest, 0, operands, ())


def finish(axis: Axis, result: Result, lanes: Sequence[Lane] = ()) -> Result:
    """Apply the axis's fuse to what `run_unfinished` returned."""
    fuse = axis.hook.fuse
    if fuse is None:
        return result
    apply = fuse.finalize if isinstance(fuse, Reducer) else fuse
    return result._replace(values=over(lanes, apply)(result.values))


def _run(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    if k == len(nest.axes):
        return Result(of_lanes(nest.call, operands, lanes), {})
    return finish(nest.axes[k], _axis(nest, k, operands, lanes), lanes)


def _axis(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """Axis `k` and what is inside it, but for its fuse."""
    axis = nest.axes[k]
    strategy = axis.strategy
    if isinstance(strategy, Scan):
        return _steps(nest, k, operands, lanes)
    if isinstance(strategy, DedupGather):
        return _distinct(nest, k, operands, lanes)
    if isinstance(strategy, SafeMap):
        effects = nest.fires or nest.emits(k)
        if strategy.batch_size == 1 and effects:
            return _steps(nest, k, operands, lanes)
        if axis_size(operands, axis.name) > strategy.batch_size:
            exact = effects or axis.hook.streamed is not None or not axis.hook.stacks
            return (_exact_chunks if exact else _chunks)(nest, k, operands, lanes)
    return _lanes(nest, k, operands, lanes)


def _lanes(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """All elements at once."""
    axis = nest.axes[k]
    inner = as_lane(operands, axis.name, lanes)
    lane = Lane(axis.name, axis_size(operands, axis.name))
    result = _run(nest, k + 1, inner, (*lanes, lane))
    values, token = _emit(nest, k, result.values, inner, (*lanes, lane))
    if axis.hook.streamed is not None:
        state = _first_state(axis.hook.streamed, jax.eval_shape(lambda: values), lanes)
        values = _update(axis.hook.streamed, state, values, _padding_mask(nest, k, inner), lanes)
    return Result(
        values if axis.hook.stacks or axis.hook.streamed else None, result.carries, _join(result.token, token)
    )


def _chunks(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """A chunk after another, without effects: the first two may share elements."""
    axis, depth = nest.axes[k], len(lanes)
    mapped, at = split_off(operands, axis.name)
    chunks = Chunks.balanced(axis_size(operands, axis.name), axis.strategy.batch_size)
    lane = Lane(axis.name, chunks.size)

    def of_chunk(leaves: list[Any]) -> Any:
        ops = list(operands)
        for i, leaf in zip(mapped, leaves, strict=True):
            dims = tuple(name for name in ops[i].dims if name != axis.name)
            ops[i] = Operand(leaf, (axis.name, *dims))
        result = _run(nest, k + 1, as_lane(ops, axis.name, lanes), (*lanes, lane))
        return moved((result.values, result.carries), depth, 0)

    arrays = [jnp.asarray(operands[i].value) for i in mapped]
    return Result(*map_chunks(of_chunk, arrays, at, chunks, out_axes=depth))


def _exact_chunks(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """A chunk after another, each element once: the last one is shorter."""
    axis = nest.axes[k]
    reducer, depth = axis.hook.streamed, len(lanes)
    size, batch = axis_size(operands, axis.name), axis.strategy.batch_size

    def inner_of(start: Any, length: int) -> tuple[list[Operand], tuple[Lane, ...]]:
        cut = [
            op._replace(value=lax.dynamic_slice_in_dim(op.value, start, length, op.dims.index(axis.name)))
            if axis.name in op.dims
            else op
            for op in operands
        ]
        return as_lane(cut, axis.name, lanes), (*lanes, Lane(axis.name, length))

    def of_chunk(carry: tuple[Any, Any], start: Any, length: int = batch) -> tuple[Any, Any]:
        token, state = carry
        inner, around = inner_of(start, length)
        result = _run(nest, k + 1, inner, around)
        values, fired = _emit(nest, k, result.values, inner, around)
        if reducer is not None:
            state = _update(reducer, state, values, _padding_mask(nest, k, inner), lanes)
        kept = values if axis.hook.stacks else None
        return (_join(token, result.token, fired), state), (kept, result.carries)

    def values_of_chunk() -> Any:
        inner, around = inner_of(0, batch)
        return _run(nest, k + 1, inner, around).values

    state = None if reducer is None else _first_state(reducer, jax.eval_shape(values_of_chunk), lanes)
    carry = (jnp.int32(0) if nest.emits(k) else None, state)
    whole = size // batch
    carry, stacked = lax.scan(of_chunk, carry, jnp.arange(whole, dtype=jnp.int32) * batch)
    # (chunks, lanes..., batch, ...) to (lanes..., chunks * batch, ...)
    parts = [jax.tree.map(lambda y: merge(jnp.moveaxis(y, 0, depth), depth), stacked)]
    if size % batch:
        carry, rest = of_chunk(carry, whole * batch, size % batch)
        parts.append(rest)
    values, carries = parts[0] if len(parts) == 1 else jax.tree.map(lambda *ys: jnp.concatenate(ys, depth), *parts)
    token, state = carry
    return Result(values if reducer is None else state, carries, token)


def _steps(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """One element after another: with a carry at a Scan axis, else with none."""
    axis, depth = nest.axes[k], len(lanes)
    reducer, strategy = axis.hook.streamed, axis.strategy
    mapped, at = split_off(operands, axis.name)
    xs = [jnp.moveaxis(jnp.asarray(operands[i].value), dim, 0) for i, dim in zip(mapped, at, strict=True)]
    stacks = axis.hook.stacks
    if isinstance(strategy, Scan):
        stacks = stacks and strategy.collect_outputs
        step = over(lanes, checked_transition(strategy.transition, collect_outputs=True))
        first = broadcast(materialize_carry(strategy.init), lanes)
    else:
        step, first = (lambda carry, y: (carry, y)), ()

    def inner_of(elements: Sequence[Any]) -> list[Operand]:
        ops = list(operands)
        for i, element in zip(mapped, elements, strict=True):
            ops[i] = Operand(element, tuple(name for name in ops[i].dims if name != axis.name))
        return ops

    def of_step(carry: tuple[Any, Any, Any], elements: Sequence[Any]) -> tuple[Any, Any]:
        token, state, before = carry
        inner = inner_of(elements)
        result = _run(nest, k + 1, inner, lanes)
        after, out = step(before, result.values)
        out, fired = _emit(nest, k, out, inner, lanes)
        if reducer is not None:
            row = jax.tree.map(lambda y: jnp.expand_dims(y, depth), out)
            state = _update(reducer, state, row, _padding_mask(nest, k, inner), lanes)
        return (_join(token, result.token, fired), state, after), (out if stacks else None, result.carries)

    def row_of_step(elements: Sequence[Any]) -> Any:
        out = step(first, _run(nest, k + 1, inner_of(elements), lanes).values)[1]
        return jax.tree.map(lambda y: jnp.expand_dims(y, depth), out)

    state = None
    if reducer is not None:
        elements = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
        state = _first_state(reducer, jax.eval_shape(row_of_step, elements), lanes)
    carry = (jnp.int32(0) if nest.emits(k) else None, state, first)
    (token, state, last), stacked = lax.scan(of_step, carry, xs)
    values, carries = moved(stacked, 0, depth)
    if isinstance(strategy, Scan):
        carries = {axis.name: last, **carries}
    return Result(values if reducer is None else state, carries, token)


def _distinct(nest: Nest, k: int, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """The distinct elements, at once or a chunk after another, and their results handed out."""
    axis = nest.axes[k]
    strategy = axis.strategy
    chosen = take_distinct(nest, operands, axis)
    if strategy.at_once < strategy.k_bucket:
        if nest.emits(k + 1):
            raise DispatchRejected(
                f"the DedupGather axis {axis.name!r} computes its {strategy.k_bucket} distinct elements in chunks of "
                f"{strategy.at_once}, and an axis inside it has effects, which occur for each of its original elements "
                f"and in their order, not for those of a chunk; plan it with default_batch_size={strategy.k_bucket}, "
                "which computes all of them at once, or without duplicates, or put the effects at its own edge."
            )
        result = _chunks(nest, k, chosen, lanes)
    else:
        lane = Lane(axis.name, strategy.k_bucket, strategy)
        result = _run(nest, k + 1, as_lane(chosen, axis.name, lanes), (*lanes, lane))
    return hand_out(nest, k, result, operands, lanes)


def take_distinct(nest: Nest, operands: Sequence[Operand], axis: Axis) -> list[Operand]:
    """The operands with only the distinct elements of a DedupGather axis."""
    strategy = axis.strategy
    chosen = list(operands)
    # The numbers of the elements are no argument, and a dedup_fn does not get them.
    for i in range(len(operands)) if strategy.dedup_fn is None else nest.positions:
        op = operands[i]
        if axis.name in op.dims:
            chosen[i] = op._replace(value=taken(op.value, strategy.unique_indices, op.dims.index(axis.name)))
    if strategy.dedup_fn is None:
        return chosen
    for indices, treedef in nest.groups:
        if not indices or axis.name not in operands[indices[0]].dims:
            continue
        dims = operands[indices[0]].dims
        select = mapped_over(dims.index(axis.name), lambda xs: strategy.dedup_fn(xs, strategy.unique_indices))
        leading = dims.index(axis.name)
        leaves = jax.tree.leaves(select(treedef.unflatten([operands[i].value for i in indices])))
        for i, leaf in zip(indices, leaves, strict=True):
            if np.shape(leaf)[leading : leading + 1] != (strategy.k_bucket,):
                raise ValueError(
                    f"the dedup_fn of axis {axis.name!r} returned an array of shape {np.shape(leaf)[leading:]}, but "
                    f"must return k_bucket = {strategy.k_bucket} elements along the leading axis, one for each of the "
                    "unique_indices that it is given."
                )
            chosen[i] = operands[i]._replace(value=leaf)
    return chosen


def hand_out(nest: Nest, k: int, result: Result, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> Result:
    """The results of the distinct elements of axis `k` for all, with the effects of its edge."""
    axis, depth = nest.axes[k], len(lanes)
    strategy = axis.strategy
    if strategy.gather_fn is None:
        values = all_taken(result.values, strategy.index_map, depth)
    else:
        values = over(lanes, lambda ys: strategy.gather_fn(ys, strategy.index_map))(result.values)
    carries = all_taken(result.carries, strategy.index_map, depth)
    lane = Lane(axis.name, strategy.index_map.size)
    values, fired = _emit(nest, k, values, operands, (*lanes, lane))
    if axis.hook.streamed is not None:
        state = _first_state(axis.hook.streamed, jax.eval_shape(lambda: values), lanes)
        values = _update(axis.hook.streamed, state, values, None, lanes)
    return Result(values if axis.hook.stacks or axis.hook.streamed else None, carries, _join(result.token, fired))


def _emit(nest: Nest, k: int, values: Any, operands: Sequence[Operand], lanes: tuple[Lane, ...]) -> tuple[Any, Any]:
    """Pass the elements of all lanes to the hook of axis `k`, as rows."""
    emit = nest.axes[k].hook.emit
    shape = tuple(lane.size if lane.copies is None else lane.copies.index_map.size for lane in lanes)
    rows = int(np.prod(shape))
    if emit is None or rows == 0:
        return values, None
    copied = [(dim, lane.copies) for dim, lane in enumerate(lanes) if lane.copies is not None]
    for dim, copies in copied:
        values = all_taken(values, copies.index_map, dim)
    index = jnp.stack([_grid(nest, j, operands, lanes, shape) for j in range(k + 1)], axis=1)
    mask = index[:, 0] < PADDING if nest.padded else None
    values = jax.tree.map(jnp.asarray, values)  # a step of a loop may yield a Python number
    flat = jax.tree.map(lambda y: y.reshape(rows, *y.shape[len(shape) :]), values)
    flat, token = emit(flat, index, mask)
    values = jax.tree.map(lambda y: y.reshape(*shape, *y.shape[1:]), flat)
    for dim, copies in copied:
        values = all_taken(values, copies.unique_indices, dim)
    return values, None if token is None else jnp.asarray(token, jnp.int32)


def _grid(nest: Nest, j: int, operands: Sequence[Operand], lanes: Sequence[Lane], shape: tuple[int, ...]) -> jax.Array:
    """The index in axis `j` of each row."""
    name = nest.axes[j].name
    dim = next((dim for dim, lane in enumerate(lanes) if lane.name == name), None)
    if dim is None:  # a loop, which all lanes are in the same step of
        return jnp.full(int(np.prod(shape)), operands[nest.positions[j]].value, jnp.int32)
    copied = isinstance(nest.axes[j].strategy, DedupGather)
    position = jnp.arange(shape[dim], dtype=jnp.int32) if copied else operands[nest.positions[j]].value
    along = [1] * len(shape)
    along[dim] = -1
    return jnp.broadcast_to(position.reshape(along), shape).reshape(-1)


def _padding_mask(nest: Nest, k: int, operands: Sequence[Operand]) -> Any:
    """Which elements of axis `k` at hand are real, `(n,)`, or None for all; only the outermost axis is ever padded."""
    if not nest.padded or k > 0:
        return None
    return jnp.atleast_1d(operands[nest.positions[0]].value < PADDING)  # a step of a scan has one element at hand


def _first_state(reducer: Reducer, values: Any, lanes: Sequence[Lane]) -> Any:
    """The reducer's first state for elements of the types of `values`, whose axis follows the lanes."""
    element = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape[len(lanes) + 1 :], y.dtype), values)
    return broadcast(reducer.init(element), lanes)


def _update(reducer: Reducer, state: Any, values: Any, mask: Any, lanes: Sequence[Lane]) -> Any:
    return over(lanes, lambda state, values: reducer.update(state, values, mask))(state, values)


def _join(*tokens: Any) -> Any:
    """One token that needs all of those that there are."""
    there = [token for token in tokens if token is not None]
    return sum(there[1:], there[0]) if there else None
