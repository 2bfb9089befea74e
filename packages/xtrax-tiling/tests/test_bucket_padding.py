"""Choosing a bucket, and padding to it."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrax.tiling import bucketize, select_bucket

BOUNDARIES = st.lists(st.integers(1, 100), min_size=1, max_size=6, unique=True).map(sorted)


@given(length=st.integers(0, 120), boundaries=BOUNDARIES)
def test_the_smallest_boundary_that_fits(length, boundaries):
    fitting = [b for b in boundaries if b >= length]
    if fitting:
        assert select_bucket(length, boundaries) == min(fitting)
    else:
        with pytest.raises(ValueError, match=f"length {length} is past the last boundary {boundaries[-1]}"):
            select_bucket(length, boundaries)


@pytest.mark.parametrize(
    ("length", "boundaries", "error"),
    [
        (-1, (4,), ValueError),
        (True, (4,), TypeError),
        (2.0, (4,), TypeError),
        (float("nan"), (4,), TypeError),
        (2, (), ValueError),
        (2, (4, 4), ValueError),
        (2, (8, 4), ValueError),
        (2, (0, 4), ValueError),
        (2, (4.0,), TypeError),
        (2, 4, TypeError),
    ],
)
def test_bad_lengths_and_boundaries_are_refused(length, boundaries, error):
    with pytest.raises(error):
        select_bucket(length, boundaries)


@given(length=st.integers(0, 6), extra=st.integers(0, 4), axis=st.sampled_from([0, 1, -1, -2]), pad=st.integers(-3, 3))
def test_padding_equals_a_loop(length, extra, axis, pad):
    size = max(1, length + extra)
    shape = (length, 2) if axis in (0, -2) else (2, length)
    xs = np.random.default_rng(0).integers(-9, 9, shape).astype(np.int16)
    padded, mask = bucketize(xs, size, pad_value=pad, axis=axis)
    assert padded.dtype == np.int16
    assert mask.dtype == bool
    assert mask.tolist() == [i < length for i in range(size)]
    rows = xs if axis in (0, -2) else xs.T
    got = padded if axis in (0, -2) else padded.T
    assert got.tolist() == [rows[i].tolist() if i < length else [pad, pad] for i in range(size)]


def test_pytrees_with_prefixes_for_values_and_axes():
    xs = {"tokens": jnp.array([5, 6]), "frames": np.ones((3, 2), np.float32), "label": np.int32(7), "none": None}
    padded, mask = bucketize(
        xs,
        4,
        pad_value={"tokens": -1, "frames": np.nan, "label": 0, "none": None},
        axis={"tokens": 0, "frames": -1, "label": None, "none": None},
    )
    assert padded["tokens"].tolist() == [5, 6, -1, -1]
    assert np.isnan(padded["frames"]).tolist() == [[False, False, True, True]] * 3
    assert padded["label"] == 7
    assert padded["none"] is None
    assert mask.tolist() == [True, True, False, False]
    assert isinstance(padded["tokens"], np.ndarray)


def test_dtypes_are_kept():
    for dtype in (bool, np.uint8, np.float16, ml_dtypes.bfloat16, np.complex64, np.float64):
        padded, _ = bucketize(np.ones(2, dtype), 3)
        assert padded.dtype == dtype
        assert padded.tolist() == [1, 1, 0]


def test_a_full_bucket_is_a_copy():
    xs = np.arange(3)
    padded, mask = bucketize(xs, 3)
    padded[0] = 9
    assert xs.tolist() == [0, 1, 2]
    assert mask.all()


def test_bucketized_elements_of_one_bucket_share_one_program():
    traces = []

    @jax.jit
    def total(x, mask):
        traces.append(x.shape)
        return jnp.sum(jnp.where(mask, x, 0))

    for length in (1, 2, 3, 5, 8):
        xs = np.arange(length)
        assert total(*bucketize(xs, select_bucket(length, (4, 8)), pad_value=99)) == sum(range(length))
    assert traces == [(4,), (8,)]


@pytest.mark.parametrize(
    ("xs", "size", "options", "error", "message"),
    [
        (np.ones(3), 2, {}, ValueError, "bucket_size 2 is shorter than the data, 3 along axis 0 of xs"),
        (np.ones(3), 0, {}, ValueError, "bucket_size must be at least 1"),
        (np.ones(3), True, {}, TypeError, "bucket_size must be an integer"),
        ({"a": np.ones(3), "b": np.ones(2)}, 4, {}, ValueError, r"xs\['a'\] has length 3 .* xs\['b'\] has length 2"),
        ({}, 4, {}, ValueError, "no array to pad"),
        (np.ones(3), 4, {"axis": None}, ValueError, "no array to pad"),
        (np.float32(1), 4, {}, ValueError, r"xs has shape \(\), and so no axis 0"),
        (np.ones(3), 4, {"axis": 1}, ValueError, "no axis 1"),
        (np.ones(3), 4, {"axis": -2}, ValueError, "axis must be at least -1"),
        (np.ones(3), 4, {"axis": True}, TypeError, "axis must be an integer"),
        (np.ones(3, np.uint8), 4, {"pad_value": -1}, ValueError, "pad_value -1 does not fit xs of dtype uint8"),
        (np.ones(3, np.int32), 4, {"pad_value": np.nan}, ValueError, "does not fit"),
        (np.ones(3, np.int32), 4, {"pad_value": 0.5}, ValueError, "does not fit"),
        (np.ones(3), 4, {"pad_value": "0"}, TypeError, "must be a number"),
        (np.ones(3), 4, {"pad_value": [0, 1]}, ValueError, "prefix of xs"),
        (np.array(["a"]), 4, {}, TypeError, "numeric or bool array"),
        (np.ma.masked_array([1, 2], [True, False]), 4, {}, TypeError, "xs is a masked array"),
    ],
)
def test_bad_padding_is_refused(xs, size, options, error, message):
    with pytest.raises(error, match=message):
        bucketize(xs, size, **options)


def test_what_is_not_on_the_host_is_refused():
    with pytest.raises(TypeError, match="xs is being traced"):
        jax.jit(lambda x: bucketize(x, 4))(jnp.ones(3))
    keys: Any = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(TypeError, match="typed PRNG keys"):
        bucketize(keys, 4)
