"""The outputs of a tiled run: their names in the store, and how tiles of them are put together."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.run._appended.shards import ArraySpec, Compression, check_array_spec
from xtrax.run._names import check_name
from xtrax.run._tiled.program import TileResult, Work

CARRIES = "carries"
_ALONE = "output"


def named_leaves(tree: Any, *prefix: str) -> dict[str, Any]:
    """The leaves of a tree by the names that they have in the store; of PRNG keys, which Zarr cannot hold, their data.

    Raises:
        ValueError: If a key cannot be a name on the disk, or two leaves have one name.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = [check_name(_part(key), f"output {jax.tree_util.keystr(path)}, whose name") for key in path]
        name = "/".join([*prefix, *parts]) or _ALONE
        if name in named:
            raise ValueError(f"two outputs have the name {name!r} in the store; rename one of them")
        named[name] = _without_keys(leaf)
    return named


def _part(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def result_names(result: TileResult) -> dict[str, Any]:
    """The arrays that a tile adds rows to, by name."""
    named = named_leaves(result.rows)
    for axis, carry in result.carries.items():
        named |= named_leaves(carry, CARRIES, check_name(axis, "the name of axis"))
    return named


def final_names(work: Work, state: Any, reduced: Any) -> dict[str, Any]:
    """What is known only at the end, by name: the reduced outputs, and the last carry of the outermost axis."""
    named = named_leaves(reduced) if work.reducer else {}
    if work.scans:
        named |= named_leaves(state["carry"], CARRIES, work.outermost.spec.name)
    return named


def array_specs(
    work: Work, shapes: TileResult, tile_rows: int, compression: Compression | None
) -> tuple[ArraySpec, ...]:
    """The arrays of the store.

    Raises:
        TypeError: If Zarr cannot hold a dtype.
        ValueError: If a name cannot be one on the disk, or two arrays would lie at one place.
    """
    rows = result_names(shapes)
    specs = [
        ArraySpec(name, leaf.shape[1:], str(leaf.dtype), tile_rows, _dims(work, leaf.shape), compression)
        for name, leaf in rows.items()
    ]
    if shapes.state is not None:
        reduced = jax.eval_shape(work.reducer.finalize, shapes.state["reduced"]) if work.reducer else None
        for name, leaf in final_names(work, shapes.state, reduced).items():
            specs.append(ArraySpec(name, leaf.shape, str(leaf.dtype), None, (None,) * len(leaf.shape), compression))
    names = [spec.name for spec in specs]
    for name, other in itertools.permutations(names, 2):
        if name == other or other.startswith(f"{name}/"):
            raise ValueError(f"outputs {name!r} and {other!r} would lie at one place in the store; rename one of them")
    return tuple(check_array_spec(spec) for spec in specs)


def _dims(work: Work, shape: tuple[int, ...]) -> tuple[str | None, ...]:
    """Names of dimensions: the axes of the plan down to the first that is reduced."""
    names: list[str | None] = [work.outermost.spec.name]
    for decision in work.decisions[1:]:
        hook = work.hooks.get(decision.spec.name)
        at = len(names)
        if (hook is not None and hook.fuse is not None) or shape[at : at + 1] != (decision.spec.cardinality,):
            break
        names.append(decision.spec.name)
    return (*names, *[None] * (len(shape) - len(names)))


def state_to_bytes(state: Any) -> bytes | None:
    """A state as it is kept beside a tile; None if there is none."""
    return None if state is None else b"".join(np.asarray(_without_keys(x)).tobytes() for x in jax.tree.leaves(state))


def state_from_bytes(like: Any, data: bytes) -> Any:
    """The inverse; `like` has the tree, shapes and dtypes.

    Raises:
        ValueError: If there is more or less data than that.
    """
    leaves, treedef = jax.tree.flatten(like)
    parts, start = [], 0
    for leaf in leaves:
        key = _is_key(leaf)
        raw = jax.eval_shape(_without_keys, leaf)
        size = math.prod(raw.shape) * raw.dtype.itemsize
        values = np.frombuffer(data[start : start + size], raw.dtype).reshape(raw.shape)
        parts.append(jax.random.wrap_key_data(jnp.asarray(values), impl=jax.random.key_impl(leaf)) if key else values)
        start += size
    if start != len(data):
        raise ValueError(f"a state has {len(data)} bytes where {start} are due")
    return treedef.unflatten(parts)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _without_keys(leaf: Any) -> Any:
    """An array, concrete or abstract; of PRNG keys their data, uint32 with a dimension more."""
    if not _is_key(leaf):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


class Collected:
    """The outputs of a run without a sink."""

    def __init__(self, rows: int, shapes: TileResult):
        """Make room for all rows."""
        leaves, self._treedef = jax.tree.flatten((shapes.rows, shapes.carries))
        plain = [_without_keys(leaf) for leaf in leaves]
        self._whole = [np.zeros((rows, *leaf.shape[1:]), leaf.dtype) for leaf in plain]
        self._impls: dict[int, Any] = {}

    def put(self, start: int, result: TileResult) -> None:
        """Take the rows of a tile."""
        for i, part in enumerate(self._treedef.flatten_up_to((result.rows, result.carries))):
            if _is_key(part):
                self._impls[i] = jax.random.key_impl(part)
            self._whole[i][start : start + len(part)] = _without_keys(part)

    @property
    def outputs(self) -> tuple[Any, dict[str, Any]]:
        """All rows, and the carries of the Scan axes inside; keys as keys."""
        whole = [
            jax.random.wrap_key_data(jnp.asarray(leaf), impl=self._impls[i]) if i in self._impls else leaf
            for i, leaf in enumerate(self._whole)
        ]
        return self._treedef.unflatten(whole)


def sum_bytes(named: Mapping[str, Any] | Sequence[Any]) -> int:
    """Bytes of a row of arrays or shapes `(n, ...)`."""
    leaves = jax.tree.leaves(named)
    return sum(math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize for leaf in leaves if not _is_key(leaf))
