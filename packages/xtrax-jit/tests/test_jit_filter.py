"""`filter_bounded_jit`: the semantics of `equinox.filter_jit`, with a budget."""

import threading
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.jit import TraceBudgetExceededError, explain_retrace, filter_bounded_jit


def traces(wrapped) -> int:
    return len(explain_retrace(wrapped))


@pytest.fixture
def mlp() -> eqx.nn.MLP:
    return eqx.nn.MLP(2, 3, width_size=4, depth=1, key=jax.random.key(0))


def loss(model, x, scale=1.0):
    return scale * jnp.sum(jax.vmap(model)(x) ** 2)


def test_it_computes_what_the_function_does(mlp):
    bounded = filter_bounded_jit(loss, max_traces=1)
    x = jax.random.normal(jax.random.key(1), (5, 2))
    np.testing.assert_allclose(bounded(mlp, x), loss(mlp, x), rtol=1e-5)
    trained = jax.tree.map(lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, mlp)
    np.testing.assert_allclose(bounded(trained, x), loss(trained, x), rtol=1e-5)
    assert traces(bounded) == 1


def test_gradients_agree_with_those_without_jit(mlp):
    bounded = filter_bounded_jit(loss, max_traces=1)
    x = jax.random.normal(jax.random.key(1), (5, 2))
    found, expected = eqx.filter_grad(bounded)(mlp, x), eqx.filter_grad(loss)(mlp, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert traces(bounded) == 1


def test_what_is_not_an_array_is_static_in_arguments_and_result():
    def describe(x, label, factor):
        return {"label": label.upper(), "shape": x.shape, "value": factor * x, "python": factor}

    bounded = filter_bounded_jit(describe, max_traces=2)
    out = bounded(jnp.ones(2), "a", 3)
    assert (out["label"], out["shape"], out["python"]) == ("A", (2,), 3)
    assert out["value"].tolist() == [3, 3]
    assert bounded(jnp.ones(2), "a", jnp.float32(4))["value"].tolist() == [4, 4]
    assert traces(bounded) == 2
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(jnp.ones(2), "b", 3)
    assert caught.value.resembled == 1
    assert caught.value.differences == ("label: static value 'a' -> 'b'",)


def test_changes_inside_a_module_are_named(mlp):
    bounded = filter_bounded_jit(loss, max_traces=1)
    x = jnp.ones((5, 2))
    bounded(mlp, x)
    wider = eqx.nn.MLP(2, 3, width_size=8, depth=1, key=jax.random.key(0))
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(wider, x)
    assert "model.layers[0].weight: shape (4, 2) -> (8, 2)" in caught.value.differences
    assert any(line.startswith("model: metadata of MLP") for line in caught.value.differences)
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(eqx.tree_at(lambda m: m.activation, mlp, jnp.tanh), x)
    (difference,) = caught.value.differences
    assert difference.startswith("model.activation: static value ")
    with pytest.raises(TraceBudgetExceededError) as caught:
        bounded(mlp, x, scale=jnp.float32(1))
    assert caught.value.differences == ("scale: absent -> float32[]",)


def test_a_step_counter_kept_as_a_python_int_is_caught(mlp):
    def step(state):
        return {"model": state["model"], "count": state["count"] + 1}

    bounded = filter_bounded_jit(step, max_traces=2)
    state = bounded(bounded({"model": mlp, "count": 0}))
    with pytest.raises(TraceBudgetExceededError, match=r"state\['count'\]: static value 1 -> 2") as caught:
        bounded(state)
    assert "pass a value that varies as an array" in str(caught.value)
    bounded = filter_bounded_jit(step, max_traces=1)
    state = {"model": mlp, "count": jnp.int32(0)}
    for _ in range(3):
        state = bounded(state)
    assert int(state["count"]) == 3


def test_the_call_form_makes_no_difference(mlp):
    bounded = filter_bounded_jit(loss, max_traces=1)
    x = jnp.ones((5, 2))
    assert bounded(mlp, x, 2.0) == bounded(model=mlp, x=x, scale=2.0) == bounded(mlp, scale=2.0, x=x)


def test_a_module_as_the_function_keeps_its_arrays_traced(mlp):
    bounded = filter_bounded_jit(mlp, max_traces=1)
    np.testing.assert_allclose(bounded(jnp.ones(2)), mlp(jnp.ones(2)), rtol=1e-6)
    main = next(line for line in bounded.lower(jnp.ones(2)).as_text().splitlines() if "@main(" in line)
    assert main.partition("->")[0].count("tensor<") == 5  # four weights and x are arguments, not constants
    assert traces(bounded) == 1


def test_wrappers_of_one_function_have_their_own_budgets(mlp):
    wrapped = [filter_bounded_jit(loss, max_traces=1) for _ in range(3)]
    for bounded in wrapped:
        bounded(mlp, jnp.ones((5, 2)))
    assert [traces(bounded) for bounded in wrapped] == [1, 1, 1]


def test_methods_count_when_they_trace_and_share_their_traces(mlp):
    x = jnp.ones((5, 2))
    for first in ("call", "lower", "trace", "eval_shape"):
        bounded = filter_bounded_jit(loss, max_traces=1)
        use = {"call": bounded, "lower": bounded.lower, "trace": bounded.trace, "eval_shape": bounded.eval_shape}
        use[first](mlp, x)
        assert traces(bounded) == 1
        np.testing.assert_allclose(bounded(mlp, x), loss(mlp, x), rtol=1e-5)
        np.testing.assert_allclose(bounded.lower(mlp, x).compile()(mlp, x), loss(mlp, x), rtol=1e-5)
        assert bounded.trace(mlp, x).jaxpr.out_avals[0].shape == ()
        assert bounded.eval_shape(mlp, x).dtype == jnp.float32
        for method in use.values():
            with pytest.raises(TraceBudgetExceededError, match=r"x: shape \(5, 2\) -> \(3, 2\)"):
                method(mlp, x[:3])
        assert traces(bounded) == 1


def test_a_cleared_cache_is_traced_and_counted_again(mlp):
    bounded = filter_bounded_jit(loss, max_traces=2)
    for _ in range(2):
        bounded(mlp, jnp.ones((5, 2)))
        bounded.clear_cache()
    assert traces(bounded) == 2
    with pytest.raises(TraceBudgetExceededError, match="nothing visible"):
        bounded(mlp, jnp.ones((5, 2)))


def test_a_trace_that_raises_is_not_counted():
    def picky(x):
        if x.shape == (3,):
            raise KeyError("three")
        return x

    bounded = filter_bounded_jit(picky, max_traces=1)
    for _ in range(2):
        with pytest.raises(KeyError, match="three"):
            bounded(jnp.ones(3))
    assert bounded(jnp.ones(2)).tolist() == [1, 1]


def test_donation_is_equinoxs():
    def add(x, y):
        return x + 1, y + 1

    for donate, gone in (("none", (0, 0)), ("all", (1, 1)), ("all-except-first", (0, 1)), ("warn", (1, 1))):
        x, y = jnp.arange(4.0), jnp.arange(4.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            first, second = filter_bounded_jit(add, max_traces=1, donate=donate)(x, y)
        assert (x.is_deleted(), y.is_deleted()) == gone
        assert first.tolist() == second.tolist() == [1, 2, 3, 4]


def test_errors_raised_at_run_time_are_equinoxs():
    def checked(x):
        return eqx.error_if(x, x < 0, "x must not be negative")

    raised = []
    for wrapped in (eqx.filter_jit(checked), filter_bounded_jit(checked, max_traces=1)):
        assert wrapped(jnp.float32(1)) == 1
        with pytest.raises((RuntimeError, ValueError), match="x must not be negative") as caught:  # by jax version
            wrapped(jnp.float32(-1))
        raised.append(caught.type)
    assert raised[0] is raised[1]


def test_threads_that_call_alike_trace_once(mlp):
    bounded = filter_bounded_jit(loss, max_traces=1)
    together = threading.Barrier(4)
    results = []

    def work():
        together.wait()
        results.append(float(bounded(mlp, jnp.ones((5, 2)))))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(results, [loss(mlp, jnp.ones((5, 2)))] * 4, rtol=1e-5)
    assert traces(bounded) == 1


def test_a_decorated_method_of_a_module():
    class Scaler(eqx.Module):
        factor: jax.Array

        def apply(self, x):
            return self.factor * x

    class Fast(Scaler):
        apply = filter_bounded_jit(Scaler.apply, max_traces=1)

    assert Fast(jnp.float32(3)).apply(jnp.float32(2)) == 6
    assert Fast(jnp.float32(5)).apply(jnp.float32(2)) == 10
    assert traces(Fast.apply) == 1
