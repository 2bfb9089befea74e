"""JSON with one spelling for each value."""

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def normalize_json_value(value: Any) -> Any:
    """What JSON will hold of a value: plain dicts, lists, strings, numbers, booleans and None.

    Tuples and arrays become lists, numpy scalars Python ones, paths strings. NaN and the infinities, which JSON lacks,
    become `"NaN"`, `"Infinity"` and `"-Infinity"`, as the Zarr v3 specification spells them.

    Args:
        value: Anything made of the above; mappings need string keys.

    Returns:
        A new value; the argument is not changed.

    Raises:
        TypeError: If JSON cannot hold a value (bytes, sets, complex numbers, objects) or a key is no string. The
            message says where it lies.
        ValueError: If a container contains itself.

    Examples:
        >>> import numpy as np
        >>> normalize_json_value({"loss": np.float32(0.5), "shape": (2, 3), "best": float("nan")})
        {'loss': 0.5, 'shape': [2, 3], 'best': 'NaN'}
    """
    return _normalize(value, "value", ())


def canonical_json_bytes(value: Any) -> bytes:
    """The same UTF-8 bytes for equal values: keys sorted, no spaces; fit for hashing.

    Args:
        value: What `normalize_json_value` accepts. `1` and `1.0` are different values.

    Returns:
        The JSON text, encoded.

    Raises:
        TypeError: As `normalize_json_value`.
        ValueError: As `normalize_json_value`; also if a string holds a lone surrogate.

    Examples:
        >>> canonical_json_bytes({"b": (1, 2), "a": None})
        b'{"a":null,"b":[1,2]}'
    """
    text = json.dumps(
        normalize_json_value(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def _normalize(value: Any, where: str, parents: tuple[int, ...]) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, jax.Array) and value.ndim == 0):
        value = np.asarray(value).item()
    elif isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).tolist()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, os.PathLike):
        return _normalize(os.fspath(value), where, parents)
    if isinstance(value, Mapping | list | tuple):
        if id(value) in parents:
            raise ValueError(f"{where} contains itself; JSON holds only finite values")
        parents = (*parents, id(value))
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}; JSON keys are strings")
        return {str(key): _normalize(item, f"{where}[{key!r}]", parents) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_normalize(item, f"{where}[{i}]", parents) for i, item in enumerate(value)]
    raise TypeError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold; allowed are dicts with string keys, lists, "
        "tuples, arrays of numbers, strings, numbers, booleans, paths and None"
    )
