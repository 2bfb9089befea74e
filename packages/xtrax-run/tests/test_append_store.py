"""The appended store and its commit log: what is durable, what a dead writer leaves, what a full disk does."""

import contextlib
import errno
import json
import os
import resource
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.run import DamagedRunError, SinkError, ZarrStagingSink, verify_store, zarr_content_digest
from xtrax.run._appended.commit_log import CommitLog, read_log
from xtrax.run._appended.shards import ArraySpec, TileData, chunk_rows, encode
from xtrax.run._appended.store import AppendStore

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
RECORDS = [{"tile": i, "arrays": {"y": {"bytes": 3 * i, "sha256": "ab" * 32}}} for i in range(4)]


def lines(log):
    return [record["tile"] for record in read_log(log.path).records]


@pytest.fixture
def log(tmp_path):
    log = CommitLog(tmp_path / "commits.jsonl")
    log.create()
    log.append(RECORDS[:2])
    log.append(RECORDS[2:])
    return log


def test_what_is_appended_is_read_back(log):
    assert list(read_log(log.path).records) == RECORDS


@given(cut=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_log_cut_anywhere_holds_its_whole_lines(cut, tmp_path_factory):
    log = CommitLog(tmp_path_factory.mktemp("log") / "commits.jsonl")
    log.create()
    log.append(RECORDS)
    data = log.path.read_bytes()
    cut %= len(data) + 1
    log.path.write_bytes(data[:cut])
    whole = data[:cut].count(b"\n")
    assert lines(log) == list(range(whole))
    log.load()  # cuts the torn line, so that the next one is not glued to it
    log.append(RECORDS[whole:])
    assert list(read_log(log.path).records) == RECORDS


@given(where=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=30, deadline=None)
def test_no_flipped_bit_goes_unnoticed(where, bit, tmp_path_factory):
    log = CommitLog(tmp_path_factory.mktemp("log") / "commits.jsonl")
    log.create()
    log.append(RECORDS)
    data = bytearray(log.path.read_bytes())
    data[where % len(data)] ^= 1 << bit
    log.path.write_bytes(data)
    content = read_log(log.path)
    assert all(record in RECORDS for record in content.records)
    assert len(content.records) < len(RECORDS)
    assert content.damaged or content.torn


def test_an_append_that_fails_leaves_the_log_as_it_was(log):
    before = log.path.read_bytes()
    with largest_file(len(before) + 20), pytest.raises(OSError, match="too large"):
        log.append(RECORDS)
    assert log.path.read_bytes() == before


@contextlib.contextmanager
def largest_file(size):
    """Writes beyond `size` bytes of a file fail, as on a full disk (errno EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@given(
    rows=st.integers(1, 40),
    row=st.sampled_from([(), (3,), (2, 5), (0,), (4, 0)]),
    dtype=st.sampled_from(["bool", "int8", "uint64", "float16", "float64", "complex64"]),
    part=st.integers(1, 40),
    compression=st.sampled_from([None, "zstd", "lz4", "gzip"]),
)
@settings(max_examples=25, deadline=None)
def test_any_zarr_reader_reads_a_shard(rows, row, dtype, part, compression, tmp_path_factory):
    folder, n = tmp_path_factory.mktemp("out"), min(part, rows)
    values = (np.random.default_rng(0).normal(size=(rows + n, *row)) * 100).astype(dtype)
    spec = ArraySpec("a/y", row, dtype, rows, ("n", *[None] * len(row)), compression)
    store = AppendStore(folder)
    store.create({"run_id": "one", "rows": rows + n, "tile_rows": rows}, [spec], {})
    # The last tile first: shards do not depend on one another.
    for tile, span in ((1, slice(rows, rows + n)), (0, slice(0, rows))):
        commit(store, TileData(tile, {"a/y": values[span]}, None, {}))
    store.close()
    array = zarr.open_array(folder / "a" / "y", mode="r")
    assert array.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(array[:], values)
    assert array.chunks[0] == chunk_rows(spec)


@pytest.mark.parametrize("row", [(), (5,), (3, 2)])
@pytest.mark.parametrize("n", [1, 5, 6, 12])
def test_a_shard_is_what_zarr_writes_byte_for_byte(n, row, tmp_path, monkeypatch):
    monkeypatch.setattr("xtrax.run._appended.shards._CHUNK_BYTES", (8, 40))  # several chunks in a shard
    spec = ArraySpec("y", row, "float32", 12, ("n", *[None] * len(row)))
    values = np.random.default_rng(0).normal(size=(n, *row)).astype(np.float32)
    rows = chunk_rows(spec)
    assert rows < 12
    array = zarr.create_array(tmp_path, shape=(n, *row), chunks=(rows, *row), shards=(12, *row), dtype="float32",
                              compressors=None, config={"write_empty_chunks": True})  # fmt: skip
    array[...] = values
    (shard,) = (file for file in (tmp_path / "c").rglob("*") if file.is_file())
    assert b"".join(encode(spec, values)) == shard.read_bytes()


@pytest.mark.parametrize(
    ("rows", "row_bytes", "expected"),
    [(1000, 2**20, 4), (16000, 4096, 1000), (7, 8, 7), (10007, 8, 10007), (10007, 2**20, 1), (64, 2**30, 1)],
)
def test_chunks_divide_the_shard_and_are_neither_tiny_nor_huge(rows, row_bytes, expected):
    spec = ArraySpec("y", (row_bytes,), "int8", rows, ("n", None))
    assert chunk_rows(spec) == expected


def test_what_does_not_fit_the_array_is_refused():
    spec = ArraySpec("y", (3,), "float32", 4, ("n", None))
    with pytest.raises(ValueError, match=r"output 'y' is float32\[2, 4\], expected float32\[2, 3\]"):
        encode(spec, np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="float64"):
        encode(spec, np.zeros((2, 3)))


SPECS = [ArraySpec("y", (500, 50), "float64", 1, ("n", None, None)), ArraySpec("end", (2,), "int32", None, (None,))]
VALUES = np.random.default_rng(1).normal(size=(4, 500, 50))


def tile(i):
    return TileData(i, {"y": VALUES[i : i + 1]}, b"state %d" % i, {"inputs_sha256": "00"})


def fresh(folder, **header):
    store = AppendStore(folder)
    store.create({"run_id": "one", "rows": 4, "tile_rows": 1, **header}, SPECS, {"git": "unknown"})
    return store


def commit(store, *tiles):
    store.commit([store.begin(lambda data=data: data) for data in tiles])


def shown(folder):
    return zarr.open_group(folder, mode="r")["y"].shape[0]


def test_only_rows_without_a_gap_are_shown(tmp_path):
    store = fresh(tmp_path)
    commit(store, tile(0), tile(2))
    store.close()
    assert shown(tmp_path) == 1
    store = AppendStore(tmp_path)
    assert store.recover().problems == ()
    assert sorted(store.committed) == [0, 2]
    commit(store, tile(1))
    store.close()
    assert shown(tmp_path) == 3


@pytest.mark.parametrize("sequential", [False, True])
def test_states_are_kept_as_long_as_they_are_needed(sequential, tmp_path):
    store = fresh(tmp_path, sequential=sequential)
    commit(store, tile(0), tile(1))
    commit(store, tile(2))
    assert [store.has_state(i) for i in range(4)] == [not sequential, not sequential, True, False]
    assert store.state(2) == b"state 2"
    store.close()


def test_a_full_disk_loses_nothing_that_is_committed(tmp_path):
    store = fresh(tmp_path)
    commit(store, tile(0))
    before = zarr_content_digest(tmp_path)
    with (
        largest_file(100_000),
        pytest.raises(SinkError, match=r"1 of 4 tiles are committed and safe; remove") as caught,
    ):
        commit(store, tile(1))
    assert (caught.value.saved, caught.value.path) == (((0,),), tmp_path)
    assert not list(tmp_path.rglob("*.partial"))
    assert zarr_content_digest(tmp_path) == before
    commit(store, tile(1))  # the cause is gone
    store.close()
    assert shown(tmp_path) == 2


def test_a_finished_run_has_what_is_known_at_its_end(tmp_path):
    store = fresh(tmp_path)
    commit(store, *map(tile, range(4)))
    assert not store.finalized
    store.finalize({"end": np.array([3, 4], np.int32)})
    assert store.finalized
    store.close()
    group = zarr.open_group(tmp_path, mode="r")
    assert group["end"][:].tolist() == [3, 4]
    np.testing.assert_array_equal(group["y"][:], VALUES)
    assert dict(group.attrs) == {"run_id": "one", "layout": "appended-1", "git": "unknown"}
    assert sorted(name for name, _ in group.arrays()) == ["end", "y"]  # its own files are no arrays


def test_a_damaged_run_that_is_only_looked_at_stays_as_it_is(tmp_path):
    store = fresh(tmp_path)
    commit(store, *map(tile, range(4)))
    store.finalize({"end": np.array([3, 4], np.int32)})
    store.close()
    (tmp_path / "y" / "c.1.0.0").write_bytes(b"damaged")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    store = AppendStore(tmp_path)
    assert store.recover().damaged_tiles == {1}
    store.close()  # as when the call is refused for another reason
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize(
    ("gone", "cause"),
    [
        ("y", "No such file"),
        (".xtrax", "removed or replaced"),
        (".", "removed or replaced"),
        ("y/c.0.0.0", "too large"),
    ],
)
def test_only_what_is_still_there_is_called_safe(gone, cause, tmp_path):
    folder = tmp_path / "out"
    store = fresh(folder)
    commit(store, tile(0), tile(1))
    shutil.rmtree(folder / gone) if (folder / gone).is_dir() else (folder / gone).unlink()
    safe = 1 if cause == "too large" else 0
    todo = "run anew in another output_dir" if gone in (".", ".xtrax") else "run again to compute them anew"
    message = rf"{cause}.*{safe} of 4 tiles are committed and safe, and {2 - safe} that were committed are gone.*{todo}"
    with largest_file(100_000), pytest.raises(SinkError, match=message) as caught:
        commit(store, tile(2))
    store.close()
    assert caught.value.saved == ((1,),) * safe


def test_what_cannot_be_looked_at_is_not_called_safe(tmp_path, monkeypatch):
    store = fresh(tmp_path)
    commit(store, tile(0))
    with monkeypatch.context() as patched:

        def broken(*_):
            raise OSError(errno.EIO, "Input/output error")

        patched.setattr("xtrax.run._appended.errors.read_log", broken)
        with largest_file(100_000), pytest.raises(SinkError, match="1 of 4 tiles were committed, but cannot be looked"):
            commit(store, tile(1))
    store.close()


def lose(folder, how):
    path = folder / how.removesuffix(" cut")
    os.truncate(path, path.stat().st_size // 2) if how.endswith(" cut") else path.unlink()


@pytest.mark.parametrize("commits", [2, 4])
@pytest.mark.parametrize(
    "how",
    [".xtrax/run.json", ".xtrax/run.json cut", ".xtrax/commits.jsonl", ".xtrax/commits.jsonl cut", "y/zarr.json",
     "y/zarr.json cut", "zarr.json", ".xtrax/zarr.json"],
)  # fmt: skip
def test_what_a_run_knows_is_written_anew(how, commits, tmp_path, caplog):
    """Files that are removed or cut while it goes on; it could not be taken up without them."""
    store = fresh(tmp_path / "out")
    commit(store, *map(tile, range(commits)))
    lose(tmp_path / "out", how)
    with caplog.at_level("WARNING", "xtrax.run"):
        for i in range(commits, 4):
            commit(store, tile(i))
        if how.startswith(".xtrax/") and commits == 2 and "zarr" not in how:
            assert verify_store(tmp_path / "out").ok  # from the next commit on
        store.finalize({"end": np.array([3, 4], np.int32)})
    store.close()
    if "zarr" not in how:
        assert f"{how.removesuffix(' cut')} was removed or changed while the run went on" in caplog.text
    assert verify_store(tmp_path / "out").ok
    store = AppendStore(tmp_path / "out")
    assert store.recover().finished
    store.close()


def test_a_run_does_not_end_without_what_it_committed(tmp_path):
    store = fresh(tmp_path)
    commit(store, *map(tile, range(4)))
    (tmp_path / "y" / "c.2.0.0").unlink()
    with pytest.raises(SinkError, match=r"tile 2 was committed, but .*/y/c\.2\.0\.0 is missing\. 3 of 4 tiles are"):
        store.finalize({"end": np.array([3, 4], np.int32)})
    assert not store.finalized
    store.close()


@pytest.mark.parametrize(
    "name", ["y/c.1.0.0", "y/zarr.json", ".xtrax/state/1.bin", ".xtrax/manifest.json", "zarr.json"]
)
def test_a_folder_in_the_place_of_a_file(name, tmp_path):
    store = fresh(tmp_path)
    commit(store, *map(tile, range(4)))
    store.finalize({"end": np.array([3, 4], np.int32)})
    store.close()
    path = tmp_path / name
    path.unlink()
    path.mkdir()
    (path / "mine").write_text("mine")

    def resume():
        store = AppendStore(tmp_path)
        try:
            found = store.recover()
            store.repair(found)
            for i in set(range(4)) - store.committed.keys():
                commit(store, tile(i))
            store.finalize({"end": np.array([3, 4], np.int32)})
        finally:
            store.close()

    with pytest.raises(SinkError, match=rf"a folder with something in it is.*move it away: '.*/{name}'"):
        resume()
    assert (path / "mine").read_text() == "mine"
    (path / "mine").unlink()
    resume()
    assert verify_store(tmp_path).ok


def test_a_folder_in_the_place_of_the_log(tmp_path):
    store = fresh(tmp_path)
    commit(store, tile(0))
    store.close()
    (tmp_path / ".xtrax" / "commits.jsonl").unlink()
    (tmp_path / ".xtrax" / "commits.jsonl").mkdir()
    with pytest.raises(DamagedRunError, match=r"commits\.jsonl is a folder, but .* are there"):
        AppendStore(tmp_path)


def test_one_live_writer(tmp_path):
    store = fresh(tmp_path)
    with pytest.raises(SinkError, match=f"another live sink.*{os.getpid()}"):
        AppendStore(tmp_path)
    store.close()
    AppendStore(tmp_path).close()


def test_layouts_do_not_mix(tmp_path):
    fresh(tmp_path / "appended").close()
    with pytest.raises(ValueError, match="layout 'appended-1'"):
        ZarrStagingSink(tmp_path / "appended", run_id="one")
    (tmp_path / "appended" / "zarr.json").unlink()
    with pytest.raises(ValueError, match=r"tiled run that has lost its zarr\.json"):
        ZarrStagingSink(tmp_path / "appended", run_id="one")
    with ZarrStagingSink(tmp_path / "keyed", run_id="one") as sink:
        sink.stage(("a",), x=np.zeros(3))
    with pytest.raises(ValueError, match="not a tiled run"):
        AppendStore(tmp_path / "keyed")


def test_a_later_format_is_not_guessed_at(tmp_path):
    from xtrax.run._appended.commit_log import sealed

    fresh(tmp_path).close()
    path = tmp_path / ".xtrax" / "run.json"
    header = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "check"}
    path.write_text(json.dumps(sealed({**header, "format": 2})))
    with pytest.raises(DamagedRunError, match=r"has format 2; this version of xtrax\.run knows 1"):
        AppendStore(tmp_path)


@pytest.mark.parametrize("missing", ["run.json", "zarr.json"])
def test_a_run_whose_making_was_killed_is_no_run(missing, tmp_path):
    fresh(tmp_path).close()
    (tmp_path / ".xtrax" / "run.json").unlink()
    if missing == "zarr.json":
        (tmp_path / "zarr.json").unlink()
    store = AppendStore(tmp_path)
    assert store.header is None
    store.close()
    store = fresh(tmp_path)
    commit(store, tile(0))
    store.close()
    assert shown(tmp_path) == 1


@pytest.mark.parametrize("name", ["notes.txt", "c", "c.0.0.0"])
def test_files_that_no_run_wrote_are_refused_and_never_removed(name, tmp_path):
    mine = tmp_path / "y" / name
    mine.parent.mkdir()
    mine.write_text("mine")
    store = AppendStore(tmp_path)
    for _ in range(2):
        with pytest.raises(FileExistsError, match=rf"output 'y' is written to {tmp_path}/y, but there is '{name}' in"):
            store.create({"run_id": "one", "rows": 4, "tile_rows": 1}, SPECS, {})
    store.close()
    assert mine.read_text() == "mine"
    assert not (tmp_path / "zarr.json").exists()


def test_files_that_came_to_a_run_without_a_commit_are_kept(tmp_path):
    fresh(tmp_path).close()
    (tmp_path / "y" / "notes.txt").write_text("mine")
    store = AppendStore(tmp_path)
    store.recover()
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        store.create({"run_id": "one", "rows": 4, "tile_rows": 1}, SPECS, {})
    other = [ArraySpec("z", (2,), "int32", 1, ("n", None))]
    store.create({"run_id": "one", "rows": 4, "tile_rows": 1}, other, {})
    store.close()
    assert [path.name for path in (tmp_path / "y").iterdir()] == ["notes.txt"]


def test_an_array_may_take_the_place_of_a_group_without_a_commit(tmp_path):
    inner, outer = (ArraySpec(name, (2,), "int32", 1, ("n", None)) for name in ("a/b", "a"))
    store = AppendStore(tmp_path)
    for spec in (inner, outer):
        store.create({"run_id": "one", "rows": 4, "tile_rows": 1}, [spec], {})
    store.close()
    assert zarr.open_array(tmp_path / "a", mode="r").shape == (0, 2)
    assert not (tmp_path / "a" / "b").exists()
