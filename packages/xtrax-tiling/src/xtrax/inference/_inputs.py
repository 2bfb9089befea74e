"""Abstract inputs: what a caller may write, and how it becomes the arguments of a function."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from xtrax.tiling._check import check_int


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call."""

    args: list[Any]
    kwargs: dict[str, Any]

    def labelled(self) -> list[tuple[str, Any]]:
        """Each argument with what it is called in messages."""
        return [(f"[{i}]", arg) for i, arg in enumerate(self.args)] + [(f"[{k!r}]", v) for k, v in self.kwargs.items()]

    def call(self, fn: Callable[..., Any]) -> Any:
        """`fn` of them."""
        return fn(*self.args, **self.kwargs)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `fn`; None for the builtins that have none."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return None


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function that was written: what partials, methods and wrappers are about, or the `__call__` of an object."""
    for attribute in ("func", "__func__", "__wrapped__"):
        if callable(inner := getattr(fn, attribute, None)):
            return innermost(inner)
    return fn if inspect.isroutine(fn) else type(fn).__call__


def bind(fn: Callable[..., Any], name: str, inputs: Any) -> Arguments:
    """A list or tuple as positional arguments, a dict of parameter names by name, anything else as the only argument.

    Raises:
        TypeError: `fn` does not take as many.
    """
    signature = signature_of(fn)
    if isinstance(inputs, Mapping) and signature is not None:
        try:
            signature.bind(**inputs)
        except TypeError:
            pass  # not the names of its parameters, so one argument that is a dict
        else:
            order = dict.fromkeys([*(key for key in signature.parameters if key in inputs), *inputs])
            return Arguments([], {key: inputs[key] for key in order})
    several = type(inputs) in (list, tuple) and not _is_shape_and_dtype(inputs)
    arguments = Arguments(list(inputs) if several else [inputs], {})
    if signature is not None:
        try:
            signature.bind(*arguments.args)
        except TypeError as error:
            raise TypeError(
                f"{name} gives {len(arguments.args)} arguments, but {name_of(fn)} takes {signature}: {error}; a list "
                "or tuple holds one entry for each argument, a dict their names."
            ) from None
    return arguments


def abstract_arguments(fn: Callable[..., Any], inputs: Any) -> Arguments:
    """`inputs`, checked, with every leaf as a `jax.ShapeDtypeStruct`."""
    if not callable(fn):
        raise TypeError(f"fn must be callable, but is {fn!r} ({type(fn).__name__}).")
    if inputs is None:
        raise TypeError("abstract_inputs is None; pass a list with one entry for each argument, [] for none.")
    arguments = bind(fn, "abstract_inputs", inputs)
    args = [_abstract(f"abstract_inputs[{i}]", arg) for i, arg in enumerate(arguments.args)]
    return Arguments(args, {key: _abstract(f"abstract_inputs[{key!r}]", v) for key, v in arguments.kwargs.items()})


def abstract_result(fn: Callable[..., Any], arguments: Arguments) -> Any:
    """What `fn` returns for abstract arguments, each leaf with its shape and dtype."""
    # A callable that holds arrays is not hashable, a lambda around it is.
    return jax.eval_shape(lambda args, kwargs: fn(*args, **kwargs), arguments.args, arguments.kwargs)


def name_of(fn: Callable[..., Any]) -> str:
    """What a callable is called in messages."""
    return getattr(fn, "__name__", type(fn).__name__)


def _abstract(label: str, tree: Any) -> Any:
    def convert(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        where = label + jax.tree_util.keystr(path)
        if _is_shape_and_dtype(leaf):
            shape = tuple(check_int(f"shape of {where}", size, 0) for size in leaf[0])
            try:
                return jax.ShapeDtypeStruct(shape, leaf[1])
            except TypeError as error:
                raise TypeError(f"dtype of {where} must be a dtype such as 'float32', but is {leaf[1]!r}.") from error
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"{where} must be a jax.ShapeDtypeStruct, an array or (shape, dtype), but is {leaf!r} "
                f"({type(leaf).__name__})."
            )
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(convert, tree, is_leaf=_is_shape_and_dtype)


def _is_shape_and_dtype(node: Any) -> bool:
    """Whether it is a pair such as `((4, 3), "float32")`, whose parts no pytree of arrays can hold."""
    if type(node) is not tuple or len(node) != 2 or type(node[0]) not in (tuple, list):
        return False
    dtype = node[1]
    return isinstance(dtype, (str, type, np.dtype)) or jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
