"""Taps and sinks made of plain Python functions of numpy arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from xtrax.stages._host_call import fire_lanes, thread_token
from xtrax.stages._host_record import HostRecord
from xtrax.stages._undifferentiated import undifferentiated

__all__ = ["HostSink", "HostTap"]


@dataclasses.dataclass(frozen=True, eq=False)
class HostTap:
    """Passes values on unchanged, and shows them to a plain Python function on the host.

    It may be the tap of an `AxisBoundary`, or be called inside any JAX function. It has a batching rule: under
    `jax.vmap`, and any nest of maps and loops, all lanes reach the function by one call, so that it works at full
    speed on every kind of axis, in order. For derivatives it is the identity, and fires once for each evaluation, with
    the primal values.

    The function owns the numpy arrays that it is given. Typed keys arrive as their key data, bfloat16 as the dtype of
    `ml_dtypes`. It must not call JAX, and blocks the computation while it runs: hand slow work to a thread. Its calls
    never overlap.

    Called directly, `index` has a column for each `jax.vmap` around the call for which the value (or `where`) is
    batched: a value that depends on one of two vmaps fires once for each lane of that one. The vmaps of a chunked map
    or an executor around the call are those of the elements that are computed at once, so that inside `fn` of
    `execute_plan` or `tiled_vmap` it numbers the rows of a chunk. At a boundary it gets its place in the plan's axes.

    It is alive through the value that it returns: use that value, since JAX drops effects that nothing depends on from
    a loop that is differentiated. JAX refuses host callbacks in `cond` and `while_loop` under `jax.vmap`, and under a
    differentiated `jax.checkpoint` (and so `remat=True` of `tiled_vmap`); say `where=` instead of putting the call into
    a `cond`. It has no rule for `jax.linear_transpose`.

    Args:
        fn: With `batched`, `fn(values, index)`: leaves `(n, ...)`, and int64 `(n, d)`, where each row lies in each of
            the d enclosing axes, the outermost first, the rows in the order of their effects. Without,
            `fn(value, index)`: one element, and a tuple of d ints. Called directly, the axes are the `jax.vmap`s
            around the call. What it returns is ignored.
        ordered: Whether its calls occur in the order of the program.
        batched: Whether `fn` takes all rows of a call at once.

    Raises:
        TypeError: If `fn` is not callable, or a flag is not a bool.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xtrax.stages import HostTap
        >>> seen = []
        >>> tap = HostTap(lambda value, index: seen.append((index, float(value))), ordered=True, batched=False)
        >>> jax.vmap(lambda x: 2 * tap(x * x))(jnp.arange(3.0)).tolist()
        [0.0, 2.0, 8.0]
        >>> jax.effects_barrier()
        >>> seen
        [((0,), 0.0), ((1,), 1.0), ((2,), 4.0)]
    """

    fn: Callable[[Any, Any], Any]
    ordered: bool = False
    batched: bool = True
    record: HostRecord = dataclasses.field(default_factory=lambda: HostRecord("HostTap"), init=False, repr=False)

    batchable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check(self)

    def __call__(self, value: Any, /, *, where: Any = None) -> Any:
        """Show a value to the host function, and return it.

        Args:
            value: A pytree of arrays.
            where: A bool scalar, which may be traced: whether this element is shown. None shows it.

        Returns:
            The same value, as JAX arrays.

        Raises:
            TypeError: If `value` holds something else than arrays, or `where` is not a bool scalar.
        """
        value = _arrays("HostTap", value)
        return thread_token(value, _fire(self, value, _mask("HostTap", where)))


@dataclasses.dataclass(frozen=True, eq=False)
class HostSink:
    """Takes values out of the pipeline, and gives them to a plain Python function on the host.

    As `HostTap`, but it returns None: an axis with a sink and no fuse yields nothing. Where nothing depends on it, JAX
    would lose its effects in a derivative. So one that is called directly, or whose axis yields nothing, refuses values
    that are differentiated, and values that change from step to step of a loop that is, whatever they are: use a
    `HostTap` there, or a fuse. (A value that is the same in all steps of such a loop is given once.) Other executors
    keep it alive by what they return: use that.

    Args:
        fn: As of `HostTap`.
        ordered: As of `HostTap`.
        batched: As of `HostTap`.

    Raises:
        TypeError: If `fn` is not callable, or a flag is not a bool.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import AxisBoundary, HostSink, execute_map_axis
        >>> from xtrax.tiling import SafeMap
        >>> calls = []
        >>> sink = HostSink(lambda values, index: calls.append((values.tolist(), index[:, 0].tolist())), ordered=True)
        >>> execute_map_axis(lambda x: x * x, jnp.arange(5), SafeMap(2), AxisBoundary(sink=sink))
        >>> calls
        [([0, 1], [0, 1]), ([4, 9], [2, 3]), ([16], [4])]
    """

    fn: Callable[[Any, Any], Any]
    ordered: bool = False
    batched: bool = True
    record: HostRecord = dataclasses.field(default_factory=lambda: HostRecord("HostSink"), init=False, repr=False)

    batchable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check(self)

    def __call__(self, value: Any, /, *, where: Any = None) -> None:
        """Give a value to the host function.

        Args:
            value: A pytree of arrays.
            where: A bool scalar, which may be traced: whether this element is given. None gives it.

        Raises:
            ExecutorError: If it, or a loop around it, is differentiated (when that is traced).
            TypeError: If `value` holds something else than arrays, or `where` is not a bool scalar.
        """
        value, where = undifferentiated((_arrays("HostSink", value), _mask("HostSink", where)), LOST)
        _fire(self, value, where)


LOST = (
    "a HostSink lies in a function that is differentiated, where JAX drops its effects silently, since nothing depends "
    "on them: that takes in values that are differentiated, and any that change from step to step of a loop that is. "
    "Use a HostTap and what it returns, or give the sink to execute_scan_axis or to an axis with a fuse, whose result "
    "you use, or differentiate the function without it and record in a separate forward pass."
)
"""Why a sink that leaves nothing behind is refused in a derivative."""


def _check(effect: HostTap | HostSink) -> None:
    kind = type(effect).__name__
    if isinstance(effect.fn, type) or not callable(effect.fn):
        raise TypeError(f"{kind}: fn must be a function of (values, index) on the host; found {effect.fn!r}")
    for flag in ("ordered", "batched"):
        if not isinstance(getattr(effect, flag), bool):
            raise TypeError(f"{kind}: {flag} must be True or False; found {getattr(effect, flag)!r}")


def _arrays(kind: str, value: Any) -> Any:
    def array(path: Any, leaf: Any) -> jax.Array:
        try:
            return _as_array(leaf)
        except (TypeError, OverflowError) as error:
            found = f"{leaf}, which is too large" if isinstance(error, OverflowError) else type(leaf).__name__
            raise type(error)(
                f"{kind}: value{jax.tree_util.keystr(path)} must be an array; found {found}. Close over what is not an "
                "array in the host function."
            ) from error

    return jax.tree_util.tree_map_with_path(array, value)


def _as_array(value: Any) -> jax.Array:
    if isinstance(value, str | bytes | type):  # JAX would take the name of a dtype, such as "bool", for a value
        raise TypeError(f"{value!r} is no array")
    return jnp.asarray(value)


def _fire(effect: HostTap | HostSink, value: Any, where: jax.Array | None) -> jax.Array:
    """Call the host with one element, numbered by the lanes of the vmaps around the call alone."""
    value, where = jax.tree.map(lambda leaf: leaf[None], (value, where))
    return fire_lanes(effect, value, jnp.zeros((1, 0), jnp.int32), where)


def _mask(kind: str, where: Any) -> jax.Array | None:
    if where is None:
        return None
    try:
        array = _as_array(where)
        found = f"{array.dtype}{list(array.shape)}"
    except (TypeError, ValueError, OverflowError):  # no array at all
        array, found = None, f"{where!r} ({type(where).__name__})"
    if array is None or array.shape != () or array.dtype != jnp.bool_:
        raise TypeError(
            f"{kind}: where must be a bool scalar or None; found {found}. Inside jax.vmap it is one bool for each "
            "lane; to mask parts of a value, do so in the host function."
        )
    return array
