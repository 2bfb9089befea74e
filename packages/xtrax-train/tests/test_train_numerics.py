"""safe_norm and safe_reciprocal against numpy, and their gradients against mathematics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.training import safe_norm, safe_reciprocal

# XLA on CPU takes subnormal numbers for 0, so none that come near them.
FLOATS = st.floats(-1e4, 1e4, width=32).filter(lambda x: x == 0 or abs(x) > 1e-30)
VECTORS = st.lists(FLOATS, min_size=3, max_size=3).map(lambda v: np.array(v, "float32"))


@settings(max_examples=50, deadline=None)
@given(VECTORS)
def test_norm_is_numpys(x):
    np.testing.assert_allclose(safe_norm(x), np.linalg.norm(x.astype("float64")), rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(VECTORS)
def test_gradient_of_the_norm(x):
    norm = np.linalg.norm(x.astype("float64"))
    expected = np.zeros(3) if norm == 0 else x / norm
    np.testing.assert_allclose(jax.grad(safe_norm)(x), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_norm_over_axes(axis, keepdims):
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    expected = np.sqrt(np.sum(x.astype("float64") ** 2, axis=axis, keepdims=keepdims))
    got = safe_norm(x, axis, keepdims=keepdims)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_norm_neither_overflows_nor_vanishes():
    # The squares of these are not representable in float32.
    np.testing.assert_allclose(safe_norm(jnp.array([3e30, 4e30])), 5e30, rtol=1e-6)
    np.testing.assert_allclose(safe_norm(jnp.array([3e-30, 4e-30])), 5e-30, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(safe_norm)(jnp.array([3e30, 4e30])), [0.6, 0.8], rtol=1e-6)


def test_norm_of_what_is_not_finite():
    assert safe_norm(jnp.array([jnp.inf, 1.0])) == np.inf
    assert np.isnan(safe_norm(jnp.array([jnp.nan, 1.0])))
    assert safe_norm(jnp.zeros(0)) == 0


def test_least_norm():
    x = jnp.array([3.0, 4.0])
    assert safe_norm(x, min_norm=6.0) == 6.0
    assert np.array_equal(jax.grad(lambda x: safe_norm(x, min_norm=6.0))(x), [0.0, 0.0])
    np.testing.assert_allclose(jax.grad(lambda x: safe_norm(x, min_norm=4.0))(x), [0.6, 0.8], rtol=1e-6)


def test_norm_of_complex_and_integers():
    np.testing.assert_allclose(safe_norm(jnp.array([3 + 4j])), 5.0, rtol=1e-6)
    assert safe_norm(jnp.array([3, 4])) == 5.0


def test_second_derivative_at_zero():
    assert np.array_equal(jax.hessian(safe_norm)(jnp.zeros(2)), np.zeros((2, 2)))


@settings(max_examples=50, deadline=None)
@given(VECTORS)
def test_reciprocal(x):
    with np.errstate(divide="ignore", over="ignore"):
        expected = np.where(x == 0, 0, np.float32(1) / x)
        slope = np.where(x == 0, 0, -((np.float32(1) / x) ** 2))
    # XLA on CPU takes subnormal numbers for 0.
    normal = (x == 0) | (np.abs(x) > 1e-18)
    np.testing.assert_allclose(np.asarray(safe_reciprocal(x))[normal], expected[normal], rtol=1e-6)
    gradient = np.asarray(jax.grad(lambda x: safe_reciprocal(x).sum())(x))
    np.testing.assert_allclose(gradient[normal], slope[normal], rtol=1e-5)


def test_reciprocal_of_what_counts_as_zero():
    x = jnp.array([0.5, -0.5, 2.0])
    assert np.array_equal(safe_reciprocal(x, eps=0.5), [0.0, 0.0, 0.5])
    assert np.array_equal(jax.grad(lambda x: safe_reciprocal(x, eps=0.5).sum())(x), [0.0, 0.0, -0.25])
    assert np.array_equal(safe_reciprocal(jnp.array([0, 4])), [0.0, 0.25])


@pytest.mark.parametrize("function", [safe_norm, safe_reciprocal])
@pytest.mark.parametrize("x", ["word", None, np.array([True])])
def test_what_is_not_a_number_is_refused(function, x):
    with pytest.raises(TypeError, match="x must be an array of numbers"):
        function(x)


def test_bad_arguments():
    untyped: Any = safe_norm
    x = jnp.ones(2)
    with pytest.raises(TypeError, match="min_norm must be a number, got True"):
        safe_norm(x, min_norm=True)
    with pytest.raises(ValueError, match="min_norm must be finite and at least 0, got -1"):
        safe_norm(x, min_norm=-1)
    with pytest.raises(ValueError, match="eps must be finite and at least 0, got nan"):
        safe_reciprocal(x, eps=float("nan"))
    with pytest.raises(TypeError, match="keepdims must be True or False"):
        untyped(x, keepdims=1)
    with pytest.raises(ValueError, match="axis"):
        safe_norm(x, axis=1)
