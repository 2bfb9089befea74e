"""Masks kept over a run of training steps."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from xtrax.sparse._checks import as_int, check_callable, check_outside_trace
from xtrax.sparse._leaves import matrices, paths_and_leaves
from xtrax.sparse._masks import apply_masks
from xtrax.sparse._policy import SparsePolicy

_apply = eqx.filter_jit(apply_masks)


class SparseMaskManager:
    """Keeps pruned weights at zero while a model trains, and renews the masks when the policy's schedule says so.

    A host-side object, for the Python loop around a compiled step: it holds the masks from one step to the next.
    Shapes and dtypes of the parameters never change, so neither the training step nor the optimiser's state does.

    Args:
        policy: Says how many weights of each leaf stay, and when masks are renewed.

    Raises:
        TypeError: `policy` is not a `SparsePolicy`.

    >>> from xtrax.sparse import SparseConfig
    >>> manager = SparseMaskManager(SparsePolicy(SparseConfig(nse_budget=1, update_schedule=10)))
    >>> manager.step({"w": jnp.array([[1.0, 2.0]])}, 0)
    {'w': Array([[0., 2.]], dtype=float32)}
    >>> manager.step({"w": jnp.array([[9.0, 2.0]])}, 1)  # the same mask until step 10
    {'w': Array([[0., 2.]], dtype=float32)}
    """

    def __init__(self, policy: SparsePolicy) -> None:
        """Start without masks; the first `step` makes them."""
        if not isinstance(policy, SparsePolicy):
            raise TypeError(f"policy is {policy!r} ({type(policy).__name__}); it must be a SparsePolicy")
        self._policy = policy
        self._masks: dict[str, jax.Array] = {}

    def step(self, params: Any, step: int, path_filter: Callable[[str], bool] | None = None) -> Any:
        """Mask the parameters; renew the masks first at the first call and at each step of the schedule.

        Args:
            params: Pytree of dense parameters, an Equinox model for example.
            step: Step counted from 0.
            path_filter: `path -> bool` chooses which floating-point leaves get a mask, of any rank, by their path as
                `jax.tree_util.keystr` writes it (`".layers[0].weight"`). `None`: the 2-D leaves that are multiplied
                by. It is asked only when masks are renewed. A policy over a whole model masks only leaves that have
                a budget.

        Returns:
            `params` with zeros where its masks are `False`.

        Raises:
            TypeError: `step` is not an int, or `path_filter` is not callable.
            ValueError: `step` is negative, no leaf is chosen, a weight is NaN when masks are renewed, or `params` lacks
                a masked leaf, or has it in another shape than when its mask was made.
            RuntimeError: Called inside a JAX trace, which could not keep the masks.
        """
        check_outside_trace(
            "SparseMaskManager.step", "it keeps masks on the host: call it after the compiled step", params
        )
        step = as_int("step", step, minimum=0)
        if path_filter is not None:
            check_callable("path_filter", path_filter, "leaf path -> bool")
        if self._policy.should_update(step) or not self._masks:
            self._masks = self._make_masks(params, step, path_filter)
        else:
            self._check_same_leaves(params)
        return _apply(params, self._masks)

    def current_masks(self) -> dict[str, jax.Array]:
        """The mask of each leaf by its path, as of the latest step; empty before the first."""
        return dict(self._masks)

    def _make_masks(self, params: Any, step: int, path_filter: Callable[[str], bool] | None) -> dict[str, jax.Array]:
        if path_filter is None:
            chosen = matrices(params, eqx.is_array)
        else:
            chosen = {
                path: leaf
                for path, leaf in paths_and_leaves(params)
                if eqx.is_inexact_array(leaf) and path_filter(path)
            }
        if self._policy.leaf_budgets is not None:
            chosen = {path: leaf for path, leaf in chosen.items() if path in self._policy.leaf_budgets}
        if not chosen:
            raise ValueError(
                "no floating-point leaf of params is chosen by path_filter and the policy's budgets; "
                f"the leaves are {[path for path, leaf in paths_and_leaves(params) if eqx.is_array(leaf)]}"
            )
        masks = {}
        for path, leaf in chosen.items():
            try:
                masks[path] = self._policy.for_leaf(path).make_mask(leaf, step)
            except ValueError as error:
                raise ValueError(f"the leaf {path}: {error}") from error
        return masks

    def _check_same_leaves(self, params: Any) -> None:
        leaves = dict(paths_and_leaves(params))
        for path, mask in self._masks.items():
            if path not in leaves or jnp.shape(leaves[path]) != mask.shape:
                found = f"has shape {jnp.shape(leaves[path])}" if path in leaves else "is missing"
                raise ValueError(
                    f"the leaf {path} {found}, but its mask has shape {mask.shape}; a manager serves one model: make a "
                    f"new SparseMaskManager for another"
                )
