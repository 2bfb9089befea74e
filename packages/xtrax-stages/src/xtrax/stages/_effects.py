"""The taps and sinks of an axis, chunk by chunk or element by element."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xtrax.stages._errors import ExecutorError
from xtrax.stages._host_call import NO_TOKEN, fire_lanes, thread_token
from xtrax.stages._host_record import HostRecord
from xtrax.stages._place import Place
from xtrax.stages.boundaries import AxisBoundary, BoundaryCallable
from xtrax.stages.host import HostSink, HostTap


def has_effects(boundary: AxisBoundary | None) -> bool:
    """Whether a boundary does anything inside the iteration."""
    return bool(_effects(boundary))


def is_ordered(effect: Any) -> bool:
    """Whether the effects of a tap or sink must occur in the order of the elements."""
    return getattr(effect, "ordered", False)


def is_batchable(effect: Any) -> bool:
    """Whether a tap or sink has a batching rule that keeps the order of its effects."""
    return getattr(effect, "batchable", False)


def all_on_host(boundary: AxisBoundary | None) -> bool:
    """Whether all that a boundary does inside the iteration is done by `HostTap` and `HostSink`."""
    return all(isinstance(effect, (HostTap, HostSink)) for effect in _effects(boundary))


def host_records(boundary: AxisBoundary | None) -> list[HostRecord]:
    """The records of the boundary's host functions."""
    return [effect.record for effect in _effects(boundary) if isinstance(effect, (HostTap, HostSink))]


def keeps_values(boundary: AxisBoundary | None) -> bool:
    """Whether the elements stay in the pipeline, to be stacked or reduced."""
    return boundary is None or boundary.fuse is not None or boundary.sink is None


def emit(boundary: AxisBoundary | None, value: Any, place: Place) -> tuple[Any, Any]:
    """Pass one element through the tap and the sink.

    Args:
        boundary: What happens at the axis's edge, or None.
        value: The element.
        place: Where it lies.

    Returns:
        The element, or None if it leaves the pipeline here; and the token of its host effects.
    """
    if boundary is None or not has_effects(boundary):
        return value, NO_TOKEN
    token = NO_TOKEN
    for role, effect in (("tap", boundary.tap), ("sink", boundary.sink)):
        if isinstance(effect, (HostTap, HostSink)):
            rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], value)
            at = jnp.asarray(place.index)[None]
            token |= fire_lanes(effect, rows, at, axes=place.axes, repeats=place.repeats)
            returned = value if isinstance(effect, HostTap) else None
        elif effect is None:
            continue
        else:
            returned = _undifferentiated(role, effect)(value)
        if role == "tap":
            _check_tapped(value, returned)
            value = returned
        elif returned is not None:
            raise ExecutorError(
                f"the sink returned {_describe(returned)}, and a Sink returns None. To keep the value, make it a Tap."
            )
    return value if keeps_values(boundary) else None, token


def emit_lanes(
    boundary: AxisBoundary | None,
    values: Any,
    places: Place,
    element_of: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any]:
    """Pass the elements of a stack through the tap and the sink, in order.

    Host taps and sinks take all of them by one call each. Other callables with a batching rule of their own are called
    under `jax.vmap`; the rest see one element at a time, so that their callbacks may be ordered.

    Args:
        boundary: What happens at the axis's edge, or None.
        values: Leaves `(n, ...)`.
        places: Where they lie, `index` of `(n, d)`.
        element_of: Makes an element of an entry of `values`, when its turn comes; None if the entries are the elements.

    Returns:
        The stack of what the tap returned, or None if the elements leave the pipeline; and the token of the effects.
    """
    if boundary is None or not has_effects(boundary):
        return values, NO_TOKEN
    if element_of is None and all_on_host(boundary):
        token = NO_TOKEN
        for effect in _effects(boundary):
            token |= fire_lanes(effect, values, places.index, axes=places.axes, repeats=places.repeats)
        return values if keeps_values(boundary) else None, token
    over_lanes = jax.vmap if all(map(is_batchable, _effects(boundary))) else _one_by_one

    def of_element(entry: tuple[Any, Any]) -> tuple[Any, Any]:
        value, index = entry
        value = value if element_of is None else element_of(value)
        return emit(boundary, value, Place(index, places.axes, places.repeats))

    values, tokens = over_lanes(of_element)((values, places.index))
    return values, jnp.max(tokens, initial=NO_TOKEN)


def thread_result(value: Any, token: Any) -> Any:
    """The value, tied to the token if there is one."""
    return value if token is NO_TOKEN else thread_token(value, token)


def _effects(boundary: AxisBoundary | None) -> list[Any]:
    if boundary is None:
        return []
    return [effect for effect in (boundary.tap, boundary.sink) if effect is not None]


def _one_by_one(fn: BoundaryCallable) -> BoundaryCallable:
    return lambda values: jax.lax.map(fn, values)


def _check_tapped(value: Any, returned: Any) -> None:
    given, found = _describe(value), _describe(returned)
    if given != found:
        raise ExecutorError(
            f"the tap was given {given} and returned {found}. A Tap returns what it was given: the same tree, shapes "
            "and dtypes. Change values in the mapped function."
        )


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
