"""A loop over chunks: what each chunk gets of the operands, and where its results go."""

import contextlib
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.tiling._map.layout import Chunks


class Kind(enum.Enum):
    """What a chunk gets of an operand, or gives to a result."""

    WHOLE = "whole"  # an operand that is the same for all chunks
    ROWS = "rows"  # elements `(size, ...)` of an array with `total` of them along an axis
    CHUNK = "chunk"  # entry `i` of an array `(count, ...)` for chunk `i`
    SUM = "sum"  # a result that is summed over chunks


@dataclasses.dataclass(frozen=True)
class In:
    """An operand: its kind, and for rows their axis and whether those that the next chunk repeats are zeroed."""

    kind: Kind
    axis: int = 0
    masked: bool = False


@dataclasses.dataclass(frozen=True)
class Out:
    """A result: its kind, and for rows the axis that they get."""

    kind: Kind
    axis: int = 0


@dataclasses.dataclass(frozen=True)
class Spec:
    """A loop over chunks.

    Attributes:
        jaxpr: of one chunk; takes the rows with their axis first, and returns them so.
        chunks: the layout.
        ins: what the operands are.
        outs: what the results are.
        remat: whether reverse mode saves the operands alone and computes a chunk anew to differentiate it.
        grad_jaxpr: of a chunk of the transpose, if these are to be others than those of `chunks`; implies `remat`.
        grad_chunks: the layout of those.
    """

    jaxpr: ClosedJaxpr
    chunks: Chunks
    ins: tuple[In, ...]
    outs: tuple[Out, ...]
    remat: bool = False
    grad_jaxpr: ClosedJaxpr | None = None
    grad_chunks: Chunks | None = None


def run_loop(*operands: Any, spec: Spec) -> list[Any]:
    """The results for all chunks, one after another."""
    chunks, fn = spec.chunks, jaxpr_as_fun(spec.jaxpr)

    def run(index: Any) -> list[Any]:
        pairs = zip(operands, spec.ins, strict=True)
        return list(fn(*(take(operand, kind, chunks, index) for operand, kind in pairs)))

    if chunks.count == 1:
        return [_whole(y, out) for y, out in zip(run(0), spec.outs, strict=True)]

    def body(index: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
        return [
            _put(buffer, y, out, chunks, index) for buffer, y, out in zip(buffers, run(index), spec.outs, strict=True)
        ]

    initial = [_zeros(aval, out, chunks) for aval, out in zip(spec.jaxpr.out_avals, spec.outs, strict=True)]
    results = lax.fori_loop(0, chunks.count, body, initial)
    return [_weak(y) if aval.weak_type else y for y, aval in zip(results, spec.jaxpr.out_avals, strict=True)]


def _weak(y: jax.Array) -> jax.Array:
    """Typed as if it were made of Python numbers, as the results of each chunk are."""
    return lax.convert_element_type_p.bind(y, new_dtype=y.dtype, weak_type=True, sharding=None)


def chunk_types(operands: Sequence[Any], ins: Sequence[In], chunks: Chunks) -> list[Any]:
    """The types of what a chunk gets of the operands."""
    return [
        jax.eval_shape(lambda x, kind=kind: take(x, kind, chunks, 0), operand)
        for operand, kind in zip(operands, ins, strict=True)
    ]


def check_whole(operands: Sequence[Any], axes: Sequence[int], chunks: Chunks) -> None:
    """Refuse to take chunks of an axis that is split over devices by its type.

    Raises:
        ValueError: an operand is sharded along its axis over an `Explicit` mesh axis, and there are several chunks.
    """
    for x, axis in zip(operands, axes, strict=True):
        sharding = jax.typeof(x).sharding
        if chunks.count > 1 and sharding is not None and sharding.spec[axis] is not None:
            raise ValueError(
                f"an array of shape {x.shape} is mapped along axis {axis} in chunks of {chunks.size}, but is "
                f"explicitly sharded along it over {sharding.spec[axis]!r}, so that a chunk would be on some of the "
                "devices alone; pass the mesh as mesh= to tiled_vmap or execute_plan, and each device maps its own "
                "share in chunks, or replicate the axis with jax.reshard."
            )


def take(operand: Any, kind: In, chunks: Chunks, index: Any) -> Any:
    """What chunk `index` gets of an operand."""
    if kind.kind is Kind.WHOLE:
        return operand
    if kind.kind is Kind.CHUNK:
        return lax.dynamic_index_in_dim(operand, index, 0, keepdims=False)
    if chunks.count == 1:
        return jnp.moveaxis(operand, kind.axis, 0)
    rows = lax.dynamic_slice_in_dim(operand, chunks.start(index), chunks.size, kind.axis)
    rows = jnp.moveaxis(rows, kind.axis, 0)
    if not (kind.masked and chunks.overlap):
        return rows
    kept = (index > 0) | (jnp.arange(chunks.size) < chunks.size - chunks.overlap)
    return jnp.where(kept.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros_like(rows))


def _whole(y: Any, out: Out) -> Any:
    """The result of all chunks, if there is only one."""
    if out.kind is Kind.ROWS:
        return jnp.moveaxis(y, 0, out.axis)
    return y[None] if out.kind is Kind.CHUNK else y


def _put(buffer: Any, y: Any, out: Out, chunks: Chunks, index: Any) -> Any:
    """The buffer with the results of chunk `index`."""
    if out.kind is Kind.SUM:
        return buffer + y
    if out.kind is Kind.CHUNK:
        return lax.dynamic_update_index_in_dim(buffer, y, index, 0)
    if out.axis:
        # The chunk is turned, so that the whole need not be; and by itself, as XLA would rather turn the operands of a
        # matrix product that it comes from, which is slower.
        y = jnp.moveaxis(lax.optimization_barrier(y), 0, out.axis)
    return lax.dynamic_update_slice_in_dim(buffer, y, chunks.start(index), out.axis)


def _zeros(aval: Any, out: Out, chunks: Chunks) -> jax.Array:
    """An empty buffer, of the very type that chunks of type `aval` give it: the carry of a loop must keep its own."""
    sharding = aval.sharding
    split = sharding is not None and any(sharding.spec)
    shape, spec = list(aval.shape), [*sharding.spec] if split else [None] * aval.ndim
    if out.kind is Kind.ROWS:
        del shape[0]
        shape.insert(out.axis, chunks.total)
        spec.insert(out.axis, spec.pop(0))
    elif out.kind is Kind.CHUNK:
        shape, spec = [chunks.count, *shape], [None, *spec]
    placed = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec)) if split else None
    with jax.sharding.use_abstract_mesh(sharding.mesh) if sharding is not None else contextlib.nullcontext():
        zeros = lax.full(shape, 0, aval.dtype, sharding=placed)
    varying = tuple(aval.manual_axis_type.varying) if aval.manual_axis_type else ()
    return lax.pcast(zeros, varying, to="varying") if varying else zeros
