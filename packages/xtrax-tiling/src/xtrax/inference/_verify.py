"""Hold what a function returns against what its abstract evaluation says."""

from collections.abc import Callable
from typing import Any

import jax

from xtrax.inference._errors import StructureMismatchError
from xtrax.inference._inputs import abstract_arguments, abstract_result, bind, name_of
from xtrax.tiling._split import type_text


def verify_structure(fn: Callable[..., Any], abstract_inputs: Any, concrete_inputs: Any) -> None:
    """Run a function, and refuse a result of another structure than its abstract evaluation gives.

    The function runs outside `jax.jit`, where Python sees values. That is where what is abstract and what is real can
    differ: in branches on values or on types, in numpy code, or because the concrete inputs have other shapes.

    Args:
        fn: the function.
        abstract_inputs: as in `infer_bundle`.
        concrete_inputs: the same with arrays and numbers in place of shapes.

    Raises:
        TypeError: as in `infer_bundle`.
        StructureMismatchError: a leaf is missing, is new, or differs in shape or dtype, or a container differs. The
            message names every such leaf, and every input that is not as announced.

    >>> import jax.numpy as jnp
    >>> verify_structure(jnp.sin, [((3,), "float32")], [jnp.ones(3)])
    """
    abstract = abstract_arguments(fn, abstract_inputs)
    concrete = bind(fn, "concrete_inputs", concrete_inputs)
    differences = _differences("output", abstract_result(fn, abstract), concrete.call(fn))
    if not differences:
        return
    for (label, expected), (_, found) in zip(abstract.labelled(), concrete.labelled(), strict=False):
        differences += _differences(f"input{label}", expected, found)
    raise StructureMismatchError(
        f"{name_of(fn)} does not return what its abstract evaluation says:\n" + "\n".join(f"- {d}" for d in differences)
    )


def _differences(what: str, expected: Any, found: Any) -> list[str]:
    """A sentence for each leaf that differs; one for the containers if no leaf does."""
    wanted, wanted_def = jax.tree_util.tree_flatten_with_path(expected)
    leaves, found_def = jax.tree_util.tree_flatten_with_path(found)
    announced = {jax.tree_util.keystr(path): type_text(leaf) for path, leaf in wanted}
    real = {jax.tree_util.keystr(path): _describe_value(leaf) for path, leaf in leaves}
    sentences: list[str] = []
    for path in announced | real:
        if path not in real:
            sentences.append(f"{what}{path} is announced as {announced[path]}, but is not there")
        elif path not in announced:
            sentences.append(f"{what}{path} is {real[path]}, but is not announced")
        elif announced[path] != real[path]:
            sentences.append(f"{what}{path} is announced as {announced[path]}, but is {real[path]}")
    if not sentences and wanted_def != found_def:
        sentences.append(f"{what} is announced as {wanted_def}, but is {found_def}")
    return sentences


def _describe_value(leaf: Any) -> str:
    try:
        return type_text(jax.typeof(leaf))
    except TypeError:
        return f"{leaf!r} ({type(leaf).__name__}), which is no array"
