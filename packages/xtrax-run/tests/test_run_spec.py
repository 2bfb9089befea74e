"""RunSpec, its subclasses, and the resolver protocol."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import xtrax.run
from xtrax.run import FeatureBatch, InputResolver, RunSpec, RuntimeBundle, derive_sink_spec
from xtrax.stages import AxisBoundary
from xtrax.tiling.plan import AxisSpec


class Domain(RunSpec):
    temperature: float
    table: jax.Array
    steps: int = 10


AXES = [AxisSpec("sample", 100, 10), AxisSpec("site", 4, 4)]


def test_defaults():
    spec = RunSpec(seed=3, axes=AXES)
    assert (spec.seed, spec.axes, spec.carry_specs, spec.boundaries, spec.run_id) == (3, AXES, [], None, None)
    assert RunSpec(seed=0, axes=[]).carry_specs is not RunSpec(seed=0, axes=[]).carry_specs


def test_fields_are_keyword_only():
    with pytest.raises(TypeError):
        RunSpec(3, AXES)


def test_a_subclass_adds_fields_with_and_without_defaults():
    spec = Domain(0.5, jnp.ones(3), seed=1, axes=AXES, boundaries=[None, AxisBoundary(fuse=jnp.sum)], run_id="r")
    assert (spec.temperature, spec.steps, spec.run_id) == (0.5, 10, "r")
    with pytest.raises(TypeError, match="temperature"):
        Domain(seed=1, axes=AXES)


def test_run_id_is_static_and_arrays_are_traced():
    spec = Domain(0.5, jnp.arange(3.0), seed=1, axes=AXES, run_id="r")
    assert "r" not in jax.tree.leaves(spec)
    assert jax.tree.structure(spec) != jax.tree.structure(
        eqx.tree_at(lambda s: s, spec, Domain(0.5, jnp.ones(3), seed=1, axes=AXES))
    )
    total = eqx.filter_jit(lambda s: s.table.sum() * s.temperature + len(s.axes))(spec)
    assert total == 3 * 0.5 + 2


def test_from_spec_returns_it_unchanged():
    spec = Domain(0.5, jnp.ones(3), seed=1, axes=AXES)
    assert Domain.from_spec(spec) is spec
    assert RunSpec.from_spec(spec) is spec
    with pytest.raises(TypeError, match="must be a Domain, not RunSpec"):
        Domain.from_spec(RunSpec(seed=1, axes=AXES))
    with pytest.raises(TypeError, match="dict"):
        RunSpec.from_spec({"seed": 1})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seed": 1.0}, TypeError, "seed"),
        ({"seed": True}, TypeError, "seed"),
        ({"seed": None}, TypeError, "seed"),
        ({"axes": "sample"}, TypeError, "axes"),
        ({"axes": AXES[0]}, TypeError, "axes"),
        ({"axes": ["sample"]}, TypeError, r"axes\[0\] must be an AxisSpec, not str"),
        ({"axes": [AXES[0], AXES[0]]}, ValueError, r"axes\[1\] repeats the name 'sample'"),
        ({"carry_specs": None}, TypeError, "carry_specs"),
        ({"boundaries": [None]}, ValueError, "boundaries has 1 entries for 2 axes"),
        ({"boundaries": [None, len]}, TypeError, r"boundaries\[1\] must be an AxisBoundary or None"),
        ({"boundaries": []}, ValueError, "boundaries has 0"),
        ({"boundaries": {"sample": None}}, TypeError, "boundaries"),
        ({"run_id": ""}, ValueError, "run_id"),
        ({"run_id": "a/b"}, ValueError, "run_id"),
        ({"run_id": 3}, TypeError, "run_id"),
    ],
    ids=str,
)
def test_bad_fields_are_refused_in_subclasses_too(arguments, error, text):
    good = {"seed": 1, "axes": AXES}
    with pytest.raises(error, match=text):
        RunSpec(**{**good, **arguments})
    with pytest.raises(error, match=text):
        Domain(**{"temperature": 1.0, "table": None, **good, **arguments})


def test_a_function_and_a_class_can_be_resolvers():
    class Reader:
        def __call__(self, spec, bundle):
            return FeatureBatch({"x": bundle.model * spec.seed})

    bundle = RuntimeBundle(iterator=jax.vmap, model=jnp.ones(2))
    assert isinstance(Reader(), InputResolver)
    assert not isinstance(3, InputResolver)
    batch = Reader()(RunSpec(seed=3, axes=[]), bundle)
    assert batch["x"].tolist() == [3.0, 3.0]
    assert [leaf.shape for leaf in jax.tree.leaves(bundle.model)] == [(2,)]


def test_the_sink_of_a_run_has_the_runs_id(tmp_path):
    run = RunSpec(seed=0, axes=[], run_id="run-a")
    assert derive_sink_spec(run, output_dir=tmp_path).run_id == "run-a"
    assert derive_sink_spec(run, output_dir=tmp_path, run_id="run-a", format="jsonl").format == "jsonl"
    with pytest.raises(ValueError, match=r"'run-b'.*'run-a'"):
        derive_sink_spec(run, output_dir=tmp_path, run_id="run-b")
    anonymous = RunSpec(seed=0, axes=[])
    assert derive_sink_spec(anonymous, output_dir=tmp_path, run_id="run-b").run_id == "run-b"
    new = derive_sink_spec(anonymous, output_dir=tmp_path)
    assert new.format == "zarr"
    assert new.run_id.startswith("run-")
    assert new.run_id != derive_sink_spec(anonymous, output_dir=tmp_path).run_id
    with pytest.raises(TypeError, match="RunSpec"):
        derive_sink_spec({"seed": 0}, output_dir=tmp_path)
    with pytest.raises(ValueError, match="format"):
        derive_sink_spec(run, output_dir=tmp_path, format="csv")


def test_every_public_name_resolves_and_an_unknown_one_does_not():
    assert {name: getattr(xtrax.run, name) for name in xtrax.run.__all__}.keys() <= set(dir(xtrax.run))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = xtrax.run.no_such_name
