"""The arguments of `execute_plan`, checked against the plan, and as flat operands."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.tiling._check import check_callable, check_name, plural
from xtrax.tiling._plan.batch_plan import BatchPlan
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling._split import Split, hashable_or_none
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.strategy import Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry


@dataclasses.dataclass(frozen=True)
class Bound:
    """What is run: the arrays of `fn` and of the arguments, and how to put them together again.

    Args:
        arrays: those of `fn`, then those of the arguments, then the key.
        dims: for each array, the plan axes that are its leading dimensions.
        call: from one element of each array, and the flat index of the element, to the outputs.
        groups: for each argument, which arrays are its own and its tree.
        has_key: whether there is a key.
        signature: what `call` depends on besides the arrays and `fn` itself; None if that cannot be hashed.
    """

    arrays: list[Any]
    dims: tuple[tuple[str, ...], ...]
    call: Callable[[Sequence[Any], Any], Any]
    groups: tuple[tuple[tuple[int, ...], Any], ...]
    has_key: bool
    signature: Hashable | None


def bind(fn: Any, args: Sequence[Any], axes: Sequence[tuple[str, ...]], key: Any) -> Bound:
    """Flatten `fn` and its arguments; leaves that are no arrays stay as they are, as under `jax.vmap` with no axis."""
    arrays: list[Any] = []
    dims: list[tuple[str, ...]] = []
    groups = []
    parts = []  # of fn and of each argument
    for tree, names in zip((fn, *args), ((), *axes), strict=True):
        part = Split.of(tree, arrays)
        dims += [names] * (len(arrays) - len(dims))
        parts.append(part)
        groups.append((tuple(slot for slot in part.slots if slot is not None) if names else (), part.treedef))
    if key is not None:
        arrays.append(key)
        dims.append(())

    def call(values: Sequence[Any], index: Any) -> Any:
        elements = [part.rebuilt(values) for part in parts[1:]]
        if fn is None:
            return elements[0] if len(elements) == 1 else tuple(elements)
        run = parts[0].rebuilt(values)
        return run(*elements) if key is None else run(*elements, key=jax.random.fold_in(values[-1], index))

    signature = hashable_or_none(
        (parts[0].function_key, tuple(part.key for part in parts[1:]), tuple(dims), key is not None)
    )
    return Bound(arrays, tuple(dims), call, tuple(groups[1:]), key is not None, signature)


def check_plan(fn: Any, plan: Any) -> tuple[AxisDecision, ...]:
    """The decisions of a plan that can be run.

    Raises:
        TypeError: `fn` is not callable, or `plan` is no `BatchPlan`.
        ValueError: the plan has no axes, or a Scan has no transition or no first carry.
        DispatchRejected: a `WhileCarry`, a `Scan` on a heterogeneous axis, or a `Bucket` that is not outermost.
    """
    if fn is not None:
        check_callable("fn", fn, "(*elements) -> outputs, or None for the elements themselves")
    if not isinstance(plan, BatchPlan):
        raise TypeError(
            f"plan must be a BatchPlan, but is {plan!r} ({type(plan).__name__}); BatchPlanner().plan(specs) makes one."
        )
    if not plan.decisions:
        raise ValueError("plan has no axes, so there is nothing to map; call fn itself.")
    for i, decision in enumerate(plan.decisions):
        _check_strategy(decision, outermost=i == 0)
    return plan.decisions


def _check_strategy(decision: AxisDecision, outermost: bool) -> None:
    name, strategy = decision.spec.name, decision.strategy
    if isinstance(strategy, WhileCarry):
        raise DispatchRejected(
            f"axis {name!r} is a WhileCarry, which steps a carry and has no elements; run it by its iterator: "
            "make_axis_dispatch(strategy)(cond, body, init)."
        )
    if not isinstance(strategy, (Vmap, SafeMap, Scan, DedupGather, Bucket)):
        raise TypeError(
            f"the strategy of axis {name!r} must be one of Vmap, SafeMap, Scan, DedupGather and Bucket, but is "
            f"{strategy!r} ({type(strategy).__name__})."
        )
    if isinstance(strategy, Bucket) and not outermost:
        raise DispatchRejected(
            f"axis {name!r} is a Bucket, whose elements are padded on the host, and lies inside another axis; give its "
            "spec to the planner first, so that it is the outermost."
        )
    if isinstance(strategy, Scan):
        if decision.spec.heterogeneous:
            raise DispatchRejected(
                f"Scan cannot run the heterogeneous axis {name!r}: every step of a loop has the same shape; pad its "
                "elements to one length with select_bucket and bucketize first."
            )
        for field in ("transition", "init"):
            if getattr(strategy, field) is None:
                raise ValueError(
                    f"the Scan of axis {name!r} has no {field}; plan the axis with a CarrySpec, which has both."
                )


def check_axes(decisions: Sequence[AxisDecision], args: Sequence[Any], axes: Any) -> tuple[tuple[str, ...], ...]:
    """For each argument, the names of its leading dimensions.

    Raises:
        TypeError: `axes` or an entry of it is of the wrong kind.
        ValueError: another number of entries than of arguments, names that the plan does not have or that are
            repeated, a plan axis that no argument has, or `axes=None` with several axes.
    """
    names = [decision.spec.name for decision in decisions]
    shown = ", ".join(map(repr, names))
    if not args:
        raise ValueError(f"there are no arguments, so axis {names[0]!r} has no elements; pass at least one array.")
    if axes is None:
        if len(names) > 1:
            raise ValueError(
                f"axes is None, and the plan has {len(names)} axes ({shown}); say for each argument which of them are "
                f"its leading dimensions, such as axes=[{tuple(names)!r}]."
            )
        return ((names[0],),) * len(args)
    checked = check_axes_form(axes, args, names[0])
    for i, entry in enumerate(checked):
        for name in entry:
            if name not in names:
                raise ValueError(f"axes[{i}] names axis {name!r}, which the plan does not have; it has {shown}.")
    for name in names:
        if not any(name in entry for entry in checked):
            raise ValueError(
                f"axis {name!r} of the plan is in no entry of axes, so it has no elements; name it for at least one "
                "argument, or leave it out of the plan."
            )
    return checked


def check_axes_form(axes: Any, args: Sequence[Any], example: str = "batch") -> tuple[tuple[str, ...], ...]:
    """For each argument, the names of its leading dimensions, whatever axes the plan has.

    Raises:
        TypeError: `axes` or an entry of it is of the wrong kind.
        ValueError: another number of entries than of arguments, or names that are repeated or empty.
    """
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise TypeError(
            f"axes must be a sequence with an entry for each argument, but is {axes!r} ({type(axes).__name__}); such "
            f"as axes=[{(example,)!r}]."
        )
    if len(axes) != len(args):
        raise ValueError(
            f"axes has {len(axes)} entries, and there are {len(args)} arguments; give one for each, None for an "
            "argument that has none of the plan's axes."
        )
    return tuple(_entry(i, entry) for i, entry in enumerate(axes))


def _entry(i: int, entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str) or not isinstance(entry, Sequence):
        hint = f"; write ({entry!r},)" if isinstance(entry, str) else ""
        raise TypeError(
            f"axes[{i}] must be a tuple of axis names or None, but is {entry!r} ({type(entry).__name__}){hint}."
        )
    for j, name in enumerate(entry):
        check_name(f"axes[{i}][{j}]", name)
        if name in entry[:j]:
            raise ValueError(f"axes[{i}] names axis {name!r} twice; each dimension is another axis.")
    return tuple(entry)


def check_sizes(decisions: Sequence[AxisDecision], args: Sequence[Any], axes: Sequence[tuple[str, ...]]) -> None:
    """Refuse arguments that lack a dimension, or whose dimension is not of the planned size.

    Raises:
        TypeError: a leaf of an argument with axes that is no array.
        ValueError: names the argument, the axis and both sizes.
    """
    sizes = {decision.spec.name: decision.spec.cardinality for decision in decisions}
    for i, (arg, names) in enumerate(zip(args, axes, strict=True)):
        if not names:
            continue
        leaves = jax.tree_util.tree_leaves_with_path(arg)
        if not leaves:
            raise ValueError(f"args[{i}] has no arrays, and so no axis {names[0]!r}; give it None in axes.")
        for path, leaf in leaves:
            where = f"args[{i}]{jax.tree_util.keystr(path)}"
            check_leaf(where, leaf, f"has axis {names[0]!r}")
            shape = np.shape(leaf)
            for dim, name in enumerate(names):
                if dim >= len(shape):
                    raise ValueError(
                        f"{where} has shape {shape}, and so no dimension {dim} for axis {name!r}; axes[{i}] is "
                        f"{names!r}, the names of its leading dimensions."
                    )
                if shape[dim] != sizes[name]:
                    raise ValueError(
                        f"{where} has {plural(shape[dim], 'element')} along axis {name!r} (dimension {dim} of its "
                        f"shape {shape}), but the plan was made for {sizes[name]}; plan the axis with "
                        f"cardinality={shape[dim]}, or pass the data that it was made for."
                    )


def check_leaf(where: str, leaf: Any, why: str) -> None:
    """Refuse what is no array that JAX can compute with."""
    try:
        jax.typeof(leaf)
    except TypeError as error:
        found = f"dtype {leaf.dtype}" if isinstance(leaf, np.ndarray) else f"{leaf!r} ({type(leaf).__name__})"
        raise TypeError(f"{where} {why}, and must be a numeric array, but is of {found}.") from error


def check_key(fn: Any, decisions: Sequence[AxisDecision], key: Any) -> Any:
    """A single PRNG key, or None.

    Raises:
        TypeError: something that is no key.
        ValueError: several keys, a raw one of another length than the PRNG's, no `fn` to take one, a `DedupGather`, or
            more elements than there are keys.
    """
    if key is None:
        return None
    typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    legacy = isinstance(key, (jax.Array, np.ndarray)) and key.dtype == np.uint32 and key.ndim >= 1
    if not typed and not legacy:
        raise TypeError(f"key must be a PRNG key, such as jax.random.key(0), but is {key!r} ({type(key).__name__}).")
    if key.ndim != (0 if typed else 1):
        raise ValueError(
            f"key must be a single key, but has shape {key.shape}; each element gets its own from it by fold_in. Keys "
            "of your own are an argument like any other."
        )
    if legacy:
        raw = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))  # of the PRNG that is the default now
        if key.shape != raw.shape:
            raise ValueError(
                f"key is a raw key of shape {key.shape}, but those of {jax.config.jax_default_prng_impl}, the default "
                f"PRNG, have shape {raw.shape}; make one with jax.random.key(seed), which says its PRNG."
            )
    if fn is None:
        raise ValueError("key is given, but fn is None, and nothing takes it; leave one of them out.")
    for decision in decisions:
        if isinstance(decision.strategy, DedupGather):
            raise ValueError(
                f"key is given, and axis {decision.spec.name!r} is a DedupGather, whose equal elements are computed "
                "once and would share one key; plan the axis without its DedupSpec, or leave out key."
            )
    total = math.prod(decision.spec.cardinality for decision in decisions)
    if total > 2**32:
        raise ValueError(
            f"the plan has {plural(total, 'element')}, and fold_in tells only 2**32 apart; split the outermost axis."
        )
    return key
