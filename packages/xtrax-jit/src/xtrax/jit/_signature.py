"""What was traced: the arguments, how they were passed, and the state of JAX."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.core

from xtrax.jit._context import ambient_mesh, configuration, describe_mesh, named_axes
from xtrax.jit._naming import argument_names

_short = reprlib.Repr()
_short.maxother = _short.maxstring = _short.maxlong = 80


@dataclasses.dataclass(frozen=True)
class ArrayLeaf:
    """A traced leaf; `type` is JAX's own text for it, which may have more than the rest."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool
    sharding: str
    mesh: str
    type: str

    def __str__(self) -> str:
        weak = "weak " if self.weak_type else ""
        return f"{weak}{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class StaticLeaf:
    """A leaf that is part of the trace as a Python value."""

    value: Any

    def __str__(self) -> str:
        return "None" if self.value is None else f"static {show(self.value)}"


@dataclasses.dataclass(frozen=True)
class Node:
    """A container: its type, the metadata that JAX keeps with it (such as a dict's keys), and its number of leaves."""

    type: type
    metadata: Any
    size: int

    def __str__(self) -> str:
        return self.type.__name__ if self.size else f"empty {self.type.__name__}"


Entry = ArrayLeaf | StaticLeaf | Node


@dataclasses.dataclass(frozen=True)
class TraceSignature:
    """What one trace depended on.

    Printed, it reads as a call: `step(batch['x']: float32[32,7], *, n: static 3)`; arguments after `*` were passed
    by keyword.

    Attributes:
        function: Name of the function.
        positional: Names of the arguments passed by position, in order.
        keyword: Names of the arguments passed by keyword, sorted.
        entries: Every container and leaf of the arguments, by its path, such as `batch['x']`.
        mesh: The ambient mesh, in words.
        named_axes: The named axes in scope (`jax.vmap(axis_name=)`, `jax.shard_map`), in words.
        config: The JAX options that traces depend on, by name.
    """

    function: str
    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    entries: Mapping[str, Entry]
    mesh: str
    named_axes: str
    config: Mapping[str, str]

    def __str__(self) -> str:
        """The signature as a call."""
        parts = []
        for path, entry in self.entries.items():
            if (path,) == self.keyword[:1]:
                parts.append("*")
            if not isinstance(entry, Node) or not entry.size:
                parts.append(f"{path}: {entry}")
        mesh = "" if self.mesh == "none" else f" in mesh {self.mesh}"
        return f"{self.function}({', '.join(parts)}){mesh}"

    def __repr__(self) -> str:
        """The signature as a call, in angle brackets."""
        return f"<trace {self}>"


class Signer:
    """Makes the signatures of one function's traces."""

    def __init__(self, name: str, function: Callable[..., Any], static_argnames: tuple[str, ...]) -> None:
        self._name = name
        self._static = frozenset(static_argnames)
        self._function = function

    def sign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TraceSignature:
        """The signature of a trace with these arguments, whose traced leaves are tracers."""
        positional = argument_names(self._function, len(args))
        keyword = tuple(sorted(kwargs))
        entries: dict[str, Entry] = {}
        for name, value in [*zip(positional, args, strict=True), *((name, kwargs[name]) for name in keyword)]:
            entries.update({name: StaticLeaf(value)} if name in self._static else _entries(name, value))
        return TraceSignature(self._name, positional, keyword, entries, ambient_mesh(), named_axes(), configuration())


def show(value: Any) -> str:
    """The repr of a value, cut to one line's length; a repr that raises is replaced."""
    return " ".join(_short.repr(value).split())


def _entries(name: str, value: Any) -> Iterator[tuple[str, Entry]]:
    """Every container and leaf of an argument with its path, containers before what they contain."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is None)
    return _walk(name, 0, tree, leaves)


def _walk(path: str, depth: int, tree: Any, leaves: list[tuple[Any, Any]]) -> Iterator[tuple[str, Entry]]:
    """The entries of the subtree at `path`, whose leaves with their key paths are `leaves`."""
    data = tree.node_data()
    if data is None:
        yield path, _leaf(leaves[0][1])
        return
    kind, metadata = data
    yield path, Node(kind, metadata, len(leaves))
    start = 0
    for i, child in enumerate(tree.children()):
        inside = leaves[start : start + child.num_leaves]
        start += child.num_leaves
        if inside:
            key = inside[0][0][depth]
        else:  # JAX gives keys only along the way to a leaf
            key = jax.tree_util.DictKey(metadata[i]) if kind is dict else jax.tree_util.SequenceKey(i)
        yield from _walk(path + jax.tree_util.keystr((key,)), depth + 1, child, inside)


def _leaf(value: Any) -> Entry:
    if not isinstance(value, jax.core.Tracer):
        return StaticLeaf(value)
    kind = jax.typeof(value)
    sharding = getattr(kind, "sharding", None)
    spec = getattr(sharding, "spec", ())
    return ArrayLeaf(
        shape=tuple(getattr(kind, "shape", ())),
        dtype=str(getattr(kind, "dtype", kind)),
        weak_type=getattr(kind, "weak_type", False),
        sharding=str(spec) if any(axis is not None for axis in spec) else "P()",
        mesh=describe_mesh(sharding.mesh) if sharding is not None else "none",
        type=str(kind),
    )
