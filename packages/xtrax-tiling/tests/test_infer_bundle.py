"""Axes and schemas read off signatures, and results held against them."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.core import Tracer

from xtrax.inference import (
    AxisOverride,
    BundleSchema,
    StructureMismatchError,
    axis_config,
    infer_bundle,
    verify_structure,
)
from xtrax.tiling import AmbiguousAxisError, AxisRole, AxisSpec, BatchPlanner, CarrySpec, SafeMap, Vmap


def abstract(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def shapes(schema):
    return {name: (field.shape, str(field.dtype)) for name, field in schema.fields.items()}


def unknown(name, size):
    return AxisSpec(name, size, max(size, 1), role=AxisRole.UNKNOWN)


# Inputs and axes.


def test_seed_signature_inference_gives_axes_and_a_schema():
    schema, axes = infer_bundle(lambda x, w: x @ w, [abstract(100, 8), abstract(8, 3)])
    assert shapes(schema) == {"out_0": ((100, 3), "float32")}
    assert axes == [unknown("axis_0", 100), unknown("axis_1", 8)]


@given(ndims=st.lists(st.integers(0, 3), max_size=5), data=st.data())
@settings(max_examples=25)
def test_each_leaf_with_a_dimension_has_an_axis(ndims, data):
    inputs = [abstract(*data.draw(st.tuples(*[st.integers(0, 4)] * n))) for n in ndims]
    schema, axes = infer_bundle(lambda *xs: xs, inputs)
    leading = [leaf.shape[0] for leaf in inputs if leaf.shape]
    assert axes == [unknown(f"axis_{i}", size) for i, size in enumerate(leading)]
    assert shapes(schema) == {f"out_{i}": (leaf.shape, "float32") for i, leaf in enumerate(inputs)}


@pytest.mark.parametrize(
    "inputs",
    [
        [abstract(4, 3), abstract(4)],
        (abstract(4, 3), abstract(4)),
        [((4, 3), "float32"), ([4], jnp.float32)],
        [((4, 3), np.dtype("float32")), ((np.int64(4),), np.float32)],
        [np.ones((4, 3), np.float32), jnp.ones(4)],
        {"y": abstract(4), "x": abstract(4, 3)},
    ],
)
def test_inputs_may_be_written_in_several_ways(inputs):
    def outer(x, y):
        return x * y[:, None]

    schema, axes = infer_bundle(outer, inputs)
    assert shapes(schema) == {"out_0": ((4, 3), "float32")}
    assert [axis.cardinality for axis in axes] == [4, 4]


def test_a_single_argument_needs_no_list():
    for inputs in (abstract(4, 3), ((4, 3), "float32"), [abstract(4, 3)]):
        schema, axes = infer_bundle(jnp.sin, inputs)
        assert shapes(schema) == {"out_0": ((4, 3), "float32")}
        assert axes == [unknown("axis_0", 4)]


def test_a_dict_that_is_no_set_of_parameters_is_one_argument():
    schema, axes = infer_bundle(lambda batch: batch["x"] + batch["y"], {"x": abstract(4), "y": abstract(4)})
    assert shapes(schema) == {"out_0": ((4,), "float32")}
    assert len(axes) == 2


def test_keyword_only_parameters_are_given_by_name_in_the_order_of_the_signature():
    def fn(*, b, a):
        return a, b

    schema, axes = infer_bundle(fn, {"a": abstract(2), "b": abstract(3)})
    assert [axis.cardinality for axis in axes] == [3, 2]
    assert shapes(schema)["out_0"] == ((2,), "float32")


def test_trees_scalars_and_empty_inputs():
    tree = {"x": (abstract(4), abstract()), "y": None}
    schema, axes = infer_bundle(lambda t, n: t["x"][0] * n, [tree, ((), "int32")])
    assert axes == [unknown("axis_0", 4)]
    schema, axes = infer_bundle(lambda: jnp.zeros(3), [])
    assert axes == []
    assert shapes(schema) == {"out_0": ((3,), "float32")}
    schema, axes = infer_bundle(lambda x: x, [abstract(0, 2)])
    assert axes == [AxisSpec("axis_0", 0, 1, role=AxisRole.UNKNOWN)]


def test_keys_are_inputs_too():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
    for inputs in ([keys], [((5,), keys.dtype)]):
        schema, axes = infer_bundle(jax.vmap(lambda key: jax.random.normal(key, (2,))), inputs)
        assert axes == [unknown("axis_0", 5)]
        assert shapes(schema) == {"out_0": ((5, 2), "float32")}


def test_modules_that_hold_arrays_are_functions():
    linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    schema, _ = infer_bundle(jax.vmap(linear), [abstract(7, 3)])
    assert shapes(schema) == {"out_0": ((7, 2), "float32")}
    schema, _ = infer_bundle(linear, [abstract(3)])
    assert shapes(schema) == {"out_0": ((2,), "float32")}


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (["x", abstract(2)], TypeError, r"abstract_inputs\[0\] must be a jax.ShapeDtypeStruct, an array or"),
        ([abstract(2), {"a": 3.0}], TypeError, r"abstract_inputs\[1\]\['a'\] must be"),
        ([abstract(2), jax.Array], TypeError, r"abstract_inputs\[1\] must be"),
        ([((4, -1), "float32"), abstract(2)], ValueError, r"shape of abstract_inputs\[0\] must be at least 0"),
        ([((4, True), "float32"), abstract(2)], TypeError, r"shape of abstract_inputs\[0\] must be an integer"),
        ([((4, 2.0), "float32"), abstract(2)], TypeError, r"shape of abstract_inputs\[0\] must be an integer"),
        ([((4,), "f33"), abstract(2)], TypeError, r"dtype of abstract_inputs\[0\].*'f33'"),
        ([abstract(2)], TypeError, r"abstract_inputs gives 1 arguments, but fn takes \(x, y\)"),
        ([abstract(2)] * 3, TypeError, r"abstract_inputs gives 3 arguments"),
        (None, TypeError, "abstract_inputs is None"),
        ("xy", TypeError, "abstract_inputs gives 1 arguments"),
    ],
)
def test_bad_inputs_are_refused(inputs, error, message):
    def fn(x, y):
        raise AssertionError("refused before it is traced")

    with pytest.raises(error, match=message):
        infer_bundle(fn, inputs)


def test_something_that_cannot_be_called_is_refused():
    wrong: Any = 3
    with pytest.raises(TypeError, match="fn must be callable, but is 3"):
        infer_bundle(wrong, [])


# Outputs.


class Pair(NamedTuple):
    left: Any
    right: Any


class Result(eqx.Module):
    mean: Any
    parts: Any


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda x: x, ["out_0"]),
        (lambda x: (x, x), ["out_0", "out_1"]),
        (lambda x: [x, {"a": x}], ["out_0", "out_1.a"]),
        (lambda x: {"b": x, "a": (x, x)}, ["a.0", "a.1", "b"]),
        (lambda x: {1: x}, ["1"]),
        (lambda x: Pair(x, {"c": x}), ["left", "right.c"]),
        (lambda x: Result(x, Pair(x, x)), ["mean", "parts.left", "parts.right"]),
        (lambda x: None, []),
    ],
)
def test_outputs_are_named_by_attribute_key_or_position(fn, names):
    schema, _ = infer_bundle(fn, [abstract(2)])
    assert list(schema.fields) == names
    assert all(field == abstract(2) for field in schema.fields.values())


def test_schemas_are_plain_shapes_and_dtypes():
    schema, _ = infer_bundle(lambda x: (2.0, x.astype("bfloat16"), x > 0), [abstract(2)])
    assert list(schema.fields.values()) == [abstract(), abstract(2, dtype="bfloat16"), abstract(2, dtype="bool")]
    assert schema.carry_specs is None


def test_outputs_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two outputs are called 'a\.b'"):
        infer_bundle(lambda x: {"a.b": x, "a": {"b": x}}, [abstract(2)])


@pytest.mark.parametrize(
    ("fields", "carries", "error", "message"),
    [
        (None, None, TypeError, "fields must map names"),
        ([abstract(2)], None, TypeError, "fields must map names"),
        ({3: abstract(2)}, None, TypeError, "fields must have strings as names"),
        ({"": abstract(2)}, None, ValueError, "fields has an empty name"),
        ({"x": (2,)}, None, TypeError, r"fields\['x'\] must be a jax.ShapeDtypeStruct"),
        ({}, "time", TypeError, "carry_specs must be a sequence"),
        ({}, [AxisSpec("a", 1, 1)], TypeError, "carry_specs must hold CarrySpec"),
    ],
)
def test_bad_schemas_are_refused(fields, carries, error, message):
    with pytest.raises(error, match=message):
        BundleSchema(fields, carries)


def test_schemas_keep_copies_and_compare():
    fields = {"x": abstract(2)}
    carry = CarrySpec("time", (), lambda carry, x: (carry, x))
    schema = BundleSchema(fields, [carry])
    fields["y"] = abstract(3)
    assert list(schema.fields) == ["x"]
    assert schema.carry_specs == (carry,)
    assert BundleSchema({"x": abstract(2)}) == BundleSchema({"x": abstract(2)})
    assert hash(BundleSchema({"x": abstract(2)})) == hash(BundleSchema({"x": abstract(2)}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(schema, "fields", {})  # noqa: B010


# Overrides.


def test_overrides_apply_by_position_and_make_axes_known():
    @axis_config(AxisOverride("batch", 32), AxisOverride("token", 64, tile_granularity=8, dedup_eligible=True))
    def fn(x, n, tokens, rest):
        return x

    inputs = [abstract(100, 8), abstract(), abstract(512), abstract(3)]
    _, axes = infer_bundle(fn, inputs)
    assert axes == [
        AxisSpec("batch", 100, 32),
        AxisSpec("token", 512, 64, tile_granularity=8, dedup_eligible=True),
        unknown("axis_2", 3),
    ]
    assert axes[0].role is AxisRole.KNOWN


def test_the_decorated_function_is_the_function():
    def fn(x):
        return x

    assert axis_config(AxisOverride("batch", 32))(fn) is fn
    axis_config(AxisOverride("row", 16))(fn)
    assert infer_bundle(fn, [abstract(4)])[1] == [AxisSpec("row", 4, 16)]


def test_all_fields_of_an_override_reach_the_spec():
    override = AxisOverride("seq", 8, cardinality=1000, heterogeneous=True, bucket_boundaries=[16, 32])
    _, axes = infer_bundle(axis_config(override)(lambda x: x), [abstract(4)])
    assert axes == [AxisSpec("seq", 1000, 8, heterogeneous=True, bucket_boundaries=(16, 32))]
    assert override == AxisOverride("seq", 8, 1000, heterogeneous=True, bucket_boundaries=(16, 32))
    assert hash(override) == hash(dataclasses.replace(override))


def test_arguments_that_share_a_name_are_one_axis():
    shared = AxisOverride("batch", 32)

    @axis_config(shared, AxisOverride("key", 1), shared)
    def fn(x, k, y):
        return x

    assert infer_bundle(fn, [abstract(4, 2), abstract(9), abstract(4)])[1] == [
        AxisSpec("batch", 4, 32),
        AxisSpec("key", 9, 1),
    ]
    with pytest.raises(
        ValueError, match=r"axis 'batch' has differing sizes: .*\[0\] float32\[4,2\] and .*\[2\] float32\[5\]"
    ):
        infer_bundle(fn, [abstract(4, 2), abstract(9), abstract(5)])


def test_overrides_are_found_on_partials_methods_and_modules():
    expected = [AxisSpec("batch", 4, 32)]

    @axis_config(AxisOverride("batch", 32))
    def fn(scale, x):
        return scale * x

    assert infer_bundle(functools.partial(fn, 2.0), [abstract(4)])[1] == expected
    assert infer_bundle(jax.jit(functools.partial(fn, 2.0)), [abstract(4)])[1] == expected
    assert infer_bundle(jax.jit(axis_config(AxisOverride("batch", 32))(lambda x: x)), [abstract(4)])[1] == expected
    assert infer_bundle(axis_config(AxisOverride("batch", 32))(jax.jit(lambda x: x)), [abstract(4)])[1] == expected

    class Model(eqx.Module):
        weight: jax.Array

        @axis_config(AxisOverride("batch", 32))
        def __call__(self, x):
            return x * self.weight

        @axis_config(AxisOverride("batch", 32))
        def apply(self, x):
            return x * self.weight

    model = Model(jnp.ones(()))
    assert infer_bundle(model, [abstract(4)])[1] == expected
    assert infer_bundle(model.apply, [abstract(4)])[1] == expected
    with pytest.raises(TypeError, match="takes no attributes; decorate its __call__"):
        axis_config(AxisOverride("batch", 32))(model)


def test_too_many_overrides_are_refused():
    fn = axis_config(AxisOverride("a", 1), AxisOverride("b", 1))(lambda x: x)
    with pytest.raises(ValueError, match=r"has 2 axis overrides, the last one for 'b', but its inputs have 1"):
        infer_bundle(fn, [abstract(4)])


def test_an_override_cannot_take_the_name_of_an_unnamed_axis():
    fn = axis_config(AxisOverride("axis_1", 1))(lambda x, y: x)
    with pytest.raises(ValueError, match="choose another name"):
        infer_bundle(fn, [abstract(4), abstract(4)])


def test_bad_axis_configs_are_refused():
    wrong: Any = "batch"
    with pytest.raises(ValueError, match="at least one AxisOverride"):
        axis_config()
    with pytest.raises(TypeError, match=r"overrides\[0\] is 'batch'"):
        axis_config(wrong)
    with pytest.raises(TypeError, match=r"write @axis_config\(AxisOverride"):
        axis_config(test_bad_axis_configs_are_refused)  # ty: ignore[invalid-argument-type]
    with pytest.raises(ValueError, match="names axis 'batch' twice"):
        axis_config(AxisOverride("batch", 1), AxisOverride("batch", 2))
    with pytest.raises(TypeError, match="decorates a function, but got 'batch'"):
        axis_config(AxisOverride("batch", 1))(wrong)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": ""}, ValueError, "name is empty"),
        ({"name": 3}, TypeError, "name must be a string"),
        ({"default_batch_size": 0}, ValueError, "default_batch_size of axis 'a' must be at least 1"),
        ({"default_batch_size": True}, TypeError, "default_batch_size"),
        ({"default_batch_size": None}, TypeError, "default_batch_size"),
        ({"cardinality": -1}, ValueError, "cardinality"),
        ({"cardinality": 2.0}, TypeError, "cardinality"),
        ({"tile_granularity": 0}, ValueError, "tile_granularity"),
        ({"heterogeneous": 1}, TypeError, "heterogeneous"),
        ({"dedup_eligible": "no"}, TypeError, "dedup_eligible"),
        ({"bucket_boundaries": ()}, ValueError, "bucket_boundaries"),
        ({"bucket_boundaries": (4, 2)}, ValueError, "strictly ascending"),
    ],
)
def test_bad_overrides_are_refused(change, error, message):
    arguments: dict[str, Any] = {"name": "a", "default_batch_size": 1}
    with pytest.raises(error, match=message):
        AxisOverride(**arguments | change)


def test_an_override_needs_a_batch_size():
    with pytest.raises(TypeError, match="default_batch_size"):
        AxisOverride("batch")  # ty: ignore[missing-argument]


def test_inferred_axes_are_planned_once_they_are_known():
    def fn(x):
        return 2 * x

    _, axes = infer_bundle(fn, [abstract(64, 2)])
    with pytest.raises(AmbiguousAxisError, match="@axis_config"):
        BatchPlanner().plan(axes)
    _, axes = infer_bundle(axis_config(AxisOverride("batch", 16))(fn), [abstract(64, 2)])
    assert BatchPlanner().plan(axes).decisions[0].strategy == SafeMap(16)
    _, axes = infer_bundle(axis_config(AxisOverride("batch", 64))(fn), [abstract(64, 2)])
    assert BatchPlanner().plan(axes).decisions[0].strategy == Vmap()


# Results held against the abstract ones.


def test_a_function_that_keeps_its_word_passes():
    def fn(x, n):
        return {"y": x * n, "parts": (x.sum(), np.float32(1.0))}

    verify_structure(fn, [abstract(4), ((), "float32")], [jnp.ones(4), 2.0])
    verify_structure(fn, {"x": abstract(4), "n": abstract()}, {"n": np.float32(2), "x": np.ones(4, np.float32)})
    schema, _ = infer_bundle(fn, [abstract(4), abstract()], verify_against=[jnp.ones(4), 2.0])
    assert list(schema.fields) == ["parts.0", "parts.1", "y"]


def only_concrete(x, otherwise):
    """`otherwise` where Python sees values, else x."""
    return x if isinstance(x, Tracer) else otherwise(x)


@pytest.mark.parametrize(
    ("otherwise", "message"),
    [
        (lambda x: x[:2], r"output\['a'\] is announced as float32\[4\], but is float32\[2\]"),
        (lambda x: x.astype("int32"), r"output\['a'\] is announced as float32\[4\], but is int32\[4\]"),
        (lambda x: x[None], r"float32\[1,4\]"),
        (lambda x: (x, x), r"output\['a'\] is announced as float32\[4\], but is not there"),
        (lambda x: (x, x), r"output\['a'\]\[1\] is float32\[4\], but is not announced"),
        (lambda x: "text", r"output\['a'\] is announced as float32\[4\], but is 'text' \(str\), which is no array"),
        (lambda x: None, r"output\['a'\] is announced as float32\[4\], but is not there"),
    ],
)
def test_what_differs_is_named(otherwise, message):
    def fn(x):
        return {"a": only_concrete(x, otherwise), "same": x}

    with pytest.raises(StructureMismatchError, match=message) as caught:
        verify_structure(fn, [abstract(4)], [jnp.ones(4)])
    assert "same" not in str(caught.value)
    with pytest.raises(StructureMismatchError, match=message):
        infer_bundle(fn, [abstract(4)], verify_against=[jnp.ones(4)])


def test_every_leaf_that_differs_is_named():
    def fn(x):
        return [only_concrete(x, lambda x, i=i: x[:i]) for i in range(4)]

    with pytest.raises(StructureMismatchError) as caught:
        verify_structure(fn, [abstract(3)], [jnp.ones(3)])
    message = str(caught.value)
    assert all(f"output[{i}] is announced as float32[3], but is float32[{i}]" in message for i in range(3))
    assert "output[3]" not in message
    assert "input" not in message


def test_containers_that_differ_are_named():
    def fn(x):
        return (x,) if isinstance(x, Tracer) else [x]

    with pytest.raises(StructureMismatchError, match=r"output is announced as .*\(\*,\).*, but is .*\[\*\]"):
        verify_structure(fn, [abstract(3)], [jnp.ones(3)])


def test_inputs_that_are_not_as_announced_are_named_with_the_outputs():
    with pytest.raises(StructureMismatchError) as caught:
        verify_structure(lambda x, y: x + y, [abstract(3), abstract()], [jnp.ones(5), 1.0])
    message = str(caught.value)
    assert "output is announced as float32[3], but is float32[5]" in message
    assert "input[0] is announced as float32[3], but is float32[5]" in message
    assert "input[1]" not in message


def test_what_the_function_raises_reaches_the_caller():
    def fn(x):
        if isinstance(x, Tracer):
            return x
        raise ZeroDivisionError("only with values")

    with pytest.raises(ZeroDivisionError, match="only with values"):
        verify_structure(fn, [abstract(3)], [jnp.ones(3)])


def test_concrete_inputs_of_another_number_are_refused():
    with pytest.raises(TypeError, match="concrete_inputs gives 2 arguments"):
        verify_structure(lambda x: x, [abstract(3)], [jnp.ones(3), 1.0])
