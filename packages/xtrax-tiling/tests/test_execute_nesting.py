"""Plans of two and three axes, of all strategies inside one another, against a nest of Python loops."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from xtrax.tiling import AxisDecision, AxisSpec, BatchPlan, DedupSpec, SafeMap, Scan, Vmap
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling.execute import _run_plan, execute_plan
from xtrax.tiling.strategy import AxisStrategy

SIZES = (5, 3, 4)
UNIQUE = {5: [0, 1, 3], 3: [0, 2], 4: [0, 1, 2]}  # k_bucket is 4, 2, 4: with and without padding
INDEX_MAP = {5: [0, 1, 0, 2, 1], 3: [0, 0, 1], 4: [0, 1, 2, 2]}
KINDS = ("vmap", "safemap", "scan", "dedup")
PAIRS = list(itertools.product(KINDS, repeat=2))
TRIPLES = list(itertools.product(KINDS, repeat=3))


def transition(carry: Any, y: Any) -> Any:
    """Of integers, so that the order of the steps shows and equality is exact; `y` may have axes inside."""
    return (3 * carry + y.sum()) % 1009, y + carry


def strategy_of(kind: str, size: int) -> AxisStrategy:
    if kind == "vmap":
        return Vmap()
    if kind == "safemap":
        return SafeMap(2)
    if kind == "scan":
        return Scan(transition, jnp.int32(1))
    spec = DedupSpec("axis", np.array(UNIQUE[size]), np.array(INDEX_MAP[size]), k=len(UNIQUE[size]))
    return spec.to_dedup_gather()


def plan_of(kinds: Any) -> BatchPlan:
    sizes = SIZES[: len(kinds)]
    return BatchPlan(
        tuple(
            AxisDecision(AxisSpec(f"axis{k}", size, size), size, "by hand", strategy_of(kind, size))
            for k, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
        )
    )


def data_of(kinds: Any) -> tuple[np.ndarray, np.ndarray]:
    """`(axes...)` and `(last axis, 2)`, whose elements are copies along a DedupGather axis."""
    sizes = SIZES[: len(kinds)]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 100, sizes).astype(np.int32)
    v = rng.integers(0, 100, (sizes[-1], 2)).astype(np.int32)
    for k, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        if kind == "dedup":
            representatives = np.array(UNIQUE[size])[INDEX_MAP[size]]
            x = x.take(representatives, axis=k)
            v = v.take(representatives, axis=0) if k == len(kinds) - 1 else v
    return x, v


def fn(x: Any, v: Any) -> Any:
    return x * v[0] + v[1]


def loops(kinds: Any, x: np.ndarray, v: np.ndarray, seen: Any = None) -> tuple[Any, dict[str, Any]]:
    """The values and carries of a plain Python nest; `seen[k][index]` is the element of axis k at an index."""

    def nest(k: int, index: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
        if k == len(kinds):
            return fn(x[index], v[index[-1]]), {}
        outputs, inner, carry = [], [], np.int32(1)
        for i in range(SIZES[k]):
            y, carries = nest(k + 1, (*index, i))
            if kinds[k] == "scan":
                carry, y = transition(carry, y)
            outputs.append(y)
            inner.append(carries)
            if seen is not None:
                seen[k][(*index, i)] = np.asarray(y)
        carries: dict[str, Any] = {name: np.stack([c[name] for c in inner]) for name in inner[0]}
        if kinds[k] == "scan":
            carries[f"axis{k}"] = carry
        return np.stack(outputs), carries

    return nest(0, ())


def effects(kinds: Any, batch: int = 2) -> list[tuple[int, tuple[int, ...]]]:
    """The axis and index of each effect in order: loops over steps and chunks, and lanes innermost."""
    events: list[tuple[int, tuple[int, ...]]] = []

    def nest(k: int, lanes: list[tuple[int, ...]]) -> None:
        if k == len(kinds):
            return
        every = list(range(SIZES[k]))
        if kinds[k] == "scan":
            together = [[i] for i in every]
        elif kinds[k] == "safemap":
            together = [every[start : start + batch] for start in every[::batch]]
        else:
            together = [every]
        for group in together:
            inner: list[tuple[int, ...]] = [(*lane, i) for lane in lanes for i in group]
            nest(k + 1, inner)
            events.extend((k, index) for index in inner)

    nest(0, [()])
    return events


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """An ordered effect that keeps what it is given, element by element."""

    k: int
    events: list[Any]

    def __call__(self, values: Any, index: Any, mask: Any) -> Any:
        def host(values: Any, index: Any) -> Any:
            for value, row in zip(np.array(values), np.array(index), strict=True):
                self.events.append((self.k, tuple(row.tolist()), value))
            return np.int32(0)

        assert mask is None
        token = io_callback(host, jax.ShapeDtypeStruct((), jnp.int32), lax.stop_gradient(values), index, ordered=True)
        return values, token


@pytest.mark.parametrize("kinds", PAIRS + TRIPLES, ids="-".join)
def test_values_and_carries_are_those_of_python_loops(kinds):
    x, v = data_of(kinds)
    names = [f"axis{k}" for k in range(len(kinds))]
    result = execute_plan(fn, plan_of(kinds), x, v, axes=[names, names[-1:]])
    outputs, carries = result if "scan" in kinds else (result, {})
    expected, expected_carries = loops(kinds, x, v)
    np.testing.assert_array_equal(outputs, expected)
    assert set(carries) == set(expected_carries)
    for name, carry in expected_carries.items():
        np.testing.assert_array_equal(carries[name], carry)


@pytest.mark.parametrize(
    "kinds", [*PAIRS, *(t for t in TRIPLES if len(set(t)) == 3), ("safemap",) * 3, ("scan",) * 3], ids="-".join
)
def test_effects_occur_once_for_each_element_in_the_order_of_loops_with_the_lanes_innermost(kinds):
    x, v = data_of(kinds)
    names = [f"axis{k}" for k in range(len(kinds))]
    events: list[Any] = []
    hooks = {name: AxisHook(emit=Recorded(k, events)) for k, name in enumerate(names)}
    result = _run_plan(fn, plan_of(kinds), (x, v), [names, names[-1:]], None, None, hooks)
    jax.effects_barrier()
    seen: list[Any] = [{} for _ in kinds]
    expected, _ = loops(kinds, x, v, seen)
    np.testing.assert_array_equal(result[0] if "scan" in kinds else result, expected)
    assert [(k, index) for k, index, _ in events] == effects(kinds)
    for k, index, value in events:
        np.testing.assert_array_equal(value, seen[k][index])
