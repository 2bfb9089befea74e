"""How many chunks a mapped axis is cut into, and how large they are."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chunks:
    """How `total` elements fall into `count` chunks of `size`; the last one ends at `total` and may overlap."""

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
        """How many elements of the last chunk the chunk before it holds already."""
        return self.count * self.size - self.total
