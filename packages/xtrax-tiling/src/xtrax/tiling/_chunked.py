"""The core of every chunked map: `jax.vmap` over at most a given number of elements at once.

Two loops compute the same values. `_fill` writes each chunk into preallocated outputs, and lets the last chunk overlap
the one before, so any number of elements needs no memory beyond one chunk. Reverse mode through it would cost the
square of the number of chunks, since the transpose of a slice of a loop-invariant array adds a whole array per step.
`_split_scan` scans over the elements split into chunks, which transposes into one write per chunk, but copies the
elements when they do not divide. So `_fill` is what runs, and `_split_scan` is what is differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.tiling._layout import Chunks

Leaves: TypeAlias = list[jax.Array]
ChunkFn: TypeAlias = Callable[[Leaves], Leaves]


def chunked_vmap(fn: Callable[[list[Any]], Any], leaves: Leaves, axes: Sequence[int], chunks: Chunks) -> Any:
    """`jax.vmap(fn, in_axes=(axes,))(leaves)`, one chunk after another.

    Args:
        fn: a pure function of the list of one element of each leaf. Arrays that it closes over may be tracers.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout; one chunk or none is a plain `jax.vmap`.

    Returns:
        What `fn` returns, each leaf stacked along a new leading axis of size `chunks.total`.
    """
    if chunks.count <= 1:
        return jax.vmap(fn, in_axes=(list(axes),))(leaves)
    return map_chunks(jax.vmap(fn), leaves, axes, chunks)


def map_chunks(batched: Callable[[Leaves], Any], leaves: Leaves, axes: Sequence[int], chunks: Chunks) -> Any:
    """A function of a batch with independent elements, one chunk after another.

    Args:
        batched: a pure function of the list of a chunk of each leaf, the mapped axis first; its results have the axis
            first too. Arrays that it closes over may be tracers.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout.

    Returns:
        What `batched` returns of all elements, each leaf `(chunks.total, ...)`.
    """
    if chunks.count <= 1:
        return batched([jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)])
    keys = _KeyOutputs()
    run: ChunkFn = keys.unwrapped(batched)
    if not chunks.overlap and not any(axes):
        return keys.rewrap(_split_scan(run, leaves, axes, chunks))
    example = jax.eval_shape(lambda xs: _take(xs, axes, chunks, jnp.int32(0)), leaves)
    traced, outputs = jax.make_jaxpr(run, return_shape=True)(example)

    # The arrays that fn closes over become arguments: custom_jvp cannot differentiate with respect to a closure.
    def run_with(consts: Leaves) -> ChunkFn:
        closed = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))
        return lambda xs: list(closed(*xs))

    @jax.custom_jvp
    def mapped(consts: Leaves, xs: Leaves) -> Leaves:
        return _fill(run_with(consts), xs, axes, chunks, outputs)

    def mapped_jvp(primals: tuple[Leaves, Leaves], tangents: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
        flat, treedef = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, SymbolicZero))
        active = [i for i, dot in enumerate(dots) if not isinstance(dot, SymbolicZero)]

        def differentiated(*values: jax.Array) -> Leaves:
            merged = list(flat)
            for i, value in zip(active, values, strict=True):
                merged[i] = value
            consts, xs = jax.tree.unflatten(treedef, merged)
            return _split_scan(run_with(consts), xs, axes, chunks)

        return jax.jvp(differentiated, [flat[i] for i in active], [dots[i] for i in active])

    mapped.defjvp(mapped_jvp, symbolic_zeros=True)
    return keys.rewrap(mapped(list(traced.consts), leaves))


def _take(leaves: Leaves, axes: Sequence[int], chunks: Chunks, start: jax.Array) -> Leaves:
    """The chunk that begins at `start`, each leaf with its mapped axis first."""
    return [
        jnp.moveaxis(lax.dynamic_slice_in_dim(leaf, start, chunks.size, axis), axis, 0)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


def _fill(run: ChunkFn, leaves: Leaves, axes: Sequence[int], chunks: Chunks, outputs: Sequence[Any]) -> Leaves:
    """Run each chunk and write it over its place in the outputs; `outputs` are the types of one chunk's."""

    def body(index: jax.Array, buffers: Leaves) -> Leaves:
        start = jnp.minimum(index * chunks.size, chunks.total - chunks.size)
        ys = run(_take(leaves, axes, chunks, start))
        return [lax.dynamic_update_slice_in_dim(buffer, y, start, 0) for buffer, y in zip(buffers, ys, strict=True)]

    return lax.fori_loop(0, chunks.count, body, [_buffer(aval, chunks.total) for aval in outputs])


def _buffer(chunk: jax.ShapeDtypeStruct, total: int) -> jax.Array:
    """Zeros for `total` rows of the type of `chunk`, its sharding included, as a loop's carry must not change type."""
    sharding = chunk.sharding
    if sharding is None or not any(sharding.spec):
        sharding = None
    zeros = lax.full((total, *chunk.shape[1:]), 0, chunk.dtype, sharding=sharding)
    varying = tuple(chunk.manual_axis_type.varying) if chunk.manual_axis_type else ()
    return lax.pcast(zeros, varying, to="varying") if varying else zeros


def _split_scan(run: ChunkFn, leaves: Leaves, axes: Sequence[int], chunks: Chunks) -> Leaves:
    """The same map as a scan over the elements split into chunks."""
    xs = [_split(jnp.moveaxis(leaf, axis, 0), chunks) for leaf, axis in zip(leaves, axes, strict=True)]
    _, ys = lax.scan(lambda _, chunk: (None, run(chunk)), None, xs)
    return [_join(y, chunks) for y in ys]


def _split(x: jax.Array, chunks: Chunks) -> jax.Array:
    """`(total, ...)` to `(count, size, ...)`."""
    if chunks.overlap:
        x = jnp.concatenate([x[: (chunks.count - 1) * chunks.size], x[chunks.total - chunks.size :]])
    return x.reshape(chunks.count, chunks.size, *x.shape[1:])


def _join(y: jax.Array, chunks: Chunks) -> jax.Array:
    """`(count, size, ...)` to `(total, ...)`; what the last chunk repeats is taken from it."""
    flat = y.reshape(chunks.count * chunks.size, *y.shape[2:])
    if not chunks.overlap:
        return flat
    return jnp.concatenate([flat[: chunks.total - chunks.size], y[-1]])


class _KeyOutputs:
    """Carries typed PRNG keys through a loop as their bits, since there are no zeros of a key type."""

    def __init__(self) -> None:
        self._treedef: Any = None
        self._impls: list[Any] = []

    def unwrapped(self, fn: Callable[[Leaves], Any]) -> ChunkFn:
        """`fn` with flat outputs and keys as key data."""

        def flat(xs: Leaves) -> Leaves:
            ys, self._treedef = jax.tree.flatten(fn(xs))
            is_key = [jnp.issubdtype(y.dtype, jax.dtypes.prng_key) for y in ys]
            self._impls = [jax.random.key_impl(y) if key else None for y, key in zip(ys, is_key, strict=True)]
            return [jax.random.key_data(y) if key else y for y, key in zip(ys, is_key, strict=True)]

        return flat

    def rewrap(self, ys: Leaves) -> Any:
        """Undo `unwrapped`, once it has been traced."""
        leaves = [
            y if impl is None else jax.random.wrap_key_data(y, impl=impl)
            for y, impl in zip(ys, self._impls, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)
