import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.sparse import (
    SparseConfig,
    SparseMaskManager,
    SparsePolicy,
    apply_masks,
    global_masks,
    nm_mask,
    nm_masks,
)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=24, max_size=24),
    nm=st.sampled_from([(1, 2), (2, 4), (4, 4), (1, 1), (3, 8)]),
    axis=st.sampled_from([1, -1, 0]),
)
def test_nm_mask_keeps_the_n_largest_of_every_m(values, nm, axis):
    n, m = nm
    weights = np.array(values, np.float32).reshape((3, 8) if axis else (8, 3))
    mask = np.asarray(nm_mask(jnp.asarray(weights), n, m, axis=axis))
    rows, kept = (weights, mask) if axis else (weights.T, mask.T)
    for row, kept_row in zip(rows, kept, strict=True):
        for start in range(0, len(row), m):
            block = [abs(float(v)) for v in row[start : start + m]]
            expected = sorted(range(m), key=lambda i: (-block[i], i))[:n]
            assert sorted(np.flatnonzero(kept_row[start : start + m]).tolist()) == sorted(expected)


def test_nm_mask_refuses_what_does_not_divide_and_bad_numbers():
    with pytest.raises(ValueError, match="6 entries along axis -1, which is no multiple of m = 4"):
        nm_mask(jnp.ones((2, 6)))
    with pytest.raises(ValueError, match="n is 5, more than the block length m = 4"):
        nm_mask(jnp.ones((2, 8)), 5, 4)
    with pytest.raises(ValueError, match="n is 0"):
        nm_mask(jnp.ones((2, 8)), 0, 4)
    with pytest.raises(TypeError, match="n is True"):
        nm_mask(jnp.ones((2, 8)), True, 4)
    with pytest.raises(ValueError, match="axis is 2, but weights have 2 axes"):
        nm_mask(jnp.ones((2, 8)), axis=2)
    with pytest.raises(ValueError, match="axis is -3"):
        nm_mask(jnp.ones((2, 8)), axis=-3)
    with pytest.raises(TypeError, match="dtype int32"):
        nm_mask(jnp.ones((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="NaN"):
        nm_mask(jnp.full((2, 8), jnp.nan))


def test_nm_masks_of_a_model_name_the_leaf_that_does_not_fit():
    model = eqx.nn.MLP(8, 3, 12, 1, key=jax.random.key(0))
    masks = nm_masks(model)
    assert {path: int(mask.sum()) for path, mask in masks.items()} == {
        ".layers[0].weight": 48,
        ".layers[1].weight": 18,
    }
    narrow = eqx.nn.MLP(7, 3, 12, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"the leaf \.layers\[0\]\.weight: weights have 7 entries"):
        nm_masks(narrow)
    assert list(nm_masks(narrow, leaf_filter=lambda leaf: leaf.shape != (12, 7))) == [".layers[1].weight"]


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.integers(-4, 4), min_size=14, max_size=14), density=st.floats(0.01, 1.0))
def test_global_masks_keep_the_largest_of_the_whole_model(values, density):
    flat = np.array(values, np.float32)
    model = {"a": jnp.asarray(flat[:6].reshape(2, 3)), "b": jnp.asarray(flat[6:].reshape(4, 2)), "bias": jnp.ones(3)}
    masks = global_masks(model, density)
    assert set(masks) == {"['a']", "['b']"}
    kept = np.concatenate([np.asarray(masks["['a']"]).reshape(-1), np.asarray(masks["['b']"]).reshape(-1)])
    count = max(1, round(density * 14))
    expected = sorted(range(14), key=lambda i: (-abs(float(flat[i])), i))[:count]
    assert np.flatnonzero(kept).tolist() == sorted(expected)


def test_global_masks_refuse_nan_and_bad_densities():
    with pytest.raises(ValueError, match=r"the leaf \['w'\] contains NaN"):
        global_masks({"w": jnp.full((2, 2), jnp.nan)}, 0.5)
    with pytest.raises(ValueError, match="density is 2"):
        global_masks({"w": jnp.ones((2, 2))}, 2)
    with pytest.raises(ValueError, match="no 2-D floating-point leaf"):
        global_masks({"w": jnp.ones(2)}, 0.5)


def test_apply_masks_zeroes_weights_and_refuses_what_does_not_fit():
    model = eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0))
    mask = nm_mask(model.layers[0].weight)
    masked = apply_masks(model, {".layers[0].weight": mask})
    np.testing.assert_array_equal(masked.layers[0].weight, np.where(mask, model.layers[0].weight, 0))
    np.testing.assert_array_equal(masked.layers[1].weight, model.layers[1].weight)
    with pytest.raises(ValueError, match=r"masks name the leaf \.other, which the model does not have"):
        apply_masks(model, {".other": mask})
    with pytest.raises(ValueError, match=r"the mask of .* is bool\[2\]; it must be bool\[4, 4\]"):
        apply_masks(model, {".layers[0].weight": jnp.ones(2, bool)})
    with pytest.raises(ValueError, match=r"is float32\[4, 4\]; it must be bool\[4, 4\]"):
        apply_masks(model, {".layers[0].weight": jnp.ones((4, 4))})


def test_manager_keeps_the_mask_between_updates_and_renews_it_on_schedule():
    manager = SparseMaskManager(SparsePolicy(SparseConfig(1, update_schedule=2)))
    assert manager.current_masks() == {}
    assert manager.step({"w": jnp.array([[1.0, 3.0]])}, 0)["w"].tolist() == [[0.0, 3.0]]
    assert manager.step({"w": jnp.array([[9.0, 3.0]])}, 1)["w"].tolist() == [[0.0, 3.0]]
    assert manager.step({"w": jnp.array([[9.0, 3.0]])}, 2)["w"].tolist() == [[9.0, 0.0]]
    assert {path: mask.tolist() for path, mask in manager.current_masks().items()} == {"['w']": [[True, False]]}


def test_the_first_call_makes_masks_at_any_step():
    manager = SparseMaskManager(SparsePolicy(SparseConfig(1, update_schedule=10)))
    assert manager.step({"w": jnp.array([[1.0, 3.0]])}, 7)["w"].tolist() == [[0.0, 3.0]]


def test_current_masks_are_a_copy():
    manager = SparseMaskManager(SparsePolicy(SparseConfig(1)))
    manager.step({"w": jnp.array([[1.0, 3.0]])}, 0)
    manager.current_masks().clear()
    assert list(manager.current_masks()) == ["['w']"]


def test_path_filter_chooses_leaves_of_any_rank():
    params = {"w": jnp.array([[1.0, 3.0]]), "kernel": jnp.array([[[1.0, 2.0]]]), "n": jnp.ones((2, 2), jnp.int32)}
    manager = SparseMaskManager(SparsePolicy(SparseConfig(1)))
    out = manager.step(params, 0, path_filter=lambda path: path != "['w']")
    assert out["w"].tolist() == [[1.0, 3.0]]
    assert out["kernel"].tolist() == [[[0.0, 2.0]]]
    assert list(manager.current_masks()) == ["['kernel']"]


def test_training_under_a_manager_reaches_a_sparse_solution_without_retracing():
    target = jnp.array([[0.0, 5.0, 0.0, -4.0]])
    x = jax.random.normal(jax.random.key(0), (64, 4))
    traces = []

    @jax.jit
    def train_step(params):
        traces.append(None)
        grads = jax.grad(lambda p: jnp.mean((x @ p["w"].T - x @ target.T) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    manager = SparseMaskManager(SparsePolicy(SparseConfig(2, update_schedule=5)))
    params = {"w": jnp.full((1, 4), 0.1, jnp.float32)}
    for step in range(60):
        params = manager.step(train_step(params), step)
        assert int((params["w"] != 0).sum()) <= 2
    np.testing.assert_allclose(params["w"], target, atol=1e-3)
    assert len(traces) == 1


def test_manager_of_a_model_policy_masks_the_leaves_with_a_budget():
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0))
    policy = SparsePolicy.for_model(model, 0.25, leaf_filter=lambda leaf: leaf.shape != (8, 8))
    masked = SparseMaskManager(policy).step(model, 0)
    assert [int((layer.weight != 0).sum()) for layer in masked.layers] == [8, 64, 4]


def test_manager_refuses_traces_other_models_and_bad_arguments():
    policy = SparsePolicy(SparseConfig(1, update_schedule=10))
    manager = SparseMaskManager(policy)
    params = {"w": jnp.ones((1, 2))}
    with pytest.raises(RuntimeError, match=r"SparseMaskManager\.step was called inside a JAX trace"):
        jax.jit(lambda p: manager.step(p, 0))(params)
    assert manager.current_masks() == {}
    manager.step(params, 0)
    with pytest.raises(ValueError, match=r"the leaf \['w'\] has shape \(2, 2\), but its mask has shape \(1, 2\)"):
        manager.step({"w": jnp.ones((2, 2))}, 1)
    with pytest.raises(ValueError, match=r"the leaf \['w'\] is missing"):
        manager.step({"v": jnp.ones((1, 2))}, 1)
    with pytest.raises(TypeError, match="step is True"):
        manager.step(params, True)
    with pytest.raises(ValueError, match="step is -1"):
        manager.step(params, -1)
    with pytest.raises(TypeError, match="path_filter is 'w'"):
        manager.step(params, 0, "w")
    with pytest.raises(ValueError, match=r"no floating-point leaf .*\['w'\]"):
        manager.step(params, 10, lambda path: False)
    with pytest.raises(ValueError, match=r"the leaf \['w'\]: weights contains NaN"):
        manager.step({"w": jnp.array([[jnp.nan, 1.0]])}, 10)
    with pytest.raises(TypeError, match="it must be a SparsePolicy"):
        SparseMaskManager(SparseConfig(1))
