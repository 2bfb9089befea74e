"""Which weights stay, and in what form they are held."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.experimental.sparse import BCOO

from xtrax.sparse._checks import as_fraction, as_int, check_weights, is_mask
from xtrax.sparse._config import FallbackMode, SparseConfig
from xtrax.sparse._leaves import matrices
from xtrax.sparse._masks import global_masks, largest


@dataclass(frozen=True)
class SparsePolicy:
    """Magnitude pruning to a fixed number of weights per matrix.

    Because the number of stored elements never changes, neither do shapes: a program compiled for one mask runs with
    the next one.

    Args:
        config: The budget, the schedule and the fallback.
        leaf_budgets: For a policy over a whole model: the budget of each leaf by its path, which then takes the place
            of `config.nse_budget`. `for_model` makes such a policy.

    Raises:
        TypeError: `config` is not a `SparseConfig`, or a budget is not an int.
        ValueError: A budget is below 1.

    >>> policy = SparsePolicy(SparseConfig(nse_budget=2))
    >>> weights = jnp.array([[1.0, -3.0], [2.0, 0.5]])
    >>> mask = policy.make_mask(weights, step=0)
    >>> mask.tolist()
    [[False, True], [True, False]]
    >>> policy.apply_mask(weights, mask)
    BCOO(float32[2, 2], nse=2)
    """

    config: SparseConfig
    leaf_budgets: Mapping[str, int] | None = field(default=None, hash=False, kw_only=True)

    def __post_init__(self) -> None:
        """Refuse bad settings; keep a copy of the budgets."""
        if not isinstance(self.config, SparseConfig):
            raise TypeError(f"config is {self.config!r} ({type(self.config).__name__}); it must be a SparseConfig")
        if self.leaf_budgets is not None:
            if not isinstance(self.leaf_budgets, Mapping):
                raise TypeError(f"leaf_budgets is {self.leaf_budgets!r}; it must be a mapping of leaf path to int")
            budgets = {path: as_int(f"the budget of {path}", n, minimum=1) for path, n in self.leaf_budgets.items()}
            object.__setattr__(self, "leaf_budgets", budgets)

    @classmethod
    def for_model(
        cls,
        model: Any,
        density: float = 0.1,
        *,
        scope: Literal["leaf", "model"] = "leaf",
        leaf_filter: Callable[[Any], bool] = eqx.is_array,
        update_schedule: int | Callable[[int], bool] = 1,
        fallback_mode: FallbackMode = "dense_mask",
    ) -> "SparsePolicy":
        """A policy with a budget for each matrix of a model.

        Args:
            model: A pytree. Its matrices are the 2-D floating-point leaves that are multiplied by (not those of
                `equinox.nn.Embedding` or of normalisation layers).
            density: Share of the weights that stays, above 0 and at most 1.
            scope: `"leaf"` keeps that share of every matrix; `"model"` compares the magnitudes of all matrices, so that
                a matrix of small weights keeps fewer.
            leaf_filter: `leaf -> bool`; leaves it refuses get no budget.
            update_schedule: As in `SparseConfig`.
            fallback_mode: As in `SparseConfig`.

        Returns:
            A policy whose `leaf_budgets` maps each path to a budget, clamped to between 1 and the leaf's size, and
            whose `config.nse_budget` is their sum.

        Raises:
            TypeError: `density` is not a number, or `leaf_filter` is not callable.
            ValueError: `density` or `scope` is out of range, or the model has no matrix.

        >>> model = eqx.nn.MLP(4, 2, width_size=8, depth=1, key=jax.random.key(0))
        >>> SparsePolicy.for_model(model, density=0.25).leaf_budgets
        {'.layers[0].weight': 8, '.layers[1].weight': 4}
        """
        density = as_fraction("density", density, one_allowed=True)
        if scope == "leaf":
            sizes = {path: array.size for path, array in matrices(model, leaf_filter).items()}
            budgets = {path: min(max(1, round(density * size)), size) for path, size in sizes.items()}
        elif scope == "model":
            masks = global_masks(model, density, leaf_filter=leaf_filter)
            budgets = {path: max(1, int(mask.sum())) for path, mask in masks.items()}
        else:
            raise ValueError(f"scope is {scope!r}; it must be 'leaf' or 'model'")
        config = SparseConfig(sum(budgets.values()), update_schedule, fallback_mode)
        return cls(config, leaf_budgets=budgets)

    def for_leaf(self, path: str) -> "SparsePolicy":
        """The policy of one leaf: this one, or, over a whole model, one with the budget of that leaf.

        Args:
            path: Leaf path as `jax.tree_util.keystr` writes it.

        Raises:
            ValueError: The policy has budgets for leaves, but not for this one.
        """
        if self.leaf_budgets is None:
            return self
        if path not in self.leaf_budgets:
            raise ValueError(f"the policy has no budget for the leaf {path}; it has {sorted(self.leaf_budgets)}")
        budget = self.leaf_budgets[path]
        return SparsePolicy(SparseConfig(budget, self.config.update_schedule, self.config.fallback_mode))

    def make_mask(self, weights: jax.Array, step: int | jax.Array) -> jax.Array:
        """Mask of the `nse_budget` largest magnitudes, ties to the lower index in row-major order.

        May be traced. In a trace a NaN cannot be refused; it counts as the largest magnitude, so that it stays visible.

        Args:
            weights: Floating-point or complex array of any shape.
            step: Step the mask is made for, at least 0. Magnitudes alone decide here; it is there for policies that
                change their density over time.

        Returns:
            Bool array of the shape of `weights` with exactly `nse_budget` entries `True` (all of them, if there are
            fewer weights and `fallback_mode` is `"dense_mask"`).

        Raises:
            TypeError: `weights` is not a floating-point array, or `step` is not an int.
            ValueError: A weight is NaN; there are fewer weights than the budget, with `fallback_mode="error"`; or this
                policy is over a whole model, and `for_leaf` must be asked first.
        """
        budget = self._budget("make_mask")
        array = check_weights("weights", weights)
        if not isinstance(step, Tracer):
            as_int("step", step, minimum=0)
        if array.size < budget and self.config.fallback_mode == "error":
            raise ValueError(
                f"weights of shape {array.shape} have {array.size} elements, fewer than nse_budget = {budget}; lower "
                f"the budget, or allow fallback_mode='dense_mask'"
            )
        return largest(array, budget)

    def apply_mask(self, weights: jax.Array, mask: jax.Array) -> BCOO | jax.Array:
        """Hold the masked weights as a BCOO matrix of exactly `nse_budget` stored elements.

        The elements are stored in row-major order. A mask with fewer entries is padded with indices out of bounds,
        which BCOO ignores. May be traced; the mask's entries cannot be counted then, and entries beyond the budget
        are lost, in row-major order.

        Args:
            weights: Floating-point matrix of shape `(rows, columns)`.
            mask: Bool array of the same shape.

        Returns:
            BCOO of the shape and dtype of `weights` with `nse == nse_budget`. If that is impossible (see
            `SparseConfig`) and `fallback_mode` is `"dense_mask"`: the dense array with zeros outside the mask.

        Raises:
            TypeError: `weights` is not a floating-point array, or `mask` is not a bool array.
            ValueError: The shapes differ, a weight is NaN, or, with `fallback_mode="error"`, the weights are not 2-D,
                fewer than the budget, or the mask has more entries than it.
        """
        budget = self._budget("apply_mask")
        array = check_weights("weights", weights)
        if not is_mask(mask):
            raise TypeError(f"mask is {mask!r} ({type(mask).__name__}); it must be a bool array, as make_mask returns")
        mask = jnp.asarray(mask)
        if mask.shape != array.shape:
            raise ValueError(f"mask has shape {mask.shape}, weights {array.shape}; they must be the same")
        obstacle = None
        if array.ndim != 2:
            obstacle = f"they are {array.ndim}-D, and only a matrix becomes BCOO"
        elif array.size < budget:
            obstacle = f"they have {array.size} elements, fewer than nse_budget = {budget}"
        elif not isinstance(mask, Tracer) and int(mask.sum()) > budget:
            obstacle = f"the mask keeps {int(mask.sum())} of them, more than nse_budget = {budget}"
        if obstacle is not None:
            if self.config.fallback_mode == "error":
                raise ValueError(f"weights of shape {array.shape} cannot be held in a BCOO matrix: {obstacle}")
            return jnp.where(mask, array, 0)
        rows, columns = jnp.nonzero(mask, size=budget, fill_value=array.shape)
        indices = jnp.stack([rows, columns], axis=1)
        data = array.at[rows, columns].get(mode="fill", fill_value=0)
        # BCOO counts padding as sorted and unique, as BCOO.fromdense does.
        return BCOO((data, indices), shape=array.shape, indices_sorted=True, unique_indices=True)

    def should_update(self, step: int) -> bool:
        """Whether masks are to be renewed at this step, by `config.update_schedule`.

        Args:
            step: Step counted from 0; a concrete int.

        Raises:
            TypeError: `step` is not an int, or a schedule function did not return a bool.
            ValueError: `step` is negative.

        >>> [step for step in range(7) if SparsePolicy(SparseConfig(1, update_schedule=3)).should_update(step)]
        [0, 3, 6]
        """
        step = as_int("step", step, minimum=0)
        schedule = self.config.update_schedule
        if not callable(schedule):
            return step % schedule == 0
        answer = schedule(step)
        if not isinstance(answer, bool):
            raise TypeError(f"update_schedule({step}) returned {answer!r} ({type(answer).__name__}), not a bool")
        return answer

    def _budget(self, method: str) -> int:
        if self.leaf_budgets is not None:
            raise ValueError(f"this policy has a budget for each leaf; call policy.for_leaf(path).{method}(...)")
        return self.config.nse_budget
