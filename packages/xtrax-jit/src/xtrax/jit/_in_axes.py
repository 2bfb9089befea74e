"""The axes of `batched_jit`, held against the arguments of a call."""

from collections.abc import Callable
from typing import Any

import jax

from xtrax.jit._naming import argument_names, function_name, signature_of


def check_axis_count(function: Callable[..., Any], in_axes: Any) -> None:
    """Refuse a tuple with more entries than the function can take arguments by position.

    Raises:
        ValueError: If there are more.
    """
    signature = signature_of(function)
    if signature is None or not isinstance(in_axes, (tuple, list)):
        return
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(in_axes) > len(names) and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        raise ValueError(
            f"in_axes has {_entries(len(in_axes))}, but {function_name(function)} takes {len(names)} by position: "
            f"{', '.join(names) or 'none'}. Give one entry for each; arguments passed by keyword are mapped along "
            "axis 0."
        )


def check_in_axes(function: Callable[..., Any], in_axes: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a tuple that does not fit the arguments, before `jax.vmap` does.

    Raises:
        ValueError: If it has another number of entries than `args`, or the structure of an entry is not that of the
            beginning of its argument.
    """
    if not isinstance(in_axes, (tuple, list)):
        return
    name = function_name(function)
    if len(in_axes) != len(args):
        keywords = f" and {', '.join(sorted(kwargs))} by keyword" if kwargs else ""
        raise ValueError(
            f"{name}: in_axes has {_entries(len(in_axes))}, but the call passes {len(args)} by position{keywords}. "
            "Give one entry for each argument passed by position; those passed by keyword are mapped along axis 0."
        )
    for i, (argument, axes, value) in enumerate(zip(argument_names(function, len(args)), in_axes, args, strict=True)):
        parts = jax.tree.structure(axes, is_leaf=lambda node: node is None)
        if mismatch := _mismatch("", parts, jax.tree.structure(value)):
            path, found, there = mismatch
            raise ValueError(
                f"{name}: in_axes[{i}]{path} is {found}, but {argument}{path} is {there}. Give in_axes[{i}]{path} an "
                f"int or None for all of {argument}{path}, or the structure that it has."
            )


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"


def _mismatch(path: str, prefix: Any, tree: Any) -> tuple[str, str, str] | None:
    """Where two structures first differ, not counting what lies below a leaf of `prefix`, and what each has there."""
    if (node := prefix.node_data()) is None:
        return None
    children, others = prefix.children(), tree.children()
    if node != tree.node_data() or len(children) != len(others):
        return path, _in_words(prefix), _in_words(tree)
    kind, metadata = node
    for i, (child, other) in enumerate(zip(children, others, strict=True)):
        key = jax.tree_util.DictKey(metadata[i]) if kind is dict else jax.tree_util.SequenceKey(i)
        if found := _mismatch(path + jax.tree_util.keystr((key,)), child, other):
            return found
    return None


def _in_words(structure: Any) -> str:
    if (node := structure.node_data()) is None:
        return "a single leaf"
    kind, metadata = node
    if kind is type(None):
        return "None"
    return f"a dict with the keys {metadata}" if kind is dict else f"a {kind.__name__} of {len(structure.children())}"
