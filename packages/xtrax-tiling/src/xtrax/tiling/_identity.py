"""Equality and hashing of dataclasses that hold arrays: by bytes, and by digest of the bytes."""

import dataclasses
import hashlib
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from xtrax.tiling._split import ARRAYS


def fields_key(instance: Any) -> tuple[Hashable, ...]:
    """A key that two instances share if they have one type and equal fields, arrays being compared bit by bit."""
    return (type(instance), *(_tree_key(getattr(instance, field.name)) for field in dataclasses.fields(instance)))


def _tree_key(tree: Any) -> Hashable:
    leaves, treedef = jax.tree.flatten(tree)
    return (treedef, tuple(_leaf_key(leaf) for leaf in leaves))


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, Tracer):
        return ("tracer", id(leaf))  # a tracer has no value yet: it is equal to itself alone
    if isinstance(leaf, ARRAYS):
        dtype = str(leaf.dtype)
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return (array.shape, dtype, hashlib.sha256(array.tobytes()).digest())
    return leaf
