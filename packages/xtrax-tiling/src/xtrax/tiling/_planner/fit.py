"""Which axes of a plan are cut into chunks, and how finely, so that the plan fits into a budget."""

from collections.abc import Sequence

from xtrax.tiling._plan.account import PlanMemory, byte_text, check_estimate
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling._planner.by_size import all_at_once, computed, in_chunks
from xtrax.tiling._planner.chunk_sizes import ChunkSizes, largest_fitting
from xtrax.tiling._planner.memory import MemoryBudget
from xtrax.tiling.strategy import DedupGather

Limits = dict[int, int]  # from the position of an axis to how many of its elements are computed at once, at most


def fit(
    budget: MemoryBudget, decisions: tuple[AxisDecision, ...], movable: Sequence[int]
) -> tuple[tuple[AxisDecision, ...], PlanMemory]:
    """Cut axes that start all at once into chunks, in order, until the estimate of the whole plan is within the budget.

    Args:
        budget: the budget and its estimate.
        decisions: of all axes; those of `movable` are replaced: a `DedupGather` stays one, others become `Vmap` or
            `SafeMap`.
        movable: positions of the axes that start all at once.

    Returns:
        The decisions, whether or not they fit, and what they take.
    """
    compiled = getattr(budget.estimate, "compiles", 0)
    plan = _Plan(budget, decisions, movable)
    for i in movable:
        if plan.cost() <= budget.bytes:
            break
        plan.demote(i)
    slopes = plan.slopes()
    final = plan.decided()
    total = plan.cost()
    moved = sum(slopes[d.spec.name] * d.batch_size for d in final if d.spec.name in slopes)
    compiled = getattr(budget.estimate, "compiles", 0) - compiled
    return final, PlanMemory(budget.bytes, round(total - moved), slopes, total, compiled)


class _Plan:
    """A plan that is being fitted: the limits of the axes that are demoted by now, and every estimate so far."""

    def __init__(self, budget: MemoryBudget, decisions: tuple[AxisDecision, ...], movable: Sequence[int]) -> None:
        self.budget = budget
        self.decisions = decisions
        self.movable = movable
        self.dedups = {i: decisions[i] for i in movable if isinstance(decisions[i].strategy, DedupGather)}
        specs = {i: decisions[i].spec for i in movable}
        self.sizes = {
            i: ChunkSizes(computed(spec, self.dedups.get(i)), spec.tile_granularity) for i, spec in specs.items()
        }
        self.solved = {i for i in movable if budget.solves(decisions[i].spec.name)}
        self.limits: Limits = {}
        self.steps: dict[int, tuple[int, int]] = {}
        self.in_vain: set[int] = set()
        self.known: dict[tuple[int, ...], int] = {}

    def cost(self, limits: Limits | None = None) -> int:
        """The estimate with these limits, or with those by now."""
        limits = self.limits if limits is None else limits
        key = self._key(limits)
        if key not in self.known:
            tried = list(self.decisions)
            for i in self.movable:
                spec = self.decisions[i].spec
                dedup = self.dedups.get(i)
                if i in limits:
                    tried[i] = in_chunks(spec, limits[i], self._because(i), dedup=dedup)
                else:
                    tried[i] = all_at_once(spec, f"all {self.sizes[i].total} at once", dedup)
            self.known[key] = check_estimate("the budget's estimate", self.budget.estimate(tuple(tried)))
        return self.known[key]

    def _key(self, limits: Limits) -> tuple[int, ...]:
        return tuple(self.sizes[i].at_once(limits.get(i)) for i in self.movable)

    def _because(self, i: int) -> str:
        kind = "the largest chunk that fits" if i in self.solved else "demoted to fit"
        return f"{kind} the budget of {byte_text(self.budget.bytes)}"

    def demote(self, i: int) -> None:
        """Cut an axis into chunks, if it can be and if that is of use."""
        spec = self.decisions[i].spec
        before = self.cost()
        if i in self.solved:
            limit = largest_fitting(
                lambda limit: self.cost({**self.limits, i: limit}), self.budget.bytes, self.sizes[i]
            )
            if limit is not None and self.cost({**self.limits, i: limit}) >= before:
                self.in_vain.add(i)
                return
        else:
            limit = spec.default_batch_size if self.sizes[i].total > spec.default_batch_size else None
        if limit is not None:
            self.limits[i] = limit
            self.steps[i] = before, self.cost()

    def slopes(self) -> dict[str, float]:
        """Bytes for each further element at once, of the axes whose chunk was, or could be, chosen."""
        slopes: dict[str, float] = {}
        for i in self.movable:
            spec = self.decisions[i].spec
            if i in self.solved:
                if i in self.limits:
                    slopes[spec.name] = self._slope(i)
            elif self.sizes[i].total > spec.default_batch_size:
                chunked = {**self.limits, i: spec.default_batch_size}
                whole = {j: limit for j, limit in self.limits.items() if j != i}
                rise = self.cost(whole) - self.cost(chunked)
                slopes[spec.name] = rise / (self.sizes[i].total - spec.default_batch_size)
        return slopes

    def _slope(self, i: int) -> float:
        """Between the chunk that was chosen and another: the nearest that is known, or one more."""
        sizes, here = self.sizes[i], self.sizes[i].at_once(self.limits[i])
        others = [size for size in sizes.seen if size != here]
        known = [size for size in others if self._key({**self.limits, i: size}) in self.known]
        nearest = min(known or others, key=lambda size: abs(size - here), default=None)
        if nearest is None:
            whole = {j: limit for j, limit in self.limits.items() if j != i}
            return (self.cost(whole) - self.cost()) / (sizes.total - here)
        return (self.cost({**self.limits, i: nearest}) - self.cost()) / (nearest - here)

    def decided(self) -> tuple[AxisDecision, ...]:
        """The decisions, with the numbers that led to them."""
        final = list(self.decisions)
        for i in self.movable:
            spec = self.decisions[i].spec
            if i not in self.steps:
                final[i] = all_at_once(spec, self._kept(i), self.dedups.get(i))
                continue
            before, after = self.steps[i]
            numbers = f"; the plan needs {byte_text(after)}"
            numbers += f" instead of {byte_text(before)}" if after < before else ", no less than all at once"
            because = self._because(i)
            if after > self.budget.bytes and i in self.solved:
                limit = byte_text(self.budget.bytes)
                because = f"no chunk of this axis alone fits the budget of {limit}, and this takes least"
            final[i] = in_chunks(spec, self.limits[i], because, numbers, self.dedups.get(i))
        return tuple(final)

    def _kept(self, i: int) -> str:
        """Why an axis stays all at once."""
        spec, size, total = self.decisions[i].spec, self.sizes[i].total, self.cost()
        text = f"all {size} at once: the plan needs {byte_text(total)}"
        what = f"{size} distinct elements" if i in self.dedups else f"cardinality {size}"
        if total <= self.budget.bytes:
            return f"{text}, within the budget of {byte_text(self.budget.bytes)}"
        text += f", over the budget of {byte_text(self.budget.bytes)}"
        if i in self.in_vain:
            text += ", and chunks of this axis need no less"
        elif i in self.solved:
            text += f", but {what} and tile_granularity {spec.tile_granularity} leave no choice"
        elif size <= spec.default_batch_size:
            text += f", but {what} <= default_batch_size {spec.default_batch_size} leaves no choice"
        return text
