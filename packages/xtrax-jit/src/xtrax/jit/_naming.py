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


def _named(function: Any) -> Any:
    """What has the name: the function inside a partial, the class of a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__name__") else type(function)
