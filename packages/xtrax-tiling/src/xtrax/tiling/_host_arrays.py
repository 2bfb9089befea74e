"""Arrays that are read on the host, where their values and their shapes are known."""

from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.core import Tracer


def check_readable(name: str, leaf: Any, caller: str) -> None:
    """Refuse a leaf whose values this host cannot read.

    Args:
        name: what the leaf is called in messages.
        leaf: anything.
        caller: what would read it, for messages.

    Raises:
        TypeError: it is being traced, or it is a masked array.
        ValueError: it is an array with parts on other hosts.
    """
    if isinstance(leaf, Tracer):
        raise TypeError(
            f"{name} is being traced, and its values are not known yet; {caller} runs on the host: call it before "
            "jax.jit, not inside."
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask {caller} would drop; fill it, and pass the mask apart.")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{name} has parts on other hosts, which this one cannot read; gather it first, with "
            "jax.experimental.multihost_utils.process_allgather."
        )


def number_array(name: str, leaf: Any, caller: str) -> npt.NDArray[Any]:
    """A leaf as an array of numbers or bools on the host.

    Raises:
        TypeError: it is being traced, masked, of typed PRNG keys, or no array of numbers or bools.
        ValueError: it is an array with parts on other hosts.
    """
    check_readable(name, leaf, caller)
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{name} holds typed PRNG keys; pass jax.random.key_data of it.")
    array = np.asarray(leaf)
    if array.dtype.kind in "OSUMm" or array.dtype.names is not None:
        raise TypeError(f"{name} must be a numeric or bool array, but has dtype {array.dtype}.")
    return array


def refuse_wrapping(name: str, array: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
    """Refuse integers that are other numbers once they are of a narrower dtype, as JAX makes them without 64 bits.

    Raises:
        ValueError: says which of them `dtype` cannot hold.
    """
    if array.dtype == dtype or array.dtype.kind not in "iu" or not array.size:
        return
    fits = np.iinfo(dtype)
    for value in (int(array.min()), int(array.max())):
        if not fits.min <= value <= fits.max:
            raise ValueError(
                f"{name} is {array.dtype} and holds {value}, which {dtype} cannot: without jax_enable_x64 JAX has 32 "
                "bits, and would wrap it around. Call jax.config.update('jax_enable_x64', True) first, or pass "
                "integers that fit, such as the halves x >> 32 and x & 0xFFFFFFFF as uint32"
            )


def exact_scalar(name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """A pad value as a scalar of `dtype`; a float may round, but an integer or bool dtype must hold it exactly.

    Raises:
        TypeError: it is no number.
        ValueError: the dtype cannot hold it.
    """
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "biufc":
        raise TypeError(f"pad_value for {name} must be a number, but is {value!r} ({type(value).__name__}).")
    with np.errstate(all="ignore"):
        cast = number.astype(dtype)
    if dtype.kind in "biu" and not cast == number:
        raise ValueError(f"pad_value {value!r} does not fit {name} of dtype {dtype}; give one that it can hold.")
    return cast
