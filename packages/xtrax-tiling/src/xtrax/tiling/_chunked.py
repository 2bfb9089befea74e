"""The core of every chunked map: `jax.vmap` over at most a given number of elements at once."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.tiling._jax_internals import trace
from xtrax.tiling._layout import Chunks
from xtrax.tiling._map_primitive import In, Kind, Spec, bind, chunk_types

Leaves: TypeAlias = list[jax.Array]


def chunked_vmap(
    fn: Callable[[list[Any]], Any],
    leaves: Leaves,
    axes: Sequence[int],
    chunks: Chunks,
    *,
    remat: bool = False,
    grad_chunk: int | None = None,
) -> Any:
    """`jax.vmap(fn, in_axes=(axes,))(leaves)`, one chunk after another.

    Args:
        fn: a pure function of the list of one element of each leaf. Arrays that it closes over may be tracers.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout; one chunk or none is a plain `jax.vmap`.
        remat: whether reverse mode saves nothing but the arguments, and computes each chunk anew.
        grad_chunk: the most elements that the backward pass takes at once, if not those of `chunks`; implies `remat`.

    Returns:
        What `fn` returns, each leaf stacked along a new leading axis of size `chunks.total`.
    """
    return map_chunks(jax.vmap(fn), leaves, axes, chunks, remat=remat, grad_chunk=grad_chunk)


def map_chunks(
    batched: Callable[[Leaves], Any],
    leaves: Leaves,
    axes: Sequence[int],
    chunks: Chunks,
    *,
    remat: bool = False,
    grad_chunk: int | None = None,
) -> Any:
    """A function of a batch with independent elements, one chunk after another.

    Args:
        batched: a pure function of the list of a chunk of each leaf, the mapped axis first; its results have the axis
            first too. Arrays that it closes over may be tracers.
        leaves: arrays, each with `chunks.total` elements along its axis.
        axes: the non-negative mapped axis of each leaf.
        chunks: the layout.
        remat: whether reverse mode saves nothing but the arguments, and computes each chunk anew.
        grad_chunk: the most elements that the backward pass takes at once, if not those of `chunks`; implies `remat`.

    Returns:
        What `batched` returns of all elements, each leaf `(chunks.total, ...)`.
    """
    backward = chunks if grad_chunk is None else Chunks.balanced(chunks.total, grad_chunk)
    if chunks.count <= 1 and backward.count <= 1:
        return batched([jnp.moveaxis(leaf, axis, 0) for leaf, axis in zip(leaves, axes, strict=True)])
    outputs = _Outputs(batched)
    rows = [In(Kind.ROWS, axis) for axis in axes]
    types = chunk_types(leaves, rows, chunks)
    traced = trace(outputs.flat, types)
    consts = list(traced.consts)
    grad_jaxpr = None
    if backward == chunks:
        jaxpr = _with_consts(traced, consts, 0, types)
    else:
        # The arrays that the function closes over are found anew for the other size, and are operands of both.
        other_types = chunk_types(leaves, rows, backward)
        other = trace(outputs.flat, other_types)
        consts += other.consts
        jaxpr = _with_consts(traced, consts, 0, types)
        grad_jaxpr = _with_consts(other, consts, len(traced.consts), other_types)
    ins = (*[In(Kind.WHOLE)] * len(consts), *rows)
    outs = (Kind.ROWS,) * len(jaxpr.out_avals)
    spec = Spec(jaxpr, chunks, ins, outs, remat or grad_jaxpr is not None, grad_jaxpr, backward)
    return outputs.restore(bind(spec, [*consts, *leaves]), chunks.total)


def _with_consts(traced: ClosedJaxpr, consts: Leaves, first: int, types: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr with `consts` as its first arguments; its own begin at `first`."""
    own = slice(first, first + len(traced.consts))

    def with_consts(*args: Any) -> Any:
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, list(args[own])))(*args[len(consts) :])

    return trace(with_consts, [*(jax.typeof(const) for const in consts), *types])


class _Outputs:
    """Makes the results of a function a flat list of what a loop can carry, and puts them back.

    There are no zeros of a typed PRNG key, so keys are carried as their bits; tangents of integers hold nothing.
    """

    def __init__(self, fn: Callable[[Leaves], Any]) -> None:
        self._fn = fn
        self._treedef: Any = None
        self._kinds: list[Any] = []

    def flat(self, *xs: jax.Array) -> Leaves:
        """The leaves of the results that are carried."""
        ys, self._treedef = jax.tree.flatten(self._fn(list(xs)))
        self._kinds = [_kind(y) for y in ys]
        return [
            y if kind is None else jax.random.key_data(y)
            for y, kind in zip(ys, self._kinds, strict=True)
            if not isinstance(kind, tuple)
        ]

    def restore(self, carried: Leaves, total: int) -> Any:
        """The results for all elements, once `flat` has been traced."""
        remaining = iter(carried)
        leaves: list[Any] = []
        for kind in self._kinds:
            if isinstance(kind, tuple):
                leaves.append(np.zeros((total, *kind[1:]), jax.dtypes.float0))
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
