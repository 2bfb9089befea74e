"""The core of every chunked map: `jax.vmap` over at most a given number of elements at once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from xtrax.tiling._axes import output_axes
from xtrax.tiling._jax_internals import evaluate, side_effects, trace
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._map.loop import In, Kind, Out, Spec, check_whole, chunk_types, take
from xtrax.tiling._map.primitive import bind

Leaves: TypeAlias = list[jax.Array]


def chunked_vmap(
    fn: Callable[[list[Any]], Any],
    leaves: Leaves,
    axes: Sequence[int],
    chunks: Chunks,
    *,
    out_axes: Any = 0,
    remat: bool = False,
    grad_chunk: int | None = None,
) -> Any:
    """`jax.vmap(fn, in_axes=(axes,))(leaves)`, one chunk after another.

    Args:
        fn: a pure function of the list of one element of each leaf. Arrays that it closes over may be tracers.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout; one chunk or none is a plain `jax.vmap`. Where they overlap and `fn` has side effects, these
            occur once for each element: the last chunk is then shorter.
        out_axes: where the mapped axis goes in each result: an int, or a pytree of them that is a prefix of the output.
        remat: whether reverse mode saves nothing but the arguments, and computes each chunk anew.
        grad_chunk: the most elements that the backward pass takes at once, if not those of `chunks`; implies `remat`.

    Returns:
        What `fn` returns, each leaf stacked along a new axis of size `chunks.total`.
    """
    return map_chunks(
        jax.vmap(fn), leaves, axes, chunks, out_axes=out_axes, remat=remat, grad_chunk=grad_chunk
    )  # fmt: skip


def map_chunks(
    batched: Callable[[Leaves], Any],
    leaves: Leaves,
    axes: Sequence[int],
    chunks: Chunks,
    *,
    out_axes: Any = 0,
    remat: bool = False,
    grad_chunk: int | None = None,
) -> Any:
    """A function of a batch with independent elements, one chunk after another.

    Args:
        batched: a pure function of the list of a chunk of each leaf, the mapped axis first; its results have the axis
            first too, but for those that `out_axes` has None for. Arrays that it closes over may be tracers.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout. Where they overlap and `batched` has side effects, the last chunk is shorter instead.
        out_axes: where the mapped axis goes in each result: an int, or a pytree of ints and None that is a prefix of
            the output. A chunk is turned before it is written, so no result is ever turned as a whole. None is for a
            result without the axis, which is the same for all chunks, and is that of the first.
        remat: whether reverse mode saves nothing but the arguments, and computes each chunk anew.
        grad_chunk: the most elements that the backward pass takes at once, if not those of `chunks`; implies `remat`.

    Returns:
        What `batched` returns of all elements, each leaf with `chunks.total` of them along its axis.

    Raises:
        TypeError: an entry of `out_axes` that is neither an int nor None.
        ValueError: `out_axes` is no prefix of the output, or has an axis that a result has not; a leaf that is
            explicitly sharded along its mapped axis.
    """
    check_whole(leaves, axes, chunks)
    backward = chunks if grad_chunk is None else Chunks.balanced(chunks.total, grad_chunk)
    outputs = _Outputs(batched, out_axes)
    rows = [In(Kind.ROWS, axis) for axis in axes]
    if chunks.count <= 1 and backward.count <= 1:
        return outputs.at_once([jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)])
    types = chunk_types(leaves, rows, chunks)
    traced = trace(outputs.flat, types)
    if chunks.overlap and side_effects(traced):
        parts = [
            map_chunks(batched, cut, axes, part, out_axes=out_axes, remat=remat, grad_chunk=grad_chunk)
            for cut, part in split_apart(leaves, axes, chunks)
        ]
        return outputs.joined(*parts)
    consts = list(traced.consts)
    grad_jaxpr = None
    stacked = range(len(outputs.stacked))
    if backward == chunks:
        jaxpr = _with_consts(traced, consts, 0, types, stacked)
    else:
        # The arrays that the function closes over are found anew for the other size, and are operands of both.
        other_types = chunk_types(leaves, rows, backward)
        other = trace(outputs.flat, other_types)
        consts += other.consts
        jaxpr = _with_consts(traced, consts, 0, types, stacked)
        grad_jaxpr = _with_consts(other, consts, len(traced.consts), other_types, stacked)
    ins = (*[In(Kind.WHOLE)] * len(consts), *rows)
    outs = tuple(Out(Kind.ROWS, axis) for axis in outputs.stacked)
    spec = Spec(jaxpr, chunks, ins, outs, remat or grad_jaxpr is not None, grad_jaxpr, backward)
    first = [take(leaf, kind, chunks, 0) for leaf, kind in zip(leaves, rows, strict=True)] if outputs.shared else []
    shared = evaluate(traced, first, range(len(stacked), len(traced.out_avals)), effects=False) if first else []
    return outputs.restore(bind(spec, [*consts, *leaves]), shared, chunks.total)


def split_apart(leaves: Leaves, axes: Sequence[int], chunks: Chunks) -> list[tuple[Leaves, Chunks]]:
    """The elements of the whole chunks and of the shorter last one, which share none, where `chunks` overlap."""
    parts, start = [], 0
    for part in chunks.without_overlap():
        cut = [
            lax.slice_in_dim(leaf, start, start + part.total, axis=axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]
        parts.append((cut, part))
        start += part.total
    return parts


def _with_consts(
    traced: ClosedJaxpr, consts: Leaves, first: int, types: Sequence[Any], outs: Sequence[int]
) -> ClosedJaxpr:
    """The jaxpr of some of the results, with `consts` as its first arguments; its own begin at `first`."""
    own = slice(first, first + len(traced.consts))

    def with_consts(*args: Any) -> Any:
        return evaluate(ClosedJaxpr(traced.jaxpr, list(args[own])), args[len(consts) :], outs)

    return trace(with_consts, [*(jax.typeof(const) for const in consts), *types])


class _Outputs:
    """Makes the results of a function a flat list of what a loop can carry, and puts them back.

    There are no zeros of a typed PRNG key, so keys are carried as their bits; tangents of integers hold nothing. What
    is known of the results is set by the first trace.
    """

    def __init__(self, fn: Callable[[Leaves], Any], out_axes: Any) -> None:
        self._fn = fn
        self._out_axes = out_axes
        self._treedef: Any = None
        self._axes: list[int | None] = []
        self._kinds: list[Any] = []

    @property
    def stacked(self) -> list[int]:
        """The axes of the results that are carried."""
        pairs = zip(self._axes, self._kinds, strict=True)
        return [axis for axis, kind in pairs if axis is not None and not isinstance(kind, tuple)]

    @property
    def shared(self) -> bool:
        """Whether a result is the same for all chunks."""
        return None in self._axes

    def at_once(self, xs: Leaves) -> Any:
        """The results of a single chunk."""
        ys, axes = self._of(xs)
        return jax.tree.unflatten(
            self._treedef, [y if axis is None else jnp.moveaxis(y, 0, axis) for y, axis in zip(ys, axes, strict=True)]
        )

    def flat(self, *xs: jax.Array) -> Leaves:
        """The leaves of the results that are carried, and then those that all chunks share."""
        ys, self._axes = self._of(list(xs))
        self._kinds = [_kind(y) for y in ys]
        carried = [
            y if kind is None else jax.random.key_data(y)
            for y, axis, kind in zip(ys, self._axes, self._kinds, strict=True)
            if axis is not None and not isinstance(kind, tuple)
        ]
        return carried + [y for y, axis in zip(ys, self._axes, strict=True) if axis is None]

    def joined(self, first: Any, last: Any) -> Any:
        """The results of all elements, from those of the first and the last of them, once `flat` has been traced."""
        leaves = [
            a if axis is None else (np if isinstance(kind, tuple) else jnp).concatenate([a, b], axis)
            for a, b, axis, kind in zip(*map(jax.tree.leaves, (first, last)), self._axes, self._kinds, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def _of(self, xs: Leaves) -> tuple[Leaves, list[int | None]]:
        out = self._fn(xs)
        ys, self._treedef = jax.tree.flatten(out)
        ys = [y if hasattr(y, "dtype") else jnp.asarray(y) for y in ys]  # a shared result may be a Python number
        return ys, output_axes(self._out_axes, out, [np.ndim(y) for y in ys])

    def restore(self, carried: Leaves, shared: Leaves, total: int) -> Any:
        """The results for all elements, once `flat` has been traced."""
        remaining, others = iter(carried), iter(shared)
        leaves: list[Any] = []
        for axis, kind in zip(self._axes, self._kinds, strict=True):
            if axis is None:
                leaves.append(next(others))
            elif isinstance(kind, tuple):
                shape = list(kind[1:])
                shape.insert(axis, total)
                leaves.append(np.zeros(shape, jax.dtypes.float0))
            elif kind is None:
                leaves.append(next(remaining))
            else:
                leaves.append(jax.random.wrap_key_data(next(remaining), impl=kind))
        return jax.tree.unflatten(self._treedef, leaves)


def _kind(y: Any) -> Any:
    """None for what a loop carries, the implementation of a key, the shape of a tangent that holds nothing."""
    if y.dtype == jax.dtypes.float0:
        return y.shape
    return jax.random.key_impl(y) if jnp.issubdtype(y.dtype, jax.dtypes.prng_key) else None
