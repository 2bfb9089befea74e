"""What `xtrax plan` and `xtrax explain` are asked for, checked as far as that goes without jax."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from xtrax.cli._bytes import parse_bytes
from xtrax.cli._errors import UsageError
from xtrax.cli._shapes import Shape, Shapes, parse_shapes

_AXES = re.compile(r"(?P<argument>[^\W\d]\w*)=(?P<names>[^\W\d][\w-]*(,[^\W\d][\w-]*)*)")
DEVICE = "device"


@dataclass(frozen=True)
class PlanRequest:
    """A function, the shapes of its arguments, and how to plan it.

    Attributes:
        fn: `module:symbol`.
        shapes: The shapes by argument.
        text: The shapes as they were written.
        budget: Bytes, `"device"`, or None.
        batch_size: Elements at once, or None.
        axes: For a function of one element, the axes of each argument, outermost first; None for one of a batch.
    """

    fn: str
    shapes: Shapes
    text: str
    budget: int | str | None
    batch_size: int | None
    axes: Mapping[str, tuple[str, ...]] | None

    @classmethod
    def parse(
        cls, fn: str, shapes: str, budget: str | None, batch_size: int | None, per_element: bool, axes: str | None
    ) -> Self:
        """Check the options.

        Raises:
            ShapeParseError: If the shapes do not follow the grammar.
            UsageError: If an option is not what it must be, or one is missing.
        """
        parsed = parse_shapes(shapes)
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"--batch-size must be at least 1, found {batch_size}")
        if per_element and axes is None:
            first = next(iter(parsed))
            raise UsageError(f'--per-element needs --axes, the axes of each argument, such as --axes "{first}=batch"')
        if axes is not None and not per_element:
            raise UsageError("--axes are those of a function of one element; say --per-element, or leave them out")
        return cls(
            fn=fn,
            shapes=parsed,
            text=shapes,
            budget=DEVICE if budget == DEVICE else None if budget is None else parse_bytes(budget, "--budget"),
            batch_size=batch_size,
            axes=None if axes is None else _parse_axes(axes, parsed),
        )


def _parse_axes(text: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
    axes: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for entry in text.split():
        form = _AXES.fullmatch(entry)
        if form is None:
            raise UsageError(
                f'--axes must be entries argument=axis,axis,... such as "x=batch y=batch"; found {entry!r}'
            )
        argument, names = form["argument"], tuple(form["names"].split(","))
        if argument not in shapes:
            raise UsageError(f"--axes names {argument!r}, but --shapes has {', '.join(shapes)}")
        if argument in axes:
            raise UsageError(f"--axes names {argument!r} twice; give its axes once, separated by commas")
        if len(set(names)) < len(names):
            raise UsageError(f"--axes gives {argument!r} an axis twice: {','.join(names)}")
        axes[argument] = names
        for leaf, shape in _leaves(argument, shapes[argument]):
            if len(shape.shape) < len(names):
                raise UsageError(
                    f"--axes gives {argument!r} {','.join(names)}, but {leaf} has {len(shape.shape)} dimensions"
                )
            for name, size in zip(names, shape.shape, strict=False):
                known, where = sizes.setdefault(name, (size, leaf))
                if known != size:
                    raise UsageError(f"--axes: {name!r} has {known} elements in {where}, and {size} in {leaf}")
    if not axes:
        raise UsageError('--axes is empty; give the axes of each argument, such as "x=batch"')
    return axes


def _leaves(name: str, shape: Shape | Shapes) -> list[tuple[str, Shape]]:
    if isinstance(shape, Shape):
        return [(name, shape)]
    return [leaf for inner, value in shape.items() for leaf in _leaves(f"{name}.{inner}", value)]
