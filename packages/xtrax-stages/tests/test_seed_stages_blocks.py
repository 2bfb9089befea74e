"""The code blocks of the first source document that concern this layer, run as printed."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from xtrax.stages import AxisBoundary

LEAVES = """
import jax.tree_util  # verify: src/xtrax/stages/boundaries.py:84-98 (AxisBoundary implementation)
leaves = jax.tree_util.tree_leaves(my_boundary)
assert len(leaves) == 0, "AxisBoundary must have no dynamic leaves"
"""

FLATTEN = """
boundary = AxisBoundary(fuse=my_fuse_fn, tap=None, sink=None)
leaves = jax.tree_util.tree_flatten(boundary)[0]
assert leaves == [], "Expected no dynamic leaves in AxisBoundary"
"""

SHIM = """
from xtrax.stages._callback import io_callback  # verify: src/xtrax/stages/_callback.py
"""

FILTER_JIT = """
@eqx.filter_jit
def inference_step(model: eqx.Module, x):
    # model may have static fields (callables); filter_jit handles correctly
    return model(x)
"""

IMPORTS = """
from xtrax.stages import AxisBoundary
from xtrax.stages import validate_plan_topology
from xtrax.stages.boundaries import AxisBoundary, Fuse, Sink, Tap
from xtrax.stages.executor import execute_map_axis, execute_scan_axis
"""


def my_fuse_fn(stacked):
    return stacked.mean(axis=0)


def run(block, **names):
    namespace = {"jax": jax, "eqx": eqx, "AxisBoundary": AxisBoundary, "my_fuse_fn": my_fuse_fn, **names}
    exec(block, namespace)
    return namespace


def test_seed_block_custom_modules_are_checked_for_leaves():
    assert run(LEAVES, my_boundary=AxisBoundary(fuse=my_fuse_fn))["leaves"] == []
    # The check of the block bites: a module with an array does have a leaf.
    with pytest.raises(AssertionError, match="no dynamic leaves"):
        run(LEAVES, my_boundary=eqx.nn.Linear(1, 1, key=jax.random.key(0)))


def test_seed_block_axis_boundary_flattens_to_nothing():
    assert run(FLATTEN)["boundary"].fuse is my_fuse_fn


def test_seed_block_callbacks_come_from_the_shim():
    assert run(SHIM)["io_callback"] is jax.experimental.io_callback


def test_seed_block_filter_jit_holds_the_static_callables_of_a_model():
    class Model(eqx.Module):
        boundary: AxisBoundary
        weight: jax.Array

        def __call__(self, x):
            return self.boundary.fuse(self.weight * x)

    step = run(FILTER_JIT)["inference_step"]
    got = step(Model(AxisBoundary(fuse=my_fuse_fn), jnp.float32(2.0)), jnp.arange(4.0))
    assert float(got) == 3.0


def test_seed_import_paths():
    names = run(IMPORTS)
    assert {"Fuse", "Tap", "Sink", "validate_plan_topology", "execute_map_axis", "execute_scan_axis"} <= set(names)
