"""What the documentation of the first release said about planning, one test for each statement."""

import warnings

import numpy as np
import pytest

from xtrax.tiling import (
    AxisSpec,
    BatchPlanner,
    Bucket,
    DedupGather,
    DedupSpec,
    RemainderWarning,
    SafeMap,
    Vmap,
    get_k_bucket,
)


def decide(spec, **planner):
    return BatchPlanner(**planner).plan([spec]).decisions[0].strategy


def test_seed_decision_tree_variable_length_with_boundaries_is_a_bucket():
    assert decide(AxisSpec("a", 100, 32, heterogeneous=True, bucket_boundaries=(8, 16))) == Bucket((8, 16))
    assert decide(AxisSpec("a", 100, 32, dedup_eligible=True, bucket_boundaries=(8, 16))) == Bucket((8, 16))


def test_seed_decision_tree_variable_length_without_boundaries_is_handled_outside():
    with pytest.raises(ValueError, match="give it bucket_boundaries, a DedupSpec, or pad the elements"):
        decide(AxisSpec("a", 100, 32, heterogeneous=True))


def test_seed_decision_tree_repeated_elements_are_gathered_from_the_distinct_ones():
    spec = AxisSpec("a", 100, 32, dedup_eligible=True)
    index_map = np.arange(100) % 3
    strategy = decide(spec, dedup_specs=[DedupSpec("a", np.arange(3), index_map, k=3)])
    assert isinstance(strategy, DedupGather)
    assert (strategy.k, strategy.k_bucket) == (3, 4)
    with pytest.warns(RemainderWarning):  # which elements repeat is not known from a flag: the size decides
        assert decide(spec) == SafeMap(32)


def test_seed_decision_tree_no_larger_than_the_batch_is_a_vmap():
    assert decide(AxisSpec("a", 32, 32)) == Vmap()


def test_seed_decision_tree_divisible_is_a_safe_map_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(AxisSpec("a", 96, 32)) == SafeMap(32)


def test_seed_decision_tree_not_divisible_is_a_safe_map_with_a_warning():
    with pytest.warns(RemainderWarning, match="remainder 4"):
        assert decide(AxisSpec("a", 100, 32)) == SafeMap(32)


def test_seed_gap_of_many_distinct_elements_is_closed():
    # Powers of two wasted up to half; now less than an eighth of what is needed, with few sizes.
    for k in (257, 300, 513, 1025, 5000, 65537):
        assert k <= get_k_bucket(k) <= 1.125 * k
    assert len({get_k_bucket(k) for k in range(257, 4097)}) == 8 * 4
