"""Chunk a function that already takes a batch, once it is known to treat its elements independently."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xtrax.tiling._axes import broadcast_prefix
from xtrax.tiling._check import check_callable, check_int, plural
from xtrax.tiling._dependence.inputs import BatchInputs, normal_axis
from xtrax.tiling._map.chunked import map_chunks
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling.independence import IndependenceReport, analyse


def tiled_apply(
    fn: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    batch_size: int,
    check: Literal["jaxpr", "off"] = "jaxpr",
) -> Callable[..., Any]:
    """A function of a batch, run on at most `batch_size` elements at a time.

    Where `tiled_vmap` maps a function of one element, this chunks a function that takes all of them, such as a model
    written for batches. That is right only if it treats them independently, which `check` decides from the function as
    it is traced, each time that it is; see `xtrax.tiling.independence.check_independence`.

    The chunks are balanced, the first two overlap where they do not divide, and each result is written to its place, so
    that any number of elements needs the memory of one chunk beyond arguments and results. The result can be
    differentiated, jitted and vmapped. Under `jax.jit` it is compiled once; as with `jax.lax.map`, every call
    outside of it traces anew.

    Args:
        fn: a pure function of a batch. Arrays that it holds or closes over become arguments of the loop.
        in_axes: where the elements lie in the positional arguments, as in `jax.vmap`; None for what all chunks share.
            Keyword arguments are chunked along their axis 0, as in `jax.vmap`; pass what is shared by position.
        out_axes: where they lie in the results: an int, None for what is the same for every batch, or a pytree prefix.
        batch_size: the most elements that `fn` is given at once, at least 1. It sees all of them if there are fewer.
        check: "jaxpr" refuses a function whose elements are dependent, or not known to be independent; "off" trusts it.

    Returns:
        A function of the arguments of `fn` that returns what `fn` returns of the whole batch.

    Raises:
        TypeError: `fn` is not callable; `batch_size` or an axis is no integer; a chunked argument is no array.
        ValueError: `batch_size` below 1; an unknown `check`; axes that do not fit or sizes that differ; a function that
            `check` refuses, with the operation and its line.

    >>> import jax, jax.numpy as jnp
    >>> model = lambda w, x: jnp.tanh(x @ w)
    >>> chunked = jax.jit(tiled_apply(model, in_axes=(None, 0), batch_size=4))
    >>> chunked(jnp.ones((3, 2)), jnp.ones((10, 3))).shape
    (10, 2)
    """
    check_callable("fn", fn, "fn(*args)")
    limit = check_int("batch_size", batch_size, 1)
    if check not in ("jaxpr", "off"):
        raise ValueError(
            f"check must be 'jaxpr' or 'off', but is {check!r}; 'off' trusts that elements are independent."
        )
    arg_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    if not (arg_axes is None or isinstance(arg_axes, (int, tuple))) or isinstance(arg_axes, bool):
        raise TypeError(
            f"in_axes must be an int, None or a tuple with an entry for each argument, but is {in_axes!r} "
            f"({type(in_axes).__name__})."
        )

    # A module's fields are no attributes of the function that this returns.
    @functools.wraps(fn, updated=())
    def chunked(*args: Any, **kwargs: Any) -> Any:
        if isinstance(arg_axes, tuple) and len(arg_axes) != len(args):
            raise ValueError(
                f"in_axes has {len(arg_axes)} entries, but {len(args)} positional arguments were given; "
                "keyword arguments have none, and are chunked along axis 0."
            )
        axes = (arg_axes, dict.fromkeys(kwargs, 0))
        batch = BatchInputs.of((args, kwargs), axes, ("args", "kwargs"), "in_axes")
        chunks = Chunks.balanced(batch.size, limit)
        call = _with_keywords(fn)
        # What was found at an earlier call does not hold for this one: the function may read a mode of its module or
        # a global, and be traced to another program.
        report = _checked(call, batch, chunks.size) if check == "jaxpr" else None
        return _run(batch.runner(call), batch, chunks, out_axes, report)

    return chunked


def _with_keywords(fn: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda args, kwargs: fn(*args, **kwargs)


def _checked(call: Callable[..., Any], batch: BatchInputs, size: int) -> IndependenceReport:
    """The report on the function as it is at this call, which must say that elements are independent."""
    report, _ = analyse(call, batch, size)
    if report.verdict != "independent":
        raise ValueError(
            f"fn must treat the elements of its batch independently to be run in chunks, but they are {report}. "
            "Rewrite the operation, map a function of one element with tiled_vmap, or, if you know that elements are "
            "independent, pass check='off'."
        )
    return report


def _run(
    run: Callable[..., Any], batch: BatchInputs, chunks: Chunks, out_axes: Any, report: IndependenceReport | None
) -> Any:
    """Run the chunks, and put the axes where they belong."""
    shapes = jax.eval_shape(run, *batch.types(chunks.size))
    axes = _output_axes(shapes, out_axes, chunks.size, report)
    places = batch.mapped_axes

    def batched(leaves: Sequence[jax.Array]) -> list[jax.Array]:
        values = [jnp.moveaxis(leaf, 0, axis) for leaf, axis in zip(leaves, places, strict=True)]
        outs = jax.tree.leaves(run(*values))
        return [out if axis is None else jnp.moveaxis(out, axis, 0) for out, axis in zip(outs, axes, strict=True)]

    leaves = [jnp.asarray(leaf) for leaf in batch.mapped]
    return jax.tree.unflatten(
        jax.tree.structure(shapes), map_chunks(batched, leaves, places, chunks, out_axes=axes)
    )  # fmt: skip


def _output_axes(shapes: Any, out_axes: Any, size: int, report: IndependenceReport | None) -> list[int | None]:
    """The axis of each output leaf, checked against its shape and against what was found of the function."""
    named = jax.tree_util.tree_flatten_with_path(shapes)[0]
    given = broadcast_prefix("out_axes", out_axes, shapes, tree_name="outputs")
    known = jax.tree.leaves(report.out_axes, is_leaf=lambda node: node is None) if report else None
    found = []
    for i, ((path, leaf), axis) in enumerate(zip(named, given, strict=True)):
        label = "out" + jax.tree_util.keystr(path)
        axis = None if axis is None else normal_axis(label, leaf, axis)
        if known is not None and axis != known[i]:
            there = "the same for every batch" if known[i] is None else f"along axis {known[i]}"
            raise ValueError(f"out_axes is {axis} for {label}, whose elements are {there}; give it {known[i]}.")
        if axis is not None and leaf.shape[axis] != size:
            raise ValueError(
                f"{label} of a chunk of {plural(size, 'element')} has shape {leaf.shape}, and so no element for each "
                f"along axis {axis}; give out_axes the axis that has, or None for an output "
                "that is the same for every batch."
            )
        found.append(axis)
    return found
