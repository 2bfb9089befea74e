"""Name the speaker of an utterance: a small model of ragged sequences, its loss, its metric and its data."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from xtrax.tiling.bucket import bucketize, select_bucket

NUM_COEFFICIENTS = 12
NUM_SPEAKERS = 9
DATA = Path(__file__).with_name("japanese_vowels.npz")

Batch = dict[str, Any]


class WindowConv(eqx.Module):
    """A convolution over time with zeros around it, as one matrix product over the steps of each window.

    It computes what `eqx.nn.Conv1d` computes. XLA's gradients of so small a convolution are many times slower on a CPU
    than those of a matrix product.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        width: Steps in a window, an odd number.
        key: PRNG key of the initial weights.
    """

    linear: eqx.nn.Linear
    width: int = eqx.field(static=True)

    def __init__(self, in_channels: int, out_channels: int, width: int, *, key: jax.Array):
        """Draw the weights."""
        if width < 1 or width % 2 == 0:
            raise ValueError(f"width must be odd and at least 1, so that a window has a middle, got {width}")
        self.linear = eqx.nn.Linear(in_channels * width, out_channels, key=key)
        self.width = width

    def __call__(self, x: jax.Array) -> jax.Array:
        """From `(T, in_channels)` to `(T, out_channels)`."""
        padded = jnp.pad(x, ((self.width // 2, self.width // 2), (0, 0)))
        windows = jnp.concatenate([padded[i : i + len(x)] for i in range(self.width)], axis=1)
        return jax.vmap(self.linear)(windows)


class Classifier(eqx.Module):
    """Two masked convolutions over time, mean and max over the utterance, and a linear layer.

    What lies past the end of an utterance is zeroed before each convolution and left out of the mean and the max, so
    the padding changes no prediction.

    Args:
        hidden: Channels of both convolutions.
        window: Steps that a convolution sees, an odd number.
        dropout: Fraction of the pooled features dropped in training.
        key: PRNG key of the initial weights.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> model = Classifier(key=jax.random.key(0))
        >>> model({"values": jnp.zeros((16, 12)), "mask": jnp.arange(16) < 9}).shape
        (9,)
    """

    conv1: WindowConv
    conv2: WindowConv
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, hidden: int = 128, window: int = 3, dropout: float = 0.3, *, key: jax.Array):
        """Draw the weights."""
        keys = jax.random.split(key, 3)
        self.conv1 = WindowConv(NUM_COEFFICIENTS, hidden, window, key=keys[0])
        self.conv2 = WindowConv(hidden, hidden, window, key=keys[1])
        self.dropout = eqx.nn.Dropout(dropout)
        self.out = eqx.nn.Linear(2 * hidden, NUM_SPEAKERS, key=keys[2])

    def __call__(self, inputs: dict[str, jax.Array], *, key: jax.Array | None = None) -> jax.Array:
        """The logits of one utterance.

        Args:
            inputs: `values`, `(T, 12)`, and `mask`, `(T,)`, True for the steps of the utterance.
            key: PRNG key of the dropout; without one nothing is dropped.

        Returns:
            Logits of the speakers, `(9,)`.
        """
        mask = inputs["mask"][:, None]
        x = jnp.where(mask, inputs["values"], 0)
        x = jnp.where(mask, jax.nn.relu(self.conv1(x)), 0)
        x = jnp.where(mask, jax.nn.relu(self.conv2(x)), 0)
        # A batch may hold examples of no steps at all, which only fill it up: hence at least 1.
        mean = x.sum(axis=0) / jnp.maximum(mask.sum(), 1)
        # After the relu nothing is below the zeros of the padding, so they never hide a maximum.
        features = jnp.concatenate([mean, x.max(axis=0)])
        if key is not None:
            features = self.dropout(features, key=key)
        return self.out(features)


def cross_entropy(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross entropy of logits `(n, 9)` and speakers `(n,)`, in nats, `(n,)`."""
    return optax.softmax_cross_entropy_with_integer_labels(predictions, targets)


def accuracy(predictions: jax.Array, targets: jax.Array) -> jax.Array:
    """1 where the largest of the logits `(n, 9)` is that of the speaker `(n,)`, else 0, `(n,)`."""
    return (predictions.argmax(axis=-1) == targets).astype(jnp.float32)


@dataclass(frozen=True)
class Utterances:
    """Utterances of unequal lengths.

    Attributes:
        values: One array `(steps, 12)`, float32, for each utterance.
        speakers: Who spoke each, int32 `(n,)`, from 0 to 8.
    """

    values: list[np.ndarray]
    speakers: np.ndarray


class Vowels:
    """Batches of utterances, each batch padded to one of a few lengths: the data module of this example.

    An utterance is normalised by the mean and the standard deviation of the training part's steps, and padded to the
    shortest of `boundaries` that holds it. A batch holds utterances of one such length, so a program is compiled for
    each boundary and no more. Its last axis but the steps is always `batch_size`: what a batch misses is filled with
    examples of weight 0.

    Args:
        train: What to train on.
        test: What to evaluate on.
        batch_size: Examples in a batch.
        seed: Of the order of the training batches.
        boundaries: The lengths to pad to, ascending.

    Raises:
        TypeError: If `batch_size` or `seed` is no int.
        ValueError: If `batch_size` is less than 1 or `seed` less than 0, or an utterance is longer than the last
            boundary.
    """

    def __init__(self, train: Utterances, test: Utterances, *, batch_size: int, seed: int, boundaries: tuple[int, ...]):
        """Normalise and pad every utterance once."""
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.batch_size, self.seed, self.boundaries = batch_size, seed, tuple(boundaries)
        steps = np.concatenate(train.values).astype(np.float64)
        self._mean, self._std = steps.mean(axis=0), steps.std(axis=0)
        self._train, self._train_speakers = [self.prepare(x) for x in train.values], train.speakers
        self._test, self._test_speakers = [self.prepare(x) for x in test.values], test.speakers

    @property
    def steps_per_epoch(self) -> int:
        """Training batches in an epoch."""
        return len(self._groups(self._train, np.arange(len(self._train))))

    def prepare(self, values: np.ndarray) -> dict[str, np.ndarray]:
        """One utterance as the model takes it.

        Args:
            values: Cepstrum coefficients, `(steps, 12)`.

        Returns:
            `values`, float32 `(boundary, 12)`, normalised and padded, and `mask`, bool `(boundary,)`.

        Raises:
            ValueError: If the shape is another, or there are more steps than the last boundary.
        """
        if values.ndim != 2 or values.shape[1] != NUM_COEFFICIENTS:
            raise ValueError(f"an utterance must have shape (steps, {NUM_COEFFICIENTS}), got {values.shape}")
        normal = ((values - self._mean) / self._std).astype(np.float32)
        padded, mask = bucketize(normal, select_bucket(len(normal), self.boundaries))
        return {"values": padded, "mask": mask}

    def train_iter(self, epoch: int = 0) -> "Batches":
        """Every training utterance once, in an order that `seed` and `epoch` alone decide."""
        rng = np.random.default_rng([self.seed, epoch])
        groups = self._groups(self._train, rng.permutation(len(self._train)))
        rng.shuffle(groups)
        return Batches(self, self._train, self._train_speakers, groups)

    def eval_iter(self) -> "Batches":
        """Every test utterance once, in the order of the file within each boundary."""
        return Batches(self, self._test, self._test_speakers, self._groups(self._test, np.arange(len(self._test))))

    def _groups(self, examples: list[dict[str, np.ndarray]], order: np.ndarray) -> list[np.ndarray]:
        """The examples of each batch, by number: those of one boundary, in the given order."""
        lengths = np.array([len(examples[i]["mask"]) for i in order])
        members = [order[lengths == boundary] for boundary in self.boundaries]
        return [m[i : i + self.batch_size] for m in members for i in range(0, len(m), self.batch_size)]


class Batches(Iterator[Batch]):
    """An iterator over batches, whose place can be saved and taken up again.

    Args:
        data: Whose batches.
        examples: The prepared utterances.
        speakers: Their speakers.
        groups: The examples of each batch, by number.
    """

    def __init__(
        self, data: Vowels, examples: list[dict[str, np.ndarray]], speakers: np.ndarray, groups: list[np.ndarray]
    ):
        """Begin before the first batch."""
        self._data, self._examples, self._speakers, self._groups = data, examples, speakers, groups
        self._next = 0

    def __next__(self) -> Batch:
        """The next batch: `inputs`, `targets` and `weight`, their leading axis `batch_size` long."""
        if self._next == len(self._groups):
            raise StopIteration
        group = self._groups[self._next]
        self._next += 1
        inputs = {name: np.stack([self._examples[i][name] for i in group]) for name in ("values", "mask")}
        # A bucket for the batch axis too: a batch that is not full is padded with zeros, and its mask is the weight.
        batch = {"inputs": inputs, "targets": self._speakers[group]}
        padded, real = bucketize(batch, self._data.batch_size)
        return {**padded, "weight": real.astype(np.float32)}

    def get_state(self) -> dict[str, int]:
        """The place, as JSON can hold it."""
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Go to a place that `get_state` gave.

        Raises:
            ValueError: If there is no such place.
        """
        place = state.get("next")
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place <= len(self._groups):
            raise ValueError(f'state must be {{"next": n}} with n from 0 to {len(self._groups)}, got {state!r}')
        self._next = place


def vowels(
    batch_size: int,
    seed: int,
    *,
    boundaries: tuple[int, ...] = (16, 21, 32),
    path: str | os.PathLike[str] = DATA,
) -> Vowels:
    """The data module of a file of utterances.

    Args:
        batch_size: Examples in a batch.
        seed: Of the order of the training batches.
        boundaries: The lengths to pad to, ascending.
        path: A file such as `japanese_vowels.npz`, the default.

    Raises:
        OSError: If the file cannot be read.
        TypeError: If `batch_size` or `seed` is no int.
        ValueError: If the file is damaged or holds something else, or another argument cannot be.
    """
    train, test = read(path)
    return Vowels(train, test, batch_size=batch_size, seed=seed, boundaries=boundaries)


def read(path: str | os.PathLike[str]) -> tuple[Utterances, Utterances]:
    """The training and the test part of a file.

    Args:
        path: An .npz file with, for `train_` and `test_`: `values` `(sum of lengths, 12)`, `lengths` `(n,)` and
            `speaker` `(n,)`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is damaged or holds something else.
    """
    with open(path, "rb") as file:
        try:
            arrays = dict(np.load(file))
        # A damaged file fails in the zip directory, in a checksum, in the compression or in a header.
        except Exception as error:
            raise ValueError(f"{path} is no whole .npz file ({error}); copy it again") from error
    return _part(path, arrays, "train"), _part(path, arrays, "test")


def _part(path: str | os.PathLike[str], arrays: dict[str, np.ndarray], part: str) -> Utterances:
    names = [f"{part}_{name}" for name in ("values", "lengths", "speaker")]
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{path} must have the arrays {', '.join(names)}; it lacks {', '.join(missing)}")
    values, lengths, speakers = (arrays[name] for name in names)
    if values.ndim != 2 or values.shape[1] != NUM_COEFFICIENTS or values.dtype.kind != "f":
        found = f"{values.dtype}{list(values.shape)}"
        raise ValueError(f"{path}: {names[0]} must be floats of shape (steps, {NUM_COEFFICIENTS}), found {found}")
    if not np.isfinite(values).all():
        raise ValueError(
            f"{path}: {names[0]} must be finite, found {np.count_nonzero(~np.isfinite(values))} that are not"
        )
    for name, array in zip(names[1:], (lengths, speakers), strict=True):
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
            raise ValueError(f"{path}: {name} must be integers of shape (n,), found {array.dtype}{list(array.shape)}")
    if len(lengths) != len(speakers):
        raise ValueError(f"{path}: {names[1]} is for {len(lengths)} utterances, {names[2]} for {len(speakers)}")
    if lengths.min() < 1 or lengths.sum() != len(values):
        found = f"lengths from {lengths.min()} that sum up to {lengths.sum()}"
        raise ValueError(f"{path}: {names[1]} must be positive and sum up to the {len(values)} steps, found {found}")
    if speakers.min() < 0 or speakers.max() >= NUM_SPEAKERS:
        found = f"{speakers.min()} to {speakers.max()}"
        raise ValueError(f"{path}: {names[2]} must be from 0 to {NUM_SPEAKERS - 1}, found {found}")
    return Utterances(np.split(values, np.cumsum(lengths)[:-1]), speakers.astype(np.int32))
