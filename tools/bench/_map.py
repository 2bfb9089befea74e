"""The network and the maps of the rows map-even, map-odd, map-edge and map-grad."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xtrax.tiling import tiled_vmap

BATCH = 1024
RTOL, ATOL = 1e-4, 1e-5  # XLA sums in another order for another size

Map = Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]


def operands(n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`n` rows of 64, and the weights of 64 -> 256 -> 64."""
    keys = jax.random.split(jax.random.key(0), 3)
    return (
        jax.random.normal(keys[0], (n, 64)),
        jax.random.normal(keys[1], (64, 256)) / 8,
        jax.random.normal(keys[2], (256, 64)) / 16,
    )


def _network(mapped: Map, x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return mapped(lambda row: jnp.tanh(row @ w1) @ w2, x)


def network(mapped: Map) -> Callable[..., jax.Array]:
    """The network over all rows, compiled."""
    return jax.jit(functools.partial(_network, mapped))


def gradient(mapped: Map, loss: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """The gradient of a loss of the network by rows and weights, compiled."""
    return jax.jit(jax.grad(lambda *args: loss(_network(mapped, *args)), (0, 1, 2)))


def tiled(fn: Callable[[jax.Array], jax.Array], x: jax.Array, **options: Any) -> jax.Array:
    """`tiled_vmap` in chunks of 1,024."""
    return tiled_vmap(fn, batch_size=BATCH, **options)(x)


def lax_map(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`jax.lax.map` in chunks of 1,024."""
    return jax.lax.map(fn, x, batch_size=BATCH)


def vmap(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`jax.vmap`, all at once."""
    return jax.vmap(fn)(x)


def lax_map_checkpoint(fn: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`jax.lax.map` over a function that saves nothing but its argument."""
    return lax_map(jax.checkpoint(fn), x)


tiled_remat = functools.partial(tiled, remat=True)
