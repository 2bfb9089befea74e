"""Axes named by jaxtyping annotations."""

import functools
import typing  # noqa: F401 - the text of an annotation names it

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from xtrax.inference import AxisOverride, axis_config, infer_bundle
from xtrax.tiling import AxisRole, AxisSpec

jaxtyping = pytest.importorskip("jaxtyping")
Array, Float, Int, PyTree = jaxtyping.Array, jaxtyping.Float, jaxtyping.Int, jaxtyping.PyTree


def abstract(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def annotate(fn, **annotations):
    """`fn` with its parameters annotated; a text stands for dimensions. (Written in the code, linters read them.)"""
    fn.__annotations__ = {
        name: Float[Array, value] if isinstance(value, str) else value for name, value in annotations.items()
    }
    return fn


def inferred(fn, *inputs):
    return [(axis.name, axis.cardinality) for axis in infer_bundle(fn, list(inputs))[1]]


def test_axes_are_named_by_the_leading_dimension():
    fn = annotate(lambda x, steps: x, x="batch feat", steps=Int[Array, "time"])
    assert inferred(fn, abstract(100, 8), abstract(5, dtype="int32")) == [("batch", 100), ("time", 5)]


def test_annotations_that_are_strings_work_alike():
    def fn(x, w):
        return x

    fn.__annotations__ = {"x": "Float[Array, 'batch feat']", "w": Float[Array, "feat out"]}
    assert inferred(fn, abstract(100, 8), abstract(8, 3)) == [("batch", 100), ("feat", 8)]


def test_strings_that_only_type_checkers_understand_name_nothing():
    def fn(x, y):
        return x

    fn.__annotations__ = {"x": "OnlyForCheckers[Array, 'batch']", "y": Float[Array, "time"]}
    assert inferred(fn, abstract(2), abstract(3)) == [("axis_0", 2), ("time", 3)]


def test_dimensions_that_recur_are_one_axis():
    fn = annotate(lambda x, y, w: x, x="batch feat", y="batch", w="feat out")
    assert inferred(fn, abstract(100, 8), abstract(100), abstract(8, 3)) == [("batch", 100), ("feat", 8)]


def test_a_name_alone_does_not_make_elements_independent():
    fn = annotate(lambda x: x - x.mean(axis=0), x="batch feat")
    assert infer_bundle(fn, [abstract(4, 2)])[1] == [AxisSpec("batch", 4, 4, role=AxisRole.UNKNOWN)]


def test_a_dimension_stands_for_one_size():
    fn = annotate(lambda x, w: x, x="batch feat", w="feat out")
    with pytest.raises(ValueError, match="dimension 'feat' is 8 in argument 'x' and 9 in argument 'w'"):
        inferred(fn, abstract(100, 8), abstract(9, 3))


def test_the_annotation_of_one_element_says_nothing_about_a_batch():
    fn = annotate(lambda x: x, x="feat")
    assert inferred(jax.vmap(fn), abstract(4, 2)) == [("axis_0", 4)]


@pytest.mark.parametrize(
    ("dims", "shape", "name"),
    [
        ("4 feat", (4, 2), "axis_0"),
        ("_ feat", (4, 2), "axis_0"),
        ("_batch", (4,), "axis_0"),
        ("#batch", (4,), "axis_0"),
        ("2*n n", (4, 2), "axis_0"),
        ("... feat", (4, 2), "axis_0"),
        ("*batch feat", (4, 3, 2), "axis_0"),
        ("batch=4 feat", (4, 2), "batch"),
        (" batch  feat ", (4, 2), "batch"),
    ],
)
def test_what_names_no_single_axis_leaves_it_unnamed(dims, shape, name):
    assert inferred(annotate(lambda x: x, x=dims), abstract(*shape)) == [(name, shape[0])]


def test_unions_trees_and_other_types():
    def fn(x, y, z, t):
        return x

    batch = Float[Array, "batch"]
    annotate(fn, x=batch | None, z=int, t=PyTree[Float[Array, "b"]])
    fn.__annotations__["y"] = "typing.Union[int, Float[Array, 'time']]"
    assert inferred(fn, abstract(2), abstract(3), abstract(4), {"a": abstract(5)}) == [
        ("batch", 2),
        ("time", 3),
        ("axis_2", 4),
        ("axis_3", 5),
    ]


def test_scalars_have_no_axis():
    fn = annotate(lambda x, y: x * y, x="", y="batch")
    assert inferred(fn, abstract(), abstract(3)) == [("batch", 3)]


def test_variadic_and_keyword_parameters():
    many = annotate(lambda *rest: rest, rest="row")
    assert inferred(many, abstract(3), abstract(3, dtype="int32")) == [("row", 3)]

    def named(*, scale, **others):
        return scale

    annotate(named, scale="column", others="row")
    _, axes = infer_bundle(named, {"more": abstract(4), "scale": abstract(3)})
    assert [(axis.name, axis.cardinality) for axis in axes] == [("column", 3), ("row", 4)]


def test_overrides_come_before_annotations_and_join_them():
    fn = annotate(lambda x, y, z: x, x="rows feat", y="batch", z="time")
    axis_config(AxisOverride("batch", 16))(fn)
    _, axes = infer_bundle(fn, [abstract(4, 2), abstract(4), abstract(7)])
    assert axes == [AxisSpec("batch", 4, 16), AxisSpec("time", 7, 7, role=AxisRole.UNKNOWN)]


def test_modules_partials_and_wrappers_are_read_too():
    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x * self.weight

        def apply(self, x):
            return x * self.weight

    annotation = {"x": "Float[Array, 'batch feat']"}
    vars(Model)["__call__"].__annotations__ = annotation
    Model.apply.__annotations__ = annotation
    fn = annotate(lambda scale, x: scale * x, scale=float, x="batch feat")
    model = Model(jnp.ones(2))
    for function in (model, model.apply, functools.partial(fn, 2.0), jax.jit(functools.partial(fn, 2.0))):
        assert inferred(function, abstract(4, 2)) == [("batch", 4)]
