"""One call of a tiled function: chunks, devices, reductions, and where the results go."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from xtrax.tiling._axes import broadcast_prefix, output_axes
from xtrax.tiling._jax_internals import is_debugging, named_axes, side_effects, trace
from xtrax.tiling._map.args import Bound
from xtrax.tiling._map.chunked import map_chunks
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._map.reduced import merge_states, reduce_chunks
from xtrax.tiling.errors import DispatchRejected
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
    return _mapped(of_elements, leaves, axes, chunks, options)


def _mapped(fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], chunks: Chunks, options: Options) -> Any:
    def checked(elements: Elements) -> Any:
        out = fn(elements)
        broadcast_prefix("out_axes", options.out_axes, out, tree_name="the output")
        return out

    # jax.vmap refuses None for a result that is not the same for all elements; the others come with the axis first.
    first = jax.tree.map(lambda _: 0, options.out_axes)
    return map_chunks(
        options.vmap(checked, out_axes=first), leaves, axes, chunks, out_axes=options.out_axes, remat=options.remat,
        grad_chunk=options.grad_batch_size,
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
    return [
        jax.ShapeDtypeStruct(shape, x.dtype, weak_type=jax.typeof(x).weak_type)
        for shape, x in zip(shapes, leaves, strict=True)
    ]


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


def _over_devices(fn: Callable[[Elements], Any], leaves: Elements, axes: list[int], size: int, options: Options) -> Any:
    """Each device maps its share; the last element is repeated where the elements do not divide."""
    assert options.mesh is not None
    mesh, explicit = _in_context(options.mesh)
    per_device = -(-size // options.devices)
    padding = per_device * options.devices - size
    # A function inside shard_map cannot close over arrays of another mesh context, so they are passed in.
    # It is traced in no mesh, as it runs in that of a device, which is not the one here.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        traced, shape = jax.make_jaxpr(lambda *xs: fn(list(xs)), return_shape=True)(*_element_types(leaves, axes))
    if not all(map(is_debugging, side_effects(traced))):
        raise DispatchRejected(
            "fn has side effects, and its elements are split over the devices of a mesh, where they would occur for "
            "padding too, in no order and with the numbers of one device; leave out mesh, or use execute_plan of "
            "xtrax.stages, whose boundaries see each element once."
        )
    treedef = jax.tree.structure(shape)
    consts, replicated = list(traced.consts), NamedSharding(mesh, PartitionSpec())
    if explicit:
        consts, leaves = jax.reshard((consts, leaves), replicated)
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

    def split(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, options.mesh_axis)

    placed = None
    if options.reducer is None:
        placed = output_axes(options.out_axes, shape, [leaf.ndim + 1 for leaf in jax.tree.leaves(shape)])
    in_specs = [split(axis) for axis in (*axes, 0)[: len(padded)]]
    if explicit:
        padded = [jax.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(padded, in_specs, strict=True)]
    # A jaxpr does not fit operands that vary over devices where those it was traced for did not: no check of that.
    sharded = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), in_specs),
        out_specs=split(0) if placed is None else treedef.unflatten([split(axis) for axis in placed]),
        check_vma=False,
    )
    ys = sharded(consts, padded)
    if explicit and (padding or options.reducer is not None):
        ys = jax.reshard(ys, replicated)
    if options.reducer is not None:
        return options.reducer.finalize(merge_states(options.reducer, ys))
    if placed is None or not padding:
        return ys
    cut = [
        y if axis is None else jax.lax.slice_in_dim(y, 0, size, axis=axis)
        for y, axis in zip(jax.tree.leaves(ys), placed, strict=True)
    ]
    return treedef.unflatten(cut)


def _in_context(mesh: jax.sharding.Mesh) -> tuple[jax.sharding.Mesh, bool]:
    """The mesh as JAX wants it in its context, and whether shardings are part of types there."""
    context = jax.sharding.get_abstract_mesh()
    same = (context.axis_names, context.axis_sizes) == (mesh.axis_names, mesh.axis_sizes)
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if same and AxisType.Manual not in context.axis_types:
        types = context.axis_types
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types), AxisType.Explicit in types


def _repeat_last(x: Any, axis: int, times: int) -> Any:
    if not times:
        return x
    last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
    return jnp.concatenate([x, *[last] * times], axis)
