"""What execute_plan refuses, before any trace, with which error and which words."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.tiling import (
    AxisDecision,
    AxisSpec,
    BatchPlan,
    Bucket,
    CarryMismatchError,
    DedupSpec,
    DispatchRejected,
    SafeMap,
    Scan,
    Vmap,
    WhileCarry,
    execute_plan,
)
from xtrax.tiling import reducers as rd
from xtrax.tiling._execute.hooks import AxisHook
from xtrax.tiling.execute import _run_plan


def decision(name: str, size: int, strategy: Any, **fields: Any) -> AxisDecision:
    return AxisDecision(AxisSpec(name, size, max(size, 1), **fields), max(size, 1), "by hand", strategy)


call: Any = execute_plan  # what is wrong is wrong for a type checker too

ONE = BatchPlan((decision("batch", 4, SafeMap(3)),))
TWO = BatchPlan((decision("batch", 4, SafeMap(3)), decision("time", 3, Vmap())))
BUCKET = BatchPlan((decision("seq", 2, Bucket((4,))),))
DEDUP = BatchPlan((decision("batch", 4, DedupSpec("batch", np.array([0]), np.zeros(4, int), k=1).to_dedup_gather()),))


def untraced(*args: Any) -> Any:
    raise AssertionError("traced")


def x(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "fn": (TypeError, "fn must be callable.*but is 3", lambda: call(3, ONE, x(4))),
    "no plan": (TypeError, "plan must be a BatchPlan.*list", lambda: call(untraced, [1], x(4))),
    "no axes": (ValueError, "plan has no axes", lambda: call(untraced, BatchPlan(()), x(4))),
    "no arguments": (ValueError, "no arguments, so axis 'batch'", lambda: call(untraced, ONE)),
    "axes missing": (
        ValueError,
        r"axes is None, and the plan has 2 axes \('batch', 'time'\)",
        lambda: call(untraced, TWO, x(4, 3)),
    ),
    "axes a string": (
        TypeError,
        "axes must be a sequence.*'batch'",
        lambda: call(untraced, ONE, x(4), axes="batch"),
    ),
    "axes of another number": (
        ValueError,
        "axes has 2 entries, and there are 1 arguments",
        lambda: call(untraced, ONE, x(4), axes=[("batch",), None]),
    ),
    "an entry that is a string": (
        TypeError,
        r"axes\[0\] must be a tuple.*write \('batch',\)",
        lambda: call(untraced, ONE, x(4), axes=["batch"]),
    ),
    "an entry that holds no name": (
        TypeError,
        r"axes\[0\]\[0\] must be a string, but is 0",
        lambda: call(untraced, ONE, x(4), axes=[(0,)]),
    ),
    "an unknown axis": (
        ValueError,
        r"axes\[0\] names axis 'bach', which the plan does not have; it has 'batch'",
        lambda: call(untraced, ONE, x(4), axes=[("bach",)]),
    ),
    "an axis twice": (
        ValueError,
        r"axes\[0\] names axis 'batch' twice",
        lambda: call(untraced, ONE, x(4, 4), axes=[("batch", "batch")]),
    ),
    "an axis that nothing has": (
        ValueError,
        "axis 'time' of the plan is in no entry of axes",
        lambda: call(untraced, TWO, x(4), axes=[("batch",)]),
    ),
    "another size": (
        ValueError,
        r"args\[1\]\['x'\] has 5 elements along axis 'time'.*\(4, 5\).*made for 3",
        lambda: call(untraced, TWO, x(4), {"x": x(4, 5)}, axes=[("batch",), ("batch", "time")]),
    ),
    "too few dimensions": (
        ValueError,
        r"args\[0\] has shape \(4,\), and so no dimension 1 for axis 'time'",
        lambda: call(untraced, TWO, x(4), axes=[("batch", "time")]),
    ),
    "no array": (
        TypeError,
        r"args\[0\] has axis 'batch', and must be a numeric array",
        lambda: call(untraced, ONE, "four"),
    ),
    "an array of strings": (
        TypeError,
        r"args\[0\].*numeric array.*<U1",
        lambda: call(untraced, ONE, np.array(list("abcd"))),
    ),
    "no leaves": (ValueError, r"args\[0\] has no arrays", lambda: call(untraced, ONE, {})),
    "WhileCarry": (
        DispatchRejected,
        "axis 'w' is a WhileCarry.*by its iterator",
        lambda: call(untraced, BatchPlan((decision("w", 4, WhileCarry()),)), x(4)),
    ),
    "Scan without transition": (
        ValueError,
        "Scan of axis 't' has no transition; plan the axis with a CarrySpec",
        lambda: call(untraced, BatchPlan((decision("t", 4, Scan(init=0.0)),)), x(4)),
    ),
    "Scan without init": (
        ValueError,
        "Scan of axis 't' has no init",
        lambda: call(untraced, BatchPlan((decision("t", 4, Scan(lambda c, y: (c, y))),)), x(4)),
    ),
    "Scan on a heterogeneous axis": (
        DispatchRejected,
        "heterogeneous axis 't'",
        lambda: call(
            untraced,
            BatchPlan((decision("t", 4, Scan(lambda c, y: (c, y), 0.0), heterogeneous=True, bucket_boundaries=(4,)),)),
            x(4),
        ),
    ),
    "Bucket inside": (
        DispatchRejected,
        "'seq' is a Bucket.*first, so that it is the outermost",
        lambda: call(
            untraced, BatchPlan((decision("b", 4, Vmap()), decision("seq", 2, Bucket((4,))))), x(4), axes=[("b",)]
        ),
    ),
    "Bucket of an array": (
        TypeError,
        r"args\[0\] has the Bucket axis 'seq', and must be a list",
        lambda: call(untraced, BUCKET, x(2, 4)),
    ),
    "Bucket of another number": (
        ValueError,
        r"args\[0\] has 3 elements along axis 'seq'.*made for 2",
        lambda: call(untraced, BUCKET, [x(1), x(2), x(3)]),
    ),
    "Bucket too long": (
        ValueError,
        "length 5 is past the last boundary 4",
        lambda: call(untraced, BUCKET, [x(1), x(5)]),
    ),
    "Bucket of scalars": (
        ValueError,
        r"args\[0\]\[1\] is a scalar",
        lambda: call(untraced, BUCKET, [x(1), np.float32(1)]),
    ),
    "Bucket of strings": (TypeError, r"args\[0\]\[0\].*numeric", lambda: call(untraced, BUCKET, ["ab", "c"])),
    "Bucket of empty items": (
        ValueError,
        r"args\[0\]\[0\] has no arrays",
        lambda: call(untraced, BUCKET, [{}, {}]),
    ),
    "leaves of one item that disagree": (
        ValueError,
        r"args\[0\]\[1\]\['b'\] has length 3, but another leaf of args\[0\]\[1\] has 2",
        lambda: call(untraced, BUCKET, [{"a": x(1), "b": x(1)}, {"a": x(2), "b": x(3)}]),
    ),
    "arguments whose lengths disagree": (
        ValueError,
        r"args\[0\]\[1\] has length 2, but args\[1\]\[1\] has length 3",
        lambda: call(untraced, BUCKET, [x(1), x(2)], [x(1), x(3)]),
    ),
    "Bucket beside another axis": (
        ValueError,
        "'seq' is a Bucket: an argument that has it is a list of elements and has no other axis",
        lambda: call(
            untraced,
            BatchPlan((decision("seq", 2, Bucket((4,))), decision("b", 4, Vmap()))),
            [x(1), x(2)],
            axes=[("seq", "b")],
        ),
    ),
    "Bucket without fn": (
        ValueError,
        "fn is None, and a Bucket axis",
        lambda: call(None, BUCKET, [x(1), x(2)]),
    ),
    "Bucket under jit": (
        TypeError,
        r"args\[0\]\[0\] is being traced.*on the host",
        lambda: jax.jit(lambda a: call(untraced, BUCKET, a))([x(1), x(2)]),
    ),
    "one element": (
        ValueError,
        r"args\[0\] has 1 element along axis 'batch'",
        lambda: call(untraced, ONE, x(1)),
    ),
    "no key": (TypeError, "key must be a PRNG key.*but is 0", lambda: call(untraced, ONE, x(4), key=0)),
    "several keys": (
        ValueError,
        r"key must be a single key, but has shape \(4,\)",
        lambda: call(untraced, ONE, x(4), key=jax.random.split(jax.random.key(0), 4)),
    ),
    "a raw key of another length": (
        ValueError,
        r"key is a raw key of shape \(3,\), but those of threefry2x32, the default PRNG, have shape \(2,\)",
        lambda: call(untraced, ONE, x(4), key=np.zeros(3, np.uint32)),
    ),
    "an array that is no key": (
        TypeError,
        r"key must be a PRNG key.*but is array\(\[0., 0.\], dtype=float32\)",
        lambda: call(untraced, ONE, x(4), key=np.zeros(2, np.float32)),
    ),
    "key without fn": (
        ValueError,
        "fn is None, and nothing takes it",
        lambda: call(None, ONE, x(4), key=jax.random.key(0)),
    ),
    "key and duplicates": (
        ValueError,
        "axis 'batch' is a DedupGather.*share one key",
        lambda: call(untraced, DEDUP, x(4), key=jax.random.key(0)),
    ),
    "more elements than keys": (
        ValueError,
        r"the plan has \d+ elements, and fold_in tells only 2\*\*32 apart",
        lambda: call(
            untraced,
            BatchPlan((decision("a", 2**20, Vmap()), decision("b", 2**20, Vmap()))),
            x(1),
            x(1),
            axes=[("a",), ("b",)],
            key=jax.random.key(0),
        ),
    ),
    "no mesh": (TypeError, "mesh must be a jax.sharding.Mesh", lambda: call(untraced, ONE, x(4), mesh="data")),
    "a Scan over a mesh": (
        DispatchRejected,
        "outermost axis 't' is a Scan",
        lambda: call(
            untraced,
            BatchPlan((decision("t", 4, Scan(lambda c, y: (c, y), 0.0)),)),
            x(4),
            mesh=jax.make_mesh((2,), ("d",)),
        ),
    ),
    "a reduction of nothing": (
        ValueError,
        "axis 'a' needs at least 1 element",
        lambda: _run_plan(
            untraced, BatchPlan((decision("a", 0, Vmap()),)), [x(0)], None, None, None, {"a": AxisHook(fuse=rd.max)}
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_trace(name):
    error, words, bad_call = REFUSED[name]
    with pytest.raises(error) as caught:
        bad_call()
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


def test_a_carry_that_changes_names_its_leaf_before_and_after():
    plan = BatchPlan(
        (decision("b", 2, Vmap()), decision("t", 3, Scan(lambda c, y: ({"n": c["n"] + 0.5}, y), {"n": jnp.int32(0)})))
    )
    with pytest.raises(CarryMismatchError, match=r"carry\['n'\] is int32\[\] before the step and float32\[\] after"):
        execute_plan(lambda x: x, plan, x(2, 3), axes=[("b", "t")])


def test_a_transition_that_returns_no_pair_is_refused():
    plan = BatchPlan((decision("t", 3, Scan(lambda c, y: c + y, 0.0)),))
    with pytest.raises(TypeError, match="must return a pair"):
        execute_plan(None, plan, x(3))


def test_a_dedup_fn_that_returns_another_number_is_refused():
    spec = DedupSpec("a", np.array([0, 1]), np.array([0, 1, 1]), k=2, dedup_fn=lambda xs, unique: xs)
    plan = BatchPlan((decision("a", 3, spec.to_dedup_gather()),))
    with pytest.raises(ValueError, match=r"dedup_fn of axis 'a' returned an array of shape \(3,\).*k_bucket = 2"):
        execute_plan(lambda x: x, plan, x(3))


def test_side_effects_of_a_function_on_a_dedup_axis_are_refused():
    def fn(x):
        jax.debug.callback(lambda v: None, x)
        return x

    with pytest.raises(DispatchRejected, match="side effects, and on the DedupGather axis 'batch'"):
        execute_plan(fn, DEDUP, x(4))


def test_side_effects_of_a_transition_inside_a_dedup_axis_are_refused():
    def transition(carry, y):
        jax.debug.callback(lambda v: None, y)
        return carry + y, y

    scan, axes = decision("t", 3, Scan(transition, jnp.float32(0))), [("batch", "t")]
    with pytest.raises(DispatchRejected, match="a transition of a Scan axis, has side effects, and on the DedupGather"):
        execute_plan(lambda x: x, BatchPlan((*DEDUP.decisions, scan)), np.ones((4, 3), np.float32), axes=axes)
    # Outside of it each step is taken once.
    outside, axes = decision("t", 3, Scan(transition, jnp.zeros(4))), [("t", "batch")]
    execute_plan(lambda x: x, BatchPlan((outside, *DEDUP.decisions)), np.ones((3, 4), np.float32), axes=axes)


def test_effects_inside_a_split_dedup_axis_are_refused():
    plan = BatchPlan((*DEDUP.decisions, decision("b", 2, Vmap())))
    hooks = {"b": AxisHook(emit=lambda values, index, mask: (values, None))}
    with pytest.raises(DispatchRejected, match="'batch' is split over a mesh, and an axis inside it has effects"):
        _run_plan(lambda a, b: b, plan, [x(4), x(2)], [("batch",), ("b",)], jax.make_mesh((2,), ("d",)), None, hooks)


def test_a_fuse_of_results_of_several_shapes_is_refused():
    plan = BatchPlan((decision("seq", 2, Bucket((2, 4))),))
    with pytest.raises(ValueError, match="Bucket axis 'seq' has a fuse, which needs a stack, but its results have 2"):
        _run_plan(lambda x, m: x, plan, [[x(1), x(3)]], None, None, None, {"seq": AxisHook(fuse=jnp.sum)})
