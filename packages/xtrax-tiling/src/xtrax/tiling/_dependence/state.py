"""What is known of a value in a program that was traced at two batch sizes: where the batch lies in it, if anywhere."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

_LIBRARIES = (os.path.dirname(jax.__file__) + os.sep, os.path.dirname(__file__) + os.sep)

Dims: TypeAlias = tuple[tuple[int, int], ...]
"""A shape at both batch sizes: one pair a dimension."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a value is not one of independent elements: the operation, its line, and whether that is sure."""

    kind: Literal["dependent", "undecided"]
    operation: str | None
    source: str | None
    detail: str


@dataclasses.dataclass(frozen=True)
class Shared:
    """The same for every element and every batch size."""


@dataclasses.dataclass(frozen=True)
class Element:
    """Inside a loop over the batch: a function of one element, the same for every element and every batch size."""


@dataclasses.dataclass(frozen=True)
class Batched:
    """Dimension `dim` is `outer * n * inner` long, row-major; what belongs to element i is a function of it alone.

    That function is the same for every element and every batch size n. With `outer` and `inner` None all entries along
    `dim` are equal. `fact` tells more of integers and bools: "position" (each entry is the index of its element, which
    makes it the one kind of value that is no such function), "false" (all entries are), or `(axis, columns)`: along
    `axis`, these columns are positions.
    """

    dim: int
    outer: int | None = 1
    inner: int | None = 1
    fact: Literal["position", "false"] | tuple[int, frozenset[int]] | None = None

    @property
    def plain(self) -> bool:
        """Whether the value does not tell the positions of elements."""
        return self.fact in (None, "false")

    def at(self, dim: int) -> "Batched":
        """The same along another dimension."""
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True)
class Mixed:
    """None of these, because of `cause`."""

    cause: Cause


@dataclasses.dataclass(frozen=True)
class Total(Mixed):
    """In a backward pass: a sum over the elements of something of each, the same at every batch size.

    Those of all chunks sum to that of the whole batch. For all rules that do not know of it, it is mixed.
    """


State: TypeAlias = Shared | Element | Batched | Mixed


@dataclasses.dataclass(frozen=True)
class Op:
    """One operation at both batch sizes.

    Args:
        name: its primitive.
        params: its parameters at the first batch size; `other` at the second.
        ins: the dimensions of what it takes; `outs` of what it returns.
        literals: the value of each argument that the program spells out, else None.
        sizes: the two batch sizes.
        eqn: the equation at the first batch size, for its line in the user's code.
        second: the equation at the second.
        walk: the states of the results of a pair of inner programs, from those of their arguments.
        in_element: whether this lies inside a loop over the batch.
        backward: as `walk`, of the programs of a backward pass; None where none is to be followed.
    """

    name: str
    params: Mapping[str, Any]
    other: Mapping[str, Any]
    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    literals: tuple[Any, ...]
    sizes: tuple[int, int]
    eqn: Any
    second: Any
    walk: Callable[..., list[State]]
    in_element: bool
    backward: Callable[..., list[State]] | None = None

    def dependent(self, detail: str) -> Mixed:
        """This operation makes elements depend on others."""
        return Mixed(Cause("dependent", self.name, source_line(self.eqn), detail))

    def undecided(self, detail: str) -> Mixed:
        """This operation may make elements depend on others."""
        return Mixed(Cause("undecided", self.name, source_line(self.eqn), detail))

    def positional(self) -> Mixed:
        """This operation computes with the positions of elements."""
        return self.dependent(
            "the result depends on the position of an element within the batch, which a chunk would change"
        )

    def combine(self, states: Sequence[State]) -> State:
        """The state of a function of corresponding elements of all of `states`."""
        if mixed := worst(states):
            return mixed
        batched = [state for state in states if isinstance(state, Batched)]
        if any(not state.plain for state in batched):
            return self.positional()
        if not batched:
            return next((state for state in states if isinstance(state, Element)), Shared())
        if any(isinstance(state, Element) for state in states):
            return self.dependent("one element is combined with a whole batch")
        known = next((state for state in batched if state.outer is not None), batched[0])
        for state in batched:
            same_layout = state.outer is None or (state.outer, state.inner) == (known.outer, known.inner)
            if state.dim != known.dim or not same_layout:
                return self.dependent("values whose batch lies along different dimensions are combined")
        return dataclasses.replace(known, fact=None)

    def is_batch(self, dim: tuple[int, int]) -> bool:
        """Whether a dimension is the batch, whole and once."""
        return dim == self.sizes


def source_line(eqn: Any) -> str | None:
    """Where in the user's code an equation comes from, as "file.py:12 (function)"."""
    # The attribute is not documented; without it, the line is simply not known.
    traceback = getattr(getattr(eqn, "source_info", None), "traceback", None)
    return user_line((f.file_name, f.line_num, f.function_name) for f in traceback.frames) if traceback else None


def user_line(frames: Iterable[tuple[str, int, str]]) -> str | None:
    """The innermost frame that lies in neither jax nor this package; frames are innermost first."""
    for file, line, function in frames:
        if not file.startswith(_LIBRARIES):
            return f"{os.path.basename(file)}:{line} ({function})"
    return None


def holds_positions(dtype: Any) -> bool:
    """Whether every position of a batch is a number of this type: smaller integers wrap, and bools are no numbers."""
    return np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize >= 4


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def worst(states: Sequence[State]) -> Mixed | None:
    """The first state that is known to be dependent, else the first that may be."""
    mixed = [state for state in states if isinstance(state, Mixed)]
    return min(mixed, key=lambda state: state.cause.kind == "undecided", default=None)


def join(before: State, after: State, op: Op) -> State:
    """What is known of a value that may be either."""
    if before == after:
        return before
    if isinstance(before, Mixed) or isinstance(after, Mixed):
        return before if isinstance(before, Mixed) else after
    if isinstance(before, Batched) and isinstance(after, Batched) and before.dim == after.dim:
        if not (before.plain and after.plain):
            return op.positional()
        for known, other in ((before, after), (after, before)):
            if other.outer is None or (known.outer, known.inner) == (other.outer, other.inner):
                return dataclasses.replace(known, fact=None)
    if isinstance(before, Batched) or isinstance(after, Batched):
        return op.undecided("a value has the batch along one dimension in one case, and not in another")
    return Element()


def shifted(state: State, by: int) -> State:
    """The state of a stack of such values (`by` 1), or of one of a stack (`by` -1), the leading dimension being new."""
    if not isinstance(state, Batched):
        return state
    fact = state.fact
    if isinstance(fact, tuple):
        fact = (fact[0] + by, fact[1])
    return dataclasses.replace(state, dim=state.dim + by, fact=fact)


def varies(dim: tuple[int, int]) -> bool:
    """Whether a dimension changes with the batch size."""
    return dim[0] != dim[1]


def settle(state: State, dims: Dims, op: Op) -> State:
    """`state` if the shape agrees with it; the net below every rule.

    A dimension that changes with the batch size, other than the one that holds the batch, means that the value of an
    element changes with it too.
    """
    if isinstance(state, Mixed):
        return state
    varying = [i for i, dim in enumerate(dims) if varies(dim)]
    if isinstance(state, (Shared, Element)):
        expected = not varying
    elif state.outer is None or state.inner is None:
        expected = varying == [state.dim] and all(
            size % n == 0 for size, n in zip(dims[state.dim], op.sizes, strict=True)
        )
    else:
        length = state.outer * state.inner
        expected = varying == [state.dim] and dims[state.dim] == (length * op.sizes[0], length * op.sizes[1])
    if expected:
        return state
    return op.undecided(f"a value of shape {shape_text(dims)} changes with the batch size other than by its elements")


def shape_text(dims: Dims) -> str:
    """The shape at the first batch size."""
    return str(tuple(size for size, _ in dims))


def product(dims: Sequence[tuple[int, int]], which: int) -> int:
    """The number of elements of some dimensions, at one of the two sizes."""
    return math.prod(dim[which] for dim in dims)
