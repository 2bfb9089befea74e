"""The wrapper over `equinox.filter_jit`."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from xtrax.jit._budget import TraceLog
from xtrax.jit._naming import function_name
from xtrax.jit._types import BoundedFunction
from xtrax.jit._validate import check_donate, check_function, check_max_traces, check_mesh
from xtrax.jit._wrapper import within_mesh

P = ParamSpec("P")
R = TypeVar("R")


def filter_bounded_jit(
    function: Callable[P, R],
    *,
    max_traces: int,
    donate: str = "none",
    mesh: jax.sharding.Mesh | None = None,
) -> BoundedFunction[P, R]:
    """`equinox.filter_jit` with an exact budget of traces.

    Arrays are traced and everything else is static, in the arguments, in the result, and in `function` itself when it
    is an `equinox.Module`. Arguments passed by keyword are first put in their position, so the
    call form makes no difference. Needs Equinox, which `xtrax-jit[equinox]` installs.

    `.lower` gives Equinox's lowered program, whose compiled form is called like the function. `.trace` gives a
    `jax.stages.Traced` over the arrays alone. `.clear_cache` makes the next call trace again; what was compiled
    before is freed by `equinox.clear_caches`.

    Args:
        function: Function to compile; its signature must be known to `inspect.signature`.
        max_traces: How many traces are permitted, as for `bounded_jit`.
        donate: Which arrays' buffers the result may take over, as for `equinox.filter_jit`: `"none"`, `"all"`,
            `"all-except-first"`, `"warn"` or `"warn-except-first"`.
        mesh: Mesh to enter around every call, as for `bounded_jit`.

    Returns:
        The compiled function, with the name, docstring and signature of `function`, and with `.lower`, `.trace`,
            `.eval_shape` and `.clear_cache`.

    Raises:
        TypeError: If `function` is not callable or is a generator function, `max_traces` is not an integer (a bool is
            none), `donate` is not a string, or `mesh` is neither a `jax.sharding.Mesh` nor None.
        ValueError: If `max_traces` is negative, `donate` is not one of the five, or `mesh` is empty.
        ImportError: If Equinox is not installed.
        TraceBudgetExceededError: At a call that needs one trace more; it says what changed.

    Examples:
        >>> import equinox as eqx
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from xtrax.jit import explain_retrace, filter_bounded_jit
        >>> def predict(model, x):
        ...     return jax.vmap(model)(x)
        >>> predict = filter_bounded_jit(predict, max_traces=1)
        >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        >>> predict(model, jnp.ones((5, 3))).shape
        (5, 2)
        >>> print(explain_retrace(predict)[0])
        predict(model.weight: float32[2,3], model.bias: float32[2], x: float32[5,3])
    """
    check_function(function)
    log = TraceLog(function_name(function), check_max_traces(max_traces))
    check_donate(donate)
    check_mesh(mesh)
    try:
        # Equinox is an optional extra, and importing xtrax.jit must not need it or wait for it.
        from xtrax.jit._equinox import filter_jit
    except ModuleNotFoundError as error:
        if error.name != "equinox":
            raise
        raise ImportError(
            "filter_bounded_jit needs Equinox, which is not installed: install xtrax-jit with its extra, "
            "`xtrax-jit[equinox]`, or run `pip install equinox`. bounded_jit works without it.",
            name="equinox",
        ) from error
    compiled = filter_jit(function, log, donate)
    return compiled if mesh is None else within_mesh(compiled, mesh, function, log)
