"""How many chunks a mapped axis is cut into, and how large they are."""

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How `total` elements fall into `count` chunks of `size`; the first two share `overlap` elements."""

    total: int
    count: int
    size: int

    @classmethod
    def balanced(cls, total: int, limit: int) -> "Chunks":
        """The fewest chunks of at most `limit` elements, made as small as that number allows.

        At most `count - 1` elements then lie in two chunks, where chunks of exactly `limit` could repeat `limit - 1`.
        """
        if total == 0:
            return cls(0, 0, 0)
        count = -(-total // limit)
        return cls(total, count, -(-total // count))

    @property
    def overlap(self) -> int:
        """How many elements of the first chunk the one after it holds too."""
        return self.count * self.size - self.total

    def start(self, index: Any) -> Any:
        """Where chunk `index` begins, an int or a traced one.

        The first chunk is the one that shares elements with another, so that whoever writes the chunks in order lets
        the second overwrite what the first one wrote of them, and whoever sums skips them in the first.
        """
        if not self.overlap:
            return index * self.size
        return jnp.maximum(index * self.size - self.overlap, 0)

    def without_overlap(self) -> "tuple[Chunks, Chunks]":
        """As many whole chunks as there are, and the shorter one that is left: each element lies in one of them.

        They take the place of chunks that overlap, where a function has side effects.
        """
        whole = self.total // self.size
        rest = self.total - whole * self.size
        return Chunks(whole * self.size, whole, self.size), Chunks(rest, 1, rest)
