"""Budgets from the compiler: what a plan takes is what XLA assigns to the program that runs it."""

import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.tiling import (
    AxisSpec,
    BatchPlanner,
    BudgetInfeasibleError,
    CarrySpec,
    DedupSpec,
    MemoryBudget,
    RemainderWarning,
    SafeMap,
    SafeMapIterator,
    Vmap,
    device_memory_budget,
    lowered_memory_estimate,
    tiled_apply,
)
from xtrax.tiling.execute import execute_plan

pytestmark = pytest.mark.filterwarnings("ignore::xtrax.tiling.RemainderWarning")


def abstract(*shape, dtype="float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def account(fn, *args):
    """Arguments, outputs and temporaries of a function whose arrays are all arguments."""
    found: Any = jax.jit(fn).lower(*args).compile().memory_analysis()
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


def rnn(x):
    """`(16, 32)` to `(32,)`."""
    return jax.lax.scan(lambda c, t: (jnp.tanh(jnp.roll(c, 1) * c + t), None), jnp.zeros(32), x)[0]


def ranked(x):
    """`(256,)` to `(16,)`."""
    return jnp.tanh(jnp.sort(x)[::-1].cumsum())[:16]


def planned(budget, specs, **planner) -> Any:
    return BatchPlanner(budget=budget, **planner).plan(specs)


def nbytes(*trees):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))


@pytest.mark.parametrize(
    ("fn", "shape", "share"),
    [
        (ranked, (256,), 0.02),
        (lambda x: jnp.abs(jnp.fft.fft(x))[:16], (256,), 0.3),
        (rnn, (16, 32), 0.1),
        (jax.grad(lambda x: jnp.sum(jnp.sort(jnp.sin(x) * x) ** 2)), (128,), 0.3),
    ],
    ids=["sort", "fft", "rnn", "grad"],
)
def test_the_largest_chunk_that_fits_by_the_compilers_account(fn, shape, share, compiles):
    n = 20_011  # a prime
    xs = abstract(n, *shape)
    spec = AxisSpec("batch", n, 8)
    whole = account(jax.vmap(fn), xs)
    rest = nbytes(xs, jax.eval_shape(jax.vmap(fn), xs))
    limit = int(rest + share * (whole - rest))
    with compiles() as done:
        plan = planned(MemoryBudget.for_function(fn, xs, bytes=limit), [spec])
    (decision,) = plan.decisions
    assert plan.memory.compiles == len(done) <= 4
    assert plan.memory.estimate == account(lambda xs: execute_plan(fn, plan, xs), xs) <= limit
    assert plan.memory.estimate - rest >= 0.8 * (limit - rest)
    assert f"instead of {whole} bytes" in decision.reasoning
    # One chunk fewer, so chunks of the next size, do not fit.
    count = -(-n // decision.batch_size)
    larger = SafeMapIterator(-(-n // (count - 1)))
    assert account(lambda xs: larger(fn, xs), xs) > limit
    # The line holds elsewhere too: facts of the compiler, not of the code.
    memory = plan.memory
    line = memory.fixed_bytes + 64 * memory.slope_by_axis["batch"]
    assert account(lambda xs: SafeMapIterator(64)(fn, xs), xs) == pytest.approx(line, rel=0.01)


def test_what_fits_is_compiled_once_and_what_was_compiled_is_kept(compiles):
    xs = abstract(1000, 256)
    fn = ranked
    budget = MemoryBudget.for_function(fn, xs, bytes=account(jax.vmap(fn), xs))
    with compiles() as done:
        plan = planned(budget, [AxisSpec("batch", 1000, 8)])
    assert plan.decisions[0].strategy == Vmap()
    assert plan.memory.compiles == len(done) == 1
    tight = MemoryBudget(budget.bytes - 1, budget.estimate, solve=True)
    with compiles() as done:
        plan = planned(tight, [AxisSpec("batch", 1000, 8)])
    assert isinstance(plan.decisions[0].strategy, SafeMap)
    assert plan.memory.compiles == len(done) == 3
    with compiles() as done:
        again = planned(tight, [AxisSpec("batch", 1000, 8)])
    assert again.decisions == plan.decisions
    assert again.memory.compiles == len(done) == 0


def test_no_chunk_is_smaller_than_one_and_the_plan_that_cannot_be_is_shown():
    xs = abstract(3000, 256)
    fn = ranked
    rest = 3000 * (256 + 16) * 4
    small = MemoryBudget.for_function(fn, xs, bytes=rest + 3 * 1024 + 100)
    plan = planned(small, [AxisSpec("batch", 3000, 8)])
    assert plan.decisions[0].batch_size < 16
    assert plan.memory.estimate == account(lambda xs: execute_plan(fn, plan, xs), xs) <= small.bytes
    with pytest.raises(BudgetInfeasibleError, match="whatever the chunks") as caught:
        BatchPlanner(budget=MemoryBudget(rest - 1, small.estimate, solve=True)).plan([AxisSpec("batch", 3000, 8)])
    memory = caught.value.plan.memory
    assert not memory.fits
    assert memory.fixed_bytes >= rest
    assert "instead of" in caught.value.plan.decisions[0].reasoning


def test_chunks_are_multiples_of_the_granularity():
    xs = abstract(10_000, 256)
    fn = ranked
    limit = 10_000 * (256 + 16) * 4 + 10**6
    budget = MemoryBudget.for_function(fn, xs, bytes=limit)
    plan = planned(budget, [AxisSpec("batch", 10_000, 8, tile_granularity=128)])
    assert plan.decisions[0].batch_size % 128 == 0
    assert plan.memory.estimate == account(lambda xs: execute_plan(fn, plan, xs), xs) <= limit


def test_arrays_that_the_function_holds_are_counted_and_not_compiled_in():
    weights = np.ones((300, 300), np.float32)
    module = eqx.nn.Linear(300, 300, use_bias=False, key=jax.random.key(0))  # not hashable
    for fn in (lambda x: jnp.tanh(jnp.asarray(weights) @ x), module):
        budget = MemoryBudget.for_function(fn, abstract(50, 300), bytes=10**9)
        plan = planned(budget, [AxisSpec("batch", 50, 8)])
        assert plan.memory.estimate >= weights.nbytes + 2 * 50 * 300 * 4
        with pytest.raises(BudgetInfeasibleError):
            BatchPlanner(budget=MemoryBudget(weights.nbytes, budget.estimate, solve=True)).plan(
                [AxisSpec("batch", 50, 8)]
            )


def pairwise(x, y, scale):
    return jnp.sort(jnp.sin(x * y) * scale)[:4]


def test_a_nest_is_solved_and_confirmed_as_a_whole():
    xs, ys = abstract(300, 64), abstract(200, 64)
    axes = [("a",), ("b",), None]
    specs = [AxisSpec("a", 300, 8), AxisSpec("b", 200, 8)]
    rest = (300 * 64 + 200 * 64 + 300 * 200 * 4 + 64) * 4

    def within(limit):
        budget = MemoryBudget.for_function(pairwise, xs, ys, abstract(64), axes=axes, bytes=limit)
        plan = planned(budget, specs)
        run = lambda *args: execute_plan(pairwise, plan, *args, axes=axes)  # noqa: E731
        assert plan.memory.estimate == account(run, xs, ys, abstract(64)) <= limit
        return plan

    one = within(rest + 2_000_000)
    assert [type(d.strategy) for d in one.decisions] == [SafeMap, Vmap]
    assert one.memory.compiles <= 4
    both = within(rest + 30_000)
    assert [type(d.strategy) for d in both.decisions] == [SafeMap, SafeMap]
    assert set(both.memory.slope_by_axis) == {"a", "b"}


def test_carries_and_duplicates_are_part_of_the_program():
    carry = CarrySpec("time", jnp.float32(0), lambda total, y: (total + jnp.sum(y), total * y))
    dedup = DedupSpec("copies", np.arange(40), np.arange(600) % 40, k=40)
    xs, ys = abstract(2000, 7, 64), abstract(600, 64)
    axes = [("batch", "time"), ("copies",)]
    specs = [AxisSpec("batch", 2000, 8), AxisSpec("time", 7, 8), AxisSpec("copies", 600, 8)]

    def fn(x, y):
        return jnp.sort(jnp.sin(x) * y)[0]

    # The outputs of 2000 x 7 x 600 float32, and 4 MB for what is between.
    limit = nbytes(xs, ys) + 2000 * 7 * 600 * 4 + 4_000_000
    budget = MemoryBudget.for_function(fn, xs, ys, axes=axes, bytes=limit)
    plan = planned(budget, specs, carry_specs=[carry], dedup_specs=[dedup])
    assert [type(d.strategy).__name__ for d in plan.decisions] == ["SafeMap", "Scan", "DedupGather"]
    # The indices of the duplicates are arguments of the program as well.
    estimate = lowered_memory_estimate(lambda *args: execute_plan(fn, plan, *args, axes=axes), xs, ys)
    assert plan.memory.estimate == estimate <= limit


def test_a_function_of_a_batch_is_chunked_as_it_is():
    weights = jnp.ones((64, 256))

    def batched(xs, scale):
        return jnp.sort(jnp.tanh(xs @ weights) * scale)[:, :8]

    xs, n = abstract(30_000, 64), 30_000
    rest = (n * 64 + n * 8 + 64 * 256 + 256) * 4
    limit = rest + 4_000_000
    budget = MemoryBudget.for_function(batched, xs, abstract(256), axes=[("batch",), None], bytes=limit, batched=True)
    plan = planned(budget, [AxisSpec("batch", n, 8)])
    assert isinstance(plan.decisions[0].strategy, SafeMap)
    assert rest + 0.8 * 4_000_000 <= plan.memory.estimate <= limit
    applied = tiled_apply(batched, in_axes=(0, None), batch_size=plan.decisions[0].batch_size, check="off")
    assert plan.memory.estimate == lowered_memory_estimate(applied, xs, abstract(256))
    # The same function of one element takes about the same.
    run = SafeMapIterator(plan.decisions[0].batch_size)
    element = account(
        lambda xs, w, s: run(lambda x: jnp.sort(jnp.tanh(x @ w) * s)[:8], xs), xs, abstract(64, 256), abstract(256)
    )
    assert plan.memory.estimate == pytest.approx(element, rel=0.02)
    with pytest.raises(ValueError, match="a function of a batch is run along one axis"):
        planned(budget, [AxisSpec("batch", n, 8), AxisSpec("other", 4, 8)])


def test_the_device_is_the_default_budget():
    budget = MemoryBudget.for_function(jnp.sin, abstract(4))
    assert budget.solve is True
    assert 0 < budget.bytes <= device_memory_budget(1.0) * 1.1


def test_what_the_function_raises_surfaces():
    budget = MemoryBudget.for_function(lambda x: x.reshape(3), abstract(10, 4), bytes=10**6)
    with pytest.raises(TypeError, match="reshape"):
        planned(budget, [AxisSpec("batch", 10, 4)])


def test_arguments_of_another_size_than_the_axis_are_refused():
    for batched in (False, True):
        budget = MemoryBudget.for_function(jnp.sin, abstract(10, 4), bytes=10**6, batched=batched)
        with pytest.raises(ValueError, match=r"args\[0\] has 10 elements along axis 'batch'.*made for 12"):
            planned(budget, [AxisSpec("batch", 12, 4)])


def test_buckets_are_refused():
    budget = MemoryBudget.for_function(jnp.sin, abstract(10, 4), bytes=10**6)
    with pytest.raises(ValueError, match="axis 'ragged' is a Bucket"):
        planned(budget, [AxisSpec("ragged", 10, 4, bucket_boundaries=(4,))])


@pytest.mark.parametrize(
    ("fn", "args", "options", "error", "message"),
    [
        (3, (abstract(2),), {}, TypeError, "fn must be callable"),
        (jnp.sin, (), {}, ValueError, "needs the arguments of fn"),
        (jnp.sin, (3.0,), {}, TypeError, r"abstract_args\[0\] must hold arrays"),
        (jnp.sin, (abstract(2),), {"bytes": "2GB"}, ValueError, 'bytes must be a number or "device"'),
        (jnp.sin, (abstract(2),), {"bytes": 2e9}, TypeError, "bytes must be an integer"),
        (jnp.sin, (abstract(2),), {"bytes": True}, TypeError, "bytes must be an integer"),
        (jnp.sin, (abstract(2),), {"bytes": 0}, ValueError, "bytes must be at least 1"),
        (jnp.sin, (abstract(2),), {"batched": 1}, TypeError, "batched must be True or False"),
        (jnp.sin, (abstract(2),), {"axes": "r"}, TypeError, "axes must be a sequence with an entry .* is 'r'"),
        (jnp.sin, (abstract(2),), {"axes": ["r"]}, TypeError, r"axes\[0\] must be a tuple .*write \('r',\)"),
        (jnp.sin, (abstract(2),), {"axes": [("r",), None]}, ValueError, "axes has 2 entries, and there are 1"),
        (jnp.sin, (abstract(2, 2),), {"axes": [("r", "r")]}, ValueError, r"axes\[0\] names axis 'r' twice"),
        (jnp.sin, (abstract(2),), {"axes": [(0,)]}, TypeError, r"axes\[0\]\[0\] must be a string"),
    ],
)
def test_bad_budgets_for_functions_are_refused(fn, args, options, error, message):
    with pytest.raises(error, match=message):
        MemoryBudget.for_function(fn, *args, **options)


def test_no_warning_but_that_of_the_remainder():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        xs = abstract(1009, 256)
        BatchPlanner(budget=MemoryBudget.for_function(ranked, xs, bytes=1_500_000)).plan([AxisSpec("a", 1009, 8)])
    assert {w.category for w in caught} == {RemainderWarning}
