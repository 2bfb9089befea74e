"""Numbers and names as people read them."""

import math
import re

# What neither XML nor UTF-8 can hold: control characters, lone surrogates, and the two non-characters.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """`text` with a replacement character for whatever a page cannot hold."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def byte_text(size: float) -> str:
    """Bytes in decimal units, to three digits.

    >>> [byte_text(size) for size in (0, 999, 1000, 2_000_000_000, -1536)]
    ['0 B', '999 B', '1 kB', '2 GB', '-1.54 kB']
    """
    sign, size = ("-", -size) if size < 0 else ("", size)
    units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    for unit in units[:-1]:
        if size < 999.5:
            return f"{sign}{_digits(size)} {unit}"
        size /= 1000
    return f"{sign}{_digits(size)} {units[-1]}"


def _digits(value: float) -> str:
    """Three significant digits, without a fraction of zeros."""
    if value >= 99.95:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def count_text(number: int) -> str:
    """An integer with thousands separators, or to three digits where nobody would count the others.

    >>> count_text(65_536), count_text(10**20)
    ('65,536', '1.00e+20')
    """
    if number < 10**15:
        return f"{number:,}"
    exponent = len(str(number)) - 1  # a float would overflow for a product of many axes
    return f"{number / 10**exponent:.2f}e+{exponent}"


def percent_text(fraction: float) -> str:
    """A fraction as a percentage; something that is not nothing never reads as 0 %.

    >>> [percent_text(fraction) for fraction in (0, 0.0001, 0.084, 0.5, 0.9999, 1)]
    ['0 %', '<0.1 %', '8.4 %', '50 %', '>99.9 %', '100 %']
    """
    percent = 100 * fraction
    if 0 < percent < 0.1:
        return "<0.1 %"
    if 99.9 < percent < 100:
        return ">99.9 %"
    text = f"{percent:.1f}" if abs(percent) < 1000 else f"{percent:,.0f}"
    return f"{text.removesuffix('.0')} %"


def plural(number: int, noun: str) -> str:
    """A count and its noun.

    >>> plural(1, "axis"), plural(3, "axis"), plural(1200, "step")
    ('1 axis', '3 axes', '1,200 steps')
    """
    if number == 1:
        return f"1 {noun}"
    many = {"axis": "axes", "copy": "copies", "batch": "batches"}.get(noun, f"{noun}s")
    return f"{count_text(number)} {many}"


def shorten(text: str, limit: int) -> str:
    """`text` in at most `limit` characters."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up, for `b` of at least 1."""
    return -(-a // b)


def is_finite_number(value: object) -> bool:
    """Whether a value is an int or float that is neither a bool, NaN nor infinite."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return False
    try:
        return math.isfinite(value)  # ty: ignore[invalid-argument-type]
    except (TypeError, OverflowError):  # an array of several, or an int beyond all floats
        return False
