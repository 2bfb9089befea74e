"""The stages of a pipeline as one module: optional callables, checked when the class is defined."""

import collections.abc
import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import equinox as eqx

__all__ = ["RollingFn", "StageBundle", "TransformFn"]


@runtime_checkable
class TransformFn(Protocol):
    """Maps one value to another: a stage without memory.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import TransformFn
        >>> isinstance(jnp.tanh, TransformFn)
        True
    """

    def __call__(self, value: Any, /) -> Any:
        """Return the transformed value."""
        ...


@runtime_checkable
class RollingFn(Protocol):
    """Advances a carry by one value: `(carry, x) -> (carry, y)`, as in `jax.lax.scan`.

    Example:
        >>> from xtrax.stages import RollingFn
        >>> def running_sum(carry, x):
        ...     return carry + x, carry + x
        >>> isinstance(running_sum, RollingFn)
        True
    """

    def __call__(self, carry: Any, value: Any, /) -> tuple[Any, Any]:
        """Return the next carry and this step's output."""
        ...


class StageBundle(eqx.Module):
    """Base of a pipeline's stages: each field of a subclass is a stage that may be left out.

    A field is annotated as an optional callable: `Callable | None`, `Callable[..., Array] | None`, a protocol whose
    only member is `__call__`, or a union of several of them and exactly one `None`. That is checked when the class is
    defined. A stage may be a function or an `eqx.Module`, whose arrays are then leaves of the bundle.

    Raises:
        TypeError: At the definition of a subclass, if a field is annotated as anything else or its annotation cannot be
            resolved; at construction, if a stage is neither None nor callable.

    Example:
        >>> import jax.numpy as jnp
        >>> from xtrax.stages import StageBundle, TransformFn
        >>> class Pipeline(StageBundle):
        ...     encode: TransformFn | None = None
        ...     decode: TransformFn | None = None
        >>> Pipeline(encode=jnp.tanh).active_stages()
        ['encode']
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the annotations of the subclass's own fields."""
        super().__init_subclass__(**kwargs)
        own = inspect.get_annotations(cls)
        hints = _resolve(cls, own)
        for name in own:
            if typing.get_origin(hints[name]) is typing.ClassVar or hints[name] is typing.ClassVar:
                continue
            fault = _fault(hints[name])
            if fault is not None:
                raise TypeError(
                    f"{cls.__qualname__}.{name}: {fault}. A stage is annotated as an optional callable, such as "
                    "`Callable[..., Array] | None` or `TransformFn | None`; keep what is not a stage elsewhere."
                )

    def __check_init__(self) -> None:
        """Refuse stages that cannot be called."""
        for name in self._stages():
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{type(self).__qualname__}: stage {name!r} must be callable or None; found {value!r}")

    @classmethod
    def _stages(cls) -> list[str]:
        return [field.name for field in dataclasses.fields(cls)]

    def active_stages(self) -> list[str]:
        """Return the names of the stages that are present, in the order of their fields."""
        return [name for name in self._stages() if getattr(self, name) is not None]

    def has_stage(self, name: str) -> bool:
        """Return whether the bundle has a stage of this name and it is present.

        Args:
            name: A field's name. False for a name that is no field.

        Raises:
            TypeError: If `name` is not a string.
        """
        if not isinstance(name, str):
            raise TypeError(f"has_stage: name must be a string; found {name!r}")
        return name in self.active_stages()


def _resolve(cls: type, names: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of `cls` as objects, postponed ones included."""
    module = sys.modules.get(cls.__module__)
    scope: Mapping[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        # A class defined inside a function may be annotated with names of that function.
        if module is not None and frame.f_globals is module.__dict__:
            scope = frame.f_locals
            break
        frame = frame.f_back
    try:
        return typing.get_type_hints(cls, localns=dict(scope))
    except (NameError, AttributeError, SyntaxError) as error:
        raise TypeError(
            f"{cls.__qualname__}: the annotations of {', '.join(names)} cannot be resolved ({error}). Stages are "
            "checked when the class is defined: import the names at run time, not only under TYPE_CHECKING."
        ) from error


def _fault(hint: Any) -> str | None:
    """What is wrong with the annotation of a stage, or None."""
    members = _union_members(hint)
    nones = sum(member is type(None) for member in members)
    if nones == 0:
        return f"{_name(hint)} is not optional"
    wrong = [member for member in members if member is not type(None) and not _is_callable_type(member)]
    if len(members) == 1:
        return "None alone is not a stage"
    if wrong:
        return f"{_name(wrong[0])} is not a callable type"
    return None


def _union_members(hint: Any) -> list[Any]:
    """The members of a union, aliases and `Annotated` unwrapped, nested unions flattened."""
    alias = getattr(typing, "TypeAliasType", None)  # New in Python 3.12.
    if alias is not None and isinstance(hint, alias):
        return _union_members(hint.__value__)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _union_members(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [inner for member in typing.get_args(hint) for inner in _union_members(member)]
    return [hint]


def _is_callable_type(hint: Any) -> bool:
    origin = typing.get_origin(hint) or hint
    if origin in (collections.abc.Callable, typing.Callable):
        return True
    if not (isinstance(origin, type) and getattr(origin, "_is_protocol", False)):
        return False
    members: set[str] = set()
    for base in origin.__mro__:
        if getattr(base, "_is_protocol", False) and base is not Protocol:
            members |= {n for n in base.__dict__ if n not in _PROTOCOL_MACHINERY}
            members |= set(inspect.get_annotations(base))
    return members == {"__call__"}


@runtime_checkable
class _Probe(Protocol):
    def __call__(self) -> None: ...


# What Python itself puts into the namespace of a protocol whose only member is `__call__`.
_PROTOCOL_MACHINERY = frozenset(vars(_Probe)) - {"__call__"} | {
    "__doc__",
    "__slots__",
    "__orig_bases__",
    "__parameters__",
    "__annotations__",
    "__type_params__",
    "__static_attributes__",
    "__firstlineno__",
    "__non_callable_proto_members__",
}


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
