"""What may be staged: arrays of numbers, and attributes that JSON holds."""

import difflib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from xtrax.run._canonical import normalize_json_value
from xtrax.run._errors import Key

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMERIC = frozenset(["bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"])
_ATTR_TYPES = (str, int, float, bool, list, dict, type(None))


def to_array(value: Any, name: str, key: Key, dtypes: frozenset[str], fmt: str) -> np.ndarray:
    """A C-ordered host copy in native byte order, so that later changes of `value` do not reach the output.

    Raises:
        TypeError: If it is traced, masked, ragged, holds objects, or has a dtype that the format cannot hold.
    """
    what = f"array {name!r} of key {key!r}"
    if isinstance(value, Tracer):
        raise TypeError(
            f"{what} is traced ({value}): a sink runs on the host. Call it outside jit, or from a host callback"
        )
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise TypeError(f"{what} is a PRNG key array ({value.dtype}); stage jax.random.key_data(...) of it")
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is masked, which {fmt} cannot hold; stage .filled(...) of it, and the mask beside it")
    try:
        array = np.array(value, order="C")
    except ValueError as error:
        raise TypeError(f"{what} is ragged or not made of numbers ({error}); pad it, or stage it in parts") from None
    if array.dtype.isnative is False:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.name not in dtypes:
        hint = (
            "cast it, for instance with .astype(np.float32)"
            if array.dtype.kind in "fV" and not array.dtype.hasobject
            else "stage numbers; put text and small metadata in attrs="
        )
        raise TypeError(f"{what} has dtype {array.dtype}, which {fmt} cannot hold; {hint}")
    return array.view(np.dtype(array.dtype.name))  # C's `long long` is an int64 under another code, which zarr refuses


def check_schema(schema: Any) -> dict[str, tuple[type, ...]] | None:
    """`extension_schema` as a dict of tuples of types.

    Raises:
        TypeError: If it is not a mapping of names to types that JSON holds, or tuples of them.
        ValueError: If it names a reserved attribute.
    """
    if schema is None:
        return None
    if not isinstance(schema, Mapping):
        raise TypeError(f"extension_schema must map attribute names to types, not be a {type(schema).__name__}")
    checked = {}
    for name, types in schema.items():
        if not isinstance(name, str):
            raise TypeError(f"extension_schema has the name {name!r}; attribute names are strings")
        types = types if isinstance(types, tuple) else (types,)
        if not types or any(t not in _ATTR_TYPES for t in types):
            allowed = ", ".join(t.__name__ for t in _ATTR_TYPES)
            raise TypeError(f"extension_schema[{name!r}] is {types!r}; allowed are tuples of, or one of: {allowed}")
        _refuse_reserved(name, "extension_schema")
        checked[name] = types
    return checked


RESERVED = frozenset(
    ["run_id", "layout", "created_at", "git", "versions", "python", "platform", "device_kind", "device_count"]
)
"""Names of a run's provenance, on the root of every format."""


def check_attrs(attrs: Any, key: Key, schema: dict[str, tuple[type, ...]] | None) -> dict[str, Any]:
    """Attributes as JSON holds them, checked against the schema if there is one.

    Raises:
        TypeError: If they are no mapping, hold what JSON cannot, or a value is not of its declared type.
        ValueError: If a name is reserved, or not in the schema.
    """
    if attrs is None:
        return {}
    if not isinstance(attrs, Mapping):
        raise TypeError(f"attrs of key {key!r} must be a mapping of names to values, not {type(attrs).__name__}")
    try:
        attrs = normalize_json_value(attrs)
    except (TypeError, ValueError) as error:
        raise type(error)(f"attrs of key {key!r}: {error}") from None
    for name, value in attrs.items():
        _refuse_reserved(name, f"attrs of key {key!r}")
        if schema is None:
            continue
        if name not in schema:
            near = difflib.get_close_matches(name, schema, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {sorted(schema)}"
            raise ValueError(f"attrs of key {key!r}: {name!r} is not in extension_schema{hint}")
        types = schema[name]
        # An int is fine where a float is declared; a bool is not an int.
        kind = type(value)
        if kind not in types and not (kind is int and float in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise TypeError(f"attrs of key {key!r}: {name!r} is {value!r} ({kind.__name__}), declared as {wanted}")
    return attrs


def _refuse_reserved(name: str, where: str) -> None:
    if name in RESERVED:
        raise ValueError(f"{where}: {name!r} is reserved for provenance; choose another name than {sorted(RESERVED)}")
