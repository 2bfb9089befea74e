"""Mapped axes of a pytree: prefixes spread over leaves, sizes checked, unmapped leaves set apart."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.tiling._check import plural
from xtrax.tiling._split import ARRAY_LIKE


def broadcast_prefix(
    name: str, prefix: Any, tree: Any, value: str = "an int, None,", tree_name: str = "xs"
) -> list[Any]:
    """The leaves of `prefix`, each repeated for the leaves of `tree` below it; None is a leaf.

    Args:
        name: the argument that `prefix` is, for messages.
        prefix: a leaf, or a pytree that ends where one of its leaves stands for all of `tree` below.
        tree: what it is a prefix of.
        value: what a leaf of `prefix` may be, for messages.
        tree_name: the argument that `tree` is, for messages.

    Raises:
        ValueError: `prefix` is not a prefix of `tree`.
    """
    spread: list[Any] = []

    def repeat(value: Any, subtree: Any) -> None:
        spread.extend([value] * len(jax.tree.leaves(subtree)))

    parts = jax.tree.structure(prefix, is_leaf=lambda node: node is None)
    if mismatch := _mismatch("", parts, jax.tree.structure(tree)):
        path, found, there = mismatch
        raise ValueError(
            f"{name} must be {value} or a pytree of such values that is a prefix of {tree_name}, but {name}{path} is "
            f"{found}, where {tree_name}{path} is {there}; give {name}{path} one value for all of {tree_name}{path}, "
            "or the structure that it has."
        )
    jax.tree.map(repeat, prefix, tree, is_leaf=lambda node: node is None)
    return spread


def output_axes(out_axes: Any, outputs: Any, dimensions: Sequence[int]) -> list[int | None]:
    """Where the mapped axis goes in each leaf of the outputs, non-negative; None for what is not mapped.

    Args:
        out_axes: an int, None, or a pytree of them that is a prefix of `outputs`; negative axes count from the end.
        outputs: the pytree.
        dimensions: of each leaf, the mapped one included.

    Raises:
        TypeError: an axis that is neither an int nor None.
        ValueError: `out_axes` is no prefix, or a leaf does not have the axis.
    """
    places = broadcast_prefix("out_axes", out_axes, outputs, tree_name="the output")
    axes: list[int | None] = []
    for i, (place, ndim) in enumerate(zip(places, dimensions, strict=True)):
        if place is None:
            axes.append(None)
            continue
        if isinstance(place, bool) or not isinstance(place, int):
            raise TypeError(f"out_axes must hold ints and None, but has {place!r} ({type(place).__name__}).")
        if not -ndim <= place < ndim:
            raise ValueError(
                f"out_axes has {place} for result {i}, which has {ndim} dimensions with the mapped one; it must lie in "
                f"[{-ndim}, {ndim})."
            )
        axes.append(place % ndim)
    return axes


def _mismatch(path: str, prefix: Any, tree: Any) -> tuple[str, str, str] | None:
    """Where two structures first differ, not counting what lies below a leaf of `prefix`, and what each has there."""
    if (node := prefix.node_data()) is None:
        return None
    children, others = prefix.children(), tree.children()
    if node != tree.node_data() or len(children) != len(others):
        return path, _in_words(prefix), _in_words(tree)
    kind, metadata = node
    names = [jax.tree_util.keystr((jax.tree_util.DictKey(key),)) for key in metadata] if kind is dict else []
    for i, (child, other) in enumerate(zip(children, others, strict=True)):
        if found := _mismatch(path + (names[i] if names else f"[{i}]"), child, other):
            return found
    return None


def _in_words(structure: Any) -> str:
    if (node := structure.node_data()) is None:
        return "a single leaf"
    kind, metadata = node
    if kind is type(None):
        return "None"
    return f"a dict with the keys {metadata}" if kind is dict else f"a {kind.__name__} of {len(structure.children())}"


@dataclasses.dataclass(frozen=True)
class MappedAxes:
    """A pytree whose leaves are either mapped along an axis or the same for all elements."""

    leaves: list[Any]
    treedef: Any
    axes: list[int | None]
    size: int

    @property
    def mapped(self) -> list[jax.Array]:
        """The mapped leaves, as arrays."""
        return [jnp.asarray(leaf) for leaf, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]

    @property
    def mapped_axes(self) -> list[int]:
        """Their axes, non-negative."""
        return [axis for axis in self.axes if axis is not None]

    def of_mapped(self, fn: Callable[[Any], Any]) -> Callable[[list[Any]], Any]:
        """`fn` as a function of one element of each mapped leaf, the others closed over."""

        def of_elements(elements: list[Any]) -> Any:
            remaining = iter(elements)
            leaves = [
                leaf if axis is None else next(remaining) for leaf, axis in zip(self.leaves, self.axes, strict=True)
            ]
            return fn(jax.tree.unflatten(self.treedef, leaves))

        return of_elements


def resolve_axes(xs: Any, in_axes: Any = 0) -> MappedAxes:
    """Spread `in_axes` over the leaves of `xs`, and find the size that the mapped ones share.

    Args:
        xs: a pytree of arrays.
        in_axes: an int, None, or a pytree of them that is a prefix of `xs`; negative axes count from the end.

    Raises:
        TypeError: an axis that is neither an int nor None, or a mapped leaf that is no array.
        ValueError: no mapped leaf, a leaf without the axis, or sizes that differ.
    """
    named, treedef = jax.tree_util.tree_flatten_with_path(xs)
    names = [f"xs{jax.tree_util.keystr(path)}" for path, _ in named]
    leaves = [leaf for _, leaf in named]
    axes = [
        _normal_axis(name, leaf, axis)
        for name, leaf, axis in zip(names, leaves, broadcast_prefix("in_axes", in_axes, xs), strict=True)
    ]
    sizes = [(name, axis, np.shape(leaf)[axis]) for name, leaf, axis in zip(names, leaves, axes, strict=True)
             if axis is not None]  # fmt: skip
    if not sizes:
        raise ValueError(
            f"no array of xs is mapped (in_axes is {in_axes!r}, xs has {len(leaves)} leaves); "
            "at least one leaf needs an axis to map over."
        )
    first, first_axis, size = sizes[0]
    for name, axis, other in sizes[1:]:
        if other != size:
            raise ValueError(
                f"the mapped axes differ in size: axis {first_axis} of {first} has {plural(size, 'element')}, "
                f"but axis {axis} of {name} has {other}; give leaves that are not mapped the axis None."
            )
    return MappedAxes(leaves, treedef, axes, size)


def _normal_axis(name: str, leaf: Any, axis: Any) -> int | None:
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"the axis of {name} must be an int or None, but is {axis!r} ({type(axis).__name__}).")
    if not isinstance(leaf, ARRAY_LIKE):
        raise TypeError(f"{name} is mapped along axis {axis}, but is no array ({type(leaf).__name__}).")
    shape = np.shape(leaf)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{name} has shape {shape}, and so no axis {axis} to map over.")
    return axis % len(shape)
