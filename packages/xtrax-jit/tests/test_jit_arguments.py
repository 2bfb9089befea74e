"""What is refused when a function is wrapped, and how it is said."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.jit import batched_jit, bounded_jit, explain_retrace, filter_bounded_jit

WRAPPERS = (bounded_jit, batched_jit, filter_bounded_jit)
EMPTY_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())

x2 = jnp.ones(2)


def scale(x, factor=2.0, *, shift=0.0):
    return x * factor + shift


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("function", [None, 3, "scale", jnp.ones(2), classmethod(scale)])
def test_a_function_that_is_not_callable_is_refused(wrap, function):
    with pytest.raises(TypeError, match=r"function must be callable, got .*functools\.partial"):
        wrap(function, max_traces=1)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_generator_function_is_refused(wrap):
    def items(x):
        yield x

    with pytest.raises(TypeError, match="items is a generator function"):
        wrap(items, max_traces=1)
    with pytest.raises(TypeError, match="items is a generator function"):
        wrap(functools.partial(items, 1), max_traces=1)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("budget", [True, False, 1.0, "1", None, np.bool_(True), np.float32(1), float("nan"), [1]])
def test_a_budget_that_is_not_an_integer_is_refused(wrap, budget):
    with pytest.raises(TypeError, match="max_traces must be an integer, got") as error:
        wrap(scale, max_traces=budget)
    assert type(budget).__name__ in str(error.value)


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("budget", [-1, np.int64(-3)])
def test_a_negative_budget_is_refused(wrap, budget):
    with pytest.raises(ValueError, match=f"max_traces must be 0 or more, got {budget}"):
        wrap(scale, max_traces=budget)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_budget_must_be_given(wrap):
    with pytest.raises(TypeError, match="max_traces"):
        wrap(scale)


def test_numpy_integers_are_integers():
    one: Any = np.int32(1)
    two: Any = np.int64(2)
    assert bounded_jit(scale, max_traces=one)(jnp.float32(3)) == 6
    assert batched_jit(scale, in_axes=0, axis_size=two, max_traces=one)(jnp.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("argument", ["static_argnames", "donate_argnames"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("factor", r"got the string 'factor': write \('factor',\)"),
        ("", "got the string ''"),
        ({"factor"}, "of type set"),
        (iter(["factor"]), "of type list_iterator"),
        (3, "got 3 of type int"),
        (None, "got None of type NoneType"),
        ([3], r"_argnames\[0\] must be a string, got 3 of type int"),
        (["factor", b"shift"], r"_argnames\[1\] must be a string, got b'shift' of type bytes"),
        (b"factor", r"_argnames\[0\] must be a string, got 102"),
    ],
)
def test_argnames_that_are_not_a_sequence_of_strings_are_refused(argument, names, message):
    with pytest.raises(TypeError, match=message) as error:
        bounded_jit(scale, max_traces=1, **{argument: names})
    assert argument in str(error.value)


@pytest.mark.parametrize("argument", ["static_argnames", "donate_argnames"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["factor", ""], r"_argnames\[1\] is an empty string"),
        (["factor", "shift", "factor"], "_argnames has 'factor' twice"),
        (["fctor"], "_argnames has 'fctor', which is not a parameter of scale. Its parameters are: x, factor, shift"),
    ],
)
def test_empty_duplicated_and_unknown_argnames_are_refused(argument, names, message):
    with pytest.raises(ValueError, match=message) as error:
        bounded_jit(scale, max_traces=1, **{argument: names})
    assert argument in str(error.value)


def test_a_name_both_static_and_donated_is_refused():
    with pytest.raises(ValueError, match="static_argnames and donate_argnames both have 'shift'"):
        bounded_jit(scale, max_traces=1, static_argnames=["factor", "shift"], donate_argnames=("x", "shift"))


def test_unknown_argnames_of_partials_methods_and_variadic_functions():
    class Scaler:
        def apply(self, x):
            return x

    with pytest.raises(ValueError, match=r"'self', which is not a parameter of Scaler\.apply"):
        bounded_jit(Scaler().apply, max_traces=1, static_argnames=["self"])
    with pytest.raises(ValueError, match=r"'x', which is not a parameter of scale\. Its parameters are: factor, shift"):
        bounded_jit(functools.partial(scale, 1.0), max_traces=1, static_argnames=["x"])
    with pytest.raises(ValueError, match="'args', which is not a parameter"):
        bounded_jit(lambda *args: args, max_traces=1, donate_argnames=["args"])


def test_any_argname_is_allowed_where_keywords_are():
    def total(x, **options):
        return x * options["n"]

    assert bounded_jit(total, max_traces=1, static_argnames=["n"])(jnp.float32(2), n=3) == 6


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("mesh", [8, "data", jax.sharding.AbstractMesh((8,), ("data",)), [1]])
def test_a_mesh_of_the_wrong_kind_is_refused(wrap, mesh):
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh or None, got .*jax\.make_mesh"):
        wrap(scale, max_traces=1, mesh=mesh)


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_empty_mesh_is_refused(wrap):
    with pytest.raises(ValueError, match="mesh must have devices, got an empty one"):
        wrap(scale, max_traces=1, mesh=EMPTY_MESH)


@pytest.mark.parametrize("size", [True, False, 2.0, "2", (2,), np.bool_(True)])
def test_a_batch_size_that_is_not_an_integer_is_refused(size):
    with pytest.raises(TypeError, match="axis_size must be an integer or None, got"):
        batched_jit(scale, axis_size=size, max_traces=1)


@pytest.mark.parametrize("size", [0, -2])
def test_a_batch_size_that_is_not_positive_is_refused(size):
    with pytest.raises(ValueError, match=f"axis_size must be positive, got {size}"):
        batched_jit(scale, axis_size=size, max_traces=1)


def test_axes_are_checked_by_vmap_itself():
    with pytest.raises(TypeError, match="in_axes"):
        batched_jit(scale, in_axes="0", max_traces=1)(jnp.ones(2))


@pytest.mark.parametrize(
    ("in_axes", "args", "kwargs", "message"),
    [
        ((0,), (x2, x2), {}, r"^scale: in_axes has 1 entry, but the call passes 2 by position\. Give one entry"),
        ((0, 0), (x2,), {}, r"^scale: in_axes has 2 entries, but the call passes 1 by position\."),
        ((0, 0), (x2,), {"factor": x2}, r"but the call passes 1 by position and factor by keyword\."),
        (((0,), 0), (x2, x2), {}, r"^scale: in_axes\[0\] is a tuple of 1, but x is a single leaf\. .* all of x,"),
        (({"a": 0},), ({"b": x2},), {}, r"in_axes\[0\] is a dict with the keys \['a'\], but x is .* \['b'\]"),
        (({"a": (0, 0)},), ({"a": [x2, x2]},), {}, r"in_axes\[0\]\['a'\] is a tuple of 2, but x\['a'\] is a list of 2"),
    ],
)
def test_axes_that_do_not_fit_the_arguments_are_refused_in_plain_words(in_axes, args, kwargs, message):
    batched = batched_jit(scale, in_axes=in_axes, max_traces=1)
    with pytest.raises(ValueError, match=message) as error:
        batched(*args, **kwargs)
    assert "pytree structure error" not in str(error.value)
    assert explain_retrace(batched) == []


def test_more_axes_than_positional_parameters_are_refused_when_wrapped():
    with pytest.raises(ValueError, match=r"in_axes has 3 entries, but scale takes 2 by position: x, factor\."):
        batched_jit(scale, in_axes=(0, None, None), max_traces=1)
    total = batched_jit(lambda *xs: sum(xs), in_axes=(0, None, 0), max_traces=1)
    assert total(jnp.ones(2), 1.0, jnp.arange(2.0)).tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("in_axes", "value", "expected"),
    [
        (0, {"a": [[1, 2], [3, 4]], "b": [10, 20]}, [13, 27]),
        (({"a": 1, "b": None},), {"a": [[1, 2], [3, 4]], "b": 10}, [14, 16]),
        (({"a": -1, "b": 0},), {"a": [[1, 2], [3, 4]], "b": [10, 20]}, [14, 26]),
        ([0], {"a": [[1, 2], [3, 4]], "b": [10, 20]}, [13, 27]),
    ],
)
def test_axes_that_fit_are_those_of_vmap(in_axes, value, expected):
    batched = batched_jit(lambda v: v["a"].sum() + v["b"], in_axes=in_axes, max_traces=1)
    assert batched({name: jnp.array(leaf) for name, leaf in value.items()}).tolist() == expected


def test_arguments_are_named_not_numbered():
    numbered: Any = {"static_argnums": (1,)}
    with pytest.raises(TypeError, match="static_argnums"):
        bounded_jit(scale, max_traces=1, **numbered)


@pytest.mark.parametrize(
    ("donate", "error"),
    [(True, TypeError), (None, TypeError), (["all"], TypeError), ("", ValueError), ("x", ValueError)],
)
def test_ways_to_donate_that_equinox_does_not_have_are_refused(donate, error):
    with pytest.raises(error, match=r"donate must be .*'all-except-first'"):
        filter_bounded_jit(scale, max_traces=1, donate=donate)
