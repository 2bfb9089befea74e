import itertools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from xtrax.sparse import SparseConfig, SparsePolicy, make_sparse_forward_fn, sparse_filter_jit, sparsify_model
from xtrax.sparse.inference import sparsify_model as by_the_public_path


def mlp(seed=0):
    return eqx.nn.MLP(5, 3, 8, 2, key=jax.random.key(seed))


def quiet(model, policy, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return sparsify_model(model, policy, **options)


def masked_by_numpy(weight, count):
    weight = np.array(weight)
    order = np.argsort(-np.abs(weight).reshape(-1), kind="stable")
    weight.reshape(-1)[order[count:]] = 0
    return weight


def test_matrices_become_bcoo_and_the_forward_pass_is_that_of_the_masked_model():
    model = mlp()
    policy = SparsePolicy(SparseConfig(10))
    sparse_model = quiet(model, policy)
    masked = eqx.tree_at(
        lambda m: [layer.weight for layer in m.layers],
        model,
        [jnp.asarray(masked_by_numpy(layer.weight, 10)) for layer in model.layers],
    )
    for layer, expected in zip(sparse_model.layers, masked.layers, strict=True):
        assert isinstance(layer.weight, BCOO)
        assert layer.weight.nse == 10
        np.testing.assert_array_equal(layer.weight.todense(), expected.weight)
        np.testing.assert_array_equal(layer.bias, expected.bias)
    x = jax.random.normal(jax.random.key(1), (4, 5))
    np.testing.assert_allclose(jax.vmap(sparse_model)(x), jax.vmap(masked)(x), rtol=1e-5, atol=1e-6)
    assert by_the_public_path is sparsify_model


def test_full_density_changes_nothing():
    model = mlp()
    x = jax.random.normal(jax.random.key(1), (4, 5))
    sparse_model = quiet(model, SparsePolicy.for_model(model, density=1.0))
    np.testing.assert_allclose(jax.vmap(sparse_model)(x), jax.vmap(model)(x), rtol=1e-5, atol=1e-6)


def test_attention_runs_on_sparse_projections():
    model = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 8))
    sparse_model = quiet(model, SparsePolicy.for_model(model, density=1.0))
    np.testing.assert_allclose(sparse_model(x, x, x), model(x, x, x), rtol=1e-5, atol=1e-6)


def test_seed_sparsify_model_halts_inside_jit():
    model, policy = mlp(), SparsePolicy(SparseConfig(4))
    with pytest.raises(RuntimeError, match=r"sparsify_model was called inside a JAX trace .*before jit"):
        eqx.filter_jit(lambda m: sparsify_model(m, policy))(model)

    @jax.jit
    def closed_over(x):
        return jax.vmap(sparsify_model(model, policy))(x)

    with pytest.raises(RuntimeError, match="before jit"):
        closed_over(jnp.ones((2, 5)))


def test_seed_sparsify_model_must_run_outside_jit_and_its_result_runs_inside():
    sparse_model = quiet(mlp(), SparsePolicy(SparseConfig(4)))  # outside: no error
    out = jax.jit(lambda x: jax.vmap(sparse_model)(x))(jnp.ones((2, 5)))
    np.testing.assert_allclose(out, jax.vmap(sparse_model)(jnp.ones((2, 5))), rtol=1e-5)


def test_sparsify_model_halts_where_grad_or_vmap_traces_the_model():
    policy = SparsePolicy(SparseConfig(4))
    with pytest.raises(RuntimeError, match="before jit"):
        eqx.filter_grad(lambda m: jnp.sum(sparsify_model(m, policy)(jnp.ones(5))))(mlp())
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(5, 3, 8, 2, key=key))(jax.random.split(jax.random.key(0), 2))
    with pytest.raises(RuntimeError, match="before jit"):
        eqx.filter_vmap(lambda m: sparsify_model(m, policy)(jnp.ones(5)))(models)


def test_one_warning_lists_every_leaf_that_stays_dense():
    model = {
        "matrix": jnp.ones((4, 4)),
        "bias": jnp.ones(4),
        "kernel": jnp.ones((2, 2, 2)),
        "ids": jnp.ones((3, 3), jnp.int32),
        "table": eqx.nn.Embedding(3, 2, key=jax.random.key(0)),
        "small": jnp.ones((1, 2)),
        "empty": jnp.ones((0, 2)),
    }
    with pytest.warns(UserWarning, match="left 6 leaves dense") as caught:
        sparse_model = sparsify_model(model, SparsePolicy(SparseConfig(3)))
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in (
        "['bias'] (it is 1-D)",
        "['kernel'] (it is 3-D)",
        "['ids'] (its dtype is int32)",
        "['table'].weight (Embedding does not multiply by it with @)",
        "['small'] (it has 2 elements, fewer than nse_budget = 3)",
        "['empty'] (it is empty)",
    ):
        assert part in message
    assert "['matrix']" not in message
    assert caught[0].filename == __file__
    assert isinstance(sparse_model["matrix"], BCOO)
    for name in ("bias", "kernel", "ids", "small", "empty"):
        assert sparse_model[name] is model[name] or (sparse_model[name] == model[name]).all()
        assert not isinstance(sparse_model[name], BCOO)


def test_no_warning_where_nothing_stays_dense():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_model({"w": jnp.ones((2, 2))}, SparsePolicy(SparseConfig(3)))


def test_leaf_filter_leaves_others_alone_in_silence():
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparse_model = sparsify_model(
            model, SparsePolicy(SparseConfig(3)), leaf_filter=lambda leaf: eqx.is_array(leaf) and leaf.shape == (8, 8)
        )
    assert [isinstance(layer.weight, BCOO) for layer in sparse_model.layers] == [False, True, False]


def test_policy_of_a_model_decides_which_leaves_and_how_many_weights():
    model = mlp()
    policy = SparsePolicy.for_model(model, 0.25, leaf_filter=lambda leaf: leaf.shape != (3, 8))
    with pytest.warns(UserWarning, match=r"\.layers\[2\]\.weight \(the policy has no budget for it\)"):
        sparse_model = sparsify_model(model, policy)
    assert [getattr(layer.weight, "nse", None) for layer in sparse_model.layers] == [10, 16, None]


def test_sparsifying_twice_is_refused():
    policy = SparsePolicy(SparseConfig(4))
    once = quiet(mlp(), policy)
    with pytest.raises(ValueError, match=r"the leaf \.layers\[0\]\.weight is a BCOO matrix already"):
        sparsify_model(once, policy)


def test_fallback_error_and_nan_name_the_leaf():
    strict = SparsePolicy(SparseConfig(30, fallback_mode="error"))
    with pytest.raises(ValueError, match=r"the leaf \.layers\[2\]\.weight: .*24 elements, fewer than nse_budget = 30"):
        sparsify_model(mlp(), strict)
    model = eqx.tree_at(lambda m: m.layers[1].weight, mlp(), replace_fn=lambda w: w.at[0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match=r"the leaf \.layers\[1\]\.weight: weights contains NaN"):
        sparsify_model(model, SparsePolicy(SparseConfig(4)))


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="it must be a SparsePolicy"):
        sparsify_model(mlp(), SparseConfig(4))
    with pytest.raises(TypeError, match="leaf_filter is None"):
        sparsify_model(mlp(), SparsePolicy(SparseConfig(4)), leaf_filter=None)
    with pytest.raises(TypeError, match="fn is 3"):
        make_sparse_forward_fn(3, mlp())
    with pytest.raises(TypeError, match="fn is None"):
        sparse_filter_jit(None)


def test_forward_fn_does_not_retrace_and_gives_the_model_s_outputs():
    traces = itertools.count()

    def fn(model, inputs):
        next(traces)
        return {"y": jax.vmap(model)(inputs["x"])}

    sparse_model = quiet(mlp(), SparsePolicy(SparseConfig(6)))
    forward = make_sparse_forward_fn(fn, sparse_model)
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (4, 5))
        np.testing.assert_allclose(forward({"x": x})["y"], jax.vmap(sparse_model)(x), rtol=1e-5, atol=1e-6)
    assert next(traces) == 1
    forward({"x": jnp.ones((6, 5))})
    assert next(traces) == 3  # another shape: one more trace


def test_forward_fn_takes_the_weights_as_arguments_not_as_constants():
    seen = []

    def fn(model, x):
        seen.append((model["w"].data, model["w"].indices))
        return model["w"] @ x

    weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    forward = make_sparse_forward_fn(fn, sparsify_model({"w": weights}, SparsePolicy(SparseConfig(4))))
    assert forward(jnp.array([1.0, 10.0])).tolist() == [-29.0, 7.0]
    assert all(isinstance(leaf, jax.core.Tracer) for leaf in seen[0])


def test_forward_fn_is_made_outside_and_may_be_called_inside_a_trace():
    sparse_model = quiet(mlp(), SparsePolicy(SparseConfig(6)))
    forward = make_sparse_forward_fn(lambda m, x: jax.vmap(m)(x), sparse_model)
    np.testing.assert_allclose(jax.jit(forward)(jnp.ones((2, 5))), forward(jnp.ones((2, 5))), rtol=1e-5)
    with pytest.raises(RuntimeError, match="make_sparse_forward_fn was called inside a JAX trace"):
        jax.jit(lambda x: make_sparse_forward_fn(lambda m, x: m(x), sparse_model)(x))(jnp.ones(5))


def test_sparse_filter_jit_does_not_retrace_for_another_mask_or_other_weights():
    traces = itertools.count()

    @sparse_filter_jit
    def forward(model, x):
        """What it does."""
        next(traces)
        return jax.vmap(model)(x)

    policy = SparsePolicy(SparseConfig(6))
    x = jax.random.normal(jax.random.key(0), (4, 5))
    for seed in range(3):
        sparse_model = quiet(mlp(seed), policy)
        np.testing.assert_allclose(forward(sparse_model, x), jax.vmap(sparse_model)(x), rtol=1e-5, atol=1e-6)
    assert next(traces) == 1
    assert forward.__name__ == "forward"
    assert forward.__doc__ == "What it does."


def test_gradients_flow_to_the_stored_weights_only():
    weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    held = sparsify_model({"w": weights}, SparsePolicy(SparseConfig(2)))
    x = jnp.array([10.0, 100.0])
    grads = eqx.filter_grad(lambda m: jnp.sum(m["w"] @ x))(held)
    assert grads["w"].data.tolist() == [100.0, 10.0]  # d/dw of w01 * x1 + w10 * x0
