"""StageBundle: annotations are checked when the class is defined."""

from __future__ import annotations

import typing  # noqa: F401 - in the annotations below
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Generic, Optional, Protocol, TypeVar, Union  # noqa: F401 - likewise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.stages import RollingFn, StageBundle, TransformFn

T = TypeVar("T")


class Scores(Protocol):
    def __call__(self, x: jax.Array) -> jax.Array: ...


class ScoresMore(Scores, Protocol):
    """Adds nothing."""


class GenericScores(Protocol, Generic[T]):
    def __call__(self, x: T) -> T: ...


class Named(Protocol):
    name: str

    def __call__(self, x: Any) -> Any: ...


class Closable(Protocol):
    def __call__(self, x: Any) -> Any: ...
    def close(self) -> None: ...


class NotCallable(Protocol):
    def close(self) -> None: ...


class NotAProtocol:
    def __call__(self, x: Any) -> Any: ...


class Pipeline(StageBundle):
    encode: TransformFn | None = None
    roll: RollingFn | None = None
    decode: Callable[[jax.Array], jax.Array] | None = None


def test_active_stages_come_in_the_order_of_the_fields():
    bundle = Pipeline(decode=jnp.exp, encode=jnp.tanh)
    assert bundle.active_stages() == ["encode", "decode"]
    assert Pipeline().active_stages() == []
    assert bundle.has_stage("decode")
    assert not bundle.has_stage("roll")
    assert not bundle.has_stage("no such stage")


def test_a_subclass_of_a_subclass_has_the_stages_of_both():
    class Longer(Pipeline):
        extra: Optional[Callable] = None  # noqa: UP045

    assert Longer(encode=jnp.tanh, extra=jnp.exp).active_stages() == ["encode", "extra"]


ACCEPTED = [
    "Callable | None",
    "None | Callable",
    "Optional[Callable]",
    "typing.Callable | None",
    "Callable[..., Any] | None",
    "typing.Callable[[int], int] | None",
    "Scores | None",
    "ScoresMore | None",
    "GenericScores | None",
    "GenericScores[jax.Array] | None",
    "Union[Scores, Callable[..., Any], TransformFn, None]",
    "Optional[Union[Scores, RollingFn]]",
    "Annotated[Scores, 'in nats'] | None",
    "Annotated[Scores | None, 'in nats']",
]


@pytest.mark.parametrize("postponed", [True, False])
@pytest.mark.parametrize("annotation", ACCEPTED)
def test_optional_callables_are_accepted(annotation, postponed):
    bundle = _define(annotation, postponed)(jnp.tanh)
    assert bundle.active_stages() == ["stage"]


REFUSED = {
    "Callable": "not optional",
    "Scores": "not optional",
    "Callable | Scores": "not optional",
    "None": "None alone",
    "int | None": "int is not a callable type",
    "Any": "not optional",
    "Optional[Any]": "is not a callable type",
    "Callable | int | None": "int is not a callable type",
    "Named | None": "Named is not a callable type",
    "Closable | None": "Closable is not a callable type",
    "NotCallable | None": "NotCallable is not a callable type",
    "NotAProtocol | None": "NotAProtocol is not a callable type",
    "list[Callable] | None": "is not a callable type",
    "type | None": "type is not a callable type",
    "Missing | None": "cannot be resolved.*Missing.*TYPE_CHECKING",
    "typing.Missing | None": "cannot be resolved",
}


@pytest.mark.parametrize("annotation", REFUSED)
def test_anything_else_is_refused_when_the_class_is_defined(annotation):
    with pytest.raises(TypeError, match=REFUSED[annotation]):
        _define(annotation, postponed=True)


@pytest.mark.parametrize("annotation", [a for a in REFUSED if "Missing" not in a])
def test_anything_else_is_refused_where_annotations_are_not_postponed(annotation):
    with pytest.raises(TypeError, match=REFUSED[annotation]):
        _define(annotation, postponed=False)


def _define(annotation: str, postponed: bool) -> type:
    """Define a subclass with this annotation, in this module's namespace."""
    future = "from __future__ import annotations\n" if postponed else ""
    source = f"{future}class Defined(StageBundle):\n    stage: {annotation} = None"
    namespace = dict(globals())
    exec(compile(source, __file__, "exec", dont_inherit=True), namespace)
    return namespace["Defined"]


def test_the_refusal_names_class_and_field():
    with pytest.raises(TypeError, match=r"Wrong\.size: int is not optional"):

        class Wrong(StageBundle):
            encode: Callable | None = None
            size: int = 3


def test_names_of_the_enclosing_function_are_resolved():
    class Local(Protocol):
        def __call__(self, x: Any) -> Any: ...

    class Bundle(StageBundle):
        stage: Local | None = None

    assert Bundle(jnp.tanh).active_stages() == ["stage"]


def test_class_variables_are_not_stages():
    class Counted(StageBundle):
        limit: ClassVar[int] = 3
        stage: Callable | None = None

    assert Counted(jnp.tanh).active_stages() == ["stage"]


@pytest.mark.parametrize("value", [3, "tanh", np.zeros(3)])
def test_a_stage_that_cannot_be_called_is_refused(value):
    with pytest.raises(TypeError, match="Pipeline: stage 'encode' must be callable or None"):
        Pipeline(encode=value)


@pytest.mark.parametrize("name", [None, 3, True])
def test_has_stage_wants_a_name(name):
    with pytest.raises(TypeError, match="has_stage: name must be a string"):
        Pipeline().has_stage(name)


def test_the_arrays_of_a_stage_are_leaves_and_train():
    linear = eqx.nn.Linear(3, 1, use_bias=False, key=jax.random.key(0))
    bundle = Pipeline(encode=linear)
    x = jnp.arange(3.0)

    @eqx.filter_jit
    @eqx.filter_grad
    def slope(pipeline):
        return pipeline.encode(x).sum()

    np.testing.assert_allclose(slope(bundle).encode.weight, x[None])
