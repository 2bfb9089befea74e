"""`jax.vmap` over at most a given number of elements at once."""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from xtrax.tiling._check import check_batch_size, check_bool, check_callable, check_int
from xtrax.tiling._execute.args import check_key
from xtrax.tiling._execute.program import run_program
from xtrax.tiling._map.args import Bound, bind
from xtrax.tiling._map.run import Options, run
from xtrax.tiling.reducers import as_reducer
from xtrax.tiling.tune import tune_batch_size

__all__ = ["tiled_vmap"]


def tiled_vmap(
    fn: Callable[..., Any],
    in_axes: Any = 0,
    out_axes: Any = 0,
    *,
    batch_size: int | str | None = None,
    budget: Any = None,
    remat: bool = False,
    grad_batch_size: int | None = None,
    reduce: Any = None,
    axis_name: Hashable = None,
    spmd_axis_name: Hashable = None,
    mesh: jax.sharding.Mesh | None = None,
    mesh_axis: str | None = None,
    key: Any = None,
) -> Callable[..., Any]:
    """`jax.vmap`, a chunk of at most `batch_size` elements after another.

    The results are those of `jax.vmap`, and memory is that of the arguments, the results and one chunk. Chunks are
    balanced, and the first two overlap where they do not come out even, so a few elements may be computed twice. Where
    `fn` has side effects each element is computed once: the last chunk is shorter instead. Forward mode and, with
    `remat`, reverse mode work on one chunk at a time too; reverse mode otherwise keeps what it needs of every element,
    as that of `jax.vmap` does.

    Outside a trace a call is compiled, once for each types of arguments; the program is found again at the next call of
    this or another `tiled_vmap` of `fn`. Arrays that `fn` holds (an `eqx.Module`) or closes over are arguments of the
    program, never constants in it. It is traced anew where a variable that it uses is another object than before; what
    changes inside these objects is not seen, as with `jax.jit`. Arguments that are no arrays (Python numbers, strings)
    reach `fn` as they are where their axis is None, and another value is another program: pass numbers that change as
    arrays.

    Args:
        fn: a function of one element of each argument.
        in_axes: the mapped axis of each argument, as in `jax.vmap`: an int (negative from the end), None for what is
            the same for all elements, or a sequence with an entry for each positional argument, an int, None or a
            pytree of them that is a prefix of the argument. Keyword arguments are mapped along axis 0.
        out_axes: where the mapped axis goes in each result, as in `jax.vmap`.
        batch_size: the most elements at once; None for all; "auto" for the fastest of a few sizes, measured by
            `tune_batch_size` on the first call with such arguments.
        budget: with "auto", what the chunk may take: bytes or a `MemoryBudget`.
        remat: whether reverse mode saves nothing but the arguments, and computes each chunk anew; it then refuses an
            `fn` with side effects.
        grad_batch_size: the most elements that reverse mode takes at once, if others than forward; implies `remat`.
        reduce: a `Reducer` or a pytree of them that is a prefix of the output: the results are reduced chunk by chunk,
            in order, and never stacked.
        axis_name: a name of the axis for collectives in `fn`, which need all elements at once.
        spmd_axis_name: as in `jax.vmap`.
        mesh: devices to split the elements over, each of which maps its share in chunks of its own. Shares are padded,
            so `fn` must have no side effects, but for unordered `jax.debug.print` and `jax.debug.callback`.
        mesh_axis: the axis of `mesh` to split over; None if it has only one.
        key: a PRNG key. Element i gets `jax.random.fold_in(key, i)` as the keyword argument `key` of `fn`, whatever
            chunk or device it is computed in.

    Returns:
        A function of the arguments, whose results are those of `fn`, each leaf stacked along its out axis; with
        `reduce`, what the reducers return.

    Raises:
        TypeError: an argument of the wrong kind; at a call, an axis that is neither an int nor None, or a mapped leaf
            that is no array.
        ValueError: a number below 1, options that exclude one another, an axis that `mesh` does not have; at a call,
            nothing is mapped, `in_axes` or `out_axes` does not fit, sizes differ, `fn` has a collective over
            `axis_name` and fewer than all elements at once, "auto" inside a trace that `fn` depends on, or `fn` has
            side effects over a mesh (`DispatchRejected`).

    >>> import jax.numpy as jnp
    >>> from xtrax.tiling import tiled_vmap
    >>> xs, w = jnp.arange(10.0).reshape(5, 2), jnp.array([1.0, 10.0])
    >>> print(tiled_vmap(jnp.dot, in_axes=(0, None), batch_size=2)(xs, w))
    [10. 32. 54. 76. 98.]
    >>> from xtrax.tiling import reducers
    >>> print(tiled_vmap(jnp.dot, in_axes=(0, None), batch_size=2, reduce=reducers.mean)(xs, w))
    54.0
    """
    check_callable("fn", fn, "(*elements) -> outputs")
    _check_in_axes(in_axes)
    check_batch_size(batch_size, budget)
    if grad_batch_size is not None:
        grad_batch_size = check_int("grad_batch_size", grad_batch_size, 1)
    reducer = None if reduce is None else as_reducer(reduce)
    if reducer is not None and (out_axes is None or out_axes != 0):
        raise ValueError(f"out_axes is {out_axes!r}, but with reduce the results have no mapped axis; leave it out.")
    for name, value in (("axis_name", axis_name), ("spmd_axis_name", spmd_axis_name)):
        _check_hashable(name, value)
    options = Options(
        None,
        out_axes,
        check_bool("remat", remat),
        grad_batch_size,
        reducer,
        axis_name,
        spmd_axis_name,
        mesh,
        _check_mesh(mesh, mesh_axis),
    )
    key = check_key(fn, (), key)
    places = (jax.tree.structure(out_axes, is_leaf=_is_none), tuple(jax.tree.leaves(out_axes, is_leaf=_is_none)))

    measured: dict[Hashable, int] = {}

    def size_of(bound: Bound) -> int | None:
        if not isinstance(batch_size, str):
            return None if batch_size is None else int(batch_size)
        types = tuple(jax.typeof(array) for array in bound.arrays)
        call = (bound.signature, types)
        if bound.signature is None or call not in measured:
            measured[call] = _fastest(bound, options.devices, budget)
        return measured[call]

    @functools.wraps(fn, updated=())
    def tiled(*args: Any, **kwargs: Any) -> Any:
        bound = bind(fn, in_axes, args, kwargs, key)
        if reducer is not None:
            reducer.check_size(bound.size)
        sized = dataclasses.replace(options, batch_size=size_of(bound))
        identity = (dataclasses.replace(sized, out_axes=None), places, bound.signature)
        known = None if bound.signature is None else identity
        return run_program(fn, known, lambda arrays: run(arrays, bound, sized), bound.arrays, [reducer])

    return tiled


def _fastest(bound: Bound, devices: int, budget: Any) -> int:
    """The chunk size that is the fastest for the share of one device."""
    share = -(-bound.size // devices)
    if share == 0:
        return 1
    args = [*bound.arrays, np.arange(bound.size, dtype=np.uint32)]
    axes = (*bound.axes, 0)
    sized = [
        array if (axis is None or devices == 1) and not isinstance(array, Tracer) else _with_size(array, axis, share)
        for array, axis in zip(args, axes, strict=True)
    ]
    return tune_batch_size(
        lambda *values: bound.call(values[:-1], values[-1]), *sized, in_axes=axes, budget=budget
    ).batch_size  # fmt: skip


def _with_size(array: Any, axis: int | None, size: int) -> jax.ShapeDtypeStruct:
    """The type of an array, with so many elements along an axis."""
    shape = list(np.shape(array))
    if axis is not None:
        shape[axis] = size
    return jax.ShapeDtypeStruct(tuple(shape), jax.typeof(array).dtype)


def _is_none(node: Any) -> bool:
    return node is None


def _check_in_axes(in_axes: Any) -> None:
    if in_axes is not None and (isinstance(in_axes, bool) or not isinstance(in_axes, (int, tuple, list))):
        number = isinstance(in_axes, (bool, np.bool_, np.number, jax.Array))
        cure = "write a Python int, such as 0" if number else f"for one argument that is a pytree write ({in_axes!r},)"
        raise TypeError(
            f"in_axes must be an int, None or a tuple with an entry for each argument, but is {in_axes!r} "
            f"({type(in_axes).__name__}); {cure}."
        )


def _check_hashable(name: str, value: Any) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(f"{name} must be hashable, such as a string, but is {value!r}.") from error


def _check_mesh(mesh: Any, mesh_axis: Any) -> str | None:
    if mesh is None:
        if mesh_axis is not None:
            raise ValueError(f"mesh_axis is {mesh_axis!r}, but there is no mesh; pass mesh=jax.make_mesh(...).")
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, but is {mesh!r}; jax.make_mesh makes one.")
    names = mesh.axis_names
    if mesh_axis is None:
        if len(names) != 1:
            raise ValueError(f"the mesh has the axes {names}; say by mesh_axis which of them to split over.")
        return names[0]
    if mesh_axis not in names:
        raise ValueError(f"mesh_axis is {mesh_axis!r}, but the mesh has the axes {names}; give one of them.")
    return mesh_axis
