"""What structured pruning gains."""

from collections.abc import Iterator

import equinox as eqx
import jax
import numpy as np

from tools.bench.harness import Line, Row, compare_times
from xtrax.sparse import make_sparse_forward_fn, prune_structured

_WIDTH, _BATCH = 1024, 256


def _measure() -> Iterator[Line]:
    # Half of the hidden units are dead and unread, so that both models compute the same; the dense one does not know.
    model = eqx.nn.MLP(_WIDTH, _WIDTH, _WIDTH, depth=2, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    for at in (0, 1):
        dead = rng.choice(_WIDTH, _WIDTH // 2, replace=False)
        model = eqx.tree_at(
            lambda m, at=at: (m.layers[at].weight, m.layers[at].bias, m.layers[at + 1].weight),
            model,
            (
                model.layers[at].weight.at[dead].set(0),
                jax.numpy.asarray(model.layers[at].bias).at[dead].set(0),
                model.layers[at + 1].weight.at[:, dead].set(0),
            ),
        )
    smaller, report = prune_structured(model, fraction=0.5)
    x = jax.random.normal(jax.random.key(1), (_BATCH, _WIDTH))

    def forward(model, x):
        return jax.vmap(model)(x)

    pruned, dense = make_sparse_forward_fn(forward, smaller), make_sparse_forward_fn(forward, model)
    times = compare_times(lambda: pruned(x), lambda: dense(x), rtol=1e-4, atol=1e-5)
    share = report.parameters_after / report.parameters_before
    yield Line("sparse", times.ratio, 0.6, detail=f"{times}; {share:.0%} of the parameters")


ROW = Row(
    "sparse",
    "structured pruning of half the hidden units of a 3-layer 1024-wide MLP, batch 256",
    "the dense model",
    _measure,
)
