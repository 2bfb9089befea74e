"""ResumableState and init_state."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xtrax.training import ResumableState, init_state


def linear() -> eqx.nn.Linear:
    return eqx.nn.Linear(3, 1, key=jax.random.key(0))


@pytest.mark.parametrize("step", [0, 7, np.int64(7), np.array(7, "int32"), jnp.array(7, "int32")])
def test_step_becomes_an_int32_array(step):
    state = ResumableState(step, jax.random.key(0), None, ())
    assert isinstance(state.step, jax.Array)
    assert state.step.dtype == jnp.int32
    assert int(state.step) == int(step)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (True, TypeError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (np.array(1.0), TypeError),
        (-1, ValueError),
        (2**31, ValueError),
        (np.array([1, 2]), ValueError),
    ],
)
def test_bad_step(step, error):
    with pytest.raises(error, match="step"):
        ResumableState(step, jax.random.key(0), None, ())


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")])
def test_typed_and_raw_keys_are_kept(key):
    state = ResumableState(0, key, None, ())
    assert state.key.dtype == key.dtype
    assert state.key.shape == key.shape


@pytest.mark.parametrize(
    ("key", "error"),
    [
        (0, TypeError),
        (None, TypeError),
        (jnp.zeros(2), TypeError),
        (jnp.zeros(3, "uint32"), ValueError),
        (jax.random.split(jax.random.key(0)), ValueError),
    ],
)
def test_bad_key(key, error):
    with pytest.raises(error, match="key"):
        ResumableState(0, key, None, ())


@pytest.mark.parametrize("extras", [[1], "a", {1: 2}])
def test_bad_extras(extras):
    with pytest.raises(TypeError, match="extras"):
        ResumableState(0, jax.random.key(0), None, (), extras)


def test_extras_are_not_shared_between_states():
    first = ResumableState(0, jax.random.key(0), None, ())
    second = ResumableState(0, jax.random.key(0), None, ())
    assert first.extras == {}
    assert first.extras is not second.extras


def test_init_state_holds_what_the_optimizer_starts_with():
    model, optimizer = linear(), optax.adam(1e-3)
    state = init_state(model, optimizer, seed=5)
    expected = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    assert eqx.tree_equal(state.opt_state, expected)
    assert eqx.tree_equal(state.model, model)
    assert (jax.random.key_data(state.key) == jax.random.key_data(jax.random.key(5))).all()
    assert int(state.step) == 0


def test_init_state_accepts_a_key():
    key = jax.random.key(9, impl="rbg")
    assert init_state(linear(), optax.sgd(1.0), key).key.dtype == key.dtype


@pytest.mark.parametrize(("seed", "error"), [(True, TypeError), (1.5, TypeError), (-1, ValueError), (None, TypeError)])
def test_bad_seed(seed, error):
    with pytest.raises(error, match="seed"):
        init_state(linear(), optax.sgd(1.0), seed)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameters"):
        init_state(eqx.nn.Dropout(0.5), optax.sgd(1.0), 0)


def test_something_else_than_an_optimizer_is_refused():
    with pytest.raises(TypeError, match="optimizer"):
        init_state(linear(), 1e-3, 0)  # ty: ignore[invalid-argument-type]
