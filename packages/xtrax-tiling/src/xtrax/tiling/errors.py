"""Errors and warnings of planning and of mapping."""


class AmbiguousAxisError(ValueError):
    """An axis whose role is `AxisRole.UNKNOWN` was to be planned, and nothing says how it is mapped."""


class CarryMismatchError(TypeError):
    """A step of a loop returned a carry of another structure, shape or dtype than it was given."""


class DispatchRejected(ValueError):
    """A strategy that no iterator on the device can run; the message says what runs it instead."""


class RemainderWarning(RuntimeWarning):
    """An axis is not a multiple of its batch size, so that its chunks are smaller or overlap."""
