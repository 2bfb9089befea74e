"""Nests of axes with host effects at their edges, against Python loops: the values, and the sequence of effects.

The reference is written as the contract states the order: Scan axes and the chunks of a SafeMap axis are loops, in plan
order, and the lanes of Vmap and DedupGather axes and of one chunk form the innermost loop, row-major.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.stages import AxisBoundary, HostSink, HostTap, execute_plan
from xtrax.tiling import Bucket, DedupSpec, SafeMap, Scan, Vmap, reducers
from xtrax.tiling.plan import AxisDecision, AxisSpec, BatchPlan

SIZES = {"a": 3, "b": 4, "c": 2}
LABELS = {"a": [0, 1, 0], "b": [1, 0, 0, 1], "c": [0, 0]}
KINDS = ["vmap", "safe1", "safe2", "scan", "dedup"]


def transition(carry, y):
    # A nest with a sink inside yields None.
    return (carry, None) if y is None else (carry + y, 2 * carry + y)


def dedup(axis):
    labels = LABELS[axis]
    distinct = sorted(set(labels), key=labels.index)
    first = [labels.index(label) for label in distinct]
    return DedupSpec(axis, first, [distinct.index(label) for label in labels], len(distinct)).to_dedup_gather()


def plan_of(kinds, reduced=()):
    """The plan; a Scan carries what one element of it is: the axes inside it that are not reduced."""
    axes = list(SIZES)[: len(kinds)]
    decisions = []
    for k, (axis, kind) in enumerate(zip(axes, kinds, strict=True)):
        inside = [SIZES[inner] for inner in axes[k + 1 :] if inner not in reduced]
        strategy = {
            "vmap": Vmap(),
            "safe1": SafeMap(1),
            "safe2": SafeMap(2),
            "scan": Scan(transition=transition, init=np.ones(inside, np.int32)),
            "dedup": dedup(axis),
        }[kind]
        spec = AxisSpec(axis, SIZES[axis], SIZES[axis])
        decisions.append(AxisDecision(spec, SIZES[axis], "as the test wants it", strategy))
    return BatchPlan(tuple(decisions))


def elements(kinds):
    """An integer for each element; those that a dedup axis calls equal are equal."""
    shape = [SIZES[axis] for axis in list(SIZES)[: len(kinds)]]
    xs = np.zeros(shape, np.int32)
    for dim, (axis, kind) in enumerate(zip(SIZES, kinds, strict=False)):
        numbers = LABELS[axis] if kind == "dedup" else np.arange(SIZES[axis])
        xs = xs * 5 + np.asarray(numbers, np.int32).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return xs


class Lanes(NamedTuple):
    """The indices along each axis that are at hand at once: one of a loop, several of lanes."""

    at: tuple[tuple[int, ...], ...]

    def rows(self):
        return list(itertools.product(*self.at))


class Reference:
    """The nest in plain Python, which logs `(axis, call)` with the rows of each call of the host."""

    def __init__(self, kinds, effects, xs):
        self.kinds, self.effects, self.xs = kinds, effects, xs
        self.axes = list(SIZES)[: len(kinds)]
        self.log = []

    def run(self):
        return self.axis(0, ())

    def axis(self, k, around):
        """From the lanes around to the values of everything from axis k inwards: an array for each row of lanes."""
        if k == len(self.kinds):
            return {row: np.int32(self.xs[row] ** 2 % 101) for row in Lanes(around).rows()}
        n = SIZES[self.axes[k]]
        step = {"vmap": n, "dedup": n, "safe1": 1, "safe2": 2, "scan": 1}[self.kinds[k]]
        parts, carry = {}, {row: np.int32(1) for row in Lanes(around).rows()}
        for start in range(0, n, step):
            here = tuple(range(start, min(start + step, n)))
            values = self.axis(k + 1, (*around, here))
            if self.kinds[k] == "scan":
                for row, y in list(values.items()):
                    carry[row[:-1]], values[row] = carry[row[:-1]] + y, 2 * carry[row[:-1]] + y
            if self.axes[k] in self.effects:
                self.log.append((self.axes[k], [(row, values[row].tolist()) for row in Lanes((*around, here)).rows()]))
            parts |= values
        if self.effects.get(self.axes[k]) == "sink":
            return {row: np.zeros(0, np.int32) for row in Lanes(around).rows()}
        return {row: np.stack([parts[(*row, i)] for i in range(n)]) for row in Lanes(around).rows()}


def run_certified(kinds, effects, ordered, jitted):
    xs = elements(kinds)
    log = []

    def host(axis):
        def keep(values, index):
            rows = [tuple(row) for row in index.tolist()]
            # A nest inside a sink has nothing to show but that it was there.
            shown = [[]] * len(rows) if values is None else values.tolist()
            log.append((axis, list(zip(rows, shown, strict=True))))

        return keep

    boundaries = {
        axis: AxisBoundary(**{role: (HostTap if role == "tap" else HostSink)(host(axis), ordered=ordered)})
        for axis, role in effects.items()
    }
    plan = plan_of(kinds)
    axes = [tuple(list(SIZES)[: len(kinds)])]

    def run(xs):
        return execute_plan(lambda x: x * x % 101, plan, xs, axes=axes, boundaries=boundaries)

    result = (jax.jit(run) if jitted else run)(xs)
    outputs = result[0] if "scan" in kinds else result
    jax.block_until_ready(result)
    jax.effects_barrier()
    reference = Reference(kinds, effects, xs)
    values = reference.run()[()]
    if "sink" in effects.values():
        assert outputs is None
    else:
        np.testing.assert_array_equal(outputs, values)
    if ordered:
        assert log == reference.log
    else:
        assert sorted(map(repr, log)) == sorted(map(repr, reference.log))


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_two_axes_with_a_tap_on_each(kinds):
    run_certified(kinds, {"a": "tap", "b": "tap"}, ordered=True, jitted=True)


@settings(max_examples=12, deadline=None)
@given(
    kinds=st.tuples(*[st.sampled_from(KINDS)] * 3),
    effects=st.sampled_from(
        [{"a": "tap", "b": "tap", "c": "tap"}, {"c": "tap"}, {"b": "tap"}, {"a": "tap", "c": "tap"}, {"a": "sink"}]
    ),
    ordered=st.booleans(),
    jitted=st.booleans(),
)
def test_three_axes(kinds, effects, ordered, jitted):
    run_certified(kinds, effects, ordered, jitted)


@settings(max_examples=8, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3).map(tuple),
    ordered=st.booleans(),
    jitted=st.booleans(),
)
def test_a_sink_on_the_innermost_axis(kinds, ordered, jitted):
    run_certified(kinds, {list(SIZES)[len(kinds) - 1]: "sink"}, ordered, jitted)


@settings(max_examples=8, deadline=None)
@given(kinds=st.tuples(*[st.sampled_from(["vmap", "safe1", "safe2", "scan"])] * 2), ordered=st.booleans())
def test_a_differentiated_nest_fires_once_for_each_element(kinds, ordered):
    seen = []
    tap = HostTap(lambda values, index: seen.extend(map(tuple, index.tolist())), ordered=ordered)
    decisions = list(plan_of(kinds).decisions)
    for k, kind in enumerate(kinds):
        if kind == "scan":
            init = jnp.zeros((4,) if k == 0 else ())
            strategy = Scan(transition=lambda carry, y: (carry + y, y), init=init)
            decisions[k] = dataclasses.replace(decisions[k], strategy=strategy)
    plan = BatchPlan(tuple(decisions))

    def loss(xs):
        result = execute_plan(lambda x: x**3, plan, xs, axes=[("a", "b")], boundaries={"b": AxisBoundary(tap=tap)})
        return jnp.sum(result[0] if "scan" in kinds else result)

    xs = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(xs), 3 * xs**2)
    jax.effects_barrier()
    assert sorted(seen) == sorted(itertools.product(range(3), range(4)))


@settings(max_examples=8, deadline=None)
@given(kinds=st.tuples(*[st.sampled_from(KINDS)] * 2), inner=st.booleans())
def test_a_streamed_fuse_in_a_nest(kinds, inner):
    xs = elements(kinds)
    boundaries = {"b" if inner else "a": AxisBoundary(fuse=reducers.sum)}
    result = execute_plan(
        lambda x: x * x % 101, plan_of(kinds, reduced=boundaries), xs, axes=[("a", "b")], boundaries=boundaries
    )
    outputs = result[0] if "scan" in kinds else result
    if not inner:
        values = Reference(kinds, {}, xs).run()[()].sum(axis=0)
    else:
        # The transition of an outer scan takes the sums.
        sums = Reference(("vmap", kinds[1]), {}, xs).run()[()].sum(axis=1)
        values, carry = list(sums), np.int32(1)
        if kinds[0] == "scan":
            for i, y in enumerate(sums):
                values[i], carry = 2 * carry + y, carry + y
    np.testing.assert_array_equal(outputs, values)


@pytest.mark.parametrize("kind", ["vmap", "safe1", "scan"])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_bucket_axis_outside_goes_through_its_buckets_a_batch_after_another(kind, ordered):
    lengths, boundaries, batch = [5, 2, 3, 1, 6], (3, 6), 2
    items = [np.arange(1, length + 1, dtype=np.int32) for length in lengths]
    gains = np.array([1, 10], np.int32)
    item = AxisSpec("item", len(items), batch, heterogeneous=True, bucket_boundaries=boundaries)
    inner = {"vmap": Vmap(), "safe1": SafeMap(1), "scan": Scan(transition=transition, init=np.int32(1))}[kind]
    plan = BatchPlan(
        (
            AxisDecision(item, batch, "for the test", Bucket(boundaries)),
            AxisDecision(AxisSpec("gain", 2, 2), 2, "for the test", inner),
        )
    )
    log = []

    def host(axis):
        return lambda values, index: log.append(
            (axis, list(zip(map(tuple, index.tolist()), values.tolist(), strict=True)))
        )

    result = execute_plan(
        lambda x, gain, mask: gain * jnp.sum(jnp.where(mask, x, 0)),
        plan,
        items,
        gains,
        axes=[("item",), ("gain",)],
        boundaries={axis: AxisBoundary(tap=HostTap(host(axis), ordered=ordered)) for axis in ("item", "gain")},
    )
    outputs = result[0] if kind == "scan" else result
    wanted, values = [], {}
    for bucket in boundaries:
        of_bucket = [i for i, n in enumerate(lengths) if min(b for b in boundaries if b >= n) == bucket]
        for start in range(0, len(of_bucket), batch):
            here = of_bucket[start : start + batch]
            carry = dict.fromkeys(here, 1)
            for gain in [range(2)] if kind == "vmap" else [[0], [1]]:
                for i, g in itertools.product(here, gain):
                    values[i, g] = int(gains[g]) * sum(range(1, lengths[i] + 1))
                    if kind == "scan":
                        carry[i], values[i, g] = carry[i] + values[i, g], 2 * carry[i] + values[i, g]
                wanted.append(("gain", [((i, g), values[i, g]) for i, g in itertools.product(here, gain)]))
            wanted.append(("item", [((i,), [values[i, 0], values[i, 1]]) for i in here]))
    assert [list(map(int, output)) for output in outputs] == [[values[i, 0], values[i, 1]] for i in range(len(items))]
    assert log == wanted if ordered else sorted(map(repr, log)) == sorted(map(repr, wanted))
