"""What a function returns: names, shapes and dtypes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from xtrax.tiling import CarrySpec


@dataclasses.dataclass(frozen=True)
class BundleSchema:
    """The arrays that a function returns, by name.

    Args:
        fields: name to shape and dtype, in the order in which JAX flattens the result.
        carry_specs: the axes that are walked in order, if any; a list is stored as a tuple.

    Raises:
        TypeError: `fields` that does not map names to `jax.ShapeDtypeStruct`, or `carry_specs` of another type.
        ValueError: an empty name.

    >>> BundleSchema({"mean": jax.ShapeDtypeStruct((3,), "float32")}).fields["mean"].shape
    (3,)
    """

    fields: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(hash=False)
    carry_specs: Sequence[CarrySpec] | None = None

    def __post_init__(self) -> None:
        """Check both, and keep copies."""
        if not isinstance(self.fields, Mapping):
            raise TypeError(f"fields must map names to jax.ShapeDtypeStruct, but is {self.fields!r}.")
        for name, value in self.fields.items():
            if not isinstance(name, str):
                raise TypeError(f"fields must have strings as names, but has {name!r} ({type(name).__name__}).")
            if not name:
                raise ValueError("fields has an empty name; give each output one, such as 'energy'.")
            if not isinstance(value, jax.ShapeDtypeStruct):
                raise TypeError(f"fields[{name!r}] must be a jax.ShapeDtypeStruct, but is {value!r}.")
        object.__setattr__(self, "fields", dict(self.fields))
        if self.carry_specs is not None:
            if isinstance(self.carry_specs, str) or not isinstance(self.carry_specs, Sequence):
                raise TypeError(f"carry_specs must be a sequence of CarrySpec or None, but is {self.carry_specs!r}.")
            for spec in self.carry_specs:
                if not isinstance(spec, CarrySpec):
                    raise TypeError(f"carry_specs must hold CarrySpec objects, but one is {spec!r}.")
            object.__setattr__(self, "carry_specs", tuple(self.carry_specs))


def name_outputs(result: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves of an abstract result by attribute, by dict key, or as `out_<i>`; a path is joined by dots.

    Raises:
        ValueError: two leaves that would have one name.
    """
    fields: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]:
        name = ".".join([_first(path), *(_word(key) for key in path[1:])])
        if name in fields:
            raise ValueError(f"two outputs are called {name!r}; give them keys or attributes that differ.")
        fields[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return fields


def _first(path: tuple[Any, ...]) -> str:
    if not path:
        return "out_0"
    named = isinstance(path[0], (GetAttrKey, DictKey))
    return _word(path[0]) if named else f"out_{_word(path[0])}"


def _word(key: Any) -> str:
    if isinstance(key, GetAttrKey):
        return key.name
    if isinstance(key, SequenceKey):
        return str(key.idx)
    return str(key.key)
