import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.sparse import BCOO

from xtrax.sparse import choose_representation, prune_structured
from xtrax.sparse._choose import _best


def batched(model, x):
    return jax.vmap(model)(x)


MODEL = eqx.nn.MLP(6, 3, 20, 2, key=jax.random.key(0))
X = jax.random.normal(jax.random.key(1), (8, 6))


def test_report_times_each_form_and_recommends_the_fastest_or_dense():
    report = choose_representation(MODEL, X, density=0.25, forward=batched, repeats=3)
    by_form = {timing.form: timing for timing in report.timings}
    assert list(by_form) == ["dense", "masked", "bcoo", "structured"]
    assert all(timing.seconds > 0 for timing in report.timings)
    assert by_form["dense"].ratio == 1
    for timing in report.timings:
        assert timing.ratio == pytest.approx(timing.seconds / by_form["dense"].seconds)
    threshold = 0.95 * min(by_form["dense"].seconds, by_form["masked"].seconds)
    faster = [t for t in report.timings if t.seconds < threshold and t.form != "masked"]
    assert report.best == (min(faster, key=lambda t: t.seconds).form if faster else "dense")
    assert report.device.startswith(jax.default_backend())


@pytest.mark.parametrize(
    ("seconds", "best"),
    [
        ({"dense": 1.0, "masked": 0.8, "bcoo": 2.0, "structured": 0.9}, "dense"),  # within the noise
        ({"dense": 1.0, "masked": 1.0, "bcoo": 2.0, "structured": 0.9}, "structured"),
        ({"dense": 1.0, "masked": 1.1, "bcoo": 0.2, "structured": 0.9}, "bcoo"),
        ({"dense": 1.0, "masked": 0.1, "bcoo": 2.0}, "dense"),  # masked is dense, whatever the clock says
    ],
)
def test_a_form_must_beat_dense_and_the_noise(seconds, best):
    assert _best(seconds) == best


def test_memory_and_change_of_each_form_are_those_of_numpy():
    report = choose_representation(MODEL, X, density=0.25, forward=batched, repeats=3)
    by_form = {timing.form: timing for timing in report.timings}
    biases = (20 + 20 + 3) * 4
    weights = (6 * 20 + 20 * 20 + 20 * 3) * 4
    assert by_form["dense"].bytes == by_form["masked"].bytes == weights + biases
    assert by_form["bcoo"].bytes == weights // 4 * 3 + biases  # a value and two int32 indices for each of a quarter
    assert by_form["structured"].bytes == (6 * 5 + 5 * 5 + 5 * 3 + 5 + 5 + 3) * 4

    masked = MODEL
    for at in range(3):
        weight = np.array(MODEL.layers[at].weight)
        order = np.argsort(-np.abs(weight).reshape(-1), kind="stable")
        weight.reshape(-1)[order[weight.size // 4 :]] = 0
        masked = eqx.tree_at(lambda m, at=at: m.layers[at].weight, masked, jnp.asarray(weight))
    dense_out, masked_out = np.asarray(batched(MODEL, X)), np.asarray(batched(masked, X))
    expected = np.linalg.norm(masked_out - dense_out) / np.linalg.norm(dense_out)
    assert by_form["dense"].change == 0
    assert by_form["masked"].change == pytest.approx(expected, rel=1e-4)
    assert by_form["bcoo"].change == pytest.approx(expected, rel=1e-4)


def test_report_s_model_is_in_the_recommended_form():
    report = choose_representation(MODEL, X, density=0.5, forward=batched, repeats=3)
    expected = {
        "dense": MODEL,
        "structured": prune_structured(MODEL, fraction=0.5)[0],
    }
    if report.best == "bcoo":
        assert isinstance(report.model.layers[0].weight, BCOO)
    else:
        shapes = [layer.weight.shape for layer in expected[report.best].layers]
        assert [layer.weight.shape for layer in report.model.layers] == shapes


def test_table_names_each_form_and_gives_advice():
    text = str(choose_representation(MODEL, X, forward=batched, repeats=3))
    for form in ("dense", "masked", "bcoo", "structured"):
        assert f"\n{form} " in text
    assert "\nuse " in text
    assert "is the noise of this measurement" in text


def test_model_without_removable_units_has_no_structured_form_and_says_so():
    report = choose_representation(eqx.nn.Linear(6, 3, key=jax.random.key(0)), X[0], repeats=3)
    assert [timing.form for timing in report.timings] == ["dense", "masked", "bcoo"]
    assert report.prune_report is None
    assert "no units that prune_structured can remove" in str(report)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="density is 1"):
        choose_representation(MODEL, X, density=1, forward=batched)
    with pytest.raises(ValueError, match="repeats is 2"):
        choose_representation(MODEL, X, forward=batched, repeats=2)
    with pytest.raises(TypeError, match="repeats is True"):
        choose_representation(MODEL, X, forward=batched, repeats=True)
    with pytest.raises(TypeError, match="forward is 3"):
        choose_representation(MODEL, X, forward=3)
    with pytest.raises(ValueError, match="cannot be called with sample"):
        choose_representation(MODEL, X)  # a batch, without vmap
    with pytest.raises(ValueError, match="no 2-D floating-point leaf"):
        choose_representation({"b": jnp.ones(3)}, X, forward=lambda m, x: x)
    with pytest.raises(RuntimeError, match="choose_representation was called inside a JAX trace"):
        jax.jit(lambda x: choose_representation(MODEL, x, forward=batched).timings[0].seconds)(X)
