"""The arguments of a tiled function, checked, and as flat arrays with the axis of each."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xtrax.tiling._axes import broadcast_prefix
from xtrax.tiling._check import plural
from xtrax.tiling._split import ARRAY_LIKE, ARRAYS, Split, hashable_or_none


@dataclasses.dataclass(frozen=True)
class Bound:
    """What is mapped.

    Attributes:
        arrays: those of `fn`, then those of the arguments, then the key; the mapped ones share an axis.
        axes: the mapped axis of each array, or None.
        size: how many elements the mapped axes have.
        call: from one element of each array, and the number of the element, to the outputs.
        has_key: whether the last array is a key, so that the number of the element matters.
        signature: what `call` depends on besides the arrays and `fn` itself; None if that cannot be hashed.
    """

    arrays: list[Any]
    axes: tuple[int | None, ...]
    size: int
    call: Callable[[Sequence[Any], Any], Any]
    has_key: bool
    signature: Hashable | None

    @property
    def mapped(self) -> list[int]:
        """Which arrays are mapped."""
        return [i for i, axis in enumerate(self.axes) if axis is not None]

    @property
    def mapped_axes(self) -> list[int]:
        """The axis of each mapped array."""
        return [axis for axis in self.axes if axis is not None]


def bind(fn: Any, in_axes: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> Bound:
    """Spread `in_axes` over the leaves of the arguments, and tell arrays from everything else.

    Args:
        fn: the function of one element; its own arrays, if it is a pytree such as an `eqx.Module`, are not mapped.
        in_axes: an int, None, or a sequence with an entry for each positional argument.
        args: the positional arguments.
        kwargs: the keyword arguments, mapped along axis 0.
        key: a PRNG key, or None.

    Raises:
        TypeError: an axis that is neither an int nor None, or a mapped leaf that is no array.
        ValueError: nothing is mapped, `in_axes` is no prefix of `args`, a leaf without the axis, or sizes that differ.
    """
    if key is not None and "key" in kwargs:
        raise ValueError("key is given to tiled_vmap and in the call; leave out one of the two.")
    per_argument: Any = tuple(in_axes) if isinstance(in_axes, (list, tuple)) else in_axes
    if isinstance(per_argument, tuple) and len(per_argument) != len(args):
        raise ValueError(
            f"in_axes has {len(per_argument)} entries, but {len(args)} arguments were passed by position; give one "
            "entry for each (arguments passed by keyword are mapped along axis 0)."
        )
    entries = broadcast_prefix("in_axes", per_argument, args, tree_name="args")
    named = [(f"args{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(args)]
    keywords = jax.tree_util.tree_leaves_with_path(dict(kwargs))
    named += [(f"kwargs{jax.tree_util.keystr(path)}", leaf) for path, leaf in keywords]
    entries += [0] * (len(named) - len(entries))
    given = [_normal_axis(name, leaf, axis) for (name, leaf), axis in zip(named, entries, strict=True)]
    size = _shared_size([(name, leaf, axis) for (name, leaf), axis in zip(named, given, strict=True)], in_axes)

    arrays: list[Any] = []
    own = Split.of(fn, arrays)
    array_axes: list[int | None] = [None] * len(arrays)
    passed = Split.of((args, dict(kwargs)), arrays)
    array_axes += [axis for (_, leaf), axis in zip(named, given, strict=True) if isinstance(leaf, ARRAYS)]
    if key is not None:
        arrays.append(key)
        array_axes.append(None)

    def call(values: Sequence[Any], index: Any) -> Any:
        elements, keywords = passed.rebuilt(values)
        if key is not None:
            keywords = {**keywords, "key": jax.random.fold_in(values[-1], index)}
        return own.rebuilt(values)(*elements, **keywords)

    signature = hashable_or_none((own.function_key, passed.key, tuple(array_axes), key is not None))
    return Bound(arrays, tuple(array_axes), size, call, key is not None, signature)


def _normal_axis(name: str, leaf: Any, axis: Any) -> int | None:
    if axis is None:
        return None
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(
            f"the axis of {name} must be an int or None, but is {axis!r} ({type(axis).__name__}); write a Python int, "
            "such as 0."
        )
    if not isinstance(leaf, ARRAY_LIKE):
        cure = "pass it by position, with" if name.startswith("kwargs") else "give it"
        raise TypeError(
            f"{name} is mapped along axis {axis}, but is no array ({type(leaf).__name__}); {cure} the axis None."
        )
    shape = np.shape(leaf)
    if not -len(shape) <= axis < len(shape):
        cure = "pass it by position, with" if name.startswith("kwargs") else "give it"
        raise ValueError(
            f"{name} has shape {shape}, and so no axis {axis} to map over; {cure} the axis None if it is the same for "
            "all elements."
        )
    return axis % len(shape)


def _shared_size(mapped: Sequence[tuple[str, Any, int | None]], in_axes: Any) -> int:
    sizes = [(name, axis, np.shape(leaf)[axis]) for name, leaf, axis in mapped if axis is not None]
    if not sizes:
        raise ValueError(
            f"nothing is mapped: in_axes is {in_axes!r}, and the arguments have {len(mapped)} leaves; at least one "
            "array needs an axis to map over."
        )
    first, first_axis, size = sizes[0]
    for name, axis, other in sizes[1:]:
        if other != size:
            raise ValueError(
                f"the mapped axes differ in size: axis {first_axis} of {first} has {plural(size, 'element')}, but "
                f"axis {axis} of {name} has {other}; give what is not mapped the axis None."
            )
    return size
