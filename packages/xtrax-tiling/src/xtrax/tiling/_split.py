"""Trees apart from the arrays in them, so that programs take the arrays as arguments."""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

ARRAYS = (jax.Array, np.ndarray, np.generic)
"""The types of arrays."""

ARRAY_LIKE = (*ARRAYS, bool, int, float, complex)
"""What JAX maps as an array: Python's numbers too."""


@dataclasses.dataclass(frozen=True)
class Split:
    """A tree, apart from its arrays, which lie in one list with those of other trees.

    Attributes:
        slots: for each leaf where its array lies in the list; None for a leaf that is no array.
        others: the leaves that are no arrays, None in place of those that are.
        treedef: the structure.
    """

    slots: tuple[int | None, ...]
    others: tuple[Any, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any, arrays: list[Any]) -> "Split":
        """Take a tree apart, and append its arrays to the list."""
        leaves, treedef = jax.tree.flatten(tree)
        slots: list[int | None] = []
        for leaf in leaves:
            slots.append(len(arrays) if isinstance(leaf, ARRAYS) else None)
            if isinstance(leaf, ARRAYS):
                arrays.append(leaf)
        others = tuple(None if isinstance(leaf, ARRAYS) else leaf for leaf in leaves)
        return cls(tuple(slots), others, treedef)

    def rebuilt(self, values: Sequence[Any]) -> Any:
        """The tree with other values in the places of the list."""
        leaves = [other if slot is None else values[slot] for slot, other in zip(self.slots, self.others, strict=True)]
        return self.treedef.unflatten(leaves)

    @property
    def key(self) -> Hashable:
        """What a program depends on besides the arrays; whether it can be hashed depends on the leaves."""
        return self.treedef, self.slots, tuple(map(static_key, self.others))

    @property
    def function_key(self) -> Hashable:
        """The key of a function; None for a plain one, which is told from others by the one who keeps its programs."""
        return None if self.treedef == jax.tree.structure(0) else self.key


def type_text(array: Any) -> str:
    """The dtype and shape of an array or its type, as JAX prints them, such as `float32[4,3]`."""
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def static_key(leaf: Any) -> Hashable:
    """What tells a leaf that is no array from others: 1, 1.0 and True are equal, but not the same argument."""
    return type(leaf), repr(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf


def hashable_or_none(key: Hashable) -> Hashable | None:
    """The key, or None if a part of it cannot be hashed."""
    try:
        hash(key)
    except TypeError:
        return None
    return key
