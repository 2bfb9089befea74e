"""Which jaxprs compute the same, though they were traced anew, so that they need not be compiled anew."""

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

# Their other parameters are rules of derivatives, which are functions made anew at each trace.
_EVALUATED_BY_JAXPR = {"custom_jvp_call": ("call_jaxpr",), "custom_vjp_call": ("call_jaxpr",)}


def content(jaxpr: ClosedJaxpr | Jaxpr, *, rules: bool) -> Hashable:
    """What two jaxprs have in common if they compute the same, by the same operations.

    Names of variables, and where a function was written, do not matter. Arrays that a jaxpr holds, and functions that
    its operations call, count by identity, so that jaxprs that are not the same are never taken to be so; they may be
    told apart although they are.

    Args:
        jaxpr: what computes.
        rules: whether its derivatives must be the same too, where there are rules for them.

    Raises:
        TypeError: there is a parameter that cannot be hashed.
    """
    body = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}

    def number(var: Any) -> Hashable:
        if isinstance(var, Literal):
            return "literal", var.aval, _value(var.val, rules)
        return numbers.setdefault(var, len(numbers))

    def defined(variables: Any) -> Hashable:
        return tuple((number(var), var.aval) for var in variables)

    arguments = defined(body.constvars), defined(body.invars)
    eqns = tuple(
        (eqn.primitive, eqn.ctx, tuple(map(number, eqn.invars)), _params(eqn, rules), defined(eqn.outvars))
        for eqn in body.eqns
    )  # fmt: skip
    held = tuple(_value(const, rules) for const in getattr(jaxpr, "consts", ()))
    found = arguments, eqns, tuple(map(number, body.outvars)), held
    hash(found)
    return found


def _params(eqn: Any, rules: bool) -> Hashable:
    names = tuple(sorted(eqn.params))
    if not rules:
        names = _EVALUATED_BY_JAXPR.get(eqn.primitive.name, names)
    return tuple((name, _value(eqn.params[name], rules)) for name in names)


def _value(value: Any, rules: bool) -> Hashable:
    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        return content(value, rules=rules)
    if isinstance(value, Mapping):
        return tuple(
            sorted(((repr(key), _value(entry, rules)) for key, entry in value.items()), key=lambda pair: pair[0])
        )
    if type(value) in (tuple, list):
        return type(value), tuple(_value(entry, rules) for entry in value)
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype != object:
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, jax.Array):
        return _Itself(value)
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but not the same.
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def compiled_once(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)`, compiled if it is not part of a trace, and once for all functions that compute the same."""
    traced, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    body, consts = getattr(traced, "jaxpr", traced), list(traced.consts)
    try:
        known = _known(content(ClosedJaxpr(body, []), rules=True))
    except TypeError:
        known = []
    if not known:
        known.append(jax.jit(lambda consts, leaves: jaxpr_as_fun(ClosedJaxpr(body, consts))(*leaves), inline=True))
    return jax.tree.unflatten(jax.tree.structure(shape), known[0](consts, jax.tree.leaves(args)))


@functools.lru_cache(maxsize=256)
def _known(key: Hashable) -> list[Any]:
    """An empty list, and at the next call what has been put into it since."""
    del key
    return []


class _Itself:
    """An object that equals itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)
