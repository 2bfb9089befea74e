"""get_checkpoint_manager, save_checkpoint, load_checkpoint."""

import asyncio
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xtrax.training import (
    Checkpoint,
    Engine,
    ResumableState,
    Trainer,
    get_checkpoint_manager,
    init_state,
    load_checkpoint,
    load_progress,
    save_checkpoint,
)


class Mixed(eqx.Module):
    """Leaves of every kind: bf16, int, bool, empty, a typed key, a function and a Python number."""

    weight: jax.Array
    half: jax.Array
    count: jax.Array
    mask: jax.Array
    empty: jax.Array
    key: jax.Array
    activation: object
    rate: float

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.weight = jnp.asarray(rng.normal(size=(3, 2)), "float32")
        self.half = jnp.asarray(rng.normal(size=4), "bfloat16")
        self.count = jnp.asarray(rng.integers(9, size=2), "int32")
        self.mask = jnp.asarray(rng.integers(2, size=3), bool)
        self.empty = jnp.zeros((0, 3))
        self.key = jax.random.key(seed, impl="rbg")
        self.activation = jax.nn.relu
        self.rate = 0.5

    def __call__(self, x):
        return x


def mixed_state(seed=0):
    optimizer = optax.adam(1e-2)
    return init_state(Mixed(seed), optimizer, seed, extras={"a/b": jnp.arange(3), "nested": {"x": jnp.ones(2)}})


def test_a_state_comes_back_in_the_same_bits(tmp_path, assert_same_bits):
    state = mixed_state(1)
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, state, step=4)
    with get_checkpoint_manager(tmp_path) as manager:
        loaded = load_checkpoint(manager, mixed_state(2))
    assert_same_bits(loaded, state)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    assert loaded.model.activation is jax.nn.relu


def test_a_raw_key_comes_back(tmp_path, assert_same_bits):
    state = ResumableState(3, jax.random.PRNGKey(4), jnp.ones(2), ())
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, state)
        manager.wait_until_finished()
        assert_same_bits(load_checkpoint(manager, ResumableState(0, jax.random.PRNGKey(0), jnp.zeros(2), ())), state)


def test_a_checkpoint_is_a_composite_of_state_and_progress(tmp_path):
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, mixed_state(), step=2, progress={"epoch": 3, "metrics": {"history": []}})
    assert {"state", "progress"} <= {path.name for path in (tmp_path / "2").iterdir()}
    with get_checkpoint_manager(tmp_path) as manager:
        progress = load_progress(manager)
    assert progress["format_version"] == 1
    assert progress["epoch"] == 3
    assert progress["batches"] == 0
    assert progress["iterator"] is None
    assert progress["leaves"][".model.half"] == ["bfloat16", [4]]


def test_the_buffers_may_be_reused_at_once(tmp_path):
    state = ResumableState(0, jax.random.key(0), jnp.arange(200_000.0), ())
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    expected = np.arange(200_000.0, dtype="float32")
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, state)
        overwrite(state.model).block_until_ready()
        manager.wait_until_finished()
        template = ResumableState(0, jax.random.key(0), jnp.zeros(200_000), ())
        np.testing.assert_array_equal(load_checkpoint(manager, template).model, expected)


def test_steps_are_chosen_and_pruned(tmp_path):
    def at(value):
        return ResumableState(value, jax.random.key(0), jnp.full(2, float(value)), ())

    with get_checkpoint_manager(tmp_path, max_to_keep=2, keep_period=10) as manager:
        for step in (10, 11, 12, 13):
            save_checkpoint(manager, at(step))
        manager.wait_until_finished()
        assert float(load_checkpoint(manager, at(0)).model[0]) == 13
        assert float(load_checkpoint(manager, at(0), step=10).model[0]) == 10
        with pytest.raises(FileNotFoundError, match=r"\[10, 12, 13\]"):
            load_checkpoint(manager, at(0), step=11)
        with pytest.raises(ValueError, match="latest checkpoint there is 13"):
            save_checkpoint(manager, at(13))


def test_inside_a_running_loop(tmp_path, assert_same_bits):
    state = mixed_state()

    async def main():
        with get_checkpoint_manager(tmp_path) as manager:
            save_checkpoint(manager, state)
            manager.wait_until_finished()
            return load_checkpoint(manager, mixed_state(3))

    assert_same_bits(asyncio.run(main()), state)


def test_no_checkpoint(tmp_path):
    with get_checkpoint_manager(tmp_path / "new") as manager, pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_checkpoint(manager, mixed_state())


def test_half_written_checkpoints_are_ignored(tmp_path, assert_same_bits):
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, mixed_state(1), step=1)
    (tmp_path / "2.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    with get_checkpoint_manager(tmp_path) as manager:
        assert_same_bits(load_checkpoint(manager, mixed_state()), mixed_state(1))


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (lambda s: s.model.weight, jnp.zeros((3, 3)), r"\.model\.weight is float32\[3, 2\].*float32\[3, 3\]"),
        (lambda s: s.model.half, jnp.zeros(4, "float16"), r"\.model\.half is bfloat16"),
        (lambda s: s.model.empty, jnp.zeros((0, 4)), r"\.model\.empty"),
        (lambda s: s.model.key, jax.random.key(0), r"\.model\.key is key<rbg>"),
        (lambda s: s.extras, {"a/b": jnp.arange(3)}, r"\.extras\['nested'\]\['x'\] is in the checkpoint only"),
        (lambda s: s.model.rate, jnp.ones(1), r"\.model\.rate is not in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_named(where, value, words, tmp_path):
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, mixed_state())
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=words):
            load_checkpoint(manager, eqx.tree_at(where, mixed_state(), value))


def test_a_newer_format_is_refused(tmp_path):
    with get_checkpoint_manager(tmp_path) as manager:
        save_checkpoint(manager, mixed_state())
    (path,) = (tmp_path / "0" / "progress").glob("*metadata*")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "format_version": 2}))
    with get_checkpoint_manager(tmp_path) as manager, pytest.raises(ValueError, match="format version 2"):
        load_checkpoint(manager, mixed_state())


def test_progress_must_be_json(tmp_path):
    with get_checkpoint_manager(tmp_path) as manager, pytest.raises(TypeError, match="get_state"):
        save_checkpoint(manager, mixed_state(), progress={"iterator": b"bytes"})


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"directory": 3}, TypeError),
        ({"max_to_keep": 0}, ValueError),
        ({"max_to_keep": True}, TypeError),
        ({"keep_period": -1}, ValueError),
    ],
)
def test_bad_manager_argument(kwargs, error, tmp_path):
    with pytest.raises(error, match=next(iter(kwargs))):
        get_checkpoint_manager(**{"directory": tmp_path, **kwargs})


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        get_checkpoint_manager(tmp_path / "file")


def test_something_else_than_a_state(tmp_path):
    with get_checkpoint_manager(tmp_path) as manager:
        with pytest.raises(TypeError, match="ResumableState"):
            save_checkpoint(manager, {"a": 1})  # ty: ignore[invalid-argument-type]
        save_checkpoint(manager, mixed_state())
        with pytest.raises(TypeError, match="ResumableState"):
            load_checkpoint(manager, Mixed())  # ty: ignore[invalid-argument-type]


def test_the_callback_saves_when_it_is_told(dropout_state, optimizer, array_data, squared, tmp_path):
    trainer = Trainer(squared, optimizer, vmap=True)
    engine = Engine(trainer, [Checkpoint(every_steps=3, every_epochs=2)], steps_per_call=4)
    engine.fit_sync(dropout_state, array_data, 2, checkpoint_dir=tmp_path)
    # 7 batches in an epoch: every third step, and the end at 14.
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [3, 6, 9, 12, 14]


def test_the_best_state_is_kept_apart(dropout_state, optimizer, array_data, squared, tmp_path, assert_same_bits):
    values = iter([3.0, 1.0, 2.0])
    states = []

    class Evaluated:
        def on_eval_end(self, state, epoch, metrics):
            states.append(jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, state))

    checkpoint = Checkpoint(best="score")
    original = checkpoint.on_eval_end
    checkpoint.on_eval_end = lambda state, epoch, metrics: original(state, epoch, {"score": next(values)})
    engine = Engine(Trainer(squared, optimizer, vmap=True), [Evaluated(), checkpoint])
    engine.fit_sync(dropout_state, array_data, 3, checkpoint_dir=tmp_path)
    with get_checkpoint_manager(tmp_path / "best") as manager:
        assert_same_bits(load_checkpoint(manager, dropout_state), states[1])


def test_best_alone_leaves_the_saves_at_the_ends_of_epochs(
    dropout_state, optimizer, array_data, squared, tmp_path, monkeypatch
):
    monkeypatch.setattr("xtrax.training._checkpoint_callback.EpochCheckpoint.__init__.__defaults__", (0.0,))
    for name, callbacks, steps in [
        ("without", [], [7, 14]),
        ("best", [Checkpoint(best="loss")], [7, 14]),
        ("told", [Checkpoint(best="loss", every_steps=5)], [5, 10, 14]),
    ]:
        engine = Engine(Trainer(squared, optimizer, vmap=True), callbacks)
        engine.fit_sync(dropout_state, array_data, 2, checkpoint_dir=tmp_path / name)
        assert sorted(int(path.name) for path in (tmp_path / name).iterdir() if path.name.isdigit()) == steps


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({}, ValueError),
        ({"every_steps": 0}, ValueError),
        ({"every_steps": True}, TypeError),
        ({"every_minutes": "1"}, TypeError),
        ({"every_minutes": 0}, ValueError),
        ({"every_minutes": float("nan")}, ValueError),
        ({"every_epochs": -1}, ValueError),
        ({"best": 3}, TypeError),
        ({"best": "loss", "best_mode": "most"}, ValueError),
    ],
)
def test_bad_checkpoint_argument(kwargs, error):
    with pytest.raises(error):
        Checkpoint(**kwargs)


def test_a_best_metric_that_does_not_exist(dropout_state, optimizer, array_data, squared, tmp_path):
    engine = Engine(Trainer(squared, optimizer, vmap=True), [Checkpoint(best="acuracy")])
    with pytest.raises(ValueError, match="acuracy"):
        engine.fit_sync(dropout_state, array_data, 1, checkpoint_dir=tmp_path)


def test_a_checkpoint_callback_needs_a_folder(dropout_state, optimizer, array_data, squared):
    engine = Engine(Trainer(squared, optimizer, vmap=True), [Checkpoint(every_steps=1)])
    with pytest.raises(ValueError, match="checkpoint_dir"):
        engine.fit_sync(dropout_state, array_data, 1)
