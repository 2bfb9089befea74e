"""What a run is asked to do."""

import operator
from collections.abc import Sequence
from typing import Any, Self

import equinox as eqx

from xtrax.run._checks import check_run_id
from xtrax.stages import AxisBoundary
from xtrax.tiling.plan import AxisSpec


class RunSpec(eqx.Module):
    """The part of a run's description that every domain shares. Subclass it to add your own fields.

    All fields here are keyword-only, so a subclass may add fields with or without defaults.

    Args:
        seed: The seed of the run's random numbers.
        axes: The axes that are mapped over, outermost first.
        carry_specs: A `CarrySpec` for each axis that carries a state.
        boundaries: An `AxisBoundary` (or `None`) for each axis, in the order of `axes`; `None`: no boundaries.
        run_id: The run's id, part of the tree's structure; `None`: chosen when output is opened.

    Raises:
        TypeError: If a field is of the wrong type.
        ValueError: If two axes share a name, `boundaries` and `axes` differ in length, or `run_id` is no file name.

    Examples:
        >>> from xtrax.tiling.plan import AxisSpec
        >>> class FoldingSpec(RunSpec):
        ...     temperature: float
        >>> spec = FoldingSpec(temperature=0.5, seed=7, axes=[AxisSpec("sample", 1000, 64)])
        >>> spec.axes[0].name, spec.carry_specs, FoldingSpec.from_spec(spec) is spec
        ('sample', [], True)
    """

    seed: int = eqx.field(kw_only=True)
    axes: list[AxisSpec] = eqx.field(kw_only=True)
    carry_specs: list[Any] = eqx.field(kw_only=True, default_factory=list)
    boundaries: list[AxisBoundary | None] | None = eqx.field(kw_only=True, default=None)
    run_id: str | None = eqx.field(kw_only=True, default=None, static=True)

    def __check_init__(self) -> None:
        """Refuse bad fields; Equinox calls this for subclasses too."""
        try:
            operator.index(self.seed)
        except TypeError:
            raise TypeError(f"seed must be an int, not {type(self.seed).__name__}: {self.seed!r}") from None
        if isinstance(self.seed, bool):
            raise TypeError(f"seed must be an int, not a bool: {self.seed!r}")
        _check_list("axes", self.axes)
        _check_list("carry_specs", self.carry_specs)
        names = set()
        for i, axis in enumerate(self.axes):
            if not isinstance(axis, AxisSpec):
                raise TypeError(f"axes[{i}] must be an AxisSpec, not {type(axis).__name__}: {axis!r}")
            if axis.name in names:
                raise ValueError(f"axes[{i}] repeats the name {axis.name!r}; give each axis its own")
            names.add(axis.name)
        if self.boundaries is not None:
            _check_list("boundaries", self.boundaries)
            if len(self.boundaries) != len(self.axes):
                raise ValueError(
                    f"boundaries has {len(self.boundaries)} entries for {len(self.axes)} axes; give one for each axis, "
                    "in order, None where there is none"
                )
            for i, boundary in enumerate(self.boundaries):
                if boundary is not None and not isinstance(boundary, AxisBoundary):
                    kind = type(boundary).__name__
                    raise TypeError(f"boundaries[{i}] must be an AxisBoundary or None, not {kind}: {boundary!r}")
        check_run_id(self.run_id)

    @classmethod
    def from_spec(cls, spec: Self) -> Self:
        """Return `spec` unchanged; where a domain builds its spec from another description, it overrides this.

        Raises:
            TypeError: If `spec` is not of this class.
        """
        if not isinstance(spec, cls):
            raise TypeError(f"spec must be a {cls.__name__}, not {type(spec).__name__}: {spec!r}")
        return spec


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list, not {type(value).__name__}: {value!r}")
