"""Checks of plain arguments, shared by the modules of this layer."""

import numbers


def check_int(name: str, value: object, *, at_least: int) -> int:
    """Returns `value` as an `int`, or says what is wrong with it.

    Raises:
        TypeError: for anything that is not an integer, bools included.
        ValueError: below `at_least`.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r} ({type(value).__name__})")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return int(value)


def check_bool(name: str, value: object) -> bool:
    """Returns `value` if it is True or False.

    Raises:
        TypeError: for anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value
