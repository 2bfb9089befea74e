"""Patterns over the paths of a pytree's leaves, as sharding rules and optimizer groups use them."""

import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import jax

V = TypeVar("V")


def path_text(path: tuple[Any, ...]) -> str:
    """A leaf's path with its parts between slashes, such as `layers/0/weight`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


class PathRules(Generic[V]):
    """Values for leaves, by regular expressions; the first that is found in a leaf's path (`re.search`) counts.

    Args:
        argument: the name of the argument that messages give.
        rules: pattern to value, in order.

    Raises:
        TypeError: not a mapping, or a pattern that is not a string.
        ValueError: a pattern that is not a regular expression.
    """

    def __init__(self, argument: str, rules: Mapping[str, V]):
        if not isinstance(rules, Mapping):
            raise TypeError(f"{argument} must be a dict of path patterns, got {type(rules).__name__}")
        self.rules: list[tuple[re.Pattern[str], V]] = []
        for pattern, value in rules.items():
            if not isinstance(pattern, str):
                raise TypeError(f"{argument}: a path pattern must be a string, got {pattern!r}")
            try:
                self.rules.append((re.compile(pattern), value))
            except re.error as error:
                raise ValueError(f"{argument}: {pattern!r} is not a regular expression: {error}") from error

    def find(self, text: str) -> tuple[str, V] | None:
        """The first pattern that is found in the path, with its value."""
        for pattern, value in self.rules:
            if pattern.search(text):
                return pattern.pattern, value
        return None
