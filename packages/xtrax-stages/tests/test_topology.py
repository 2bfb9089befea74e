"""Plans and boundaries that cannot run together are refused before any trace."""

from types import SimpleNamespace

import pytest

from xtrax.stages import (
    AxisBoundary,
    HostSink,
    HostTap,
    PlanTopologyError,
    axis_boundaries_by_name,
    validate_plan_topology,
)
from xtrax.tiling.plan import AxisDecision, AxisSpec, BatchPlanner
from xtrax.tiling.strategy import Bucket, SafeMap, Scan, Vmap, WhileCarry


class Effect:
    def __init__(self, ordered=False, batchable=False):
        self.ordered = ordered
        self.batchable = batchable

    def __call__(self, value):
        raise AssertionError("validation must not call a boundary")


ORDERED = Effect(ordered=True)
EFFECTS = {
    "unordered": Effect(),
    "batchable": Effect(ordered=True, batchable=True),
    "function": lambda value: value,
}


def decision(name, strategy, *, heterogeneous=False, size=8):
    spec = AxisSpec(name, cardinality=size, default_batch_size=size, heterogeneous=heterogeneous)
    return AxisDecision(spec, size, "as the test wants it", strategy)


def with_role(role, effect):
    return AxisBoundary(**{role: effect})


@pytest.mark.parametrize("strategy", [Scan(), WhileCarry()])
def test_seed_carry_on_a_heterogeneous_axis_halts_before_any_trace(strategy):
    with pytest.raises(
        PlanTopologyError, match=f"axis 'len': {type(strategy).__name__}.*heterogeneous.*bucket_boundaries"
    ):
        validate_plan_topology([decision("len", strategy, heterogeneous=True)], {})
    validate_plan_topology([decision("len", strategy)], {})


@pytest.mark.parametrize("role", ["tap", "sink"])
def test_seed_ordered_effect_on_a_vmap_axis_halts(role):
    with pytest.raises(PlanTopologyError, match=f"axis 'batch': its {role} is ordered.*SafeMap"):
        validate_plan_topology([decision("batch", Vmap())], {"batch": with_role(role, ORDERED)})


@pytest.mark.parametrize("role", ["tap", "sink"])
@pytest.mark.parametrize("inner", [SafeMap(4), Scan(), Vmap()])
def test_ordered_effect_inside_a_vmap_axis_halts(role, inner):
    plan = [decision("batch", Vmap()), decision("middle", Scan()), decision("time", inner)]
    with pytest.raises(PlanTopologyError, match="axis 'time'"):
        validate_plan_topology(plan, {"time": with_role(role, ORDERED)})
    # The order of the plan is the order of nesting: outside the Vmap it runs.
    if not isinstance(inner, Vmap):
        validate_plan_topology(plan[::-1], {"time": with_role(role, ORDERED)})


@pytest.mark.parametrize(("size", "refused"), [(2, True), (1, False)])
def test_ordered_effect_inside_a_chunk_halts(size, refused):
    plan = [decision("batch", SafeMap(size)), decision("time", Scan())]
    boundaries = {"time": AxisBoundary(tap=ORDERED)}
    if refused:
        with pytest.raises(PlanTopologyError, match=r"axis 'time'.*inside 'batch'.*SafeMap\(1\)"):
            validate_plan_topology(plan, boundaries)
    else:
        validate_plan_topology(plan, boundaries)


@pytest.mark.parametrize("strategy", [SafeMap(4), Scan()])
def test_seed_ordered_effect_on_a_sequential_axis_passes(strategy):
    validate_plan_topology([decision("batch", strategy)], {"batch": AxisBoundary(tap=ORDERED, sink=ORDERED)})


@pytest.mark.parametrize("role", ["tap", "sink"])
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("plan", [[Vmap()], [Vmap(), Scan()], [Vmap(), SafeMap(2), Vmap()]])
def test_effects_that_may_be_batched_pass_everywhere(role, effect, plan):
    decisions = [decision(f"axis{i}", strategy) for i, strategy in enumerate(plan)]
    validate_plan_topology(decisions, {d.spec.name: with_role(role, EFFECTS[effect]) for d in decisions})


@pytest.mark.parametrize("role", ["tap", "sink"])
@pytest.mark.parametrize("plan", [[Vmap()], [SafeMap(2)], [Vmap(), Scan()], [SafeMap(1), Vmap(), SafeMap(1)]])
def test_host_effects_pass_on_every_axis_in_order(role, plan):
    decisions = [decision(f"axis{i}", strategy) for i, strategy in enumerate(plan)]
    effect = (HostTap if role == "tap" else HostSink)(lambda values, index: None, ordered=True)
    validate_plan_topology(decisions, {d.spec.name: with_role(role, effect) for d in decisions})


@pytest.mark.parametrize("boundary", [AxisBoundary(fuse=sum), AxisBoundary(tap=HostTap(print, ordered=True))])
def test_a_boundary_of_a_while_carry_inside_lanes_halts(boundary):
    for around in (Vmap(), SafeMap(2)):
        plan = [decision("batch", around), decision("until", WhileCarry())]
        with pytest.raises(PlanTopologyError, match=r"axis 'until': it is a WhileCarry inside 'batch'.*where="):
            validate_plan_topology(plan, {"until": boundary})
        validate_plan_topology(plan, {})
    validate_plan_topology([decision("batch", SafeMap(1)), decision("until", WhileCarry())], {"until": boundary})


def test_a_boundary_without_an_axis_is_refused_and_the_nearest_name_given():
    with pytest.raises(PlanTopologyError, match=r"axis 'bacth'.*it has 'batch', 'time'. Did you mean 'batch'\?"):
        validate_plan_topology([decision("batch", Vmap()), decision("time", Scan())], {"bacth": AxisBoundary(fuse=sum)})
    with pytest.raises(PlanTopologyError, match="it has none"):
        validate_plan_topology([], {"batch": AxisBoundary(fuse=sum)})


def test_a_fuse_over_buckets_of_different_lengths_is_refused():
    fused = {"tokens": AxisBoundary(fuse=sum)}
    with pytest.raises(PlanTopologyError, match=r"axis 'tokens': a fuse.*\(16, 32\).*One|one bucket"):
        validate_plan_topology([decision("tokens", Bucket((16, 32)), heterogeneous=True)], fused)
    validate_plan_topology([decision("tokens", Bucket((32,)), heterogeneous=True)], fused)
    validate_plan_topology([decision("tokens", Bucket((16, 32)))], {"tokens": AxisBoundary(tap=Effect())})


def test_an_axis_that_is_planned_twice_is_refused():
    with pytest.raises(PlanTopologyError, match="axis 'batch' is planned twice"):
        validate_plan_topology([decision("batch", Vmap()), decision("batch", Scan())], {})


def test_the_planner_s_own_decisions_pass():
    plan = BatchPlanner().plan([AxisSpec("batch", 64, 16), AxisSpec("time", 8, 8)])
    validate_plan_topology(plan.decisions, {"batch": AxisBoundary(tap=ORDERED), "time": None})
    with pytest.raises(PlanTopologyError, match="axis 'time'"):
        validate_plan_topology(plan.decisions, {"time": AxisBoundary(tap=ORDERED)})


def test_another_library_s_decisions_are_read_structurally():
    kinds = {name: type(name, (), {}) for name in ("Vmap", "Scan", "Shuffle")}
    plan = [SimpleNamespace(spec=SimpleNamespace(name=name.lower()), strategy=kind()) for name, kind in kinds.items()]
    boundary = SimpleNamespace(tap=ORDERED)
    with pytest.raises(PlanTopologyError, match="axis 'vmap'"):
        validate_plan_topology(plan, {"vmap": boundary})
    with pytest.raises(PlanTopologyError, match=r"axis 'scan'.*inside 'vmap'"):
        validate_plan_topology(plan, {"scan": boundary})
    validate_plan_topology(plan[1:], {"scan": boundary, "shuffle": boundary})


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        (None, "decisions must be a sequence"),
        ("batch", "decisions must be a sequence"),
        (SimpleNamespace(decisions=()), "Pass plan.decisions"),
        ([Vmap()], r"decisions\[0\] must have a `spec`"),
        ([SimpleNamespace(spec=SimpleNamespace(name="a"), strategy=None)], "strategy None"),
        ([SimpleNamespace(spec=SimpleNamespace(name=3), strategy=Vmap())], r"decisions\[0\]"),
        ([SimpleNamespace(spec=SimpleNamespace(name="a"), strategy=Vmap)], "the class Vmap; pass an instance"),
    ],
)
def test_what_is_not_a_sequence_of_decisions_is_refused(decisions, message):
    with pytest.raises(TypeError, match=message):
        validate_plan_topology(decisions, {})


@pytest.mark.parametrize("boundaries", [[AxisBoundary()], {"batch": 3}, {"batch": lambda x: x}])
def test_what_is_not_a_mapping_of_boundaries_is_refused(boundaries):
    with pytest.raises(TypeError, match="boundaries_by_name"):
        validate_plan_topology([decision("batch", Vmap())], boundaries)


def test_boundaries_are_paired_with_axes_in_order():
    axes = [AxisSpec("batch", 8, 8), AxisSpec("time", 4, 4), AxisSpec("chain", 2, 2)]
    first, last = AxisBoundary(fuse=sum), AxisBoundary(tap=ORDERED)
    assert axis_boundaries_by_name(axes, [first, None, last]) == {"batch": first, "chain": last}
    assert axis_boundaries_by_name([axis.name for axis in axes], (first, None, last)) == {"batch": first, "chain": last}
    assert axis_boundaries_by_name(axes, None) == {}
    assert axis_boundaries_by_name([], []) == {}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_boundary_for_each_axis_or_an_error(count):
    axes = [AxisSpec("batch", 8, 8), AxisSpec("time", 4, 4)]
    with pytest.raises(PlanTopologyError, match=f"2 axes \\('batch', 'time'\\) and {count} boundaries"):
        axis_boundaries_by_name(axes, [AxisBoundary()] * count)


def test_axes_of_the_same_name_are_refused():
    with pytest.raises(PlanTopologyError, match="axis 'batch' is given twice"):
        axis_boundaries_by_name(["batch", "batch"], [None, None])


@pytest.mark.parametrize(
    ("axes", "boundaries", "message"),
    [
        ("batch", [None] * 5, "axes must be a sequence"),
        ({"batch"}, [None], "axes must be a sequence, in order"),
        ([3], [None], r"axes\[0\] must have a name"),
        ([""], [None], r"axes\[0\] must have a name"),
        (["batch"], {"batch": None}, "boundaries must be a sequence"),
        (["batch"], [3], "the boundary of axis 'batch' must be an AxisBoundary or None; found int"),
    ],
)
def test_axes_and_boundaries_of_the_wrong_kind_are_refused(axes, boundaries, message):
    with pytest.raises(TypeError, match=message):
        axis_boundaries_by_name(axes, boundaries)
