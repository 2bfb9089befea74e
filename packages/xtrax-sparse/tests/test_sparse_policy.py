import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.sparse import BCOO

from xtrax.sparse import SparseConfig, SparsePolicy


def largest_by_loop(weights, count):
    """The flat positions of the `count` largest magnitudes, ties to the lower position, by Python's sort."""
    flat = [abs(complex(w)) for w in np.asarray(weights).reshape(-1)]
    kept = sorted(range(len(flat)), key=lambda i: (-flat[i], i))[:count]
    return sorted(kept)


# Few values, so that ties are the rule; few shapes, so that few programs are compiled.
matrices = st.sampled_from([(1, 1), (2, 3), (4, 2)]).flatmap(
    lambda shape: st.lists(
        st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, float("inf"), -float("inf")]),
        min_size=shape[0] * shape[1],
        max_size=shape[0] * shape[1],
    ).map(lambda values: np.array(values, np.float32).reshape(shape))
)


@settings(max_examples=30, deadline=None)
@given(weights=matrices, data=st.data())
def test_make_mask_keeps_exactly_the_largest_magnitudes_and_ties_by_index(weights, data):
    budget = data.draw(st.integers(1, weights.size))
    mask = SparsePolicy(SparseConfig(budget)).make_mask(jnp.asarray(weights), 0)
    assert mask.dtype == bool
    assert mask.shape == weights.shape
    assert np.flatnonzero(mask).tolist() == largest_by_loop(weights, budget)


@settings(max_examples=30, deadline=None)
@given(weights=matrices, data=st.data())
def test_apply_mask_holds_the_masked_weights_in_exactly_nse_budget_elements(weights, data):
    weights = np.where(np.isinf(weights), 3.0, weights).astype(np.float32)
    budget = data.draw(st.integers(1, weights.size))
    flat = data.draw(st.lists(st.booleans(), min_size=weights.size, max_size=weights.size))
    mask = np.array(flat).reshape(weights.shape)
    mask.reshape(-1)[np.flatnonzero(mask)[budget:]] = False
    held = SparsePolicy(SparseConfig(budget)).apply_mask(jnp.asarray(weights), jnp.asarray(mask))
    assert isinstance(held, BCOO)
    assert held.nse == budget
    assert held.dtype == weights.dtype
    np.testing.assert_array_equal(held.todense(), np.where(mask, weights, 0))
    vector = np.arange(1, weights.shape[1] + 1, dtype=np.float32)
    np.testing.assert_allclose(held @ jnp.asarray(vector), np.where(mask, weights, 0) @ vector, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_mask_and_bcoo_of_each_inexact_dtype(dtype):
    weights = jnp.array([[1, -4, 0], [3, 0, 2]], dtype)
    policy = SparsePolicy(SparseConfig(3))
    mask = policy.make_mask(weights, 5)
    assert mask.tolist() == [[False, True, False], [True, False, True]]
    held = policy.apply_mask(weights, mask)
    assert held.dtype == dtype
    assert held.todense().tolist() == [[0, -4, 0], [3, 0, 2]]


def test_policy_works_in_jit_and_one_program_serves_every_mask():
    policy = SparsePolicy(SparseConfig(2))
    traces = itertools.count()

    @jax.jit
    def prune(weights, step):
        next(traces)
        return policy.apply_mask(weights, policy.make_mask(weights, step))

    for values in ([[1.0, 2.0, 3.0]], [[0.0, 0.0, 0.0]], [[-5.0, 1.0, 4.0]]):
        weights = jnp.array(values)
        np.testing.assert_array_equal(
            prune(weights, 1).todense(), policy.apply_mask(weights, policy.make_mask(weights, 1)).todense()
        )
    assert next(traces) == 1


def test_traced_nan_stays_visible():
    policy = SparsePolicy(SparseConfig(1))
    mask = jax.jit(lambda w: policy.make_mask(w, 0))(jnp.array([[1.0, jnp.nan]]))
    assert mask.tolist() == [[False, True]]


def test_budget_above_the_size_falls_back_or_is_refused():
    weights = jnp.array([[1.0, 2.0]])
    dense = SparsePolicy(SparseConfig(3, fallback_mode="dense_mask"))
    mask = dense.make_mask(weights, 0)
    assert mask.tolist() == [[True, True]]
    held = dense.apply_mask(weights, mask)
    assert not isinstance(held, BCOO)
    assert held.tolist() == [[1.0, 2.0]]
    strict = SparsePolicy(SparseConfig(3, fallback_mode="error"))
    with pytest.raises(ValueError, match=r"2 elements, fewer than nse_budget = 3"):
        strict.make_mask(weights, 0)
    with pytest.raises(ValueError, match=r"2 elements, fewer than nse_budget = 3"):
        strict.apply_mask(weights, mask)


def test_mask_above_the_budget_falls_back_or_is_refused():
    weights, mask = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[True, False, True]])
    assert SparsePolicy(SparseConfig(1)).apply_mask(weights, mask).tolist() == [[1.0, 0.0, 3.0]]
    with pytest.raises(ValueError, match="keeps 2 of them, more than nse_budget = 1"):
        SparsePolicy(SparseConfig(1, fallback_mode="error")).apply_mask(weights, mask)


@pytest.mark.parametrize("shape", [(), (4,), (2, 1, 2)])
def test_weights_that_are_no_matrix_fall_back_or_are_refused(shape):
    weights = jnp.full(shape, 2.0)
    mask = jnp.ones(shape, bool)
    held = SparsePolicy(SparseConfig(1)).apply_mask(weights, ~mask)
    assert held.shape == shape
    assert not held.any()
    with pytest.raises(ValueError, match=rf"{len(shape)}-D, and only a matrix"):
        SparsePolicy(SparseConfig(1, fallback_mode="error")).apply_mask(weights, mask)


def test_should_update_follows_an_interval_or_a_function():
    every = SparsePolicy(SparseConfig(1, update_schedule=4))
    assert [s for s in range(13) if every.should_update(s)] == [0, 4, 8, 12]
    some = SparsePolicy(SparseConfig(1, update_schedule=lambda step: step in (2, 3)))
    assert [s for s in range(6) if some.should_update(s)] == [2, 3]
    assert every.should_update(np.int64(4))
    with pytest.raises(TypeError, match=r"update_schedule\(0\) returned 'yes'"):
        SparsePolicy(SparseConfig(1, update_schedule=lambda step: "yes")).should_update(0)


@pytest.mark.parametrize("step", [True, 1.0, "1", None])
def test_a_step_must_be_an_int(step):
    policy = SparsePolicy(SparseConfig(1))
    with pytest.raises(TypeError, match="step is"):
        policy.should_update(step)
    with pytest.raises(TypeError, match="step is"):
        policy.make_mask(jnp.ones((1, 2)), step)


def test_a_step_must_not_be_negative():
    with pytest.raises(ValueError, match="step is -1; it must be at least 0"):
        SparsePolicy(SparseConfig(1)).should_update(-1)


@pytest.mark.parametrize("budget", [0, -3, np.int32(0)])
def test_nse_budget_below_one_is_refused(budget):
    with pytest.raises(ValueError, match=f"nse_budget is {int(budget)}; it must be at least 1"):
        SparseConfig(nse_budget=budget)


@pytest.mark.parametrize("budget", [True, 2.0, "3", None, jnp.ones(2, int)])
def test_nse_budget_must_be_an_int(budget):
    with pytest.raises(TypeError, match="nse_budget is"):
        SparseConfig(nse_budget=budget)


def test_config_refuses_bad_schedules_and_modes_and_normalises_integers():
    with pytest.raises(ValueError, match="update_schedule is 0"):
        SparseConfig(1, 0)
    with pytest.raises(TypeError, match="update_schedule is False"):
        SparseConfig(1, False)
    with pytest.raises(ValueError, match="fallback_mode is 'dense'; it must be 'dense_mask' or 'error'"):
        SparseConfig(1, 1, "dense")
    assert type(SparseConfig(np.int16(3)).nse_budget) is int
    assert SparseConfig(3) == SparseConfig(np.int16(3))
    assert hash(SparsePolicy(SparseConfig(3))) == hash(SparsePolicy(SparseConfig(3)))


def test_policy_refuses_what_is_no_config_and_bad_budgets():
    with pytest.raises(TypeError, match="must be a SparseConfig"):
        SparsePolicy(8)
    with pytest.raises(TypeError, match="leaf_budgets is"):
        SparsePolicy(SparseConfig(1), leaf_budgets=3)
    with pytest.raises(ValueError, match=r"the budget of \.w is 0"):
        SparsePolicy(SparseConfig(1), leaf_budgets={".w": 0})
    with pytest.raises(TypeError, match=r"the budget of \.w is True"):
        SparsePolicy(SparseConfig(1), leaf_budgets={".w": True})


def test_weights_and_masks_of_the_wrong_kind_are_refused():
    policy = SparsePolicy(SparseConfig(1))
    with pytest.raises(TypeError, match="weights has dtype int32"):
        policy.make_mask(jnp.ones((2, 2), jnp.int32), 0)
    with pytest.raises(TypeError, match="it must be an array"):
        policy.make_mask([[1.0]], 0)
    with pytest.raises(ValueError, match="weights contains NaN"):
        policy.make_mask(jnp.array([[jnp.nan]]), 0)
    with pytest.raises(TypeError, match="it must be a bool array"):
        policy.apply_mask(jnp.ones((1, 2)), jnp.ones((1, 2)))
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\), weights \(1, 2\)"):
        policy.apply_mask(jnp.ones((1, 2)), jnp.ones((2, 1), bool))


class Mixed(eqx.Module):
    big: eqx.nn.Linear
    table: eqx.nn.Embedding
    counts: jax.Array
    small: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 3)
        self.big = eqx.nn.Linear(10, 6, key=keys[0])
        self.table = eqx.nn.Embedding(5, 4, key=keys[1])
        self.counts = jnp.ones((3, 3), jnp.int32)
        self.small = eqx.nn.Linear(2, 1, key=keys[2])


def test_for_model_gives_each_matrix_its_share_clamped_to_its_size():
    policy = SparsePolicy.for_model(Mixed(), density=0.1)
    assert policy.leaf_budgets == {".big.weight": 6, ".small.weight": 1}  # 0.1 * 2 rounds to 0: one stays
    assert policy.config.nse_budget == 7
    assert SparsePolicy.for_model(Mixed(), density=1).leaf_budgets == {".big.weight": 60, ".small.weight": 2}


def test_for_model_over_the_whole_model_compares_magnitudes_across_leaves():
    model = {
        "a": jnp.array([[1.0, 9.0, 8.0, 7.0]]),
        "b": jnp.array([[0.1, 0.2, 6.0, 0.3]]),
        "c": jnp.full((2, 2), 0.01),
    }
    policy = SparsePolicy.for_model(model, density=4 / 12, scope="model")
    assert policy.leaf_budgets == {"['a']": 3, "['b']": 1, "['c']": 1}
    assert policy.for_leaf("['a']").make_mask(model["a"], 0).tolist() == [[False, True, True, True]]


def test_a_policy_over_a_model_must_be_asked_for_the_leaf():
    policy = SparsePolicy.for_model(Mixed(), 0.5, update_schedule=7, fallback_mode="error")
    with pytest.raises(ValueError, match=r"policy\.for_leaf\(path\)\.make_mask"):
        policy.make_mask(jnp.ones((2, 2)), 0)
    with pytest.raises(ValueError, match=r"policy\.for_leaf\(path\)\.apply_mask"):
        policy.apply_mask(jnp.ones((2, 2)), jnp.ones((2, 2), bool))
    with pytest.raises(ValueError, match=r"no budget for the leaf \.other; it has \['\.big\.weight'"):
        policy.for_leaf(".other")
    assert policy.for_leaf(".big.weight").config == SparseConfig(30, 7, "error")
    plain = SparsePolicy(SparseConfig(2))
    assert plain.for_leaf(".anything") == plain


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.5, float("nan")])
def test_for_model_refuses_a_density_out_of_range(density):
    with pytest.raises(ValueError, match="density is"):
        SparsePolicy.for_model(Mixed(), density)


def test_for_model_refuses_the_rest():
    with pytest.raises(TypeError, match="density is True"):
        SparsePolicy.for_model(Mixed(), True)
    with pytest.raises(ValueError, match="scope is 'all'"):
        SparsePolicy.for_model(Mixed(), scope="all")
    with pytest.raises(TypeError, match="leaf_filter is 3"):
        SparsePolicy.for_model(Mixed(), leaf_filter=3)
    with pytest.raises(ValueError, match="no 2-D floating-point leaf"):
        SparsePolicy.for_model({"b": jnp.ones(3)})
