"""Map a function over elements of differing length: a few lengths, full batches, one program for each length."""

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.core import Tracer

from xtrax.tiling._axes import broadcast_prefix
from xtrax.tiling._check import check_boundaries, check_callable, check_int
from xtrax.tiling._host_arrays import exact_scalar, number_array, refuse_wrapping
from xtrax.tiling._ragged.programs import Element, ElementFn, Program, Programs, programs_of


def map_ragged(
    fn: Callable[[Any, Any], Any],
    items: Iterable[Any],
    *,
    boundaries: Sequence[int],
    batch_size: int,
    pad_value: Any = 0,
) -> list[Any]:
    """`[fn(item) for item in items]` for items of differing length, in full batches and with few compiles.

    Each item is padded on the host to the smallest boundary that holds it, and items of one boundary are computed
    `batch_size` at a time by `jax.vmap`. One program is compiled for each boundary that is used, whatever the number
    of items; the last batch of a boundary is filled up by repeating an item. The programs are kept with `fn`: a second
    call compiles nothing. As with `jax.jit`, `fn` is taken to compute the same thing at each call. Its arrays, and
    those it closes over, are arguments of the program; a module with other weights of the same shapes needs no other.

    Args:
        fn: `(padded, mask) -> result` of one item: `padded` is the item with `boundary` as its leading size, `mask`
            `(boundary,)` bool, True where the data is. The result is a pytree of arrays.
        items: pytrees of numbers with one structure, whose leaves `(length, ...)` share their leading length and agree
            with those of the other items in all but that. All are checked before the first is computed.
        boundaries: the lengths padded to, strictly ascending; see `suggest_boundaries`.
        batch_size: how many items are computed at once, at least 1.
        pad_value: what is written past the end, a number or a pytree of numbers that is a prefix of an item.

    Returns:
        The results as numpy arrays of their own, in the order of `items`. Every axis of an output that is the boundary
        (found by tracing `fn` at a second length) is cut to the length of its item. If `fn` takes no other length,
        nothing is cut.

    Raises:
        TypeError: an `fn` that cannot be called or holds values that are being traced; items that are no pytrees of
            numeric arrays on the host; boundaries or a batch size that are not integers.
        ValueError: boundaries that are empty or not ascending, a batch size below 1, an item longer than the last
            boundary, leaves that disagree about the length, items that differ in more than their length, integers that
            JAX would wrap around because it has 32 bits, a pad value that a dtype cannot hold, or an output that
            follows the boundary without having it as an axis, as that of `jnp.diff`, of which the padding could not be
            told.

    >>> def centred(x, mask):
    ...     return x - x.sum() / mask.sum()
    >>> items = [np.array([1.0, 3.0]), np.array([5.0]), np.array([0.0, 3.0, 6.0])]
    >>> [result.tolist() for result in map_ragged(centred, items, boundaries=(2, 4), batch_size=8)]
    [[-1.0, 1.0], [0.0], [-3.0, 0.0, 3.0]]
    """
    job = _Job("map_ragged", fn, boundaries, batch_size, pad_value)
    ready = list(job.prepared(items))
    results: list[Any] = [None] * len(ready)

    def store(batch: "_Computed | None") -> None:
        for position, result in batch.results() if batch else ():
            results[position] = result

    # The next batch is padded and started while the one before is computed.
    running: _Computed | None = None
    for length, batch in job.batches(ready):
        started = job.start(length, batch)
        store(running)
        running = started
    store(running)
    return results


def iter_ragged(
    fn: Callable[[Any, Any], Any],
    items: Iterable[Any],
    *,
    boundaries: Sequence[int],
    batch_size: int,
    pad_value: Any = 0,
) -> Iterator[tuple[int, Any]]:
    """`map_ragged`, a batch at a time: yields `(position, result)` in the order in which batches are full.

    Items are taken from `items`, which may be a generator without an end, until `batch_size` of them share a boundary;
    that batch is computed and its results are yielded before the next item is taken. Batches that are not full come
    last, the smallest boundary first. So there are never more than the results of one batch, and never more than
    `batch_size - 1` items waiting at each boundary. `dict(iter_ragged(...))` finds results by position.

    Args:
        fn: as for `map_ragged`.
        items: as for `map_ragged`, but each is checked when it is taken.
        boundaries: as for `map_ragged`.
        batch_size: as for `map_ragged`.
        pad_value: as for `map_ragged`.

    Yields:
        The position of an item in `items`, counted from 0, and its result.

    Raises:
        TypeError: as for `map_ragged`; what is wrong with `fn` and the options at once, not at the first item.
        ValueError: as for `map_ragged`.

    >>> items = [np.ones(3), np.ones(1), np.ones(4), np.ones(2)]
    >>> for position, total in iter_ragged(lambda x, mask: x.sum(), items, boundaries=(2, 4), batch_size=2):
    ...     print(position, total)
    0 3.0
    2 4.0
    1 1.0
    3 2.0
    """
    job = _Job("iter_ragged", fn, boundaries, batch_size, pad_value)
    prepared = job.prepared(items)

    def run() -> Iterator[tuple[int, Any]]:
        for length, batch in job.batches(prepared):
            yield from job.start(length, batch).results()

    return run()


class _Item(NamedTuple):
    position: int
    length: int
    leaves: list[npt.NDArray[Any]]


class _Computed(NamedTuple):
    """A batch that was started, and what its results are."""

    batch: list[_Item]
    program: Program
    outputs: list[Any]

    def results(self) -> Iterator[tuple[int, Any]]:
        """`(position, result)` of each item, the results being copies that keep no batch alive."""
        impls = [_key_impl(output) for output in self.outputs]
        arrays = [
            np.asarray(output if impl is None else jax.random.key_data(output))
            for output, impl in zip(self.outputs, impls, strict=True)
        ]
        for row, item in enumerate(self.batch):
            leaves = []
            for array, axes, impl in zip(arrays, self.program.length_axes, impls, strict=True):
                cut = tuple(slice(item.length if axis in axes else None) for axis in range(max(axes, default=-1) + 1))
                leaf = np.array(array[(row, *cut)])
                leaves.append(leaf if impl is None else jax.random.wrap_key_data(jnp.asarray(leaf), impl=impl))
            yield item.position, jax.tree.unflatten(self.program.structure, leaves)


class _Job:
    """One call: its options, checked, and what the first item says about all."""

    def __init__(self, caller: str, fn: Any, boundaries: Sequence[int], batch_size: int, pad_value: Any) -> None:
        self._caller = caller
        self._fn = ElementFn(check_callable("fn", fn, "(padded, mask) -> result"))
        self._boundaries = check_boundaries("boundaries", boundaries)
        self._batch_size = check_int("batch_size", batch_size, 1)
        self._pad_value = pad_value
        self._element: Element | None = None
        self._programs: Programs | None = None
        self._dtypes: list[np.dtype[Any]] = []
        self._fill: list[Any] = []

    def prepared(self, items: Iterable[Any]) -> Iterator[_Item]:
        """The items as arrays on the host, each checked when it is taken."""
        if isinstance(items, (str, bytes, Mapping, jax.Array, np.ndarray)) or not isinstance(items, Iterable):
            raise TypeError(
                f"items must be a list of pytrees of arrays, one for each element, but is a {type(items).__name__}; "
                "elements of one length in one array need no buckets: use tiled_vmap."
            )
        return (self._prepare(position, item) for position, item in enumerate(items))

    def batches(self, prepared: Iterable[_Item]) -> Iterator[tuple[int, list[_Item]]]:
        """`(boundary, items)`, as soon as there are `batch_size` of a boundary, and in the end what is left."""
        waiting: dict[int, list[_Item]] = {boundary: [] for boundary in self._boundaries}
        for item in prepared:
            boundary = self._boundaries[bisect.bisect_left(self._boundaries, item.length)]
            waiting[boundary].append(item)
            if len(waiting[boundary]) == self._batch_size:
                yield boundary, waiting[boundary]
                waiting[boundary] = []
        for boundary, items in waiting.items():
            if items:
                yield boundary, items

    def start(self, length: int, batch: list[_Item]) -> _Computed:
        """Pad a batch and start to compute it.

        Raises:
            TypeError: the call is inside a trace, where results have no values.
        """
        assert self._programs is not None  # there is a batch, and so a first item
        program = self._programs.of(self._fn, length, self._boundaries)
        rows = batch + batch[-1:] * (self._batch_size - len(batch))
        leaves = [self._padded(rows, at, length) for at in range(len(self._fill))]
        mask = np.arange(length) < np.array([item.length for item in rows])[:, None]
        outputs = program(self._fn.arrays, leaves, mask)
        if any(isinstance(output, Tracer) for output in outputs):
            raise TypeError(
                f"{self._caller} was called inside jax.jit or another transformation, but its results are arrays on "
                "the host; call it outside, or use bucketize and tiled_vmap inside."
            )
        return _Computed(batch, program, outputs)

    def _padded(self, rows: list[_Item], at: int, length: int) -> npt.NDArray[Any]:
        """One leaf of a batch, `(batch_size, length, ...)`. A new array, since JAX may go on using it as its own."""
        fill = self._fill[at]
        padded = np.full((len(rows), length, *rows[0].leaves[at].shape[1:]), fill, fill.dtype)
        for row, item in zip(padded, rows, strict=True):
            row[: item.length] = item.leaves[at]
        return padded

    def _prepare(self, position: int, item: Any) -> _Item:
        leaves, treedef = jax.tree.flatten(item)
        arrays = [
            leaf if type(leaf) is np.ndarray and leaf.dtype.kind in "biufc" else self._array(position, item, at)
            for at, leaf in enumerate(leaves)
        ]
        if not arrays:
            raise ValueError(f"items[{position}] has no arrays, and so no length; leave it out.")
        for at, array in enumerate(arrays):
            if array.ndim == 0:
                raise ValueError(
                    f"{_leaf_name(position, item, at)} is a scalar, and so has no length; repeat it along the length, "
                    "or close over it."
                )
        length = len(arrays[0])
        for at, array in enumerate(arrays):
            if len(array) != length:
                raise ValueError(
                    f"{_leaf_name(position, item, 0)} has length {length}, but {_leaf_name(position, item, at)} has "
                    f"length {len(array)}; the leaves of one item must agree."
                )
        if length > self._boundaries[-1]:
            raise ValueError(
                f"items[{position}] has length {length}, past the last boundary {self._boundaries[-1]} of "
                f"{self._boundaries}; add a boundary of at least that length, or cut the item."
            )
        if self._element is None:
            self._set_element(item, treedef, arrays)
        else:
            self._check_alike(position, item, treedef, arrays)
        assert self._element is not None
        for at, (array, leaf) in enumerate(zip(arrays, self._element[1], strict=True)):
            if array.dtype != leaf.dtype:
                refuse_wrapping(_leaf_name(position, item, at), array, np.dtype(leaf.dtype))
        return _Item(position, length, arrays)

    def _array(self, position: int, item: Any, at: int) -> npt.NDArray[Any]:
        return number_array(_leaf_name(position, item, at), jax.tree.leaves(item)[at], self._caller)

    def _set_element(self, item: Any, treedef: Any, arrays: list[npt.NDArray[Any]]) -> None:
        # What JAX would make of these dtypes, such as float32 of float64 where x64 is off.
        types = tuple(jax.ShapeDtypeStruct(a.shape[1:], jax.dtypes.canonicalize_dtype(a.dtype)) for a in arrays)
        values = broadcast_prefix("pad_value", self._pad_value, item, "a number", "items[0]")
        self._fill = [
            exact_scalar(_leaf_name(0, item, at), value, np.dtype(leaf.dtype))
            for at, (value, leaf) in enumerate(zip(values, types, strict=True))
        ]
        self._dtypes = [array.dtype for array in arrays]
        self._element = treedef, types
        self._programs = programs_of(self._fn, self._element, self._batch_size)

    def _check_alike(self, position: int, item: Any, treedef: Any, arrays: list[npt.NDArray[Any]]) -> None:
        """Refuse an item that differs from the first in more than its length."""
        assert self._element is not None  # it is not the first item
        if treedef != self._element[0]:
            raise ValueError(
                f"items[{position}] has the structure {treedef}, but items[0] has {self._element[0]}; map items of "
                "each structure apart."
            )
        for at, (array, dtype, leaf) in enumerate(zip(arrays, self._dtypes, self._element[1], strict=True)):
            if array.dtype != dtype or array.shape[1:] != leaf.shape:
                raise ValueError(
                    f"{_leaf_name(position, item, at)} has dtype {array.dtype} and shape {array.shape}, but that of "
                    f"items[0] has dtype {dtype} and shape (length, {', '.join(map(str, leaf.shape))}); items may "
                    "differ in their length alone."
                )


def _leaf_name(position: int, item: Any, at: int) -> str:
    path, _ = jax.tree_util.tree_leaves_with_path(item)[at]
    return f"items[{position}]{jax.tree_util.keystr(path)}"


def _key_impl(output: Any) -> Any:
    return jax.random.key_impl(output) if jnp.issubdtype(output.dtype, jax.dtypes.prng_key) else None
