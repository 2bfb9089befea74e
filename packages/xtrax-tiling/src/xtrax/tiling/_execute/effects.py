"""Side effects of the function that a plan maps, where an axis would repeat them or skip some."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from xtrax.tiling._execute.axes import Nest, run_nest
from xtrax.tiling._execute.lanes import Operand
from xtrax.tiling._jax_internals import is_debugging, side_effects
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.strategy import DedupGather, SafeMap, Scan

IN_A_BOUNDARY = (
    "put them into a boundary of xtrax.stages, whose tap or sink sees each element once, with its place in the axes"
)


def fires(nest: Nest, operands: Sequence[Operand], *, split: bool = False) -> bool:
    """Whether the function or a transition has side effects of its own inside an axis that may repeat or skip them.

    Args:
        nest: the axes and the function.
        operands: what the nest is run on.
        split: whether the outermost axis is split over devices, and so padded.

    Raises:
        DispatchRejected: If that is a DedupGather axis, or one that is split over devices. Over devices, unordered
            `jax.debug.print` and `jax.debug.callback` may repeat elements, as debugging aids.
    """
    found = False
    for k, axis in enumerate(nest.axes):
        over_devices = split and k == 0
        if not (over_devices or isinstance(axis.strategy, (SafeMap, DedupGather))):
            continue
        effects = _effects(nest, k, operands)
        if not effects:
            break  # then there are none further inside
        found = True
        if over_devices and not all(map(is_debugging, effects)):
            raise DispatchRejected(
                f"fn, or a transition of a Scan axis, has side effects, and the axis {axis.name!r} is split over the "
                "devices of a mesh, where they would occur for padding too, in no order and with the numbers of one "
                f"device; {IN_A_BOUNDARY}, or leave out mesh."
            )
        if isinstance(axis.strategy, DedupGather):
            raise DispatchRejected(
                f"fn, or a transition of a Scan axis, has side effects, and on the DedupGather axis {axis.name!r} they "
                "would occur for each distinct element instead of for each element; plan the axis without its "
                "DedupSpec, or put them into a boundary of xtrax.stages."
            )
    return found


def _effects(nest: Nest, k: int, operands: Sequence[Operand]) -> list[Any]:
    """The side effects of one element of axis `k` but for those of boundaries."""
    outside = {axis.name for axis in nest.axes[: k + 1]}
    inside = [
        dataclasses.replace(
            axis,
            # Loops, since JAX refuses to map what is ordered.
            strategy=axis.strategy if isinstance(axis.strategy, Scan) else SafeMap(1),
            hook=dataclasses.replace(axis.hook, emit=None),
        )
        for axis in nest.axes[k + 1 :]
    ]
    probe = dataclasses.replace(nest, axes=tuple(inside), positions=(), padded=False, fires=True)
    dims = [tuple(name for name in op.dims if name not in outside) for op in operands]

    def type_inside(op: Operand) -> jax.ShapeDtypeStruct:
        shape = op.value.shape
        kept = [size for size, name in zip(shape, op.dims, strict=False) if name not in outside]
        return jax.ShapeDtypeStruct((*kept, *shape[len(op.dims) :]), op.value.dtype)

    def of_element(values: Sequence[Any]) -> Any:
        result = run_nest(probe, [Operand(value, own) for value, own in zip(values, dims, strict=True)])
        return result.values, result.carries

    return side_effects(jax.make_jaxpr(of_element)([type_inside(op) for op in operands]))
