"""Sparse matrices in a model at inference."""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from xtrax.sparse._checks import check_callable, check_outside_trace
from xtrax.sparse._leaves import array_leaves, is_sparse
from xtrax.sparse._policy import SparsePolicy

__all__ = ["make_sparse_forward_fn", "sparse_filter_jit", "sparsify_model"]


def sparsify_model(model: Any, policy: SparsePolicy, leaf_filter: Callable[[Any], bool] = eqx.is_array) -> Any:
    """Replace the matrices of a model by BCOO matrices that hold their largest weights.

    Call it once, outside `jax.jit`. `equinox.nn.Linear` and all code that writes `weight @ x` works with the result;
    `jnp.dot(weight, x)` does not accept a BCOO matrix.

    A BCOO product is often slower than the dense one, on CPUs and GPUs alike, until very few weights are left:
    `choose_representation` measures it, and `prune_structured` makes models that are faster everywhere.

    Args:
        model: A pytree of dense arrays, an Equinox model for example.
        policy: How many weights each matrix keeps. With `SparsePolicy.for_model`, matrices without a budget stay dense.
        leaf_filter: `leaf -> bool`; leaves it refuses stay as they are, without a warning.

    Returns:
        The model with a `jax.experimental.sparse.BCOO` in place of each matrix. Selected leaves that are not
        2-D floating-point matrices multiplied by `@`, or do not fit the budget, stay dense (the latter only with
        `fallback_mode="dense_mask"`); one `UserWarning` lists them.

    Raises:
        RuntimeError: Called inside a JAX trace, as in `jax.jit`: it must be called before jit.
        TypeError: `policy` is not a `SparsePolicy`, or `leaf_filter` is not callable.
        ValueError: The model is sparse already, a weight is NaN, or, with `fallback_mode="error"`, a matrix does not
            fit the budget.

    >>> model = eqx.nn.Linear(8, 4, use_bias=False, key=jax.random.key(0))
    >>> sparsify_model(model, SparsePolicy.for_model(model, density=0.25)).weight
    BCOO(float32[4, 8], nse=8)
    """
    check_outside_trace("sparsify_model", "call it once, before jit, and pass the sparse model in", model)
    if not isinstance(policy, SparsePolicy):
        raise TypeError(f"policy is {policy!r} ({type(policy).__name__}); it must be a SparsePolicy")
    sparse: dict[str, Any] = {}
    dense: list[str] = []
    for leaf in array_leaves(model, leaf_filter):
        obstacle = leaf.obstacle
        if obstacle is None and policy.leaf_budgets is not None and leaf.path not in policy.leaf_budgets:
            obstacle = "the policy has no budget for it"
        if obstacle is None:
            own = policy.for_leaf(leaf.path)
            try:
                held = own.apply_mask(leaf.array, own.make_mask(leaf.array, step=0))
            except ValueError as error:
                raise ValueError(f"the leaf {leaf.path}: {error}") from error
            if is_sparse(held):
                sparse[leaf.path] = held
            else:
                obstacle = f"it has {leaf.array.size} elements, fewer than nse_budget = {own.config.nse_budget}"
        if obstacle is not None:
            dense.append(f"{leaf.path} ({obstacle})")
    if dense:
        warnings.warn(f"sparsify_model left {len(dense)} leaves dense: {', '.join(dense)}", stacklevel=2)
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: sparse.get(jax.tree_util.keystr(keys), leaf), model, is_leaf=is_sparse
    )


def make_sparse_forward_fn(fn: Callable[[Any, Any], Any], sparse_model: Any) -> Callable[[Any], Any]:
    """Compile a forward function of a fixed model.

    The model's arrays are passed to the compiled program, not written into it as constants, and its structure is
    taken apart once, so that a call costs what a `jax.jit` call costs.

    Args:
        fn: `fn(model, inputs) -> outputs`; pure. Inputs and outputs are pytrees of arrays.
        sparse_model: The model, as `sparsify_model` returns it. A dense one works too, for comparison.

    Returns:
        `forward(inputs) -> outputs`. It traces again only for inputs of another structure, shape or dtype.

    Raises:
        TypeError: `fn` is not callable.
        RuntimeError: Called inside a JAX trace; the returned function may be called in one.

    >>> from xtrax.sparse import SparseConfig
    >>> model = eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
    >>> sparse_model = sparsify_model(model, SparsePolicy(SparseConfig(nse_budget=2)))
    >>> forward = make_sparse_forward_fn(lambda model, x: jax.vmap(model)(x), sparse_model)
    >>> forward(jax.numpy.ones((5, 3))).shape
    (5, 2)
    """
    check_callable("fn", fn, "fn(model, inputs) -> outputs")
    check_outside_trace("make_sparse_forward_fn", "call it once, before jit", sparse_model)
    arrays, static = eqx.partition(sparse_model, eqx.is_array)

    @jax.jit
    def run(arrays: Any, inputs: Any) -> Any:
        return fn(eqx.combine(arrays, static), inputs)

    def forward(inputs: Any) -> Any:
        return run(arrays, inputs)

    return forward


def sparse_filter_jit(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`equinox.filter_jit` for functions that take sparse models.

    The values and indices of BCOO matrices are traced, their shapes are static. So a model sparsified anew by the
    same policy, with other weights or another mask, runs in the program already compiled.

    Args:
        fn: Function of any pytrees: arrays are traced, everything else is static.
        **options: Passed to `equinox.filter_jit` (`donate="all"`, for example).

    Returns:
        The compiled function, with the name, docstring and signature of `fn`.

    Raises:
        TypeError: `fn` is not callable.

    >>> from xtrax.sparse import SparseConfig
    >>> @sparse_filter_jit
    ... def forward(model, x):
    ...     return jax.vmap(model)(x)
    >>> model = eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
    >>> forward(sparsify_model(model, SparsePolicy(SparseConfig(nse_budget=2))), jax.numpy.ones((5, 3))).shape
    (5, 2)
    """
    check_callable("fn", fn, "a function of pytrees")
    return eqx.filter_jit(fn, **options)
