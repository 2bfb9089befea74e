"""How much of a budget the plan that was made for it uses."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tools.bench.harness import Line, Row
from xtrax.tiling import AxisSpec, BatchPlanner, MemoryBudget, RemainderWarning, execute_plan

_BUDGETS_MB = (2, 8, 32, 128)


def _mlp(x: jax.Array) -> jax.Array:
    """The network of three layers of 64, 256 and 64 units, of one row."""
    first, second = jnp.full((64, 256), 0.1), jnp.full((256, 64), 0.1)
    return jnp.tanh(jnp.tanh(x @ first) @ second)


def _ranked(x: jax.Array) -> jax.Array:
    return jnp.sort(jnp.sin(x))[:16]


def _recurrent(x: jax.Array) -> jax.Array:
    """A recurrent network over 16 steps of 32 features."""
    weights = jnp.eye(32)
    return jax.lax.scan(lambda c, t: (jnp.tanh(c @ weights + t), None), jnp.zeros(32), x)[0]


_WORK: tuple[tuple[str, Callable[..., Any], tuple[int, ...]], ...] = (
    ("mlp", _mlp, (1_000_000, 64)),
    ("sort", _ranked, (1_000_000, 256)),
    ("rnn", _recurrent, (200_000, 16, 32)),
)


def _measure() -> Iterator[Line]:
    for name, fn, shape in _WORK:
        xs = jax.ShapeDtypeStruct(shape, "float32")
        out = jax.eval_shape(jax.vmap(fn), xs)
        rest = sum(leaf.size * leaf.dtype.itemsize for leaf in (xs, out))
        for megabytes in _BUDGETS_MB:
            room = megabytes * 10**6
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RemainderWarning)
                budget = MemoryBudget.for_function(fn, xs, bytes=rest + room)
                plan = BatchPlanner(budget=budget).plan([AxisSpec("batch", shape[0], 32)])
            assert plan.memory is not None
            # Not the planner's word: the program that runs the plan, compiled again.
            found = jax.jit(lambda xs, fn=fn, plan=plan: execute_plan(fn, plan, xs)).lower(xs).compile()
            memory: Any = found.memory_analysis()
            used = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - rest
            detail = (
                f"{plan.decisions[0].strategy}, {used / 1e6:.3f} MB beyond arguments and outputs, "
                f"{plan.memory.compiles} compiles"
            )
            yield Line(f"fit-budget/{name}-{megabytes}MB-over", used / room, 1.0, detail=detail)
            yield Line(f"fit-budget/{name}-{megabytes}MB-used", used / room, 0.8, at_least=True, detail=detail)


ROW = Row(
    "fit-budget",
    "bytes, by XLA's account, of the plan chosen for 2, 8, 32 and 128 MB beyond arguments and outputs",
    "the budget: never over, and at least 0.80 of it used",
    _measure,
)
