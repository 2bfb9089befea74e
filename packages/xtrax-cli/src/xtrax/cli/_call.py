"""A function and the shapes of its arguments, from a command line, to what jax can trace."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from xtrax.cli._errors import CLIError, UsageError, tell
from xtrax.cli._imports import load_fn, near
from xtrax.cli._shapes import Shape, Shapes

_WIDE = {"float64", "int64", "uint64", "complex128"}


@dataclass(frozen=True)
class Call:
    """A function with abstract arguments.

    Attributes:
        path: `module:symbol`.
        fn: The function.
        args: What it is called with by position: `jax.ShapeDtypeStruct`, or dicts of them.
        kwargs: What it is called with by name.
        names: The names of `args`.
    """

    path: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]

    def program(self) -> Callable[..., Any]:
        """The function in a form that `jax.jit` takes: modules with arrays are not hashable."""

        def program(*args: Any, **kwargs: Any) -> Any:
            return self.fn(*args, **kwargs)

        program.__name__ = self.path.rpartition(":")[2].rpartition(".")[2]
        return program

    def output(self) -> Any:
        """What the function returns, abstractly.

        Raises:
            CLIError: If it raises an error for these shapes.
        """
        return self.trace(lambda: jax.eval_shape(self.program(), *self.args, **self.kwargs))

    def trace(self, trace: Callable[[], Any]) -> Any:
        """The result of `trace`, which runs the function abstractly.

        Raises:
            CLIError: If it raises an error.
        """
        try:
            return trace()
        except CLIError:
            raise
        except (Exception, SystemExit) as error:
            raise CLIError(f"{self.path} fails for these shapes: {tell(error)}") from error


def abstract_call(path: str, shapes: Shapes) -> Call:
    """Import a function, and bind shapes to its arguments by name.

    Args:
        path: `module:symbol`.
        shapes: The shapes. Each name is that of an argument.

    Raises:
        CLIImportError: If the function cannot be imported.
        CLIError: If the function takes other arguments, or a dtype of 64 bits is switched off.
    """
    fn = load_fn(path)
    if isinstance(fn, type):
        raise CLIError(f"{path} is a class; name a function of arrays, or an instance that can be called")
    _check_width(shapes)
    given = {name: _abstract(shape) for name, shape in shapes.items()}
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a built-in that does not tell
        return Call(path, fn, tuple(given.values()), {}, tuple(given))
    return _bind(path, fn, list(parameters), given)


def _bind(path: str, fn: Callable[..., Any], parameters: list[inspect.Parameter], given: dict[str, Any]) -> Call:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    known = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names: list[str] = []
    for parameter in positional:
        if parameter.name not in given:
            break
        names.append(parameter.name)
    rest = [name for name in given if name not in names]
    if inspect.Parameter.VAR_POSITIONAL in kinds and len(names) == len(positional):
        names += [name for name in rest if name not in known]
        rest = [name for name in rest if name in known]
    takes = {p.name for p in by_name}
    for name in rest:
        if name not in takes and (inspect.Parameter.VAR_KEYWORD not in kinds or name in known):
            hint = near(name, known, "") or f"; it takes {', '.join(known) or 'no arguments'}"
            raise CLIError(f"{path} has no argument {name!r} to give a shape to{hint}")
    missing = [p.name for p in parameters if p.name in known and p.default is p.empty and p.name not in given]
    if missing:
        raise CLIError(f"{path} needs {', '.join(missing)} too; add the shape, such as {missing[0]}=(4,3)f32")
    args = tuple(given[name] for name in names)
    return Call(path, fn, args, {name: given[name] for name in rest}, tuple(names))


def _check_width(shapes: Shapes) -> None:
    """Refuse 64 bits where jax would quietly take 32: what is shown would not be what was asked for."""
    if jax.config.jax_enable_x64:
        return
    for name, shape in shapes.items():
        if not isinstance(shape, Shape):
            _check_width(shape)
        elif shape.dtype in _WIDE:
            raise UsageError(
                f"{name} is {shape.dtype}, but jax has 64 bits switched off; set JAX_ENABLE_X64=1, "
                f"or write {name} with 32 bits"
            )


def _abstract(shape: Shape | Shapes) -> Any:
    if not isinstance(shape, Shape):
        return {name: _abstract(inner) for name, inner in shape.items()}
    if shape.dtype == "key":
        return jax.ShapeDtypeStruct(shape.shape, jax.eval_shape(jax.random.key, 0).dtype)
    return jax.ShapeDtypeStruct(shape.shape, jnp.dtype(shape.dtype))
