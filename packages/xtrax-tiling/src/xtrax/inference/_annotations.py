"""Names of dimensions from jaxtyping annotations, read without importing jaxtyping."""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from xtrax.inference._inputs import Arguments, innermost, signature_of


def dimension_names(fn: Callable[..., Any], arguments: Arguments) -> list[tuple[str, ...]]:
    """For each argument, positional before named, the names of its dimensions; "" where one has none.

    An argument that is no single array, or whose annotation says nothing, gets an empty tuple. So does one whose
    annotation has another number of dimensions: `jax.vmap` passes on the annotations of the function of one element.

    Raises:
        ValueError: a name that stands for two sizes.
    """
    signature = signature_of(fn)
    if signature is None:
        return [()] * len(arguments.labelled())
    parameters = _parameters(signature, arguments)
    hints = _hints(fn, parameters)
    names: list[tuple[str, ...]] = []
    sizes: dict[str, tuple[int, str]] = {}
    for parameter, (_, value) in zip(parameters, arguments.labelled(), strict=True):
        dims = _dims(hints.get(parameter.name)) if hasattr(value, "shape") else None
        if dims is None or len(dims) != len(value.shape):
            names.append(())
            continue
        words = tuple(_word(dim) for dim in dims)
        for word, size in zip(words, value.shape, strict=True):
            known, where = sizes.setdefault(word, (size, parameter.name))
            if word and known != size:
                raise ValueError(
                    f"dimension {word!r} is {known} in argument {where!r} and {size} in argument {parameter.name!r}; "
                    "a name stands for one size."
                )
        names.append(words)
    return names


def _parameters(signature: inspect.Signature, arguments: Arguments) -> list[inspect.Parameter]:
    """The parameter that each argument goes to."""
    positional: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional += [parameter] * (len(arguments.args) - len(positional))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(parameter)
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    named = [signature.parameters[key] if key in signature.parameters else rest[0] for key in arguments.kwargs]
    return positional[: len(arguments.args)] + named


def _hints(fn: Callable[..., Any], parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """The annotations of the parameters, evaluated where they are strings and that can be done."""
    hints = {p.name: p.annotation for p in parameters if not isinstance(p.annotation, str)}
    if len(hints) < len({p.name for p in parameters}):
        try:
            evaluated = typing.get_type_hints(innermost(fn))
        except NameError:  # a name that only type checkers import; then nothing is known about dimensions
            return hints
        hints = evaluated | hints
    return hints


def _dims(annotation: Any) -> list[str] | None:
    """The words of a jaxtyping annotation, or of the first one in a union; None if there are none or any number."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        found = (_dims(member) for member in typing.get_args(annotation))
        return next((dims for dims in found if dims is not None), None)
    text = getattr(annotation, "dim_str", None)
    if not isinstance(text, str):
        return None
    words = text.split()
    return None if any(word.startswith("*") or "..." in word for word in words) else words


def _word(dim: str) -> str:
    """The name of a dimension; "" for a number, an expression, or one that may differ (`_x`, `#x`, `?x`)."""
    name = dim.split("=")[0]
    return name if name.isidentifier() and not name.startswith("_") else ""
