"""Duplicates and buckets, against plain Python."""

import math
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.eda import analyze_bucket, analyze_dedup
from xtrax.tiling import AxisDecision, AxisSpec, Bucket, DedupSpec, Vmap


def dedup_spec(elements):
    """The spec of a list with duplicates, by a plain loop."""
    first, index_map = [], []
    seen: dict[int, int] = {}
    for i, element in enumerate(elements):
        if element not in seen:
            seen[element] = len(first)
            first.append(i)
        index_map.append(seen[element])
    return DedupSpec("batch", np.array(first), np.array(index_map), k=len(first))


class TestDedup:
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=60))
    @settings(max_examples=50, deadline=None)
    def test_counts_are_those_of_a_counter(self, elements):
        strategy = dedup_spec(elements).to_dedup_gather()
        stats = analyze_dedup(strategy)
        occurrences = Counter(elements)
        assert stats.unique == len(occurrences)
        assert stats.total == len(elements)
        assert stats.ratio == len(occurrences) / len(elements)
        assert dict(stats.copies) == Counter(occurrences.values())
        assert sum(times * distinct for times, distinct in stats.copies) == len(elements)
        assert stats.padded == 2 ** math.ceil(math.log2(len(occurrences)))  # powers of two, for as few as these
        assert stats.waste == (stats.padded - stats.unique) / stats.padded
        assert stats.saved == 1 - stats.padded / stats.total

    def test_a_decision_a_strategy_and_a_spec_say_the_same(self):
        spec = dedup_spec([5, 5, 7, 5, 8])
        strategy = spec.to_dedup_gather()
        decision = AxisDecision(AxisSpec("batch", 5, 4), strategy.k_bucket, "", strategy)
        of_spec, of_strategy, of_decision = map(analyze_dedup, (spec, strategy, decision))
        assert of_spec == of_decision
        assert of_strategy.axis is None
        assert of_decision.axis == "batch"
        assert (of_strategy.unique, of_strategy.padded, of_strategy.total) == (3, 4, 5)
        assert of_strategy.copies == of_decision.copies == ((1, 2), (3, 1))

    def test_no_copies_at_all_can_cost_more_than_they_save(self):
        stats = analyze_dedup(dedup_spec(range(5)))
        assert stats.ratio == 1
        assert stats.waste == 3 / 8
        assert stats.saved == pytest.approx(-0.6)

    def test_arrays_on_a_device(self, foreign):
        stats = analyze_dedup(foreign.DedupGather(jnp.array([0, 0, 1]), 2, 2))
        assert (stats.unique, stats.total) == (2, 3)
        assert isinstance(stats.copies[0][0], int)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (([], 1, 1), ValueError, "index_map is empty"),
            (([0, 1], 1, 1), ValueError, r"must lie in \[0, k\) with k = 1, but holds 1"),
            (([0, -1], 1, 1), ValueError, "must be at least 0, but entry 1 is -1"),
            (([0.0, 1.0], 2, 2), TypeError, "must hold integers"),
            (([False, True], 2, 2), TypeError, "must hold integers"),
            (([0, True], 2, 2), TypeError, "must hold integers"),
            (([[0], [1]], 2, 2), ValueError, r"one dimension, but has shape \(2, 1\)"),
            (([[0], [1, 2]], 2, 2), TypeError, "flat sequence"),
            (("01", 2, 2), TypeError, "sequence of integers"),
            (([0], 0, 1), ValueError, "k must be at least 1"),
            (([0], True, 1), TypeError, "k must be an integer"),
            (([0, 1], 2, 1), ValueError, "k_bucket must be at least 2"),
        ],
    )
    def test_bad_input(self, foreign, arguments, error, message):
        with pytest.raises(error, match=message):
            analyze_dedup(foreign.DedupGather(*arguments))

    @pytest.mark.parametrize("value", [None, 3, Vmap(), Bucket((4,))])
    def test_what_is_no_dedup(self, value):
        with pytest.raises(TypeError, match="must be a DedupGather or a DedupSpec"):
            analyze_dedup(value)

    def test_a_decision_of_another_strategy_names_its_axis(self):
        decision = AxisDecision(AxisSpec("batch", 5, 8), 5, "", Vmap())
        with pytest.raises(TypeError, match=r"decision\.strategy of axis 'batch' .* but is a Vmap"):
            analyze_dedup(decision)


class TestBucket:
    @given(
        boundaries=st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True).map(sorted),
        data=st.data(),
    )
    @settings(max_examples=50, deadline=None)
    def test_occupancy_and_waste_are_those_of_a_loop(self, boundaries, data):
        lengths = data.draw(st.lists(st.integers(0, boundaries[-1]), max_size=40))
        stats = analyze_bucket(Bucket(boundaries), lengths)
        padded_to = [next(b for b in boundaries if length <= b) for length in lengths]
        assert stats.occupancy == tuple(padded_to.count(b) for b in boundaries)
        assert stats.data == sum(lengths)
        assert stats.padded == sum(padded_to)
        assert stats.waste == pytest.approx(1 - sum(lengths) / sum(padded_to) if lengths else 0)
        for use, boundary in zip(stats.buckets, boundaries, strict=True):
            inside = [length for length, b in zip(lengths, padded_to, strict=True) if b == boundary]
            assert (use.count, use.data, use.padded) == (len(inside), sum(inside), boundary * len(inside))
            assert all(
                (boundary - length) / boundary <= use.worst_waste for length in inside if length
            )  # no element of length 1 or more wastes more
        assert stats.lengths == tuple(sorted(Counter(lengths).items()))
        assert stats.total == len(lengths)

    def test_without_lengths_the_worst_case_is_known(self):
        decision = AxisDecision(AxisSpec("text", 9, 4, bucket_boundaries=[10, 20]), 4, "", Bucket((10, 20)))
        stats = analyze_bucket(decision)
        assert stats.axis == "text"
        assert stats.total == 9
        assert [use.shortest for use in stats.buckets] == [1, 11]
        assert [use.worst_waste for use in stats.buckets] == [0.9, 0.45]
        assert stats.worst_waste == 0.9
        assert stats.occupancy is stats.waste is stats.data is stats.padded is stats.lengths is None

    @pytest.mark.parametrize(
        "kind", [tuple, lambda x: np.array(x, np.int8), jnp.array, lambda x: range(x[0], x[-1] + 1)]
    )
    def test_lengths_may_be_any_sequence(self, kind):
        stats = analyze_bucket(Bucket((4, 8)), kind([3, 4, 5]))
        assert (stats.occupancy, stats.data, stats.padded) == ((2, 1), 12, 16)
        assert type(stats.data) is int

    def test_sums_do_not_overflow(self):
        size = 2**40
        stats = analyze_bucket(Bucket((size,)), np.full(2**24, size - 1))
        assert stats.data == 2**24 * (size - 1)
        assert stats.padded == 2**64

    def test_a_million_lengths_are_counted_by_value(self):
        lengths = np.random.default_rng(0).integers(1, 513, 1_000_000)
        stats = analyze_bucket(Bucket((128, 512)), lengths)
        assert stats.occupancy == (int((lengths <= 128).sum()), int((lengths > 128).sum()))

    @pytest.mark.parametrize(
        ("boundaries", "error", "message"),
        [
            ([], ValueError, "boundaries is empty"),
            ([8, 4], ValueError, r"strictly ascending, but is \(8, 4\)"),
            ([4, 4], ValueError, "strictly ascending"),
            ([0, 4], ValueError, "must be at least 1"),
            ([4.0], TypeError, "must hold integers"),
            ([True], TypeError, "must hold integers"),
            ("4", TypeError, "sequence of integers"),
            (None, TypeError, "sequence of integers"),
        ],
    )
    def test_bad_boundaries(self, foreign, boundaries, error, message):
        with pytest.raises(error, match=message):
            analyze_bucket(foreign.Bucket(boundaries))

    @pytest.mark.parametrize(
        ("lengths", "error", "message"),
        [
            ([-1], ValueError, "must be at least 0, but entry 0 is -1"),
            ([9], ValueError, "length 9 is past the last boundary 8"),
            ([1.5], TypeError, "must hold integers"),
            ([math.nan], TypeError, "must hold integers"),
            ([True, 2], TypeError, "a bool among them"),
            ([[1, 2]], ValueError, "one dimension"),
            ({"text": [1]}, TypeError, "sequence of integers"),
            (np.array([2**63], np.uint64), ValueError, "below 2"),
        ],
    )
    def test_bad_lengths(self, lengths, error, message):
        with pytest.raises(error, match=message):
            analyze_bucket(Bucket((4, 8)), lengths)

    def test_a_sample_is_refused_for_an_axis_and_taken_for_a_strategy(self):
        decision = AxisDecision(AxisSpec("text", 9, 4, bucket_boundaries=[8]), 4, "", Bucket((8,)))
        with pytest.raises(ValueError, match="'text' has 2 entries, but the axis has cardinality 9"):
            analyze_bucket(decision, [1, 2])
        assert analyze_bucket(decision.strategy, [1, 2]).occupancy == (2,)

    @pytest.mark.parametrize("value", [None, 3, Vmap()])
    def test_what_is_no_bucket(self, value):
        with pytest.raises(TypeError, match="must be a Bucket"):
            analyze_bucket(value)
