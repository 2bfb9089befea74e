"""What may be staged and what comes back, in every format, against numpy."""

import functools
import gc
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from xtrax.run import (
    H5StagingSink,
    JsonlStagingSink,
    SinkError,
    SinkSpec,
    StagingSink,
    ZarrStagingSink,
    make_sink,
    new_run_id,
    read_jsonl,
    read_jsonl_provenance,
    run_tiled,
    verify_store,
)
from xtrax.tiling import AxisSpec

try:
    import h5py
except ImportError:
    h5py = None

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
SINKS = {"zarr": ZarrStagingSink, "jsonl": JsonlStagingSink, "h5": H5StagingSink}


@pytest.fixture(params=SINKS)
def fmt(request):
    if request.param == "h5" and h5py is None:
        pytest.skip("h5py is not installed")
    return request.param


def arrays_of(fmt, folder, path):
    """The arrays of one key, read by the format's own library."""
    if fmt == "zarr":
        group = zarr.open_group(str(folder), mode="r")[path]
        return {name: node[...] for name, node in group.arrays()}
    if fmt == "h5":
        with h5py.File(Path(folder, "results.h5")) as file:
            return {name: node[()] for name, node in file[path].items() if isinstance(node, h5py.Dataset)}
    return next(r.arrays for r in read_jsonl(folder) if "/".join(map(str, r.key)) == path)


def attrs_of(fmt, folder, path):
    if fmt == "zarr":
        return dict(zarr.open_group(str(folder), mode="r")[path].attrs)
    if fmt == "h5":
        with h5py.File(Path(folder, "results.h5")) as file:
            return {n: v.item() if isinstance(v, np.generic) else v for n, v in file[path].attrs.items()}
    return next(r.attrs for r in read_jsonl(folder) if "/".join(map(str, r.key)) == path)


def provenance_of(fmt, folder):
    if fmt == "zarr":
        return dict(zarr.open_group(str(folder), mode="r").attrs)
    if fmt == "h5":
        with h5py.File(Path(folder, "results.h5")) as file:
            return {n: json.loads(v) if str(v).startswith("{") else v for n, v in file.attrs.items()}
    return read_jsonl_provenance(folder)


def files_below(folder):
    return {str(p.relative_to(folder)) for p in Path(folder).rglob("*")}


DTYPES = ["bool", "int8", "int64", "uint16", "uint64", "float16", "float32", "float64", "complex64", "complex128"]


@settings(max_examples=25, deadline=None)
@given(data=st.data(), name=st.sampled_from(["zarr", "jsonl", "h5"]))
def test_every_dtype_and_shape_comes_back_to_the_bit(data, name, tmp_path_factory):
    if name == "h5" and h5py is None:
        return
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES)))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = data.draw(hnp.arrays(dtype, shape))  # NaN, infinities, -0.0 and subnormals included
    folder = tmp_path_factory.mktemp("any")
    with SINKS[name](folder) as sink:
        sink.stage(("k", 0), x=array)
    back = arrays_of(name, folder, "k/0")["x"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    if dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(back)[~np.isnan(array)], np.signbit(array)[~np.isnan(array)])


def test_many_kinds_of_values_become_arrays(fmt, tmp_path):
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    values = {
        "jax": (jnp.arange(4, dtype=jnp.int32), np.arange(4, dtype=np.int32)),
        "big_endian": (np.arange(3, dtype=">f4"), np.arange(3, dtype=np.float32)),
        "fortran": (fortran, np.array([[0.0, 1, 2], [3, 4, 5]])),
        "strided": (np.arange(10)[::3], np.array([0, 3, 6, 9])),
        "number": (0.1, np.float64(0.1)),
        "lists": ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
        "flag": (True, np.bool_(True)),
        "largest": (2**64 - 1, np.uint64(2**64 - 1)),
        "numpy_scalar": (np.float16(0.5), np.float16(0.5)),
    }
    with SINKS[fmt](tmp_path) as sink:
        sink.stage(("all",), **{name: value for name, (value, _) in values.items()})
    back = arrays_of(fmt, tmp_path, "all")
    assert back.keys() == values.keys()
    for name, (_, expected) in values.items():
        assert back[name].dtype == np.asarray(expected).dtype, name
        np.testing.assert_array_equal(back[name], expected, err_msg=name)


def test_jsonl_holds_bfloat16_exactly_and_binary_formats_say_to_cast(tmp_path):
    x = jnp.array([0.1, -3.0, jnp.inf, jnp.nan], jnp.bfloat16)
    with JsonlStagingSink(tmp_path / "a") as sink:
        sink.stage(("k",), x=x)
    back = read_jsonl(tmp_path / "a")[0].arrays["x"]
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back.astype(np.float32), np.asarray(x).astype(np.float32))
    with (
        ZarrStagingSink(tmp_path / "b") as sink,
        pytest.raises(TypeError, match=r"'x' of key \('k',\).*bfloat16.*astype"),
    ):
        sink.stage(("k",), x=x)


def test_a_later_change_of_the_array_does_not_reach_the_output(fmt, tmp_path):
    array = np.zeros(3)
    with SINKS[fmt](tmp_path, flush_every=10) as sink:
        sink.stage(("k",), x=array)
        array[:] = 7
    np.testing.assert_array_equal(arrays_of(fmt, tmp_path, "k")["x"], np.zeros(3))


@pytest.mark.parametrize("flush_every", [1, 2, 10])
def test_staging_a_key_again_merges_in_the_buffer_and_on_disk(fmt, flush_every, tmp_path):
    with SINKS[fmt](tmp_path, flush_every=flush_every) as sink:
        sink.stage(("k", 1), {"a": 1, "b": "old"}, x=np.zeros(3), y=np.ones(2))
        sink.stage(("k", 1), {"b": "new"}, x=np.arange(5), z=np.full(1, 9))
        sink.stage(("k", "1"), {"c": 2.5})  # the same key: 1 and "1" have one name on disk
        sink.stage(("k",), w=np.ones(1))
    back = arrays_of(fmt, tmp_path, "k/1")
    assert set(back) == {"x", "y", "z"}
    np.testing.assert_array_equal(back["x"], np.arange(5))
    np.testing.assert_array_equal(back["y"], np.ones(2))
    assert attrs_of(fmt, tmp_path, "k/1") == {"a": 1, "b": "new", "c": 2.5}
    np.testing.assert_array_equal(arrays_of(fmt, tmp_path, "k")["w"], np.ones(1))


def test_flush_every_counts_stages_and_take_returns_what_is_buffered(fmt, tmp_path):
    with SINKS[fmt](tmp_path, flush_every=3) as sink:
        assert isinstance(sink, StagingSink)
        sink.stage(("a",), x=[1, 2])
        sink.stage(("b",), x=[3])
        assert len(sink) == 2
        taken = sink.take(("a",))
        np.testing.assert_array_equal(taken["x"], [1, 2])
        assert len(sink) == 1
        with pytest.raises(KeyError, match=r"\('a',\)"):
            sink.take(("a",))
        sink.stage(("c",), x=[4])  # the third stage
        assert len(sink) == 0
        with pytest.raises(KeyError, match="nothing is buffered"):
            sink.take(("b",))
        sink.drain()  # nothing to do
    np.testing.assert_array_equal(arrays_of(fmt, tmp_path, "b")["x"], [3])
    with pytest.raises((KeyError, StopIteration)):
        arrays_of(fmt, tmp_path, "a")


def test_stage_after_finalize_raises(fmt, tmp_path):
    sink = SINKS[fmt](tmp_path)
    sink.stage(("a",), x=1)
    sink.finalize()
    sink.finalize()  # again: nothing happens
    with pytest.raises(RuntimeError, match="finalized"):
        sink.stage(("b",), x=1)


def test_many_threads_may_stage(fmt, tmp_path):
    with SINKS[fmt](tmp_path, flush_every=7) as sink:
        threads = [
            threading.Thread(target=lambda t=t: [sink.stage((t, i), x=np.full(2, 10 * t + i)) for i in range(5)])
            for t in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for t in range(4):
        for i in range(5):
            np.testing.assert_array_equal(arrays_of(fmt, tmp_path, f"{t}/{i}")["x"], np.full(2, 10 * t + i))


def test_a_host_callback_may_stage(fmt, tmp_path):
    with SINKS[fmt](tmp_path) as sink:

        def record(i, x):
            sink.stage(("row", int(i)), x=x)

        @jax.jit
        def program(xs):
            return jax.lax.map(
                lambda ix: jax.experimental.io_callback(record, None, *ix, ordered=True), (jnp.arange(3), xs)
            )

        program(jnp.arange(6.0).reshape(3, 2))
        jax.effects_barrier()
    np.testing.assert_array_equal(arrays_of(fmt, tmp_path, "row/2")["x"], np.array([4, 5], np.float32))


BAD_KEYS = [
    ("text", TypeError),
    (["a"], TypeError),
    ((), ValueError),
    ((True,), TypeError),
    ((1.0,), TypeError),
    ((None,), TypeError),
    ((b"a",), TypeError),
    (("",), ValueError),
    ((".",), ValueError),
    (("..",), ValueError),
    (("a", "..", "b"), ValueError),
    (("...",), ValueError),
    (("/etc",), ValueError),
    (("a/b",), ValueError),
    (("..\\up",), ValueError),
    (("nul\0",), ValueError),
    (("a", "b\n"), ValueError),
    (("\x1b[31m",), ValueError),
    (("a\x85",), ValueError),
    (("zarr.json",), ValueError),
    (("__reserved",), ValueError),
    ((".xtrax",), ValueError),
    (("x" * 256,), ValueError),
    (("é" * 128,), ValueError),
    (tuple("x" * 200 for _ in range(4)), ValueError),
    (("\ud800",), ValueError),
]


@pytest.mark.parametrize(("key", "error"), BAD_KEYS, ids=lambda v: ascii(v)[:30])
def test_a_key_that_could_leave_the_folder_or_names_nothing_is_refused(fmt, key, error, tmp_path):
    folder = tmp_path / "out"
    with SINKS[fmt](folder) as sink:
        before = files_below(tmp_path)
        with pytest.raises(error, match="key"):
            sink.stage(key, x=1)
        assert len(sink) == 0
        assert files_below(tmp_path) == before


@pytest.mark.parametrize("name", ["..", "a/b", "", "zarr.json", "__x", "nul\0", "a\tb", "\x7f"])
def test_an_array_name_that_could_leave_the_folder_is_refused(fmt, name, tmp_path):
    with SINKS[fmt](tmp_path) as sink, pytest.raises(ValueError, match=r"array name of key \('k',\)"):
        sink.stage(("k",), **{name: np.ones(2)})


def test_numpy_integers_are_ints_in_keys(fmt, tmp_path):
    with SINKS[fmt](tmp_path) as sink:
        sink.stage((np.int64(-3), np.uint8(4)), x=1)
    assert arrays_of(fmt, tmp_path, "-3/4")["x"] == 1


BAD_ARRAYS = [
    (np.array([object()]), "dtype object"),
    (np.array([[1], [1, 2]], dtype=object), "dtype object"),
    ([[1, 2], [3]], "ragged"),
    (np.ma.array([1, -9999], mask=[False, True], dtype="float32"), "masked"),
    (None, "dtype object"),
    ("text", "attrs="),
    (b"bytes", "attrs="),
    (np.array(["a", "b"]), "attrs="),
    (np.array(["2020-01-01"], "M8[D]"), "dtype datetime64"),
    (np.zeros(2, [("a", "f4")]), "dtype"),
    (np.zeros(2, np.longdouble), "dtype"),
    (2**64, "dtype object"),
    ({"a": 1}, "dtype object"),
    (jax.random.key(0), "key_data"),
]


@pytest.mark.parametrize(("value", "text"), BAD_ARRAYS, ids=lambda v: ascii(v)[:25])
def test_objects_ragged_lists_and_unknown_dtypes_are_refused_before_anything_is_written(fmt, value, text, tmp_path):
    if getattr(value, "dtype", None) == np.float64:
        pytest.skip("longdouble is float64 on this machine")
    with SINKS[fmt](tmp_path) as sink:
        before = files_below(tmp_path)
        with pytest.raises(TypeError, match=rf"'bad' of key \('k', 1\).*{text}"):
            sink.stage(("k", 1), good=np.ones(2), bad=value)
        assert len(sink) == 0
        sink.drain()
        assert files_below(tmp_path) == before


def test_staging_inside_a_trace_says_to_use_a_callback(tmp_path):
    with ZarrStagingSink(tmp_path) as sink, pytest.raises(TypeError, match=r"traced.*outside jit"):
        jax.jit(lambda x: sink.stage(("k",), x=x))(jnp.ones(2))


@pytest.mark.parametrize("flush_every", [1, 10])
def test_a_path_cannot_be_an_array_and_a_group(fmt, flush_every, tmp_path):
    if fmt == "jsonl" and flush_every == 1:
        pytest.skip("lines have no paths")
    with SINKS[fmt](tmp_path, flush_every=flush_every) as sink:
        sink.stage(("a",), x=np.ones(2))
        with pytest.raises(ValueError, match=r"a/x.*array of another key"):
            sink.stage(("a", "x"), y=1)
        sink.stage(("b", "c", "d"), y=1)
        with pytest.raises(ValueError, match=r"'c' of key.*group"):
            sink.stage(("b",), c=1)
    np.testing.assert_array_equal(arrays_of(fmt, tmp_path, "a")["x"], np.ones(2))


def test_taken_keys_make_room_for_others(tmp_path):
    with ZarrStagingSink(tmp_path, flush_every=10) as sink:
        sink.stage(("b", "c", "d"), y=1)
        sink.take(("b", "c", "d"))
        sink.stage(("b",), c=1)


def test_attributes_come_back_with_nonfinite_floats_as_text(fmt, tmp_path):
    attrs = {"f": np.float32(0.5), "i": np.int64(3), "t": "ü", "flag": np.True_, "nan": float("nan"), "up": np.inf}
    with SINKS[fmt](tmp_path) as sink:
        sink.stage(("k",), attrs)
        sink.stage(("nested",), {"list": (1, [2.5, None]), "dict": {"a": "b"}, "huge": 2**70})
    assert attrs_of(fmt, tmp_path, "k") == {"f": 0.5, "i": 3, "t": "ü", "flag": True, "nan": "NaN", "up": "Infinity"}
    nested = attrs_of(fmt, tmp_path, "nested")
    if fmt == "h5":  # HDF5 attributes have no lists and dicts; they are JSON text
        nested = {name: json.loads(value) for name, value in nested.items()}
    assert nested == {"list": [1, [2.5, None]], "dict": {"a": "b"}, "huge": 2**70}


@pytest.mark.parametrize(
    ("attrs", "error", "text"),
    [
        ([1], TypeError, "mapping"),
        ({1: 2}, TypeError, "JSON keys are strings"),
        ({"a": object()}, TypeError, r"value\['a'\] is a object"),
        ({"a": {"b": [1, {2}]}}, TypeError, r"value\['a'\]\['b'\]\[1\] is a set"),
        ({"a": 1j}, TypeError, "complex"),
        ({"run_id": "mine"}, ValueError, "'run_id' is reserved"),
        ({"git": {}}, ValueError, "'git' is reserved"),
        ({"created_at": "now"}, ValueError, "'created_at' is reserved"),
    ],
)
def test_bad_attributes_are_refused(fmt, attrs, error, text, tmp_path):
    with SINKS[fmt](tmp_path) as sink:
        with pytest.raises(error, match=text):
            sink.stage(("k",), attrs, x=1)
        assert len(sink) == 0


def test_extension_schema_holds_attributes_to_their_types(fmt, tmp_path):
    schema = {"loss": float, "step": int, "note": (str, type(None))}
    with SINKS[fmt](tmp_path, extension_schema=schema) as sink:
        sink.stage(("k",), {"loss": 1, "step": np.int32(2), "note": None})
        with pytest.raises(ValueError, match="'lss' is not in extension_schema; did you mean 'loss'"):
            sink.stage(("k",), {"lss": 1.0})
        with pytest.raises(TypeError, match=r"'step' is 2.5 .float., declared as int"):
            sink.stage(("k",), {"step": 2.5})
        with pytest.raises(TypeError, match=r"'step' is True .bool."):
            sink.stage(("k",), {"step": True})
        with pytest.raises(TypeError, match="declared as str or NoneType"):
            sink.stage(("k",), {"note": 3})


def test_provenance_is_in_the_output(fmt, tmp_path):
    with SINKS[fmt](tmp_path / "out", run_id="my-run") as sink:
        sink.stage(("k",), x=1)
    found = provenance_of(fmt, tmp_path / "out")
    assert found == sink.provenance
    assert found["run_id"] == sink.run_id == "my-run"
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["xtrax-run"] == importlib.metadata.version("xtrax-run")
    assert found["device_kind"] == jax.devices()[0].device_kind
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["created_at"])
    assert set(found["git"]) == {"sha", "branch", "dirty"}


@pytest.mark.filterwarnings("default:the code's git commit:UserWarning")
def test_outside_a_repository_git_is_unknown_with_one_warning(fmt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    with pytest.warns(UserWarning, match="git") as caught, SINKS[fmt](tmp_path / "out") as sink:
        sink.stage(("k",), x=1)
    assert sum("git" in str(w.message) for w in caught) == 1
    assert provenance_of(fmt, tmp_path / "out")["git"] == {"sha": "unknown", "branch": "unknown", "dirty": "unknown"}


def test_going_on_needs_the_same_run_id(fmt, tmp_path):
    with SINKS[fmt](tmp_path, run_id="one") as sink:
        sink.stage(("a",), x=1)
    for other in (None, "two"):
        with pytest.raises(ValueError, match="holds the run 'one'"):
            SINKS[fmt](tmp_path, run_id=other)
    with SINKS[fmt](tmp_path, run_id="one") as sink:
        sink.stage(("b",), x=2)
    assert arrays_of(fmt, tmp_path, "a")["x"] == 1
    assert arrays_of(fmt, tmp_path, "b")["x"] == 2


def test_a_folder_holds_one_format(fmt, tmp_path):
    with SINKS[fmt](tmp_path, run_id="one"):
        pass
    for other in SINKS.keys() - {fmt}:
        if other != "h5" or h5py is not None:
            with pytest.raises(ValueError, match=f"already holds output in the format '{fmt}'"):
                SINKS[other](tmp_path, run_id="one")


def content(folder):
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


def leave_remains(fmt, folder):
    """What a writer that was killed may leave."""
    if fmt == "tiled":
        return
    hidden = folder / ".xtrax"
    (hidden / ("new" if fmt == "zarr" else "")).mkdir(parents=True)
    for name in {"zarr": ("new/zarr.json",), "jsonl": ("new",), "h5": ("journal.new",)}[fmt]:
        (hidden / name).write_text("half")
    if fmt == "zarr":
        shutil.copytree(folder / "a", hidden / "old" / "b")
        (hidden / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    if fmt == "jsonl":
        with (folder / "results.jsonl").open("a") as file:
            file.write('{"key": ["b"')


@pytest.mark.parametrize("remains", [False, True])
@pytest.mark.parametrize("there", [*SINKS, "tiled"])
def test_a_refusal_changes_nothing(there, remains, tmp_path):
    if there == "h5" and h5py is None:
        pytest.skip("h5py is not installed")
    specs = [AxisSpec("n", 4, 4)]
    run = functools.partial(run_tiled, lambda x: x, np.ones(4, np.float32), specs=specs, progress="off")
    if there == "tiled":
        run(sink=SinkSpec(tmp_path, run_id="one"))
    else:
        with SINKS[there](tmp_path, run_id="one") as sink:
            sink.stage(("a",), x=np.ones(3))
    if remains:
        leave_remains(there, tmp_path)
    before = content(tmp_path)
    for fmt, run_id in itertools.product(SINKS, ("one", "two", None)):
        if (fmt, run_id) != (there, "one") and (fmt != "h5" or h5py is not None):
            with pytest.raises(ValueError, match=r"holds (the run 'one'|output)"):
                make_sink(SinkSpec(tmp_path, format=fmt, run_id=run_id))
            assert content(tmp_path) == before
    for run_id in ("one", "two", None):
        if there != "tiled" or run_id == "two":
            with pytest.raises(ValueError, match=r"holds (results|a Zarr store|the run 'one')"):
                run(sink=SinkSpec(tmp_path), run_id=run_id)
            assert content(tmp_path) == before
    if there == "tiled":
        assert verify_store(tmp_path).ok


def test_an_h5_file_is_refused_before_its_journal_is_played(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    from xtrax.run._staged import h5_file

    with H5StagingSink(tmp_path, run_id="one") as sink:
        sink.stage(("a",), x=np.ones(3))
    sink = H5StagingSink(tmp_path, run_id="one", flush_every=2)
    sink.stage(("b",), x=np.ones(3))

    def killed(handle, body, journal):
        _, pages = h5_file._unpack(body)
        os.pwrite(handle, bytes(200), pages[0][0] * 4096 + 100)  # half of a page
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(h5_file, "_play", killed)
        with pytest.raises(KeyboardInterrupt):
            sink.drain()
    sink._lock.release()
    before = content(tmp_path)
    assert tmp_path / ".xtrax" / "journal" in before
    with pytest.raises(ValueError, match="holds the run 'one'"):
        H5StagingSink(tmp_path, run_id="two")
    assert content(tmp_path) == before
    H5StagingSink(tmp_path, run_id="one").finalize()
    for key in ("a", "b"):
        np.testing.assert_array_equal(arrays_of("h5", tmp_path, key)["x"], np.ones(3))


def test_output_of_others_is_not_touched(tmp_path):
    zarr.create_group(str(tmp_path / "z"), attributes={"mine": 1})
    with pytest.raises(ValueError, match="did not write"):
        ZarrStagingSink(tmp_path / "z", run_id="one")
    assert dict(zarr.open_group(str(tmp_path / "z"), mode="r").attrs) == {"mine": 1}
    assert os.listdir(tmp_path / "z") == ["zarr.json"]
    for text in ("", "hello\n", '{"format": "xtrax-jsonl", "version": 99, "provenance": {}}\n', '[1]\n{"torn'):
        (tmp_path / "j").mkdir(exist_ok=True)
        (tmp_path / "j" / "results.jsonl").write_text(text)
        with pytest.raises(ValueError, match="no results file of version 1"):
            JsonlStagingSink(tmp_path / "j", run_id="one")
        assert (tmp_path / "j" / "results.jsonl").read_text() == text
    if h5py is not None:
        (tmp_path / "h").mkdir()
        (tmp_path / "h" / "results.h5").write_bytes(b"not HDF5")
        with pytest.raises(ValueError, match="no HDF5 file"):
            H5StagingSink(tmp_path / "h", run_id="one")


def test_zarr_readers_find_a_plain_store_during_and_after_the_run(tmp_path):
    with ZarrStagingSink(tmp_path) as sink:
        sink.stage(("a", 1), x=np.zeros((2, 3)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "a" in dict(zarr.open_group(str(tmp_path), mode="r").members())
    assert sorted(os.listdir(tmp_path)) == ["a", "zarr.json"]
    array = zarr.open_array(str(tmp_path / "a" / "1" / "x"), mode="r")
    assert array.metadata.zarr_format == 3
    assert (tmp_path / "a/1/x/c/0/0").stat().st_size == 48  # zeros are written, and not compressed


def test_h5_datasets_are_chunked_and_can_grow(tmp_path):
    pytest.importorskip("h5py")
    with H5StagingSink(tmp_path) as sink:
        sink.stage(("a",), x=np.ones((2, 3)), scalar=1.0, empty=np.ones((0, 3)))
    with h5py.File(tmp_path / "results.h5", "r+") as file:
        x = file["a/x"]
        assert x.chunks is not None
        assert x.maxshape == (None, None)
        x.resize((5, 3))
        x[2:] = 7
        assert x[4, 0] == 7
        assert file["a/empty"].maxshape == (None, None)


def test_other_programs_may_read_h5_between_drains(tmp_path):
    pytest.importorskip("h5py")
    with H5StagingSink(tmp_path) as sink:
        for i in range(3):
            sink.stage(("a", i), x=np.full(2, i))
            assert [len(arrays_of("h5", tmp_path, f"a/{j}")["x"]) for j in range(i + 1)] == [2] * (i + 1)


def test_each_jsonl_line_is_an_object_with_dtype_and_shape(tmp_path):
    with JsonlStagingSink(tmp_path) as sink:
        sink.stage(("s", 1), {"a": 1}, x=np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32), z=np.array(1 - 2j))
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["provenance"]["run_id"] == sink.run_id
    assert json.loads(lines[1]) == {
        "key": ["s", 1],
        "attrs": {"a": 1},
        "arrays": {
            "x": {"dtype": "float32", "shape": [2, 2], "data": [[1.5, "NaN"], ["Infinity", "-Infinity"]]},
            "z": {"dtype": "complex128", "shape": [], "data": [1.0, -2.0]},
        },
    }


def test_a_torn_last_line_is_left_out_and_dropped_when_the_file_is_opened_again(tmp_path):
    with JsonlStagingSink(tmp_path, run_id="one") as sink:
        sink.stage(("a",), x=1)
        sink.stage(("b",), x=2)
    file = tmp_path / "results.jsonl"
    whole = file.read_bytes()
    for cut in (1, 10, len(whole.splitlines(keepends=True)[-1]) - 1):
        file.write_bytes(whole[:-cut])
        with pytest.warns(RuntimeWarning, match="torn"):
            assert [r.key for r in read_jsonl(file)] == [("a",)]
        with JsonlStagingSink(tmp_path, run_id="one") as sink:
            sink.stage(("b",), x=2)
        assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "bad",
    [
        "not json",
        "[1]",
        '{"key": ["a"]}',
        '{"key": "a", "attrs": {}, "arrays": {"x": 1}}',
        '{"key": ["a"], "attrs": {}, "arrays": {"x": {"dtype": "int8", "shape": [2], "data": [1]}}}',
        '{"key": ["a"], "attrs": {}, "arrays": {"x": {"dtype": "int8", "shape": [1], "data": [300]}}}',
        '{"key": ["a"], "attrs": {}, "arrays": {"x": {"dtype": "object", "shape": [1], "data": [1]}}}',
        '{"key": ["a"], "attrs": {}, "arrays": {"x": {"dtype": "complex64", "shape": [1], "data": [[1, 2], [3, 4]]}}}',
    ],
)
def test_a_damaged_line_is_named(bad, tmp_path):
    with JsonlStagingSink(tmp_path) as sink:
        sink.stage(("a",), x=1)
    file = tmp_path / "results.jsonl"
    file.write_text(file.read_text() + bad + "\n")
    with pytest.raises(ValueError, match="line 3 is damaged"):
        read_jsonl(file)


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "missing.jsonl")


def test_new_run_ids_have_twelve_digits_and_differ():
    ids = {new_run_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch("run-[0-9a-f]{12}", i) for i in ids)


def test_seed_make_sink_has_a_writer_for_every_format(tmp_path):
    for name, cls in SINKS.items():
        if name != "h5" or h5py is not None:
            sink = make_sink(SinkSpec(tmp_path / name, format=name, flush_every=5, run_id="r"))
            assert type(sink) is cls
            assert (sink.flush_every, sink.run_id) == (5, "r")
            sink.finalize()
    assert make_sink(SinkSpec(tmp_path / "none", format="none")) is None
    assert not (tmp_path / "none").exists()


def test_without_h5py_the_format_h5_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match="extra h5"):
        make_sink(SinkSpec(tmp_path / "out", format="h5"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"output_dir": 3}, TypeError, "output_dir"),
        ({"output_dir": b"x"}, TypeError, "output_dir"),
        ({"output_dir": ""}, ValueError, "output_dir"),
        ({"output_dir": "a\0"}, ValueError, "output_dir"),
        ({"format": "csv"}, ValueError, "'csv'; allowed are 'jsonl', 'h5', 'zarr', 'none'"),
        ({"format": None}, TypeError, "format"),
        ({"flush_every": 0}, ValueError, "flush_every is 0"),
        ({"flush_every": -1}, ValueError, "flush_every"),
        ({"flush_every": True}, TypeError, "flush_every"),
        ({"flush_every": 1.0}, TypeError, "flush_every"),
        ({"run_id": 3}, TypeError, "run_id"),
        ({"run_id": ""}, ValueError, "run_id"),
        ({"run_id": "../up"}, ValueError, "run_id"),
        ({"extension_schema": ["a"]}, TypeError, "extension_schema"),
        ({"extension_schema": {"a": "int"}}, TypeError, "extension_schema"),
        ({"extension_schema": {"a": np.ndarray}}, TypeError, "extension_schema"),
        ({"extension_schema": {"a": ()}}, TypeError, "extension_schema"),
        ({"extension_schema": {3: int}}, TypeError, "extension_schema"),
        ({"extension_schema": {"run_id": str}}, ValueError, "reserved"),
    ],
    ids=str,
)
def test_a_bad_sink_spec_is_refused_where_it_is_made(arguments, error, text):
    with pytest.raises(error, match=text):
        SinkSpec(**arguments)


def test_make_sink_refuses_what_is_no_spec_and_a_missing_folder():
    with pytest.raises(TypeError, match="SinkSpec"):
        make_sink({"format": "zarr"})
    with pytest.raises(ValueError, match="output_dir is None"):
        make_sink(SinkSpec(format="zarr"))


def test_a_dropped_sink_tells_of_unsaved_keys(tmp_path):
    sink = ZarrStagingSink(tmp_path, flush_every=10, run_id="one")
    sink.stage(("a",), x=1)
    held = [sink]
    del sink
    with pytest.warns(ResourceWarning, match="unsaved keys"):
        held.clear()
    gc.collect()
    ZarrStagingSink(tmp_path, run_id="one").finalize()  # and holds no lock


def test_an_error_in_the_block_still_saves_what_was_staged(fmt, tmp_path):
    def work():
        with SINKS[fmt](tmp_path, flush_every=10, run_id="one") as sink:
            sink.stage(("a",), x=5)
            _ = 1 // 0

    with pytest.raises(ZeroDivisionError):
        work()
    assert arrays_of(fmt, tmp_path, "a")["x"] == 5
    SINKS[fmt](tmp_path, run_id="one").finalize()


def test_sink_errors_survive_pickling(tmp_path):
    import pickle

    error = pickle.loads(pickle.dumps(SinkError("text", path=tmp_path, saved=[("a",)], unsaved=[("b", 1)])))
    assert (str(error), error.path, error.saved, error.unsaved) == ("text", tmp_path, (("a",),), (("b", 1),))
