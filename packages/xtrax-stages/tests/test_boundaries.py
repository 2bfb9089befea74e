"""AxisBoundary and the protocols of what stands at an axis's edge."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.stages import AxisBoundary, Fuse, Sink, Tap


class OrderedTap:
    ordered = True

    def __call__(self, value):
        return value


class OrderedSink:
    ordered = True

    def __call__(self, value):
        return None


def my_fuse_fn(stacked):
    return stacked.sum(axis=0)


def test_seed_axis_boundary_has_no_leaves():
    boundary = AxisBoundary(fuse=my_fuse_fn, tap=None, sink=None)
    leaves = jax.tree_util.tree_flatten(boundary)[0]
    assert leaves == []
    assert jax.tree_util.tree_leaves(AxisBoundary(my_fuse_fn, OrderedTap(), OrderedSink())) == []
    assert jax.tree_util.tree_leaves(AxisBoundary()) == []


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
def test_seed_axis_boundary_of_the_same_callables_does_not_retrace(jit):
    traces = []

    @jit
    def step(boundary, x):
        traces.append(None)
        return boundary.fuse(x)

    x = jnp.arange(4.0)
    tap = OrderedTap()
    for _ in range(3):
        assert float(step(AxisBoundary(fuse=my_fuse_fn, tap=tap), x)) == 6.0
    assert len(traces) == 1
    assert float(step(AxisBoundary(fuse=jnp.max, tap=tap), x)) == 3.0
    assert len(traces) == 2


def test_seed_fuse_runs_inside_jit():
    total = jax.jit(lambda x: AxisBoundary(fuse=my_fuse_fn).fuse(x))(jnp.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(total, [6.0, 9.0])


def test_boundaries_of_the_same_callables_are_equal():
    tap = OrderedTap()
    assert AxisBoundary(my_fuse_fn, tap) == AxisBoundary(my_fuse_fn, tap)
    assert AxisBoundary(my_fuse_fn, tap) != AxisBoundary(my_fuse_fn, OrderedTap())


def test_protocols_are_checked_at_run_time():
    assert isinstance(OrderedTap(), Tap)
    assert isinstance(OrderedSink(), Sink)
    assert isinstance(my_fuse_fn, Fuse)
    # A plain function has no `ordered`; it serves as a tap or sink without order.
    assert not isinstance(my_fuse_fn, Tap)
    assert AxisBoundary(tap=my_fuse_fn).tap is my_fuse_fn


@pytest.mark.parametrize("role", ["fuse", "tap", "sink"])
@pytest.mark.parametrize("value", [1, "sum", [my_fuse_fn], OrderedTap])
def test_what_is_not_a_callable_is_refused(role, value):
    with pytest.raises(TypeError, match=f"AxisBoundary: {role} must be a callable of one argument or None; found"):
        AxisBoundary(**{role: value})


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_a_callable_that_cannot_be_hashed_is_refused():
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"AxisBoundary: fuse must be hashable.*found Linear"):
        AxisBoundary(fuse=linear)


@pytest.mark.parametrize("role", ["tap", "sink"])
@pytest.mark.parametrize("flag", ["ordered", "batchable"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_a_flag_that_is_not_a_bool_is_refused(role, flag, value):
    effect = OrderedTap()
    setattr(effect, flag, value)
    with pytest.raises(TypeError, match=f"AxisBoundary: {role}.{flag} must be a bool; found {value!r}"):
        AxisBoundary(**{role: effect})
