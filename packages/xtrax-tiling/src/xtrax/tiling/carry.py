"""Declare that an axis is walked in order, with a carry."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.tiling._check import check_bool, check_callable, check_int, check_name
from xtrax.tiling.strategy import WhileCondFn


@dataclasses.dataclass(frozen=True)
class CarryShape:
    """The shape and dtype of one leaf of a carry that begins as zeros.

    Args:
        name: what the leaf is called in messages and plans.
        shape: its shape; a list is stored as a tuple.
        dtype: its dtype, anything that `jnp.dtype` takes.

    Raises:
        TypeError: a shape that is not a sequence of integers, or something that is no dtype.
        ValueError: an empty name or a negative size.

    >>> CarryShape("mean", (2,), "float32").materialize()
    Array([0., 0.], dtype=float32)
    """

    name: str
    shape: Sequence[int]
    dtype: Any

    def __post_init__(self) -> None:
        """Check the name, and store shape and dtype in one form."""
        check_name("name", self.name)
        if not isinstance(self.shape, (tuple, list)):
            raise TypeError(f"shape of {self.name!r} must be a tuple of integers, but is {self.shape!r}.")
        shape = tuple(check_int(f"shape of {self.name!r}", size, 0) for size in self.shape)
        object.__setattr__(self, "shape", shape)
        if self.dtype is None:
            raise TypeError(f"dtype of {self.name!r} is None; name one, such as 'float32'.")
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def materialize(self) -> jax.Array:
        """Zeros of this shape and dtype."""
        return jnp.zeros(self.shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class CarrySpec:
    """An axis whose elements are taken in order, each step seeing what the one before left.

    The carry's structure, shapes and dtypes are checked when the axis is executed.

    Args:
        axis_name: the axis, by the name of its `AxisSpec`.
        init: the first carry, a pytree of arrays; `CarryShape` leaves stand for zeros. `()` for none.
        transition: `(carry, x) -> (carry, output)`; with `cond`, `carry -> carry`.
        ordered_sinks: whether outputs leave the device in the order of the elements.
        collect_outputs: whether the outputs are stacked; if not, they are None.
        cond: `carry -> bool`, to step until it fails. Needs `collect_outputs=False`.

    Raises:
        TypeError: a name that is not a string, a function that is not callable, a flag that is not a bool.
        ValueError: an empty name, `init=None`, or `cond` together with `collect_outputs=True`.
    """

    axis_name: str
    init: Any
    transition: Any
    ordered_sinks: bool = True
    collect_outputs: bool = True
    cond: WhileCondFn | None = None

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_name("axis_name", self.axis_name)
        if self.init is None:
            raise ValueError(f"init of the carry of axis {self.axis_name!r} is None; pass a pytree, () for no carry.")
        signature = "(carry, x) -> (carry, output)" if self.cond is None else "carry -> carry"
        check_callable("transition", self.transition, signature)
        check_bool("ordered_sinks", self.ordered_sinks)
        check_bool("collect_outputs", self.collect_outputs)
        if self.cond is not None:
            check_callable("cond", self.cond, "carry -> bool")
            if self.collect_outputs:
                raise ValueError(
                    f"the CarrySpec of axis {self.axis_name!r} has a cond, and a loop of unknown length stacks no "
                    "outputs; pass collect_outputs=False, or leave out cond."
                )


def materialize_carry(init: Any) -> Any:
    """`init` with each `CarryShape` replaced by its zeros."""
    return jax.tree.map(lambda leaf: leaf.materialize() if isinstance(leaf, CarryShape) else leaf, init)
