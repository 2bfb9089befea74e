"""check_independence: verdicts against what chunking by hand does."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from xtrax.inference import IndependenceReport, check_independence

N = 6


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def ints(*shape, below, seed=0):
    return np.random.default_rng(seed).integers(0, below, size=shape).astype(np.int32)


def in_chunks(fn, args, size):
    """`fn` of each chunk of axis 0 of all arguments, joined by numpy: what chunking means."""
    total = len(args[0])
    parts = [jax.tree.leaves(fn(*(a[i : i + size] for a in args))) for i in range(0, total, size)]
    return [np.concatenate([np.asarray(part[k]) for part in parts]) for k in range(len(parts[0]))]


def same(fn, args, size):
    fn = jax.jit(fn)
    whole = [np.asarray(leaf) for leaf in jax.tree.leaves(fn(*args))]
    parts = in_chunks(fn, args, size)
    return all(a.shape == b.shape and np.allclose(a, b, 1e-4, 1e-5) for a, b in zip(whole, parts, strict=True))


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def rnn(x):
    w = jnp.ones((3, 3)) * 0.1

    def step(h, xt):
        h = jnp.tanh(h @ w + xt)
        return h, h

    h, hs = lax.scan(step, jnp.zeros((x.shape[0], 3)), jnp.swapaxes(x, 0, 1))
    return h, jnp.swapaxes(hs, 0, 1)


def cross_entropy(logits, labels):
    return -jax.nn.log_softmax(logits)[jnp.arange(labels.shape[0]), labels]


def nwc(x):
    kernel = jnp.arange(3 * 3 * 4, dtype=jnp.float32).reshape(3, 3, 4)
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def merged(x):
    n, t, f = x.shape
    return jnp.tanh(x.reshape(n * t, f) @ jnp.ones((f, 5))).reshape(n, t, 5)


def two_views(x):
    doubled = jnp.tanh(jnp.concatenate([x, 2 * x]) @ jnp.ones((3, 2)))
    return doubled[: x.shape[0]] - doubled[x.shape[0] :]


def loops(x):
    def body(i, carry):
        return carry.at[:, i % 3].add(jnp.sin(carry[:, 0]))

    return lax.fori_loop(0, 4, body, x)


def branches(x):
    return lax.cond(jnp.float32(3) > 2, lambda y: y * 2, lambda y: y[:, ::-1], x)


@jax.custom_vjp
def clipped(x):
    return jnp.clip(x, -1, 1)


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g,))


@jax.custom_vjp
def layer(w, b, x):
    return jnp.tanh(x @ w) + b


def layer_backward(saved, g):
    w, x = saved
    g_in = g * (1 - jnp.tanh(x @ w) ** 2)
    return 2 * (x.T @ g_in), g.sum(0), g_in @ w.T


layer.defvjp(lambda w, b, x: (layer(w, b, x), (w, x)), layer_backward)


def with_backward(backward):
    """The identity with a derivative of its own."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (backward(g),))
    return same


def clip_by_norm(g):
    return g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g)))


clip_norm, clip_values = with_backward(clip_by_norm), with_backward(lambda g: jnp.clip(g, -1, 1))
clip_rows = with_backward(lambda g: g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g, axis=1, keepdims=True))))
rounded = with_backward(lambda g: (g / 7).astype(jnp.int32).astype(jnp.float32))
halved, plus_one = with_backward(lambda g: -g / 2), with_backward(lambda g: g + 1)


@jax.custom_vjp
def bounded(x, w, limit):
    return x * w + limit


@jax.custom_vjp
def weighted(w, x):
    return x @ w


def by_number(saved, g):
    w, x = saved
    summed = x.T @ g
    return jnp.broadcast_to(summed, (len(x), *summed.shape)).sum(0), g @ w.T


weighted.defvjp(lambda w, x: (x @ w, (w, x)), by_number)
bounded.defvjp(lambda x, w, limit: (x * w, (x, w)), lambda saved, g: (g * saved[1], None, None))
W = np.arange(9, dtype=np.float32).reshape(3, 3)

# name: (function of weights and a batch, whether its gradients in chunks are those of the whole batch)
BACKWARD = {
    "a layer": (lambda w, x: layer(w, w[0], x), True),
    "a layer of one element under vmap": (lambda w, x: jax.vmap(lambda r: layer(w, w[0], r[None])[0])(x), True),
    "weights scaled": (lambda w, x: x @ halved(w), True),
    "weights without a gradient": (lambda w, x: bounded(x, w[0], 3.0), True),
    "each element clipped": (lambda w, x: clip_rows(x @ w), True),
    "each number clipped": (lambda w, x: clip_values(x @ w), True),
    "clipped under vmap": (lambda w, x: jax.vmap(clip_norm)(x @ w), True),
    "clipped in a loop over the batch": (lambda w, x: lax.map(lambda r: clip_norm(r @ w), x), True),
    "weights clipped by norm": (lambda w, x: x @ clip_norm(w), False),
    "weights clipped by value": (lambda w, x: x @ clip_values(w), False),
    "a constant added": (lambda w, x: x @ plus_one(w), False),
    "weights clipped in a jitted function": (lambda w, x: x @ jax.jit(clip_norm)(w), False),
    "weights clipped under vmap": (lambda w, x: jax.vmap(lambda r: r @ clip_norm(w))(x), False),
    "a sum times the number of elements": (lambda w, x: weighted(w, x), False),
    "gradients of few digits": (lambda w, x: x @ rounded(w), False),
    "the batch clipped by norm": (lambda w, x: clip_norm(x @ w), False),
}


@jax.custom_batching.custom_vmap
def lopsided(x):
    return x * 2


lopsided.def_vmap(lambda size, batched, x: (x * 2, True))


# name: (function of a batch, shapes of its arguments; a number is a shape's upper bound for integers)
INDEPENDENT = {
    "constant": (lambda x: jnp.zeros((x.shape[0], 2)), [(N, 3)]),
    "arithmetic": (lambda x: 3 * x**2 - jnp.exp(x) / (1 + x * x), [(N, 3)]),
    "mlp": (lambda x: jnp.tanh(x @ jnp.ones((3, 8))) @ jnp.ones((8, 2)) + jnp.ones(2), [(N, 3)]),
    "layer norm": (lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5), [(N, 3)]),
    "softmax of features": (lambda x: jax.nn.softmax(x, axis=1), [(N, 3)]),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=1), [(N, 3)]),
    "attention": (attention, [(N, 4, 2, 3), (N, 4, 2, 3), (N, 4, 2, 3)]),
    "jax attention": (lambda x: jax.nn.dot_product_attention(x, x, x), [(N, 4, 2, 3)]),
    "conv NWC": (nwc, [(N, 8, 3)]),
    "pool": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID"), [(N, 8, 3)]),
    "one hot": (lambda i: jax.nn.one_hot(i, 5), [(N, 5)]),
    "embedding": (lambda i: jnp.arange(12.0).reshape(4, 3)[i], [(N, 4)]),
    "embedding of sequences": (lambda i: jnp.take(jnp.arange(12.0).reshape(4, 3), i, axis=0), [(N, 6, 4)]),
    "take features": (lambda x: jnp.take(x, jnp.array([2, 0]), axis=1), [(N, 3)]),
    "take along axis": (lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis=1), axis=1), [(N, 3)]),
    "cross entropy": (cross_entropy, [(N, 5), (N, 5, None)]),
    "set by label": (lambda x, i: jnp.asarray(x).at[jnp.arange(x.shape[0]), i].set(9.0), [(N, 3), (N, 3, None)]),
    "add to a column": (lambda x: jnp.asarray(x).at[:, 1].add(x[:, 0]), [(N, 3)]),
    "stacked, unstacked, tiled, repeated": (
        lambda x: (jnp.stack(jnp.unstack(2 * x, axis=1), axis=0).T, jnp.tile(jnp.ones((1, 2)), (x.shape[0], 2)),
                   jnp.repeat(x, 2, axis=0).reshape(-1, 2, 3)),
        [(N, 3)],
    ),
    "features picked": (lambda x: jnp.stack([x[:, -1], x[:, 0]], axis=1), [(N, 3)]),
    "features reversed and rolled": (lambda x: jnp.roll(x[:, ::-1], 1, axis=1), [(N, 3)]),
    "cumsum of features": (lambda x: jnp.cumsum(x, axis=1), [(N, 3)]),
    "associative scan of features": (lambda x: lax.associative_scan(jnp.add, x, axis=1), [(N, 5)]),
    "sorted features": (lambda x: (jnp.sort(x, axis=1), jnp.argmax(x, axis=1), lax.top_k(x, 2)), [(N, 3)]),
    "median": (lambda x: jnp.median(x, axis=1), [(N, 5)]),
    "einsum outer": (lambda x, y: jnp.einsum("ni,nj->nij", x, y), [(N, 3), (N, 2)]),
    "einsum inner": (lambda x, y: jnp.einsum("ni,ni->n", x, y), [(N, 3), (N, 3)]),
    "einsum with a weight": (lambda x: jnp.einsum("nti,ij->ntj", x, jnp.ones((3, 2))), [(N, 4, 3)]),
    "einsum with the weight first": (lambda x: jnp.einsum("ij,nj->ni", jnp.ones((2, 3)), x), [(N, 3)]),
    "batched matmul": (lambda x, y: x @ y, [(N, 2, 3), (N, 3, 2)]),
    "merged and split": (merged, [(N, 4, 3)]),
    "flattened whole": (lambda x: (2 * x.reshape(-1)).reshape(-1, 3), [(N, 3)]),
    "two views joined": (two_views, [(N, 3)]),
    "rnn over time": (rnn, [(N, 4, 3)]),
    "scan over the batch": (lambda x: lax.scan(lambda c, y: (c, jnp.sin(y).sum()), 2.0, x)[1], [(N, 3)]),
    "lax.map": (lambda x: lax.map(lambda y: lax.fori_loop(0, 3, lambda i, c: c * y + i, y), x), [(N, 3)]),
    "fori with updates": (loops, [(N, 3)]),
    "cond on a shared predicate": (branches, [(N, 3)]),
    "custom derivatives": (lambda x: clipped(jax.nn.relu(x)), [(N, 3)]),
    "custom vmap": (lopsided, [(N, 3)]),
    "checkpoint": (jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), [(N, 3)]),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), [(N, 4)]),
    "linear solve": (lambda x: jnp.linalg.solve(x @ x.mT + 3 * jnp.eye(3), x), [(N, 3, 3)]),
    "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.mT + 3 * jnp.eye(3)), [(N, 3, 3)]),
    "svd, inverse, determinant": (
        lambda x: (jnp.linalg.svd(x, compute_uv=False), jnp.linalg.inv(x + 9 * jnp.eye(3)), jnp.linalg.det(x)),
        [(N, 3, 3)],
    ),
    "noise from a key for each element": (
        lambda s: jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.vmap(jax.random.key)(s)),
        [(N, 99)],
    ),
    "shared random weights": (lambda x: x @ jax.random.normal(jax.random.key(0), (3, 2)), [(N, 3)]),
    "gradient of a sum": (jax.grad(lambda x: jnp.sum(jnp.tanh(x @ jnp.ones((3, 2))) ** 2)), [(N, 3)]),
}  # fmt: skip

# name: (function, shapes, the operations that may be named)
DEPENDENT = {
    "centred": (lambda x: x - x.mean(0), [(N, 3)], "reduce_sum"),
    "batch norm": (lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), [(N, 3)], "reduce_sum"),
    "softmax over the batch": (lambda x: jax.nn.softmax(x, axis=0), [(N, 3)], "reduce_max"),
    "scaled by the largest": (lambda x: x / jnp.max(jnp.abs(x)), [(N, 3)], "reduce_max"),
    "sorted": (lambda x: jnp.sort(x, axis=0), [(N, 3)], "sort"),
    "cumsum": (lambda x: jnp.cumsum(x, axis=0), [(N, 3)], "cumsum"),
    "reversed": (lambda x: jnp.flip(x, 0), [(N, 3)], "rev"),
    "rolled": (lambda x: jnp.roll(x, 1, axis=0), [(N, 3)], "slice"),
    "differences": (lambda x: x - jnp.concatenate([x[:1], x[:-1]]), [(N, 3)], "slice"),
    "against the first": (lambda x: x - x[0], [(N, 3)], "slice"),
    "gram": (lambda x: x @ x.T @ x, [(N, 3)], "dot_general"),
    "projected": (lambda x: x @ (x.T @ x), [(N, 3)], "dot_general"),
    "attention over the batch": (lambda x: jax.nn.softmax(x @ jnp.ones((3, 3))) @ (x.T @ x), [(N, 3)], "dot_general"),
    "conv over the batch": (
        lambda x: jnp.convolve(x[:, 0], jnp.array([1.0, 2.0, 1.0]), mode="same"), [(N, 3)], "conv_general_dilated",
    ),
    "scan that carries": (lambda x: lax.scan(lambda c, y: (c + y, c), jnp.zeros(3), x)[1], [(N, 3)], "scan"),
    "scan that counts": (lambda x: lax.scan(lambda c, y: (c + 1, y * c), 0.0, x)[1], [(N, 3)], "scan"),
    "divided by the number": (lambda x: x / x.shape[0], [(N, 3)], "div"),
    "positions": (lambda x: x + jnp.arange(x.shape[0])[:, None], [(N, 3)], "convert_element_type"),
    "positions by numpy": (lambda x: x + np.arange(x.shape[0], dtype=np.float32)[:, None], [(N, 3)], "add"),
    "last row of a table": (lambda x: x + jnp.arange(30.0).reshape(10, 3)[x.shape[0] - 1], [(N, 3)], "slice"),
    "dropout with one key": (
        lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x, 0), [(N, 3)], "random_bits",
    ),
    "keys split for the batch": (
        lambda x: x + jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(jax.random.key(1), x.shape[0])),
        [(N, 3)], "random_split",
    ),
    "permuted": (lambda x: x[jnp.array([1, 0, 2, 3, 4, 5])[: x.shape[0]]], [(N, 3)], None),
    "histogram": (lambda i: jnp.zeros(4).at[i].add(1.0)[i], [(N, 4)], "scatter-add"),
    "fft over the batch": (lambda x: jnp.abs(jnp.fft.fft(x, axis=0)), [(N, 3)], "fft"),
    "predicate of the batch": (lambda x: lax.cond(x.sum() > 0, lambda y: y, lambda y: -y, x), [(N, 3)], "reduce_sum"),
    "loop until all are large": (
        lambda x: lax.while_loop(lambda c: jnp.any(c < 10), lambda c: c + 1.0, x), [(N, 3)], "reduce_or",
    ),
    "positions in few bits": (
        lambda x: x[jnp.arange(x.shape[0]).astype(bool).astype(jnp.int32), jnp.argmax(x, axis=1)], [(N, 3)], None,
    ),
    "transposed in place": (lambda x: x + x.T, [(N, N)], None),
    "fixed table": (lambda x: x + np.arange(N, dtype=np.float32)[:, None], [(N, 3)], None),
}  # fmt: skip


def arguments(shapes):
    """Floats, or integers where a shape says how many values there are: (n, ..., below) or (n, ..., below, None)."""
    return [ints(*s[:-2], below=s[-2]) if s[-1] is None else data(*s, seed=k) for k, s in enumerate(shapes)]


INTEGER = {"one hot", "embedding", "embedding of sequences", "noise from a key for each element", "histogram"}


def case_of(table, name):
    fn, shapes, *rest = table[name]
    args = [ints(*shapes[0][:-1], below=shapes[0][-1])] if name in INTEGER else arguments(shapes)
    return fn, args, *rest


def abstract(args):
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_functions_are_proven_so_from_their_shapes(name):
    fn, args = case_of(INDEPENDENT, name)
    report = check_independence(fn, abstract(args))
    assert (report.verdict, report.method) == ("independent", "jaxpr"), str(report)
    assert set(jax.tree.leaves(report.out_axes)) == {0}
    assert same(fn, args, 3)  # and they are


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_functions_are_refuted_and_the_operation_is_named(name):
    fn, args, operation = case_of(DEPENDENT, name)
    report = check_independence(fn, abstract(args))
    assert report.verdict == "dependent", str(report)
    if operation is not None:
        assert report.operation == operation
        assert report.source is not None
        assert "test_independence.py:" in str(report.source)
        assert operation in str(report)
    if name not in ("permuted", "fixed table", "transposed in place"):  # these cannot be chunked at all
        assert not same(fn, args, 2)  # and they are


# Functions of one element: whatever they are, jax.vmap makes a function with independent elements.
OF_ONE = {
    "polynomial": lambda x: 3 * x**3 - x,
    "softmax": jax.nn.softmax,
    "gram": lambda x: jnp.outer(x, x) @ jnp.outer(x, x).T,
    "sorted": lambda x: jnp.sort(x)[::-1],
    "indexed by itself": lambda x: x[jnp.argmax(x)],
    "updated at an index": lambda x: x.at[jnp.argmin(x)].set(5.0),
    "dynamic slices": lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (jnp.argmax(x),), (2,)), (0,)),
    "while of its own length": lambda x: lax.while_loop(lambda c: jnp.sum(c) < 30, lambda c: c + jnp.abs(x) + 0.5, x),
    "while over while": lambda x: lax.while_loop(
        lambda c: c[0] < 3,
        lambda c: (c[0] + 1, lax.while_loop(lambda d: d.sum() < 9.0 * c[0], lambda d: jnp.abs(d) + 1, c[1])),
        (0, x),
    )[1],
    "cond": lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "switch": lambda x: lax.switch(jnp.argmax(x), [jnp.sin, jnp.cos, jnp.tanh], x),
    "scan": lambda x: lax.scan(lambda c, y: (c * y, c + y), 1.0, x),
    "associative scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "fori": lambda x: lax.fori_loop(0, 5, lambda i, c: c.at[i % 3].add(x[i % 3]), x),
    "position of features": lambda x: x * jnp.arange(3),
    "histogram": lambda x: jnp.histogram(x, bins=4, range=(-2, 2))[0],
    "searchsorted": lambda x: jnp.searchsorted(jnp.sort(x), x),
    "gradient": jax.grad(lambda x: jnp.prod(jnp.sin(x))),
    "hessian": jax.hessian(lambda x: jnp.sum(x**4) + x[0] * x[1]),
    "inverse": lambda x: jnp.linalg.inv(jnp.outer(x, x) + 3 * jnp.eye(3)),
    "eigenvalues": lambda x: jnp.linalg.eigvalsh(jnp.outer(x, x) + jnp.diag(x)),
    "convolution": lambda x: jnp.convolve(x, jnp.array([1.0, 2.0]), mode="same"),
    "convolution with itself": lambda x: lax.conv_general_dilated(x[None, None], x[None, None, :2], (1,), "VALID")[0],
    "key of its own": lambda x: jax.random.normal(jax.random.fold_in(jax.random.key(0), x[0].astype(int)), (2,)),
    "inner vmap": lambda x: jax.vmap(lambda a: jax.vmap(lambda b: a * b)(x))(x),
    "inner map": lambda x: lax.map(lambda y: jnp.sin(y) * x.sum(), x),
    "nothing of it": lambda x: jnp.float32(2),
    "interpolation": lambda x: jnp.interp(x, jnp.arange(5.0), jnp.arange(5.0) ** 2),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE)
def test_whatever_is_vmapped_is_independent(name):
    fn = jax.vmap(OF_ONE[name])
    report = check_independence(fn, jax.ShapeDtypeStruct((N, 3), jnp.float32))
    assert (report.verdict, report.method) == ("independent", "jaxpr"), str(report)
    assert same(fn, [data(N, 3)], 3)


def nhwc(x, kernel):
    return lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]


def of_key(fn):
    return lambda k: fn(jax.random.wrap_key_data(k))


KERNEL = (3, 3, 3, 4)

# More functions of one element, of which only the programs are looked at: (function, shape and type of one element).
TRACED_ONLY = {
    "gradient of a kernel": (lambda x: jax.grad(lambda w: jnp.sum(nhwc(x, w) ** 2))(jnp.ones(KERNEL)), (5, 5, 3)),
    "gradient of an image": (jax.grad(lambda x: jnp.sum(nhwc(x, jnp.ones(KERNEL)) ** 2)), (5, 5, 3)),
    "kernel made of the element": (lambda x: nhwc(jnp.ones((5, 5, 3)), x), KERNEL),
    "image and kernel": (lambda x: nhwc(x[..., 0], x), KERNEL),
    "max pool": (eqx.nn.MaxPool2d(2, 2), (3, 6, 6)),
    "gradient of a max pool": (jax.grad(lambda x: eqx.nn.MaxPool2d(2, 2)(x).sum()), (3, 6, 6)),
    "special functions": (lambda x: jax.scipy.special.gammainc(x, x) + jax.scipy.special.betainc(x, x, x), (5,)),
    "tridiagonal solve": (lambda x: lax.linalg.tridiagonal_solve(x, x, x, x[:, None]), (5,)),
    "conjugate gradients": (lambda x: jax.scipy.sparse.linalg.cg(lambda v: (2 + x) * v, x)[0], (5,)),
    "root": (
        lambda x: lax.custom_root(
            lambda y: y**2 - x, x, lambda f, y: lax.fori_loop(0, 5, lambda i, y: y - f(y) / (2 * y), y),
            lambda g, y: y / g(1.0),
        ),
        (),
    ),
    "reduction by a function": (
        lambda x: lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)), (5,),
    ),
    "eigh": (lambda x: jnp.linalg.eigh(x @ x.T), (3, 3)),
    "qr": (jnp.linalg.qr, (4, 3)),
    "matrix exponential": (jax.scipy.linalg.expm, (3, 3)),
    "segments": (lambda x: jax.ops.segment_sum(x, jnp.array([0, 1, 0]), 2), (3,)),
    "unique": (lambda x: jnp.unique(x, size=3), (5,)),
    "nonzero": (lambda x: jnp.nonzero(x > 0, size=3), (5,)),
    "rolled by itself": (lambda x: jnp.roll(x, jnp.argmax(x)), (5,)),
    "approximate top k": (lambda x: lax.approx_max_k(x, 2), (5,)),
    "scan with checkpoints, differentiated": (
        jax.grad(lambda x: lax.scan(jax.checkpoint(lambda c, t: (jnp.tanh(c + t), c)), 0.0, x)[0]), (5,),
    ),
    "jacobian": (jax.jacrev(lambda x: jnp.tanh(jnp.outer(x, x)).sum(0)), (3,)),
    "choice": (of_key(lambda k: jax.random.choice(k, 5, (2,), replace=False)), None),
    "permutation": (of_key(lambda k: jax.random.permutation(k, 5)), None),
    "gamma": (of_key(lambda k: jax.random.gamma(k, 2.0, (3,))), None),
    "poisson": (of_key(lambda k: jax.random.poisson(k, 2.0, (3,))), None),
}  # fmt: skip


@pytest.mark.parametrize("name", TRACED_ONLY)
def test_programs_of_vmapped_functions_are_followed(name):
    fn, shape = TRACED_ONLY[name]
    x = jax.ShapeDtypeStruct((N, 2), jnp.uint32) if shape is None else jax.ShapeDtypeStruct((N, *shape), jnp.float32)
    report = check_independence(jax.vmap(fn), x)
    assert report.verdict == "independent", str(report)


STEPS = {
    "tanh": jnp.tanh,
    "mix features": lambda x: x @ jnp.arange(16.0).reshape(4, 4) / 10,
    "softmax": lambda x: jax.nn.softmax(x, axis=1),
    "flat and back": lambda x: (x.reshape(-1) + 1).reshape(-1, 4),
    "twice and half": lambda x: jnp.concatenate([x, -x])[x.shape[0] :],
    "transposed and back": lambda x: jnp.cumsum(x.T, axis=0).T,
    "sorted features": lambda x: jnp.sort(x, axis=1),
    "own column": lambda x: x.at[jnp.arange(x.shape[0]), jnp.argmax(x, axis=1)].mul(0.5),
    "looped": lambda x: lax.map(lambda y: y * y.sum(), x),
    "while": jax.vmap(lambda y: lax.while_loop(lambda c: c.sum() < 4, lambda c: jnp.abs(c) + 0.3, y)),
    "time scan": lambda x: lax.scan(lambda c, y: (c + y, c * y), jnp.zeros(x.shape[0]), x.T)[1].T,
    "split and joined": lambda x: jnp.concatenate(jnp.split(x, 2, axis=1)[::-1], axis=1),
    "centred": lambda x: x - x.mean(0),
    "rolled": lambda x: jnp.roll(x, 1, axis=0),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "numbered": lambda x: x * jnp.arange(x.shape[0])[:, None],
    "interleaved": lambda x: x.reshape(4, -1).T,
    "paired": lambda x: jnp.stack([x, x], axis=1).reshape(2, -1, 4)[0],
    "accumulated": lambda x: lax.scan(lambda c, y: (c + y, c + y), jnp.zeros(4), x)[1],
    "counted": lambda x: x * x.shape[0],
    "shared noise": lambda x: x + jax.random.normal(jax.random.key(3), (4,)),
    "noise": lambda x: x + jax.random.normal(jax.random.key(3), x.shape),
}


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    size=st.sampled_from([2, 4]),
    axis=st.sampled_from([0, 1]),
)
def test_what_is_called_independent_gives_the_same_in_chunks(steps, size, axis):
    @jax.jit
    def fn(x):
        x = jnp.moveaxis(x, axis, 0)
        for step in steps:
            x = STEPS[step](x)
        return x

    x = np.moveaxis(data(N, 4), 0, axis)
    report = check_independence(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), axis)
    if report.verdict == "independent":
        assert report.out_axes == 0
        rows = np.moveaxis(x, axis, 0)
        parts = [fn(jnp.moveaxis(rows[i : i + size], 0, axis)) for i in range(0, N, size)]
        np.testing.assert_allclose(np.concatenate(parts), fn(x), rtol=1e-4, atol=1e-5)
    bad = {"centred", "rolled", "sorted", "numbered", "interleaved", "paired", "accumulated", "counted", "noise"}
    assert report.verdict == "independent" or bad & set(steps)


@st.composite
def rearrangements(draw):
    """Steps that move, merge, split, double and halve dimensions; each a function of the array alone."""
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["permute", "reshape", "double", "halve", "reverse", "sum", "contract"]))
        steps.append((kind, draw(st.integers(0, 3)), draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.booleans())))
    return steps


def rearranged(steps, x):
    for kind, axis, factor, last in steps:
        axis = axis % x.ndim
        if kind == "permute":
            x = jnp.moveaxis(x, axis, -1 if last else 0)
        elif kind == "reshape":
            x = x.reshape((-1, factor) if last else (factor, -1))
        elif kind == "double":
            x = jnp.concatenate([x, -x], axis=axis)
        elif kind == "halve":
            x = jnp.split(x, 2, axis=axis)[int(last)]
        elif kind == "reverse":
            x = jnp.flip(x, axis)
        elif kind == "sum":
            x = x.sum(axis, keepdims=True)
        else:
            x = jnp.einsum("...i,ij->...j", x, jnp.arange(1.0, x.shape[-1] * 2 + 1).reshape(-1, 2) / 10)
    return x


@settings(max_examples=25, deadline=None)
@given(steps=rearrangements(), size=st.sampled_from([2, 3]))
def test_rearranged_axes_are_followed_or_refused(steps, size):
    x = data(4, 2, 3)
    try:
        whole = np.asarray(rearranged(steps, x))
        report = check_independence(lambda x: rearranged(steps, x), jax.ShapeDtypeStruct(x.shape, x.dtype))
    except (TypeError, ValueError):  # a shape that cannot be had
        return
    if report.verdict != "independent":
        return
    if report.out_axes is None:
        np.testing.assert_array_equal(rearranged(steps, x + 1), whole)
        return
    parts = [np.asarray(rearranged(steps, x[i : i + size])) for i in range(0, 4, size)]
    np.testing.assert_allclose(np.concatenate(parts, axis=report.out_axes), whole, rtol=1e-5, atol=1e-6)


LAYERS = {
    "MLP": (lambda key: eqx.nn.MLP(3, 2, 8, 2, key=key), (3,)),
    "LayerNorm": (lambda key: eqx.nn.LayerNorm(3), (3,)),
    "GroupNorm": (lambda key: eqx.nn.GroupNorm(1, 3), (3, 8)),
    "Conv1d": (lambda key: eqx.nn.Conv1d(3, 4, 3, key=key), (3, 8)),
    "depthwise Conv1d": (lambda key: eqx.nn.Conv1d(3, 3, 3, groups=3, key=key), (3, 8)),
    "ConvTranspose1d": (lambda key: eqx.nn.ConvTranspose1d(3, 4, 3, key=key), (3, 8)),
    "MultiheadAttention": (lambda key: lambda x: eqx.nn.MultiheadAttention(2, 4, key=key)(x, x, x), (5, 4)),
    "GRUCell": (lambda key: lambda x: eqx.nn.GRUCell(3, 3, key=key)(x, x), (3,)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_equinox_layers_under_vmap_are_independent(name):
    make, shape = LAYERS[name]
    x = jax.ShapeDtypeStruct((N, *shape), jnp.float32)
    report = check_independence(lambda x: jax.vmap(make(jax.random.key(0)))(x), x)
    assert report.verdict == "independent", str(report)


def test_a_module_of_a_batch_is_dependent_where_its_layers_are_mixed():
    def attention_over_rows(x):
        return eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0))(x, x, x)

    report = check_independence(attention_over_rows, jax.ShapeDtypeStruct((N, 4), jnp.float32))
    assert (report.verdict, report.operation) == ("dependent", "dot_general")


@pytest.mark.parametrize("shared", ["argument", "constant"])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_of_custom_vjp_are_followed(name, shared):
    fn, same = BACKWARD[name]
    x = 3 * data(N, 3)
    if shared == "argument":
        report = check_independence(fn, (jax.ShapeDtypeStruct(W.shape, W.dtype), x), axis=(None, 0))
    else:
        report = check_independence(lambda x: fn(jnp.asarray(W), x), x)
    assert report.verdict == ("independent" if same else "undecided"), str(report)
    if not same:
        assert report.operation == "custom_vjp_call"
        assert "backward pass" in report.reason
        assert "test_independence.py:" in str(report.source)

    def gradient(w, x):
        return jax.grad(lambda w, x: jnp.sum(fn(w, x) ** 2), (0, 1))(w, x)

    # The verdict against what chunks give: a sum for the weights, rows for the batch.
    whole = jax.jit(gradient)(W, x)
    parts = [jax.jit(gradient)(W, x[i : i + 2]) for i in range(0, N, 2)]
    by_parts = (sum(part[0] for part in parts), np.concatenate([part[1] for part in parts]))
    close = [np.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(whole, by_parts, strict=True)]
    assert all(close) == same


@pytest.mark.parametrize(("axis", "verdict"), [(0, "undecided"), (1, "independent")])
def test_tangents_of_custom_jvp_are_followed(axis, verdict):
    @jax.custom_jvp
    def doubled(x):
        return 2 * x

    @doubled.defjvp
    def _(primals, tangents):
        return doubled(*primals), 2 * tangents[0] - tangents[0].mean(axis, keepdims=True)

    report = check_independence(lambda x: jnp.sin(doubled(x)), abstract([data(N, 3)])[0])
    assert (report.verdict, report.operation) == (verdict, "custom_jvp_call" if verdict == "undecided" else None)
    assert ("custom_jvp" in report.reason) == (verdict == "undecided")


@pytest.mark.parametrize(
    "name", ["relu", "relu6", "silu", "gelu", "softplus", "log_sigmoid", "elu", "celu", "selu", "mish", "softmax",
             "log_softmax", "standardize", "logsumexp", "squareplus", "hard_swish"]
)  # fmt: skip
def test_activations_are_independent(name):
    activation = getattr(jax.nn, name)
    weights = jnp.ones(3)
    fn = lambda x: activation(x, axis=1) if name == "logsumexp" else activation(x * activation(weights))  # noqa: E731
    assert check_independence(fn, data(N, 3)).verdict == "independent"


def test_a_function_whose_backward_pass_fails_has_values_alone():
    def broken(g):
        raise NotImplementedError("no derivative")

    assert check_independence(with_backward(broken), data(N, 3)).verdict == "independent"


@pytest.mark.parametrize("fn", [lambda x: (x**2).mean(), lambda x: {"loss": (x**2).mean()}])
def test_a_result_that_is_one_number(fn):
    report = check_independence(fn, data(N, 3))
    assert (report.verdict, report.operation) == ("dependent", "reduce_sum")
    assert check_independence(lambda x: jnp.float32(2), data(N, 3)).out_axes is None


def test_the_output_that_is_dependent_is_named_and_the_others_do_not_hide_it():
    x = jax.ShapeDtypeStruct((N, 3), jnp.float32)
    report = check_independence(lambda x: {"logits": x * 2, "loss": x.mean(), "n": 1.0}, x)
    assert (report.verdict, report.output) == ("dependent", "out['loss']")
    assert report.out_axes is None


def test_axes_of_inputs_and_outputs():
    w, x, y = (jax.ShapeDtypeStruct(s, jnp.float32) for s in [(3, 4), (5, N, 3), (2, N)])

    def fn(w, both):
        return {"at 0": jnp.moveaxis(both["x"], 1, 0) @ w, "at 1": both["x"] + 1, "shared": w.sum(), "y": both["y"].T}

    report = check_independence(fn, (w, {"x": x, "y": y}), (None, {"x": 1, "y": -1}))
    assert report.verdict == "independent", str(report)
    assert report.out_axes == {"at 0": 0, "at 1": 1, "shared": None, "y": 0}
    crossed = check_independence(fn, (w, {"x": x, "y": y}), (0, None))
    assert crossed.verdict == "dependent"  # the contraction is over what is now the batch


@pytest.mark.parametrize("size", [0, 1, 2, 97, 1_000_000])
def test_any_batch_size_is_decided(size):
    x = jax.ShapeDtypeStruct((size, 3), jnp.float32)
    assert check_independence(lambda x: x @ jnp.ones((3, 2)), x).verdict == "independent"
    assert check_independence(lambda x: x - x.mean(0), x).verdict == "dependent"


def test_a_size_that_other_axes_share_is_not_taken_for_the_batch():
    x = jax.ShapeDtypeStruct((N, N, N), jnp.float32)
    assert check_independence(lambda x: x.sum(2) + jnp.arange(N), x).verdict == "independent"
    assert check_independence(lambda x: x.sum(1), x, 1).verdict == "dependent"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8, jnp.bool_, jnp.complex64])
def test_dtypes(dtype):
    x = jax.ShapeDtypeStruct((N, 3), dtype)
    assert (
        check_independence(lambda x: jnp.where(x == 0, x, ~x if dtype == jnp.bool_ else -x), x).verdict == "independent"
    )
    assert check_independence(lambda x: x | x[:1] if dtype == jnp.bool_ else x + x[:1], x).verdict == "dependent"


def test_typed_keys_are_a_batch():
    keys = jax.random.split(jax.random.key(0), N)
    assert check_independence(jax.vmap(lambda k: jax.random.uniform(k, (2,))), keys).verdict == "independent"
    assert check_independence(jax.vmap(lambda k: jax.random.split(k)[0]), keys).verdict == "independent"


def test_inside_a_trace_and_with_closed_over_tracers():
    verdicts = []

    @jax.jit
    def traced(w, x):
        verdicts.append(check_independence(lambda x: x @ w, x).verdict)
        verdicts.append(check_independence(lambda x: w.T @ x, x.T, 1).verdict)
        verdicts.append(check_independence(lambda x: x - x.sum(0) * w.sum(), x).verdict)
        return x

    traced(jnp.ones((3, 3)), jnp.ones((N, 3)))
    assert verdicts == ["independent", "independent", "dependent"]


# What the rules cannot follow.


def host(fn, x):
    return jax.pure_callback(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def test_a_host_callback_is_undecided_and_named():
    report = check_independence(lambda x: host(np.sin, x), jax.ShapeDtypeStruct((N, 3), jnp.float32))
    assert (report.verdict, report.method, report.operation) == ("undecided", "jaxpr", "pure_callback")
    assert report.source is not None
    assert "test_independence.py:" in report.source


def test_a_perturbation_refutes_what_the_jaxpr_leaves_open():
    report = check_independence(lambda x: host(lambda v: v - v.mean(0), x), data(N, 3))
    assert (report.verdict, report.method) == ("dependent", "perturbation")
    assert report.output == "out"
    assert "moved" in report.reason


def test_a_perturbation_proves_nothing():
    report = check_independence(lambda x: host(np.sin, x), data(N, 3))
    assert report.verdict == "undecided"
    assert "does not prove" in report.reason


def test_nans_that_stay_where_they_are_do_not_count_as_moved():
    x = data(N, 3)
    x[2] = np.nan
    assert check_independence(lambda x: host(np.sin, x), x).verdict == "undecided"


def test_a_dependence_below_rounding_is_found_by_its_gradient():
    def fn(x):
        scanned = lax.associative_scan(jnp.add, x)  # other operations at every size: not followed
        return 1e6 + x + 1e-12 * scanned

    report = check_independence(fn, data(N, 3))
    assert (report.verdict, report.method) == ("dependent", "perturbation")
    assert "gradient" in report.reason


def test_integers_are_exchanged_for_ones_that_occur():
    report = check_independence(lambda i: host(lambda v: v - v.max(), i), ints(N, below=5))
    assert (report.verdict, report.method) == ("dependent", "perturbation")


def test_what_differs_from_call_to_call_is_not_blamed_on_the_perturbation():
    rng = np.random.default_rng(0)
    report = check_independence(lambda x: host(lambda v: v + rng.normal(size=v.shape).astype(v.dtype), x), data(N, 3))
    assert report.verdict == "undecided"


def test_effects_are_undecided_unless_elements_are_dependent_anyway():
    def printed(x):
        jax.debug.print("{}", x.shape[1])
        return x * 2

    x = jax.ShapeDtypeStruct((N, 3), jnp.float32)
    report = check_independence(printed, x)
    assert (report.verdict, report.operation) == ("undecided", "effects")
    assert check_independence(lambda x: printed(x) - x.mean(0), x).verdict == "dependent"


def test_several_rows_for_each_element_are_no_batch_of_results():
    report = check_independence(lambda x: x.reshape(-1), jax.ShapeDtypeStruct((N, 3), jnp.float32))
    assert report.verdict == "undecided"
    assert "reshape" in report.reason


def test_a_program_that_depends_on_the_size_is_not_called_independent():
    def fn(x):
        return jnp.sin(x) if x.shape[0] % 2 else jnp.cos(x)

    report = check_independence(fn, jax.ShapeDtypeStruct((N, 3), jnp.float32))
    assert (report.verdict, report.operation) == ("undecided", "cos")


def test_a_function_that_takes_one_size_only_says_what_it_raised():
    def fn(x):
        if x.shape[0] != N:
            raise RuntimeError("six, please")
        return x

    report = check_independence(fn, jax.ShapeDtypeStruct((N, 3), jnp.float32))
    assert report.verdict == "dependent"
    assert "RuntimeError: six, please" in report.reason
    assert report.source is not None
    assert report.source.startswith("test_independence.py:")


def test_what_the_function_raises_of_its_own_inputs_reaches_the_caller():
    with pytest.raises(TypeError):
        check_independence(lambda x: x @ jnp.ones((4, 2)), jax.ShapeDtypeStruct((N, 3), jnp.float32))


@pytest.mark.parametrize(
    ("inputs", "axis", "error", "words"),
    [
        (jax.ShapeDtypeStruct((4, 3), np.float32), 2, ValueError, ["inputs", "(4, 3)", "no axis 2"]),
        (jax.ShapeDtypeStruct((4, 3), np.float32), -3, ValueError, ["no axis -3"]),
        (jax.ShapeDtypeStruct((4, 3), np.float32), True, TypeError, ["True", "int or None"]),
        (jax.ShapeDtypeStruct((4, 3), np.float32), 0.0, TypeError, ["0.0", "int or None"]),
        (jax.ShapeDtypeStruct((4, 3), np.float32), None, ValueError, ["no input has a batch"]),
        ((np.ones((4, 3)), np.ones((5, 3))), 0, ValueError, ["inputs[0]", "4", "inputs[1]", "5", "None"]),
        ((np.ones((4, 3)), np.ones(3)), (0,), ValueError, ["axis", "prefix"]),
        ({"a": np.ones((4, 3)), "b": "text"}, 0, TypeError, ["inputs['b']", "str", "None"]),
        ((), 0, ValueError, ["no input has a batch"]),
        (np.float32(1), 0, ValueError, ["no axis 0"]),
    ],
)
def test_bad_inputs_are_refused_before_anything_is_traced(inputs, axis, error, words):
    def fn(*args):
        raise AssertionError("traced")

    with pytest.raises(error) as caught:
        check_independence(fn, inputs, axis)
    for word in words:
        assert word in str(caught.value)


def test_what_is_no_function_is_refused():
    number: Any = 3
    with pytest.raises(TypeError, match="fn must be callable"):
        check_independence(number, np.ones((4, 3)))


def test_the_report_reads_as_a_sentence():
    report = IndependenceReport("dependent", "jaxpr", "it sorts", "sort", "model.py:3 (f)", "out[0]")
    assert str(report) == "dependent in out[0] by sort at model.py:3 (f): it sorts"
