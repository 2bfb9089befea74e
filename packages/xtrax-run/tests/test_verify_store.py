"""`verify_store` names whatever is not as it was committed, and nothing else."""

import itertools
import os
import pickle
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.run import DamagedRunError, SinkError, ZarrStagingSink, verify_store
from xtrax.run._appended.shards import ArraySpec, TileData
from xtrax.run._appended.store import AppendStore

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
SPECS = [
    ArraySpec("y", (3,), "float32", 2, ("n", None)),
    ArraySpec("aux/z", (), "int16", 2, ("n",)),
    ArraySpec("total", (), "float64", None, ()),
]


def make(folder, tiles=(0, 1, 2), finish=True):
    """A run of 5 rows in tiles of 2."""
    store = AppendStore(folder)
    store.create({"run_id": "one", "rows": 5, "tile_rows": 2}, SPECS, {"git": {"sha": "unknown"}})
    for i in tiles:
        n = min(2, 5 - 2 * i)
        arrays = {"y": np.full((n, 3), i + 0.5, np.float32), "aux/z": np.arange(n, dtype=np.int16)}
        data = TileData(i, arrays, b"s%d" % i, {"inputs_sha256": "00"})
        store.commit([store.begin(lambda data=data: data)])
    if finish:
        store.finalize({"total": np.array(7.0)})
    store.close()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, to be copied: making one flushes much."""
    return make(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_that_is_as_it_was_written(tmp_path):
    report = verify_store(str(make(tmp_path)))
    assert report.ok
    assert (report.run_id, report.tiles, report.committed, report.finished) == ("one", 3, 3, True)
    assert report.bytes_checked == sum(
        f.stat().st_size for name in ("y", "aux/z") for f in (tmp_path / name).glob("c.*")
    )
    assert str(report).endswith(f"3 of 3 tiles committed, all as written ({report.bytes_checked} bytes)")


def test_a_run_that_goes_on_is_no_damage(tmp_path):
    report = verify_store(make(tmp_path, tiles=(0, 2), finish=False))
    assert (report.ok, report.committed, report.finished) == (True, 2, False)
    store = AppendStore(tmp_path)  # while it is being written
    (tmp_path / "y" / "c.1.0").write_bytes(b"not committed yet")
    assert verify_store(tmp_path).ok
    store.close()


@pytest.mark.parametrize("step", ["read_records", "_check_manifest", "find_metadata_problems", "_tile_problems"])
@pytest.mark.parametrize("sequential", [False, True])
def test_a_run_that_goes_on_while_it_is_checked(sequential, step, tmp_path, monkeypatch):
    from xtrax.run._appended import inspection

    store = AppendStore(tmp_path)
    store.create({"run_id": "one", "rows": 5, "tile_rows": 2, "sequential": sequential}, SPECS, {})

    def commit(i):
        n = min(2, 5 - 2 * i)
        arrays = {"y": np.zeros((n, 3), np.float32), "aux/z": np.zeros(n, np.int16)}
        store.commit([store.begin(lambda: TileData(i, arrays, b"state", {}))])

    commit(0)
    real, calls = getattr(inspection, step), itertools.count()

    def meanwhile(*args, **options):
        found = real(*args, **options)
        if next(calls) == 0:
            commit(1)
            commit(2)
            store.finalize({"total": np.array(7.0)})
            store.close()
        return found

    monkeypatch.setattr(inspection, step, meanwhile)
    report = verify_store(tmp_path)
    assert report.ok, str(report)
    assert report.committed in (1, 3)


FILES = ["y/c.0.0", "y/c.2.0", "aux/z/c.1", "total/c", ".xtrax/state/1.bin"]


@given(file=st.sampled_from(FILES), where=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_any_flipped_bit_of_data_is_named(file, where, bit, finished, tmp_path_factory):
    path = shutil.copytree(finished, tmp_path_factory.mktemp("copy") / "run") / file
    data = bytearray(path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    path.write_bytes(data)
    (problem,) = verify_store(path.parents[len(file.split("/")) - 1]).problems
    assert problem.path == path
    assert problem.what == "holds other bits than were committed"
    expected = {"y/c.0.0": 0, "y/c.2.0": 2, "aux/z/c.1": 1, ".xtrax/state/1.bin": 1}.get(file)
    assert problem.tile == expected
    assert problem.array == {"y": "y", "a": "aux/z", "t": "total", ".": None}[file[0]]


@given(file=st.sampled_from([".xtrax/commits.jsonl", ".xtrax/manifest.json"]), where=st.integers(0, 10**6),
       bit=st.integers(0, 7))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_flipped_bit_of_the_records_is_noticed(file, where, bit, finished, tmp_path_factory):
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("copy") / "run")
    data = bytearray((folder / file).read_bytes())
    data[where % len(data)] ^= 1 << bit
    before = (folder / file).read_bytes()
    (folder / file).write_bytes(data)
    report = verify_store(folder)
    # Spaces of the manifest carry no meaning.
    assert not report.ok or (file.endswith("manifest.json") and data.split() == before.split())


@pytest.mark.parametrize("file", [*FILES, ".xtrax/commits.jsonl"])
@pytest.mark.parametrize("how", ["deleted", "truncated", "extended"])
def test_files_that_are_gone_or_of_another_length(file, how, copied):
    path = copied / file
    if how == "deleted":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (1 if how == "extended" else -1))
    report = verify_store(copied)
    assert not report.ok
    named = next(problem for problem in report.problems if problem.path == path or "manifest" in str(problem.path))
    assert named
    if file in FILES:
        assert named.path == path
        assert ("is missing" if how == "deleted" else "truncated or replaced") in named.what


@pytest.mark.parametrize("edit", ["codec", "dtype", "rows", "gone", "no json", "no object", "folder", "provenance"])
def test_metadata_that_was_changed(edit, copied):
    path = copied / "y" / "zarr.json"
    if edit == "codec":
        path.write_text(path.read_text().replace("little", "big"))
    elif edit == "dtype":
        path.write_text(path.read_text().replace("float32", "int32"))
    elif edit == "rows":
        zarr.open_array(copied / "y").resize((4, 3))
    elif edit == "gone":
        path.unlink()
    elif edit == "no json":
        path.write_text("{")
    elif edit == "no object":
        path.write_text("[1]")
    elif edit == "folder":
        path.unlink()
        path.mkdir()
    else:
        path = copied / "zarr.json"
        path.write_text(path.read_text().replace("unknown", "abc"))
    (problem,) = [problem for problem in verify_store(copied).problems if problem.path.name == "zarr.json"]
    assert problem.path == path
    expected = {"codec": "changed: codecs", "dtype": "changed: data_type", "rows": "changed: shape",
                "gone": "is missing", "no json": "is no JSON", "no object": "holds a JSON list",
                "folder": "is a folder, where", "provenance": "changed: attributes"}[edit]  # fmt: skip
    assert expected in problem.what


@pytest.mark.parametrize("how", ["gone", "changed", "folder"])
@pytest.mark.parametrize("group", ["aux", ".xtrax"])
def test_the_metadata_of_groups(group, how, copied):
    path = copied / group / "zarr.json"
    path.unlink()
    if how == "changed":
        path.write_text('{"zarr_format": 3, "node_type": "array", "attributes": {}}')
    elif how == "folder":
        path.mkdir()
    (problem,) = verify_store(copied).problems
    assert problem.path == path
    assert {"gone": "is missing", "changed": "was changed: node_type", "folder": "is a folder"}[how] in problem.what


@pytest.mark.parametrize("file", [*FILES, ".xtrax/commits.jsonl", ".xtrax/manifest.json"])
def test_a_folder_where_a_file_is_expected(file, copied):
    path = copied / file
    path.unlink()
    path.mkdir()
    assert [p.what for p in verify_store(copied).problems if p.path == path] == [
        "is a folder, where a run keeps a file"
    ]


@pytest.mark.parametrize("file", ["y", "total", ".xtrax/state"])
def test_a_file_where_a_folder_is_expected(file, copied):
    shutil.rmtree(copied / file)
    (copied / file).write_text("")
    problems = verify_store(copied).problems
    assert all(problem.path.is_relative_to(copied / file) and problem.what == "is missing" for problem in problems)
    assert len(problems) == {"y": 4, "total": 2, ".xtrax/state": 3}[file]


def test_damaged_tiles_are_counted_apart_from_committed_ones(copied):
    for file in ("y/c.1.0", "aux/z/c.1", "y/c.2.0"):
        (copied / file).unlink()
    report = verify_store(copied)
    assert (report.committed, report.damaged, len(report.problems)) == (3, 2, 3)
    head, *lines = str(report).splitlines()
    assert head == f"{copied}: run one, finished, 3 of 3 tiles committed, 2 of them damaged; 3 problems:"
    assert len(lines) == 3
    assert verify_store(make(copied.parent / "whole")).damaged == 0


def test_a_lost_header(copied):
    (copied / ".xtrax" / "run.json").unlink()
    with pytest.raises(DamagedRunError, match=r"run\.json is missing, but .xtrax/commits\.jsonl and .* are there"):
        verify_store(copied)
    (copied / ".xtrax" / "run.json").mkdir()
    with pytest.raises(DamagedRunError, match=r"run\.json is a folder"):
        verify_store(copied)


def test_a_tile_swapped_for_another_is_named(tmp_path):
    make(tmp_path)
    os.replace(tmp_path / "y" / "c.0.0", tmp_path / "y" / "c.1.0")
    assert [problem.tile for problem in verify_store(tmp_path).problems] == [0, 1]


def test_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder"):
        verify_store(tmp_path / "nowhere")
    with pytest.raises(TypeError, match=r"path must be a path \(a string or os\.PathLike\), not int: 3"):
        verify_store(3)
    with pytest.raises(ValueError, match="path is ''; it must name the output_dir of a run"):
        verify_store("")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is a file, not a folder; give the output_dir"):
        verify_store(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="holds no tiled run"):
        verify_store(tmp_path)
    with ZarrStagingSink(tmp_path / "keyed") as sink:
        sink.stage(("a",), x=np.zeros(3))
    with pytest.raises(FileNotFoundError, match="holds no tiled run"):
        verify_store(tmp_path / "keyed")


def test_errors_of_a_store_survive_pickling(tmp_path):
    store = AppendStore(make(tmp_path, finish=False))
    with pytest.raises(SinkError) as caught:
        AppendStore(tmp_path)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.path) == (str(caught.value), tmp_path)
    store.close()
