"""Structured pruning: remove whole units, so that the matrices shrink."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Literal as TracedLiteral

from xtrax.sparse._checks import as_fraction, as_int, check_callable, check_outside_trace
from xtrax.sparse._dataflow import DATA, WEIGHT, Trail, fix_all, flow, fresh, inner_jaxprs
from xtrax.sparse._factors import Axis, Factor, atoms, fix
from xtrax.sparse._layers import Owned, owned_leaves, resized
from xtrax.sparse._leaves import is_sparse
from xtrax.sparse._report import LeftAlone, PrunedGroup, PruneReport

Criterion = Literal["l1", "l2"] | Callable[[jax.Array], jax.Array]


@dataclass(eq=False)
class _Group:
    """Units tied by the code, and the leaf axes they lie on: `(leaf, axis, position among the axis's factors)`."""

    factor: Factor
    made_by: list[tuple[int, int, int]] = field(default_factory=list)
    taken_by: list[int] = field(default_factory=list)
    heads: bool = False
    kept: tuple[int, ...] = ()


def prune_structured(
    model: Any,
    *,
    fraction: float | None = None,
    keep: int | None = None,
    criterion: Criterion = "l2",
    sample: Any = None,
    forward: Callable[..., Any] | None = None,
) -> tuple[Any, PruneReport]:
    """Remove whole output units of Linear and Conv layers, with the inputs that read them, and whole attention heads.

    The result is a dense model with smaller matrices, faster on every backend and with no special kernels. Its
    outputs are those of the given model with the weights that read the removed units set to zero.

    Which units belong together is read from the model's computation, traced once on `sample`: the two terms of a
    residual sum lose the same units; flattened channels take all their positions with them. Sizes that cannot change
    without changing the meaning stay, and the report says why: inputs and outputs of the model, what a mean, a norm or
    a softmax runs over, what is concatenated, sliced or sorted or meets an iota (`arange`), grouped convolutions, and
    layers other than `equinox.nn.Linear`, `Conv`, `MLP` and `MultiheadAttention`. The smaller model is traced again; a
    group of units without which the code does not run, or computes with other constants, is left alone too.

    Args:
        model: An Equinox model, or any pytree of layers with `forward`. Dense, outside a trace.
        fraction: Share of each group of units to remove, above 0 and below 1, rounded down to whole units; or
        keep: Number of units (heads) of each group that stay, where it has more. Give exactly one of the two.
        criterion: Importance of a unit from its incoming weights `(units, n)`, those of all layers that produce it
            side by side, without biases: `"l2"` or `"l1"` norm, or a function that returns an array `(units,)`. The
            largest stay; ties go to the lower index.
        sample: An argument, or a tuple of arguments, as the model is called with; only shapes and dtypes matter
            (`jax.ShapeDtypeStruct` will do). Not needed for `equinox.nn.MLP`, `Linear`, and a `Sequential` that begins
            with one.
        forward: `forward(model, *sample)`, if the model is not called as `model(*sample)`, with `jax.vmap` for
            example. Layers are in inference mode while it is traced.

    Returns:
        The smaller model, of the same classes, and a `PruneReport`.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `fraction` or `keep` is out of range, or both or neither is given; `sample` is needed, or the model
            cannot be called with it; the model holds BCOO matrices; a score is NaN.
        RuntimeError: Called inside a JAX trace.

    >>> model = eqx.nn.MLP(4, 2, width_size=64, depth=2, key=jax.random.key(0))
    >>> smaller, report = prune_structured(model, fraction=0.5)
    >>> [layer.weight.shape for layer in smaller.layers]
    [(32, 4), (32, 32), (2, 32)]
    >>> report.left_alone[0].reason
    'its size is that of an output of the model'

    Source: Li et al., "Pruning Filters for Efficient ConvNets", 2017, arXiv:1608.08710; Michel et al., "Are Sixteen
    Heads Really Better than One?", 2019, arXiv:1905.10650; Fang et al., "DepGraph", 2023, arXiv:2301.12900.
    """
    check_outside_trace("prune_structured", "call it once, before jit", model)
    kept_of = _kept_of(fraction, keep)
    if criterion not in ("l1", "l2"):
        check_callable("criterion", criterion, "'l1', 'l2' or weights (units, n) -> scores (units,)")
    if any(is_sparse(leaf) for leaf in jax.tree.leaves(model, is_leaf=is_sparse)):
        raise ValueError("the model holds BCOO matrices; prune the dense model first, then call sparsify_model")
    arguments = _arguments(model, sample, forward)
    if forward is None:
        forward = _call
    else:
        check_callable("forward", forward, "forward(model, *sample)")

    leaves = owned_leaves(model)
    try:
        before = _trace(model, forward, arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the model cannot be called with sample ({error}); pass the arguments of one call as sample=, and "
            f"forward=lambda model, *sample: ... if it is not model(*sample)"
        ) from error
    trail: Trail = []
    axes = _leaf_axes(before, leaves, trail)
    groups, alone = _groups(leaves, axes)
    for group in list(groups):
        count = kept_of(group.factor.size)
        if count < group.factor.size:
            group.kept = _largest(_scores(group, leaves, axes, criterion), count)
        else:
            groups.remove(group)
            alone |= {
                leaf: f"{group.factor.size} units are no more than are to be kept" for leaf, _, _ in group.made_by
            }

    smaller = _without(model, leaves, axes, groups)
    if _fault(smaller, forward, arguments, before, trail, groups) is not None:
        # One of the groups is at fault: add them one at a time.
        accepted: list[_Group] = []
        for group in groups:
            tried = [*accepted, group]
            fault = _fault(_without(model, leaves, axes, tried), forward, arguments, before, trail, tried)
            if fault is None:
                accepted.append(group)
            else:
                alone |= {leaf: fault for leaf, _, _ in group.made_by}
        groups = accepted
        smaller = _without(model, leaves, axes, groups)

    return smaller, PruneReport(
        groups=tuple(_reported(group, leaves) for group in groups),
        left_alone=tuple(
            LeftAlone(leaves[at].path, leaves[at].array.shape[leaves[at].made or 0], alone[at]) for at in sorted(alone)
        ),
        parameters_before=sum(leaf.array.size for leaf in leaves),
        parameters_after=sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(smaller, eqx.is_array))),
    )


def _kept_of(fraction: Any, keep: Any) -> Callable[[int], int]:
    """How many of a group's units stay."""
    if (fraction is None) == (keep is None):
        raise ValueError(f"give exactly one of fraction (to remove) and keep; found {fraction=}, {keep=}")
    if keep is not None:
        count = as_int("keep", keep, minimum=1)
        return lambda units: count
    share = as_fraction("fraction", fraction, one_allowed=False)
    # A share such as 0.3 of 10 is 3 units, not the 2 that binary rounding would make of it.
    return lambda units: max(1, units - math.floor(share * units + 1e-9))


def _call(model: Any, *arguments: Any) -> Any:
    return model(*arguments)


def _arguments(model: Any, sample: Any, forward: Any) -> tuple[Any, ...]:
    """The arguments of one call."""
    if sample is not None:
        return sample if isinstance(sample, tuple) else (sample,)
    first: Any = model
    while isinstance(first, eqx.nn.Sequential) and len(first):
        first = first[0]
    if isinstance(first, eqx.nn.MLP):
        first = first.layers[0]
    if forward is not None or not isinstance(first, eqx.nn.Linear) or first.weight.ndim != 2:
        raise ValueError(
            f"sample is needed for a {type(model).__name__}: pass the arguments of one call, so that the way from "
            f"layer to layer can be traced"
        )
    shape = () if first.in_features == "scalar" else (first.in_features,)
    return (jax.ShapeDtypeStruct(shape, first.weight.dtype),)


def _is_traceable(leaf: Any) -> bool:
    return eqx.is_array_like(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _trace(model: Any, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """The jaxpr of `forward`, whose first inputs are the model's array leaves."""
    arrays, static = eqx.partition(eqx.nn.inference_mode(model), eqx.is_array)
    given, fixed = eqx.partition(arguments, lambda leaf: _is_traceable(leaf) and not isinstance(leaf, bool))

    def run(arrays: Any, given: Any) -> list[Any]:
        outputs = forward(eqx.combine(arrays, static), *eqx.combine(given, fixed))
        return [leaf for leaf in jax.tree.leaves(outputs) if eqx.is_array(leaf)]

    return jax.make_jaxpr(run)(arrays, given)


def _leaf_axes(traced: Any, leaves: Sequence[Owned], trail: Trail) -> list[list[Axis]]:
    """The factors of each axis of each leaf, once the whole computation has been followed."""
    avals = traced.in_avals
    inputs = [
        fresh(aval.shape, WEIGHT)
        if position < len(leaves)
        else fresh(aval.shape, DATA, "its size is that of an input of the model")
        for position, aval in enumerate(avals)
    ]
    weights = inputs[: len(leaves)]
    for leaf, value in zip(leaves, weights, strict=True):
        for at, axis in enumerate(value.axes):
            if at not in leaf.resizable:
                kind = type(leaf.owner).__name__
                fix(axis, f"its size is that of axis {at} of {leaf.path} ({kind}), which pruning does not change")
    fix_all(flow(traced, inputs, trail), "its size is that of an output of the model")
    for leaf, value in zip(leaves, weights, strict=True):
        if leaf.attention is not None and leaf.made is not None and leaf.attention.output_proj is not leaf.owner:
            fix(atoms(value.axes[leaf.made])[1:], "it is the size of a head, which the layer records")
    return [value.axes for value in weights]


def _groups(leaves: Sequence[Owned], axes: Sequence[list[Axis]]) -> tuple[list[_Group], dict[int, str]]:
    """The groups of units that can be removed, and for each weight without one the reason."""
    found: dict[Factor, _Group] = {}
    alone: dict[int, str] = {}
    for at, leaf in enumerate(leaves):
        if leaf.taken is not None:
            for factor in dict.fromkeys(atoms(axes[at][leaf.taken])):
                found.setdefault(factor, _Group(factor)).taken_by.append(at)
    for at, leaf in enumerate(leaves):
        if leaf.made is None:
            continue
        factors = atoms(axes[at][leaf.made])
        in_heads = leaf.attention is not None and leaf.attention.output_proj is not leaf.owner
        if not factors:
            alone[at] = "it has one unit"
        elif in_heads and (len(factors) != 2 or factors[0].size != leaf.attention.num_heads):
            alone[at] = "its units are not several heads of one size"
        elif not in_heads and len(factors) > 1:
            sizes = " x ".join(str(factor.size) for factor in factors)
            alone[at] = f"its units are reshaped to {sizes}, sizes that are written in the code"
        elif factors[0].reason is not None:
            alone[at] = factors[0].reason
        elif factors[0] not in found:
            alone[at] = "no Linear or Conv layer reads its units"
        else:
            found[factors[0]].made_by.append((at, leaf.made, 0))
            found[factors[0]].heads |= in_heads
    groups = [group for group in found.values() if group.made_by]
    # A size is free only if every layer that makes it may lose units.
    for group in list(groups):
        held = [at for at in alone if group.factor in atoms(axes[at][leaves[at].made or 0])]
        if held:
            groups.remove(group)
            alone |= {at: f"its units are tied to those of {leaves[held[0]].path}" for at, _, _ in group.made_by}
    return groups, alone


def _scores(group: _Group, leaves: Sequence[Owned], axes: Sequence[list[Axis]], criterion: Criterion) -> jax.Array:
    """The importance of each unit of a group."""
    columns = []
    for at, axis, position in group.made_by:
        array = jnp.moveaxis(leaves[at].array, axis, 0)
        sizes = [factor.size for factor in atoms(axes[at][axis])]
        split = jnp.moveaxis(array.reshape(*sizes, *array.shape[1:]), position, 0)
        columns.append(split.reshape(split.shape[0], -1))
    weights = jnp.concatenate(columns, axis=1)
    if criterion == "l1":
        scores = jnp.abs(weights).sum(axis=1)
    elif criterion == "l2":
        scores = jnp.sqrt(jnp.square(jnp.abs(weights)).sum(axis=1))
    else:
        assert callable(criterion)
        scores = jnp.asarray(criterion(weights))
        if scores.shape != (group.factor.size,) or not jnp.issubdtype(scores.dtype, jnp.number):
            raise ValueError(
                f"criterion returned {scores.dtype}{list(scores.shape)} for weights of shape {weights.shape}; it must "
                f"return a number for each unit, shape ({group.factor.size},)"
            )
    if bool(jnp.isnan(scores).any()):
        raise ValueError(f"the scores of the units of {leaves[group.made_by[0][0]].path} contain NaN; repair the model")
    return scores


def _largest(scores: jax.Array, count: int) -> tuple[int, ...]:
    values = scores.tolist()
    return tuple(sorted(sorted(range(len(values)), key=lambda unit: (-values[unit], unit))[:count]))


def _without(model: Any, leaves: Sequence[Owned], axes: Sequence[list[Axis]], groups: Sequence[_Group]) -> Any:
    """The model with only the kept units of these groups."""
    kept = {group.factor: jnp.array(group.kept) for group in groups}
    arrays = []
    for leaf, leaf_axes in zip(leaves, axes, strict=True):
        array = leaf.array
        for at, axis in enumerate(leaf_axes):
            factors = atoms(axis)
            if any(factor in kept for factor in factors):
                places = jnp.arange(array.shape[at]).reshape([factor.size for factor in factors])
                for position, factor in enumerate(factors):
                    if factor in kept:
                        places = jnp.take(places, kept[factor], axis=position)
                array = jnp.take(array, places.reshape(-1), axis=at)
        arrays.append(array)
    whole, static = eqx.partition(model, eqx.is_array)
    return resized(eqx.combine(jax.tree.unflatten(jax.tree.structure(whole), arrays), static))


def _fault(
    smaller: Any,
    forward: Callable[..., Any],
    arguments: tuple[Any, ...],
    before: Any,
    trail: Trail,
    groups: Sequence[_Group],
) -> str | None:
    """Why the smaller model does not compute what the larger one did, or `None`."""
    try:
        after = _trace(smaller, forward, arguments)
    except (TypeError, ValueError, IndexError, AssertionError) as error:
        return f"the code does not run without its units: {next(iter(str(error).splitlines()), type(error).__name__)}"
    if list(map(str, after.out_avals)) != list(map(str, before.out_avals)):
        return "the outputs have other shapes without its units"
    old, new = _signature(before), _signature(after)
    if old != new:
        changed = next(((a, b) for a, b in zip(old, new, strict=False) if a != b), ("fewer operations", "more"))
        return f"the code depends on its size: it computes with {changed[1]} where it had {changed[0]}"
    # A size that no weight has but that the code makes from one: that of an iota, or of ones that are summed.
    kept = {group.factor: len(group.kept) for group in groups}
    now: Trail = []
    flow(after, [fresh(aval.shape, DATA) for aval in after.in_avals], now)
    for (shape, axes), (new_shape, _) in zip(trail, now, strict=True):
        for size, new_size, axis in zip(shape, new_shape, axes, strict=True):
            factors = atoms(axis)
            if all(factor in kept or factor.reason is not None for factor in factors):
                expected = math.prod(kept.get(factor, factor.size) for factor in factors)
                if new_size != expected:
                    why = next((factor.reason for factor in factors if factor.reason), "it has another meaning")
                    return f"the code depends on its size: an array of {size} would be one of {new_size}, and {why}"
    return None


def _signature(jaxpr: Any) -> list[str]:
    """The operations and the constants of a jaxpr, whatever its sizes."""
    found = [_shown(value) for value in getattr(jaxpr, "consts", ())]
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        found.append(eqn.primitive.name)
        found += [_shown(atom.val) for atom in eqn.invars if isinstance(atom, TracedLiteral)]
        found += [
            f"{eqn.primitive.name} of {name} {value}"
            for name, value in eqn.params.items()
            if isinstance(value, int | float)
        ]
        for inner in inner_jaxprs(eqn):
            found += _signature(inner)
    return found


def _shown(value: Any) -> str:
    """A constant as text, a long one as its shape and a checksum."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if jnp.size(value) <= 16:
        return str(value)
    array = jax.device_get(jnp.asarray(value))
    return f"constants of shape {array.shape} (checksum {zlib.crc32(array.tobytes()):08x})"


def _reported(group: _Group, leaves: Sequence[Owned]) -> PrunedGroup:
    makers = [leaves[at] for at, _, _ in group.made_by]
    convolutions = all(isinstance(leaf.owner, eqx.nn.Conv) for leaf in makers)
    return PrunedGroup(
        produced_by=tuple(leaf.path for leaf in makers),
        consumed_by=tuple(leaves[at].path for at in group.taken_by),
        kind="heads" if group.heads else "channels" if convolutions else "units",
        before=group.factor.size,
        kept=group.kept,
    )
