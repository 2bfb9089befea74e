"""Chunk sizes by measurement: what is tried, within which budget, and what is kept."""

import json
import math
import os
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.tiling import (
    BudgetInfeasibleError,
    MemoryBudget,
    SafeMapIterator,
    TunedBatchSize,
    tune_batch_size,
)
from xtrax.tiling._tuning import measure
from xtrax.tiling._tuning.cache import forget


@pytest.fixture(autouse=True)
def _nothing_remembered():
    forget()


def abstract(*shape, dtype="float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def ranked(x):
    """`(64,)` to `(4,)`, with memory for each element at once."""
    return jnp.sort(jnp.sin(x))[:4]


def fastest(tuned):
    return min(tuned.measurements, key=lambda size: tuned.measurements[size])


def test_a_few_sizes_are_timed_and_one_of_the_fastest_is_chosen(compiles):
    xs = np.ones((5000, 64), np.float32)
    with compiles() as done:
        tuned = tune_batch_size(ranked, xs)
    assert len(done) == len(tuned.measurements) <= 6
    assert len(tuned.measurements) >= 4
    assert min(tuned.measurements) <= 16
    assert max(tuned.measurements) == 5000
    assert all(seconds > 0 for seconds in tuned.measurements.values())
    assert tuned.measurements[tuned.batch_size] <= 1.021 * tuned.measurements[fastest(tuned)]


@pytest.mark.parametrize("total", [2, 3, 17, 40, 1000])
def test_short_axes_are_tuned_too(total):
    tuned = tune_batch_size(jnp.tanh, abstract(total, 2))
    assert len(tuned.measurements) <= 6
    assert all(1 <= size <= total for size in tuned.measurements)
    assert tuned.batch_size in tuned.measurements


@pytest.mark.parametrize("total", [0, 1])
def test_where_there_is_nothing_to_choose_nothing_is_compiled(total, compiles):
    with compiles() as done:
        assert tune_batch_size(ranked, np.ones((total, 64), np.float32)) == TunedBatchSize(1, {})
    assert done == []


class FakeMachine:
    """Runs a map in as many seconds, and as many bytes, as functions of the chunk size say."""

    def __init__(self, seconds, nbytes=lambda size: 0):
        self.seconds = seconds
        self.nbytes = nbytes
        self.now = 0.0
        self.compiled = []

    def search(self, monkeypatch, total, budget=None):
        monkeypatch.setattr(measure, "Program", self)
        monkeypatch.setattr(measure, "compiled_bytes", lambda compiled: compiled.nbytes)
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)
        run_at: Any = lambda size: size  # noqa: E731
        return measure.search(run_at, [np.zeros(1)], total, budget)

    def of(self, size, args):
        self.compiled.append(size)

        def run(consts, leaves):
            self.now += self.seconds(size)
            return leaves

        run_and_size: Any = run
        run_and_size.nbytes = self.nbytes(size)
        return SimpleNamespace(compile=lambda: run_and_size, consts=[])


CURVES = {
    "best in cache": lambda best: (
        lambda size: (20 / size + 1 + size / best if size < best else 2 + 3 * size / best) / 1e3
    ),
    "valley": lambda best: lambda size: 1e-3 * (1 + abs(math.log2(size / best)) / 4),
    "ever larger": lambda best: lambda size: 1e-3 + best / size * 1e-3,
    "ever smaller": lambda best: lambda size: 1e-3 * (1 + math.log2(1 + size / best) / 4),
}


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("best", [3, 5, 16, 40, 300, 1000, 3000, 20_000])
@pytest.mark.parametrize("total", [60, 1024, 65_537])
def test_the_choice_is_near_the_best_of_all_powers_of_two(monkeypatch, curve, best, total):
    seconds = CURVES[curve](min(best, total))
    machine = FakeMachine(seconds)
    tuned = machine.search(monkeypatch, total)
    assert len(machine.compiled) == len(tuned.measurements) <= 6
    powers = [balanced(total, 2**k) for k in range(17) if 2**k < 2 * total]
    assert min(map(seconds, powers)) >= 0.7 * seconds(tuned.batch_size)
    assert all(measured == pytest.approx(seconds(size)) for size, measured in tuned.measurements.items())


@pytest.mark.parametrize("limit", [3, 10, 50, 500, 5000, 60_000])
def test_the_choice_is_near_the_best_within_the_budget(monkeypatch, limit):
    machine = FakeMachine(lambda size: 1e-3 + 1 / size, nbytes=lambda size: 1000 + 64 * size)
    tuned = machine.search(monkeypatch, 65_537, budget=1000 + 64 * limit)
    assert len(machine.compiled) <= 6
    assert max(tuned.measurements) <= limit
    assert tuned.batch_size >= 0.3 * limit


def test_the_smallest_of_sizes_that_are_alike_is_chosen(monkeypatch):
    tuned = FakeMachine(lambda size: 1e-3 if size > 16 else 1.0).search(monkeypatch, 65_536)
    assert tuned.batch_size == min(size for size in tuned.measurements if size > 16)


def balanced(total, limit):
    return math.ceil(total / math.ceil(total / limit))


def test_candidates_are_what_is_timed():
    assert set(tune_batch_size(ranked, abstract(1000, 64), candidates=[10, 500]).measurements) == {10, 500}
    # Chunks are balanced, and more than all elements are all of them.
    assert set(tune_batch_size(ranked, abstract(1000, 64), candidates=(999, 4000)).measurements) == {500, 1000}
    assert tune_batch_size(ranked, abstract(1000, 64), candidates=np.array([7])).batch_size == 7


def test_axes_arguments_and_modules():
    module = eqx.nn.Linear(8, 3, key=jax.random.key(0))  # not hashable
    assert tune_batch_size(module, abstract(100, 8), candidates=[10]).batch_size == 10

    def fn(tree, w):
        return tree["x"] @ w * tree["i"]

    tree = {"x": abstract(8, 60), "i": abstract(60, dtype="int32")}
    tuned = tune_batch_size(fn, tree, np.ones(8, np.float32), in_axes=[{"x": -1, "i": 0}, None], candidates=[6])
    assert tuned.batch_size == 6
    with pytest.raises(ValueError, match="differ in size"):
        tune_batch_size(fn, tree, np.ones(8, np.float32), in_axes=({"x": 0, "i": 0}, None))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64"])
def test_random_data_of_any_dtype_is_timed(dtype):
    seen = []

    def fn(x):
        jax.debug.callback(seen.append, x)
        return x

    tune_batch_size(fn, abstract(6, 500, dtype=dtype), candidates=[6])
    jax.effects_barrier()
    data = np.stack(seen[:6])
    assert data.dtype == dtype
    assert len(np.unique(data)) >= (2 if dtype == "bool" else 8)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_timed(impl):
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0, impl=impl), 40))
    tuned = tune_batch_size(lambda key: jax.random.normal(key, (3,)), keys, candidates=[4, 40])
    assert set(tuned.measurements) == {4, 40}


def test_the_budget_bounds_every_program_that_is_timed(compiles):
    xs = abstract(4000, 64)

    def account(size):
        run = lambda xs: SafeMapIterator(size)(ranked, xs)  # noqa: E731
        found: Any = jax.jit(run).lower(xs).compile().memory_analysis()
        return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes

    limit = 4000 * (64 + 4) * 4 + 400_000  # some 780 elements of 512 bytes
    with compiles() as done:
        tuned = tune_batch_size(ranked, xs, budget=limit)
    assert len(done) <= 6
    assert all(account(size) <= limit for size in tuned.measurements)
    assert account(max(tuned.measurements)) > limit - 200_000
    again = tune_batch_size(ranked, xs, budget=MemoryBudget(limit, lambda decisions: 0))
    assert again == tuned
    with pytest.raises(BudgetInfeasibleError, match="no chunk size fits the budget of 1000 bytes"):
        tune_batch_size(ranked, xs, budget=1000)


def test_what_was_measured_is_not_measured_again(compiles):
    xs = abstract(300, 64)
    first = tune_batch_size(ranked, xs, candidates=[10, 100])
    with compiles() as done:
        assert tune_batch_size(lambda x: ranked(x), np.zeros((300, 64), np.float32), candidates=[10, 100]) is first
    assert done == []
    with compiles() as done:
        for other in (
            lambda: tune_batch_size(lambda x: 2 * ranked(x), xs, candidates=[10, 100]),
            lambda: tune_batch_size(ranked, abstract(301, 64), candidates=[10, 100]),
            lambda: tune_batch_size(ranked, abstract(300, 64, dtype="bfloat16"), candidates=[10, 100]),
            lambda: tune_batch_size(ranked, abstract(64, 300), in_axes=1, candidates=[10, 100]),
            lambda: tune_batch_size(ranked, xs, candidates=[10, 50]),
            lambda: tune_batch_size(ranked, xs, candidates=[10, 100], budget=10**9),
        ):
            other()
    assert len(done) == 12


def test_arrays_that_the_function_holds_do_not_make_it_another():
    def measured(value):
        weights = jnp.full(64, value)
        return tune_batch_size(lambda x: ranked(x * weights), abstract(50, 64), candidates=[5])

    assert measured(1.0) is measured(2.0)


# The cache on disk.


def stored(folder):
    return [path for path in folder.iterdir() if path.suffix == ".json"]


def test_another_process_finds_what_was_measured(tmp_path):
    folder = tmp_path / "not" / "there"
    tuned = tune_batch_size(lambda x: jnp.sort(jnp.sin(x))[:4], abstract(90, 64), candidates=[9, 30], cache=folder)
    (path,) = stored(folder)
    assert [p.name for p in folder.iterdir()] == [path.name]  # nothing partial is left
    document = json.loads(path.read_text())
    assert document["schema_version"] == 1
    assert document["key"]["jax"] == jax.__version__
    assert document["key"]["device"].startswith("cpu")
    code = """
import sys, jax, jax.numpy as jnp
from xtrax.tiling import tune_batch_size

done = []
jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: done.append(event))
fn = lambda x: jnp.sort(jnp.sin(x))[:4]
tuned = tune_batch_size(fn, jax.ShapeDtypeStruct((90, 64), "float32"), candidates=[9, 30], cache=sys.argv[1])
print(sum("backend_compile" in event for event in done), sorted(tuned.measurements.items()))
"""
    command = [sys.executable, "-c", code, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.strip() == f"0 {sorted(tuned.measurements.items())}"


def test_a_faulty_file_is_told_about_and_replaced(tmp_path):
    tune = lambda: tune_batch_size(jnp.sin, abstract(80, 4), candidates=[8], cache=tmp_path)  # noqa: E731
    first = tune()
    (path,) = stored(tmp_path)
    good = json.loads(path.read_text())
    faults = [
        path.read_text()[:37],
        "",
        "[]",
        json.dumps(good | {"schema_version": 2}),
        json.dumps(good | {"key": good["key"] | {"jax": "0.0"}}),
        json.dumps(good | {"batch_size": 9}),
        json.dumps(good | {"batch_size": True}),
        json.dumps(good | {"measurements": [[8, float("nan")]]}),
        json.dumps(good | {"measurements": 3}),
        json.dumps({k: v for k, v in good.items() if k != "measurements"}),
    ]
    for fault in faults:
        path.write_text(fault)
        forget()
        with pytest.warns(RuntimeWarning, match=f"{re.escape(path.name)} is no measurement, and is replaced"):
            again = tune()
        assert set(again.measurements) == set(first.measurements)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forget()
            assert tune() == again
    path.write_bytes(b"\xff\xfe")
    forget()
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        tune()


def test_a_folder_that_cannot_be_is_told_about(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.warns(RuntimeWarning, match="is not kept in .*file, and only in this process"):
        tuned = tune_batch_size(ranked, abstract(80, 64), candidates=[8], cache=file)
    assert tuned.batch_size == 8
    assert file.read_text() == ""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_told_about(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.warns(RuntimeWarning, match="only in this process"):
            tune_batch_size(ranked, abstract(80, 64), candidates=[8], cache=tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_what_this_process_measured_is_kept_when_a_folder_is_given_later(tmp_path, compiles):
    first = tune_batch_size(ranked, abstract(70, 64), candidates=[7])
    with compiles() as done:
        assert tune_batch_size(ranked, abstract(70, 64), candidates=[7], cache=str(tmp_path)) is first
    assert done == []
    assert len(stored(tmp_path)) == 1


# Traces.


def test_inside_a_trace_only_what_has_values_is_tuned():
    xs = np.ones((60, 64), np.float32)

    @jax.jit
    def inside(y):
        tuned = tune_batch_size(ranked, xs, candidates=[6])
        made = tune_batch_size(ranked, abstract(62, 64), candidates=[6])
        return y * tuned.batch_size * made.batch_size

    assert inside(1) == 36
    with pytest.raises(ValueError, match="tune outside"):
        jax.jit(lambda xs: tune_batch_size(ranked, xs, candidates=[6]).batch_size)(xs)
    with pytest.raises(ValueError, match="tune outside"):
        jax.jit(lambda w: tune_batch_size(lambda x: ranked(x * w), xs, candidates=[6]).batch_size)(1.0)


def test_what_the_function_raises_surfaces():
    with pytest.raises(TypeError, match="reshape"):
        tune_batch_size(lambda x: x.reshape(3), abstract(8, 4))


@pytest.mark.parametrize(
    ("args", "options", "error", "message"),
    [
        ((), {}, ValueError, "needs the arguments of fn"),
        ((3.0,), {}, TypeError, r"args\[0\] must hold arrays"),
        (("x",), {}, TypeError, r"args\[0\] must hold arrays"),
        ((abstract(4),), {"in_axes": None}, ValueError, "no array of xs is mapped"),
        ((abstract(4),), {"in_axes": 1}, ValueError, "no axis 1"),
        ((abstract(4),), {"in_axes": True}, TypeError, "must be an int or None"),
        ((abstract(4),), {"budget": 0}, ValueError, "budget must be at least 1"),
        ((abstract(4),), {"budget": True}, TypeError, "budget must be an integer"),
        ((abstract(4),), {"budget": "1GB"}, TypeError, "budget must be an integer"),
        ((abstract(4),), {"candidates": []}, ValueError, "candidates is empty"),
        ((abstract(4),), {"candidates": [2, 2]}, ValueError, "candidates must differ"),
        ((abstract(4),), {"candidates": [0]}, ValueError, r"candidates\[0\] must be at least 1"),
        ((abstract(4),), {"candidates": [True]}, TypeError, r"candidates\[0\] must be an integer"),
        ((abstract(4),), {"candidates": 8}, TypeError, "candidates must be a sequence"),
        ((abstract(4),), {"candidates": "8"}, TypeError, "candidates must be a sequence"),
        ((abstract(4),), {"cache": 3}, TypeError, "cache must be the path of a folder"),
        ((abstract(4),), {"cache": ""}, TypeError, "cache must be the path of a folder"),
    ],
)
def test_bad_arguments_are_refused(args, options, error, message, compiles):
    with compiles() as done, pytest.raises(error, match=message):
        tune_batch_size(jnp.sin, *args, **options)
    assert done == []


def test_what_is_not_callable_is_refused():
    wrong: Any = 3
    with pytest.raises(TypeError, match="fn must be callable"):
        tune_batch_size(wrong, abstract(4))
