"""What differs between two traces of one function, and what to do about it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from xtrax.jit._signature import ArrayLeaf, Entry, Node, StaticLeaf, TraceSignature, show

Kind = Literal[
    "shape",
    "dtype",
    "weak type",
    "sharding",
    "static value",
    "structure",
    "omitted",
    "call form",
    "mesh",
    "axes",
    "config",
]

ADVICE: dict[str, str] = {
    "shape": "Pad inputs to a few fixed shapes, so that calls share a trace.",
    "dtype": "Convert the argument to one dtype before the call.",
    "weak type": "A Python number is weakly typed: pass jnp.asarray(value, dtype) at every call.",
    "sharding": "Place the argument in the same way before every call, with jax.device_put.",
    "static value": "Every static value is traced for itself: pass a value that varies as an array, and an object that "
    "compares by identity (a lambda, a partial) as one object made once.",
    "structure": "Pass the same containers with the same keys and metadata at every call; fill what is missing with a "
    "default.",
    "omitted": "An argument that is left out is another trace than the same one passed, even with its default value: "
    "pass it at every call, or at none.",
    "call form": "Pass each argument in one form, by position or by keyword, at every call.",
    "mesh": "Make every call under the same `with jax.set_mesh(mesh):`, or bind the function to it with mesh=.",
    "axes": "Call the function under the same named axes (jax.vmap(axis_name=), jax.shard_map) every time.",
    "config": "Set JAX options once, before the first call.",
    "nothing": "The cache was probably cleared (clear_cache, jax.clear_caches) or had to evict the trace.",
    "none permitted": "No trace is permitted, so this function must not be compiled; raise max_traces if it should be.",
    "intended": "If this trace is intended, raise max_traces.",
}
"""What to do, by the kind of change."""


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that differs: of which kind, where, and the values before and after."""

    kind: Kind
    where: str
    before: str
    after: str

    def __str__(self) -> str:
        alike = " (printed alike, but not equal)" if self.before == self.after else ""
        return f"{self.where} {self.before} -> {self.after}{alike}"


def difference(before: TraceSignature, after: TraceSignature) -> list[Change]:
    """What differs between two traces of one function, arguments first."""
    return [
        *_call_form(before, after),
        *(_omission(change, before, after) for change in _entries(before.entries, after.entries)),
        *_text("mesh", "ambient mesh:", before.mesh, after.mesh),
        *_text("axes", "named axes:", before.named_axes, after.named_axes),
        *(
            change
            for name in after.config
            for change in _text("config", f"{name}:", before.config[name], after.config[name])
        ),
    ]


def distance(changes: list[Change]) -> tuple[int, int]:
    """How dissimilar two traces are: first by their trees, since one replaced container hides many leaves."""
    return sum(change.kind in ("structure", "omitted") for change in changes), len(changes)


def _text(kind: Kind, where: str, before: str, after: str) -> Iterator[Change]:
    if before != after:
        yield Change(kind, where, before, after)


def _call_form(before: TraceSignature, after: TraceSignature) -> Iterator[Change]:
    for name in before.positional:
        if name in after.keyword:
            yield Change("call form", f"{name}: passed", "by position", "by keyword")
    for name in before.keyword:
        if name in after.positional:
            yield Change("call form", f"{name}: passed", "by keyword", "by position")


def _omission(change: Change, before: TraceSignature, after: TraceSignature) -> Change:
    """`change`, as one of the call where the whole argument that it is in was passed in one of the two only."""
    if "absent" in (change.before, change.after):
        names, others = ({*signature.positional, *signature.keyword} for signature in (before, after))
        path = change.where.removesuffix(":")
        if any(path == name or path.startswith((f"{name}[", f"{name}.")) for name in names ^ others):
            return dataclasses.replace(change, kind="omitted")
    return change


def _entries(before: Mapping[str, Entry], after: Mapping[str, Entry]) -> Iterator[Change]:
    replaced: list[str] = []  # containers that became another kind of thing, so that their contents do not compare
    for path in [*before, *(path for path in after if path not in before)]:
        if any(path.startswith((f"{container}[", f"{container}.")) for container in replaced):
            continue
        for change in _entry(path, before.get(path), after.get(path)):
            if change.where == f"{path}:":
                replaced.append(path)
            yield change


def _entry(path: str, before: Entry | None, after: Entry | None) -> Iterator[Change]:
    if isinstance(before, ArrayLeaf) and isinstance(after, ArrayLeaf):
        yield from _array(path, before, after)
    elif isinstance(before, StaticLeaf) and isinstance(after, StaticLeaf):
        if not _same(before.value, after.value):
            yield Change("static value", f"{path}: static value", show(before.value), show(after.value))
    elif isinstance(before, Node) and isinstance(after, Node) and before.type is after.type:
        # A dict's metadata are its keys, which the paths of its leaves show.
        if before.type is not dict and before.metadata != after.metadata:
            pair = _innermost(before.metadata, after.metadata)
            yield Change("structure", f"{path}: metadata of {before.type.__name__}", *map(show, pair))
    elif before is None or after is None:
        entry = before if after is None else after
        if not isinstance(entry, Node) or not entry.size:  # else its leaves say so
            yield Change("structure", f"{path}:", str(before or "absent"), str(after or "absent"))
    else:
        one_is_a_value = any(isinstance(entry, StaticLeaf) and entry.value is not None for entry in (before, after))
        yield Change("static value" if one_is_a_value else "structure", f"{path}:", str(before), str(after))


def _array(path: str, before: ArrayLeaf, after: ArrayLeaf) -> Iterator[Change]:
    changes = [
        *_text("shape", f"{path}: shape", str(before.shape), str(after.shape)),
        *_text("dtype", f"{path}: dtype", before.dtype, after.dtype),
        *_text("weak type", f"{path}: weak type", str(before.weak_type), str(after.weak_type)),
        *_text("sharding", f"{path}: sharding", before.sharding, after.sharding),
        *_text("sharding", f"{path}: on mesh", before.mesh, after.mesh),
    ]
    yield from changes or _text("sharding", f"{path}: type", before.type, after.type)


def _same(before: Any, after: Any) -> bool:
    """Equality as in JAX's cache of traces: 1, 1.0 and True are different static values."""
    return before is after or (type(before) is type(after) and bool(before == after))


def _innermost(before: Any, after: Any) -> tuple[Any, Any]:
    """The parts in which nested tuples of metadata differ; a pair that begins with a name is kept whole."""
    while isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        differing = [i for i, (b, a) in enumerate(zip(before, after, strict=True)) if not _same(b, a)]
        if len(before) == 2 and differing == [1] and isinstance(before[0], str):
            break
        if len(differing) != 1:
            return tuple(before[i] for i in differing), tuple(after[i] for i in differing)
        before, after = before[differing[0]], after[differing[0]]
    return before, after
