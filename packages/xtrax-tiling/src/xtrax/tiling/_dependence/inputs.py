"""The arguments of a function of a batch: where the batch lies in each, and what the others are."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from xtrax.tiling._axes import broadcast_prefix
from xtrax.tiling._check import plural
from xtrax.tiling._dependence.state import Batched, Shared, State
from xtrax.tiling._split import ARRAYS


@dataclasses.dataclass(frozen=True)
class BatchInputs:
    """The arguments of a function of a batch: mapped leaves, and those that every element shares."""

    leaves: list[Any]
    treedef: Any
    axes: list[int | None]
    size: int

    @classmethod
    def of(cls, args: Sequence[Any], axes: Any, roots: Sequence[str], argument: str) -> "BatchInputs":
        """Spread `axes`, a prefix of `args`, and check it against the leaves.

        Args:
            args: trees of arrays, `jax.ShapeDtypeStruct`, and, where nothing is mapped, anything.
            axes: an int, None, or a tree of them that is a prefix of `args`.
            roots: what the user calls each of `args`, for messages.
            argument: what the user calls `axes`.
        """
        named, treedef = jax.tree_util.tree_flatten_with_path(tuple(args))
        spread = broadcast_prefix(argument, axes, tuple(args), tree_name="inputs")
        found: list[int | None] = []
        first: tuple[str, int, int] | None = None
        for (path, leaf), axis in zip(named, spread, strict=True):
            label = roots[path[0].idx] + jax.tree_util.keystr(path[1:])
            if (normal := normal_axis(label, leaf, axis)) is not None:
                size = leaf.shape[normal]
                first = first or (label, normal, size)
                if size != first[2]:
                    raise ValueError(
                        f"the batch has {plural(first[2], 'element')} along axis {first[1]} of {first[0]}, but "
                        f"{size} along axis {normal} of {label}; for what every element shares, {_unmapped(label)}."
                    )
            found.append(normal)
        if first is None:
            raise ValueError(
                f"no input has a batch ({argument} gives none of the {len(named)} leaves an axis); one needs it."
            )
        return cls([leaf for _, leaf in named], treedef, found, first[2])

    @property
    def mapped(self) -> list[Any]:
        """The leaves with the batch in them."""
        return [leaf for leaf, axis in zip(self.leaves, self.axes, strict=True) if axis is not None]

    @property
    def mapped_axes(self) -> list[int]:
        """Their axes."""
        return [axis for axis in self.axes if axis is not None]

    @property
    def concrete(self) -> bool:
        """Whether there are values to compute with."""
        return not any(isinstance(leaf, (jax.ShapeDtypeStruct, Tracer)) for leaf in self.leaves)

    @property
    def abstract(self) -> list[bool]:
        """Whether each leaf is an argument of the traced function; a shared value is a constant of it."""
        return [
            axis is not None or isinstance(leaf, jax.ShapeDtypeStruct)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]

    def runner(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` as a function of its abstract leaves."""

        def run(*values: Any) -> Any:
            given = iter(values)
            leaves = [next(given) if free else leaf for leaf, free in zip(self.leaves, self.abstract, strict=True)]
            return fn(*jax.tree.unflatten(self.treedef, leaves))

        return run

    def types(self, size: int) -> list[jax.ShapeDtypeStruct]:
        """The types of the abstract leaves with a batch of `size`."""
        return [
            jax.ShapeDtypeStruct(
                leaf.shape if axis is None else (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :]),
                leaf.dtype,
                weak_type=getattr(leaf, "weak_type", False),
            )
            for leaf, axis, free in zip(self.leaves, self.axes, self.abstract, strict=True)
            if free
        ]

    def states(self) -> list[State]:
        """What is known of the abstract leaves."""
        return [
            Shared() if axis is None else Batched(axis)
            for axis, free in zip(self.axes, self.abstract, strict=True)
            if free
        ]


def normal_axis(label: str, leaf: Any, axis: Any) -> int | None:
    """A non-negative axis that `leaf`, an array, has."""
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"the axis of {label} must be an int or None, but is {axis!r} ({type(axis).__name__}).")
    if not isinstance(leaf, (*ARRAYS, jax.ShapeDtypeStruct)):
        raise TypeError(
            f"{label} has the batch along axis {axis}, but is no array ({type(leaf).__name__}); if every element "
            f"shares it, {_unmapped(label)}; else pass an array or a jax.ShapeDtypeStruct."
        )
    if not -len(leaf.shape) <= axis < len(leaf.shape):
        # No keyword has an axis that could be another.
        cure = f"; if every element shares it, {_unmapped(label)}" if _is_keyword(label) else ""
        raise ValueError(f"{label} has shape {leaf.shape}, and so no axis {axis}{cure}.")
    return axis % len(leaf.shape)


def _is_keyword(label: str) -> bool:
    return label.startswith("kwargs[")


def _unmapped(label: str) -> str:
    """What to do with an input that is the same for every element."""
    if _is_keyword(label):
        return "pass it by position, with None in in_axes, or bind it with functools.partial"
    return "give it the axis None"
