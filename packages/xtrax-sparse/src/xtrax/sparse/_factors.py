"""Sizes that must change together: the axes of arrays as products of shared factors.

An axis of a traced array is a list of factors, in row-major order. An array operation makes factors the same (the
terms of a sum), splits them (a reshape), or fixes their size (a mean over them), and says why.
"""

from collections.abc import Iterable, Sequence


class Factor:
    """A size that axes share: a node of a union-find forest, whose roots may be split into a product of others."""

    __slots__ = ("parent", "parts", "reason", "size")

    def __init__(self, size: int, reason: str | None = None) -> None:
        """A factor of its own; with a reason, one whose size is fixed."""
        self.size = size
        self.reason = reason
        self.parent: Factor | None = None
        self.parts: tuple[Factor, Factor] | None = None

    def root(self) -> "Factor":
        """The factor that stands for all those made the same as this one."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node


Axis = list[Factor]


def atoms(axes: Iterable[Factor]) -> Axis:
    """The factors as roots that are not split, in order; sizes of one are left out."""
    found: Axis = []
    for factor in axes:
        root = factor.root()
        if root.parts is not None:
            found += atoms(root.parts)
        elif root.size != 1:
            found.append(root)
    return found


def fix(axis: Iterable[Factor], reason: str) -> None:
    """Fix the sizes of an axis. The first reason stays."""
    for factor in atoms(axis):
        factor.reason = factor.reason or reason


def same(one: Axis, other: Axis) -> None:
    """Make two axes of equal length the same, element by element."""
    while True:
        left, right = atoms(one), atoms(other)
        pair = next(((a, b) for a, b in zip(left, right, strict=False) if a is not b), None)
        if pair is None:
            return
        a, b = pair
        if a.size == b.size:
            a.parent = b
            b.reason = b.reason or a.reason
        elif not (_split(a, b.size) if a.size > b.size else _split(b, a.size)):
            fix([*left, *right], "two axes that are reshaped differently meet")
            return


def regroup(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """The axes of a reshaped array."""
    rest = atoms(factor for axis in axes for factor in axis)
    groups: list[Axis] = []
    for size in shape:
        group: Axis = []
        need = size
        while need > 1:
            head = rest[0]
            if need % head.size == 0:
                group.append(head)
                need //= head.size
                rest = rest[1:]
            elif _split(head, need):
                rest = atoms(rest)
            else:
                fix([factor for axis in axes for factor in axis], "it is reshaped across its units")
                return [[Factor(n, "it comes from a reshape across units")] for n in shape]
        groups.append(group)
    return groups


def _split(factor: Factor, leading: int) -> bool:
    """Split a root into `(leading, rest)`; False if it does not divide."""
    if leading < 1 or factor.size % leading:
        return False
    factor.parts = (Factor(leading, factor.reason), Factor(factor.size // leading, factor.reason))
    return True
