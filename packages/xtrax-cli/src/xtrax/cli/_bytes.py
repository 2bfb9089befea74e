"""Amounts of memory on a command line."""

import re

from xtrax.cli._errors import UsageError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}
_FORM = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(text: str, option: str) -> int:
    """Bytes of a text such as `2GB` (10^9 each), `1.5GiB` (2^30 each) or `4096`.

    Args:
        text: The amount; case does not count.
        option: What it is called in errors.

    Raises:
        UsageError: If it is not such an amount, or less than a byte.

    Examples:
        >>> parse_bytes("2GB", "--budget"), parse_bytes("1.5 GiB", "--budget"), parse_bytes("4096", "--budget")
        (2000000000, 1610612736, 4096)
    """
    form = _FORM.fullmatch(text.strip())
    unit = form["unit"].lower() if form else ""
    if form is None or unit not in _UNITS:
        raise UsageError(f"{option} must be an amount such as 2GB (10^9 each) or 1.5GiB (2^30 each), found {text!r}")
    whole, _, fraction = form["number"].partition(".")
    count = int(whole + fraction) * _UNITS[unit] // 10 ** len(fraction)  # exact, where a float is not
    if count < 1:
        raise UsageError(f"{option} must be at least 1 byte, found {text!r}")
    return count


def format_bytes(count: int) -> str:
    """Bytes in the largest decimal unit that leaves at least one, to three digits.

    Examples:
        >>> format_bytes(999), format_bytes(16_777_216), format_bytes(2 * 10**9)
        ('999 B', '16.8 MB', '2 GB')
    """
    power = min((len(str(count)) - 1) // 3, 4)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
