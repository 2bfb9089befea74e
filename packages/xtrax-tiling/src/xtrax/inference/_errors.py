"""The error of this layer."""


class StructureMismatchError(ValueError):
    """A function returned something else than its abstract evaluation says; the message names every leaf."""
