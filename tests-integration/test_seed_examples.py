"""Every example that the two documents xtrax started from print runs as printed, given what it takes for granted.

The longest, the "Minimal Working Pattern", has its test in xtrax-tiling (`test_minimal_pattern.py`).
"""

import jax
import jax.numpy as jnp
import pytest

PREFLIGHT = """\
import xtrax

# Version check — this skill is written for v0.4.0a5 (0.4.0 alpha line moves fast;
# any 0.4.0aN is close enough, but re-verify sections touched by later alphas)
assert xtrax.__version__.startswith("0.4.0"), f"Expected xtrax 0.4.0aN, got {xtrax.__version__}"
"""

STATIC_FIELDS = """\
class AxisBoundary(eqx.Module):
    fuse: Fuse | BoundaryCallable | None = eqx.field(static=True, default=None)
    tap: Tap | BoundaryCallable | None = eqx.field(static=True, default=None)
    sink: Sink | BoundaryCallable | None = eqx.field(static=True, default=None)
    # No dynamic leaves; tree_flatten returns empty leaves
"""

NO_DYNAMIC_LEAVES = """\
import jax.tree_util
leaves = jax.tree_util.tree_leaves(my_boundary)
assert len(leaves) == 0, "AxisBoundary must have no dynamic leaves"
"""

PYTREE_INVARIANT = """\
boundary = AxisBoundary(fuse=my_fuse_fn, tap=None, sink=None)
leaves = jax.tree_util.tree_flatten(boundary)[0]
assert leaves == [], "Expected no dynamic leaves in AxisBoundary"
"""

CALLBACK_SHIM = """\
from xtrax.stages._callback import io_callback
"""

FILTER_JIT = """\
# Preferred: filter_jit with static-only callables
@eqx.filter_jit
def inference_step(model: eqx.Module, x):
    # model may have static fields (callables); filter_jit handles correctly
    return model(x)
"""

BOUNDED_STEP = """\
from xtrax.jit import bounded_jit

train_step = bounded_jit(step, max_traces=1)
"""

IMPORT_PATHS = """\
from xtrax.run import RunSpec
from xtrax.stages import AxisBoundary
"""


def run(block: str, **names: object) -> dict[str, object]:
    """What a block defines, run after what it takes for granted."""
    scope = dict(names)
    exec(compile(block, "<printed example>", "exec"), scope)
    return scope


def mean_of(stacked):
    """A reduction over the axis, as the examples take for granted."""
    return stacked.mean(axis=0)


def test_seed_version_assertion_holds():
    assert run(PREFLIGHT)["xtrax"].__version__ == "0.4.0"


def test_seed_axis_boundary_fields_are_static():
    import equinox as eqx

    from xtrax.stages import AxisBoundary, Fuse, Sink, Tap
    from xtrax.stages.boundaries import BoundaryCallable

    names = {"eqx": eqx, "Fuse": Fuse, "Tap": Tap, "Sink": Sink, "BoundaryCallable": BoundaryCallable}
    printed = run(STATIC_FIELDS, **names)["AxisBoundary"]
    for cls in (printed, AxisBoundary):
        assert jax.tree.leaves(cls(fuse=mean_of)) == []
        assert [field.metadata.get("static") for field in cls.__dataclass_fields__.values()] == [True] * 3


def test_seed_boundaries_have_no_dynamic_leaves():
    from xtrax.stages import AxisBoundary

    run(NO_DYNAMIC_LEAVES, my_boundary=AxisBoundary(fuse=mean_of))
    run(PYTREE_INVARIANT, AxisBoundary=AxisBoundary, my_fuse_fn=mean_of, jax=jax)


def test_seed_callback_shim_is_jax_s_io_callback():
    from jax.experimental import io_callback

    seen = []
    shim = run(CALLBACK_SHIM)["io_callback"]
    for callback in (shim, io_callback):
        jax.jit(lambda x, callback=callback: callback(lambda v: seen.append(float(v)), None, x, ordered=True))(2.0)
        jax.effects_barrier()
    assert seen == [2.0, 2.0]


def test_seed_filter_jit_takes_a_model_with_static_callables():
    import equinox as eqx

    model = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    step = run(FILTER_JIT, eqx=eqx)["inference_step"]
    x = jnp.array([0.5, -1.0])
    assert jnp.allclose(step(model, x), model(x), atol=1e-6)


def test_seed_bounded_step_refuses_the_second_trace():
    def step(x):
        return x + 1

    train_step = run(BOUNDED_STEP, step=step)["train_step"]
    assert train_step(jnp.ones(3)).tolist() == [2, 2, 2]
    assert train_step(jnp.zeros(3)).tolist() == [1, 1, 1]
    with pytest.raises(AssertionError, match=r"max_traces=1"):
        train_step(jnp.ones(4))


def test_seed_import_paths():
    import xtrax

    scope = run(IMPORT_PATHS)
    assert scope["RunSpec"] is xtrax.RunSpec
    assert scope["AxisBoundary"] is xtrax.AxisBoundary
