"""Where batches come from."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np

from xtrax.training._batch import BatchCheck
from xtrax.training._checks import check_bool, check_int


@runtime_checkable
class DataModule(Protocol):
    """What `Engine` trains on: anything with `train_iter()`, and optionally `eval_iter()`.

    Each call gives the batches of one epoch: dicts with `inputs` and `targets` (pytrees of arrays with one leading
    axis) and optionally `weight` of shape `(n,)`. Shapes may differ between batches; each is compiled once.

    For a run to resume exactly:
    a module whose order depends on the epoch takes it as a keyword, `train_iter(epoch=3)`;
    an iterator may have `get_state()`, which returns JSON-able data, and `set_state(state)`, as grain's have; another
    iterator is advanced past the batches that were done.

    A module may have an integer `steps_per_epoch`, which a progress bar shows.
    """

    def train_iter(self) -> Iterable[Mapping[str, Any]]:
        """The training batches of one epoch."""
        ...


class ArrayDataModule:
    """Batches of arrays that are in memory, shuffled anew in each epoch.

    The order of epoch e depends on `seed` and e alone, and is the same on every machine and version of numpy. The
    iterators are grain's, so their state is saved with a checkpoint.

    Args:
        arrays: `inputs` and `targets`, pytrees of arrays that share the leading axis N, and optionally `weight` of
            shape `(N,)`.
        batch_size: examples in a batch.
        shuffle: whether to shuffle the training examples.
        seed: of the order, at least 0.
        drop_remainder: leave out the last examples of an epoch if they do not fill a batch, so that training compiles
            one shape. Evaluation never leaves any out.
        eval_arrays: what `eval_iter` goes through, in order; without it there is no evaluation.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: `arrays` has the wrong names or shapes or no examples, or fewer than a batch with `drop_remainder`.

    Example:
        >>> import numpy as np
        >>> from xtrax.training import ArrayDataModule
        >>> x = np.arange(10, dtype="float32")
        >>> data = ArrayDataModule({"inputs": x, "targets": 2 * x}, batch_size=4, seed=1)
        >>> [len(batch["inputs"]) for batch in data.train_iter(epoch=0)]
        [4, 4, 2]
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_remainder: bool = False,
        *,
        eval_arrays: Mapping[str, Any] | None = None,
    ):
        self._arrays, self._n = _host_arrays("arrays", arrays)
        self.batch_size = check_int("batch_size", batch_size, at_least=1)
        self.shuffle = check_bool("shuffle", shuffle)
        self.seed = check_int("seed", seed, at_least=0)
        self.drop_remainder = check_bool("drop_remainder", drop_remainder)
        if drop_remainder and self._n < batch_size:
            raise ValueError(
                f"arrays has {self._n} examples, fewer than batch_size={batch_size}, and drop_remainder leaves none; "
                "choose a smaller batch_size"
            )
        if eval_arrays is not None:
            held_out, n = _host_arrays("eval_arrays", eval_arrays)
            # An attribute of the object, because a module without evaluation data must not have the method.
            batches = _Batches(held_out, n, self.batch_size, None, False)
            self.eval_iter = functools.partial(_grain_iterator, batches)

    @property
    def steps_per_epoch(self) -> int:
        """The number of training batches in an epoch."""
        return len(self._batches(None))

    def train_iter(self, epoch: int = 0) -> grain.DatasetIterator:
        """The training batches of an epoch, from 0."""
        check_int("epoch", epoch, at_least=0)
        order = permutation(self._n, self.seed, epoch) if self.shuffle else None
        return _grain_iterator(self._batches(order))

    def _batches(self, order: np.ndarray | None) -> "_Batches":
        return _Batches(self._arrays, self._n, self.batch_size, order, self.drop_remainder)


def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `range(n)`, int64 of shape `(n,)`.

    numpy promises that the raw stream of a bit generator never changes, and promises nothing of the kind for
    `Generator.permutation` (NEP 19); hence the sort.
    """
    stream = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(n)
    return np.argsort(stream, kind="stable")


class _Batches:
    """Whole batches by number, as a random access source for grain."""

    def __init__(self, arrays: Any, n: int, batch_size: int, order: np.ndarray | None, drop_remainder: bool):
        self._arrays = arrays
        self._batch_size = batch_size
        self._order = order
        self._n = n - n % batch_size if drop_remainder else n

    def __len__(self) -> int:
        return -(-self._n // self._batch_size)

    def __getitem__(self, index: int) -> dict[str, Any]:
        part: Any = slice(index * self._batch_size, min((index + 1) * self._batch_size, self._n))
        if self._order is not None:
            part = self._order[part]
        return jax.tree.map(lambda array: array[part], self._arrays)

    def __repr__(self) -> str:
        return f"_Batches({len(self)} of {self._batch_size})"


def _grain_iterator(batches: _Batches) -> grain.DatasetIterator:
    # The arrays are in memory: threads that read ahead would only cost.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(grain.MapDataset.source(batches).to_iter_dataset(options))


def _host_arrays(name: str, arrays: Any) -> tuple[dict[str, Any], int]:
    if not isinstance(arrays, Mapping):
        raise TypeError(f'{name} must be a dict with "inputs" and "targets", got {type(arrays).__name__}')
    try:
        host = jax.tree.map(np.asarray, dict(arrays))
        BatchCheck()(host)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return host, jax.tree.leaves(host["inputs"])[0].shape[0]


def takes_epoch(data: Any) -> bool:
    """True if `data.train_iter` takes a keyword `epoch`."""
    return "epoch" in inspect.signature(data.train_iter).parameters
