"""Fewer weights at inference, and only where it helps."""

from xtrax.sparse._config import SparseConfig
from xtrax.sparse._manager import SparseMaskManager
from xtrax.sparse._masks import apply_masks, global_masks, nm_mask, nm_masks
from xtrax.sparse._policy import SparsePolicy
from xtrax.sparse._version import __version__
from xtrax.sparse.inference import make_sparse_forward_fn, sparse_filter_jit, sparsify_model

__all__ = [
    "SparseConfig",
    "SparseMaskManager",
    "SparsePolicy",
    "__version__",
    "apply_masks",
    "global_masks",
    "make_sparse_forward_fn",
    "nm_mask",
    "nm_masks",
    "sparse_filter_jit",
    "sparsify_model",
]
