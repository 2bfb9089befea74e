"""Call a function on the host from inside a trace, once for all lanes of every `jax.vmap` around it.

The callback is bound in a `jax.custom_batching.custom_vmap`, whose rule folds the lanes into rows and binds it again:
one call of the host for any nest of maps, its rows in the order in which Python loops would go through the lanes,
ordered or not. Each call returns a token. JAX drops the effects of a scan that is differentiated unless what they
return reaches the carry or the outputs of the scan, so whoever calls `fire_lanes` must put the token there.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from xtrax.stages._callback import io_callback
from xtrax.stages._host_record import HostRecord

NO_TOKEN = np.int32(0)
"""The token of no effect; tokens are joined by `|`."""

_TOKEN = jax.ShapeDtypeStruct((), jnp.int32)


class HostEffect(Protocol):
    """What `fire_lanes` reads of a `HostTap` or `HostSink`."""

    @property
    def fn(self) -> Callable[[Any, Any], Any]:
        """The host function."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether its calls occur in the order of the program."""
        ...

    @property
    def batched(self) -> bool:
        """Whether it takes all rows at once."""
        ...

    @property
    def record(self) -> HostRecord:
        """What its calls did."""
        ...


def fire_lanes(
    effect: HostEffect,
    values: Any,
    index: Any,
    mask: Any = None,
    *,
    axes: Sequence[str] = (),
) -> jax.Array:
    """Send rows to a host function, in order.

    Args:
        effect: The `HostTap` or `HostSink`.
        values: A pytree of arrays `(n, ...)`. Nothing is differentiated through them.
        index: `(n, d)` integers: where each row lies in each of the d enclosing axes, the outermost first. A
            `jax.vmap` for which it is batched is taken for one of these axes; any other gives it another column, in
            front, with the number of the lane.
        mask: `(n,)` bools, or None for all: the rows that are sent.
        axes: The names of the d axes, for messages.

    Returns:
        A token, an int32 scalar, the same for all lanes.
    """
    leaves, treedef = jax.tree.flatten(values)
    leaves = [lax.stop_gradient(jnp.asarray(leaf)) for leaf in leaves]
    leaves = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves]
    deliver = _Delivery(effect, treedef, tuple(axes))

    @custom_vmap
    def call(leaves: list[jax.Array], index: jax.Array, mask: jax.Array | None) -> jax.Array:
        return io_callback(deliver, _TOKEN, leaves, index, mask, ordered=effect.ordered)

    @call.def_vmap
    def _(size: int, batched: Any, leaves: list[jax.Array], index: jax.Array, mask: jax.Array | None) -> Any:
        leaves_batched, index_batched, mask_batched = batched
        if not index_batched:
            rows, depth = index.shape
            lane = jnp.broadcast_to(jnp.arange(size, dtype=index.dtype)[:, None, None], (size, rows, 1))
            index = jnp.concatenate([lane, jnp.broadcast_to(index, (size, rows, depth))], axis=2)
        rows = [_fold(leaf, size, is_batched) for leaf, is_batched in zip(leaves, leaves_batched, strict=True)]
        # The rule must itself end in a call that can be batched, or a second vmap around it would fail.
        return call(rows, _fold(index, size, True), None if mask is None else _fold(mask, size, mask_batched)), False

    return call(leaves, jnp.asarray(index, jnp.int32), mask)


def thread_token(value: Any, token: Any) -> Any:
    """The same value, which now needs the token: what is computed from it keeps the effect alive."""
    leaves, treedef = jax.tree.flatten(value)
    keys = [jax.random.key_impl(leaf) if _is_key(leaf) else None for leaf in leaves]
    bare = [leaf if impl is None else jax.random.key_data(leaf) for leaf, impl in zip(leaves, keys, strict=True)]
    bare, _ = lax.optimization_barrier((bare, token))
    leaves = [
        leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)
        for leaf, impl in zip(bare, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _fold(x: jax.Array, size: int, batched: bool) -> jax.Array:
    """`(size, n, ...)`, or `(n, ...)` that all lanes share, to `(size * n, ...)`."""
    if not batched:
        x = jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * x.shape[1], *x.shape[2:])


class _Delivery:
    """The host's side: takes the rows of one call and hands them to the function."""

    def __init__(self, effect: HostEffect, treedef: Any, axes: tuple[str, ...]) -> None:
        self._effect, self._treedef, self._axes = effect, treedef, axes

    def __call__(self, leaves: list[Any], index: Any, mask: Any) -> np.int32:
        """Deliver the rows; `index` may have columns in front of those that were given."""
        numbers = np.array(index, dtype=np.int64)
        rows = None if mask is None else np.flatnonzero(np.asarray(mask))
        if rows is not None:
            numbers = numbers[rows]
        if len(numbers):
            # The function owns what it gets: JAX may reuse its buffers once this returns.
            own = [np.array(leaf) if rows is None else np.asarray(leaf)[rows] for leaf in leaves]
            self._effect.record.call(lambda report: self._hand_over(own, numbers, report), len(numbers))
        return NO_TOKEN

    def _hand_over(self, leaves: list[np.ndarray], numbers: np.ndarray, report: Callable[[str], None]) -> None:
        unflatten = self._treedef.unflatten
        if self._effect.batched:
            first, last = self._where(numbers[0]), self._where(numbers[-1])
            report(first if len(numbers) == 1 else f"{first} to {last}")
            self._effect.fn(unflatten(leaves), numbers)
            return
        for row, number in enumerate(numbers):
            report(self._where(number))
            self._effect.fn(unflatten([leaf[row] for leaf in leaves]), tuple(map(int, number)))

    def _where(self, number: np.ndarray) -> str:
        """`axis 'batch' element 3, axis 'time' element 0`."""
        names = [None] * (len(number) - len(self._axes)) + [repr(name) for name in self._axes]
        parts = [
            f"{'lane' if name is None else f'axis {name} element'} {i}" for name, i in zip(names, number, strict=True)
        ]
        return ", ".join(parts) or "the only element"
