"""Where an element lies in the axes around it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Place:
    """The numbers of an element in the enclosing axes, the outermost first.

    Args:
        index: `(d,)` int32, which may be traced.
        axes: The names of the d axes.
        repeats: For an axis whose distinct elements alone are computed, by its position in `axes`: the map `(m,)` from
            each original position to its distinct element. `index` holds the number of the distinct one.
    """

    index: Any = dataclasses.field(default_factory=lambda: np.zeros((0,), np.int32))
    axes: tuple[str, ...] = ()
    repeats: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)

    def inside(self, axis: str, number: Any, index_map: np.ndarray | None = None) -> "Place":
        """The place of an element of one more axis, inside the others."""
        repeats = self.repeats if index_map is None else {**self.repeats, len(self.axes): index_map}
        index = jnp.concatenate([jnp.asarray(self.index), jnp.asarray(number, jnp.int32)[None]])
        return Place(index, (*self.axes, axis), repeats)

    def rows(self, axis: str, numbers: jax.Array, index_map: np.ndarray | None = None) -> "Place":
        """The places of several elements of one more axis: `index` is `(n, d)`."""
        return dataclasses.replace(
            self.inside(axis, 0, index_map), index=jax.vmap(lambda i: self.inside(axis, i).index)(numbers)
        )


AtPlace = Callable[[Any, Place], Any]
"""A function of an element and of where it lies."""
