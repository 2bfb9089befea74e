"""Meshes, policies of sharding, and logical axes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xtrax.training import (
    LogicalMesh,
    ShardingPolicy,
    get_device_mesh,
    get_hardware_mesh_profile,
    init_dist,
    init_state,
    is_distributed,
)


@pytest.fixture
def mesh() -> Mesh:
    return get_device_mesh((4, 2), ("data", "model"))


@pytest.fixture
def params():
    return {"a": {"w": jnp.arange(32.0).reshape(8, 4), "b": jnp.ones(4)}, "scale": jnp.ones(())}


def test_device_mesh():
    mesh = get_device_mesh((2, -1), ("data", "model"))
    assert mesh.shape == {"data": 2, "model": 4}
    assert set(mesh.devices.flat) == set(jax.devices())
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert get_device_mesh(2, "data").shape == {"data": 2}
    assert get_device_mesh((-1,), "data", devices=jax.devices()[:3]).shape == {"data": 3}


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (((16,), ("data",)), ValueError, r"shape \(16,\) needs 16 devices, and there are 8"),
        (((3, -1), ("a", "b")), ValueError, "8 devices cannot be divided by 3"),
        (((-1, -1), ("a", "b")), ValueError, "at most one length may be -1"),
        (((0,), ("a",)), ValueError, "the length of 'a' must be positive"),
        (((-2,), ("a",)), ValueError, "the length of 'a' must be at least -1"),
        (((True,), ("a",)), TypeError, "the length of 'a' must be an integer, got True"),
        (((2, 2), ("a",)), ValueError, "one length for each"),
        (((2, 2), ("a", "a")), ValueError, "axis_names must be different"),
        (((2,), (1,)), TypeError, "axis_names must be names"),
        (((), ()), TypeError, "axis_names must be names"),
    ],
)
def test_bad_meshes(args, error, message):
    with pytest.raises(error, match=message):
        get_device_mesh(*args)


def test_profile():
    profile = get_hardware_mesh_profile()
    assert (profile.platform, profile.num_devices, profile.num_local_devices, profile.num_processes) == ("cpu", 8, 8, 1)
    assert profile.suggested_shape == (1, 8)
    assert profile.memory_bytes is None
    assert not is_distributed()


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"coordinator_address": 1}, TypeError, "coordinator_address must be a string"),
        ({"coordinator_address": "localhost"}, ValueError, "coordinator_address must be host:port"),
        ({"coordinator_address": "localhost:x"}, ValueError, "coordinator_address must be host:port"),
        ({"num_processes": 0}, ValueError, "num_processes must be at least 1"),
        ({"num_processes": True}, TypeError, "num_processes must be an integer"),
        ({"process_id": -1}, ValueError, "process_id must be at least 0"),
        ({"num_processes": 2, "process_id": 2}, ValueError, "process_id must be below num_processes=2"),
    ],
)
def test_bad_arguments_of_init_dist(kwargs, error, message):
    with pytest.raises(error, match=message):
        init_dist(**kwargs)
    assert not is_distributed()


def test_policy_places_leaves(mesh, params):
    policy = ShardingPolicy({"w$": P("data", "model"), "": P()})
    placed = policy.place(params, mesh)
    assert placed["a"]["w"].sharding == NamedSharding(mesh, P("data", "model"))
    assert {shard.data.shape for shard in placed["a"]["w"].addressable_shards} == {(2, 2)}
    assert placed["a"]["b"].sharding.is_fully_replicated
    assert placed["scale"].sharding.is_fully_replicated
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(params), strict=True):
        assert np.array_equal(a, b)


def test_the_first_rule_that_fits_counts(params):
    policy = ShardingPolicy({"^a/w": P("data"), "w": P("model"), "b$": P(None)})
    assert policy.specs(params) == {"a": {"w": P("data"), "b": P(None)}, "scale": P()}


def test_unmatched_paths_are_reported(mesh, params, caplog):
    policy = ShardingPolicy({"w$": P("data")})
    assert policy.unmatched(params) == ("a/b",)
    policy.shardings(params, mesh)
    (record,) = caplog.records
    assert "no sharding rule fits 1 of 3 leaves" in record.getMessage()
    assert "a/b" in record.getMessage()
    with pytest.raises(ValueError, match="no sharding rule fits a/b"):
        ShardingPolicy({"w$": P("data")}, default=None).specs(params)


def test_what_is_not_an_array_is_left_alone(mesh):
    tree = {"w": jnp.ones(8), "activation": jnp.tanh, "name": "x", "none": None}
    placed = ShardingPolicy({"w": P("data")}).place(tree, mesh)
    assert placed["activation"] is jnp.tanh
    assert placed["name"] == "x"
    assert placed["none"] is None
    assert len(placed["w"].addressable_shards) == 8


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"b$": P("data", "model"), "": P()}, r"a/b has shape \(4,\), fewer axes than its spec"),
        ({"w$": P("rows"), "": P()}, r"a/w: .* names \['rows'\], and the mesh has the axes \('data', 'model'\)"),
        ({"b$": P(("data", "model")), "": P()}, r"a/b: axis 0 has length 4, which 8 devices"),
    ],
)
def test_specs_that_do_not_fit(mesh, params, rules, message):
    with pytest.raises(ValueError, match=message):
        ShardingPolicy(rules).shardings(params, mesh)


def test_bad_policies(mesh, params):
    build: Any = ShardingPolicy
    with pytest.raises(TypeError, match="rules must be a dict"):
        build([("w", P())])
    with pytest.raises(TypeError, match=r"must be given a jax\.sharding\.PartitionSpec, got 'data'"):
        build({"w": "data"})
    with pytest.raises(ValueError, match="is not a regular expression"):
        ShardingPolicy({"[": P()})
    with pytest.raises(TypeError, match="default must be"):
        build({}, default="data")
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        build({}).place(params, "mesh")
    with pytest.raises(ValueError, match="axis must be one of the mesh"):
        ShardingPolicy.fsdp(params, mesh, "rows")
    with pytest.raises(ValueError, match="min_size must be at least 1"):
        ShardingPolicy.fsdp(params, mesh, "data", min_size=0)


def test_fsdp_splits_the_longest_axis_that_divides(mesh, dropout_state):
    state = init_state(dropout_state.model, optax.adam(1e-3), seed=0)
    policy = ShardingPolicy.fsdp(state, mesh, "data", min_size=8)
    assert policy.unmatched(state) == ()
    specs = policy.specs(state)
    assert specs.model.first.weight == P("data")  # (8, 3)
    assert specs.model.last.weight == P(None, "data")  # (1, 8)
    assert specs.model.last.bias == P()
    assert specs.opt_state[0].mu.first.weight == P("data")
    assert ShardingPolicy.fsdp(state, mesh, "data", min_size=25).specs(state).model.first.weight == P()


def test_logical_mesh(mesh):
    logical = LogicalMesh(mesh, {"batch": ("data", "model"), "embed": "model", "time": None})
    assert logical.spec("batch", "time") == P(("data", "model"), None)
    assert logical.spec("time", None, "embed") == P(None, None, "model")
    assert logical.sharding("embed") == NamedSharding(mesh, P("model"))
    assert (logical.size("batch"), logical.size("embed"), logical.size("time")) == (8, 2, 1)
    x = jax.jit(lambda x: logical.constrain(x, "batch", "time"))(jnp.ones((8, 3)))
    assert {shard.data.shape for shard in x.addressable_shards} == {(1, 3)}


def test_bad_logical_meshes(mesh):
    build: Any = LogicalMesh
    logical = LogicalMesh(mesh, {"batch": ("data", "model"), "embed": "model"})
    with pytest.raises(ValueError, match="'batch' and 'embed' are both split over the mesh axis 'model'"):
        logical.spec("batch", "embed")
    with pytest.raises(ValueError, match=r"no logical axis 'heads'; there are \['batch', 'embed'\]"):
        logical.spec("heads")
    with pytest.raises(ValueError, match=r"x has shape \(2,\), and 2 logical axes are named"):
        logical.constrain(jnp.ones(2), "embed", None)
    with pytest.raises(ValueError, match=r"rules\['a'\] names \['rows'\]"):
        LogicalMesh(mesh, {"a": "rows"})
    with pytest.raises(ValueError, match=r"rules\['a'\] names a mesh axis twice"):
        LogicalMesh(mesh, {"a": ("data", "data")})
    with pytest.raises(TypeError, match=r"rules\['a'\] must be a mesh axis"):
        build(mesh, {"a": 3})
    with pytest.raises(TypeError, match="a logical axis must be a name"):
        build(mesh, {3: "data"})
    with pytest.raises(TypeError, match="rules must be a dict by logical axis"):
        build(mesh, ["data"])
    with pytest.raises(TypeError, match=r"mesh must be a jax\.sharding\.Mesh"):
        build("mesh", {})
