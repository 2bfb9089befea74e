"""The taps and sinks of an axis, element by element."""

from collections.abc import Callable
from typing import Any

import jax

from xtrax.stages._errors import ExecutorError
from xtrax.stages.boundaries import AxisBoundary, BoundaryCallable


def has_effects(boundary: AxisBoundary | None) -> bool:
    """Whether a boundary does anything inside the iteration."""
    return boundary is not None and (boundary.tap is not None or boundary.sink is not None)


def is_ordered(effect: Any) -> bool:
    """Whether the effects of a tap or sink must occur in the order of the elements."""
    return getattr(effect, "ordered", False)


def is_batchable(effect: Any) -> bool:
    """Whether a tap or sink has a batching rule that keeps the order of its effects."""
    return getattr(effect, "batchable", False)


def emit(boundary: AxisBoundary, value: Any) -> Any:
    """Pass one element through the tap and the sink.

    Returns:
        The element, to be stacked; or None if it leaves the pipeline here.
    """
    if boundary.tap is not None:
        value = _tap(boundary.tap, value)
    if boundary.sink is not None:
        returned = _undifferentiated("sink", boundary.sink)(value)
        if returned is not None:
            raise ExecutorError(
                f"the sink returned {_describe(returned)}, and a Sink returns None. To keep the value, make it a Tap."
            )
    return value if boundary.fuse is not None or boundary.sink is None else None


def emit_lanes(
    boundary: AxisBoundary | None, values: Any, element_of: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Pass the elements of a stack through the tap and the sink, in order.

    Only callables with a batching rule of their own are called under `jax.vmap`; the others see one element at a time,
    so that their callbacks may be ordered.

    Args:
        boundary: What happens at the axis's edge, or None.
        values: Leaves `(n, ...)`.
        element_of: Makes an element of an entry of `values`, when its turn comes.

    Returns:
        The stack of what the tap returned, or None if the elements leave the pipeline.
    """
    if boundary is None or not has_effects(boundary):
        return values
    effects = [effect for effect in (boundary.tap, boundary.sink) if effect is not None]
    over_lanes = jax.vmap if all(map(is_batchable, effects)) else _one_by_one
    return over_lanes(lambda value: emit(boundary, element_of(value)))(values)


def _one_by_one(fn: BoundaryCallable) -> BoundaryCallable:
    return lambda values: jax.lax.map(fn, values)


def _tap(tap: BoundaryCallable, value: Any) -> Any:
    returned = _undifferentiated("tap", tap)(value)
    given, found = _describe(value), _describe(returned)
    if given != found:
        raise ExecutorError(
            f"the tap was given {given} and returned {found}. A Tap returns what it was given: the same tree, shapes "
            "and dtypes. Change values in the mapped function."
        )
    return returned


def _describe(tree: Any) -> str:
    leaves, structure = jax.tree.flatten(tree)
    arrays = (f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}" for x in leaves)
    return str(jax.tree.unflatten(structure, arrays))


def _undifferentiated(role: str, effect: BoundaryCallable) -> BoundaryCallable:
    """The tap or sink, refusing to be differentiated if it has effects.

    JAX drops the effects of a loop that is differentiated unless their results are used, and says nothing.
    """
    if is_batchable(effect):
        return effect
    guarded = jax.custom_jvp(effect)

    @guarded.defjvp
    def _(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        if jax.make_jaxpr(effect)(*primals).effects:
            raise ExecutorError(
                f"the {role} has side effects and lies in a function that is differentiated, where JAX may drop them "
                f"silently. Differentiate the function without the {role}, and record in a separate forward pass."
            )
        return jax.jvp(effect, primals, tangents)

    return guarded
