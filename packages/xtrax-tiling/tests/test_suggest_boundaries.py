"""The boundaries that waste the least padding."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xtrax.tiling import padding_waste, select_bucket, suggest_boundaries

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def padded(lengths, boundaries):
    return sum(select_bucket(length, boundaries) for length in lengths)


def least(lengths, max_buckets, multiple_of):
    """The least padded size over all sets of boundaries, by trying each."""
    sizes = sorted({math.ceil(max(length, 1) / multiple_of) * multiple_of for length in lengths})
    count = min(max_buckets, len(sizes))
    return min(padded(lengths, (*chosen, sizes[-1])) for chosen in itertools.combinations(sizes[:-1], count - 1))


def quadratic(lengths, max_buckets):
    """The least padded size by dynamic programming over every pair of sizes."""
    sizes, counts = np.unique(lengths, return_counts=True)
    before = [0, *itertools.accumulate(counts.tolist())]
    cost = [0] + [math.inf] * len(sizes)
    for _ in range(max_buckets):
        cost = [0] + [
            min(cost[i] + int(sizes[j - 1]) * (before[j] - before[i]) for i in range(j)) for j in range(1, len(cost))
        ]
    return cost[-1]


@given(lengths=LENGTHS, max_buckets=st.integers(1, 4), multiple_of=st.integers(1, 9))
@example(lengths=[0], max_buckets=1, multiple_of=1)
@example(lengths=[0, 0, 1], max_buckets=3, multiple_of=8)
@settings(max_examples=150, deadline=None)
def test_no_other_boundaries_pad_less(lengths, max_buckets, multiple_of):
    boundaries = suggest_boundaries(lengths, max_buckets, multiple_of=multiple_of)
    assert 1 <= len(boundaries) <= max_buckets
    assert all(b % multiple_of == 0 for b in boundaries)
    assert list(boundaries) == sorted(set(boundaries))
    assert all(type(b) is int for b in boundaries)
    assert padded(lengths, boundaries) == least(lengths, max_buckets, multiple_of)


@given(seed=st.integers(0, 2**32), max_buckets=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_many_lengths_equal_the_quadratic_programme(seed, max_buckets):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4, 1, 150), 500).astype(int) + 1
    assert padded(lengths, suggest_boundaries(lengths, max_buckets)) == quadratic(lengths, max_buckets)


@given(lengths=LENGTHS, boundaries=st.lists(st.integers(1, 60), max_size=4, unique=True))
@settings(max_examples=50, deadline=None)
def test_waste_is_the_fraction_of_padding(lengths, boundaries):
    boundaries = sorted({*boundaries, 40})
    total = padded(lengths, boundaries)
    waste = padding_waste(lengths, boundaries)
    assert waste == pytest.approx((total - sum(lengths)) / total)
    assert padding_waste(np.array(lengths), boundaries) == waste


def test_every_length_its_own_bucket_wastes_nothing():
    lengths = [5, 9, 9, 13]
    assert suggest_boundaries(lengths, 8) == (5, 9, 13)
    assert padding_waste(lengths, (5, 9, 13)) == 0


def test_arrays_of_any_integer_dtype():
    for dtype in (np.uint8, np.int16, np.uint64):
        assert suggest_boundaries(np.array([250, 3, 4], dtype), 2) == (4, 250)
    assert suggest_boundaries(jnp.array([25, 3, 4]), 2) == (4, 25)


def test_large_lengths_are_exact():
    lengths = [2**40 + 1, 2**40, 2**39, 7]
    assert suggest_boundaries(lengths, 3) == (7, 2**39, 2**40 + 1)
    assert padding_waste(lengths, (7, 2**39, 2**40 + 1)) == pytest.approx(1 / (2**41 + 2**39))


def test_a_hundred_thousand_different_lengths():
    lengths = np.random.default_rng(0).permutation(100_000) + 1
    # Lengths 1 to n in k buckets of width n / k: the least that equal counts of equal steps can waste.
    assert suggest_boundaries(lengths, 4) == (25_000, 50_000, 75_000, 100_000)


@pytest.mark.parametrize(
    ("lengths", "options", "error", "message"),
    [
        ([], {}, ValueError, "lengths is empty"),
        (np.array([], int), {}, ValueError, "lengths is empty"),
        ([3, -1], {}, ValueError, r"lengths\[1\] must be at least 0, but is -1"),
        (np.array([3, -1]), {}, ValueError, r"lengths\[1\] is -1"),
        ([3.0], {}, TypeError, r"lengths\[0\] must be an integer"),
        ([True], {}, TypeError, r"lengths\[0\] must be an integer"),
        ([float("nan")], {}, TypeError, r"lengths\[0\] must be an integer"),
        (np.array([3.0, np.nan]), {}, TypeError, "lengths must hold integers"),
        (np.array([True]), {}, TypeError, "lengths must hold integers"),
        ([[3]], {}, TypeError, "must be an integer"),
        (np.ones((2, 2), int), {}, ValueError, "one dimension"),
        ("34", {}, TypeError, "lengths must be a sequence"),
        (3, {}, TypeError, "lengths must be a sequence"),
        ([2**63], {}, ValueError, r"below 2\*\*62"),
        (np.array([2**63], np.uint64), {}, ValueError, r"below 2\*\*62"),
        ([2**61] * 2, {}, ValueError, "past what can be counted"),
        ([3], {"max_buckets": 0}, ValueError, "max_buckets must be at least 1"),
        ([3], {"max_buckets": True}, TypeError, "max_buckets must be an integer"),
        ([3], {"max_buckets": 2.0}, TypeError, "max_buckets must be an integer"),
        ([3], {"multiple_of": 0}, ValueError, "multiple_of must be at least 1"),
        ([3], {"multiple_of": False}, TypeError, "multiple_of must be an integer"),
    ],
)
def test_bad_lengths_are_refused(lengths, options, error, message):
    with pytest.raises(error, match=message):
        suggest_boundaries(lengths, **{"max_buckets": 2} | options)


def test_waste_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="2 of the lengths, up to 9, are past the last boundary 4"):
        padding_waste([3, 8, 9], (2, 4))
    with pytest.raises(ValueError, match="boundaries is empty"):
        padding_waste([3], ())
    with pytest.raises(ValueError, match="lengths is empty"):
        padding_waste([], (4,))
    with pytest.raises(TypeError, match="lengths must hold integers"):
        padding_waste(np.array([np.nan]), (4,))
