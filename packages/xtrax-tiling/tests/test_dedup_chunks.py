"""Distinct elements computed in chunks: planned, budgeted, run, against `jax.vmap` of the whole and Python loops."""

import itertools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback

from xtrax.tiling import (
    AxisDecision,
    AxisSpec,
    BatchPlan,
    BatchPlanner,
    BudgetInfeasibleError,
    CarrySpec,
    DedupGather,
    DedupSpec,
    MemoryBudget,
    RemainderWarning,
    SafeMap,
    Scan,
    Vmap,
    axis_dispatch,
    find_duplicates,
    lowered_memory_estimate,
    reducers,
)
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling.errors import DispatchRejected
from xtrax.tiling.execute import _run_plan, execute_plan

pytestmark = pytest.mark.filterwarnings("ignore::xtrax.tiling.RemainderWarning")

N, K = 12, 5  # k_bucket is 8, which chunks of 3 do not divide
INDEX_MAP = np.array([0, 1, 2, 0, 3, 3, 4, 1, 0, 4, 2, 2])
FIRST = np.array([0, 1, 2, 4, 6])


def spec_of(name="a", **functions) -> DedupSpec:
    return DedupSpec(name, FIRST, INDEX_MAP, K, **functions)


def decision(name, size, strategy, batch_size=1) -> AxisDecision:
    return AxisDecision(AxisSpec(name, size, max(size, 1)), batch_size, "by hand", strategy)


def repeated(*shape, dtype: Any = np.int32) -> np.ndarray:
    """`(N, ...)` with the duplicates of `INDEX_MAP`."""
    return np.random.default_rng(0).integers(0, 100, (K, *shape)).astype(dtype)[INDEX_MAP]


def lanes_of(seen: list[int]) -> Any:
    """The square, which notes how many elements it is computed for at once."""

    @jax.custom_batching.custom_vmap
    def square(x):
        return x * x

    @square.def_vmap
    def _(axis_size, in_batched, x):
        seen.append(axis_size)
        return x * x, in_batched[0]

    return square


# The strategy


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (0, ValueError, "batch_size must be at least 1"),
        (-3, ValueError, "batch_size must be at least 1"),
        (True, TypeError, "batch_size must be an integer"),
        (2.0, TypeError, "batch_size must be an integer"),
        ("2", TypeError, "batch_size must be an integer"),
    ],
)
def test_bad_batch_sizes_are_refused(batch_size, error, message):
    with pytest.raises(error, match=message):
        spec_of().to_dedup_gather(batch_size)


def test_the_batch_size_is_part_of_what_a_strategy_is():
    whole, three = spec_of().to_dedup_gather(), spec_of().to_dedup_gather(3)
    assert whole.batch_size is None
    assert three == spec_of().to_dedup_gather(batch_size=np.int64(3))  # ty: ignore[invalid-argument-type]
    assert hash(three) == hash(spec_of().to_dedup_gather(3))
    assert len({whole, three, spec_of().to_dedup_gather(4)}) == 3
    assert [s.at_once for s in (whole, three, spec_of().to_dedup_gather(100))] == [8, 3, 8]


def test_a_printed_plan_says_how_many_are_computed_at_once():
    printed = [str(BatchPlan((decision("a", N, spec_of().to_dedup_gather(b)),))) for b in (None, 8, 3)]
    assert "DedupGather(5 of 12) " in printed[0]
    assert "DedupGather(5 of 12) " in printed[1]
    assert "DedupGather(5 of 12, 3 at once) " in printed[2]


# Running


@pytest.mark.parametrize("batch", [1, 3, 4, 7, 8, 100])
def test_no_more_are_computed_at_once(batch):
    x = repeated()
    size = math.ceil(8 / math.ceil(8 / batch))  # balanced
    for run in (
        lambda fn, s: execute_plan(fn, BatchPlan((decision("a", N, s),)), x),
        lambda fn, s: axis_dispatch(s, fn, x),
    ):
        seen: list[int] = []
        np.testing.assert_array_equal(run(lanes_of(seen), spec_of().to_dedup_gather(batch)), x * x)
        assert set(seen) == {size}


@given(index=st.lists(st.integers(0, 7), min_size=16, max_size=16), batch=st.sampled_from([1, 2, 3, 5]))
@settings(max_examples=8, deadline=None)
def test_any_duplicates_in_any_chunks_give_what_vmap_gives(index, batch):
    rows = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)[index]
    strategy = find_duplicates(rows).to_dedup_gather(batch)
    fn = lambda x: {"twice": 2 * x, "most": x.max()}  # noqa: E731
    expected = jax.vmap(fn)(rows)
    for got in (axis_dispatch(strategy, fn, rows), execute_plan(fn, BatchPlan((decision("a", 16, strategy),)), rows)):
        jax.tree.map(np.testing.assert_array_equal, got, expected)


KINDS = ("vmap", "safemap", "scan", "chunks")
SIZES = {"vmap": 2, "safemap": 5, "scan": 3, "chunks": N}
NESTS = [
    nest
    for nest in (*itertools.product(KINDS, repeat=2), *itertools.permutations(KINDS, 3), ("chunks",) * 3)
    if "chunks" in nest
]


def transition(carry: Any, y: Any) -> Any:
    """Of integers, so that the order of the steps shows; `y` may have axes inside."""
    return (3 * carry + y.sum()) % 1009, y + carry


def strategy_of(kind: str) -> Any:
    made = {"vmap": Vmap(), "safemap": SafeMap(2), "chunks": spec_of().to_dedup_gather(3)}
    return made.get(kind) or Scan(transition, jnp.int32(1))


def nested(kinds: Any, x: np.ndarray) -> Any:
    """The values and carries of a plain Python nest over all elements, copies included."""
    if not kinds:
        return 3 * x + 1, {}
    outputs, inner, carry = [], [], np.int32(1)
    for element in x:
        y, carries = nested(kinds[1:], element)
        if kinds[0] == "scan":
            carry, y = transition(carry, y)
        outputs.append(y)
        inner.append(carries)
    carries: dict[str, Any] = {name: np.stack([c[name] for c in inner]) for name in inner[0]}
    return np.stack(outputs), carries | ({f"axis{len(kinds)}": carry} if kinds[0] == "scan" else {})


@pytest.mark.parametrize("kinds", NESTS, ids="-".join)
def test_nests_are_those_of_python_loops(kinds):
    names = [f"axis{len(kinds) - i}" for i in range(len(kinds))]
    x = np.random.default_rng(0).integers(0, 100, [SIZES[kind] for kind in kinds]).astype(np.int32)
    for i, kind in enumerate(kinds):
        x = x.take(FIRST[INDEX_MAP], axis=i) if kind == "chunks" else x
    plan = BatchPlan(
        tuple(decision(name, SIZES[kind], strategy_of(kind)) for name, kind in zip(names, kinds, strict=True))
    )
    result = execute_plan(lambda x: 3 * x + 1, plan, x, axes=[names])
    outputs, carries = result if "scan" in kinds else (result, {})
    expected, expected_carries = nested(kinds, x)
    np.testing.assert_array_equal(outputs, expected)
    assert set(carries) == set(expected_carries)
    jax.tree.map(np.testing.assert_array_equal, dict(carries), expected_carries)


def test_arguments_that_share_the_axis_and_those_that_do_not():
    x, y, z = repeated(2, dtype=np.float32), repeated(dtype=np.float32), np.arange(4, dtype=np.float32)
    plan = BatchPlan((decision("b", 4, SafeMap(3)), decision("a", N, spec_of().to_dedup_gather(3))))
    got = execute_plan(lambda x, y, z: x * y + z, plan, x, y, z, axes=[("a",), ("a",), ("b",)])
    np.testing.assert_array_equal(got, x * y[:, None] + z[:, None, None])


def test_derivatives_are_those_of_the_whole():
    x, w = repeated(3, dtype=np.float32) / 100, jnp.float32(0.7)
    plan = BatchPlan((decision("a", N, spec_of().to_dedup_gather(3)),))
    fn = lambda w, x: jnp.sin(w * x).sum()  # noqa: E731

    def chunked(w, x):
        return (execute_plan(lambda x: fn(w, x), plan, x) ** 2).sum()

    def whole(w, x):
        # A copy is the element that it copies, so derivatives go to the latter.
        return (jax.vmap(lambda x: fn(w, x))(x[FIRST[INDEX_MAP]]) ** 2).sum()

    for argument in (0, 1):
        got, expected = (jax.grad(f, argument)(w, x) for f in (chunked, whole))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jvp(chunked, (w, x), (w, x))[1], jax.jvp(whole, (w, x), (w, x))[1], rtol=1e-5)
    np.testing.assert_allclose(
        jax.vmap(chunked, (0, None))(jnp.array([0.1, 0.2]), x), [whole(0.1, x), whole(0.2, x)], rtol=1e-5
    )


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_a_mesh_gives_the_same(batch):
    mesh = jax.make_mesh((4, 2), ("d", "e"))
    x = repeated(2)
    plan = BatchPlan((decision("a", N, spec_of().to_dedup_gather(batch)), decision("b", 2, Vmap())))
    seen: list[int] = []
    square = lanes_of(seen)
    index_map = np.arange(40) % 20  # 20 distinct, k_bucket 32, 4 for each device
    strategy = DedupSpec("a", np.arange(20), index_map, 20).to_dedup_gather(batch)
    got = execute_plan(square, BatchPlan((decision("a", 40, strategy),)), index_map, mesh=mesh)
    np.testing.assert_array_equal(got, index_map**2)
    assert set(seen) == {{None: 4, 1: 1, 3: 2}[batch]}
    np.testing.assert_array_equal(execute_plan(lambda x: 3 * x, plan, x, axes=[("a", "b")], mesh=mesh), 3 * x)


# Hooks


def run(fn, plan, *args, axes=None, mesh=None, **hooks) -> Any:
    return _run_plan(fn, plan, args, axes, mesh, None, hooks)


def recorded(events: list[Any]) -> AxisHook:
    def emit(values: Any, index: Any, mask: Any) -> Any:
        assert mask is None

        def host(values: Any, index: Any) -> Any:
            events.extend(zip(np.array(index).tolist(), np.array(values).tolist(), strict=True))
            return np.int32(0)

        return values, io_callback(host, jax.ShapeDtypeStruct((), jnp.int32), values, index, ordered=True)

    return AxisHook(emit=emit)


def select(xs: Any, unique: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x)[unique], xs)


@pytest.mark.parametrize("functions", [{}, {"dedup_fn": select, "gather_fn": select}], ids=["default", "own"])
@pytest.mark.parametrize("batch", [None, 3])
def test_effects_at_its_edge_fire_for_all_original_elements_in_order(functions, batch):
    x, events = repeated(), []
    strategy = spec_of(**functions).to_dedup_gather(batch)
    got = run(lambda x: 2 * x, BatchPlan((decision("a", N, strategy),)), x, a=recorded(events))
    jax.effects_barrier()
    np.testing.assert_array_equal(got, 2 * x)
    assert events == [([i], 2 * x[i]) for i in range(N)]


@pytest.mark.parametrize("outer", [Vmap(), SafeMap(2), "scan"])
def test_effects_at_its_edge_inside_another_axis(outer):
    x, events = repeated(), []
    scan = outer == "scan"
    outer = Scan(lambda carry, y: (carry, y), jnp.int32(0)) if scan else outer
    plan = BatchPlan((decision("o", 3, outer), decision("a", N, spec_of().to_dedup_gather(3))))
    z = np.arange(3, dtype=np.int32)
    got = run(lambda x, z: x + 100 * z, plan, x, z, axes=[("a",), ("o",)], a=recorded(events))
    jax.effects_barrier()
    expected = x + 100 * z[:, None]
    np.testing.assert_array_equal(got[0] if scan else got, expected)
    # Lanes and chunks of the outer axis are walked row by row, so all orders are that of a Python nest.
    assert events == [([o, i], expected[o, i]) for o in range(3) for i in range(N)]


@pytest.mark.parametrize("devices", [None, 8])
def test_reducers_see_every_original_element(devices):
    x = repeated(4).astype(np.float32)
    mesh = None if devices is None else jax.make_mesh((devices,), ("d",))
    plan = BatchPlan((decision("a", N, spec_of().to_dedup_gather(3)), decision("b", 4, SafeMap(3))))
    hooks = {"a": AxisHook(fuse=reducers.sum), "b": AxisHook(fuse=reducers.max)}
    got = run(lambda x: x, plan, x, axes=[("a", "b")], mesh=mesh, **hooks)
    np.testing.assert_allclose(got, x.max(axis=1).sum(), rtol=1e-6)


def test_effects_inside_of_chunks_are_refused():
    x, events = repeated(2), []
    whole, chunks = (
        BatchPlan((decision("a", N, spec_of().to_dedup_gather(b)), decision("b", 2, Vmap()))) for b in (None, 3)
    )
    run(lambda x: x, whole, x, axes=[("a", "b")], b=recorded(events))
    jax.effects_barrier()
    assert len(events) == 2 * N
    with pytest.raises(
        DispatchRejected, match=r"'a' computes its 8 distinct elements in chunks of 3, .*default_batch_size=8"
    ):
        run(lambda x: x, chunks, x, axes=[("a", "b")], b=recorded(events))
    with pytest.raises(DispatchRejected, match="has side effects, and on the DedupGather axis 'a'"):
        execute_plan(lambda x: jax.debug.callback(events.append, x), chunks, x, axes=[("a", "b")])
    assert len(events) == 2 * N


# Planning


def planned(budget, specs, data=None, **planner) -> Any:
    """The plan, also where it does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemainderWarning)
        try:
            return BatchPlanner(budget=budget, **planner).plan(specs, data=data)
        except BudgetInfeasibleError as error:
            return error.plan


def at_once(decision: AxisDecision) -> int:
    """How many elements the decision leads to, by hand."""
    strategy = decision.strategy
    if isinstance(strategy, Vmap):
        return decision.spec.cardinality
    if isinstance(strategy, SafeMap):
        total, limit = decision.spec.cardinality, strategy.batch_size
    else:
        assert isinstance(strategy, DedupGather)
        total, limit = strategy.k_bucket, strategy.batch_size or strategy.k_bucket
        assert decision.batch_size == limit
    return math.ceil(total / math.ceil(total / limit))


@given(
    k=st.integers(2, 700),
    step=st.sampled_from([1, 1, 3, 8, 128]),
    fixed=st.integers(0, 5000),
    slope=st.integers(1, 50),
    share=st.floats(0.001, 1.1),
    given_spec=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_solved_budget_gives_the_largest_chunk_of_distinct_elements_that_fits(
    k, step, fixed, slope, share, given_spec
):
    xs = np.arange(4000) % k
    dedup = find_duplicates(xs)
    k_bucket = dedup.to_dedup_gather().k_bucket
    budget = MemoryBudget(
        max(1, int(share * (fixed + slope * k_bucket))), lambda d: fixed + slope * at_once(d[0]), solve=True
    )
    axis = AxisSpec("batch", 4000, 7, step, dedup_eligible=True)
    known: Any = {"dedup_specs": [dedup]} if given_spec else {"data": {"batch": xs}}
    made = planned(budget, [axis], **known)
    (found,) = made.decisions
    limits = range(step, k_bucket, step)
    fitting = [
        limit for limit in limits if fixed + slope * math.ceil(k_bucket / math.ceil(k_bucket / limit)) <= budget.bytes
    ]
    if fixed + slope * k_bucket <= budget.bytes:
        assert found.strategy == dedup.to_dedup_gather()
        assert f"all {k_bucket} at once: the plan needs" in found.reasoning
    elif fitting:
        assert made.memory.fits
        assert isinstance(found.strategy, DedupGather)
        assert found.strategy == dedup.to_dedup_gather(found.batch_size)
        assert found.batch_size % step == 0
        assert at_once(found) == max(math.ceil(k_bucket / math.ceil(k_bucket / limit)) for limit in fitting)
        assert f"{k} of " in found.reasoning
        assert "; the largest chunk that fits the budget of" in found.reasoning
        assert made.memory.slope_by_axis == {"batch": slope}
    else:
        assert isinstance(found.strategy, DedupGather) == (given_spec or made.memory.fits)
    if found.batch_size < k_bucket or made.memory.fits:
        assert made.memory.estimate == fixed + slope * at_once(found)


def test_axes_are_demoted_in_the_order_of_their_specs():
    xs = np.arange(3000) % 100  # k_bucket 128

    def estimate(decisions):
        return sum(at_once(d) for d in decisions)

    axes = [AxisSpec("first", 1000, 10), AxisSpec("copies", 3000, 20, dedup_eligible=True), AxisSpec("last", 500, 50)]
    data = {"copies": xs}

    def sizes(limit, order):
        made = planned(MemoryBudget(limit, estimate), [axes[i] for i in order], data)
        return [d.batch_size for d in made.decisions]

    assert sizes(1628, (0, 1, 2)) == [1000, 128, 500]
    assert sizes(1627, (0, 1, 2)) == [10, 128, 500]
    assert sizes(637, (0, 1, 2)) == [10, 20, 500]  # 10 + 7 chunks of 19 + 500
    assert sizes(528, (0, 1, 2)) == [10, 20, 50]
    assert sizes(1627, (1, 0, 2)) == [20, 1000, 500]


@pytest.mark.parametrize("size", [16, 20])
def test_a_given_dedup_spec_stays_under_an_estimate_that_is_not_solved(size):
    dedup = find_duplicates(np.arange(3000) % 10, "a")
    made = planned(MemoryBudget(10, lambda d: at_once(d[0])), [AxisSpec("a", 3000, size)], dedup_specs=[dedup])
    assert not made.memory.fits
    assert made.decisions[0].strategy == dedup.to_dedup_gather()
    assert made.decisions[0].reasoning == "named by a DedupSpec: 10 of 3000 elements are distinct, 16 are computed"


def test_duplicates_whose_gathering_does_not_fit_are_left():
    xs = np.arange(3000) % 100

    def estimate(decisions):
        gathering = 10_000 * isinstance(decisions[0].strategy, DedupGather)
        return at_once(decisions[0]) + gathering

    axis = AxisSpec("a", 3000, 20, dedup_eligible=True)
    made = planned(MemoryBudget(500, estimate, solve=True), [axis], {"a": xs})
    assert made.memory.fits
    assert made.decisions[0].strategy == SafeMap(500)
    assert (
        "; dedup_eligible, but no chunks of its 128 elements to compute fit the budget" in made.decisions[0].reasoning
    )
    made = planned(MemoryBudget(500, estimate, solve=True), [axis], dedup_specs=[find_duplicates(xs, "a")])
    assert not made.memory.fits
    assert isinstance(made.decisions[0].strategy, DedupGather)


def test_plans_with_chunks_come_back_from_json():
    xs = np.arange(3000) % 100
    dedup = find_duplicates(xs, "a")
    axis = AxisSpec("a", 3000, 20, dedup_eligible=True)
    solved = MemoryBudget(60, lambda d: at_once(d[0]), solve=True)
    for made in (BatchPlanner().plan([axis], data={"a": xs}), planned(solved, [axis], {"a": xs})):
        assert made.decisions[0].batch_size in (20, 43)
        again = BatchPlan.from_json(made.to_json(), dedup_specs=[dedup])
        assert again == made
        assert hash(again) == hash(made)
        assert str(again) == str(made)


# The compiler's account


def pairs(x):
    """`(64,)` to `()`, with temporaries of 64 times that."""
    return jnp.abs(jnp.fft.fft(jnp.outer(x, x).ravel()))[::7].max()


def with_copies(size, k) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.normal(size=(k, 64)).astype(np.float32)[np.concatenate([np.arange(k), rng.integers(0, k, size - k)])]


def test_a_compiled_budget_gets_the_largest_chunk_of_distinct_elements_that_fits():
    xs = with_copies(6_000, 900)  # k_bucket is 960
    abstract = jax.ShapeDtypeStruct(xs.shape, xs.dtype)
    limit = 7_000_000 + xs.nbytes
    axis = AxisSpec("a", len(xs), 8, dedup_eligible=True)
    made = planned(MemoryBudget.for_function(pairs, abstract, bytes=limit), [axis], {"a": xs})
    (found,) = made.decisions
    dedup = find_duplicates(xs, "a")
    assert found.strategy == dedup.to_dedup_gather(found.batch_size)
    assert 8 < found.batch_size < 960
    assert made.memory.compiles <= 4

    def estimate(batch):
        plan = BatchPlan((decision("a", len(xs), dedup.to_dedup_gather(batch)),))
        return lowered_memory_estimate(lambda xs: execute_plan(pairs, plan, xs), abstract)

    assert made.memory.estimate == estimate(found.batch_size) <= limit
    count = math.ceil(960 / found.batch_size)
    assert estimate(math.ceil(960 / (count - 1))) > limit
    assert estimate(None) > limit
    np.testing.assert_allclose(execute_plan(pairs, made, xs), jax.jit(jax.vmap(pairs))(xs), rtol=1e-6)


def decay(carry: Any, y: Any) -> Any:
    return carry / 2 + y, carry / 2 + y


@pytest.mark.parametrize("order", [("m", "a"), ("a", "m"), ("t", "a"), ("a", "t")], ids="-".join)
def test_a_nest_never_exceeds_its_budget_by_the_compilers_account(order):
    xs, zs = with_copies(1000, 150), np.linspace(1, 2, 5, dtype=np.float32)
    other = next(name for name in order if name != "a")
    axes = {"a": AxisSpec("a", 1000, 8, dedup_eligible=True), other: AxisSpec(other, 5, 5)}
    carries = [CarrySpec("t", jnp.zeros((1000,) if order[0] == "t" else ()), decay)] if "t" in order else []

    def fn(x, z):
        return pairs(x * z)

    args, names = (xs, zs), [("a",), (other,)]
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    limit = 3_500_000 + xs.nbytes
    budget = MemoryBudget.for_function(fn, *abstract, axes=names, bytes=limit)
    made = planned(budget, [axes[name] for name in order], {"a": xs}, carry_specs=carries)
    (found,) = (d for d in made.decisions if d.spec.name == "a")
    assert isinstance(found.strategy, DedupGather)
    assert found.batch_size < found.strategy.k_bucket
    run = lambda *args: execute_plan(fn, made, *args, axes=names)  # noqa: E731
    assert made.memory.estimate == lowered_memory_estimate(run, *abstract) <= limit
    got = run(*args)
    whole = jax.jit(jax.vmap(jax.vmap(fn, (None, 0)), (0, None)))(xs, zs)  # (a, other)
    if other == "m":
        np.testing.assert_allclose(got if order[0] == "a" else got.T, whole, rtol=1e-6)
    elif order[0] == "t":  # a step is all elements of "a", and so is its carry
        steps = jax.lax.scan(decay, jnp.zeros(1000), whole.T)[1]
        np.testing.assert_allclose(got[0], steps, rtol=1e-6)
    else:
        last, steps = jax.vmap(lambda ys: jax.lax.scan(decay, jnp.float32(0), ys))(whole)
        np.testing.assert_allclose(got[0], steps, rtol=1e-6)
        np.testing.assert_allclose(got[1]["t"], last, rtol=1e-6)
