"""What a page and a figure both say about a plan."""

from xtrax.eda._words import byte_text, percent_text
from xtrax.eda.types import DedupStats, MemoryStats

_MOST_ROWS = 16  # of the duplicate histogram; beyond, multiplicities are grouped


def verdict_of(memory: MemoryStats | None) -> tuple[str, str]:
    """A class, and whether the plan fits in a sentence."""
    if memory is None:
        return "unknown", "Planned without a memory budget: whether it fits is not known."
    if memory.budget is None:
        return "unknown", f"Needs {byte_text(memory.estimate)}; there was no budget to hold it against."
    if memory.over:
        return (
            "over",
            f"Does not fit: {byte_text(memory.estimate)} needed, {byte_text(memory.over)} over the budget of "
            f"{byte_text(memory.budget)}. Lower a batch size, or raise the budget.",
        )
    share = percent_text(memory.estimate / memory.budget)
    return "fits", f"Fits: {byte_text(memory.estimate)} of {byte_text(memory.budget)}, {share} of the budget."


def grouped_copies(dedup: DedupStats) -> list[tuple[int, int, int]]:
    """`(fewest, most, distinct elements)`; past a number of rows, multiplicities are grouped by powers of two."""
    if len(dedup.copies) <= _MOST_ROWS:
        return [(times, times, distinct) for times, distinct in dedup.copies]
    groups: dict[int, int] = {}
    for times, distinct in dedup.copies:
        groups[times.bit_length()] = groups.get(times.bit_length(), 0) + distinct
    return [(1 << (bits - 1), (1 << bits) - 1, distinct) for bits, distinct in sorted(groups.items())]


def worst(fraction: float) -> str:
    """The bound of the waste of one element."""
    return f"at worst {percent_text(fraction)} padding"
