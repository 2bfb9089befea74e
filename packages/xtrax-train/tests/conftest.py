"""A small regression problem, and ways to compare two runs."""

import signal
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from xtrax.training import ArrayDataModule, ResumableState, init_state

# Must come before JAX starts its devices; repeating it with the same number is harmless.
jax.config.update("jax_num_cpu_devices", 8)


class DropoutMLP(eqx.Module):
    """One example of shape (3,) to (1,), with dropout, so that keys matter."""

    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        a, b = jax.random.split(key)
        self.first = eqx.nn.Linear(3, 8, key=a)
        self.dropout = eqx.nn.Dropout(0.3)
        self.last = eqx.nn.Linear(8, 1, key=b)

    def __call__(self, x: jax.Array, *, key: jax.Array) -> jax.Array:
        return self.last(self.dropout(jax.nn.tanh(self.first(x)), key=key))


class RaggedData:
    """Batches of two shapes in an order that depends on the epoch; a plain generator without a state."""

    def __init__(self, batches: int = 7):
        self.batches = batches

    def train_iter(self, epoch: int):
        rng = np.random.default_rng(epoch)
        for i in range(self.batches):
            n = 4 if i % 3 else 6
            x = rng.normal(size=(n, 3)).astype("float32")
            yield {"inputs": x, "targets": x.sum(1, keepdims=True)}

    def eval_iter(self):
        x = np.linspace(-1, 1, 15, dtype="float32").reshape(5, 3)
        yield {"inputs": x, "targets": x.sum(1, keepdims=True)}


@pytest.fixture
def optimizer() -> optax.GradientTransformation:
    return optax.adam(1e-2)


@pytest.fixture
def dropout_state(optimizer: optax.GradientTransformation) -> ResumableState:
    return init_state(DropoutMLP(jax.random.key(1)), optimizer, seed=3)


@pytest.fixture
def array_data() -> ArrayDataModule:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(26, 3)).astype("float32")
    arrays = {"inputs": x, "targets": x.sum(1, keepdims=True)}
    return ArrayDataModule(arrays, 4, seed=5, eval_arrays={name: a[:7] for name, a in arrays.items()})


@pytest.fixture
def ragged_data() -> RaggedData:
    return RaggedData()


@pytest.fixture
def squared():
    """A loss with one value per example."""
    return lambda predictions, targets: ((predictions - targets) ** 2)[:, 0]


@pytest.fixture
def assert_same_bits():
    """Compares the array leaves of two pytrees bit by bit."""

    def compare(a: Any, b: Any) -> None:
        a_leaves, a_tree = jax.tree.flatten(eqx.filter(a, eqx.is_array))
        b_leaves, b_tree = jax.tree.flatten(eqx.filter(b, eqx.is_array))
        assert a_tree == b_tree
        for x, y in zip(a_leaves, b_leaves, strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()

    return compare


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory):
    """Compiles each program once for all tests; most of them train the same small model."""
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(autouse=True)
def interruptible():
    """SIGINT as in a terminal; a shell that runs the tests in the background has it ignored, by child processes too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
