"""From a strategy to what runs it."""

from collections.abc import Callable, Collection
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from xtrax.tiling._axes import resolve_axes
from xtrax.tiling._check import check_callable, check_names, plural
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.iterator import JaxScanIterator, SafeMapIterator, VmapIterator, WhileLoopIterator
from xtrax.tiling.strategy import AxisStrategy, Bucket, DedupGather, SafeMap, Scan, Vmap, WhileCarry


@overload
def make_axis_dispatch(
    strategy: Vmap, *, axis: str = "", heterogeneous_axes: Collection[str] | None = None
) -> VmapIterator: ...
@overload
def make_axis_dispatch(
    strategy: SafeMap, *, axis: str = "", heterogeneous_axes: Collection[str] | None = None
) -> SafeMapIterator: ...
@overload
def make_axis_dispatch(
    strategy: Scan, *, axis: str = "", heterogeneous_axes: Collection[str] | None = None
) -> JaxScanIterator: ...
@overload
def make_axis_dispatch(
    strategy: WhileCarry, *, axis: str = "", heterogeneous_axes: Collection[str] | None = None
) -> WhileLoopIterator: ...
@overload
def make_axis_dispatch(
    strategy: AxisStrategy, *, axis: str = "", heterogeneous_axes: Collection[str] | None = None
) -> Any: ...
def make_axis_dispatch(
    strategy: AxisStrategy, *, axis: str = "", heterogeneous_axes: Collection[str] | None = None
) -> Any:
    """The iterator that runs a strategy.

    Args:
        strategy: how the axis is mapped.
        axis: its name, for messages and for `heterogeneous_axes`.
        heterogeneous_axes: names of the axes whose elements differ in length.

    Returns:
        `VmapIterator` and `SafeMapIterator`, called `(fn, xs, in_axes=0) -> ys`; `JaxScanIterator`, called
        `(fn, init, xs) -> (carry, ys)`; `WhileLoopIterator`, called `(cond, body, init) -> carry`.

    Raises:
        TypeError: `strategy` is none, or a name is not a string.
        DispatchRejected: `DedupGather` and `Bucket`, which need more than a loop on the device, and `Scan` or
            `WhileCarry` on a heterogeneous axis.

    >>> make_axis_dispatch(SafeMap(32), axis="batch")
    SafeMapIterator(tile=32)
    """
    if not isinstance(axis, str):
        raise TypeError(f"axis must be a string, but is {axis!r} ({type(axis).__name__}).")
    heterogeneous = axis in check_names("heterogeneous_axes", heterogeneous_axes)
    if isinstance(strategy, Vmap):
        return VmapIterator()
    if isinstance(strategy, SafeMap):
        return SafeMapIterator(strategy.batch_size)
    if isinstance(strategy, (Scan, WhileCarry)):
        if heterogeneous:
            raise DispatchRejected(
                f"{type(strategy).__name__} cannot run the heterogeneous axis {axis!r}: every step of a loop has the "
                "same shape; pad its elements to one length with select_bucket and bucketize first."
            )
        return JaxScanIterator(strategy.collect_outputs) if isinstance(strategy, Scan) else WhileLoopIterator()
    if isinstance(strategy, DedupGather):
        raise DispatchRejected(
            f"DedupGather{_of(axis)} selects elements before it maps them and hands the results out afterwards, "
            "which no iterator does; call axis_dispatch(strategy, fn, xs)."
        )
    if isinstance(strategy, Bucket):
        raise DispatchRejected(_bucket_recipe(strategy, axis))
    raise TypeError(
        f"strategy must be one of Vmap, SafeMap, Scan, WhileCarry, DedupGather and Bucket, but is {strategy!r} "
        f"({type(strategy).__name__}); take it from a plan: plan.decisions[i].strategy."
    )


def axis_dispatch(strategy: AxisStrategy, fn: Callable[..., Any] | None, xs: Any, init: Any = None) -> Any:
    """Run one axis by any strategy that runs on the device.

    Args:
        strategy: how the axis is mapped.
        fn: a function of one element. For a `Scan` that has a transition, each step is
            `transition(carry, fn(x))`, and None stands for the elements themselves; for one that has none, `fn` is
            `(carry, x) -> (carry, y)`. For a `WhileCarry` that has no body, `fn` is `carry -> carry`; else None.
        xs: a pytree of arrays `(n, ...)`; None for `WhileCarry`.
        init: the first carry of a `Scan` or `WhileCarry`, instead of the strategy's own.

    Returns:
        The results, each leaf `(n, ...)`; `(carry, ys)` for a `Scan`; the carry for a `WhileCarry`.

    Raises:
        TypeError: `strategy` is none, or `fn` is missing or not callable.
        ValueError: an `init` that is missing or not used, elements for a `WhileCarry`, or another number of elements
            than a `DedupGather` was made for or its `dedup_fn` should return.
        DispatchRejected: `Bucket`, with the recipe for the host.

    >>> import jax.numpy as jnp
    >>> axis_dispatch(SafeMap(2), lambda x: 2 * x, jnp.arange(3))
    Array([0, 2, 4], dtype=int32)
    """
    if isinstance(strategy, Scan):
        return _run_scan(strategy, fn, xs, init)
    if isinstance(strategy, WhileCarry):
        return _run_while(strategy, fn, xs, init)
    if init is not None:
        raise ValueError(f"init is given, but {type(strategy).__name__} has no carry; leave it out.")
    if isinstance(strategy, DedupGather):
        return _run_dedup(strategy, check_callable("fn", fn, "x -> y"), xs)
    return make_axis_dispatch(strategy)(fn, xs)


def _run_scan(strategy: Scan, fn: Callable[..., Any] | None, xs: Any, init: Any) -> tuple[Any, Any]:
    transition = strategy.transition
    if transition is None:
        step = check_callable("fn", fn, "(carry, x) -> (carry, y), as the Scan has no transition")
    elif fn is None:
        step = transition
    else:
        of_element = check_callable("fn", fn, "x -> y")

        def step(carry: Any, x: Any) -> tuple[Any, Any]:
            return transition(carry, of_element(x))

    return JaxScanIterator(strategy.collect_outputs)(step, _first_carry(strategy, init), xs)


def _run_while(strategy: WhileCarry, fn: Callable[..., Any] | None, xs: Any, init: Any) -> Any:
    if xs is not None:
        raise ValueError("a WhileCarry has no elements; pass xs=None, and put what the body reads into the carry.")
    if strategy.cond is None:
        raise ValueError("the WhileCarry has no cond; give it one, or call WhileLoopIterator()(cond, body, init).")
    if strategy.body is not None and fn is not None:
        raise ValueError("fn is given, but the WhileCarry has a body; pass fn=None.")
    body = check_callable("fn", fn, "carry -> carry, as the WhileCarry has no body") if fn else strategy.body
    if body is None:
        raise ValueError("neither fn nor the WhileCarry's body is given; the loop needs one of them.")
    return WhileLoopIterator()(strategy.cond, body, _first_carry(strategy, init))


def _first_carry(strategy: Scan | WhileCarry, init: Any) -> Any:
    if init is None and strategy.init is None:
        raise ValueError(f"the {type(strategy).__name__} has no init, and none is given; pass init, () for no carry.")
    return strategy.init if init is None else init


def _run_dedup(strategy: DedupGather, fn: Callable[[Any], Any], xs: Any) -> Any:
    size = resolve_axes(xs).size
    if size != strategy.index_map.size:
        raise ValueError(
            f"xs has {plural(size, 'element')} along its leading axis, but the DedupGather was made for "
            f"{strategy.index_map.size}; find the duplicates of this xs anew."
        )
    distinct = (strategy.dedup_fn or _take)(xs, strategy.unique_indices)
    for path, leaf in jax.tree_util.tree_leaves_with_path(distinct):
        # Results are gathered by position, and JAX clamps a position past the end in silence.
        if np.shape(leaf)[:1] != (strategy.k_bucket,):
            raise ValueError(
                f"dedup_fn returned {_shape_text(path, leaf)}, but must return k_bucket = {strategy.k_bucket} elements "
                "along the leading axis, one for each of the unique_indices that it is given."
            )
    return (strategy.gather_fn or _take)(SafeMapIterator(strategy.at_once)(fn, distinct), strategy.index_map)


def _shape_text(path: Any, leaf: Any) -> str:
    where = f" at {jax.tree_util.keystr(path)}" if path else ""
    return f"an array of shape {np.shape(leaf)}{where}"


def _take(tree: Any, indices: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[indices], tree)


def _bucket_recipe(strategy: Bucket, axis: str) -> str:
    return f"""Bucket{_of(axis)} pads elements of differing length, which is done on the host, before tracing:

    from xtrax.tiling import bucketize, select_bucket

    boundaries = {strategy.boundaries}
    groups = {{}}
    for i, x in enumerate(elements):
        size = select_bucket(len(x), boundaries)
        groups.setdefault(size, []).append((i, *bucketize(x, size)))
    for size, group in groups.items():  # one compiled program for each size that occurs
        indices, padded, masks = zip(*group)
        results = jax.jit(jax.vmap(fn))(np.stack(padded), np.stack(masks))  # fn(padded, mask) of one element
"""


def _of(axis: str) -> str:
    return f" of axis {axis!r}" if axis else ""
