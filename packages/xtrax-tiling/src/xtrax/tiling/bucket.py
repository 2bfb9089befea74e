"""Pad elements of differing length to a few lengths, so that few programs are compiled."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from xtrax.tiling._axes import broadcast_prefix
from xtrax.tiling._check import check_boundaries, check_int
from xtrax.tiling._host_arrays import exact_scalar, number_array
from xtrax.tiling._ragged.boundaries import padding_waste, suggest_boundaries
from xtrax.tiling.ragged import iter_ragged, map_ragged

__all__ = ["bucketize", "iter_ragged", "map_ragged", "padding_waste", "select_bucket", "suggest_boundaries"]


def select_bucket(length: int, boundaries: Sequence[int]) -> int:
    """The smallest boundary that is no shorter than `length`.

    Args:
        length: the length of one element, at least 0.
        boundaries: the lengths padded to, strictly ascending and positive.

    Returns:
        One of `boundaries`.

    Raises:
        TypeError: a length or boundary that is not an integer (a bool is none).
        ValueError: a negative length, empty or unordered boundaries, or a length past the last boundary.

    >>> select_bucket(17, (16, 32, 64))
    32
    """
    length = check_int("length", length, 0)
    boundaries = check_boundaries("boundaries", boundaries)
    for boundary in boundaries:
        if length <= boundary:
            return boundary
    raise ValueError(
        f"length {length} is past the last boundary {boundaries[-1]} of {boundaries}; "
        "add a boundary of at least that length, or cut the element."
    )


def bucketize(xs: Any, bucket_size: int, *, pad_value: Any = 0, axis: Any = 0) -> tuple[Any, npt.NDArray[np.bool_]]:
    """Pad a pytree of arrays to `bucket_size` along one axis, on the host.

    Args:
        xs: a pytree of numpy or JAX arrays that share a length along `axis`.
        bucket_size: the length to pad to, at least that of the data; see `select_bucket`.
        pad_value: what is written past the end, a number or a pytree of numbers that is a prefix of `xs`. Each must
            be exact in the dtype of its leaf.
        axis: the axis that is padded, an int or a pytree that is a prefix of `xs`; a leaf whose axis is None is
            returned as it is.

    Returns:
        `(padded, mask)`: `xs` as numpy arrays of their own dtypes with `bucket_size` along `axis`, and a
        `(bucket_size,)` bool array that is True where the data is.

    Raises:
        TypeError: tracers, masked arrays, typed PRNG keys or other leaves that are no numeric arrays; a size that is
            not an integer.
        ValueError: arrays with parts on other hosts, no leaves, leaves that disagree about the length, a leaf without
            that axis, a bucket shorter than the data, or a pad value that the dtype cannot hold.

    >>> padded, mask = bucketize(np.array([3, 1, 4]), 5, pad_value=-1)
    >>> padded.tolist(), mask.tolist()
    ([3, 1, 4, -1, -1], [True, True, True, False, False])
    """
    bucket_size = check_int("bucket_size", bucket_size, 1)
    named, treedef = jax.tree_util.tree_flatten_with_path(xs)
    names = [f"xs{jax.tree_util.keystr(path)}" for path, _ in named]
    arrays = [number_array(name, leaf, "bucketize") for name, (_, leaf) in zip(names, named, strict=True)]
    axes = broadcast_prefix("axis", axis, xs)
    values = broadcast_prefix("pad_value", pad_value, xs, "a number")
    padded_axes = {
        i: _normal_axis(name, array, ax)
        for i, (name, array, ax) in enumerate(zip(names, arrays, axes, strict=True))
        if ax is not None
    }
    if not padded_axes:
        raise ValueError("xs has no array to pad; give at least one leaf whose axis is not None.")
    first = next(iter(padded_axes))
    length = arrays[first].shape[padded_axes[first]]
    for i, ax in padded_axes.items():
        if arrays[i].shape[ax] != length:
            raise ValueError(
                f"{names[first]} has length {length} along axis {padded_axes[first]}, but {names[i]} has length "
                f"{arrays[i].shape[ax]} along axis {ax}; the leaves of one element must agree."
            )
    if length > bucket_size:
        raise ValueError(
            f"bucket_size {bucket_size} is shorter than the data, {length} along axis {padded_axes[first]} of "
            f"{names[first]}; choose it with select_bucket({length}, boundaries)."
        )
    for i, ax in padded_axes.items():
        arrays[i] = _pad(names[i], arrays[i], ax, bucket_size, values[i])
    return jax.tree.unflatten(treedef, arrays), np.arange(bucket_size) < length


def _normal_axis(name: str, array: npt.NDArray[Any], axis: Any) -> int:
    axis = check_int("axis", axis, -array.ndim if array.ndim else -1)
    if axis >= array.ndim:
        raise ValueError(f"{name} has shape {array.shape}, and so no axis {axis} to pad.")
    return axis % array.ndim if array.ndim else 0


def _pad(name: str, array: npt.NDArray[Any], axis: int, size: int, value: Any) -> npt.NDArray[Any]:
    shape = (*array.shape[:axis], size, *array.shape[axis + 1 :])
    padded = np.full(shape, exact_scalar(name, value, array.dtype), array.dtype)
    padded[(slice(None),) * axis + (slice(array.shape[axis]),)] = array
    return padded
