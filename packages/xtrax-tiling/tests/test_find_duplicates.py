"""Finding the elements that are equal byte for byte."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import DedupSpec, axis_dispatch, find_duplicates
from xtrax.tiling import _duplicates as duplicates
from xtrax.tiling import _host_arrays as host_arrays

DTYPES = [bool, np.int8, np.int32, np.uint64, np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]


def by_loop(leaves):
    """The first of each kind of row and the kind of each, by a dict of bytes."""
    leaves = [np.asarray(leaf) for leaf in leaves]
    seen: dict[bytes, int] = {}
    first, groups = [], []
    for i in range(len(leaves[0])):
        key = b"".join(np.asarray(leaf[i]).tobytes() for leaf in leaves)
        if key not in seen:
            seen[key] = len(first)
            first.append(i)
        groups.append(seen[key])
    return first, groups


def found(xs):
    spec = find_duplicates(xs)
    return spec.unique_indices.tolist(), spec.index_map.tolist()


@st.composite
def trees(draw):
    """Leaves of several dtypes and row shapes, few distinct values each, some of them strided or Fortran-ordered."""
    size = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    leaves = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        row = draw(st.sampled_from([(), (1,), (3,), (8,), (2, 5), (0,)]))
        kinds = rng.integers(0, 2, (draw(st.integers(1, 4)), *row)).astype(dtype)
        leaf = kinds[rng.integers(0, len(kinds), size)]
        layout = draw(st.sampled_from(["C", "F", "strided", "jax"]))
        if layout == "F":
            leaf = np.asfortranarray(leaf)
        elif layout == "strided":
            leaf = np.repeat(leaf, 2, axis=0)[::2]
        elif layout == "jax" and np.dtype(dtype).itemsize < 8:
            leaf = jnp.asarray(leaf)
        leaves.append(leaf)
    return leaves


@given(trees())
@settings(max_examples=60, deadline=None)
def test_groups_are_those_of_a_loop_over_the_bytes(leaves):
    assert found({"a": leaves[0], "rest": leaves[1:]}) == by_loop(leaves)


@given(trees(), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_colliding_hashes_change_nothing(leaves, bits):
    good = duplicates._row_hashes

    def poor(leaves, size):
        return good(leaves, size) & np.uint64(2**bits - 1)

    with mock.patch.object(duplicates, "_row_hashes", poor):
        assert found(leaves) == by_loop(leaves)


@given(rows=st.integers(1, 300), seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_rows_that_straddle_blocks(rows, seed):
    rng = np.random.default_rng(seed)
    xs = rng.integers(0, 2, (rows, 3), np.int8)
    with mock.patch.object(duplicates, "_BLOCK_BYTES", 32):
        assert found(xs) == by_loop([xs])


def test_rows_longer_than_a_block():
    xs = np.zeros((4, 200_000), np.float32)
    xs[2, -1] = 1
    assert found(xs) == ([0, 2], [0, 0, 1, 0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_values_that_differ_in_their_high_bits_alone_do_not_collide(dtype):
    # The 2^16 patterns of 16 signs: for floats all differences lie in the top bit of each value.
    signs = (np.arange(1 << 16)[:, None] >> np.arange(16)) & 1
    xs = np.where(signs == 1, 1, -1).astype(dtype)
    assert np.unique(duplicates._row_hashes([xs], len(xs))).size == len(xs)
    top = (signs.astype(np.uint64) << np.uint64(63)).view(np.int64)
    assert np.unique(duplicates._row_hashes([top], len(top))).size == len(top)


def test_bits_decide():
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert found(np.array([0.0, -0.0, quiet, quiet, other], np.float32)) == ([0, 1, 2, 4], [0, 1, 2, 2, 3])


def test_rows_of_one_leaf_do_not_run_into_those_of_the_next():
    # Rows (1, 2) and (12,) as strings of bytes; the widths are the same in every row, so only the pair counts.
    first, second = np.array([[1, 0], [0, 1]], np.int8), np.array([[0], [0]], np.int8)
    assert found([first, second]) == ([0, 1], [0, 1])
    assert found([first[:, :1], first[:, 1:]]) == ([0, 1], [0, 1])


def test_rows_without_bytes_are_all_equal():
    assert found(np.ones((3, 0))) == ([0], [0, 0, 0])
    assert found([np.ones((3, 0)), np.array([1, 2, 1])]) == ([0, 1], [0, 1, 0])


def test_typed_keys_count_by_their_data():
    keys = jax.random.split(jax.random.key(0), 3)[jnp.array([2, 0, 2, 1])]
    assert found(keys) == ([0, 1, 3], [0, 1, 0, 2])


def test_strings_and_dates_have_bytes():
    assert found(np.array(["ab", "a", "ab"])) == ([0, 1], [0, 1, 0])
    assert found(np.array(["2020-01-01", "2020-01-01"], "datetime64[D]")) == ([0], [0, 0])


def test_an_array_over_several_devices_is_read():
    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    size = 4 * jax.device_count()
    xs = jax.device_put(jnp.arange(size) % 3, sharding)
    assert found(xs) == ([0, 1, 2], [i % 3 for i in range(size)])


def test_what_is_found_computes_the_same():
    xs = np.random.default_rng(0).integers(0, 3, (50, 2)).astype(np.float32)
    spec = find_duplicates(xs, "rows")
    assert spec.axis_name == "rows"
    assert spec.k == len({tuple(row) for row in xs.tolist()})
    assert spec.duplicate_fraction == pytest.approx(1 - spec.k / 50)
    ys = axis_dispatch(spec.to_dedup_gather(), lambda x: x * 2 + 1, xs)
    np.testing.assert_array_equal(ys, xs * 2 + 1)


def test_many_rows_equal_numpy_unique():
    xs = np.random.default_rng(0).integers(0, 5_000, 20_000)
    _, first, groups = np.unique(xs, return_index=True, return_inverse=True)
    spec = find_duplicates(xs)
    np.testing.assert_array_equal(spec.unique_indices, np.sort(first))
    np.testing.assert_array_equal(spec.unique_indices[spec.index_map], first[groups])


def test_no_duplicates():
    spec = find_duplicates(np.arange(1000))
    assert spec.k == 1000
    assert spec.duplicate_fraction == 0


class Elsewhere(np.ndarray):
    """Stands in for a `jax.Array` of which other processes hold a part."""

    is_fully_addressable = False


@pytest.mark.parametrize(
    ("xs", "error", "message"),
    [
        ({}, ValueError, "xs has no leaves"),
        (None, ValueError, "xs has no leaves"),
        (np.ones((0, 3)), ValueError, "xs has no elements"),
        (np.float32(1), TypeError, "xs must be a numpy or JAX array"),
        (np.array(1.0), ValueError, "xs is a scalar"),
        ([1, 2], TypeError, r"xs\[0\] must be a numpy or JAX array, but is 1 \(int\)"),
        ("ab", TypeError, "xs must be a numpy or JAX array"),
        ({"a": np.ones(3), "b": np.ones(2)}, ValueError, r"xs\['a'\] has 3 elements .* xs\['b'\] has 2"),
        (np.array([1, "a"], object), TypeError, "xs has dtype object"),
        (np.zeros(2, [("x", np.int8), ("y", np.int64)]), TypeError, "each field as a leaf of its own"),
        (np.ma.masked_array([1, 2], [True, False]), TypeError, "masked"),
    ],
)
def test_bad_data_is_refused(xs, error, message):
    with pytest.raises(error, match=message):
        find_duplicates(xs)


def test_long_doubles_have_bytes_that_are_never_written():
    if np.dtype(np.longdouble) == np.dtype(np.float64):
        pytest.skip("long doubles are doubles here")
    with pytest.raises(TypeError, match="not told by their bytes"):
        find_duplicates(np.ones(2, np.longdouble))


def test_tracers_are_refused():
    with pytest.raises(TypeError, match=r"xs\['x'\] is being traced"):
        jax.jit(lambda x: find_duplicates({"x": x}))(jnp.ones(3))


def test_arrays_of_several_hosts_are_refused():
    xs = np.ones(3).view(Elsewhere)
    with (
        mock.patch.object(host_arrays.jax, "Array", (jax.Array, Elsewhere)),
        pytest.raises(ValueError, match=r"xs\[0\] has parts on other hosts"),
    ):
        find_duplicates([xs])


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (3, TypeError), (None, TypeError)])
def test_bad_names_are_refused(name, error):
    with pytest.raises(error, match="axis_name"):
        find_duplicates(np.ones(3), name)


def test_specs_of_many_elements_are_still_checked():
    anything: Any = np.array([0, 5])
    with pytest.raises(ValueError, match=r"\[1, 5\] is missing from it or out of range"):
        DedupSpec("batch", np.array([0, 1]), anything, k=2)
