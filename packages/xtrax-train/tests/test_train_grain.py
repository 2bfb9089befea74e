"""Grain pipelines as data: order, epochs, and exact resuming."""

from typing import Any

import grain
import numpy as np
import pytest

from xtrax.training import Engine, GrainDataModule, Trainer

UNTYPED: Any = GrainDataModule  # for what a type checker would refuse too


def example(i):
    x = np.random.default_rng(int(i)).normal(size=3).astype("float32")
    return {"inputs": x, "targets": x.sum(keepdims=True), "weight": np.float32(1)}


def pipeline(n=26, batch=4):
    return grain.MapDataset.range(n).seed(3).shuffle().map(example).batch(batch)


def numbers(batches):
    """Which examples the batches hold, in order."""
    known = {example(i)["targets"].tobytes(): i for i in range(100)}
    return [[known[np.float32(t).tobytes()] for t in batch["targets"]] for batch in batches]


def test_an_epoch_has_every_example_once():
    data = GrainDataModule(pipeline())
    epochs = [numbers(data.train_iter(epoch=epoch)) for epoch in range(3)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [4] * 6 + [2]
        assert sorted(i for batch in batches for i in batch) == list(range(26))
    assert epochs[0] != epochs[1] != epochs[2]
    assert data.steps_per_epoch == 7
    assert numbers(data.train_iter(epoch=1)) == epochs[1]


def test_epochs_are_those_of_a_repeated_dataset():
    data = GrainDataModule(pipeline(24))
    repeated = numbers(iter(pipeline(24).repeat(2).to_iter_dataset()))
    assert [*numbers(data.train_iter(epoch=0)), *numbers(data.train_iter(epoch=1))] == repeated


def test_iter_datasets_and_functions():
    stream = grain.MapDataset.range(8).map(example).to_iter_dataset().batch(4)
    data = GrainDataModule(stream, evaluation=pipeline(4))
    assert numbers(data.train_iter(epoch=0)) == numbers(data.train_iter(epoch=1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(list(data.eval_iter())) == 1
    assert not hasattr(data, "steps_per_epoch")
    by_epoch = GrainDataModule(lambda epoch: grain.MapDataset.range(epoch, epoch + 2).map(example).batch(2))
    assert numbers(by_epoch.train_iter(epoch=5)) == [[5, 6]]
    assert not hasattr(by_epoch, "eval_iter")


def test_elements_may_be_filtered():
    data = GrainDataModule(pipeline(8, 2).filter(lambda batch: float(batch["targets"][0, 0]) > 0))
    kept = numbers(data.train_iter(epoch=0))
    assert kept == [b for b in numbers(iter(pipeline(8, 2).to_iter_dataset())) if example(b[0])["targets"][0] > 0]
    assert 0 < len(kept) < 4


@pytest.mark.parametrize("kind", ["map", "iter", "function"])
def test_exact_resume(kind, dropout_state, optimizer, squared, tmp_path, assert_same_bits):
    stream = pipeline().to_iter_dataset()
    train = {"map": pipeline(), "iter": stream, "function": lambda epoch: pipeline().to_iter_dataset()}[kind]
    data = GrainDataModule(train, evaluation=pipeline(5))
    trainer = Trainer(squared, optimizer, vmap=True)
    whole = Engine(trainer)
    expected = whole.fit_sync(dropout_state, data, 2)

    class Fail:
        def on_step_end(self, state, metrics):
            if metrics.step == 10:
                raise LookupError

    with pytest.raises(LookupError):
        Engine(trainer, [Fail()], steps_per_call=2).fit_sync(dropout_state, data, 2, checkpoint_dir=tmp_path)
    resumed = Engine(trainer)
    got = resumed.fit_sync(dropout_state, data, 2, checkpoint_dir=tmp_path, resume=True)
    assert_same_bits(got, expected)
    assert resumed.history == whole.history


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: UNTYPED([1, 2]), TypeError, "train must be a grain MapDataset or IterDataset"),
        (lambda: GrainDataModule(pipeline(0)), ValueError, "train has no batches"),
        (lambda: GrainDataModule(pipeline().repeat()), ValueError, "train repeats for ever"),
        (lambda: UNTYPED(pipeline(), evaluation=7), TypeError, "evaluation must be a grain MapDataset"),
        (lambda: UNTYPED(pipeline(), read_options=4), TypeError, "read_options must be grain.ReadOptions"),
        (lambda: GrainDataModule(pipeline()).train_iter(epoch=-1), ValueError, "epoch must be at least 0"),
        (lambda: UNTYPED(lambda epoch: [1]).train_iter(), TypeError, "what train returned must be a grain"),
    ],
)
def test_bad_arguments(build, error, message):
    with pytest.raises(error, match=message):
        build()
