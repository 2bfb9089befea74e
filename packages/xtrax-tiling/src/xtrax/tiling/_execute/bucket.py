"""An outermost axis whose elements differ in length: batches of equal bucket, padded on the host."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from xtrax.tiling._check import plural
from xtrax.tiling._execute.args import check_leaf
from xtrax.tiling._execute.axes import PADDING
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling._ragged.length_axes import length_axes as _axes_of
from xtrax.tiling.bucket import bucketize, select_bucket


class Batch(NamedTuple):
    """Elements of one bucket, stacked.

    `items` are their positions in the axis; `args` the stacks that take the place of the ragged arguments, each leaf
    `(batch, bucket, ...)`; `mask` `(batch, bucket)`; `numbers` `(batch,)`, the positions, with padding.
    """

    items: Sequence[int]
    bucket: int
    args: dict[int, Any]
    mask: npt.NDArray[np.bool_]
    numbers: npt.NDArray[np.int32]


def check_ragged(decision: AxisDecision, args: Sequence[Any], axes: Sequence[tuple[str, ...]]) -> list[int]:
    """The length of each element of a Bucket axis.

    Raises:
        TypeError: an argument of that axis that is no list, or an element that is no array on the host.
        ValueError: another axis beside it, another number of elements than planned, lengths that differ between the
            arguments or past the last boundary.
    """
    name, size = decision.spec.name, decision.spec.cardinality
    lengths: list[int] | None = None
    first = 0
    for i, (arg, names) in enumerate(zip(args, axes, strict=True)):
        if name not in names:
            continue
        if len(names) > 1:
            raise ValueError(
                f"axes[{i}] is {names!r}, but {name!r} is a Bucket: an argument that has it is a list of elements and "
                "has no other axis of the plan; pass what has the others as arguments of their own."
            )
        if not isinstance(arg, (list, tuple)):
            raise TypeError(
                f"args[{i}] has the Bucket axis {name!r}, and must be a list of its elements, each a pytree of arrays "
                f"(length, ...), but is {type(arg).__name__}."
            )
        if len(arg) != size:
            raise ValueError(
                f"args[{i}] has {plural(len(arg), 'element')} along axis {name!r}, but the plan was made for {size}; "
                f"plan the axis with cardinality={len(arg)}, or pass the data that it was made for."
            )
        found = [_length(f"args[{i}][{j}]", item) for j, item in enumerate(arg)]
        if lengths is None:
            lengths, first = found, i
        for j, (one, other) in enumerate(zip(lengths, found, strict=True)):
            if one != other:
                raise ValueError(
                    f"args[{first}][{j}] has length {one}, but args[{i}][{j}] has length {other}; arguments that share "
                    f"the Bucket axis {name!r} share the lengths of its elements."
                )
    return lengths or []


def _length(where: str, item: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(item)
    if not leaves:
        raise ValueError(f"{where} has no arrays, and so no length.")
    length = None
    for path, leaf in leaves:
        leaf_name = f"{where}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, Tracer):
            raise TypeError(
                f"{leaf_name} is being traced, and a Bucket axis pads its elements on the host; call execute_plan "
                "outside jax.jit, jax.grad and jax.vmap of the ragged arguments."
            )
        check_leaf(leaf_name, leaf, "is an element of a Bucket axis")
        if np.ndim(leaf) == 0:
            raise ValueError(f"{leaf_name} is a scalar, and so has no length; every leaf must be (length, ...).")
        if length is not None and np.shape(leaf)[0] != length:
            raise ValueError(
                f"{leaf_name} has length {np.shape(leaf)[0]}, but another leaf of {where} has {length}; the leaves of "
                "one element share its length."
            )
        length = np.shape(leaf)[0]
    return int(length or 0)


def batches(
    decision: AxisDecision, args: Sequence[Any], axes: Sequence[tuple[str, ...]], lengths: Sequence[int]
) -> Iterator[Batch]:
    """Batches of one size, bucket by bucket, the shortest first, elements in the order given.

    What a last batch lacks is filled up by its last element.
    """
    name = decision.spec.name
    boundaries = decision.strategy.boundaries  # ty: ignore[missing-union-attribute]
    buckets = [select_bucket(length, boundaries) for length in lengths]
    size = min(decision.batch_size, len(lengths))
    order = sorted(range(len(lengths)), key=lambda i: buckets[i])
    for bucket, group in itertools.groupby(order, key=lambda i: buckets[i]):
        members = list(group)
        for start in range(0, len(members), size):
            items = members[start : start + size]
            filled = items + items[-1:] * (size - len(items))
            padded = {
                i: [bucketize(arg[j], bucket) for j in filled]
                for i, (arg, names) in enumerate(zip(args, axes, strict=True))
                if name in names
            }
            stacks = {i: jax.tree.map(lambda *xs: np.stack(xs), *(x for x, _ in rows)) for i, rows in padded.items()}
            mask = np.stack([mask for _, mask in next(iter(padded.values()))])
            numbers = np.array(items + [PADDING] * (size - len(items)), np.int32)
            yield Batch(items, bucket, stacks, mask, numbers)


def length_axes(run: Callable[[int], Any], bucket: int, boundaries: Sequence[int]) -> Any:
    """For each leaf of the outputs, the axes that are as long as the bucket, and change with it.

    Args:
        run: from a bucket size to the abstract outputs and carries of a batch.
        bucket: the size that is used.
        boundaries: the sizes that there are.

    Raises:
        ValueError: an output or a carry that follows the bucket without having it as an axis.
    """

    def of_element(size: int) -> _Result:
        return _Result(*jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), run(size)))

    # Another size that the function is made for tells an axis of that length from one that only happens to equal it.
    others = sorted((size for size in boundaries if size != bucket), key=lambda size: abs(size - bucket))[:1]
    result = of_element(bucket)
    axes = _axes_of(result, bucket, of_element, [*others, bucket // 2, 2 * bucket], name="")
    return tuple(jax.tree.unflatten(jax.tree.structure(result), [tuple(i + 1 for i in of_leaf) for of_leaf in axes]))


class _Result(NamedTuple):
    outputs: Any
    carries: Any


def take_items(outputs: Any, axes: Any, lengths: Sequence[int]) -> list[Any]:
    """One result for each length, from the outputs of a batch, cut to its length.

    Outputs are fetched to the host as a whole, since slices of every length on the device would each compile.
    """
    leaves, treedef = jax.tree.flatten(outputs)
    along = treedef.flatten_up_to(axes)
    leaves = [leaf if _stays(leaf) else np.asarray(leaf) for leaf in leaves]

    def of_item(j: int, length: int) -> Any:
        parts = []
        for leaf, cut in zip(leaves, along, strict=True):
            part = leaf[tuple([j] + [slice(length) if i in cut else slice(None) for i in range(1, leaf.ndim)])]
            parts.append(part if _stays(leaf) else np.array(part))
        return treedef.unflatten(parts)

    return [of_item(j, length) for j, length in enumerate(lengths)]


def _stays(leaf: Any) -> bool:
    """Whether a leaf cannot become a numpy array."""
    return isinstance(leaf, Tracer) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def fused(hook: AxisHook, name: str, results: list[Any]) -> Any:
    """What a Bucket axis yields, of its results in the order given: their list, or the fuse of their stack."""
    if hook.fuse is None:
        return results if hook.keeps else None
    shapes = {tuple(np.shape(leaf) for leaf in jax.tree.leaves(result)) for result in results}
    if len(shapes) != 1:
        raise ValueError(
            f"the Bucket axis {name!r} has a fuse, which needs a stack, but its results have "
            f"{len(shapes) or 'no'} shapes; let fn return results of one shape, such as a masked mean over the length."
        )
    stack = jax.tree.map(lambda *ys: jnp.stack(ys), *results)
    if hook.streamed is None:
        return hook.fuse(stack)  # ty: ignore[not-callable]
    element = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape[1:], y.dtype), stack)
    return hook.streamed.finalize(hook.streamed.update(hook.streamed.init(element), stack, None))
