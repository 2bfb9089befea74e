"""Reduce the results of a chunked map chunk by chunk."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.tiling._jax_internals import side_effects, trace, vary_like
from xtrax.tiling._map.chunked import split_apart
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._map.loop import In, Kind, Out, Spec, check_whole, chunk_types, take
from xtrax.tiling._map.primitive import bind
from xtrax.tiling._same_jaxpr import compiled_once
from xtrax.tiling.reducers import Reducer

Leaves = list[jax.Array]


def reduce_chunks(
    batched: Callable[[Leaves], Any],
    leaves: Leaves,
    axes: Sequence[int],
    chunks: Chunks,
    reducer: Reducer,
    *,
    valid: jax.Array | None = None,
    remat: bool = False,
    grad_chunk: int | None = None,
) -> Any:
    """The state of a reducer that has seen all results of `map_chunks(batched, leaves, axes, chunks)`, in order.

    Forward, one state is carried from chunk to chunk. A carry would keep every state that there was when it is
    differentiated, and a loop that slices its operands transposes badly, so what is differentiated is a map from chunks
    to states of their own, which are merged: one state for each chunk. A function with side effects is mapped so from
    the start, as reverse mode would have to run it twice, for the values and for the derivative.

    Args:
        batched: a pure function of the list of a chunk of each leaf, the mapped axis first; its results too.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout. Where they overlap and `batched` has side effects, the last chunk is shorter instead.
        reducer: what reduces the results.
        valid: bool `(chunks.total,)`, which elements count; None for all.
        remat: whether reverse mode computes each chunk anew.
        grad_chunk: the most elements at once when differentiated; implies `remat`.
    """
    check_whole(leaves, axes, chunks)
    ins = [In(Kind.ROWS, axis) for axis in axes]
    if valid is not None:
        leaves, ins = [*leaves, valid], [*ins, In(Kind.ROWS)]
    backward = chunks if grad_chunk is None else Chunks.balanced(chunks.total, grad_chunk)

    def values(xs: Leaves) -> Any:
        return batched(xs if valid is None else xs[:-1])

    def first(types: Leaves) -> Any:
        of_chunk = jax.eval_shape(values, types)
        return reducer.init(jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape[1:], y.dtype), of_chunk))

    def step(state: Any, xs: Leaves, kept: jax.Array | None) -> Any:
        if valid is not None:
            kept = xs[-1] if kept is None else kept & xs[-1]
        return reducer.update(state, values(xs), kept)

    types = chunk_types(leaves, ins, chunks)
    if chunks.count == 0:
        return first(types)
    initial = _alike(first(types), step, types)
    forward = _Hoisted(step, initial, types, chunks)
    if chunks.overlap and forward.effects:
        states = [
            reduce_chunks(
                batched, cut if valid is None else cut[:-1], axes, part, reducer,
                valid=None if valid is None else cut[-1], remat=remat, grad_chunk=grad_chunk,
            )
            for cut, part in split_apart(leaves, [kind.axis for kind in ins], chunks)
        ]  # fmt: skip
        return reducer.merge(*states)
    separate = backward != chunks
    if forward.effects:
        return _merged(forward, forward.consts, initial, ins, chunks, leaves, reducer, remat or separate)
    other = _Hoisted(step, initial, chunk_types(leaves, ins, backward), backward) if separate else forward

    @jax.custom_jvp
    def reduced(consts: Leaves, other_consts: Leaves, initial: Any, xs: Leaves) -> Any:
        return _carried(forward.of(consts), initial, ins, chunks, xs)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        flat, treedef = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))
        active = [i for i, dot in enumerate(dots) if not isinstance(dot, SymbolicZero)]

        def differentiated(*values: jax.Array) -> Any:
            merged = list(flat)
            for i, value in zip(active, values, strict=True):
                merged[i] = value
            consts, other_consts, initial, xs = treedef.unflatten(merged)
            used = other_consts if separate else consts
            return _merged(other, used, initial, ins, backward, xs, reducer, remat or separate)

        return jax.jvp(differentiated, [flat[i] for i in active], [dots[i] for i in active])

    reduced.defjvp(rule, symbolic_zeros=True)
    return reduced(forward.consts, other.consts if separate else [], initial, leaves)


class _Hoisted:
    """A step of a reduction, with the arrays that it closes over made arguments."""

    def __init__(self, step: Callable[..., Any], initial: Any, types: Leaves, chunks: Chunks) -> None:
        masked = [jax.ShapeDtypeStruct((chunks.size,), jnp.bool_)] if chunks.overlap else [None]
        self._traced = jax.make_jaxpr(step)(initial, types, *masked)
        self._treedef = jax.tree.structure(initial)
        self.consts = list(self._traced.consts)
        self.effects = side_effects(self._traced)

    def of(self, consts: Leaves) -> Callable[..., Any]:
        """The step with these arrays."""
        run = jaxpr_as_fun(ClosedJaxpr(self._traced.jaxpr, list(consts)))
        return lambda *args: self._treedef.unflatten(run(*jax.tree.leaves(args)))


def _kept(chunks: Chunks, index: Any) -> jax.Array | None:
    """Which elements of a chunk no later chunk repeats; None for all."""
    if not chunks.overlap:
        return None
    return (index > 0) | (jnp.arange(chunks.size) < chunks.size - chunks.overlap)


def _carried(step: Callable[..., Any], initial: Any, ins: Sequence[In], chunks: Chunks, xs: Leaves) -> Any:
    """One state, carried from chunk to chunk."""

    def body(index: Any, state: Any) -> Any:
        rows = [take(x, kind, chunks, index) for x, kind in zip(xs, ins, strict=True)]
        return step(state, rows, _kept(chunks, index))

    return body(0, initial) if chunks.count == 1 else lax.fori_loop(0, chunks.count, body, initial)


def _merged(
    hoisted: _Hoisted, consts: Leaves, initial: Any, ins: Sequence[In], chunks: Chunks, xs: Leaves, reducer: Reducer,
    remat: bool,
) -> Any:  # fmt: skip
    """A state for each chunk, merged one after another."""
    treedef = jax.tree.structure(initial)
    masks = [jax.vmap(lambda i: _kept(chunks, i))(jnp.arange(chunks.count))] if chunks.overlap else []
    start = jax.tree.leaves(initial)
    operands = [*consts, *start, *xs, *masks]
    wholes = len(consts) + len(start)
    kinds = (*[In(Kind.WHOLE)] * wholes, *ins, *[In(Kind.CHUNK)] * len(masks))

    def of_chunk(*args: Any) -> Leaves:
        step = hoisted.of(list(args[: len(consts)]))
        return jax.tree.leaves(step(args[len(consts) :]))

    jaxpr = trace(of_chunk, chunk_types(operands, kinds, chunks))
    states = treedef.unflatten(bind(Spec(jaxpr, chunks, kinds, (Out(Kind.CHUNK),) * len(start), remat), operands))
    return merge_states(reducer, states)


def merge_states(reducer: Reducer, states: Any) -> Any:
    """States with a leading axis, merged in its order."""

    def merged(states: Any) -> Any:
        first = jax.tree.map(lambda s: s[0], states)
        rest = jax.tree.map(lambda s: s[1:], states)
        return lax.scan(lambda state, more: (reducer.merge(state, more), None), first, rest)[0]

    return compiled_once(merged, states)


def _alike(state: Any, step: Callable[..., Any], types: Leaves) -> Any:
    """The first state with the types that a step gives it, which inside `shard_map` vary over devices."""
    state = jax.tree.map(jnp.asarray, state)
    after = jax.eval_shape(lambda xs: step(state, xs, None), types)
    return jax.tree.map(lambda leaf, out: vary_like(leaf, [out]), state, after)
