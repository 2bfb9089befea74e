"""ArrayDataModule."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.training import ArrayDataModule, DataModule


def arrays(n):
    x = np.arange(n, dtype="float32")
    return {"inputs": {"x": x[:, None], "i": np.arange(n)}, "targets": -x}


def seen(iterator):
    return [batch["inputs"]["i"].tolist() for batch in iterator]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 40), size=st.integers(1, 12), drop=st.booleans(), epoch=st.integers(0, 3))
def test_an_epoch_has_every_example_once(n, size, drop, epoch):
    if drop and n < size:
        with pytest.raises(ValueError, match="drop_remainder"):
            ArrayDataModule(arrays(n), size, drop_remainder=True)
        return
    data = ArrayDataModule(arrays(n), size, seed=1, drop_remainder=drop, eval_arrays=arrays(n))
    batches = seen(data.train_iter(epoch=epoch))
    sizes = [size] * (n // size) + ([n % size] if n % size and not drop else [])
    assert [len(batch) for batch in batches] == sizes
    assert len(batches) == data.steps_per_epoch
    flat = [i for batch in batches for i in batch]
    assert len(set(flat)) == len(flat)
    if not drop:
        assert sorted(flat) == list(range(n))
    assert [i for batch in seen(data.eval_iter()) for i in batch] == list(range(n))


def test_arrays_stay_together():
    for batch in ArrayDataModule(arrays(10), 3).train_iter():
        np.testing.assert_array_equal(batch["inputs"]["x"][:, 0], batch["inputs"]["i"])
        np.testing.assert_array_equal(batch["targets"], -batch["inputs"]["i"])


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return seen(ArrayDataModule(arrays(30), 5, seed=seed).train_iter(epoch=epoch))

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3)
    assert order(1, 2) != order(2, 2)
    assert seen(ArrayDataModule(arrays(30), 5, shuffle=False).train_iter(epoch=4)) == [
        list(range(i, i + 5)) for i in range(0, 30, 5)
    ]


def test_a_shuffle_reaches_every_place():
    counts: np.ndarray = np.zeros((6, 6))
    for epoch in range(600):
        (batch,) = seen(ArrayDataModule(arrays(6), 6, seed=3).train_iter(epoch=epoch))
        counts[np.arange(6), batch] += 1
    # 100 expected in each cell, with a standard deviation of 9.1.
    assert counts.min() > 60
    assert counts.max() < 140


def test_the_state_of_an_iterator_goes_on_where_it_was():
    data = ArrayDataModule(arrays(10), 3)
    first = data.train_iter(epoch=1)
    next(first)
    state = first.get_state()
    rest = seen(first)
    second = data.train_iter(epoch=1)
    second.set_state(state)
    assert seen(second) == rest


def test_without_eval_arrays_there_is_no_eval_iter():
    data = ArrayDataModule(arrays(4), 2)
    assert isinstance(data, DataModule)
    assert not hasattr(data, "eval_iter")


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"arrays": [1]}, TypeError, "arrays"),
        ({"arrays": {"inputs": np.ones(3)}}, ValueError, "arrays: .*targets"),
        ({"arrays": {"inputs": np.ones(3), "targets": np.ones(4)}}, ValueError, "leading axis"),
        ({"arrays": {"inputs": np.ones(0), "targets": np.ones(0)}}, ValueError, "at least one"),
        ({"arrays": {"inputs": np.array(["a"]), "targets": np.ones(1)}}, TypeError, "numbers"),
        ({"arrays": {"inputs": np.ones(2), "targets": None, "weight": -np.ones(2)}}, ValueError, "weight"),
        ({"eval_arrays": {"inputs": np.ones(3)}}, ValueError, "eval_arrays"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"batch_size": True}, TypeError, "batch_size"),
        ({"batch_size": 2.0}, TypeError, "batch_size"),
        ({"shuffle": 1}, TypeError, "shuffle"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": None}, TypeError, "seed"),
        ({"drop_remainder": "no"}, TypeError, "drop_remainder"),
    ],
)
def test_bad_argument(kwargs, error, words):
    arguments: dict[str, Any] = {"arrays": arrays(4), "batch_size": 2, **kwargs}
    with pytest.raises(error, match=words):
        ArrayDataModule(**arguments)


@pytest.mark.parametrize(("epoch", "error"), [(-1, ValueError), (True, TypeError), (0.5, TypeError)])
def test_bad_epoch(epoch, error):
    with pytest.raises(error, match="epoch"):
        ArrayDataModule(arrays(4), 2).train_iter(epoch=epoch)
