"""Fewer weights at inference, and only where it helps."""

from xtrax.sparse._choose import RepresentationReport, Timing, choose_representation
from xtrax.sparse._config import SparseConfig
from xtrax.sparse._manager import SparseMaskManager
from xtrax.sparse._masks import apply_masks, global_masks, nm_mask, nm_masks
from xtrax.sparse._policy import SparsePolicy
from xtrax.sparse._prune import prune_structured
from xtrax.sparse._report import LeftAlone, PrunedGroup, PruneReport
from xtrax.sparse._version import __version__
from xtrax.sparse.inference import make_sparse_forward_fn, sparse_filter_jit, sparsify_model

__all__ = [
    "LeftAlone",
    "PruneReport",
    "PrunedGroup",
    "RepresentationReport",
    "SparseConfig",
    "SparseMaskManager",
    "SparsePolicy",
    "Timing",
    "__version__",
    "apply_masks",
    "choose_representation",
    "global_masks",
    "make_sparse_forward_fn",
    "nm_mask",
    "nm_masks",
    "prune_structured",
    "sparse_filter_jit",
    "sparsify_model",
]
