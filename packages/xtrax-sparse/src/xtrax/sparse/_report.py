"""What structured pruning did, and what it left alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PrunedGroup:
    """Units that were removed together, because the model's code ties them.

    Args:
        produced_by: Paths of the weights whose output units these are.
        consumed_by: Paths of the weights whose inputs these are.
        kind: `"units"` of Linear layers, `"channels"` of convolutions, or `"heads"` of attention.
        before: Number of units before.
        kept: Indices of the units that stayed, in ascending order.
    """

    produced_by: tuple[str, ...]
    consumed_by: tuple[str, ...]
    kind: str
    before: int
    kept: tuple[int, ...]


@dataclass(frozen=True)
class LeftAlone:
    """A layer whose output units all stayed.

    Args:
        path: Path of its weight.
        units: How many it has.
        reason: Why none could be removed.
    """

    path: str
    units: int
    reason: str


@dataclass(frozen=True)
class PruneReport:
    """What `prune_structured` did. `str(report)` is a table.

    Args:
        groups: The units removed.
        left_alone: The layers whose outputs stayed, with the reason.
        parameters_before: Number of array elements in the model before.
        parameters_after: And after.
    """

    groups: tuple[PrunedGroup, ...]
    left_alone: tuple[LeftAlone, ...]
    parameters_before: int
    parameters_after: int

    def __str__(self) -> str:
        """The report as text, one line a group or layer."""
        share = self.parameters_after / max(1, self.parameters_before)
        lines = [f"parameters  {self.parameters_before:,} -> {self.parameters_after:,} ({share:.0%})"]
        for group in self.groups:
            lines.append(
                f"pruned      {', '.join(group.produced_by)}: {group.before} -> {len(group.kept)} {group.kind}, "
                f"inputs of {', '.join(group.consumed_by)}"
            )
        lines += [f"left alone  {layer.path}: {layer.units} units; {layer.reason}" for layer in self.left_alone]
        return "\n".join(lines)
