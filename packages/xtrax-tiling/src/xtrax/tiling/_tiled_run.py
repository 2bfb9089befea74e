"""One call of a tiled function: chunks, devices, reductions, and where the results go."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from xtrax.tiling._axes import broadcast_prefix
from xtrax.tiling._chunked import map_chunks
from xtrax.tiling._jax_internals import named_axes, trace
from xtrax.tiling._layout import Chunks
from xtrax.tiling._reduced import merge_states, reduce_chunks
from xtrax.tiling._tiled_args import Bound
from xtrax.tiling.reducers import Reducer

Elements = list[Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a function is mapped: the checked arguments of `tiled_vmap`, with None for what was not given."""

    batch_size: int | None
    out_axes: Any = 0
    remat: bool = False
    grad_batch_size: int | None = None
    reducer: Reducer | None = None
    axis_name: Hashable = None
    spmd_axis_name: Hashable = None
    mesh: jax.sharding.Mesh | None = None
    mesh_axis: str | None = None

    @property
    def devices(self) -> int:
        """Over how many devices the elements are split."""
        return 1 if self.mesh is None else self.mesh.shape[self.mesh_axis]

    def layout(self, total: int) -> Chunks:
        """The chunks of so many elements."""
        return Chunks.balanced(total, self.batch_size or max(total, 1))

    def vmap(self, fn: Callable[[Elements], Any], axes: Sequence[int] | None = None, out_axes: Any = 0) -> Any:
        """`jax.vmap` of a function of the list of one element of each leaf."""
        in_axes = 0 if axes is None else (list(axes),)
        return jax.vmap(
            fn, in_axes=in_axes, out_axes=out_axes, axis_name=self.axis_name, spmd_axis_name=self.spmd_axis_name
        )


def run(arrays: list[Any], bound: Bound, options: Options) -> Any:
    """Map a function over the arrays of `bound`, given as `arrays`."""
    leaves = [jnp.asarray(arrays[i]) for i in bound.mapped]
    axes = list(bound.mapped_axes)
    if bound.has_key:
        leaves.append(jnp.arange(bound.size, dtype=jnp.uint32))
        axes.append(0)

    def of_elements(elements: Elements) -> Any:
        values = list(arrays)
        for i, element in zip(bound.mapped, elements, strict=False):
            values[i] = element
        return bound.call(values, elements[-1])

    chunks = options.layout(-(-bound.size // options.devices))
    whole = options.devices == 1 or bound.size == 0
    if options.axis_name is not None and (chunks.count > 1 or not whole):
        _refuse_collectives(of_elements, leaves, axes, options, bound.size, chunks)
    if not whole:
        return _over_devices(of_elements, leaves, axes, bound.size, options)
    if options.reducer is not None:
        return options.reducer.finalize(_reduced(of_elements, leaves, axes, chunks, options, None))
    backward = options.grad_batch_size or bound.size
    if chunks.count <= 1 and backward >= bound.size:
        return options.vmap(of_elements, axes, options.out_axes)(leaves)
    ys = _mapped(of_elements, leaves, axes, chunks, options)
    return _placed(ys, of_elements, leaves, axes, options)


def _mapped(fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], chunks: Chunks, options: Options) -> Any:
    return map_chunks(
        options.vmap(fn), leaves, axes, chunks, remat=options.remat, grad_chunk=options.grad_batch_size
    )  # fmt: skip


def _reduced(
    fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], chunks: Chunks, options: Options, valid: Any
) -> Any:
    assert options.reducer is not None
    return reduce_chunks(
        options.vmap(fn), leaves, axes, chunks, options.reducer, valid=valid, remat=options.remat,
        grad_chunk=options.grad_batch_size,
    )  # fmt: skip


def _element_types(leaves: Elements, axes: list[int]) -> Elements:
    """The types of one element of each leaf."""
    shapes = [x.shape[:axis] + x.shape[axis + 1 :] for x, axis in zip(leaves, axes, strict=True)]
    return [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, leaves, strict=True)]


def _refuse_collectives(
    fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], options: Options, size: int, chunks: Chunks
) -> None:
    """Refuse a function that asks about the other elements of an axis, of which a chunk has not all."""
    used: set[Any] = set()

    def inspect(elements: Elements) -> int:
        types = [jax.typeof(element) for element in elements]
        used.update(named_axes(trace(lambda *xs: fn(list(xs)), types)))
        return 0

    jax.eval_shape(jax.vmap(inspect, in_axes=(axes,), out_axes=None, axis_name=options.axis_name), leaves)
    if options.axis_name in used:
        raise ValueError(
            f"fn uses a collective, or axis_index, over axis_name={options.axis_name!r}, but sees only {chunks.size} "
            f"of the {size} elements at once, so that its numbers would differ from those of jax.vmap; leave out "
            "batch_size and mesh, or compute what needs all elements outside of fn (reduce= does so for sums, means "
            "and the like)."
        )


def _placed(ys: Any, fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], options: Options) -> Any:
    """The results with the mapped axis where `out_axes` wants it."""
    flat, treedef = jax.tree.flatten(ys)
    places = broadcast_prefix("out_axes", options.out_axes, ys, tree_name="the output")
    if None in places:
        # Only jax.vmap can say whether such a result is the same for all elements; it refuses it if not.
        few = [jax.lax.slice_in_dim(x, 0, 1, axis=axis) for x, axis in zip(leaves, axes, strict=True)]
        only = jax.tree.leaves(options.vmap(fn, axes, options.out_axes)(few))
        flat = [one if place is None else y for y, one, place in zip(flat, only, places, strict=True)]
    moved = []
    for i, (y, place) in enumerate(zip(flat, places, strict=True)):
        if place is not None:
            if isinstance(place, bool) or not isinstance(place, int):
                raise TypeError(f"out_axes must hold ints and None, but has {place!r} ({type(place).__name__}).")
            if not -y.ndim <= place < y.ndim:
                raise ValueError(
                    f"out_axes has {place} for result {i}, which has {y.ndim} dimensions with the mapped one; it must "
                    f"lie in [{-y.ndim}, {y.ndim})."
                )
            y = jnp.moveaxis(y, 0, place)
        moved.append(y)
    return treedef.unflatten(moved)


def _over_devices(fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], size: int, options: Options) -> Any:
    """Each device maps its share; the last element is repeated where the elements do not divide."""
    assert options.mesh is not None
    per_device = -(-size // options.devices)
    padding = per_device * options.devices - size
    # A function inside shard_map cannot close over arrays of another mesh context, so they are passed in.
    traced, shape = jax.make_jaxpr(lambda *xs: fn(list(xs)), return_shape=True)(*_element_types(leaves, axes))
    treedef = jax.tree.structure(shape)
    padded = [_repeat_last(x, axis, padding) for x, axis in zip(leaves, axes, strict=True)]
    if options.reducer is not None and padding:
        padded.append(jnp.arange(size + padding) < size)
    chunks = options.layout(per_device)

    def of_device(consts: Elements, xs: Elements) -> Any:
        run = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))

        def local(elements: Elements) -> Any:
            return treedef.unflatten(run(*elements))

        if options.reducer is None:
            return _mapped(local, xs, axes, chunks, options)
        valid = xs[-1] if padding else None
        state = _reduced(local, xs[: len(axes)], axes, chunks, options, valid)
        return jax.tree.map(lambda s: s[None], state)

    places = axes if len(padded) == len(axes) else [*axes, 0]
    specs = [PartitionSpec(*[None] * place, options.mesh_axis) for place in places]
    # A jaxpr does not fit operands that vary over devices where those it was traced for did not: no check of that.
    sharded = jax.shard_map(
        of_device,
        mesh=options.mesh,
        in_specs=(PartitionSpec(), specs),
        out_specs=PartitionSpec(options.mesh_axis),
        check_vma=False,
    )
    ys = sharded(list(traced.consts), padded)
    if options.reducer is not None:
        return options.reducer.finalize(merge_states(options.reducer, ys))
    if padding:
        ys = jax.tree.map(lambda y: y[:size], ys)
    return _placed(ys, fn, leaves, axes, options)


def _repeat_last(x: Any, axis: int, times: int) -> Any:
    if not times:
        return x
    last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
    return jnp.concatenate([x, *[last] * times], axis)
