"""The wrappers over `jax.jit`."""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

from xtrax.jit._budget import Counter, TraceLog
from xtrax.jit._in_axes import check_axis_count, check_in_axes
from xtrax.jit._naming import function_name, present_as
from xtrax.jit._signature import TraceSignature
from xtrax.jit._types import BoundedFunction
from xtrax.jit._validate import check_argnames, check_axis_size, check_function, check_max_traces, check_mesh
from xtrax.jit._wrapper import attach, log_of, within_mesh

P = ParamSpec("P")
R = TypeVar("R")


def bounded_jit(
    function: Callable[P, R],
    *,
    max_traces: int,
    static_argnames: Sequence[str] = (),
    donate_argnames: Sequence[str] = (),
    mesh: jax.sharding.Mesh | None = None,
) -> BoundedFunction[P, R]:
    """`jax.jit` with an exact budget of traces.

    Each wrapper has its own count, kept inside the traced function: what JAX answers from its cache costs nothing and
    is not counted, a trace that raises is not counted, and nothing is counted under `jax.disable_jit`. Without a mesh
    the result is the function that `jax.jit` returns, so a cached call costs what it costs there. It can be called in
    threads, and under `jax.grad`, `jax.vmap` or another `jax.jit`.

    Arguments are static or donated by name alone; there are no `static_argnums` and `donate_argnums`. A name is checked
    against the signature when the function is wrapped, and goes on meaning the same argument when a parameter is added
    before it or a caller passes it by keyword.

    Args:
        function: Function to compile: any callable that `jax.jit` takes, also a bound method, a `functools.partial`
            or a callable object.
        max_traces: How many traces are permitted, 0 or more. One trace serves all calls whose arguments have the same
            shapes, dtypes, static values and form.
        static_argnames: Names of arguments whose values are static: hashable Python values, traced once per value.
            A sequence, `("n",)` for one name: a lone string is refused.
        donate_argnames: Names of arguments whose buffers the result may take over, a sequence too.
        mesh: Mesh to enter around every call with `jax.set_mesh`; None leaves the ambient mesh. Inside another
            transformation, where JAX does not let a mesh be entered, the ambient mesh must already be this one.

    Returns:
        The compiled function, with the name, docstring and signature of `function`, and with `.lower`, `.trace`,
            `.eval_shape` and `.clear_cache`.

    Raises:
        TypeError: If `function` is not callable or is a generator function, `max_traces` is not an integer (a bool is
            none), `static_argnames` or `donate_argnames` is not a sequence of strings, or `mesh` is neither a
            `jax.sharding.Mesh` nor None.
        ValueError: If `max_traces` is negative, an argument name is empty, duplicated, in both sequences or not a
            parameter of `function`, or `mesh` is empty.
        TraceBudgetExceededError: At a call that needs one trace more; it says what changed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from xtrax.jit import TraceBudgetExceededError, bounded_jit
        >>> def total(batch):
        ...     return batch["x"].sum()
        >>> total = bounded_jit(total, max_traces=1)
        >>> print(total({"x": jnp.ones((32, 7))}))
        224.0
        >>> try:
        ...     total({"x": jnp.ones((31, 7))})
        ... except TraceBudgetExceededError as error:
        ...     print(error)
        total: this call needs a trace beyond the budget of max_traces=1.
        Changed since trace 1 of 1, the one it most resembles:
          batch['x']: shape (32, 7) -> (31, 7)
        Pad inputs to a few fixed shapes, so that calls share a trace.
        If this trace is intended, raise max_traces.
    """
    check_function(function)
    log = TraceLog(function_name(function), check_max_traces(max_traces))
    static, donate = check_argnames(function, static_argnames, donate_argnames)
    check_mesh(mesh)
    return _jit(function, function, log, static, donate, mesh)


def batched_jit(
    function: Callable[..., R],
    *,
    in_axes: int | Sequence[Any] | None = 0,
    out_axes: Any = 0,
    axis_size: int | None = None,
    max_traces: int,
    mesh: jax.sharding.Mesh | None = None,
) -> BoundedFunction[..., R]:
    """`jax.vmap`, then `jax.jit` with an exact budget of traces.

    With arguments sharded over a mesh, XLA partitions the batch over its devices. A batch of another size is another
    trace.

    Args:
        function: Function of one element of the batch.
        in_axes: Axis of each argument that is mapped, as for `jax.vmap`: an int or None for all arguments, or a tuple
            with one entry for each argument passed by position. Arguments passed by keyword are mapped along axis 0.
        out_axes: Axis of each result where the batch goes, as for `jax.vmap`, which checks it.
        axis_size: Size of the batch, positive; None takes it from the mapped arguments.
        max_traces: How many traces are permitted, as for `bounded_jit`.
        mesh: Mesh to enter around every call, as for `bounded_jit`.

    Returns:
        The batched, compiled function, with the name, docstring and signature of `function`, and with `.lower`,
            `.trace`, `.eval_shape` and `.clear_cache`.

    Raises:
        TypeError: If `function` is not callable or is a generator function, `axis_size` is not an integer or None, or
            `max_traces` is not an integer (a bool is none), or `mesh` is neither a `jax.sharding.Mesh` nor None.
        ValueError: If `axis_size` is not positive, `max_traces` is negative, `mesh` is empty, or `in_axes` has more
            entries than `function` has positional parameters. At a call, if the entries do not fit the arguments.
        TraceBudgetExceededError: At a call that needs one trace more; it says what changed.

    Examples:
        >>> import jax.numpy as jnp
        >>> from xtrax.jit import batched_jit
        >>> dot = batched_jit(jnp.dot, in_axes=(0, None), max_traces=1)
        >>> print(dot(jnp.arange(6.0).reshape(3, 2), jnp.array([1.0, 10.0])))
        [10. 32. 54.]
    """
    check_function(function)
    size = check_axis_size(axis_size)
    log = TraceLog(function_name(function), check_max_traces(max_traces))
    check_mesh(mesh)
    check_axis_count(function, in_axes)
    batched = jax.vmap(function, in_axes=in_axes, out_axes=out_axes, axis_size=size)

    def checked(*args: Any, **kwargs: Any) -> R:
        __tracebackhide__ = True
        check_in_axes(function, in_axes, args, kwargs)
        return batched(*args, **kwargs)

    return _jit(checked, function, log, (), (), mesh)


def explain_retrace(wrapped: Callable[..., Any]) -> list[TraceSignature]:
    """The signatures that a function has been traced for, oldest first.

    Args:
        wrapped: What `bounded_jit`, `batched_jit` or `filter_bounded_jit` returned.

    Returns:
        One `TraceSignature` for each trace that was counted.

    Raises:
        TypeError: If `wrapped` is not such a function.

    Examples:
        >>> import jax.numpy as jnp
        >>> from xtrax.jit import bounded_jit, explain_retrace
        >>> def power(x, n):
        ...     return x**n
        >>> power = bounded_jit(power, max_traces=3, static_argnames=("n",))
        >>> _ = power(jnp.ones(3), 2), power(jnp.ones(3), n=3)
        >>> for signature in explain_retrace(power):
        ...     print(signature)
        power(x: float32[3], n: static 2)
        power(x: float32[3], *, n: static 3)
    """
    return log_of(wrapped).signatures()


def _jit(
    run: Callable[..., Any],
    function: Callable[..., Any],
    log: TraceLog,
    static: tuple[str, ...],
    donate: tuple[str, ...],
    mesh: jax.sharding.Mesh | None,
) -> Any:
    counter = Counter(function, log, static)

    def traced(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return counter.run(run, args, kwargs)

    present_as(traced, function)
    jitted = jax.jit(traced, static_argnames=static or None, donate_argnames=donate or None)
    attach(jitted, log)
    return jitted if mesh is None else within_mesh(jitted, mesh, function, log)
