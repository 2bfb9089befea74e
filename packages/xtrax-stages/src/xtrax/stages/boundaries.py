"""What happens at the edge of an axis: reduce its outputs, record them, or send them away."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import equinox as eqx
import jax

from xtrax.stages.host import HostSink, HostTap
from xtrax.tiling.reducers import Reducer, as_reducer

__all__ = ["AxisBoundary", "BoundaryCallable", "Fuse", "HostSink", "HostTap", "Sink", "Tap"]

BoundaryCallable: TypeAlias = Callable[[Any], Any]
"""Any callable of one argument: a plain function serves as a `Fuse`, or as a `Tap` or `Sink` without order."""


@runtime_checkable
class Fuse(Protocol):
    """Reduces the stacked outputs of an axis: `(n, ...) -> anything`.

    A pure JAX function of a pytree whose leaves have the axis in front. It runs inside the trace, once, after the axis.
    A `xtrax.tiling.reducers.Reducer` takes its place where the outputs are not to be stacked.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import Fuse
        >>> isinstance(jnp.mean, Fuse)
        True
    """

    def __call__(self, stacked: Any, /) -> Any:
        """Reduce the stack; leaves `(n, ...)`."""
        ...


@runtime_checkable
class Tap(Protocol):
    """Passes one element on unchanged, with a side effect on the host.

    It issues its own `xtrax.stages.io_callback` and returns what it was given: the same tree, shapes and dtypes.

    Attributes:
        ordered: Whether its effects must occur in the order of the elements. It must then issue its callback with
            `ordered=True`. A plain function, which has no such attribute, counts as not ordered.
        batchable: Optional. True if the callable has a batching rule that keeps the order of its effects, so that it
            may be called under `jax.vmap`. False where it is missing.

    Example:
        >>> import jax
        >>> from xtrax.stages import Tap, io_callback
        >>> class Printed:
        ...     ordered = True
        ...     def __call__(self, x):
        ...         io_callback(lambda v: print(float(v)), None, x, ordered=True)
        ...         return x
        >>> isinstance(Printed(), Tap)
        True
    """

    @property
    def ordered(self) -> bool:
        """Whether the effects must occur in the order of the elements."""
        ...

    def __call__(self, value: Any, /) -> Any:
        """Take one element and return it."""
        ...


@runtime_checkable
class Sink(Protocol):
    """Takes one element out of the pipeline, by a side effect on the host, and returns `None`.

    It issues its own `xtrax.stages.io_callback`. The value is not stacked: an axis with a sink and no fuse yields
    `None`.

    Attributes:
        ordered: As in `Tap`.
        batchable: As in `Tap`.

    Example:
        >>> from xtrax.stages import Sink, io_callback
        >>> class Kept:
        ...     ordered = True
        ...     def __init__(self):
        ...         self.rows = []
        ...     def __call__(self, x):
        ...         io_callback(self.rows.append, None, x, ordered=True)
        >>> isinstance(Kept(), Sink)
        True
    """

    @property
    def ordered(self) -> bool:
        """Whether the effects must occur in the order of the elements."""
        ...

    def __call__(self, value: Any, /) -> None:
        """Take one element."""
        ...


def _combined(fuse: Any) -> Any:
    """One reducer of a pytree of them; anything else as it is."""
    if callable(fuse) or isinstance(fuse, Reducer):
        return fuse
    leaves = jax.tree.leaves(fuse)
    return as_reducer(fuse) if leaves and all(isinstance(leaf, Reducer) for leaf in leaves) else fuse


class AxisBoundary(eqx.Module):
    """What happens at the edge of one axis, after the function that is mapped over it.

    For each element `v = tap(fn(x))`, then `sink(v)`. The axis yields `fuse(stack of v)` if there is a fuse; else
    `None` if there is a sink; else the stack. To keep a value and record it, use a tap.

    All fields are static: a boundary has no leaves, and a jitted function that takes one is not traced again for
    another boundary of the same callables.

    Args:
        fuse: `Fuse`, or None; or a `xtrax.tiling.reducers.Reducer` (or a pytree of them, a prefix of the output), which
            takes the outputs chunk by chunk, so that they are never stacked.
        tap: `Tap` or `HostTap`, or None.
        sink: `Sink` or `HostSink`, or None.

    Raises:
        TypeError: If one of them is neither None nor callable, if its `ordered` or `batchable` is not a bool, or if it
            cannot be hashed (an `eqx.Module` that holds arrays, for instance), since static fields are compared and
            hashed by `jax.jit`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import AxisBoundary
        >>> jax.tree.leaves(AxisBoundary(fuse=jnp.mean))
        []
    """

    fuse: Fuse | BoundaryCallable | Reducer | None = eqx.field(static=True, default=None, converter=_combined)
    tap: Tap | BoundaryCallable | None = eqx.field(static=True, default=None)
    sink: Sink | BoundaryCallable | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        """Refuse what cannot be called, compared and hashed."""
        for role in ("fuse", "tap", "sink"):
            value = getattr(self, role)
            if value is None:
                continue
            streamed = role == "fuse" and isinstance(value, Reducer)
            if isinstance(value, type) or not (streamed or callable(value)):
                raise TypeError(
                    f"AxisBoundary: {role} must be a callable of one argument or None; found {value!r}. "
                    + ("Pass an instance of the class." if isinstance(value, type) else "Pass a function.")
                )
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"AxisBoundary: {role} must be hashable, because it is part of what jax.jit compiles; found "
                    f"{type(value).__name__} ({error}). Close over its arrays in a function instead."
                ) from error
            wrong = {"tap": HostSink, "sink": HostTap}.get(role)
            if wrong is not None and isinstance(value, wrong):
                right, other = ("HostTap", "sink") if role == "tap" else ("HostSink", "tap")
                raise TypeError(f"AxisBoundary: {role} is a {wrong.__name__}; make it a {right}, or give it as {other}")
            if role != "fuse":
                for flag in ("ordered", "batchable"):
                    found = getattr(value, flag, False)
                    if not isinstance(found, bool):
                        raise TypeError(f"AxisBoundary: {role}.{flag} must be a bool; found {found!r}")
