"""How much memory there is, and how much a program takes."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import jax

from xtrax.tiling._check import check_callable, check_name
from xtrax.tiling._host_memory import host_memory_limit
from xtrax.tiling._plan.spec import AxisSpec
from xtrax.tiling._programs import Program, as_abstract, compiled_bytes

Axes: TypeAlias = Sequence[str | Collection[str] | None]


def device_memory_budget(fraction: float = 0.9, device: jax.Device | None = None) -> int:
    """A share of the memory that a device may hand out.

    An accelerator's is the `bytes_limit` of its allocator. A CPU has none, and is given the smaller of the memory that
    is free and the limit of the process's control group; both are read where Linux keeps them.

    Args:
        fraction: the share, in (0, 1]. What is left is for what no estimate counts, such as fragmentation.
        device: the device; None is the first one of this process.

    Returns:
        Bytes.

    Raises:
        TypeError: `fraction` is not a number, or `device` is no device.
        ValueError: `fraction` outside (0, 1].
        RuntimeError: the limit is not known, as on CPUs outside Linux; choose the bytes yourself there.

    >>> device_memory_budget(0.5) > 0
    True
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"fraction must be a number in (0, 1], but is {fraction!r} ({type(fraction).__name__}).")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], but is {fraction}; 0.9 leaves a tenth for what is not counted.")
    if device is None:
        device = jax.local_devices()[0]
    elif not hasattr(device, "memory_stats"):
        raise TypeError(f"device must be a jax.Device or None, but is {device!r}; take one of jax.devices().")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit and device.platform == "cpu":
        limit = host_memory_limit()
    if not limit:
        raise RuntimeError(
            f"the memory of {device} is not known: its allocator reports no bytes_limit"
            + (", and neither /proc/meminfo nor a control group limits it" if device.platform == "cpu" else "")
            + "; give the number of bytes yourself."
        )
    return math.floor(limit * fraction)


def lowered_memory_estimate(fn: Callable[..., Any], *abstract_args: Any) -> int:
    """The memory that a compiled call of `fn` takes, by the compiler's own account. Nothing is run.

    Args:
        fn: any callable; arrays that it holds or closes over count as arguments.
        *abstract_args: its arguments, pytrees whose leaves are arrays or `jax.ShapeDtypeStruct`.

    Returns:
        Bytes of arguments, outputs and temporaries, less what outputs take over from arguments.

    Raises:
        TypeError: `fn` is not callable, or a leaf has no shape and dtype.
        RuntimeError: the backend does not analyse memory.

    >>> lowered_memory_estimate(lambda x: 2 * x, jax.ShapeDtypeStruct((100,), "float32"))
    800
    """
    check_callable("fn", fn, "(*abstract_args) -> outputs")
    return compiled_bytes(Program.of(fn, as_abstract(abstract_args)).compile())


def memory_estimator(
    fn: Callable[..., Any], *abstract_args: Any, axes: Axes | None = None
) -> Callable[[AxisSpec], int]:
    """An estimator for `BatchPlanner(memory_estimator=...)`: what `fn`, mapped over a whole axis, takes when compiled.

    Each axis is looked at by itself, as if there were no other: for several large axes use a `MemoryBudget`.

    Args:
        fn: a function of one element.
        *abstract_args: its arguments for one element, pytrees of arrays or `jax.ShapeDtypeStruct`.
        axes: for each argument the names of the axes that it has (a name, several, or None for none of them); None
            where every argument has every axis.

    Returns:
        `spec -> bytes`, which compiles once for each size of an axis.

    Raises:
        TypeError: `fn` is not callable, a leaf without shape and dtype, or `axes` of another type.
        ValueError: `axes` has not one entry for each argument; later, an axis that no argument has.

    >>> row = jax.ShapeDtypeStruct((10,), "float32")
    >>> memory_estimator(lambda x: 2 * x, row)(AxisSpec("batch", 1000, 32))
    80000
    """
    check_callable("fn", fn, "(*abstract_args) -> outputs")
    elements = as_abstract(abstract_args)
    if not elements:
        raise ValueError("memory_estimator needs the arguments of fn for one element, but got none.")
    named = _check_axes(axes, len(elements))
    known: dict[tuple[int, tuple[bool, ...]], int] = {}

    def estimate(spec: AxisSpec) -> int:
        mapped = tuple(names is None or spec.name in names for names in named)
        if not any(mapped):
            raise ValueError(f"no argument has axis {spec.name!r}; axes is {axes!r}.")
        key = spec.cardinality, mapped
        if key not in known:
            args = [_stacked(arg, spec.cardinality) if has else arg for arg, has in zip(elements, mapped, strict=True)]
            in_axes = tuple(0 if has else None for has in mapped)
            known[key] = lowered_memory_estimate(jax.vmap(lambda *xs: fn(*xs), in_axes=in_axes), *args)
        return known[key]

    return estimate


def _stacked(arg: Any, size: int) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), arg)


def _check_axes(axes: Any, count: int) -> list[frozenset[str] | None]:
    """For each argument the names that it has; None for all of them."""
    if axes is None:
        return [None] * count
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise TypeError(f"axes must have an entry for each argument, such as ['batch', None], but is {axes!r}.")
    if len(axes) != count:
        raise ValueError(f"axes has {len(axes)} entries, but there are {count} arguments; give one for each.")
    named: list[frozenset[str] | None] = []
    for i, entry in enumerate(axes):
        if entry is not None and not isinstance(entry, Collection):
            raise TypeError(f"axes[{i}] must be a name, several names or None, but is {entry!r}.")
        names = [entry] if isinstance(entry, str) else entry or ()
        named.append(frozenset(check_name(f"a name in axes[{i}]", name) for name in names))
    return named
