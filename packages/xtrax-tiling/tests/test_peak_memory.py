"""The memory of a process that runs a plan, as the kernel measures it, against what was planned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

_MB = 10**6
_SLACK = 48 * _MB  # of the allocator and the runtime: beyond it, something was held that was not planned

# Each side in a process of its own, whose high-water mark is reset once its program is compiled, since compiling takes
# more than most programs.
_CODE = """
import json, sys, warnings
import jax, jax.numpy as jnp, numpy as np
from xtrax.tiling import AxisSpec, BatchPlanner, MemoryBudget, RemainderWarning, SafeMap
from xtrax.tiling.execute import execute_plan

warnings.simplefilter("ignore", RemainderWarning)
limit, n = int(sys.argv[1]), 20_000

def fn(x):
    return jnp.abs(jnp.fft.fft(jnp.outer(x, x).ravel()))[::256]

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))

xs = jax.ShapeDtypeStruct((n, 64), "float32")
if limit:
    plan = BatchPlanner(budget=MemoryBudget.for_function(fn, xs, bytes=limit)).plan([AxisSpec("batch", n, 8)])
    assert isinstance(plan.decisions[0].strategy, SafeMap), plan
    run = lambda xs: execute_plan(fn, plan, xs)
    estimate = plan.memory.estimate
else:
    run, estimate = jax.vmap(fn), 0
compiled = jax.jit(run).lower(xs).compile()
memory = compiled.memory_analysis()
account = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = kilobytes("VmRSS")
data = jax.device_put(np.random.default_rng(0).standard_normal((n, 64), np.float32))
compiled(data).block_until_ready()
print(json.dumps({"estimate": estimate, "account": account, "rise": (kilobytes("VmHWM") - before) * 1024}))
"""


def measured(limit: int) -> dict[str, int]:
    """What a process took that runs the plan for this budget, or `jax.vmap` for 0."""
    run = subprocess.run(
        [sys.executable, "-c", _CODE, str(limit)], capture_output=True, text=True, check=False, timeout=240
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module", autouse=True)
def _high_water_mark():
    mark = Path("/proc/self/clear_refs")
    try:
        mark.write_text("5")
    except OSError as error:
        pytest.skip(f"the high-water mark of a process's memory cannot be reset here: {error}")


@pytest.mark.parametrize("limit", [128 * _MB, 256 * _MB])
def test_a_planned_process_takes_no_more_than_its_budget(limit):
    taken = measured(limit)
    assert taken["estimate"] == taken["account"] <= limit
    assert taken["account"] > limit / 2  # the budget is used
    assert taken["rise"] <= limit + _SLACK
    # The account is of memory that is really used, not of some that never is.
    assert taken["rise"] >= taken["account"] / 2


def test_the_plain_map_takes_far_more():
    taken = measured(0)
    assert taken["account"] > 600 * _MB
    assert taken["rise"] > 500 * _MB
