"""The pattern that the documentation of the first release printed runs as it was printed."""

import re

import pytest

DOCUMENT = '''
Minimal Working Pattern (Fully Self-Contained)

This pattern works without any tier-2 imports or symbols:

import jax
from xtrax.tiling.plan import AxisSpec, BatchPlanner, BatchPlan  # verify: src/xtrax/tiling/plan.py:26-120
from xtrax.tiling.dispatch import make_axis_dispatch  # verify: src/xtrax/tiling/dispatch.py:31-102

# Step 1: Define axis specification
axis_spec = AxisSpec(
    name="batch",
    cardinality=100,           # 100 samples
    default_batch_size=32,     # chunk size for SafeMap
)

# Step 2: Build batching plan
planner = BatchPlanner()
plan: BatchPlan = planner.plan([axis_spec])

# Step 3: Extract decision for the axis
decision = plan.decisions[0]
print(f"Strategy: {type(decision.strategy).__name__}")
print(f"Reasoning: {decision.reasoning}")

# Step 4: Create dispatch iterator
iterator = make_axis_dispatch(
    decision.strategy,
    axis="batch",
    heterogeneous_axes=set(),
)

# Step 5: Apply iterator to a function
def my_fn(x):
    """Process a single sample."""
    return x * 2

samples = jax.numpy.ones((100, 10))  # (batch, features)
results = iterator(my_fn, samples)   # (batch, features) → apply my_fn to each

print(f"Output shape: {results.shape}")  # (100, 10)

What happened:
'''


@pytest.mark.filterwarnings("default::xtrax.tiling.RemainderWarning")
def test_the_minimal_working_pattern_runs_as_printed(capsys):
    block = re.search(r"^import jax\n.*?(?=^What happened:)", DOCUMENT, re.DOTALL | re.MULTILINE)
    assert block is not None
    namespace = {}
    exec(compile(block.group(), "minimal_working_pattern", "exec"), namespace)
    assert namespace["results"].tolist() == [[2.0] * 10] * 100
    strategy, reasoning, shape = capsys.readouterr().out.splitlines()
    assert strategy == "Strategy: SafeMap"
    assert "100" in reasoning
    assert "32" in reasoning
    assert shape == "Output shape: (100, 10)"
