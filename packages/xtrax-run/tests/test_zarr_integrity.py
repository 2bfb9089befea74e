"""Digests against what they promise to see and to ignore; canonical JSON; fsync in order."""

import hashlib
import json
import math
import os
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from zarr import codecs

from xtrax.run import (
    SinkSpec,
    ZarrStagingSink,
    canonical_json_bytes,
    collect_provenance,
    fsync_directory,
    fsync_file,
    fsync_tree,
    make_sink,
    normalize_json_value,
    open_results,
    read_jsonl,
    read_jsonl_provenance,
    update_array_digest,
    update_zarr_node_digest,
    verify_store,
    write_json_atomic,
    zarr_content_digest,
)
from xtrax.run import zarr_integrity as module

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")


def make(folder, *, chunks=(2, 2), attrs=None, x=None, **options):
    """A store with a group, an attribute and an array."""
    root = zarr.create_group(str(folder), zarr_format=options.pop("zarr_format", 3))
    group = root.create_group("a")
    group.attrs.update({"step": 1, "tags": ["u", "v"]} if attrs is None else attrs)
    x = np.arange(20.0).reshape(4, 5) if x is None else x
    # Not by data=, which in zarr 3.1.0 writes shards with wrong checksums.
    group.create_array("x", shape=x.shape, dtype=x.dtype, chunks=chunks, **options)[...] = x
    return folder


@pytest.fixture
def reference(tmp_path):
    return zarr_content_digest(make(tmp_path / "reference"))


@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (4, 5)},
        {"chunks": (1, 3)},
        {"chunks": (2, 2), "shards": (4, 6)},
        {"compressors": None},
        {"compressors": codecs.GzipCodec(level=1)},
        {"filters": codecs.TransposeCodec(order=(1, 0))},
        {"fill_value": 7.0},
        {"zarr_format": 2},
    ],
    ids=str,
)
def test_the_digest_does_not_depend_on_how_the_data_are_stored(options, reference, tmp_path):
    assert zarr_content_digest(make(tmp_path / "other", **options)) == reference


def test_the_digest_does_not_depend_on_times_and_order_of_writing(reference, tmp_path):
    root = zarr.create_group(str(tmp_path / "other"))
    x = root.create_array("a/x", shape=(4, 5), chunks=(2, 2), dtype="f8")
    for i in reversed(range(4)):
        x[i] = np.arange(5.0) + 5 * i
    root["a"].attrs.update({"tags": ["u", "v"], "step": 1})
    for file in (tmp_path / "other").rglob("*"):
        os.utime(file, (0, 0))
    assert zarr_content_digest(str(tmp_path / "other")) == reference


def changed(x, where, value):
    x = x.copy()
    x[where] = value
    return x


X = np.arange(20.0).reshape(4, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"x": changed(X, (3, 4), np.nextafter(19.0, 20))},
        {"x": changed(X, (0, 0), -0.0)},
        {"x": X.astype(np.float32)},
        {"x": X.reshape(5, 4)},
        {"x": X[:, :4]},
        {"attrs": {"step": 2, "tags": ["u", "v"]}},
        {"attrs": {"step": 1.0, "tags": ["u", "v"]}},
        {"attrs": {"step": 1, "tags": ["v", "u"]}},
        {"attrs": {}},
    ],
    ids=range(9),
)
def test_the_digest_sees_every_change_of_content(options, reference, tmp_path):
    assert zarr_content_digest(make(tmp_path / "other", **options)) != reference


def test_the_digest_sees_names_and_lost_chunks(reference, tmp_path):
    folder = make(tmp_path / "other")
    os.rename(folder / "a" / "x", folder / "a" / "y")
    assert zarr_content_digest(folder) != reference
    os.rename(folder / "a" / "y", folder / "a" / "x")
    assert zarr_content_digest(folder) == reference
    (folder / "a/x/c/1/1").unlink()
    assert zarr_content_digest(folder) != reference


def test_attributes_and_arrays_cannot_pose_as_one_another(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    root = zarr.create_group(str(one))
    root.create_array("ab", data=np.zeros(2, np.uint8))
    root.create_array("c", data=np.zeros(1, np.uint8))
    root = zarr.create_group(str(two))
    root.create_array("a", data=np.zeros(2, np.uint8))
    root.create_array("bc", data=np.zeros(1, np.uint8))
    assert zarr_content_digest(one) != zarr_content_digest(two)


def test_two_runs_with_equal_results_have_equal_digests(tmp_path):
    for name, run_id, every in [("one", "run-1", 1), ("two", "run-2", 5)]:
        with ZarrStagingSink(tmp_path / name, run_id=run_id, flush_every=every) as sink:
            for i in range(3):
                sink.stage(("k", i), {"i": i}, x=np.full(3, i))
            sink.stage(("k", 0), x=np.full(3, 9))
            if name == "two":
                sink.drain()
                live = zarr_content_digest(tmp_path / name)  # the writer's own files do not count
    assert zarr_content_digest(tmp_path / "one") == zarr_content_digest(tmp_path / "two") == live
    with ZarrStagingSink(tmp_path / "two", run_id="run-2") as sink:
        sink.stage(("k", 1), {"i": 7})
    assert zarr_content_digest(tmp_path / "one") != zarr_content_digest(tmp_path / "two")


def test_reserved_names_count_where_no_run_wrote_them(tmp_path):
    """The names are left out on the root of a run, not elsewhere."""
    stores = []
    for name, git in [("one", 1), ("two", 2)]:
        zarr.create_group(str(tmp_path / name), attributes={"git": git})
        stores.append(zarr_content_digest(tmp_path / name))
    assert stores[0] != stores[1]


def test_what_is_no_store_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        zarr_content_digest(tmp_path / "missing")
    with pytest.raises(ValueError, match="no Zarr group or array"):
        zarr_content_digest(tmp_path)
    with pytest.raises(TypeError, match="node"):
        update_zarr_node_digest(hashlib.sha256(), {})
    with pytest.raises(TypeError, match="array"):
        update_array_digest(hashlib.sha256(), [1, 2])


def digest_of(array):
    digest = hashlib.sha256()
    update_array_digest(digest, array)
    return digest.hexdigest()


def plain_digest(array):
    """What the docstring says, without pieces."""
    head = json.dumps([array.dtype.name, list(array.shape)], separators=(",", ":")).encode()
    data = np.asarray(array, order="C").astype(array.dtype.newbyteorder("<")).tobytes()
    return hashlib.sha256(len(head).to_bytes(8, "little") + head + data).hexdigest()


@settings(max_examples=20, deadline=None)
@given(data=st.data(), limit=st.integers(1, 200))
def test_reading_in_pieces_changes_nothing(data, limit):
    dtype = data.draw(st.sampled_from([np.dtype(t) for t in ("f4", "i8", "bool", "c8", ">u2")]))
    array = data.draw(hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)))
    chunks = data.draw(st.tuples(*(st.integers(1, max(1, n)) for n in array.shape)))
    native = array.astype(array.dtype.newbyteorder("="))
    # Old versions of zarr take a chunk of -0.0 for an empty one.
    stored = zarr.create_array({}, data=native, chunks=chunks, config={"write_empty_chunks": True})
    old, module._PIECE_BYTES = module._PIECE_BYTES, limit
    try:
        assert digest_of(stored) == digest_of(array) == plain_digest(array)
        pieces = list(module._pieces(array.shape, array.itemsize, None))
        assert all(array[p].nbytes <= max(limit, array.itemsize) for p in pieces)
    finally:
        module._PIECE_BYTES = old


def test_jax_arrays_strings_and_nans_have_digests():
    assert digest_of(jnp.arange(3)) == digest_of(np.arange(3, dtype=np.int32))
    assert digest_of(jnp.ones(2, jnp.bfloat16)) != digest_of(jnp.ones(2, jnp.float16))
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert digest_of(quiet) != digest_of(payload)
    strings = zarr.create_array({}, shape=(3,), dtype=str)
    strings[:] = ["a", "bc", ""]
    assert digest_of(strings) == digest_of(np.array(["a", "bc", ""], dtype=object))
    with pytest.raises(TypeError):
        digest_of(np.array([object()]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(JSON.filter(lambda v: "\\ud" not in ascii(v)))
def test_canonical_json_reads_back_and_does_not_depend_on_the_order_of_keys(value):
    def reorder(v):
        if isinstance(v, dict):
            return {k: reorder(v[k]) for k in reversed(v)}
        return tuple(map(reorder, v)) if isinstance(v, list) else v

    assert json.loads(canonical_json_bytes(value)) == value
    assert canonical_json_bytes(reorder(value)) == canonical_json_bytes(value)


def test_canonical_json_is_utf8_sorted_and_without_spaces():
    assert canonical_json_bytes({"b": [1, 2.5], "a": {"é": None}}) == '{"a":{"é":null},"b":[1,2.5]}'.encode()
    assert canonical_json_bytes(1) != canonical_json_bytes(1.0)
    with pytest.raises(ValueError, match="surrogates"):
        canonical_json_bytes("\ud800")


def test_normalized_values_are_plain_python():
    value = {
        "scalar": np.float32(0.5),
        "flag": np.True_,
        "array": np.arange(4).reshape(2, 2),
        "jax": jnp.ones(2),
        "tuple": (1, (2,)),
        "path": Path("a/b"),
        "odd": [math.nan, math.inf, -math.inf, np.float32("nan"), np.array([np.nan])],
        "zero": np.array(3),
    }
    plain = normalize_json_value(value)
    assert plain == {
        "scalar": 0.5,
        "flag": True,
        "array": [[0, 1], [2, 3]],
        "jax": [1.0, 1.0],
        "tuple": [1, [2]],
        "path": "a/b",
        "odd": ["NaN", "Infinity", "-Infinity", "NaN", ["NaN"]],
        "zero": 3,
    }
    assert type(plain["flag"]) is bool
    assert type(plain["scalar"]) is float
    assert type(plain["zero"]) is int


@pytest.mark.parametrize(
    "bad", [b"x", {1, 2}, 1j, object(), np.complex64(1), {"a": [b""]}, np.array(["M8"], object), len]
)
def test_values_that_json_cannot_hold(bad):
    if isinstance(bad, np.ndarray):
        bad = np.array([len], object)
    with pytest.raises(TypeError, match=r"value.*JSON cannot hold"):
        normalize_json_value(bad)


def test_keys_must_be_strings_and_containers_must_end():
    with pytest.raises(TypeError, match=r"value\['a'\] has the key 1 of type int"):
        normalize_json_value({"a": {1: 2}})
    loop = []
    loop.append({"again": loop})
    with pytest.raises(ValueError, match="contains itself"):
        normalize_json_value(loop)
    shared = [1]
    assert normalize_json_value([shared, shared]) == [[1], [1]]  # twice is not a loop


def test_fsync_tree_flushes_everything_from_the_bottom_up(tmp_path, monkeypatch):
    for name in ("a/b/one", "a/two", "three"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "outside")
    order = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (order.append(os.readlink(f"/proc/self/fd/{handle}")), real(handle))
    )
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see which file a descriptor is")
    fsync_tree(tmp_path)
    names = [str(Path(p).relative_to(tmp_path)) for p in order]
    assert sorted(names) == [".", "a", "a/b", "a/b/one", "a/two", "three"]
    for child, parent in [("a/b/one", "a/b"), ("a/b", "a"), ("a/two", "a"), ("a", "."), ("three", ".")]:
        assert names.index(child) < names.index(parent)


def test_fsync_of_the_wrong_kind_or_of_nothing(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(IsADirectoryError, match="fsync_tree"):
        fsync_file(tmp_path)
    for function in (fsync_directory, fsync_tree):
        with pytest.raises(NotADirectoryError):
            function(file)
    for function in (fsync_file, fsync_directory, fsync_tree):
        with pytest.raises(OSError, match="missing"):
            function(tmp_path / "missing")


@pytest.mark.parametrize(
    "function",
    [
        fsync_file, fsync_directory, fsync_tree, zarr_content_digest, verify_store, open_results, read_jsonl,
        read_jsonl_provenance, collect_provenance, lambda path: write_json_atomic(path, {}),
        lambda path: make_sink(SinkSpec(output_dir=path)),
    ],
)  # fmt: skip
def test_what_is_no_path(function):
    for value in (3, b"bytes", 2.5):
        with pytest.raises(TypeError, match=rf"(path|folder|output_dir) must be a (text )?path.* not .*{value!r}"):
            function(value)
    for value in ("", "a\0b"):
        with pytest.raises(ValueError, match="it must name"):
            function(value)


def test_a_foreign_file_in_a_store_is_reported_by_zarr_and_not_counted(reference, tmp_path):
    folder = make(tmp_path / "other")
    (folder / "notes.txt").write_text("hello")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert zarr_content_digest(folder) == reference
