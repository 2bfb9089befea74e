"""Axes whose elements are independent: all at once, or a chunk at a time."""

from collections.abc import Sequence

from xtrax.tiling._layout import Chunks
from xtrax.tiling._memory import MemoryBudget
from xtrax.tiling._plan_memory import PlanMemory, byte_text, check_estimate
from xtrax.tiling._spec import AxisDecision, AxisSpec
from xtrax.tiling.strategy import SafeMap, Vmap


def by_size(spec: AxisSpec) -> AxisDecision:
    """All at once if there are at most `default_batch_size` elements, else chunks of that."""
    size, limit = spec.cardinality, spec.default_batch_size
    if size <= limit:
        return _all_at_once(spec, f"cardinality {size} <= default_batch_size {limit}: all at once")
    return _in_chunks(spec, limit, f"cardinality {size} > default_batch_size {limit}")


def by_limit(spec: AxisSpec, estimate: int, limit: int) -> AxisDecision:
    """All at once if that fits into the memory of the device, else chunks."""
    size = spec.cardinality
    need = f"all {size} at once need {byte_text(estimate)}"
    if estimate <= limit:
        return _all_at_once(spec, f"{need}, within the device limit of {byte_text(limit)}")
    need = f"{need}, over the device limit of {byte_text(limit)}"
    if size > spec.default_batch_size:
        return _in_chunks(spec, spec.default_batch_size, need)
    # The default would not narrow the axis, so it gets the share of its elements that the limit is of the estimate.
    share = size * limit // estimate
    chunk = max(share // spec.tile_granularity, 1) * spec.tile_granularity
    if chunk >= size:
        return _all_at_once(spec, f"{need}, but no smaller chunk is a multiple of tile_granularity {chunk}")
    return _in_chunks(spec, chunk, f"{need}, where about {share} of them fit")


def fit(
    budget: MemoryBudget, decisions: tuple[AxisDecision, ...], movable: list[int]
) -> tuple[tuple[AxisDecision, ...], PlanMemory]:
    """Demote axes from `Vmap` to `SafeMap`, in order, until the estimate of the whole plan is within the budget.

    Args:
        budget: the budget and its estimate.
        decisions: of all axes; those of `movable` are replaced.
        movable: positions of the axes that start all at once.

    Returns:
        The decisions, whether or not they fit, and what they take.
    """
    known: dict[frozenset[int], int] = {}
    because = f"demoted to fit the budget of {byte_text(budget.bytes)}"

    def arranged(demoted: frozenset[int]) -> tuple[AxisDecision, ...]:
        changed = list(decisions)
        for i in movable:
            spec = decisions[i].spec
            if i in demoted:
                changed[i] = _in_chunks(spec, spec.default_batch_size, because)
            else:
                changed[i] = _all_at_once(spec, f"all {spec.cardinality} at once")
        return tuple(changed)

    def estimate(demoted: frozenset[int]) -> int:
        if demoted not in known:
            known[demoted] = check_estimate("the budget's estimate", budget.estimate(arranged(demoted)))
        return known[demoted]

    choices = [i for i in movable if decisions[i].spec.cardinality > decisions[i].spec.default_batch_size]
    demoted: frozenset[int] = frozenset()
    steps: dict[int, tuple[int, int]] = {}
    for i in choices:
        before = estimate(demoted)
        if before <= budget.bytes:
            break
        demoted |= {i}
        steps[i] = before, estimate(demoted)
    total = estimate(demoted)

    slopes: dict[str, float] = {}
    for i in choices:
        spec = decisions[i].spec
        rise = estimate(demoted - {i}) - estimate(demoted | {i})
        slopes[spec.name] = rise / (spec.cardinality - spec.default_batch_size)
    final = list(decisions)
    for i in movable:
        spec = decisions[i].spec
        if i in steps:
            before, after = steps[i]
            numbers = f"; the plan needs {byte_text(after)} instead of {byte_text(before)}"
            final[i] = _in_chunks(spec, spec.default_batch_size, because, numbers)
        else:
            final[i] = _all_at_once(spec, _kept(spec, budget.bytes, total, i in choices))
    moved = sum(slopes[d.spec.name] * d.batch_size for d in final if d.spec.name in slopes)
    memory = PlanMemory(budget.bytes, round(total - moved), slopes, total, compiles=0)
    return tuple(final), memory


def _kept(spec: AxisSpec, budget: int, total: int, choice: bool) -> str:
    """Why an axis stays all at once."""
    text = f"all {spec.cardinality} at once: the plan needs {byte_text(total)}"
    if total <= budget:
        return f"{text}, within the budget of {byte_text(budget)}"
    text += f", over the budget of {byte_text(budget)}"
    if not choice:
        text += f", but cardinality {spec.cardinality} <= default_batch_size {spec.default_batch_size} leaves no choice"
    return text


def _all_at_once(spec: AxisSpec, reasoning: str) -> AxisDecision:
    return AxisDecision(spec, spec.cardinality, reasoning + _not_deduplicated(spec), Vmap())


def _in_chunks(spec: AxisSpec, limit: int, because: str, numbers: str = "") -> AxisDecision:
    size = spec.cardinality
    chunks = Chunks.balanced(size, limit)
    reasoning = f"{because}: {chunks.count} chunks of {chunks.size}"
    if size % limit:
        reasoning += f", balanced because {size} is not a multiple of {limit} (remainder {size % limit})"
    if chunks.overlap:
        reasoning += f", elements computed twice: {chunks.overlap}"
    return AxisDecision(spec, limit, reasoning + numbers + _not_deduplicated(spec), SafeMap(limit))


def remainder_text(decisions: Sequence[AxisDecision]) -> str:
    """The warning about axes whose chunks do not come out even at their batch size."""
    sentences = []
    twice = 0
    for decision in decisions:
        spec, limit = decision.spec, decision.batch_size
        chunks = Chunks.balanced(spec.cardinality, limit)
        twice += chunks.overlap
        sentences.append(
            f"axis {spec.name!r} runs as {chunks.count} chunks of {chunks.size}, since {spec.cardinality} elements are "
            f"no multiple of {limit} (remainder {spec.cardinality % limit})."
        )
    unless = f", unless the function has side effects: {twice} elements are computed twice" if twice else ""
    return f"{' '.join(sentences)} Results are those of jax.vmap; nothing needs to be done{unless}."


def _not_deduplicated(spec: AxisSpec) -> str:
    if not spec.dedup_eligible:
        return ""
    return "; dedup_eligible, but no DedupSpec names the axis, so it is planned by its size"
