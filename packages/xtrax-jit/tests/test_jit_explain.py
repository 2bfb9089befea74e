"""What the error for a trace too many says, and what `explain_retrace` shows."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.jit import TraceBudgetExceededError, TraceSignature, bounded_jit, explain_retrace


def total(batch, lr=0.1, *rest, n=1, flag=None, **options):
    """The sum of everything that can be added."""
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves((batch, lr, rest, flag, options))) * n


def changed(first, second, **wrapping) -> tuple[str, ...]:
    """What the error says to differ between two calls, each an `(args, kwargs)` pair or one argument."""
    bounded = bounded_jit(total, max_traces=1, **wrapping)
    calls = [call if isinstance(call, Call) else Call(call) for call in (first, second)]
    bounded(*calls[0].args, **calls[0].kwargs)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(*calls[1].args, **calls[1].kwargs)
    return caught.value.differences


class Call:
    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


Point = collections.namedtuple("Point", ["x", "y"])


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["units", "name"])
@dataclasses.dataclass
class Layer:
    w: jax.Array
    units: int = 1
    name: str = "dense"


x = jnp.ones((4, 2))


@pytest.mark.parametrize(
    ("first", "second", "differences"),
    [
        (x, x[:3], ["batch: shape (4, 2) -> (3, 2)"]),
        (x, x.astype(jnp.int32), ["batch: dtype float32 -> int32"]),
        (x[0], x[:, :1].astype(jnp.bfloat16), ["batch: shape (2,) -> (4, 1)", "batch: dtype float32 -> bfloat16"]),
        (Call(x, 0.5), Call(x, jnp.float32(0.5)), ["lr: weak type True -> False"]),
        (Call(x, 1), Call(x, 1.0), ["lr: dtype int32 -> float32"]),
        ({"x": x, "y": x}, {"x": x, "y": x[:1]}, ["batch['y']: shape (4, 2) -> (1, 2)"]),
        ({"x": {1: [x, x]}}, {"x": {1: [x, x[1:]]}}, ["batch['x'][1][1]: shape (4, 2) -> (3, 2)"]),
        (Point(x, x), Point(x, x[0]), ["batch.y: shape (4, 2) -> (2,)"]),
        (Layer(x), Layer(x[0]), ["batch.w: shape (4, 2) -> (2,)"]),
        (Call(x, 0.5, x), Call(x, 0.5, x[0]), ["rest[0]: shape (4, 2) -> (2,)"]),
        (Call(x, o=x), Call(x, o=x[0]), ["o: shape (4, 2) -> (2,)"]),
    ],
)
def test_a_changed_leaf_is_named_by_its_path(first, second, differences):
    assert changed(first, second) == tuple(differences)


leaf_types = st.tuples(st.sampled_from([(), (2,), (2, 3)]), st.sampled_from(["float32", "int32", "bool"]))
batches = st.dictionaries(st.sampled_from("abcd"), leaf_types, min_size=1)


@settings(max_examples=50, deadline=None)
@given(before=batches, after=batches)
def test_every_difference_between_two_batches_is_listed_and_nothing_else(before, after):
    expected = []
    for name in sorted({*before, *after}):
        (old_shape, old_type), (shape, dtype) = before.get(name, (None, None)), after.get(name, (None, None))
        if name not in after:
            expected.append(f"batch['{name}']: {old_type}[{','.join(map(str, old_shape))}] -> absent")
        elif name not in before:
            expected.append(f"batch['{name}']: absent -> {dtype}[{','.join(map(str, shape))}]")
        else:
            expected += [f"batch['{name}']: shape {old_shape} -> {shape}"] * (old_shape != shape)
            expected += [f"batch['{name}']: dtype {old_type} -> {dtype}"] * (old_type != dtype)
    bounded = bounded_jit(lambda batch: batch, max_traces=1)
    bounded.eval_shape({name: jax.ShapeDtypeStruct(*leaf) for name, leaf in before.items()})
    try:
        bounded.eval_shape({name: jax.ShapeDtypeStruct(*leaf) for name, leaf in after.items()})
    except TraceBudgetExceededError as error:
        found = sorted(error.differences)
    else:
        found = []
    assert found == sorted(expected)


@pytest.mark.parametrize(
    ("first", "second", "differences"),
    [
        ((x, x), [x, x], ["batch: tuple -> list"]),
        ({"a": (x, x)}, {"a": Point(x, x)}, ["batch['a']: tuple -> Point"]),
        ({"a": x}, {"a": {"b": x}}, ["batch['a']: float32[4,2] -> dict"]),
        ({"a": x}, {"a": x, "mask": x}, ["batch['mask']: absent -> float32[4,2]"]),
        ({"a": x, "mask": x}, {"a": x}, ["batch['mask']: float32[4,2] -> absent"]),
        ([x], [x, x, x], ["batch[1]: absent -> float32[4,2]", "batch[2]: absent -> float32[4,2]"]),
        ({"a": x}, {"a": x, "b": {}}, ["batch['b']: absent -> empty dict"]),
        ({"a": x, "b": []}, {"a": x, "b": {}}, ["batch['b']: empty list -> empty dict"]),
        (Call(x), Call(x, flag=None), ["flag: absent -> None"]),
        (Call(x, flag=None), Call(x, flag=x), ["flag: None -> float32[4,2]"]),
        (Call(x), Call(x, 0.5), ["lr: absent -> weak float32[]"]),
        (Layer(x, units=2), Layer(x, units=3), ["batch: metadata of Layer 2 -> 3"]),
        (Layer(x, 2, "a"), Layer(x, 3, "b"), ["batch: metadata of Layer (2, 'a') -> (3, 'b')"]),
        (
            collections.OrderedDict(a=x, b=x),
            collections.OrderedDict(b=x, a=x),
            ["batch: metadata of OrderedDict ('a', 'b') -> ('b', 'a')"],
        ),
    ],
)
def test_a_changed_tree_is_named_where_it_changed(first, second, differences):
    assert changed(first, second) == tuple(differences)


def test_the_call_form_is_named():
    assert changed(Call(x, 0.5), Call(x, lr=0.5)) == ("lr: passed by position -> by keyword",)
    assert changed(Call(batch=x), Call(x)) == ("batch: passed by keyword -> by position",)


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (3, 4, "3 -> 4"),
        (1, True, "1 -> True"),
        (2, 2.0, "2 -> 2.0"),
        (None, 2, "None -> 2"),
        ("mean", "sum", "'mean' -> 'sum'"),
        (float("nan"), float("nan"), "nan -> nan (printed alike, but not equal)"),
        ((1, 2), (1, 3), "(1, 2) -> (1, 3)"),
    ],
)
def test_static_values_are_compared_as_jax_compares_them(before, after, difference):
    bounded = bounded_jit(lambda x, how: x, max_traces=1, static_argnames=["how"])
    bounded(x, before)
    bounded(x, before)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(x, after)
    assert caught.value.differences == (f"how: static value {difference}",)
    assert "pass a value that varies as an array" in str(caught.value)


def test_a_static_function_made_anew_is_told_from_its_twin():
    bounded = bounded_jit(lambda x, f: f(x), max_traces=1, static_argnames=["f"])
    bounded(x, lambda v: v)
    with pytest.raises(TraceBudgetExceededError, match="one object made once") as caught:
        bounded(x, lambda v: v)
    (difference,) = caught.value.differences
    assert difference.startswith("f: static value <function ")
    assert difference.count("lambda> at 0x") == 2


def test_a_static_value_that_cannot_be_printed_does_not_hide_the_error():
    class Shy:
        def __repr__(self):
            raise RuntimeError("no repr")

    bounded = bounded_jit(lambda x, how: x, max_traces=1, static_argnames=["how"])
    bounded(x, Shy())
    with pytest.raises(TraceBudgetExceededError, match=r"how: static value <Shy instance at .*> -> <Shy instance at"):
        bounded(x, Shy())


def test_long_static_values_are_cut_to_a_line():
    bounded = bounded_jit(lambda x, how: x, max_traces=1, static_argnames=["how"])
    bounded(x, "a" * 10_000)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(x, "b\n" * 10_000)
    (difference,) = caught.value.differences
    assert len(difference) < 250
    assert "\n" not in difference


def test_jax_options_are_named():
    assert "jax_enable_x64: False -> True" in under(lambda: jax.enable_x64(True))
    assert under(lambda: jax.default_device(jax.devices()[1])) == ("jax_default_device: None -> cpu:1",)
    assert under(lambda: jax.default_matmul_precision("float32")) == ("jax_default_matmul_precision: None -> float32",)
    assert under(lambda: jax.numpy_dtype_promotion("strict")) == ("jax_numpy_dtype_promotion: standard -> strict",)


def under(context: Callable[[], Any]) -> tuple[str, ...]:
    """What the error says to differ when the same call is made in another context."""
    bounded = bounded_jit(total, max_traces=1)
    lr = jnp.float32(1)
    bounded(x, lr)
    with pytest.raises(TraceBudgetExceededError) as caught, context():
        bounded(x, lr)
    return caught.value.differences


def test_named_axes_are_named():
    bounded = bounded_jit(total, max_traces=1)
    bounded(x[0])
    jax.vmap(bounded)(x)
    with pytest.raises(TraceBudgetExceededError) as caught:
        jax.vmap(bounded, axis_name="i")(x)
    assert caught.value.differences == ("named axes: none -> i=4",)


def test_the_ambient_mesh_is_named(auto_mesh):
    assert under(lambda: jax.set_mesh(auto_mesh)) == ("ambient mesh: none -> data=8 (Auto)",)


def test_an_explicit_sharding_is_named(explicit_mesh):
    bounded = bounded_jit(lambda x: x + 1, max_traces=1)
    with jax.set_mesh(explicit_mesh):
        rows = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(explicit_mesh, jax.P("data")))
        bounded(rows)
        with pytest.raises(TraceBudgetExceededError) as caught:
            bounded(rows.T)
    assert caught.value.differences == ("x: sharding P('data', None) -> P(None, 'data')",)


def test_the_comparison_is_with_the_most_similar_trace():
    bounded = bounded_jit(total, max_traces=3)
    bounded({"x": x, "y": x})
    bounded({"x": x[0], "y": x[0].astype(jnp.int32)})
    bounded(x)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded({"x": x[0], "y": x[:1].astype(jnp.int32)})
    assert caught.value.resembled == 2
    assert caught.value.differences == ("batch['y']: shape (2,) -> (1, 2)",)


def test_the_whole_message():
    bounded = bounded_jit(total, max_traces=1, static_argnames=["n"])
    bounded({"x": x, "y": x}, 0.5)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded({"x": x[:3], "y": x}, lr=jnp.float32(0.5), n=3)
    assert str(caught.value) == (
        "total: this call needs a trace beyond the budget of max_traces=1.\n"
        "Changed since trace 1 of 1, the one it most resembles:\n"
        "  lr: passed by position -> by keyword\n"
        "  batch['x']: shape (4, 2) -> (3, 2)\n"
        "  lr: weak type True -> False\n"
        "  n: absent -> static 3\n"
        "Pass each argument in one form, by position or by keyword, at every call.\n"
        "Pad inputs to a few fixed shapes, so that calls share a trace.\n"
        "A Python number is weakly typed: pass jnp.asarray(value, dtype) at every call.\n"
        "An argument that is left out is another trace than the same one passed, even with its default value: pass it "
        "at every call, or at none.\n"
        "If this trace is intended, raise max_traces."
    )


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (Call(x), Call(x, n=2), "n: absent -> static 2"),
        (Call(x, n=1), Call(x), "n: static 1 -> absent"),
        (Call(x), Call(x, 0.5), "lr: absent -> weak float32[]"),
        (Call(x), Call(x, lr=0.5), "lr: absent -> weak float32[]"),
        (Call(x), Call(x, flag=None), "flag: absent -> None"),
        (Call(x), Call(x, flag={"a": x}), "flag['a']: absent -> float32[4,2]"),
        (Call(x, 0.5, x), Call(x, 0.5, x, x), "rest[1]: absent -> float32[4,2]"),
        (Call(x, o=x), Call(x), "o: float32[4,2] -> absent"),
    ],
)
def test_an_argument_that_is_not_always_passed_gets_advice_about_calls(first, second, difference):
    bounded = bounded_jit(total, max_traces=1, static_argnames=["n"])
    bounded(*first.args, **first.kwargs)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(*second.args, **second.kwargs)
    assert caught.value.differences == (difference,)
    assert "pass it at every call, or at none" in str(caught.value)
    assert "containers" not in str(caught.value)


def test_a_missing_key_of_an_argument_that_is_passed_gets_advice_about_containers():
    bounded = bounded_jit(total, max_traces=1)
    bounded({"a": x}, flag={"a": x})
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded({"a": x, "b": x}, flag={"a": x})
    assert "the same containers with the same keys" in str(caught.value)
    assert "left out" not in str(caught.value)


def test_many_differences_are_counted_not_listed():
    before, after = dict.fromkeys(range(200), x), dict.fromkeys(range(200), x[0])
    bounded = bounded_jit(total, max_traces=1)
    bounded(before)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(after)
    assert len(caught.value.differences) == 200
    assert "\n  ... and 180 more\n" in str(caught.value)
    assert str(caught.value).count("shape") == 20 + 1


def test_signatures_read_as_calls_in_the_order_of_tracing():
    bounded = bounded_jit(total, max_traces=4, static_argnames=["n"])
    assert explain_retrace(bounded) == []
    bounded({"x": x, "y": np.int32(1)}, 0.5)
    bounded(x, n=2)
    bounded([], x, None, flag={"a": x})
    signatures = explain_retrace(bounded)
    assert all(isinstance(signature, TraceSignature) for signature in signatures)
    assert [str(signature) for signature in signatures] == [
        "total(batch['x']: float32[4,2], batch['y']: int32[], lr: weak float32[])",
        "total(batch: float32[4,2], *, n: static 2)",
        "total(batch: empty list, lr: float32[4,2], rest[0]: None, *, flag['a']: float32[4,2])",
    ]
    assert repr(signatures[1]) == "<trace total(batch: float32[4,2], *, n: static 2)>"
    assert signatures[1].positional == ("batch",)
    assert signatures[1].keyword == ("n",)
    signatures.clear()
    assert len(explain_retrace(bounded)) == 3
