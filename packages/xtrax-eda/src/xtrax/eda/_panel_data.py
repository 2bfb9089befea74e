"""The panels about the data: padding by bucket, and duplicates."""

from xtrax.eda._markup import part, row, section, text
from xtrax.eda._summary import grouped_copies, worst
from xtrax.eda._words import count_text, percent_text, plural
from xtrax.eda.types import BucketStats, DedupStats, PlanStats

_MOST_LENGTHS = 5000  # distinct ones that a page carries for trying other boundaries


def buckets_panel(stats: PlanStats) -> str:
    """How full each bucket is, and how much of it is padding."""
    if not stats.bucket_stats:
        return section("buckets", "Padding", "<p>No axis of this plan is padded to buckets.</p>")
    axes = [_bucket_axis(i, name, bucket) for i, (name, bucket) in enumerate(stats.bucket_stats.items())]
    return section("buckets", "Padding by bucket", "".join(axes))


def duplicates_panel(stats: PlanStats) -> str:
    """How often distinct elements occur."""
    if not stats.dedup_stats:
        return section("duplicates", "Duplicates", "<p>No axis of this plan is deduplicated.</p>")
    axes = [_dedup_axis(name, dedup) for name, dedup in stats.dedup_stats.items()]
    return section("duplicates", "Duplicates", "".join(axes))


def lengths_for_trial(bucket: BucketStats) -> tuple[tuple[int, int], ...]:
    """`(length, count)` pairs that the page carries; none where there are too many or none are known."""
    known = bucket.lengths or ()
    return known if len(known) <= _MOST_LENGTHS else ()


def _bucket_axis(index: int, name: str, bucket: BucketStats) -> str:
    head = f"<h3><bdi>{text(name)}</bdi></h3>"
    if bucket.occupancy is None:
        rows = [
            row(
                f"length {_span(use.shortest, use.boundary)}",
                worst(use.worst_waste),
                part("fill", 0, 1 - use.worst_waste),
                part("hatch", 1 - use.worst_waste, 1),
            )
            for use in bucket.buckets
        ]
        return (
            f"{head}<p>Without the lengths, only the worst case is known: the shortest element of a bucket. "
            f"<code>render(plan, lengths={{{text(repr(name))}: lengths}})</code> shows the waste of your data.</p>"
            f'{_KEY}<ul class="rows padded">{"".join(rows)}</ul>'
        )
    most = max((use.padded or 0 for use in bucket.buckets), default=0) or 1
    rows = []
    for use in bucket.buckets:
        data, padded = (use.data or 0) / most, (use.padded or 0) / most
        share = f", {percent_text(use.waste or 0)} padding" if use.count else ""
        rows.append(
            row(
                f"length {_span(use.shortest, use.boundary)}",
                plural(use.count or 0, "element") + share,
                part("fill", 0, data),
                part("hatch", data, padded),
            )
        )
    return (
        f"{head}<p>{percent_text(bucket.waste or 0)} of the computed length is padding: {count_text(bucket.data or 0)} "
        f"of data in {count_text(bucket.padded or 0)}.</p>"
        f'{_KEY}<ul class="rows padded">{"".join(rows)}</ul>{_trial(index, bucket)}'
    )


_KEY = '<ul class="key padded"><li><i class="fill"></i>data</li><li><i class="hatch"></i>padding</li></ul>'


def _trial(index: int, bucket: BucketStats) -> str:
    if not lengths_for_trial(bucket):
        return ""
    boundaries = ", ".join(map(str, bucket.boundaries))
    return (
        f'<div class="try-boundaries" data-axis="{index}" hidden>'
        f'<label class="muted small" for="try-{index}">Try other boundaries on these lengths</label>'
        f'<input type="text" id="try-{index}" value="{boundaries}" spellcheck="false" autocomplete="off">'
        f'<output for="try-{index}" aria-live="polite"></output></div>'
    )


def _dedup_axis(name: str, dedup: DedupStats) -> str:
    groups = grouped_copies(dedup)
    most = max(distinct for _, _, distinct in groups)
    rows = [
        row(
            "once" if high == 1 else f"{_span(low, high)} times",
            plural(distinct, "distinct element"),
            part("fill", 0, distinct / most),
        )
        for low, high, distinct in groups
    ]
    saved = (
        f"{percent_text(dedup.saved)} of the elements need not be computed."
        if dedup.saved >= 0
        else f"The padding costs more than the copies save: {percent_text(-dedup.saved)} more is computed."
    )
    return (
        f"<h3><bdi>{text(name)}</bdi></h3><p>{count_text(dedup.unique)} of {count_text(dedup.total)} elements are "
        f"distinct. {count_text(dedup.padded)} are computed, {percent_text(dedup.waste)} of them padding. {saved}</p>"
        f'<p class="muted small">How often a distinct element occurs:</p>'
        f'<ul class="rows deduplicated">{"".join(rows)}</ul>'
    )


def _span(low: int, high: int) -> str:
    return count_text(high) if low == high else f"{count_text(low)} to {count_text(high)}"
