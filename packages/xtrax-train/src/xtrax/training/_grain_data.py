"""GrainDataModule: training on grain pipelines."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import grain

from xtrax.training._checks import check_int

Dataset = grain.MapDataset | grain.IterDataset


class GrainDataModule:
    """Batches from grain pipelines, whose iterator state is saved with every checkpoint.

    The elements of a pipeline are batches: dicts with `inputs`, `targets` and optionally `weight`.

    Args:
        train: the training pipeline. A `grain.MapDataset` gives another order in each epoch, if it is shuffled, as it
            would with `.repeat()`; do not repeat it. A `grain.IterDataset` is read from its start in each epoch. A
            function from the epoch, from 0, to either says itself what an epoch is.
        evaluation: what `eval_iter` goes through; without it there is no evaluation.
        read_options: threads and buffers for reading a `MapDataset`; by default grain's.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an empty pipeline, or one that repeats for ever.

    Example:
        >>> import grain, numpy as np
        >>> from xtrax.training import GrainDataModule
        >>> def example(i):
        ...     return {"inputs": np.float32([i]), "targets": np.float32([2 * i])}
        >>> pipeline = grain.MapDataset.range(10).shuffle(seed=1).map(example).batch(4)
        >>> data = GrainDataModule(pipeline)
        >>> [batch["inputs"].shape for batch in data.train_iter(epoch=0)]
        [(4, 1), (4, 1), (2, 1)]
    """

    def __init__(
        self,
        train: Dataset | Callable[[int], Dataset],
        evaluation: Dataset | None = None,
        *,
        read_options: grain.ReadOptions | None = None,
    ):
        if not isinstance(train, Dataset) and not callable(train):
            raise TypeError(
                f"train must be a grain MapDataset or IterDataset, or a function from the epoch to one, got {train!r}"
            )
        if read_options is not None and not isinstance(read_options, grain.ReadOptions):
            raise TypeError(f"read_options must be grain.ReadOptions or None, got {read_options!r}")
        self._train = train
        self._options = read_options
        if isinstance(train, Dataset):
            _check_dataset("train", train)
        if isinstance(train, grain.MapDataset):
            self.steps_per_epoch = len(train)
        if evaluation is not None:
            _check_dataset("evaluation", evaluation)
            # An attribute of the object, because a module without evaluation data must not have the method.
            self.eval_iter = functools.partial(self._iterate, evaluation)

    def train_iter(self, epoch: int = 0) -> grain.DatasetIterator:
        """The training batches of an epoch, from 0.

        Raises:
            TypeError: `epoch` is not an integer, or `train` returned no dataset.
            ValueError: `epoch` below 0, or `train` returned an empty or endless dataset.
        """
        check_int("epoch", epoch, at_least=0)
        if isinstance(self._train, grain.MapDataset):
            return self._iterate(grain.MapDataset.source(_Epoch(self._train, epoch)))
        if isinstance(self._train, grain.IterDataset):
            return self._iterate(self._train)
        dataset = self._train(epoch)
        _check_dataset("what train returned", dataset)
        return self._iterate(dataset)

    def _iterate(self, dataset: Dataset) -> grain.DatasetIterator:
        if isinstance(dataset, grain.MapDataset):
            dataset = dataset.to_iter_dataset(self._options)
        return iter(dataset)


class _Epoch:
    """The elements of one pass over a MapDataset, which goes on past its length with the following passes."""

    def __init__(self, dataset: grain.MapDataset, epoch: int):
        self._dataset = dataset
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._epoch * len(self._dataset) + index]

    def __repr__(self) -> str:
        return f"_Epoch({self._epoch} of {self._dataset})"


def _check_dataset(name: str, dataset: Any) -> None:
    if not isinstance(dataset, Dataset):
        raise TypeError(f"{name} must be a grain MapDataset or IterDataset, got {dataset!r}")
    if isinstance(dataset, grain.MapDataset):
        length = len(dataset)
        if length == 0:
            raise ValueError(f"{name} has no batches; the source is empty, or drop_remainder left none")
        if length >= sys.maxsize:
            raise ValueError(f"{name} repeats for ever, and an epoch would never end; leave .repeat() to num_epochs")
