"""Training on eight devices gives the numbers of one, to rounding."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from xtrax.training import (
    ArrayDataModule,
    Engine,
    LogicalMesh,
    SafetyError,
    SafetyTrainStep,
    ShardingPolicy,
    Trainer,
    get_checkpoint_manager,
    get_device_mesh,
    load_checkpoint,
)


@pytest.fixture
def data() -> ArrayDataModule:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype("float32")
    weight = rng.integers(0, 3, size=40).astype("float32")
    arrays = {"inputs": x, "targets": x.sum(1, keepdims=True), "weight": weight}
    return ArrayDataModule(arrays, 16, seed=1, eval_arrays={name: a[:24] for name, a in arrays.items()})


def meshes(state):
    data8 = get_device_mesh(8, "data")
    grid = get_device_mesh((4, 2), ("data", "model"))
    return {
        "data-parallel": {"mesh": data8},
        "fsdp": {"mesh": data8, "sharding": ShardingPolicy.fsdp(state, data8, "data", min_size=8)},
        "tensor": {"mesh": grid, "sharding": ShardingPolicy({"first/(weight|bias)$": P("model"), "": P()})},
        "logical": {
            "mesh": LogicalMesh(grid, {"batch": ("data", "model")}),
            "sharding": ShardingPolicy.fsdp(state, grid, "data", min_size=8),
        },
        "explicit": {"mesh": jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Explicit,))},
    }


def absolute(predictions, targets):
    return jnp.abs(predictions - targets)[:, 0]


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if eqx.is_array(x):
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["data-parallel", "fsdp", "tensor", "logical", "explicit"])
def test_same_numbers_as_one_device(kind, data, dropout_state, optimizer, squared):
    trainer = Trainer(squared, optimizer, vmap=True)
    one = Engine(trainer, metrics={"error": absolute}, steps_per_call=2)
    expected = one.fit_sync(dropout_state, data, 2)
    engine = Engine(trainer, metrics={"error": absolute}, steps_per_call=2, **meshes(dropout_state)[kind])
    got = engine.fit_sync(dropout_state, data, 2)
    assert_close(got, expected)
    for a, b in zip(engine.history, one.history, strict=True):
        assert a["train"] == pytest.approx(b["train"], rel=1e-5)
        assert a["eval"] == pytest.approx(b["eval"], rel=1e-5)
    assert engine.eval(got, data) == pytest.approx(one.eval(expected, data), rel=1e-5)
    # The state stays where it was put, so no step is compiled again: 2 x 16 (fused) and 8 examples.
    assert engine.compiles == one.compiles
    assert len(got.model.first.weight.sharding.device_set) == 8
    if kind != "data-parallel" and kind != "explicit":
        part = got.model.first.weight.addressable_shards[0].data.shape
        assert part == {"fsdp": (1, 3), "tensor": (4, 3), "logical": (2, 3)}[kind]
        assert got.opt_state[0].mu.first.weight.addressable_shards[0].data.shape == part
    # The caller's state is still his.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(dropout_state) if isinstance(leaf, jax.Array))


def test_batches_are_computed_in_parts(dropout_state, optimizer, data):
    seen = []

    def loss(predictions, targets):
        jax.debug.inspect_array_sharding(predictions, callback=lambda s: seen.append(s))
        return ((predictions - targets) ** 2)[:, 0]

    Engine(Trainer(loss, optimizer, vmap=True), mesh=get_device_mesh(8, "data")).fit_sync(dropout_state, data, 1)
    parts = {sharding.shard_shape((16, 1))[0] for sharding in seen}
    assert 2 in parts


def test_a_batch_that_does_not_divide(dropout_state, optimizer, squared, array_data, caplog):
    trainer = Trainer(squared, optimizer, vmap=True)
    expected = Engine(trainer).fit_sync(dropout_state, array_data, 1)
    got = Engine(trainer, mesh=get_device_mesh(8, "data")).fit_sync(dropout_state, array_data, 1)
    assert_close(got, expected)
    said = [record.getMessage() for record in caplog.records if "is not split" in record.getMessage()]
    # Batches of 4 and 2 in training, 4 and 3 in evaluation: each size is told once.
    assert len(said) == 3


def test_accumulation_and_scalar_losses(dropout_state, optimizer, array_data):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 3)).astype("float32")
    data = ArrayDataModule({"inputs": x, "targets": x.sum(1, keepdims=True)}, 32)
    trainer = Trainer(lambda p, t: jnp.mean((p - t) ** 2), optimizer, vmap=True, accumulate=2)
    expected = Engine(trainer).fit_sync(dropout_state, data, 1)
    assert_close(Engine(trainer, mesh=get_device_mesh(8, "data")).fit_sync(dropout_state, data, 1), expected)


def test_resume_on_another_mesh(data, dropout_state, optimizer, squared, tmp_path, assert_same_bits):
    trainer = Trainer(squared, optimizer, vmap=True)
    whole = Engine(trainer).fit_sync(dropout_state, data, 3)
    options = meshes(dropout_state)
    partial = Engine(trainer, **options["fsdp"]).fit_sync(dropout_state, data, 1, checkpoint_dir=tmp_path)
    with get_checkpoint_manager(tmp_path) as manager:
        assert_same_bits(load_checkpoint(manager, dropout_state), partial)
    middle = Engine(trainer, **options["tensor"]).fit_sync(dropout_state, data, 2, checkpoint_dir=tmp_path, resume=True)
    assert middle.model.first.weight.addressable_shards[0].data.shape == (4, 3)
    assert_close(Engine(trainer).fit_sync(dropout_state, data, 3, checkpoint_dir=tmp_path, resume=True), whole)


def test_resume_on_the_same_mesh_is_exact(data, dropout_state, optimizer, squared, tmp_path, assert_same_bits):
    options = meshes(dropout_state)["fsdp"]
    trainer = Trainer(squared, optimizer, vmap=True)
    whole = Engine(trainer, **options).fit_sync(dropout_state, data, 2)

    class Fail:
        def on_step_end(self, state, metrics):
            if metrics.step == 4:
                raise LookupError

    with pytest.raises(LookupError):
        Engine(trainer, [Fail()], **options).fit_sync(dropout_state, data, 2, checkpoint_dir=tmp_path)
    resumed = Engine(trainer, **options).fit_sync(dropout_state, data, 2, checkpoint_dir=tmp_path, resume=True)
    assert_same_bits(resumed, whole)


def test_checks_on_a_mesh(data, dropout_state, optimizer, squared):
    options = meshes(dropout_state)["fsdp"]
    engine = Engine(SafetyTrainStep(Trainer(squared, optimizer, vmap=True)), steps_per_call=2, **options)
    assert_close(
        engine.fit_sync(dropout_state, data, 1),
        Engine(Trainer(squared, optimizer, vmap=True)).fit_sync(dropout_state, data, 1),
    )

    class Bad:
        def train_iter(self):
            for value in (1.0, np.nan):
                yield {"inputs": np.full((16, 3), value, "float32"), "targets": np.zeros((16, 1), "float32")}

    with pytest.raises(SafetyError, match="the loss has NaN at step 2") as caught:
        engine.fit_sync(dropout_state, Bad(), 1)
    assert int(caught.value.state.step) == 1


def test_bad_arguments(dropout_state, optimizer, squared):
    build: Any = Engine
    trainer = Trainer(squared, optimizer, vmap=True)
    mesh = get_device_mesh(8, "data")
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh or a LogicalMesh, got 8"):
        build(trainer, mesh=8)
    with pytest.raises(TypeError, match="sharding must be a ShardingPolicy"):
        build(trainer, mesh=mesh, sharding=P("data"))
    with pytest.raises(ValueError, match="sharding needs a mesh"):
        Engine(trainer, sharding=ShardingPolicy({}))
    with pytest.raises(ValueError, match='must have "batch"'):
        Engine(trainer, mesh=LogicalMesh(mesh, {"embed": "data"}))
    with pytest.raises(TypeError, match="trainer must be a Trainer or a SafetyTrainStep"):
        build(optax.sgd(0.1))
