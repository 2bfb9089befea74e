"""Ctrl-C and SIGTERM, whenever they come: the right exit code, no traceback, and nothing lost."""

import _imp
import gc
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from xtrax.cli import load_run, main
from xtrax.cli._interrupt import default_interrupts, is_interrupted, noted_interrupts, raise_if_interrupted

COMMAND = [sys.executable, "-c", "import sys; from xtrax.cli import main; sys.exit(main())"]


def lose_an_interrupt():
    """Press Ctrl-C where Python discards what is raised: in a callback of its garbage collector."""

    def pressed(phase, info):
        if phase == "start":
            gc.callbacks.remove(pressed)
            os.kill(os.getpid(), signal.SIGINT)

    gc.callbacks.append(pressed)
    gc.collect()


def test_an_interrupt_that_python_discards_is_raised_at_the_next_safe_point(capfd):
    with noted_interrupts():
        raise_if_interrupted()
        lose_an_interrupt()
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt), default_interrupts():
            pytest.fail("went on")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not is_interrupted()
    assert capfd.readouterr().err == ""


def test_an_interrupt_while_an_extension_module_loads_waits_for_the_next_safe_point(monkeypatch):
    loaded = types.ModuleType("extension")

    def pressed(spec, file=None):
        os.kill(os.getpid(), signal.SIGINT)
        return loaded

    monkeypatch.setattr(_imp, "create_dynamic", pressed)
    loader = importlib.machinery.ExtensionFileLoader("extension", "extension.so")
    spec = importlib.util.spec_from_file_location("extension", "extension.so", loader=loader)
    with noted_interrupts():
        assert importlib.util.module_from_spec(spec) is loaded
        assert is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()


def test_handlers_of_others_are_left_alone():
    def mine(*_):
        pass

    signal.signal(signal.SIGINT, mine)
    with noted_interrupts(), default_interrupts():
        assert signal.getsignal(signal.SIGINT) is mine
    assert signal.getsignal(signal.SIGINT) is mine


LOST = """
import gc, os, signal

def _pressed(phase, info):
    if phase == "start":
        gc.callbacks.remove(_pressed)
        os.kill(os.getpid(), signal.SIGINT)

def _lose():
    gc.callbacks.append(_pressed)
    gc.collect()
"""


@pytest.mark.parametrize("where", ["import", "model", "data", "metric", "error"])
def test_an_interrupt_that_is_lost_before_the_first_step_still_ends_the_run(project, where):
    code = LOST + project.code.read_text()
    if where == "import":
        code += "\n_lose()\n"
    elif where == "model":
        code = code.replace("def make(width, key, rate=0.0):\n", "def make(width, key, rate=0.0):\n    _lose()\n")
    elif where == "data":
        code = code.replace("    arrays = examples(seed)\n", "    arrays = examples(seed)\n    _lose()\n")
    elif where == "metric":
        code = code.replace(
            "def accuracy(predictions, targets):\n", "def accuracy(predictions, targets):\n    _lose()\n"
        )
    else:  # what an extension module makes of it
        code += "\n_lose()\nraise ImportError('Encountered an error while initializing the extension.')\n"
    assert code.count("_lose()") == 2
    project.code.write_text(code)
    assert project.xtrax("run", "train.toml") == (130, "", "xtrax: interrupted\n")
    assert project.runs() == []


@pytest.mark.parametrize("seconds", [0.5, 1.3, 2.5])
def test_a_real_ctrl_c_in_the_first_seconds(project, seconds):
    project.config.write_text(project.config.read_text().replace("num_epochs = 3", "num_epochs = 1_000_000"))
    process = subprocess.Popen([*COMMAND, "run", "train.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (130, -signal.SIGINT), err  # the latter while Python itself starts
    assert process.returncode == -signal.SIGINT or b"Traceback" not in err


def test_ctrl_c_while_python_ends_prints_no_traceback(project):
    code = (
        "import atexit, os, signal, sys; from xtrax.cli import main; "
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (130, b"")
    assert done.stdout.startswith(b"xtrax ")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_schedulers_signal_saves_and_exits_75(project, name):
    text = project.code.read_text().replace(
        "os.kill(os.getpid(), signal.SIGINT)", f"os.kill(os.getpid(), signal.{name})"
    )
    project.code.write_text(text)
    project.config.write_text(project.config.read_text().replace("make_data", "Stopping"))
    before = signal.getsignal(getattr(signal, name))
    (project.folder / "stop").touch()
    code, _, err = project.xtrax("run", "train.toml")
    assert code == 75
    (folder,) = project.runs()
    assert f"xtrax resume {folder.name} --in-place" in err
    assert "Traceback" not in err
    assert signal.getsignal(getattr(signal, name)) is before
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "interrupted"
    assert int(load_run(folder).state.step) == manifest["steps"] == 5
    (project.folder / "stop").unlink()
    assert project.xtrax("resume", folder.name, "--in-place")[0] == 0


def test_sigterm_before_the_first_step_leaves_nothing(project):
    code = "\nimport os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"
    project.code.write_text(project.code.read_text() + code)
    assert project.xtrax("run", "train.toml") == (143, "", "xtrax: interrupted\n")
    assert project.runs() == []


def test_sigterm_stops_a_whole_sweep(project):
    text = project.code.read_text().replace(
        "os.kill(os.getpid(), signal.SIGINT)", "os.kill(os.getpid(), signal.SIGTERM)"
    )
    project.code.write_text(text)
    config = project.config.read_text().replace("make_data", "Stopping")
    project.config.write_text(config + "\n[sweep.axes]\nseed = [0, 1]\n")
    (project.folder / "stop").touch()
    code, _, err = project.xtrax("sweep", "train.toml")
    assert code == 75
    assert "interrupted in point 1 of 2" in err
    (folder,) = project.runs()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [point["status"] for point in manifest["points"]] == ["interrupted", "waiting"]
    (project.folder / "stop").unlink()
    assert project.xtrax("sweep", "train.toml")[0] == 0


def test_main_in_another_thread_trains_too(project):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(main, ["run", "train.toml", "--set", "num_epochs=1"]).result() == 0
