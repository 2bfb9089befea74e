"""What a Jacobian in chunks costs and saves."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from tools.bench.harness import Line, Row, compare_times, temp_bytes
from xtrax.tiling import tiled_jacfwd, tiled_jacrev

_SIZES = (2048, 2048, 2048, 2048)
_CHUNK = 64


def _measure() -> Iterator[Line]:
    keys = jax.random.split(jax.random.key(0), len(_SIZES))
    x = jax.random.normal(keys[0], _SIZES[:1])
    weights = [
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys[1:], itertools.pairwise(_SIZES), strict=True)
    ]

    def jitted(jacobian: Callable[..., Any], **settings: Any) -> Any:
        def of_network(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
            def network(x: jax.Array) -> jax.Array:
                for weight in weights[:-1]:
                    x = jnp.tanh(x @ weight)
                return x @ weights[-1]

            return jacobian(network, **settings)(x)

        return jax.jit(of_network)

    peers = {"jacfwd": jitted(jax.jacfwd), "jacrev": jitted(jax.jacrev)}
    between = compare_times(
        lambda: peers["jacfwd"](x, weights), lambda: peers["jacrev"](x, weights), repeats=7, rtol=1e-3, atol=1e-5
    )
    faster = "jacfwd" if between.ratio < 1 else "jacrev"
    smallest = min(temp_bytes(peer, x, weights) for peer in peers.values())
    for name, tiled in (("jacrev", tiled_jacrev), ("jacfwd", tiled_jacfwd)):
        work = jitted(tiled, batch_size=_CHUNK)
        times = compare_times(
            lambda work=work: work(x, weights), lambda: peers[faster](x, weights), rtol=1e-3, atol=1e-5
        )  # fmt: skip
        yield Line(f"jac/{name}-time", times.ratio, 1.3, detail=f"{times}; the faster peer is {faster}")
        temp = temp_bytes(work, x, weights)
        yield Line(f"jac/{name}-temp", temp / smallest, 0.1, detail=f"{temp} against {smallest} bytes")


ROW = Row(
    "jac",
    "the Jacobian (2,048 x 2,048) of a 3-layer network in chunks of 64, by tiled_jacrev and by tiled_jacfwd",
    "the better of jax.jacfwd and jax.jacrev",
    _measure,
)
