"""A small project for the command line to train: a module, a configuration, and the folder they lie in."""

import itertools
import signal
import sys
from pathlib import Path

import pytest

from xtrax.cli import main

CODE = '''
import os
import signal
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from xtrax.training import ArrayDataModule


def make(width, key, rate=0.0):
    dropout = eqx.nn.Dropout(rate)
    layers = [eqx.nn.Linear(2, width, key=key), jnp.tanh, dropout, eqx.nn.Linear(width, 2, key=key)]
    return Network(layers)


class Network(eqx.Module):
    layers: list

    def __call__(self, x, key=None):
        for layer in self.layers:
            x = layer(x, key=key) if isinstance(layer, eqx.nn.Dropout) else layer(x)
        return x


def make_tuple(width):
    return (3, width)


def examples(seed, n=96):
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(n, 2)).astype("float32")
    return {"inputs": inputs, "targets": (inputs[:, 0] * inputs[:, 1] > 0).astype("int32")}


def make_data(batch_size, seed, evaluate=True):
    arrays = examples(seed)
    return ArrayDataModule(arrays, batch_size, seed=seed, eval_arrays=arrays if evaluate else None)


class Stopping:
    """Presses Ctrl-C, or raises, before a batch of an epoch, as long as a file `stop` is there."""

    def __init__(self, batch_size, seed, epoch=1, batch=1, action="interrupt"):
        self.data = make_data(batch_size, seed)
        self.at, self.action = (epoch, batch), action

    def train_iter(self, epoch):
        for number, batch in enumerate(self.data.train_iter(epoch=epoch)):
            if (epoch, number) == self.at and Path("stop").exists():
                if self.action == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                elif self.action == "disk":
                    raise OSError(28, "No space left on device")
                else:
                    raise ValueError("bad row 7")
            yield batch

    def eval_iter(self):
        return self.data.eval_iter()


def from_file(batch_size, seed, path):
    return ArrayDataModule(dict(np.load(path)), batch_size, seed=seed)


def no_data(batch_size, seed):
    return [1, 2]


def accuracy(predictions, targets):
    return (jnp.argmax(predictions, -1) == targets).astype("float32")


def wrong_shape(predictions, targets):
    return predictions


class Odd(BaseException):
    pass


def odd(**kwargs):
    raise Odd("neither this nor that")


def exit_now(**kwargs):
    raise SystemExit("usage: nothing")


NUMBER = 3
'''

CONFIG = """schema_version = 1
num_epochs = 3
seed = 7

[model]
path = "MODULE:make"
kwargs = {width = 8, rate = 0.1}
vmap = true

[optimizer]
path = "optax:adam"
kwargs = {learning_rate = 1e-2}

[loss]
path = "optax:softmax_cross_entropy_with_integer_labels"

[data]
factory = "MODULE:make_data"
batch_size = 32

[metrics]
accuracy = "MODULE:accuracy"
"""

_numbers = itertools.count()


class Project:
    """A folder with `train.toml` and the module that it names, as the current directory."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.module = f"project{next(_numbers)}"  # modules stay imported, so each test has its own
        self.capsys = capsys
        self.config = folder / "train.toml"
        self.code = folder / f"{self.module}.py"
        self.code.write_text(CODE)
        self.config.write_text(CONFIG.replace("MODULE", self.module))

    def xtrax(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command line."""
        self.capsys.readouterr()
        code = main([argument.replace("MODULE", self.module) for argument in arguments])
        return code, *self.capsys.readouterr()

    def runs(self) -> list[Path]:
        """The folders of the runs, oldest first."""
        folder = self.folder / ".xtrax" / "runs"
        return sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime) if folder.is_dir() else []


@pytest.fixture
def project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("UV", raising=False)  # commands are told as they are typed without it
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return Project(tmp_path, capsys)


@pytest.fixture(autouse=True)
def interruptible():
    """SIGINT as in a terminal; a shell that runs the tests in the background has it ignored, by child processes too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
