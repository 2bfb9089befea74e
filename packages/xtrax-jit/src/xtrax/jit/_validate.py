"""Checks of the wrappers' arguments, made when a function is wrapped."""

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xtrax.jit._naming import function_name, signature_of

_DONATE = ("none", "all", "all-except-first", "warn", "warn-except-first")


def check_function(function: Any) -> None:
    """Refuse what cannot be traced.

    Raises:
        TypeError: If it is not callable, or is a generator function.
    """
    if not callable(function):
        raise TypeError(
            f"function must be callable, got {function!r} of type {_type(function)}. As a decorator with arguments "
            "write `@functools.partial(bounded_jit, max_traces=1)`."
        )
    if inspect.isgeneratorfunction(function):
        raise TypeError(
            f"function must return arrays, but {function_name(function)} is a generator function, which cannot be "
            "traced. Return a tuple, or wrap the function that makes one item."
        )


def check_max_traces(max_traces: Any) -> int:
    """Refuse a budget that is not a count.

    Raises:
        TypeError: If it is not an integer; a bool is none.
        ValueError: If it is negative.
    """
    if not _is_integer(max_traces):
        raise TypeError(f"max_traces must be an integer, got {max_traces!r} of type {_type(max_traces)}.")
    if max_traces < 0:
        raise ValueError(f"max_traces must be 0 or more, got {max_traces}; 0 permits no trace at all.")
    return int(max_traces)


def check_axis_size(axis_size: Any) -> int | None:
    """Refuse a batch size that is not a positive integer or None.

    Raises:
        TypeError: If it is not an integer or None; a bool is no integer.
        ValueError: If it is not positive.
    """
    if axis_size is None:
        return None
    if not _is_integer(axis_size):
        raise TypeError(f"axis_size must be an integer or None, got {axis_size!r} of type {_type(axis_size)}.")
    if axis_size <= 0:
        raise ValueError(
            f"axis_size must be positive, got {axis_size}; leave it out to take it from the mapped arguments."
        )
    return int(axis_size)


def check_argnames(
    function: Callable[..., Any], static_argnames: Any, donate_argnames: Any
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Refuse argument names that JAX would only trip over at a call, or would never use.

    Raises:
        TypeError: If one of the two is not a sequence of strings.
        ValueError: If a name is empty, is there twice, is in both, or is not a parameter of the function.
    """
    allowed = _parameter_names(function)
    for argument, names in (("static_argnames", static_argnames), ("donate_argnames", donate_argnames)):
        _check_names(argument, names)
        for name in names:
            if allowed is not None and name not in allowed:
                raise ValueError(
                    f"{argument} has {name!r}, which is not a parameter of {function_name(function)}. "
                    f"Its parameters are: {', '.join(allowed) or 'none'}."
                )
    if both := [name for name in static_argnames if name in donate_argnames]:
        raise ValueError(
            f"static_argnames and donate_argnames both have {both[0]!r}. A static value has no buffer to donate: "
            "take the name out of one of them."
        )
    return tuple(static_argnames), tuple(donate_argnames)


def check_mesh(mesh: Any) -> None:
    """Refuse what is not a mesh of devices or None.

    Raises:
        TypeError: If it is neither a `jax.sharding.Mesh` nor None.
        ValueError: If it has no devices.
    """
    if mesh is None:
        return
    if not isinstance(mesh, jax.sharding.Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or None, got {mesh!r} of type {_type(mesh)}. "
            "Make one with jax.make_mesh(axis_shapes, axis_names)."
        )
    if mesh.empty:
        raise ValueError(
            "mesh must have devices, got an empty one. Make one with jax.make_mesh(axis_shapes, axis_names), or leave "
            "mesh=None to use the ambient mesh."
        )


def check_donate(donate: Any) -> None:
    """Refuse what is not one of Equinox's ways to donate.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is another string.
    """
    if not isinstance(donate, str):
        raise TypeError(f"donate must be a string, got {donate!r} of type {_type(donate)}; one of {_DONATE}.")
    if donate not in _DONATE:
        raise ValueError(f"donate must be one of {_DONATE}, got {donate!r}.")


def _check_names(argument: str, names: Any) -> None:
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a sequence of strings, got the string {names!r}: write ({names!r},).")
    if not isinstance(names, Sequence):
        raise TypeError(
            f"{argument} must be a sequence of strings, got {names!r} of type {_type(names)}: use a tuple or a list."
        )
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise TypeError(f"{argument}[{i}] must be a string, got {name!r} of type {_type(name)}.")
        if not name:
            raise ValueError(f"{argument}[{i}] is an empty string: give the name of a parameter, or leave it out.")
        if name in names[:i]:
            raise ValueError(f"{argument} has {name!r} twice: name every parameter once.")


def _parameter_names(function: Callable[..., Any]) -> list[str] | None:
    """Names that the function's arguments can have; None when they can be any or are not known."""
    signature = signature_of(function)
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind != p.VAR_POSITIONAL]


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _type(value: Any) -> str:
    return type(value).__name__
