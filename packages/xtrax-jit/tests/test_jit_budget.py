"""The count of traces: exact, one per wrapper, in every way that JAX may trace."""

import functools
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.jit import TraceBudgetExceededError, batched_jit, bounded_jit, explain_retrace


def double(x):
    """Twice x."""
    return 2 * x


def traces(wrapped: Any) -> int:
    return len(explain_retrace(wrapped))


@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(st.integers(1, 4), max_size=8), budget=st.integers(0, 4))
def test_the_budget_is_the_number_of_distinct_shapes(shapes, budget):
    bounded = bounded_jit(double, max_traces=budget)
    seen = set()
    for size in shapes:
        if size in seen or len(seen) < budget:
            seen.add(size)
            np.testing.assert_array_equal(bounded(jnp.arange(float(size))), 2 * np.arange(size))
        else:
            with pytest.raises(TraceBudgetExceededError):
                bounded(jnp.arange(float(size)))
        assert traces(bounded) == len(seen)


def test_the_error_is_an_assertion_error_and_survives_pickling():
    bounded = bounded_jit(double, max_traces=1)
    bounded(jnp.ones(2))
    with pytest.raises(AssertionError) as caught:
        bounded(jnp.ones(3))
    error = caught.value
    assert isinstance(error, TraceBudgetExceededError)
    assert (error.function, error.max_traces, error.resembled) == ("double", 1, 1)
    assert error.differences == ("x: shape (2,) -> (3,)",)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert copy.differences == error.differences


def test_functions_that_share_code_do_not_share_a_budget():
    def scaled(factor):
        return bounded_jit(lambda x: factor * x, max_traces=1)

    wrapped = [scaled(factor) for factor in (1.0, 2.0, 3.0)]
    assert [float(f(jnp.float32(5))) for f in wrapped] == [5, 10, 15]
    assert [traces(f) for f in wrapped] == [1, 1, 1]
    again = bounded_jit(double, max_traces=1), bounded_jit(double, max_traces=1)
    assert [float(f(jnp.float32(5))) for f in again] == [10, 10]


def test_a_refused_call_does_not_run_the_function_and_leaves_earlier_traces_usable():
    ran = []

    def noted(x):
        ran.append(x.shape)
        return x + 1

    bounded = bounded_jit(noted, max_traces=1)
    bounded(jnp.zeros(2))
    for _ in range(2):
        with pytest.raises(TraceBudgetExceededError):
            bounded(jnp.zeros(3))
    assert bounded(jnp.zeros(2)).tolist() == [1, 1]
    assert ran == [(2,)]


def test_no_budget_permits_no_trace_in_any_way():
    bounded = bounded_jit(double, max_traces=0)
    for use in (bounded, bounded.lower, bounded.trace, bounded.eval_shape, jax.jit(bounded), jax.grad(bounded)):
        with pytest.raises(TraceBudgetExceededError, match=r"double: .* max_traces=0\.\nNo trace is permitted"):
            use(jnp.float32(1))
    assert explain_retrace(bounded) == []


def test_a_trace_that_raises_is_not_counted_and_raises_the_same_again():
    def picky(x):
        if x.shape == (3,):
            raise KeyError("three")
        return x

    bounded = bounded_jit(picky, max_traces=1)
    for _ in range(3):
        with pytest.raises(KeyError, match="three"):
            bounded(jnp.ones(3))
    assert traces(bounded) == 0
    assert bounded(jnp.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("result", ["text", object(), np.array(["text"]), 2**70])
def test_a_trace_whose_result_jax_refuses_is_not_counted(result):
    bounded = bounded_jit(lambda x: (x, result), max_traces=1)
    for _ in range(2):
        with pytest.raises((TypeError, OverflowError)):
            bounded(jnp.ones(3))
    assert traces(bounded) == 0


def test_results_may_be_any_jax_values():
    bounded = bounded_jit(lambda key: {"key": key, "n": 3, "none": None, "host": np.arange(2)}, max_traces=1)
    out: Any = bounded(jax.random.key(7))
    assert out["none"] is None
    assert (int(out["n"]), out["host"].tolist()) == (3, [0, 1])
    np.testing.assert_array_equal(jax.random.key_data(out["key"]), jax.random.key_data(jax.random.key(7)))
    assert traces(bounded) == 1


def test_functions_without_arguments_and_builtins_are_counted():
    bounded = bounded_jit(lambda: jnp.arange(3), max_traces=1)
    assert bounded().tolist() == bounded().tolist() == [0, 1, 2]
    assert traces(bounded) == 1
    largest = bounded_jit(max, max_traces=1)
    assert jax.eval_shape(largest, [jnp.float32(1)]).shape == ()
    assert traces(largest) == 1


@pytest.mark.parametrize("first", ["call", "lower", "trace", "eval_shape"])
def test_methods_count_when_they_trace_and_share_their_traces(first):
    bounded = bounded_jit(double, max_traces=1)
    use = {"call": bounded, "lower": bounded.lower, "trace": bounded.trace, "eval_shape": bounded.eval_shape}
    use[first](jnp.ones(3))
    assert traces(bounded) == 1
    assert bounded(jnp.ones(3)).tolist() == [2, 2, 2]
    assert bounded.lower(jnp.ones(3)).compile()(jnp.ones(3)).tolist() == [2, 2, 2]
    assert bounded.trace(jnp.ones(3)).jaxpr.out_avals[0].shape == (3,)
    assert bounded.eval_shape(jax.ShapeDtypeStruct((3,), jnp.float32)).shape == (3,)
    for method in use.values():
        with pytest.raises(TraceBudgetExceededError):
            method(jnp.ones(4))
    assert traces(bounded) == 1


def test_a_cleared_cache_is_traced_and_counted_again():
    bounded = bounded_jit(double, max_traces=2)
    bounded(jnp.ones(3))
    bounded.clear_cache()
    bounded(jnp.ones(3))
    assert traces(bounded) == 2
    bounded.clear_cache()
    with pytest.raises(TraceBudgetExceededError, match=r"\n  nothing visible\nThe cache was probably cleared"):
        bounded(jnp.ones(3))


def test_grad_vmap_and_an_outer_jit_reuse_the_trace():
    bounded = bounded_jit(lambda x: x**3, max_traces=1)
    x = jnp.float32(2)
    assert bounded(x) == 8
    assert jax.grad(bounded)(x) == 12
    assert jax.jit(jax.grad(jax.grad(bounded)))(x) == 12
    assert jax.vmap(bounded)(jnp.arange(3.0)).tolist() == [0, 1, 8]
    assert jax.jvp(bounded, (x,), (x,)) == (8, 24)
    assert jax.jit(lambda x: bounded(x) + bounded(x))(x) == 16
    assert jax.lax.scan(lambda c, _: (bounded(c), c), x, None, length=3)[0] == 2.0**27
    assert traces(bounded) == 1


def test_a_trace_inside_a_transformation_is_held_to_the_budget():
    bounded = bounded_jit(double, max_traces=1)
    jax.vmap(bounded)(jnp.ones((2, 3)))
    with pytest.raises(TraceBudgetExceededError, match=r"x: shape \(3,\) -> \(4,\)"):
        jax.jit(jax.vmap(bounded))(jnp.ones((2, 4)))


def test_nested_functions_have_their_own_budgets():
    inner = bounded_jit(double, max_traces=1)
    outer = bounded_jit(lambda x: inner(x) + 1, max_traces=2)
    assert outer(jnp.ones(2)).tolist() == [3, 3]
    assert (traces(inner), traces(outer)) == (1, 1)
    twice = bounded_jit(inner, max_traces=1)
    assert twice(jnp.ones(2)).tolist() == [2, 2]
    assert (traces(inner), traces(twice)) == (1, 1)
    with pytest.raises(TraceBudgetExceededError, match="double: this call"):
        outer(jnp.ones(3))
    assert traces(outer) == 1


def test_a_function_that_traces_itself_counts_every_depth():
    def sum_by_halves(x):
        return x[0] if len(x) == 1 else bounded(x[: len(x) // 2]) + bounded(x[len(x) // 2 :])

    bounded = bounded_jit(sum_by_halves, max_traces=4)
    assert bounded(jnp.arange(8.0)) == 28
    assert traces(bounded) == 4
    bounded = bounded_jit(sum_by_halves, max_traces=3)
    with pytest.raises(TraceBudgetExceededError, match="max_traces=3"):
        bounded(jnp.arange(8.0))
    assert traces(bounded) == 3


def test_threads_that_call_alike_trace_once():
    started = threading.Barrier(6)
    inside = threading.Event()

    def slow(x):
        inside.wait(0.2)
        return x + 1

    bounded = bounded_jit(slow, max_traces=1)
    results = []

    def work():
        started.wait()
        results.append(bounded(jnp.ones(3)).tolist())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2, 2, 2]] * 6
    assert traces(bounded) == 1


def test_threads_that_call_differently_never_exceed_the_budget():
    started = threading.Barrier(6)
    meet = threading.Barrier(6)

    def together(x):
        meet.wait()  # all six are inside their traces at once
        return x + 1

    bounded = bounded_jit(together, max_traces=2)
    outcomes = []

    def work(size):
        started.wait()
        try:
            outcomes.append(bounded(jnp.ones(size)).shape == (size,))
        except TraceBudgetExceededError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(True) == 2
    assert sum(isinstance(outcome, TraceBudgetExceededError) for outcome in outcomes) == 4
    assert traces(bounded) == 2


def test_nothing_is_counted_while_jit_is_disabled():
    bounded = bounded_jit(double, max_traces=1)
    with jax.disable_jit():
        assert [float(bounded(jnp.ones(n)).sum()) for n in (1, 2, 3)] == [2, 4, 6]
    assert traces(bounded) == 0
    bounded(jnp.ones(2))
    assert traces(bounded) == 1


def test_the_search_for_a_nan_is_not_a_trace():
    bounded = bounded_jit(jnp.log, max_traces=1)
    with jax.debug_nans(True):
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="nan"):
                bounded(jnp.float32(-1))
    assert traces(bounded) == 1


def test_no_tracer_is_kept():
    with jax.checking_leaks():
        bounded = bounded_jit(lambda batch: batch["x"].sum(), max_traces=1)
        assert bounded({"x": jnp.ones(3)}) == 3
    assert "float32[3]" in str(explain_retrace(bounded))


def test_static_arguments_trace_once_per_value_and_donated_ones_are_given_up():
    def power(x, n, *, add=0):
        return x**n + add

    bounded = bounded_jit(power, max_traces=2, static_argnames=("n", "add"), donate_argnames=("x",))
    x = jnp.arange(3.0)
    assert bounded(x, 2).tolist() == [0, 1, 4]
    assert x.is_deleted()
    assert bounded(jnp.arange(3.0), 2, add=1).tolist() == [1, 2, 5]
    with pytest.raises(TraceBudgetExceededError, match="n: static value 2 -> 3"):
        bounded(jnp.arange(3.0), 3)


def test_bound_methods_partials_and_callable_objects():
    class Scaler:
        """Scales."""

        def __init__(self, factor):
            self.factor = factor

        def apply(self, x):
            """The scaled x."""
            return self.factor * x

        def __call__(self, x, power=1):
            return self.factor * x**power

    three = Scaler(3.0)
    functions: list[tuple[Any, str]] = [
        (three.apply, "apply"),
        (three, "Scaler"),
        (functools.partial(jnp.multiply, 3.0), "multiply"),
        (functools.partial(functools.partial(Scaler.apply), three), "apply"),
    ]
    for function, name in functions:
        bounded = bounded_jit(function, max_traces=1)
        assert bounded(jnp.float32(2)) == 6
        assert bounded(jnp.float32(5)) == 15
        assert bounded.__name__ == name
        with pytest.raises(TraceBudgetExceededError, match=rf"{name}: this call"):
            bounded(jnp.ones(2))


def test_a_decorated_method_binds_its_object():
    @jax.tree_util.register_pytree_node_class
    class Scaler:
        def __init__(self, factor):
            self.factor = factor

        def tree_flatten(self):
            return (self.factor,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        @functools.partial(bounded_jit, max_traces=1)
        def apply(self, x):
            return self.factor * x

    scaler = Scaler(jnp.float32(3))
    assert scaler.apply(jnp.float32(2)) == 6
    assert Scaler(jnp.float32(5)).apply(jnp.float32(2)) == 10
    assert traces(scaler.apply) == 1
    with pytest.raises(TraceBudgetExceededError, match=r"Scaler\.apply: .*\n.*\n  x: shape \(\) -> \(2,\)"):
        scaler.apply(jnp.ones(2))


def test_the_batched_function_equals_vmap_for_every_axis():
    def affine(w, x, b):
        return w @ x + b, {"norm": jnp.sum(x**2)}

    w, x, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4), jnp.ones(2)
    in_axes, out_axes = (None, 1, None), (1, 0)
    batched = batched_jit(affine, in_axes=in_axes, out_axes=out_axes, max_traces=1)
    columns = [np.asarray(w) @ np.asarray(x)[:, i] + np.asarray(b) for i in range(4)]
    product, extra = batched(w, x, b)
    np.testing.assert_array_equal(product, np.stack(columns, axis=1))
    np.testing.assert_array_equal(extra["norm"], (np.asarray(x) ** 2).sum(0))
    with pytest.raises(TraceBudgetExceededError, match=r"affine: .*\n.*\n  x: shape \(3, 4\) -> \(3, 5\)"):
        batched(w, jnp.ones((3, 5)), b)


def test_the_batch_size_may_be_given():
    constant = batched_jit(lambda: jnp.float32(7), axis_size=3, max_traces=1)
    assert constant().tolist() == [7, 7, 7]
    with pytest.raises(ValueError, match="size"):
        batched_jit(double, axis_size=3, max_traces=1)(jnp.ones(2))


def test_a_copy_sent_elsewhere_starts_with_its_whole_budget():
    cloudpickle = pytest.importorskip("cloudpickle")  # what Dask sends functions with
    bounded = bounded_jit(double, max_traces=1)
    bounded(jnp.ones(2))
    copy = cloudpickle.loads(cloudpickle.dumps(bounded))
    assert copy(jnp.ones(3)).tolist() == [2, 2, 2]
    assert traces(bounded) == 1
    with pytest.raises(TraceBudgetExceededError):
        copy(jnp.ones(4))


@pytest.mark.parametrize("other", [double, jax.jit(double), None, 3])
def test_functions_without_a_budget_have_no_traces_to_explain(other):
    with pytest.raises(TypeError, match="wrapped must be what bounded_jit"):
        explain_retrace(other)
