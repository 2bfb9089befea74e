"""What happens at the edges of axes, as the hooks of the executor of `xtrax.tiling`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xtrax.stages._errors import ExecutorError
from xtrax.stages._host_call import NO_TOKEN, fire_lanes
from xtrax.stages._host_record import HostRecord
from xtrax.stages._undifferentiated import undifferentiated
from xtrax.stages.boundaries import AxisBoundary, BoundaryCallable
from xtrax.stages.host import LOST, HostSink, HostTap
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling.plan import AxisDecision


def is_ordered(effect: Any) -> bool:
    """Whether the effects of a tap or sink must occur in the order of the elements."""
    return getattr(effect, "ordered", False)


def is_batchable(effect: Any) -> bool:
    """Whether a tap or sink has a batching rule that keeps the order of its effects."""
    return getattr(effect, "batchable", False)


def host_records(boundaries: Sequence[AxisBoundary | None]) -> list[HostRecord]:
    """The records of the host functions at the edges of these axes."""
    effects = [effect for boundary in boundaries if boundary is not None for effect in (boundary.tap, boundary.sink)]
    return [effect.record for effect in effects if isinstance(effect, (HostTap, HostSink))]


def expected_elements(
    decisions: Sequence[AxisDecision], boundaries: Mapping[str, AxisBoundary | None], outermost: int | None = None
) -> dict[HostRecord, int]:
    """How many elements each host function is to take: those of its axis, for each of the axes outside.

    Args:
        decisions: The axes of a plan, the outermost first.
        boundaries: What happens at their edges.
        outermost: How many elements of the outermost axis are run; None for all.
    """
    expected: dict[HostRecord, int] = {}
    elements = 1
    for i, decision in enumerate(decisions):
        elements *= decision.spec.cardinality if i > 0 or outermost is None else outermost
        for record in host_records([boundaries.get(decision.spec.name)]):
            expected[record] = expected.get(record, 0) + elements
    return expected


def axis_hooks(
    axes: Sequence[str], boundaries: Mapping[str, AxisBoundary | None], *, yields_carries: bool = False
) -> dict[str, AxisHook]:
    """The hooks of a nest of axes.

    Args:
        axes: The names of all axes, the outermost first. An empty name is left out of messages.
        boundaries: What happens at their edges.
        yields_carries: Whether the nest yields last carries beside its outputs.

    Returns:
        A hook for each axis that has something at its edge.
    """
    given = {name: boundaries[name] for name in axes if boundaries.get(name) is not None}
    keeps = {name: boundary.fuse is not None or boundary.sink is None for name, boundary in given.items() if boundary}
    # With no outputs and no carries nothing depends on the effects, and a derivative would lose them.
    lost = not yields_carries and not all(keeps.values())
    hooks = {}
    for name, boundary in given.items():
        if boundary is None:
            continue
        emit = None
        if boundary.tap is not None or boundary.sink is not None:
            emit = BoundaryEffects(boundary.tap, boundary.sink, keeps[name], tuple(axes[: axes.index(name) + 1]), lost)
        hooks[name] = AxisHook(emit, boundary.fuse, keeps[name])
    return hooks


@dataclasses.dataclass(frozen=True)
class BoundaryEffects:
    """The tap and sink of an axis: an `AxisHook.emit`.

    Host taps and sinks take all rows by one call each. Other callables with a batching rule of their own are called
    under `jax.vmap`; the rest see one element at a time, so that their callbacks may be ordered.

    Args:
        tap: `Tap`, or None.
        sink: `Sink`, or None.
        keeps: Whether the elements stay in the pipeline.
        axes: The names of the axes down to this one.
        lost: Whether a derivative would lose the effects of host functions.
    """

    tap: Any
    sink: Any
    keeps: bool
    axes: tuple[str, ...]
    lost: bool

    def __call__(self, values: Any, index: jax.Array, mask: Any) -> tuple[Any, Any]:
        """Pass rows through the tap and the sink; see `xtrax.tiling._execute.hooks`."""
        effects = [effect for effect in (self.tap, self.sink) if effect is not None]
        hosted = [isinstance(effect, (HostTap, HostSink)) for effect in effects]
        if self.lost and any(hosted):
            values, index, mask = undifferentiated((values, index, mask), LOST)
        if all(hosted):
            token = NO_TOKEN
            for effect in effects:
                token = token | fire_lanes(effect, values, index, mask, axes=self.axes)
            return values, token
        entries = (values, index, mask)
        if mask is None and all(map(is_batchable, effects)):
            values, tokens = jax.vmap(self._of_element)(entries)
        elif index.shape[0] == 1:
            # No loop for a single element, as that of a scan, which lies in a loop already.
            value, token = self._of_element(jax.tree.map(lambda entry: entry[0], entries))
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], value), token if any(hosted) else None
        else:
            values, tokens = lax.map(self._of_element, entries)
        return values, jnp.max(tokens) if any(hosted) else None

    def _of_element(self, entry: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        """Pass one element; a mask keeps back what is only padding."""
        value, index, real = entry
        if real is None:
            return self._pass(value, index)
        return lax.cond(real, self._pass, lambda value, index: (value, jnp.int32(NO_TOKEN)), value, index)

    def _pass(self, value: Any, index: jax.Array) -> tuple[Any, Any]:
        token = jnp.int32(NO_TOKEN)
        for role, effect in (("tap", self.tap), ("sink", self.sink)):
            if isinstance(effect, (HostTap, HostSink)):
                row = jax.tree.map(lambda leaf: leaf[None], value)
                token |= fire_lanes(effect, row, index[None], axes=self.axes)
            elif effect is not None:
                returned = _refusing_derivatives(role, effect)(value)
                value = _check_returned(role, value, returned)
        return value, token


def _check_returned(role: str, value: Any, returned: Any) -> Any:
    if role == "sink":
        if returned is not None:
            raise ExecutorError(
                f"the sink returned {_describe(returned)}, and a Sink returns None. To keep the value, make it a Tap."
            )
        return value
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


def _refusing_derivatives(role: str, effect: BoundaryCallable) -> BoundaryCallable:
    """The tap or sink; if it has effects, its value has no part in a derivative, which would lose them."""
    if is_batchable(effect):
        return effect

    def refusing(value: Any) -> Any:
        def of_effects(value: Any) -> None:
            effect(value)

        if jax.make_jaxpr(of_effects)(value).effects:
            value = undifferentiated(
                value,
                f"the {role} has side effects and lies in a function that is differentiated, or in a loop that is, "
                f"where JAX may drop them silently. Differentiate the function without the {role}, and record in a "
                f"separate forward pass; or use a Host{role.capitalize()}.",
            )
        return effect(value)

    return refusing
