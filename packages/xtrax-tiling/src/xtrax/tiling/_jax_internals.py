"""Questions asked of jaxprs: what a result depends on, and the value of a few results alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun


def trace(fn: Callable[..., Any], types: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of `fn` for arguments of these types."""
    return jax.make_jaxpr(fn)(*types)


def depends(jaxpr: ClosedJaxpr, on: Sequence[bool]) -> list[bool]:
    """For each result whether it may depend on one of the arguments that `on` flags."""
    body = jaxpr.jaxpr
    tainted = {var for var, flag in zip(body.invars, on, strict=True) if flag}
    for eqn in body.eqns:
        if any(not isinstance(var, Literal) and var in tainted for var in eqn.invars):
            tainted.update(eqn.outvars)
    return [not isinstance(var, Literal) and var in tainted for var in body.outvars]


def evaluate(jaxpr: ClosedJaxpr, args: Sequence[Any], outs: Sequence[int], *, effects: bool = True) -> list[Any]:
    """Some of the results, from what they need alone; arguments that they do not need may be None.

    With `effects`, the side effects of the others occur too.
    """
    body = jaxpr.jaxpr
    results = [body.outvars[i] for i in outs]
    needed = {var for var in results if not isinstance(var, Literal)}
    eqns = []
    for eqn in reversed(body.eqns):
        if (effects and eqn.effects) or not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed.update(var for var in eqn.invars if not isinstance(var, Literal))
    part = body.replace(outvars=results, eqns=eqns[::-1], debug_info=body.debug_info.with_unknown_names())
    return list(jaxpr_as_fun(ClosedJaxpr(part, jaxpr.consts))(*args))


def side_effects(jaxpr: ClosedJaxpr) -> list[Any]:
    """The effects of a jaxpr but for those that only say which named axes it uses."""
    return [effect for effect in jaxpr.effects if not _is_axis_use(effect)]


def is_debugging(effect: Any) -> bool:
    """Whether an effect is that of an unordered `jax.debug.print` or `jax.debug.callback`."""
    return type(effect).__name__ == "DebugEffect"  # the class is not public


def named_axes(jaxpr: ClosedJaxpr) -> set[Any]:
    """The names of the mapped axes that collectives in a jaxpr use."""
    return {getattr(effect, "name", None) for effect in jaxpr.effects if _is_axis_use(effect)}


def _is_axis_use(effect: Any) -> bool:
    return type(effect).__name__ == "NamedAxisEffect"  # the class is not public


def without_tangent(value: Any) -> bool:
    """Whether a number, an array or a type is of integers, keys and the like, whose tangents hold no values."""
    dtype = value.dtype if hasattr(value, "dtype") else jax.typeof(value).dtype
    return not jnp.issubdtype(dtype, jnp.inexact)


def vary_like(x: Any, others: Sequence[Any]) -> Any:
    """`x` typed as varying over the devices that any of `others` varies over; only differs inside `shard_map`."""
    wanted = frozenset[Any]().union(*(_varying(other) for other in others))
    missing = tuple(wanted - _varying(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: Any) -> frozenset[Any]:
    kind = (x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)).manual_axis_type
    return kind.varying if kind else frozenset()
