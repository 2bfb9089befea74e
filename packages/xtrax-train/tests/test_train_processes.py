"""Two processes train one model together over gloo, are preempted, and resume."""

import json
import socket
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

from xtrax.training import ArrayDataModule, Engine, Trainer, init_state

MODEL = textwrap.dedent(
    """
    def problem():
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64, 4)).astype("float32")
        arrays = {"inputs": x, "targets": x.sum(1, keepdims=True)}
        data = ArrayDataModule(arrays, 8, seed=1, eval_arrays={name: a[:16] for name, a in arrays.items()})
        optimizer = optax.adam(1e-2)
        state = init_state(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)), optimizer, seed=0)
        return data, optimizer, state

    def squared(predictions, targets):
        return ((predictions - targets) ** 2)[:, 0]
    """
)

SCRIPT = (
    textwrap.dedent(
        """
        import json, os, signal, sys
        import jax
        jax.config.update("jax_num_cpu_devices", 2)
        from xtrax.training import *
        port, number, folder, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
        address = f"localhost:{port}"
        init_dist(coordinator_address=address, num_processes=2, process_id=number)
        init_dist()
        init_dist(coordinator_address=address, num_processes=2, process_id=number)
        said = []
        for other in ({"num_processes": 3}, {"process_id": 1 - number}, {"coordinator_address": "localhost:1"}):
            try:
                init_dist(**other)
            except RuntimeError as error:
                said.append(str(error))
        import equinox as eqx, numpy as np, optax
        """
    )
    + MODEL
    + textwrap.dedent(
        """
        class Signal:
            def on_step_end(self, state, metrics):
                if mode == "signal" and number == 1 and metrics.step == 10:
                    os.kill(os.getpid(), signal.SIGTERM)

        data, optimizer, state = problem()
        profile = get_hardware_mesh_profile()
        mesh = get_device_mesh(profile.suggested_shape, ("process", "device"))
        policy = ShardingPolicy.fsdp(state, mesh, "device", min_size=8)
        engine = Engine(
            SafetyTrainStep(Trainer(squared, optimizer, vmap=True)),
            [Signal(), PreemptionHandler(agree_every=4)],
            steps_per_call=2,
            mesh=LogicalMesh(mesh, {"batch": ("process", "device")}),
            sharding=policy,
        )
        final = engine.fit_sync(state, data, 3, checkpoint_dir=folder, resume=mode == "resume")
        whole = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        leaves = [np.asarray(whole(leaf)).tolist() for leaf in jax.tree.leaves(eqx.filter(final.model, eqx.is_array))]
        part = final.model.layers[0].weight.addressable_shards[0].data.shape
        print(json.dumps({"leaves": leaves, "history": engine.history, "said": said, "part": part,
                          "is_distributed": is_distributed(), "shape": profile.suggested_shape}))
        """
    )
)


def run_both(folder, mode):
    """Starts both processes; their exit codes and what they print last."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(port), str(number), str(folder), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_two_processes(tmp_path):
    for code, _, stderr in run_both(tmp_path, "signal"):
        assert code == 75, stderr
    # Step 10 had the signal in one of them, and step 12 is where they agreed.
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [12]

    results = run_both(tmp_path, "resume")
    for code, _, stderr in results:
        assert code == 0, stderr
    first, second = (json.loads(stdout.splitlines()[-1]) for _, stdout, _ in results)
    assert first["leaves"] == second["leaves"]
    assert first["history"] == second["history"]
    assert first["is_distributed"]
    assert first["shape"] == [2, 2]
    assert first["part"] == [4, 4]
    assert len(first["said"]) == 3
    assert "called with {'num_processes': 3}; call it once" in first["said"][0]

    names: dict = {"np": np, "eqx": eqx, "jax": jax, "optax": optax}
    names |= {"init_state": init_state, "ArrayDataModule": ArrayDataModule}
    exec(MODEL, names)
    data, optimizer, state = names["problem"]()
    alone = Engine(Trainer(names["squared"], optimizer, vmap=True))
    expected = alone.fit_sync(state, data, 3)
    for got, leaf in zip(first["leaves"], jax.tree.leaves(eqx.filter(expected.model, eqx.is_array)), strict=True):
        np.testing.assert_allclose(got, leaf, rtol=1e-4, atol=1e-6)
    for got, entry in zip(first["history"], alone.history, strict=True):
        assert got["train"] == pytest.approx(entry["train"], rel=1e-4)
        assert got["eval"] == pytest.approx(entry["eval"], rel=1e-4)
