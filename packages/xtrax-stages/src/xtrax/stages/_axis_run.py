"""One axis, run with its boundary, at a place inside other axes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xtrax.stages._effects import (
    all_on_host,
    emit,
    emit_lanes,
    has_effects,
    host_records,
    is_batchable,
    is_ordered,
    keeps_values,
    thread_result,
)
from xtrax.stages._errors import ExecutorError
from xtrax.stages._host_call import NO_TOKEN
from xtrax.stages._place import AtPlace, Place
from xtrax.stages.boundaries import AxisBoundary
from xtrax.stages.host import refuse_derivatives
from xtrax.tiling import axis_dispatch, safe_scan
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.strategy import DedupGather, SafeMap, Vmap

_GATHERED_AT_ONCE = 1024  # elements of a deduplicated axis that a streamed fuse takes at a time


@dataclasses.dataclass(frozen=True)
class Axis:
    """What is done with the elements of one axis.

    Args:
        fn: `(x, place) -> (y, token)`.
        boundary: What happens at its edge, or None.
        place: Where the axis lies.
        name: What it is called in messages.
        inner_on_host: Whether `fn` has no effects but those of host taps and sinks that know their place.
        guard: Whether what a sink takes may not be differentiated, as no one keeps the token of an axis that yields
            None.
    """

    fn: AtPlace
    boundary: AxisBoundary | None
    place: Place
    name: str
    inner_on_host: bool = False

    guard: bool = False

    @property
    def reducer(self) -> Reducer | None:
        """The fuse, if it is to be streamed."""
        fuse = None if self.boundary is None else self.boundary.fuse
        return fuse if isinstance(fuse, Reducer) else None

    def element(self, x: Any) -> Any:
        """The abstract output of one element, of which `x` is one abstract input."""
        return jax.eval_shape(lambda x, i: self.fn(x, self.place.inside(self.name, i))[0], x, jnp.int32(0))

    def compute(self, xs: Any, numbers: jax.Array) -> tuple[Any, Any]:
        """The outputs of several elements at once, before the boundary."""
        ys, tokens = jax.vmap(lambda x, i: self.fn(x, self.place.inside(self.name, i)))(xs, numbers)
        return ys, jnp.max(tokens, initial=NO_TOKEN) if self.inner_on_host else NO_TOKEN

    def guarded(self, ys: Any) -> Any:
        """The outputs, which may not be differentiated if nothing will depend on their effects."""
        lost = self.guard and not keeps_values(self.boundary) and bool(host_records(self.boundary))
        return refuse_derivatives(ys) if lost else ys

    def check_size(self, n: int) -> None:
        """Refuse an axis that is too short for its reducer."""
        if self.reducer is not None:
            self.reducer.check_size(n, f"axis {self.name!r}" if self.name else "the axis")

    def fused(self, ys: Any, element: Any, n: int) -> Any:
        """What the axis yields, of what it stacks; `element` is one of it, abstractly."""
        fuse = None if self.boundary is None else self.boundary.fuse
        if isinstance(fuse, Reducer):
            self.check_size(n)
            return fuse.finalize(fuse.update(fuse.init(element), ys, None))
        return ys if fuse is None else fuse(ys)


def run_map(axis: Axis, xs: Any, strategy: Vmap | SafeMap | DedupGather, n: int) -> tuple[Any, Any]:
    """Map over the leading axis of `xs`, of size `n`.

    Returns:
        What the axis yields, and the token of its host effects.
    """
    if isinstance(strategy, DedupGather):
        return _map_distinct(axis, xs, strategy, n)
    element = _abstract(xs)
    if isinstance(strategy, Vmap):
        _refuse_order(axis.boundary)
    else:
        size = strategy.batch_size
        fires = (n > size or size == 1) and (has_effects(axis.boundary) or _fires(axis, element))
        if fires and size == 1:
            return _map_chunks(axis, xs, n, 1, _only)
        if n > size and (fires or axis.reducer is not None):
            return _map_chunks(axis, xs, n, size, _at_once)
        if n > size:
            ys = axis_dispatch(strategy, lambda x: axis.fn(x, axis.place.inside(axis.name, 0))[0], xs)
            return axis.fused(ys, None, n), NO_TOKEN
    ys, token = _at_once(axis, xs, jnp.arange(n, dtype=jnp.int32))
    if not keeps_values(axis.boundary):
        return None, token
    return axis.fused(ys, None if axis.reducer is None else axis.element(element), n), token


def run_scan(
    axis: Axis, step: Callable[[Any, Any, Place], tuple[Any, Any, Any]], init: Any, xs: Any, n: int
) -> tuple[Any, Any, Any]:
    """Scan over the leading axis of `xs`, of size `n`; `axis.fn` is not used.

    Args:
        axis: What is done at its edge.
        step: `(carry, x, place) -> (carry, y, token)`.
        init: The first carry; `CarryShape` leaves stand for zeros.
        xs: Leaves `(n, ...)`.
        n: The size of the axis, at least 1.

    Returns:
        The last carry, what the axis yields, and the token of its host effects.
    """
    numbered = (xs, jnp.arange(n, dtype=jnp.int32))
    reducer, hosted = axis.reducer, axis.inner_on_host or bool(host_records(axis.boundary))

    def plain(carry: Any, entry: tuple[Any, Any]) -> tuple[Any, Any]:
        place = axis.place.inside(axis.name, entry[1])
        carry, y, _ = step(carry, entry[0], place)
        return carry, emit(axis.boundary, y, place)[0]

    if reducer is None and not hosted:
        carry, ys = safe_scan(plain, init, numbered)
        return carry, axis.fused(ys, None, n) if keeps_values(axis.boundary) else None, NO_TOKEN
    # Checks the carry that the caller knows, before more is put into it, and tells what is reduced.
    _, stacked = jax.eval_shape(lambda entries: safe_scan(plain, init, entries), numbered)
    state = None
    if reducer is not None:
        axis.check_size(n)
        state = reducer.init(_abstract(stacked))

    def body(carry: Any, entry: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, state, token = carry
        place = axis.place.inside(axis.name, entry[1])
        carry, y, inner = step(carry, entry[0], place)
        y, own = emit(axis.boundary, y, place)
        if reducer is not None:
            state, y = reducer.update(state, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], y), None), None
        return (carry, state, token | inner | own), y

    (carry, state, token), ys = safe_scan(body, (init, state, jnp.int32(0)), numbered)
    if reducer is not None:
        return carry, reducer.finalize(state), token
    return carry, axis.fused(ys, None, n) if keeps_values(axis.boundary) else None, token


def _at_once(axis: Axis, xs: Any, numbers: jax.Array) -> tuple[Any, Any]:
    """All of these elements, and then their effects."""
    ys, inner = axis.compute(xs, numbers)
    ys, own = emit_lanes(axis.boundary, axis.guarded(ys), axis.place.rows(axis.name, numbers))
    return ys, inner | own


def _only(axis: Axis, xs: Any, numbers: jax.Array) -> tuple[Any, Any]:
    """A single element, by `fn` without `jax.vmap`, under which JAX refuses the ordered effects of other callables."""
    y, inner = axis.fn(jax.tree.map(lambda x: x[0], xs), axis.place.inside(axis.name, numbers[0]))
    # The boundary gets a stack of one, since a callable with a batching rule may have its effects in that rule.
    ys = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], y)
    ys, own = emit_lanes(axis.boundary, axis.guarded(ys), axis.place.rows(axis.name, numbers))
    return ys, inner | own


def _map_chunks(
    axis: Axis, xs: Any, n: int, size: int, run: Callable[[Axis, Any, jax.Array], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """One chunk after another; the last one is shorter where `size` does not divide the axis.

    The chunks of xtrax.tiling overlap instead, which would repeat the effects of the elements that they share.
    """
    reducer = axis.reducer
    state = None
    if reducer is not None:
        axis.check_size(n)
        state = reducer.init(axis.element(_abstract(xs)))

    def step(carry: Any, chunk: Any, numbers: jax.Array) -> tuple[Any, Any]:
        state, token = carry
        ys, fired = run(axis, chunk, numbers)
        if reducer is not None:
            state, ys = reducer.update(state, ys, None), None
        return (state, token | fired), ys

    count, rest = divmod(n, size)
    lanes = jnp.arange(size, dtype=jnp.int32)
    starts = jnp.arange(count, dtype=jnp.int32) * size

    def at(carry: Any, start: jax.Array) -> tuple[Any, Any]:
        # Slicing inside the loop copies no more than a chunk; splitting xs beforehand would copy all of it.
        return step(carry, jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), xs), start + lanes)

    def of_chunk(carry: Any, entry: tuple[Any, jax.Array]) -> tuple[Any, Any]:
        return step(carry, entry[0], entry[1] + lanes)

    carry = (state, jnp.int32(0))
    if rest:
        carry, ys = lax.scan(at, carry, starts)
    else:
        chunks = jax.tree.map(lambda x: x.reshape(count, size, *x.shape[1:]), xs)
        carry, ys = lax.scan(of_chunk, carry, (chunks, starts))
    ys = jax.tree.map(lambda y: y.reshape(count * size, *y.shape[2:]), ys)
    if rest:
        carry, last = step(carry, jax.tree.map(lambda x: x[count * size :], xs), count * size + lanes[:rest])
        ys = jax.tree.map(lambda *parts: jnp.concatenate(parts), ys, last)
    state, token = carry
    if reducer is not None:
        return reducer.finalize(state), token
    return axis.fused(ys, None, n) if keeps_values(axis.boundary) else None, token


def _map_distinct(axis: Axis, xs: Any, strategy: DedupGather, n: int) -> tuple[Any, Any]:
    """Map over the distinct elements, and pass the result of each original position through the boundary."""
    if not axis.inner_on_host and _fires(axis, _abstract(xs)):
        raise ExecutorError(
            "fn has side effects, and on a DedupGather axis they would fire for each distinct element, and again for "
            "the padding, instead of for each element. Put them into the boundary of the axis, or map it by SafeMap."
        )
    index_map = strategy.index_map
    # The numbers of the distinct elements travel beside them.
    select = strategy.dedup_fn or _take
    numbered = dataclasses.replace(
        strategy,
        dedup_fn=lambda xs, indices: (select(xs, indices), jnp.arange(strategy.k_bucket, dtype=jnp.int32)),
        gather_fn=lambda ys, index_map: ys,
    )
    distinct, tokens = axis_dispatch(
        numbered, lambda entry: axis.fn(entry[0], axis.place.inside(axis.name, entry[1], index_map)), xs
    )
    token = jnp.max(tokens, initial=NO_TOKEN) if axis.inner_on_host else NO_TOKEN
    distinct = axis.guarded(distinct)
    gather = strategy.gather_fn or _take
    if not has_effects(axis.boundary):
        values = thread_result(distinct, token)
    elif strategy.gather_fn is not None:
        gathered = gather(distinct, index_map)
        values, fired = emit_lanes(axis.boundary, gathered, axis.place.rows(axis.name, jnp.arange(n)))
        token |= fired
        return axis.fused(values, _abstract(gathered), n) if keeps_values(axis.boundary) else None, token
    elif all_on_host(axis.boundary):
        numbers = jnp.arange(strategy.k_bucket, dtype=jnp.int32)
        values, fired = emit_lanes(axis.boundary, distinct, axis.place.rows(axis.name, numbers, index_map))
        token |= fired
    else:
        # Each position takes its result as its turn comes, so that what a sink takes is not stacked for all of them.
        of = jnp.asarray(index_map)
        places = axis.place.rows(axis.name, jnp.arange(n))
        gathered, fired = emit_lanes(
            axis.boundary, jnp.arange(n), places, lambda i: jax.tree.map(lambda y: y[of[i]], distinct)
        )
        token |= fired
        return axis.fused(gathered, _abstract(distinct), n) if keeps_values(axis.boundary) else None, token
    if not keeps_values(axis.boundary):
        return None, token
    if axis.reducer is not None and strategy.gather_fn is None:
        return _reduce_repeated(axis, values, jnp.asarray(index_map)), token
    return axis.fused(gather(values, index_map), _abstract(values), n), token


def _reduce_repeated(axis: Axis, distinct: Any, index_map: jax.Array) -> Any:
    """The streamed fuse of all positions, of which only the distinct results are ever stored."""
    reducer, n = axis.reducer, index_map.size
    if reducer is None:
        raise ExecutorError("the fuse is not a Reducer")
    axis.check_size(n)
    size = min(n, _GATHERED_AT_ONCE)
    count = -(-n // size)
    padded = jnp.concatenate([index_map, jnp.zeros(count * size - n, index_map.dtype)]).reshape(count, size)
    counted = (jnp.arange(count * size) < n).reshape(count, size)
    state, _ = lax.scan(
        lambda state, chunk: (reducer.update(state, _take(distinct, chunk[0]), chunk[1]), None),
        reducer.init(_abstract(distinct)),
        (padded, counted),
    )
    return reducer.finalize(state)


def _abstract(xs: Any) -> Any:
    """One abstract element of leaves `(n, ...)`."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)


def _take(tree: Any, indices: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[indices], tree)


def _fires(axis: Axis, element: Any) -> bool:
    """Whether `fn` has side effects of its own, as one that runs an inner axis may."""
    traced = jax.make_jaxpr(lambda x, i: axis.fn(x, axis.place.inside(axis.name, i)))(element, jnp.int32(0))
    return bool(traced.effects)


def _refuse_order(boundary: AxisBoundary | None) -> None:
    for role in ("tap", "sink"):
        effect = getattr(boundary, role, None)
        if is_ordered(effect) and not is_batchable(effect):
            raise ExecutorError(
                f"the {role} is ordered, and Vmap runs all elements at once. Use SafeMap, whose chunks keep their "
                f"size, or execute_scan_axis, or make the {role} unordered or a Host{role.capitalize()}."
            )
