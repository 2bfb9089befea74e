"""The example that a newcomer runs first: its data, its model, and the whole run through the command."""

import doctest
import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.training import Engine, Trainer, get_checkpoint_manager, init_state

EXAMPLE = Path(__file__).resolve().parent.parent / "docs" / "examples" / "vowels"
XTRAX = Path(sys.executable).with_name("xtrax")
BOUNDARIES = (16, 21, 32)


def _import_example():
    spec = importlib.util.spec_from_file_location("vowels_example", EXAMPLE / "vowels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


vowels = _import_example()
ARRAYS = dict(np.load(EXAMPLE / "japanese_vowels.npz"))
DATA = vowels.vowels(16, 0)


def raw(part: str) -> list[tuple[bytes, int]]:
    """The content of each utterance of a part, by a plain loop: its coefficients in millionths, and its speaker."""
    found, start = [], 0
    for length, speaker in zip(ARRAYS[f"{part}_lengths"], ARRAYS[f"{part}_speaker"], strict=True):
        values = ARRAYS[f"{part}_values"][start : start + length]
        found.append((np.round(values.astype(np.float64) * 1e6).astype(np.int64).tobytes(), int(speaker)))
        start += length
    return found


def content(batch, mean, std) -> list[tuple[bytes, int]]:
    """The utterances in a batch, unpadded and with the normalisation undone."""
    found = []
    for values, mask, target, weight in zip(
        batch["inputs"]["values"], batch["inputs"]["mask"], batch["targets"], batch["weight"], strict=True
    ):
        if weight:
            values = values[mask].astype(np.float64) * std + mean
            found.append((np.round(values * 1e6).astype(np.int64).tobytes(), int(target)))
    return found


def statistics() -> tuple[np.ndarray, np.ndarray]:
    steps = ARRAYS["train_values"].astype(np.float64)
    return steps.mean(axis=0), steps.std(axis=0)


def same(a, b) -> bool:
    return bool(eqx.tree_equal(a, b))


def first(batches):
    return next(iter(batches))


# Data


@pytest.mark.parametrize("batch_size", [1, 7, 16, 500])
def test_each_utterance_comes_once_in_an_epoch(batch_size):
    data = vowels.vowels(batch_size, seed=3)
    # The file has six decimals and the batches float32, so millionths come back exactly.
    batches = [list(data.train_iter(epoch=e)) for e in range(2)] + [list(data.eval_iter())]
    for found, part in zip(batches, ("train", "train", "test"), strict=True):
        assert sorted(itertools.chain.from_iterable(content(b, *statistics()) for b in found)) == sorted(raw(part))
    assert data.steps_per_epoch == len(batches[0])


@pytest.mark.parametrize("part", ["train", "test"])
def test_masks_weights_and_shapes_are_those_of_a_plain_loop(part):
    batches = list(DATA.train_iter(epoch=1) if part == "train" else DATA.eval_iter())
    expected = dict.fromkeys(BOUNDARIES, 0)
    for length in ARRAYS[f"{part}_lengths"]:
        for boundary in BOUNDARIES:
            if length <= boundary:
                expected[boundary] += 1
                break
    found = dict.fromkeys(BOUNDARIES, 0)
    for batch in batches:
        values, mask, weight = batch["inputs"]["values"], batch["inputs"]["mask"], batch["weight"]
        steps = values.shape[1]
        assert steps in BOUNDARIES
        assert values.shape == (16, steps, 12)
        assert mask.shape == (16, steps)
        assert batch["targets"].shape == weight.shape == (16,)
        assert (values.dtype, mask.dtype, weight.dtype) == (np.float32, np.bool_, np.float32)
        assert np.issubdtype(batch["targets"].dtype, np.integer)
        for i in range(16):
            length = int(mask[i].sum())
            assert list(mask[i]) == [step < length for step in range(steps)]
            assert not values[i, length:].any()
            assert weight[i] == (1.0 if length else 0.0)
            if length:
                assert steps == min(b for b in BOUNDARIES if b >= length)
        found[steps] += int(weight.sum())
    assert found == expected
    assert len(batches) == sum(-(-n // 16) for n in expected.values())


def test_the_order_depends_on_seed_and_epoch_alone():
    again = vowels.vowels(16, 0)
    for epoch in (0, 1, 7):
        assert same(list(DATA.train_iter(epoch=epoch)), list(again.train_iter(epoch=epoch)))
    firsts = [list(DATA.train_iter(epoch=e)) for e in (0, 1)] + [list(vowels.vowels(16, 1).train_iter(epoch=0))]
    assert not any(same(firsts[i], firsts[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert same(list(DATA.train_iter()), firsts[0])
    assert same(list(DATA.eval_iter()), list(vowels.vowels(16, 1).eval_iter()))


def test_normalisation_is_that_of_the_training_part():
    steps = np.concatenate([b["inputs"]["values"][b["inputs"]["mask"]] for b in DATA.train_iter()])
    np.testing.assert_allclose(steps.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(steps.std(axis=0), 1, atol=1e-5)
    train, test = vowels.read(EXAMPLE / "japanese_vowels.npz")
    shifted = vowels.Utterances([x + 5 for x in test.values], test.speakers)
    other = vowels.Vowels(train, shifted, batch_size=16, seed=0, boundaries=BOUNDARIES)
    assert same(list(other.train_iter()), list(DATA.train_iter()))
    batch, moved = first(DATA.eval_iter()), first(other.eval_iter())
    _, std = statistics()
    expected = np.where(batch["inputs"]["mask"][..., None], batch["inputs"]["values"] + 5 / std, 0)
    np.testing.assert_allclose(moved["inputs"]["values"], expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(place=st.integers(0, DATA.steps_per_epoch), epoch=st.integers(0, 3))
def test_a_saved_place_goes_on_with_the_same_batches(place, epoch):
    batches = DATA.train_iter(epoch=epoch)
    for _ in range(place):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    rest = list(batches)
    resumed = DATA.train_iter(epoch=epoch)
    resumed.set_state(state)
    assert same(list(resumed), rest)
    assert len(rest) == DATA.steps_per_epoch - place


@pytest.mark.parametrize("state", [{}, {"next": -1}, {"next": 10_000}, {"next": True}, {"next": 1.0}, {"next": "1"}])
def test_a_place_that_is_none_is_refused(state):
    batches = DATA.train_iter()
    with pytest.raises(ValueError, match="state must be"):
        batches.set_state(state)
    assert same(list(batches), list(DATA.train_iter()))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ({"batch_size": True}, TypeError, "batch_size must be an int, got True"),
        ({"batch_size": 16.0}, TypeError, "batch_size must be an int"),
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": None}, TypeError, "seed must be an int"),
        ({"boundaries": ()}, ValueError, "boundaries"),
        ({"boundaries": (16, 24)}, ValueError, "24"),
        ({"boundaries": (32, 16)}, ValueError, "ascending"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        vowels.vowels(**{"batch_size": 16, "seed": 0, **arguments})


@pytest.mark.parametrize("shape", [(12,), (5, 11), (0, 5, 12)])
def test_an_utterance_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"must have shape \(steps, 12\)"):
        DATA.prepare(np.zeros(shape, np.float32))


# The file


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99, -1])
def test_a_file_cut_short_is_refused_by_its_path(tmp_path, keep):
    whole = (EXAMPLE / "japanese_vowels.npz").read_bytes()
    path = tmp_path / "cut.npz"
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="copy it again") as caught:
        vowels.read(path)
    assert str(path) in str(caught.value)


def test_a_file_with_a_changed_byte_is_refused(tmp_path):
    whole = bytearray((EXAMPLE / "japanese_vowels.npz").read_bytes())
    whole[len(whole) // 3] ^= 0xFF
    path = tmp_path / "changed.npz"
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"no whole \.npz file"):
        vowels.read(path)


def test_a_file_that_is_none_or_no_npz(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        vowels.read(tmp_path / "none.npz")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        vowels.read(tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"array\.npy"):
        vowels.read(tmp_path / "array.npy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_lengths": None}, "lacks test_lengths"),
        ({"train_lengths": ARRAYS["train_lengths"][:-1]}, "269 utterances, train_speaker for 270"),
        (
            {"train_values": ARRAYS["train_values"][:-1]},
            "sum up to the 4273 steps, found lengths from 7 that sum up to 4274",
        ),
        ({"train_values": ARRAYS["train_values"][:, :11]}, r"of shape \(steps, 12\), found float32\[4274, 11\]"),
        ({"train_values": ARRAYS["train_values"] * np.nan}, "must be finite"),
        ({"test_values": np.zeros((5687, 12), np.int32)}, "must be floats"),
        ({"test_lengths": ARRAYS["test_lengths"] * 1.0}, "must be integers"),
        ({"test_lengths": np.zeros(0, np.int32)}, "must be integers of shape"),
        ({"test_speaker": ARRAYS["test_speaker"] + 1}, "test_speaker must be from 0 to 8, found 1 to 9"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, changes, message):
    path = tmp_path / "other.npz"
    np.savez(path, **{name: array for name, array in {**ARRAYS, **changes}.items() if array is not None})
    with pytest.raises(ValueError, match=message) as caught:
        vowels.read(path)
    assert str(path) in str(caught.value)


def test_a_length_of_zero_is_refused(tmp_path):
    lengths = ARRAYS["train_lengths"].copy()
    lengths[:2] = [0, lengths[0] + lengths[1]]
    np.savez(tmp_path / "zero.npz", **{**ARRAYS, "train_lengths": lengths})
    with pytest.raises(ValueError, match="must be positive"):
        vowels.read(tmp_path / "zero.npz")


# The model

MODEL = vowels.Classifier(hidden=32, key=jax.random.key(1))


@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_convolution_is_that_of_equinox(width):
    ours = vowels.WindowConv(12, 7, width, key=jax.random.key(0))
    theirs = eqx.nn.Conv1d(12, 7, width, padding=width // 2, key=jax.random.key(0))
    weight = ours.linear.weight.reshape(7, width, 12).transpose(0, 2, 1)
    theirs = eqx.tree_at(lambda c: (c.weight, c.bias), theirs, (weight, ours.linear.bias[:, None]))
    x = jax.random.normal(jax.random.key(1), (10, 12))
    np.testing.assert_allclose(ours(x), theirs(x.T).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [0, 2, -1])
def test_a_window_without_a_middle_is_refused(width):
    with pytest.raises(ValueError, match=f"odd.*got {width}"):
        vowels.WindowConv(12, 7, width, key=jax.random.key(0))


@settings(max_examples=20, deadline=None)
@given(length=st.sampled_from([1, 2, 7, 16]), steps=st.sampled_from([16, 21, 32]), seed=st.integers(0, 9))
def test_padding_changes_no_prediction(length, steps, seed):
    x = np.random.default_rng(seed).normal(size=(length, 12)).astype(np.float32)
    bare = MODEL({"values": jnp.asarray(x), "mask": jnp.ones(length, bool)})
    for padding in (0, 1e6, np.nan):
        values = np.full((steps, 12), padding, np.float32)
        values[:length] = x
        padded = MODEL({"values": jnp.asarray(values), "mask": jnp.arange(steps) < length})
        np.testing.assert_allclose(padded, bare, rtol=1e-4, atol=1e-5)


def test_examples_that_fill_a_batch_up_change_no_gradient():
    batch = min(DATA.train_iter(), key=lambda b: b["weight"].sum())
    n = int(batch["weight"].sum())
    assert n < 16

    def loss(model, part):
        losses = vowels.cross_entropy(jax.vmap(model)(part["inputs"]), part["targets"])
        return (losses * part["weight"]).sum() / part["weight"].sum()

    padded = eqx.filter_grad(loss)(MODEL, batch)
    bare = eqx.filter_grad(loss)(MODEL, jax.tree.map(lambda x: x[:n], batch))
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(bare), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_dropout_needs_a_key_and_is_off_in_inference():
    inputs = jax.tree.map(lambda x: jnp.asarray(x[0]), first(DATA.eval_iter())["inputs"])
    plain = MODEL(inputs)
    assert not np.allclose(MODEL(inputs, key=jax.random.key(0)), plain)
    np.testing.assert_array_equal(eqx.nn.inference_mode(MODEL)(inputs, key=jax.random.key(0)), plain)


def test_loss_and_metric_are_per_example():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    targets = jnp.array([1, 2])
    np.testing.assert_allclose(vowels.cross_entropy(logits, targets), [np.log(4), -np.log(0.8)], rtol=1e-6)
    np.testing.assert_array_equal(vowels.accuracy(logits, targets), [0, 1])


def test_a_run_stopped_in_an_epoch_ends_in_the_same_bits(tmp_path):
    class Stop:
        steps = 0

        def on_step_end(self, state, metrics):
            self.steps += 1
            if self.steps == 25:
                raise RuntimeError("stopped")

    def data():  # without evaluation and with two buckets: fewer compiles
        return SimpleNamespace(train_iter=vowels.vowels(16, 0, boundaries=(18, 32)).train_iter)

    optimizer = optax.adam(1e-3)
    trainer = Trainer(vowels.cross_entropy, optimizer, vmap=True)

    def start():
        return init_state(vowels.Classifier(hidden=8, key=jax.random.key(0)), optimizer, seed=0)

    steps = len(list(data().train_iter()))
    whole = Engine(trainer).fit_sync(start(), data(), 3)
    with pytest.raises(RuntimeError, match="stopped"):
        Engine(trainer, [Stop()]).fit_sync(start(), data(), 3, checkpoint_dir=tmp_path)
    with get_checkpoint_manager(tmp_path) as manager:
        assert steps < manager.latest_step() < 2 * steps
    resumed = Engine(trainer).fit_sync(start(), data(), 3, checkpoint_dir=tmp_path, resume=True)
    assert int(resumed.step) == 3 * steps
    assert same(resumed, whole)


def test_the_examples_in_its_docstrings_hold():
    results = doctest.testmod(vowels)
    assert results.failed == 0
    assert results.attempted > 0


# The command


def test_one_command_trains_to_95_percent(tmp_path):
    command = [XTRAX, "run", EXAMPLE / "train.toml", "--set", "seed=1"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    (folder,) = (tmp_path / ".xtrax" / "runs").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    assert manifest["metrics"]["accuracy"] >= 0.95
    assert manifest["compiles"] == {"train": len(BOUNDARIES), "eval": len(BOUNDARIES)}
    assert manifest["steps"] == 30 * DATA.steps_per_epoch
    for name in ("config.toml", "run.log", "metrics.zarr", "checkpoints"):
        assert (folder / name).exists(), name

    told = ran.stdout
    assert re.search(rf"^ *eval accuracy +{manifest['metrics']['accuracy']:.4f}$", told, flags=re.MULTILINE)
    assert "3 for training, 3 for evaluation" in told
    assert str(folder.name) in told
    assert f"xtrax resume {folder.name}" in told
    assert "load_run" in told
    assert "\x1b" not in told
    assert "Traceback" not in ran.stderr

    # What the README of the example tells a user to type.
    (code,) = re.findall(r"^```python$(.*?)^```$", (EXAMPLE / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    predict = [sys.executable, "-c", code.replace("RUN_ID", folder.name)]
    predicted = subprocess.run(predict, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert predicted.returncode == 0, predicted.stderr
    assert predicted.stdout == f"{round(370 * manifest['metrics']['accuracy'])} of 370\n"


def test_the_command_names_a_data_file_cut_short_and_leaves_nothing(tmp_path):
    cut = tmp_path / "cut.npz"
    cut.write_bytes((EXAMPLE / "japanese_vowels.npz").read_bytes()[:200_000])
    command = [XTRAX, "run", EXAMPLE / "train.toml", "--set", f"data.kwargs.path={json.dumps(str(cut))}"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    assert str(cut) in ran.stderr
    assert "copy it again" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == [cut]
