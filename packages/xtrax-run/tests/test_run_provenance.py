"""Provenance against git itself, and JSON files that are whole or absent."""

import datetime
import errno
import importlib.metadata
import json
import math
import os
import stat
import subprocess
import warnings

import pytest

from xtrax.run import collect_provenance, write_json_atomic


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    git(tmp_path, "init", "-b", "trunk")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_a_commit_is_recorded_with_its_branch_and_changes(repository):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clean = collect_provenance(repository)["git"]
        assert clean == {"sha": git(repository, "rev-parse", "HEAD"), "branch": "trunk", "dirty": False}
        (repository / "output.txt").write_text("a run's output is not a change of the code")
        assert collect_provenance(repository)["git"] == clean
        (repository / "code.py").write_text("x = 2\n")
        assert collect_provenance(repository)["git"] == {**clean, "dirty": True}
        git(repository, "commit", "-am", "two")
        git(repository, "checkout", "--detach")
        assert collect_provenance(repository)["git"]["branch"] == "(detached)"


@pytest.mark.parametrize("case", ["no repository", "no commit", "no git", "no folder"])
def test_outside_a_repository_everything_is_unknown_with_one_warning(tmp_path, monkeypatch, case):
    folder = tmp_path
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if case == "no commit":
        git(tmp_path, "init")
    elif case == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif case == "no folder":
        folder = tmp_path / "nowhere"
    with pytest.warns(UserWarning, match="recorded as unknown: ") as caught:
        found = collect_provenance(folder)["git"]
    assert len(caught) == 1
    assert found == {"sha": "unknown", "branch": "unknown", "dirty": "unknown"}


def test_versions_device_and_time(repository):
    import jax

    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    found = collect_provenance(repository)
    after = datetime.datetime.now(datetime.UTC)
    created = datetime.datetime.fromisoformat(found["created_at"])
    assert created.utcoffset() == datetime.timedelta(0)
    assert before <= created <= after
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    assert found["versions"]["xtrax-run"] == importlib.metadata.version("xtrax-run")
    assert found["device_kind"] == jax.devices()[0].device_kind
    assert json.loads(json.dumps(found)) == found


def test_json_is_written_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "m.json"
    for value in ({"a": [1, 2.5, None, True, "é"]}, {"b": 1}):
        write_json_atomic(path, value)
        assert json.loads(path.read_text("utf-8")) == value
        assert os.listdir(tmp_path) == ["m.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize(
    ("value", "error"), [({"x": math.nan}, ValueError), ({"x": object()}, TypeError), ({"x": math.inf}, ValueError)]
)
def test_what_json_cannot_hold_leaves_the_old_file(tmp_path, value, error):
    path = tmp_path / "m.json"
    write_json_atomic(path, {"a": 1})
    with pytest.raises(error):
        write_json_atomic(path, value)
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["m.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, call):
    path = tmp_path / "m.json"
    write_json_atomic(path, {"a": 1})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            write_json_atomic(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["m.json"]


def test_a_missing_folder_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_json_atomic(tmp_path / "nowhere" / "m.json", {})
