"""How much memory there is, and how much a program takes."""

import math
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.tiling import (
    AxisSpec,
    BatchPlanner,
    SafeMap,
    Vmap,
    device_memory_budget,
    estimators,
    lowered_memory_estimate,
    memory_estimator,
)
from xtrax.tiling._host_memory import host_memory_limit


class FakeDevice:
    def __init__(self, platform, stats):
        self.platform = platform
        self.stats = stats

    def memory_stats(self):
        return self.stats


def fake(platform, stats) -> Any:
    return FakeDevice(platform, stats)


def abstract(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_an_accelerator_has_what_its_allocator_says():
    gpu = fake("gpu", {"bytes_limit": 1000, "bytes_in_use": 900})
    assert device_memory_budget(device=gpu) == 900
    assert device_memory_budget(1, gpu) == 1000
    assert device_memory_budget(0.0015, gpu) == 1


@pytest.mark.parametrize("stats", [None, {}, {"bytes_limit": 0}])
def test_an_accelerator_that_says_nothing_is_unknown(stats):
    with pytest.raises(RuntimeError, match="reports no bytes_limit; give the number of bytes yourself"):
        device_memory_budget(device=fake("gpu", stats))


def test_a_cpu_has_what_the_host_has(monkeypatch):
    monkeypatch.setattr(estimators, "host_memory_limit", lambda: 4000)
    assert device_memory_budget(0.5, fake("cpu", None)) == 2000
    monkeypatch.setattr(estimators, "host_memory_limit", lambda: None)
    with pytest.raises(RuntimeError, match="neither /proc/meminfo nor a control group"):
        device_memory_budget(device=fake("cpu", None))


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="free memory is read on Linux")
def test_this_machine_has_no_more_than_all_its_memory():
    total = 1024 * int(Path("/proc/meminfo").read_text().split()[1])
    limit = device_memory_budget(1.0, jax.devices("cpu")[0])
    assert 0 < limit <= total


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, float("nan"), float("inf")])
def test_fractions_out_of_range_are_refused(fraction):
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\]"):
        device_memory_budget(fraction)


@pytest.mark.parametrize("fraction", [True, "0.9", None, [0.5]])
def test_fractions_of_another_type_are_refused(fraction):
    with pytest.raises(TypeError, match="fraction must be a number"):
        device_memory_budget(fraction)


def test_something_that_is_no_device_is_refused():
    wrong: Any = "cpu:0"
    with pytest.raises(TypeError, match="device must be a jax"):
        device_memory_budget(device=wrong)


def tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return host_memory_limit(root / "proc", root / "cgroup")


MEMINFO = {"proc/meminfo": "MemTotal: 90 kB\nMemFree: 1 kB\nMemAvailable: 50 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 51200),
        # version 2: the group's own limit, one above it, none, and a path that is not mounted here
        (MEMINFO | {"proc/self/cgroup": "0::/a/b\n", "cgroup/a/b/memory.max": "20000\n"}, 20000),
        (MEMINFO | {"proc/self/cgroup": "0::/a/b\n", "cgroup/a/memory.max": "30000\n"}, 30000),
        (MEMINFO | {"proc/self/cgroup": "0::/a\n", "cgroup/a/memory.max": "max\n"}, 51200),
        (MEMINFO | {"proc/self/cgroup": "0::/a\n", "cgroup/a/memory.max": "60000\n"}, 51200),
        (MEMINFO | {"proc/self/cgroup": "0::/outside/a\n", "cgroup/memory.max": "40000\n"}, 40000),
        ({"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "40000\n"}, 40000),
        # version 1
        (
            MEMINFO
            | {
                "proc/self/cgroup": "5:cpu,memory:/job\n4:pids:/\n",
                "cgroup/memory/job/memory.limit_in_bytes": "20000\n",
                "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            20000,
        ),
    ],
)
def test_the_host_is_limited_by_free_memory_and_control_groups(tmp_path, files, expected):
    assert tree(tmp_path, files) == expected


def test_estimates_are_arguments_outputs_and_temporaries():
    assert lowered_memory_estimate(lambda x: 2 * x, abstract(1000)) == 4000 + 4000
    assert lowered_memory_estimate(lambda x: x.astype("float32"), abstract(1000, dtype="int8")) == 1000 + 4000
    # x @ x.T is needed whole before it is multiplied again: a temporary beyond x and the result.
    n = 256
    assert lowered_memory_estimate(lambda x: (x @ x.T) @ jnp.sin(x @ x.T), abstract(n, n)) >= 3 * 4 * n * n


def test_arrays_within_a_function_count():
    weights = np.ones((100, 100), np.float32)
    row = abstract(100)
    expected = 40_000 + 400 + 400
    assert lowered_memory_estimate(lambda x: jnp.asarray(weights) @ x, row) == pytest.approx(expected, abs=512)
    on_device = jnp.asarray(weights)
    assert lowered_memory_estimate(lambda x: on_device @ x, row) == pytest.approx(expected, abs=512)
    assert lowered_memory_estimate(jax.jit(lambda x: on_device @ x), row) == pytest.approx(expected, abs=512)
    module = eqx.nn.Linear(100, 100, use_bias=False, key=jax.random.key(0))  # not hashable
    assert lowered_memory_estimate(module, row) == pytest.approx(expected, abs=512)


def test_estimates_take_trees_arrays_and_keys():
    args = {"x": np.ones((10,), np.float32), "y": (jnp.ones(5), abstract(2))}
    estimate = lowered_memory_estimate(lambda t: (t["x"] + 1, t["y"][0] * 2, t["y"][1] * 3), args)
    assert estimate == pytest.approx(2 * 4 * 17, abs=3 * 8)  # the table of three outputs counts too
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert lowered_memory_estimate(lambda key: jax.random.normal(key, (100,)), key) >= 400


@pytest.mark.parametrize(("fn", "args"), [(3, ()), (jnp.sin, ("x",)), (jnp.sin, (3.0,)), (jnp.sin, (jax.Array,))])
def test_what_cannot_be_estimated_is_refused(fn, args):
    with pytest.raises(TypeError, match=r"fn must be callable|abstract_args\[0\] must hold arrays"):
        lowered_memory_estimate(fn, *args)


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_an_estimator_maps_the_whole_axis(size):
    estimate = memory_estimator(lambda x: 2 * x, abstract(10))
    assert estimate(AxisSpec("batch", size, 32)) == 2 * 40 * size


def test_an_estimator_knows_which_arguments_have_the_axis():
    estimate = memory_estimator(lambda x, w: x + w, abstract(10), abstract(10), axes=["batch", None])
    assert estimate(AxisSpec("batch", 100, 32)) == 4000 + 40 + 4000
    several = memory_estimator(lambda x, w: x + w, abstract(10), abstract(10), axes=[("batch", "member"), {"member"}])
    assert several(AxisSpec("batch", 100, 32)) == 4000 + 40 + 4000
    assert several(AxisSpec("member", 100, 32)) == 4000 + 4000 + 4000
    with pytest.raises(ValueError, match="no argument has axis 'time'"):
        several(AxisSpec("time", 100, 32))


def test_an_estimator_compiles_once_for_a_size():
    traces = []

    def fn(x):
        traces.append(1)
        return 2 * x

    estimate = memory_estimator(fn, abstract(10))
    first = estimate(AxisSpec("a", 5, 32))
    count = len(traces)
    assert estimate(AxisSpec("b", 5, 16)) == first
    assert len(traces) == count


@pytest.mark.parametrize(
    ("args", "axes", "error", "message"),
    [
        ((), None, ValueError, "needs the arguments"),
        ((abstract(2),), ["a", "b"], ValueError, "axes has 2 entries, but there are 1 arguments"),
        ((abstract(2),), "a", TypeError, "axes must have an entry for each argument"),
        ((abstract(2),), 3, TypeError, "axes must have an entry for each argument"),
        ((abstract(2),), [3], TypeError, r"axes\[0\] must be a name"),
        ((abstract(2),), [[""]], ValueError, r"a name in axes\[0\] is empty"),
        (("x",), None, TypeError, r"abstract_args\[0\]"),
    ],
)
def test_bad_estimators_are_refused(args, axes, error, message):
    with pytest.raises(error, match=message):
        memory_estimator(jnp.sin, *args, axes=axes)


def test_the_planner_takes_the_compilers_word(monkeypatch):
    def pairwise(x):
        return jnp.sin(x[:, None] - x[None, :]) @ jnp.cos(x[:, None] * x[None, :])

    estimate = memory_estimator(pairwise, abstract(64))
    spec = AxisSpec("batch", 32, 8)
    need = estimate(spec)
    assert need >= 32 * 64 * 64 * 4
    monkeypatch.setattr(estimators, "host_memory_limit", lambda: math.ceil(need / 0.9) + 1)
    assert BatchPlanner(estimate).plan([spec]).decisions[0].strategy == Vmap()
    monkeypatch.setattr(estimators, "host_memory_limit", lambda: need // 2)
    assert BatchPlanner(estimate).plan([spec]).decisions[0].strategy == SafeMap(8)


def test_what_fails_to_compile_is_told_about():
    estimate = memory_estimator(lambda x: jnp.reshape(x, (3,)), abstract(2))
    with pytest.warns(RuntimeWarning, match=r"memory_estimator raised .* for axis 'batch'"):
        plan = BatchPlanner(estimate).plan([AxisSpec("batch", 64, 8)])
    assert plan.decisions[0].strategy == SafeMap(8)
