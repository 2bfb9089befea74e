"""Full disks, read-only and vanished folders, second writers: a `SinkError`, and what was drained is intact."""

import contextlib
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xtrax.run import H5StagingSink, JsonlStagingSink, SinkError, ZarrStagingSink

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
SINKS = {"zarr": ZarrStagingSink, "jsonl": JsonlStagingSink, "h5": H5StagingSink}
LAB = runpy.run_path(str(Path(__file__).with_name("crash_lab.py")))
read_back, same = LAB["read_back"], LAB["same"]


@pytest.fixture(params=SINKS)
def fmt(request):
    if request.param == "h5":
        pytest.importorskip("h5py")
    return request.param


@contextlib.contextmanager
def largest_file(size):
    """Writes beyond `size` bytes of a file fail, as on a full disk (errno EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


SMALL = {"s": np.arange(4.0)}
BIG = {"b": np.random.default_rng(0).normal(size=(400, 500))}  # 1.6 MB, more as text


def test_a_full_disk_names_what_was_saved_and_the_rest_can_be_saved_later(fmt, small_disk):
    sink = SINKS[fmt](small_disk / "out", flush_every=100, run_id="one")
    sink.stage(("first",), **SMALL)
    sink.drain()
    sink.stage(("second",), **SMALL)
    sink.stage(("big",), **BIG)
    sink.stage(("third",), **SMALL)
    with pytest.raises(SinkError, match=r"No space left.*still buffered.*'big'") as caught:
        sink.drain()
    error = caught.value
    assert error.path == small_disk / "out"
    assert set(error.saved) | set(error.unsaved) == {("second",), ("big",), ("third",)}
    assert error.unsaved == sink.keys()
    assert ("big",) in error.unsaved
    expected = {"/".join(key): SMALL for key in [("first",), *error.saved]}
    assert same(read_back(fmt, small_disk / "out"), expected)
    sink.take(("big",))
    sink.finalize()
    assert same(read_back(fmt, small_disk / "out"), {"first": SMALL, "second": SMALL, "third": SMALL})


def test_a_write_that_fails_halfway_leaves_nothing_of_itself(fmt, tmp_path):
    with SINKS[fmt](tmp_path, run_id="one") as sink:
        sink.stage(("first",), **SMALL)
        with largest_file(2**19), pytest.raises(SinkError, match="'big'"):
            sink.stage(("big",), **BIG)
        assert same(read_back(fmt, tmp_path), {"first": SMALL})
        assert sink.keys() == (("big",),)
        sink.drain()  # the cause is gone
        assert len(sink) == 0
        sink.stage(("last",), **SMALL)
    assert same(read_back(fmt, tmp_path), {"first": SMALL, "big": BIG, "last": SMALL})


def test_replacing_a_drained_array_fails_without_harm(fmt, tmp_path):
    with SINKS[fmt](tmp_path, run_id="one") as sink:
        sink.stage(("k",), b=np.arange(5))
        with largest_file(2**19), pytest.raises(SinkError):
            sink.stage(("k",), **BIG)
        assert same(read_back(fmt, tmp_path), {"k": {"b": np.arange(5)}})
        sink.drain()
    assert same(read_back(fmt, tmp_path), {"k": BIG})


@pytest.mark.parametrize("exists", [True, False])
def test_a_read_only_folder(fmt, exists, tmp_path, as_nobody):
    folder = tmp_path / "out"
    if exists:
        with SINKS[fmt](folder, run_id="one") as sink:
            sink.stage(("first",), **SMALL)
    os.chmod(folder if exists else tmp_path, 0o555)
    with as_nobody(), pytest.raises(SinkError, match=r"Permission denied.*choose another output_dir") as caught:
        SINKS[fmt](folder, run_id="one")
    assert caught.value.path == folder
    if exists:
        assert same(read_back(fmt, folder), {"first": SMALL})


def test_a_folder_that_is_a_file(fmt, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SinkError, match="out cannot be opened"):
        SINKS[fmt](tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_that_is_a_dangling_link(fmt, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for folder in (tmp_path / "link", tmp_path / "link" / "out"):
        with pytest.raises(SinkError, match=r"symbolic link to .*/gone, which is not there: '.*/link'"):
            SINKS[fmt](folder)
    assert not (tmp_path / "gone").exists()


def test_a_folder_that_vanishes_or_is_replaced(fmt, tmp_path):
    folder = tmp_path / "out"
    sink = SINKS[fmt](folder, flush_every=10)
    sink.stage(("a",), **SMALL)
    shutil.rmtree(folder)
    with pytest.raises(SinkError, match="removed or replaced"):
        sink.drain()
    assert not folder.exists()
    assert len(sink) == 1
    other = SINKS[fmt](folder)  # another run takes the place
    with pytest.raises(SinkError, match="removed or replaced"):
        sink.drain()
    before = sorted(folder.rglob("*"))
    np.testing.assert_array_equal(sink.take(("a",))["s"], SMALL["s"])  # nothing was lost in memory
    sink.finalize()
    assert sorted(folder.rglob("*")) == before  # the other's files are left alone
    other.stage(("b",), **SMALL)
    other.finalize()
    assert same(read_back(fmt, folder), {"b": SMALL})


def test_changing_the_working_directory_does_not_move_the_output(fmt, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with SINKS[fmt]("new/out") as sink:
        monkeypatch.chdir(tmp_path / "elsewhere")
        sink.stage(("a",), **SMALL)
    assert same(read_back(fmt, tmp_path / "new" / "out"), {"a": SMALL})
    assert os.listdir(tmp_path / "elsewhere") == []


def test_the_first_error_is_not_hidden_by_a_full_disk(tmp_path):
    def work():
        with JsonlStagingSink(tmp_path, flush_every=9, run_id="one") as sink:
            sink.stage(("big",), **BIG)
            _ = 1 // 0

    with largest_file(2**19), pytest.raises(ZeroDivisionError) as caught:
        work()
    assert "a sink could not save" in caught.value.__notes__[0]
    JsonlStagingSink(tmp_path, run_id="one").finalize()  # the lock is given up


@pytest.mark.parametrize("other", SINKS)
def test_a_second_live_writer_is_refused_whatever_its_format(fmt, other, tmp_path):
    if other == "h5":
        pytest.importorskip("h5py")
    first = SINKS[fmt](tmp_path, run_id="one")
    with pytest.raises(SinkError, match=f"another live sink.*{os.getpid()}"):
        SINKS[other](tmp_path, run_id="one")
    first.stage(("a",), **SMALL)
    first.finalize()
    SINKS[fmt](tmp_path, run_id="one").finalize()
    assert same(read_back(fmt, tmp_path), {"a": SMALL})


def run_writer(folder):
    """Another process that opens a sink, says so, and waits."""
    code = (
        "import sys, time, warnings; warnings.simplefilter('ignore')\n"
        "from xtrax.run import ZarrStagingSink\n"
        "sink = ZarrStagingSink(sys.argv[1], run_id='one')\n"
        "sink.stage(('a',), x=1)\n"
        "print('open', flush=True); time.sleep(120)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    return process


def test_another_process_is_refused_while_it_lives_and_no_obstacle_when_dead(tmp_path):
    process = run_writer(tmp_path)
    try:
        with pytest.raises(SinkError, match=f"another live sink.*{process.pid}"):
            ZarrStagingSink(tmp_path, run_id="one")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with ZarrStagingSink(tmp_path, run_id="one") as sink:
        sink.stage(("b",), x=2)
    assert {key: arrays["x"] for key, arrays in read_back("zarr", tmp_path).items()} == {"a": 1, "b": 2}


def test_a_forked_child_neither_holds_the_lock_nor_writes(tmp_path):
    code = f"""
import os, signal, sys, time, warnings
warnings.simplefilter("ignore")
from xtrax.run._staged import sink as staged_sink
staged_sink.collect_provenance = dict  # starts jax, whose threads a fork does not copy
from xtrax.run import JsonlStagingSink, SinkError
sink = JsonlStagingSink({str(tmp_path)!r}, run_id="one", flush_every=9)
if not os.fork():
    try:
        sink.stage(("child",), x=1)
        sink.drain()
    except SinkError as error:
        print("refused" if "another process" in str(error) else error, flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout.readline() == "refused\n"
        os.kill(process.pid, signal.SIGKILL)  # the parent only; the child lives on
        process.wait()
        sink = JsonlStagingSink(tmp_path, run_id="one")
        sink.stage(("a",), x=1)
        sink.finalize()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    assert list(read_back("jsonl", tmp_path)) == ["a"]


def test_a_lock_is_not_taken_on_a_file_that_its_holder_just_removed(tmp_path):
    """Writers that start while others end never hold the folder together."""
    code = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from xtrax.run._lock import FolderLock
from xtrax.run._errors import SinkError
folder, taken = Path(sys.argv[1]), 0
end = time.monotonic() + 1.5
while time.monotonic() < end:
    try:
        lock = FolderLock(folder)
    except SinkError:
        continue
    os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))  # fails if anyone else is inside
    os.unlink(folder / "inside")
    lock.release()
    taken += 1
print(taken)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    results = [(process.communicate(timeout=60), process.returncode) for process in processes]
    assert [code for _, code in results] == [0, 0, 0], results
    assert sum(int(out) for (out, _), _ in results) > 10


def test_a_journal_that_is_damaged_is_refused(tmp_path):
    pytest.importorskip("h5py")
    with H5StagingSink(tmp_path, run_id="one") as sink:
        sink.stage(("a",), **SMALL)
    (tmp_path / ".xtrax").mkdir()
    (tmp_path / ".xtrax" / "journal").write_bytes(b"xtrax-h5-journal-1\n" + bytes(100))
    with pytest.raises(ValueError, match="journal is damaged"):
        H5StagingSink(tmp_path, run_id="one")
