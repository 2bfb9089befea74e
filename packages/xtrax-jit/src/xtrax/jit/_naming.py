"""Names and signatures of functions, partials, bound methods and callable objects."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def present_as(wrapper: Callable[..., Any], function: Callable[..., Any]) -> None:
    """Give `wrapper` the name, docstring and signature of `function`."""
    functools.update_wrapper(wrapper, _named(function), updated=())
    vars(wrapper)["__wrapped__"] = function  # the signature is that of the partial or object, not of what it holds


def function_name(function: Callable[..., Any]) -> str:
    """The name of a function with its class, but without the functions that it was defined in."""
    named = _named(function)
    return getattr(named, "__qualname__", named.__name__).rpartition("<locals>.")[2]


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function; None for the builtins that have none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def argument_names(function: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Names of the first `count` arguments passed by position; those that `*rest` takes are `rest[0]`, `rest[1]`."""
    signature = signature_of(function)
    parameters = signature.parameters.values() if signature else ()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")
    return (*names[:count], *(f"{rest}[{i}]" for i in range(count - len(names))))


def _named(function: Any) -> Any:
    """What has the name: the function inside a partial, the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function)
