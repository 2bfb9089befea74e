"""What a run reads: numpy, JAX and Zarr arrays, and anything with `__len__` and slices, a tile at a time."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zarr

from xtrax.run._canonical import canonical_json_bytes
from xtrax.tiling._host_arrays import refuse_wrapping

_UNSHARED = (np.ndarray, np.memmap, zarr.Array)
"""Of which a slice stays as it is when another one is taken."""


@dataclass(frozen=True)
class Source:
    """A leaf of the inputs that has the outermost axis.

    Attributes:
        where: What it is, for messages: `inputs[0]['x']`.
        value: The array, or what is sliced like one.
        dim: Which dimension the outermost axis is.
        shape: Of all of it.
        dtype: Of its elements.
        computed: The dtype that they have in the program; a narrower one, if JAX has no 64 bits.
    """

    where: str
    value: Any
    dim: int
    shape: tuple[int, ...]
    dtype: Any
    computed: Any

    @property
    def row_bytes(self) -> int:
        """Bytes of one element of the outermost axis."""
        others = [n for i, n in enumerate(self.shape) if i != self.dim]
        return int(np.prod(others, dtype=np.int64)) * getattr(self.dtype, "itemsize", 8)

    @property
    def placeholder(self) -> Any:
        """What has the shape and dtype of all of it, and no data."""
        if is_key(self.value):
            return self.value
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def tile_placeholder(self, rows: int) -> Any:
        """The same of a tile."""
        if is_key(self.value):
            data = jax.random.key_data(self.value)
            many = np.broadcast_to(np.zeros((), data.dtype), (rows, *data.shape[1:]))
            return jax.random.wrap_key_data(jnp.asarray(many), impl=jax.random.key_impl(self.value))
        shape = (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])
        return np.broadcast_to(np.zeros((), self.dtype), shape)

    def read(self, start: int, stop: int) -> Any:
        """Elements of the outermost axis, on the host.

        Raises:
            TypeError: If it is masked.
            ValueError: If it is not what its shape and dtype said.
        """
        if isinstance(self.value, jax.Array):  # the start is an operand: one small program for all tiles
            part = jax.lax.dynamic_slice_in_dim(self.value, start, stop - start, axis=self.dim)
            return part if is_key(part) else np.asarray(part)
        index = slice(start, stop)
        whole = self.value[index] if self.dim == 0 else self.value[(*(slice(None),) * self.dim, index)]
        values = _slice(f"{self.where}[{start}:{stop}]", whole)
        if type(self.value) not in _UNSHARED:
            values = np.array(values)  # a reader may hand out views of one buffer, and tiles are read ahead
        expected = (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])
        if values.shape != expected or values.dtype != self.dtype:
            raise ValueError(
                f"{self.where}[{start}:{stop}] is {values.dtype}{list(values.shape)}, where {self.dtype}"
                f"{list(expected)} is due; every slice of an input must have the dtype and shape of the first"
            )
        return values

    def describe(self) -> dict[str, Any]:
        """What a resumed run compares."""
        return {"name": self.where, "shape": list(self.shape), "dtype": str(self.dtype)}


def is_key(value: Any) -> bool:
    """Whether it is an array of typed PRNG keys."""
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def source(where: str, value: Any, dim: int) -> Source:
    """Look at a leaf without reading it whole.

    Raises:
        TypeError: If it is no array of numbers, and cannot be sliced like one.
        ValueError: If it is empty and has no dtype.
    """
    _refuse_masked(where, value, "pass .filled(...)")
    if is_key(value):
        if dim:
            raise TypeError(f"{where} holds PRNG keys, and has the outermost axis as dimension {dim}; put it first")
        return Source(where, value, dim, value.shape, value.dtype, value.dtype)
    _refuse_unsliceable(where, value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = _numbers(where, value.dtype)
        return Source(where, value, dim, tuple(map(int, value.shape)), dtype, jax.dtypes.canonicalize_dtype(dtype))
    if dim:
        raise TypeError(f"{where} has the outermost axis as dimension {dim}, which a {type(value).__name__} cannot "
                        "be sliced along; put the outermost axis first")  # fmt: skip
    length = len(value)
    if length == 0:
        raise ValueError(f"{where} is empty and has no dtype; pass a numpy array")
    first = _slice(f"{where}[0:1]", value[0:1])
    if first.shape[:1] != (1,):
        raise TypeError(f"{where}[0:1] is {first.dtype}{list(first.shape)}; a slice must be an array of the elements")
    dtype = _numbers(where, first.dtype)
    return Source(where, value, dim, (length, *first.shape[1:]), dtype, jax.dtypes.canonicalize_dtype(dtype))


def _refuse_unsliceable(where: str, value: Any) -> None:
    """Refuse what is no array, and cannot be sliced like one."""
    if isinstance(value, str | bytes | os.PathLike):
        raise TypeError(
            f"{where} is {value!r}; a path is not opened for you: pass the array, such as zarr.open_array(path) or "
            "numpy.load(path, mmap_mode='r')"
        )
    if isinstance(value, zarr.Group | Mapping):  # of which h5py's files and groups are some
        names = ", ".join(map(repr, sorted(map(str, value))[:5])) or "nothing"
        raise TypeError(
            f"{where} is a {type(value).__name__} of named arrays ({names}); pass one of them, x['name'], or a dict of "
            "those that fn takes"
        )
    if isinstance(value, Iterator):
        raise TypeError(
            f"{where} is a {type(value).__name__}, which can be read once and has no length, and a run reads rows by "
            "their numbers; pass an array, or an object with __len__ and slices"
        )
    if not hasattr(value, "__getitem__") or not (hasattr(value, "__len__") or hasattr(value, "shape")):
        raise TypeError(
            f"{where} is of type {type(value).__name__}; what has an axis must be a numpy, JAX or Zarr array, or an "
            "object with __len__ and slices (lists are trees: pass numpy.asarray of a list of numbers)"
        )


def _slice(where: str, values: Any) -> np.ndarray:
    _refuse_masked(where, values, "let __getitem__ return .filled(...)")
    return np.asarray(values)


def _refuse_masked(where: str, value: Any, cure: str) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{where} is masked, and no program sees the mask; {cure}, and pass the mask beside it")


def _numbers(where: str, dtype: Any) -> np.dtype:
    try:
        found = np.dtype(dtype)
        native = found.newbyteorder("=")
        jax.typeof(np.zeros((), native))
    except TypeError:
        raise TypeError(f"{where} has dtype {dtype}, which no program computes with; pass numbers") from None
    if found != native:
        raise TypeError(
            f"{where} has dtype {found.str}, whose bytes are not in the order of this machine; pass "
            'x.astype(x.dtype.newbyteorder("="))'
        )
    return found


def whole(where: str, value: Any) -> Any:
    """An array that every tile needs; what is no array is passed on as it is.

    Raises:
        ValueError: As of `is_rounded`.

    Warns:
        UserWarning: If it is rounded.
    """
    value = np.asarray(value[...]) if isinstance(value, zarr.Array) else value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iufc":
        computed = jax.dtypes.canonicalize_dtype(value.dtype)
        if is_rounded(where, value, computed):
            warn_rounded(where, value.dtype, computed)
    return value


def is_rounded(where: str, values: Any, computed: Any) -> bool:
    """Whether floats change when JAX, which without `jax_enable_x64` has no 64 bits, makes them narrower.

    Args:
        where: What the values are, for messages.
        values: An array on the host.
        computed: The dtype that JAX makes of theirs.

    Raises:
        ValueError: If integers would change, which then wrap around: a number that is not near what it was.
    """
    if values.dtype == computed or not values.size:
        return False
    if values.dtype.kind in "iu":
        refuse_wrapping(where, values, computed)
        return False
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(computed)
    return bool(np.any((narrow != values) & ~np.isnan(values)))  # NaN differs from itself


def warn_rounded(where: str, dtype: Any, computed: Any) -> None:
    """Say that an input loses digits."""
    warnings.warn(
        f"{where} is {dtype}, and is computed with as {computed}, which rounds it: without jax_enable_x64 JAX has no "
        f"{dtype}. Pass x.astype({str(computed)!r}) to accept that, or call "
        "jax.config.update('jax_enable_x64', True) first",
        UserWarning,
        stacklevel=2,
    )


def digest_arrays(arrays: Sequence[Any]) -> str:
    """A sha256 over the dtypes, shapes and bytes of arrays on the host or device."""
    digest = hashlib.sha256()
    for array in arrays:
        name = str(array.dtype)
        values = np.asarray(jax.random.key_data(array) if is_key(array) else array)
        digest.update(canonical_json_bytes([name, list(values.shape)]))
        if values.size:
            digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
