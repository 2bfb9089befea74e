"""Units that meet values which depend on their position are left alone, and what is pruned computes the same."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xtrax.sparse import prune_structured

keys = jax.random.split(jax.random.key(3), 3)


def pruned_and_expected(between):
    """Outputs of the pruned model, and of the dense one whose second layer reads nothing from the removed units."""
    model = (eqx.nn.Linear(4, 8, key=keys[0]), eqx.nn.Linear(8, 2, key=keys[1]))

    def forward(model, x):
        return model[1](between(model[0](x)))

    x = jax.random.normal(keys[2], (4,))
    smaller, report = prune_structured(model, fraction=0.5, sample=x, forward=forward)
    expected = model
    for group in report.groups:
        gone = np.array(sorted(set(range(8)) - set(group.kept)))
        expected = eqx.tree_at(lambda m: m[1].weight, expected, replace_fn=lambda w, c=gone: w.at[:, c].set(0))
    return forward(smaller, x), forward(expected, x), report


def batched(function):
    return lambda h: function(h[None, None])[0, 0]


ALONG = {
    "arange": (lambda h: h * jnp.arange(h.shape[0]), "iota"),
    "arange compared": (lambda h: h * (jnp.arange(h.size) < 4), "iota"),
    "where arange": (lambda h: jnp.where(jnp.arange(h.size) % 2 == 0, jnp.sin(h), jnp.cos(h)), "iota"),
    "one_hot": (lambda h: h * jax.nn.one_hot(6, h.size), "iota"),
    "iota": (lambda h: h * jnp.sin(lax.iota(jnp.float32, h.size)), "iota"),
    "iota of two axes": (lambda h: h * lax.broadcasted_iota(jnp.float32, (3, h.size), 1)[1], "iota"),
    "iota reshaped": (lambda h: h * jnp.arange(h.size * 2).reshape(h.size, 2)[:, 0], "iota"),
    "iota in jit": (jax.jit(lambda h: h * jnp.arange(h.size)), "iota"),
    "iota in cond": (lambda h: lax.cond(h[0] > 9, jnp.sin, lambda h: h * jnp.arange(h.size), h), "."),
    "iota in scan": (lambda h: lax.scan(lambda c, _: (c + jnp.arange(c.size), None), h, None, length=3)[0], "iota"),
    "iota in vmap": (lambda h: jax.vmap(lambda a, i: a * i)(h, jnp.arange(h.size)), "iota"),
    "linspace": (lambda h: h * jnp.linspace(0, 1, h.size), "."),
    "eye": (lambda h: h * jnp.eye(h.size)[2], "."),
    "tril": (lambda h: (jnp.tril(jnp.ones((h.size, h.size))) * h).sum(1), "."),
    "rev": (jnp.flip, "rev takes"),
    "cumsum": (jnp.cumsum, "cumsum takes"),
    "cumprod": (jnp.cumprod, "cumprod takes"),
    "cummax": (lax.cummax, "cummax takes"),
    "cummin": (lax.cummin, "cummin takes"),
    "cumlogsumexp": (lax.cumlogsumexp, "cumlogsumexp takes"),
    "associative_scan": (lambda h: lax.associative_scan(jnp.add, h), "takes or adds"),
    "sort": (jnp.sort, "sort takes"),
    "argsort": (lambda h: jnp.argsort(h) * 1.0, "."),
    "argmax": (lambda h: h * jnp.argmax(h), "reduced by argmax"),
    "argmin": (lambda h: h * jnp.argmin(h), "reduced by argmin"),
    "top_k": (lambda h: lax.top_k(h, h.size)[0], "top_k"),
    "gather": (lambda h: h[jnp.array([7, 1, 2, 3, 4, 5, 6, 0])], "gather|iota|constant"),
    "take one": (lambda h: h * h[3], "."),
    "scatter": (lambda h: h.at[3].set(1.0), "scatter"),
    "dynamic_slice": (lambda h: h * lax.dynamic_slice(h, (2,), (1,)), "dynamic_slice takes"),
    "dynamic_update_slice": (lambda h: lax.dynamic_update_slice(h, jnp.ones(2), (1,)), "dynamic_update_slice"),
    "roll": (lambda h: jnp.roll(h, 1), "takes or adds|gather"),
    "roll by a value": (lambda h: jnp.roll(h, jnp.argmax(h)), "."),
    "concatenate": (lambda h: jnp.concatenate([h[4:], h[:4]]), "takes or adds"),
    "pad": (lambda h: jnp.pad(h, (1, 0))[:-1], "takes or adds"),
    "diff": (lambda h: jnp.diff(h, prepend=0.0), "takes or adds"),
    "conv": (lambda h: jnp.convolve(h, jnp.array([1.0, 2.0, 3.0]), mode="same"), "window|constant|takes|rev"),
    "conv of lax": (batched(lambda h: lax.conv(h, jnp.array([[[1.0, 2.0, 4.0]]]), (1,), "SAME")), "window slides"),
    "pooling": (
        batched(lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 1, 3), (1, 1, 1), "SAME")),
        "reduce_window",
    ),
    "fft": (lambda h: jnp.fft.fft(h).real, "fft"),
    "random": (lambda h: h * jax.random.normal(jax.random.key(0), h.shape), "."),
    "scan along": (lambda h: lax.scan(lambda c, a: (c + a, c), 0.0, h)[1], "axis of a scan"),
    # What depends on the size only, through a value that is not itself as long as the units.
    "sum of an iota": (lambda h: h * jnp.arange(h.size).sum(), "depends on its size"),
    "sum of ones": (lambda h: h / jnp.ones(h.size).sum(), "depends on its size"),
    "product of ones": (lambda h: h / (jnp.ones(h.size) @ jnp.ones(h.size)), "depends on its size"),
    "sum of an iota in while": (
        lambda h: h * lax.while_loop(lambda c: c < 1, lambda c: c + jnp.arange(h.size).sum(), 0),
        "depends on its size",
    ),
    "power": (lambda h: h**h.size, "depends on its size"),
    "number of steps": (lambda h: lax.fori_loop(0, h.size, lambda _, c: c * 1.5, h), "depends on its size"),
    "scalar array": (lambda h: h * jnp.array(h.size), "depends on its size"),
    "numpy values": (lambda h: h * jnp.asarray(np.array([h.size, 1.0], np.float32))[0], "depends on its size"),
}


@pytest.mark.parametrize("name", ALONG)
def test_units_whose_position_or_number_matters_are_left_alone_and_the_report_says_why(name):
    between, reason = ALONG[name]
    got, expected, report = pruned_and_expected(between)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    assert report.groups == ()
    (first,) = [layer for layer in report.left_alone if layer.path == "[0].weight"]
    assert re.search(reason, first.reason), first.reason


ACROSS = {
    "arange": lambda h: h * jnp.arange(3)[:, None],
    "iota": lambda h: h + lax.broadcasted_iota(jnp.float32, h.shape, 0),
    "one_hot": lambda h: h * jax.nn.one_hot(1, 3)[:, None],
    "flip": lambda h: jnp.flip(h, 0),
    "cumsum": lambda h: jnp.cumsum(h, 0),
    "cumprod": lambda h: jnp.cumprod(h, 0),
    "cummax": lambda h: lax.cummax(h, 0),
    "sort": lambda h: jnp.sort(h, 0),
    "roll": lambda h: jnp.roll(h, 1, 0),
    "concatenate": lambda h: jnp.concatenate([h[1:], h[:1]]),
    "slice": lambda h: h + h[1],
    "mean": lambda h: h - h.mean(0),
    "scan along": lambda h: lax.scan(lambda c, a: (c + a, c), jnp.zeros(h.shape[1]), h)[1],
    "ones": lambda h: h * jnp.ones(h.shape[1]),
}


@pytest.mark.parametrize("name", ACROSS)
def test_operations_along_another_axis_do_not_hinder_pruning(name):
    between = ACROSS[name]
    rows = jnp.arange(1.0, 4.0)[:, None]
    got, expected, report = pruned_and_expected(lambda h: between(h * jnp.sin(rows)).sum(0))
    assert [len(group.kept) for group in report.groups] == [4]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
