import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.sparse import SparseConfig, SparsePolicy, prune_structured, sparsify_model

KEY = jax.random.key(0)
keys = jax.random.split(KEY, 12)


def kept_by_numpy(rows, count, order=2):
    """The `count` rows of largest norm, ties to the lower index."""
    norms = np.linalg.norm(np.asarray(rows).reshape(len(rows), -1), ord=order, axis=1)
    return sorted(sorted(range(len(norms)), key=lambda i: (-norms[i], i))[:count])


def zero_reads(model, where, removed, *, block=1):
    """The dense model whose layer at `where` reads nothing from the removed units, each `block` inputs wide."""
    columns = [unit * block + i for unit in removed for i in range(block)]
    return eqx.tree_at(where, model, replace_fn=lambda w: w.at[:, np.array(columns, int)].set(0))


def removed(group):
    return sorted(set(range(group.before)) - set(group.kept))


def test_mlp_weights_are_the_kept_rows_and_the_matching_columns():
    model = eqx.nn.MLP(5, 3, 8, 2, key=KEY)
    smaller, report = prune_structured(model, fraction=0.5)
    first, second, last = (np.asarray(layer.weight) for layer in model.layers)
    one, two = kept_by_numpy(first, 4), kept_by_numpy(second, 4)
    np.testing.assert_array_equal(smaller.layers[0].weight, first[one])
    np.testing.assert_array_equal(smaller.layers[0].bias, np.asarray(model.layers[0].bias)[one])
    np.testing.assert_array_equal(smaller.layers[1].weight, second[two][:, one])
    np.testing.assert_array_equal(smaller.layers[2].weight, last[:, two])
    assert [list(group.kept) for group in report.groups] == [one, two]
    assert (report.parameters_before, report.parameters_after) == (147, 4 * 6 + 4 * 5 + 3 * 5)
    assert type(smaller) is eqx.nn.MLP
    assert (smaller.in_size, smaller.width_size, smaller.out_size) == (5, 4, 3)
    assert [(layer.in_features, layer.out_features) for layer in smaller.layers] == [(5, 4), (4, 4), (4, 3)]


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    fraction=st.sampled_from([0.2, 0.5, 0.9]),
    activation=st.sampled_from(["sigmoid", "gelu"]),
)
def test_outputs_are_those_of_the_model_that_reads_nothing_from_the_removed_units(seed, fraction, activation):
    # Neither activation is zero where a unit's bias is: removing a unit is not the same as zeroing its weights.
    model = eqx.nn.MLP(4, 2, 10, 2, activation=getattr(jax.nn, activation), key=jax.random.key(seed))
    smaller, report = prune_structured(model, fraction=fraction)
    expected = model
    for at, group in enumerate(report.groups):
        assert len(group.kept) == 10 - round(fraction * 10)
        expected = zero_reads(expected, lambda m, at=at: m.layers[at + 1].weight, removed(group))
    x = jax.random.normal(jax.random.key(seed), (4,))
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("criterion", ["l1", "l2", "callable"])
def test_criterion_decides_which_units_stay_and_ties_go_to_the_lower_index(criterion):
    rows = jnp.array([[2.0, 2.0], [0.0, 3.5], [3.5, 0.0], [0.1, 0.1]])
    model = eqx.nn.MLP(2, 1, 4, 1, key=KEY)
    model = eqx.tree_at(lambda m: m.layers[0].weight, model, rows)
    chosen = (lambda weights: -weights[:, 0]) if criterion == "callable" else criterion
    smaller, report = prune_structured(model, keep=2, criterion=chosen)
    # l1: 4, 3.5, 3.5, 0.2; l2: 2.83, 3.5, 3.5, 0.14; -first column: -2, 0, -3.5, -0.1
    expected = {"l1": (0, 1), "l2": (1, 2), "callable": (1, 3)}[criterion]
    assert report.groups[0].kept == expected
    np.testing.assert_array_equal(smaller.layers[0].weight, rows[jnp.array(expected)])


class ConvNet(eqx.Module):
    stem: eqx.nn.Conv2d
    branch: eqx.nn.Conv2d
    narrow: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.stem = eqx.nn.Conv2d(2, 6, 3, padding=1, key=keys[0])
        self.branch = eqx.nn.Conv2d(6, 6, 3, padding=1, key=keys[1])
        self.narrow = eqx.nn.Conv2d(6, 4, 1, key=keys[2])
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.head = eqx.nn.Linear(4 * 2 * 2, 3, key=keys[3])
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        h = jax.nn.sigmoid(self.stem(x))
        h = h + jax.nn.gelu(self.branch(h))  # the residual ties the channels of stem and branch
        h = self.pool(self.narrow(self.dropout(h, key=key)))
        return self.head(h.reshape(-1))


def test_residual_channels_go_together_and_flattened_channels_take_their_positions():
    model = ConvNet()
    smaller, report = prune_structured(model, fraction=0.5, sample=jnp.ones((2, 4, 4)))
    tied, narrow = report.groups
    assert tied.produced_by == (".stem.weight", ".branch.weight")
    assert tied.consumed_by == (".branch.weight", ".narrow.weight")
    assert tied.kind == "channels"
    rows = np.concatenate([np.asarray(m.weight).reshape(6, -1) for m in (model.stem, model.branch)], axis=1)
    assert list(tied.kept) == kept_by_numpy(rows, 3)
    assert (narrow.produced_by, narrow.consumed_by) == ((".narrow.weight",), (".head.weight",))
    assert [layer.path for layer in report.left_alone] == [".head.weight"]

    expected = zero_reads(model, lambda m: m.branch.weight, removed(tied))
    expected = zero_reads(expected, lambda m: m.narrow.weight, removed(tied))
    expected = zero_reads(expected, lambda m: m.head.weight, removed(narrow), block=4)
    x = jax.random.normal(KEY, (2, 4, 4))
    np.testing.assert_allclose(
        eqx.nn.inference_mode(smaller)(x), eqx.nn.inference_mode(expected)(x), rtol=1e-4, atol=1e-5
    )
    assert (smaller.branch.in_channels, smaller.branch.out_channels, smaller.head.in_features) == (3, 3, 8)
    assert smaller.dropout.inference is False  # inference mode was for the trace only


def test_attention_loses_whole_heads():
    model = eqx.nn.MultiheadAttention(4, 12, qk_size=2, vo_size=5, use_query_bias=True, key=KEY)
    x = jax.random.normal(KEY, (3, 12))
    smaller, report = prune_structured(model, keep=1, sample=(x, x, x))
    (group,) = report.groups
    assert group.kind == "heads"
    assert (group.before, len(group.kept)) == (4, 1)
    rows = np.concatenate(
        [np.asarray(proj.weight).reshape(4, -1) for proj in (model.query_proj, model.key_proj, model.value_proj)],
        axis=1,
    )
    assert list(group.kept) == kept_by_numpy(rows, 1)
    assert (smaller.num_heads, smaller.qk_size, smaller.vo_size, smaller.output_size) == (1, 2, 5, 12)
    expected = zero_reads(model, lambda m: m.output_proj.weight, removed(group), block=5)
    np.testing.assert_allclose(smaller(x, x, x), expected(x, x, x), rtol=1e-4, atol=1e-5)


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self):
        self.norm = eqx.nn.LayerNorm(8)
        self.attention = eqx.nn.MultiheadAttention(4, 8, key=keys[4])
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=keys[5])

    def __call__(self, x):
        h = jax.vmap(self.norm)(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


def test_transformer_loses_heads_and_hidden_units_but_not_its_width():
    model = Block()
    x = jax.random.normal(KEY, (5, 8))
    smaller, report = prune_structured(model, fraction=0.5, sample=x)
    heads, hidden = report.groups
    assert (heads.kind, heads.before, len(heads.kept)) == ("heads", 4, 2)
    assert (hidden.kind, hidden.before, len(hidden.kept)) == ("units", 16, 8)
    assert {layer.path for layer in report.left_alone} == {".attention.output_proj.weight", ".mlp.layers[1].weight"}
    expected = zero_reads(model, lambda m: m.attention.output_proj.weight, removed(heads), block=2)
    expected = zero_reads(expected, lambda m: m.mlp.layers[1].weight, removed(hidden))
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


class Pair(eqx.Module):
    """Two layers with something in between."""

    first: eqx.Module
    last: eqx.Module
    between: object = eqx.field(static=True)

    def __call__(self, x):
        return self.last(self.between(self.first(x)))


def pair(between, *, read=8, first=None):
    return Pair(first or eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(read, 2, key=keys[1]), between)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (pair(lambda h: h - h.mean()), "reduced by reduce_sum"),
        (pair(jax.nn.softmax), "reduced by reduce_max"),
        (pair(lambda h: h / jnp.linalg.norm(h)), "reduced by reduce_sum"),
        (pair(lambda h: jnp.concatenate([h, h]), read=16), "concatenate takes or adds a part"),
        (pair(lambda h: h[:4], read=4), "slice takes or adds a part"),
        (pair(lambda h: jnp.split(h, 2)[0], read=4), "split takes or adds a part"),
        (pair(lambda h: h[::-1]), "rev takes or adds a part"),
        (pair(jnp.sort), "sort takes or adds a part"),
        (pair(jnp.cumsum), "cumsum takes or adds a part"),
        (pair(lambda h: jnp.pad(h, 1), read=10), "pad takes or adds a part"),
        (pair(lambda h: h + np.arange(8.0, dtype=np.float32)), "constant array of the code"),
        (pair(lambda h: h.reshape(2, 4).T.reshape(-1)), "reshaped to 2 x 4"),
        (pair(lambda h: h[jnp.argsort(h)]), "sort takes or adds a part"),
        (pair(lambda h: (h @ h) * jnp.ones(3), read=3), "neither of which is a weight"),
        (pair(lambda h: h / jnp.sqrt(h.shape[0])), "depends on its size"),
        (pair(lambda h: h + jnp.zeros(8)), "does not run without its units"),
        (pair(lambda h: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, h)), "passes through while"),
        (pair(lambda h: h[0] * jnp.ones(3), read=3), "slice takes|gather|no Linear"),
    ],
)
def test_units_whose_number_has_a_meaning_are_left_alone(model, reason):
    smaller, report = prune_structured(model, fraction=0.5, sample=jnp.ones(4))
    assert report.groups == ()
    assert report.left_alone[0].path == ".first.weight"
    assert report.left_alone[0].units == 8
    assert re.search(reason, report.left_alone[0].reason), report.left_alone[0].reason
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(smaller), jax.tree.leaves(model), strict=True))
    assert ".first.weight: 8 units; " in str(report)


def test_one_group_at_fault_does_not_hold_up_the_others():
    class Three(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear
        c: eqx.nn.Linear

        def __call__(self, x):
            return self.c(jax.nn.relu(self.b(self.a(x) * self.a(x).shape[0])))

    model = Three(*(eqx.nn.Linear(i, o, key=k) for i, o, k in [(3, 8, keys[0]), (8, 6, keys[1]), (6, 2, keys[2])]))
    smaller, report = prune_structured(model, fraction=0.5, sample=jnp.ones(3))
    assert [group.produced_by for group in report.groups] == [(".b.weight",)]
    assert smaller.b.weight.shape == (3, 8)
    assert {layer.path: layer.reason for layer in report.left_alone}[".a.weight"].endswith("with 4.0 where it had 8.0")


def test_products_of_units_lose_every_pair_with_a_removed_unit():
    model = pair(lambda h: jnp.outer(h, h).reshape(-1), read=64)
    x = jnp.array([1.0, -1.0, 2.0, 0.5])
    smaller, report = prune_structured(model, keep=3, sample=x)
    assert smaller.last.weight.shape == (2, 9)
    gone = removed(report.groups[0])
    pairs = [a * 8 + b for a in range(8) for b in range(8) if a in gone or b in gone]
    expected = zero_reads(model, lambda m: m.last.weight, pairs)
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "between",
    [
        jax.jit(jax.nn.gelu),
        jax.nn.relu,  # a custom_jvp
        jax.checkpoint(jnp.tanh),
        lambda h: jax.lax.cond(jnp.array(True), jnp.cos, jnp.sin, h),
        lambda h: jax.lax.scan(lambda c, _: (jnp.cos(c), None), h, None, length=3)[0],
        lambda h: jax.lax.map(jax.nn.sigmoid, h),
        lambda h: jnp.where(h > 0, h, 2.0) * jnp.ones_like(h),
        lambda h: h.T.reshape(-1).reshape(h.shape[::-1]).T,
    ],
)
def test_transformations_between_the_layers_are_followed(between):
    model = (eqx.nn.Linear(5, 4, key=keys[0]), eqx.nn.Linear(4, 2, key=keys[1]))

    def forward(model, x):
        return jax.vmap(model[1])(between(jax.vmap(model[0])(x)))

    x = jax.random.normal(KEY, (3, 5))
    smaller, report = prune_structured(model, keep=3, sample=x, forward=forward)
    (group,) = report.groups
    expected = zero_reads(model, lambda m: m[1].weight, removed(group))
    np.testing.assert_allclose(forward(smaller, x), forward(expected, x), rtol=1e-4, atol=1e-5)


def test_a_layer_called_twice_keeps_its_inputs_and_outputs_consistent():
    class Twice(eqx.Module):
        into: eqx.nn.Linear
        loop: eqx.nn.Linear
        out: eqx.nn.Linear

        def __call__(self, x):
            h = self.into(x)
            return self.out(self.loop(jnp.tanh(self.loop(jnp.tanh(h)))))

    model = Twice(*(eqx.nn.Linear(i, o, key=k) for i, o, k in [(3, 6, keys[0]), (6, 6, keys[1]), (6, 2, keys[2])]))
    x = jnp.array([1.0, -2.0, 3.0])
    smaller, report = prune_structured(model, keep=2, sample=x)
    (group,) = report.groups
    assert group.produced_by == (".into.weight", ".loop.weight")
    assert smaller.loop.weight.shape == (2, 2)
    expected = zero_reads(
        zero_reads(model, lambda m: m.loop.weight, removed(group)), lambda m: m.out.weight, removed(group)
    )
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


def test_shared_weights_stay_shared():
    class Net(eqx.Module):
        a: eqx.nn.Linear
        b: eqx.nn.Linear
        out: eqx.nn.Linear

        def __call__(self, x):
            return self.out(jax.nn.relu(self.a(x)) + jax.nn.relu(self.b(-x)))

    net = Net(
        *(eqx.nn.Linear(i, o, use_bias=False, key=k) for i, o, k in [(3, 6, keys[0]), (3, 6, keys[1]), (6, 2, keys[2])])
    )
    model = eqx.nn.Shared(net, where=lambda n: n.b.weight, get=lambda n: n.a.weight)
    x = jnp.array([1.0, -2.0, 3.0])
    smaller, report = prune_structured(model, keep=2, sample=x, forward=lambda m, x: m()(x))
    (group,) = report.groups
    assert smaller().a.weight.shape == smaller().b.weight.shape == (2, 3)
    expected = zero_reads(model, lambda m: m.pytree.out.weight, removed(group))
    np.testing.assert_allclose(smaller()(x), expected()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "first",
    [
        eqx.nn.ConvTranspose1d(4, 8, 1, key=keys[0]),
        eqx.nn.Conv1d(4, 8, 1, groups=2, key=keys[0]),
    ],
)
def test_other_layers_are_left_alone(first):
    model = Pair(first, eqx.nn.Conv1d(8, 2, 1, key=keys[1]), jax.nn.relu)
    smaller, report = prune_structured(model, fraction=0.5, sample=jnp.ones((4, 5)))
    assert report.groups == ()
    assert smaller.first.weight.shape == model.first.weight.shape


def test_recurrent_cells_are_left_alone():
    class Net(eqx.Module):
        cell: eqx.nn.GRUCell
        out: eqx.nn.Linear

        def __call__(self, xs):
            h, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(self.cell.hidden_size), xs)
            return self.out(h)

    net = Net(eqx.nn.GRUCell(3, 8, key=keys[0]), eqx.nn.Linear(8, 2, key=keys[1]))
    smaller, report = prune_structured(net, fraction=0.5, sample=jnp.ones((4, 3)))
    assert report.groups == ()
    assert smaller.out.weight.shape == (2, 8)


def test_gated_units_are_tied():
    class Gated(eqx.Module):
        gate: eqx.nn.Linear
        up: eqx.nn.Linear
        down: eqx.nn.Linear

        def __call__(self, x):
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

    model = Gated(*(eqx.nn.Linear(i, o, key=k) for i, o, k in [(3, 8, keys[0]), (3, 8, keys[1]), (8, 3, keys[2])]))
    x = jnp.array([1.0, -2.0, 3.0])
    smaller, report = prune_structured(model, fraction=0.5, sample=x)
    (group,) = report.groups
    assert group.produced_by == (".gate.weight", ".up.weight")
    expected = zero_reads(model, lambda m: m.down.weight, removed(group))
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


def test_an_ensemble_loses_the_same_units_in_every_member():
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(3, 2, 8, 1, key=key))(jax.random.split(KEY, 4))
    x = jnp.array([1.0, -2.0, 3.0])

    def forward(models, x):
        return eqx.filter_vmap(lambda m: m(x))(models)

    smaller, report = prune_structured(models, keep=3, sample=x, forward=forward)
    (group,) = report.groups
    first = np.asarray(models.layers[0].weight)
    assert list(group.kept) == kept_by_numpy(np.moveaxis(first, 1, 0), 3)
    np.testing.assert_array_equal(smaller.layers[0].weight, first[:, list(group.kept)])
    expected = eqx.tree_at(
        lambda m: m.layers[1].weight, models, replace_fn=lambda w: w.at[:, :, np.array(removed(group))].set(0)
    )
    np.testing.assert_allclose(forward(smaller, x), forward(expected, x), rtol=1e-4, atol=1e-5)


def test_the_size_of_a_head_stays_where_another_layer_is_tied_to_it():
    class Net(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        shift: eqx.nn.Linear

        def __call__(self, x):
            shift = jax.vmap(self.shift)(x)[:, None, :]
            return self.attention(x, x, x, process_heads=lambda q, k, v: (q, k, v + shift))

    net = Net(eqx.nn.MultiheadAttention(4, 12, key=keys[0]), eqx.nn.Linear(12, 3, key=keys[1]))
    x = jax.random.normal(KEY, (5, 12))
    smaller, report = prune_structured(net, fraction=0.5, sample=x)
    (group,) = report.groups
    assert group.kind == "heads"
    assert {layer.path: layer.reason for layer in report.left_alone}[".shift.weight"].startswith(
        "it is the size of a head"
    )
    assert (smaller.attention.num_heads, smaller.attention.vo_size) == (2, 3)
    expected = zero_reads(net, lambda m: m.attention.output_proj.weight, removed(group), block=3)
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


def test_prelu_of_an_mlp_ties_its_layers_through_its_slopes():
    model = eqx.nn.MLP(4, 2, 8, 2, activation=eqx.nn.PReLU(0.3), key=KEY)
    smaller, report = prune_structured(model, fraction=0.5)
    (group,) = report.groups
    assert smaller.activation.negative_slope.shape == (2, 4)
    expected = zero_reads(model, lambda m: m.layers[1].weight, removed(group))
    expected = zero_reads(expected, lambda m: m.layers[2].weight, removed(group))
    x = jnp.array([1.0, -1.0, 2.0, 0.5])
    np.testing.assert_allclose(smaller(x), expected(x), rtol=1e-4, atol=1e-5)


def test_the_smaller_model_trains_sparsifies_and_is_pruned_again():
    model = eqx.nn.Sequential(
        [eqx.nn.Linear(4, 16, key=keys[0]), eqx.nn.Lambda(jnp.tanh), eqx.nn.Linear(16, 2, key=keys[1])]
    )
    half, _ = prune_structured(model, fraction=0.5)
    quarter, report = prune_structured(half, fraction=0.5)
    assert (report.groups[0].before, quarter[0].out_features, quarter[2].in_features) == (8, 4, 4)
    grads = eqx.filter_jit(eqx.filter_grad(lambda m, x: jnp.sum(m(x))))(quarter, jnp.ones(4))
    assert grads[0].weight.shape == (4, 4)
    with pytest.warns(UserWarning, match="bias"):
        assert sparsify_model(quarter, SparsePolicy(SparseConfig(3)))[0].weight.nse == 3


def test_keep_that_is_not_smaller_changes_nothing_and_says_so():
    model = eqx.nn.MLP(4, 2, 8, 1, key=KEY)
    smaller, report = prune_structured(model, keep=8)
    assert report.groups == ()
    assert report.left_alone[0].reason == "8 units are no more than are to be kept"
    assert report.parameters_after == report.parameters_before
    assert smaller.layers[0].weight.shape == (8, 4)


def test_a_fraction_always_leaves_one_unit_and_counts_in_decimals():
    model = eqx.nn.MLP(4, 2, 10, 1, key=KEY)
    assert len(prune_structured(model, fraction=0.999)[1].groups[0].kept) == 1
    assert len(prune_structured(model, fraction=0.3)[1].groups[0].kept) == 7


def test_shapes_are_enough_of_a_sample():
    _, report = prune_structured(ConvNet(), keep=1, sample=jax.ShapeDtypeStruct((2, 4, 4), jnp.float32))
    assert [len(group.kept) for group in report.groups] == [1, 1]


def test_bad_arguments_are_refused():
    model = eqx.nn.MLP(4, 2, 8, 1, key=KEY)
    with pytest.raises(ValueError, match="exactly one of fraction"):
        prune_structured(model)
    with pytest.raises(ValueError, match="exactly one of fraction"):
        prune_structured(model, fraction=0.5, keep=3)
    for fraction in (0, 1, 1.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match="fraction is"):
            prune_structured(model, fraction=fraction)
    with pytest.raises(TypeError, match="fraction is True"):
        prune_structured(model, fraction=True)
    with pytest.raises(ValueError, match="keep is 0"):
        prune_structured(model, keep=0)
    with pytest.raises(TypeError, match=r"keep is 1\.5"):
        prune_structured(model, keep=1.5)
    with pytest.raises(TypeError, match="criterion is 'l3'"):
        prune_structured(model, keep=1, criterion="l3")
    with pytest.raises(ValueError, match=r"criterion returned float32\[4\] .* shape \(8,\)"):
        prune_structured(model, keep=1, criterion=lambda weights: weights.sum(axis=0))
    with pytest.raises(TypeError, match="forward is 3"):
        prune_structured(model, keep=1, sample=jnp.ones(4), forward=3)
    with pytest.raises(ValueError, match="sample is needed for a ConvNet"):
        prune_structured(ConvNet(), keep=1)
    with pytest.raises(ValueError, match="cannot be called with sample"):
        prune_structured(model, keep=1, sample=jnp.ones(5))
    with pytest.raises(RuntimeError, match="prune_structured was called inside a JAX trace"):
        eqx.filter_jit(lambda m: prune_structured(m, keep=1)[0])(model)
    sparse = sparsify_model({"w": jnp.ones((2, 2))}, SparsePolicy(SparseConfig(1)))
    with pytest.raises(ValueError, match="holds BCOO matrices"):
        prune_structured(sparse, keep=1, sample=jnp.ones(2))
    broken = eqx.tree_at(lambda m: m.layers[0].weight, model, jnp.full((8, 4), jnp.nan))
    with pytest.raises(ValueError, match=r"units of \.layers\[0\]\.weight contain NaN"):
        prune_structured(broken, keep=1)
