"""A mesh bound to a function, on eight forced host devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.jit import TraceBudgetExceededError, batched_jit, bounded_jit, explain_retrace, filter_bounded_jit

SPEC = jax.P("data")


def spread(x):
    """The cosine of x, spread over the mesh in context."""
    return jax.lax.with_sharding_constraint(jnp.cos(x), SPEC)


def ambient():
    return jax.sharding.get_mesh()


@pytest.fixture(params=[bounded_jit, filter_bounded_jit])
def wrap(request):
    return request.param


def test_the_mesh_is_entered_around_every_call_and_left_again(wrap, auto_mesh):
    bounded = wrap(spread, max_traces=1, mesh=auto_mesh)
    before = ambient()
    for _ in range(2):
        out = bounded(jnp.arange(16.0))
        assert out.sharding.spec == SPEC
        assert len(out.sharding.device_set) == 8
        np.testing.assert_allclose(out, np.cos(np.arange(16.0)), rtol=1e-6)
        assert ambient() == before
    assert len(explain_retrace(bounded)) == 1
    assert str(explain_retrace(bounded)[0]) == "spread(x: float32[16]) in mesh data=8 (Auto)"


def test_the_mesh_is_left_after_an_error(wrap, auto_mesh):
    bounded = wrap(spread, max_traces=1, mesh=auto_mesh)
    bounded(jnp.ones(8))
    with pytest.raises(TraceBudgetExceededError, match=r"x: shape \(8,\) -> \(16,\)"):
        bounded(jnp.ones(16))
    assert ambient().empty


def test_methods_enter_the_mesh(wrap, auto_mesh):
    bounded = wrap(spread, max_traces=1, mesh=auto_mesh)
    x = jnp.arange(8.0)
    assert bounded.eval_shape(x).shape == (8,)
    assert "@Sharding" in bounded.lower(x).as_text() or "sdy" in bounded.lower(x).as_text()
    assert bounded.lower(x).compile()(x).sharding.spec == SPEC
    assert "data" in str(bounded.trace(x).jaxpr)
    assert len(explain_retrace(bounded)) == 1
    assert ambient().empty
    bounded.clear_cache()
    with pytest.raises(TraceBudgetExceededError, match="nothing visible"):
        bounded(x)


def test_inside_a_transformation_the_ambient_mesh_must_be_the_same(wrap, auto_mesh):
    bounded = wrap(spread, max_traces=1, mesh=auto_mesh)
    x = jnp.arange(8.0)
    transformed = (
        jax.grad(lambda x: bounded(x).sum()),
        jax.jit(bounded),
        jax.vmap(lambda shift: bounded(x + shift)),
        lambda shift: jax.eval_shape(bounded.lower, x),
        jax.jit(lambda x: bounded.eval_shape(x) and x),
    )
    arguments = (x, x, jnp.zeros(2), None, x)
    for transform, argument in zip(transformed, arguments, strict=True):
        with pytest.raises(
            ValueError,
            match=r"(?s)spread is bound to mesh data=8 \(Auto\).*ambient mesh none.*with jax.set_mesh\(mesh\)",
        ):
            transform(argument)
    other = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(other), pytest.raises(ValueError, match=r"ambient mesh data=2 \(Auto\), model=4 \(Auto\)"):
        jax.jit(bounded)(x)
    assert explain_retrace(bounded) == []
    with jax.set_mesh(auto_mesh):
        np.testing.assert_allclose(transformed[0](x), -np.sin(np.arange(8.0)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(jax.jit(bounded)(x), np.cos(np.arange(8.0)), rtol=1e-6)
        assert jax.vmap(bounded)(np.zeros((2, 8), np.float32)).tolist() == [[1] * 8] * 2
    assert len(explain_retrace(bounded)) == 1


def test_another_ambient_mesh_gives_way_to_the_bound_one(auto_mesh):
    bounded = bounded_jit(spread, max_traces=1, mesh=auto_mesh)
    other = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(other):
        assert len(bounded(np.ones(8, np.float32)).sharding.device_set) == 8
        assert ambient() == other
    bounded(np.ones(8, np.float32))
    assert len(explain_retrace(bounded)) == 1


def test_a_batch_is_spread_over_the_mesh(auto_mesh):
    batched = batched_jit(lambda x, w: w @ x, in_axes=(0, None), max_traces=1, mesh=auto_mesh)
    x = jax.device_put(jnp.arange(32.0).reshape(16, 2), jax.NamedSharding(auto_mesh, SPEC))
    w = jnp.arange(6.0).reshape(3, 2)
    out = batched(x, w)
    np.testing.assert_array_equal(out, np.arange(32.0).reshape(16, 2) @ np.arange(6.0).reshape(3, 2).T)
    assert len(out.sharding.device_set) == 8


def test_a_bound_mesh_leaves_methods_and_static_arguments_as_they_are(auto_mesh):
    class Scaler:
        factor = 3.0

        def __hash__(self):
            return 3

        @functools.partial(bounded_jit, max_traces=2, static_argnames=("self", "n"), mesh=auto_mesh)
        def apply(self, x, n):
            return self.factor * x * n

    scaler = Scaler()
    assert scaler.apply(jnp.float32(2), 1) == 6
    assert scaler.apply(jnp.float32(2), n=2) == 12
    assert len(explain_retrace(scaler.apply)) == 2


def test_a_recompilation_without_a_trace_is_outside_the_budget(auto_mesh):
    x = jnp.ones(8)
    anywhere = bounded_jit(jnp.cos, max_traces=1)
    for device in jax.devices()[:3]:
        anywhere(jax.device_put(x, device))
    on_the_mesh = bounded_jit(jnp.cos, max_traces=1)
    for spec in (SPEC, jax.P()):
        on_the_mesh(jax.device_put(x, jax.NamedSharding(auto_mesh, spec)))
    assert [len(explain_retrace(bounded)) for bounded in (anywhere, on_the_mesh)] == [1, 1]


def test_an_array_that_moves_onto_a_mesh_is_named(auto_mesh):
    bounded = bounded_jit(jnp.cos, max_traces=1)
    bounded(jnp.ones(8))
    with pytest.raises(TraceBudgetExceededError, match=r"\n  x: on mesh none -> data=8 \(Auto\)\n"):
        bounded(jax.device_put(jnp.ones(8), jax.NamedSharding(auto_mesh, SPEC)))


def test_what_only_jax_can_name_is_named_in_its_words(auto_mesh):
    bounded = bounded_jit(lambda x: x + 1, max_traces=1)

    def both(x, y):
        return bounded(x) + bounded(y)

    spread = jax.shard_map(both, mesh=auto_mesh, in_specs=(SPEC, jax.P()), out_specs=SPEC)
    with pytest.raises(TraceBudgetExceededError, match=r"\n  x: type .*data.* -> float32\[1\]\n"):
        spread(jnp.ones(8), jnp.ones(1))


def test_an_explicit_mesh_can_be_bound(explicit_mesh):
    bounded = bounded_jit(lambda x: x * 2, max_traces=1, mesh=explicit_mesh)
    x = jax.device_put(jnp.ones((8, 2)), jax.NamedSharding(explicit_mesh, SPEC))
    assert bounded(x).sharding.spec[0] == "data"
    with pytest.raises(TraceBudgetExceededError, match=r"x: sharding P\('data', None\) -> P\(\)"):
        bounded(jax.device_put(x, jax.NamedSharding(explicit_mesh, jax.P())))
