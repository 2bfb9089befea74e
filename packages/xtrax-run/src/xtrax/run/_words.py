"""Numbers in words."""


def plural(count: int, noun: str) -> str:
    """A count with its noun: `1 tile`, `3 tiles`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_bytes(size: float) -> str:
    """Bytes as `12.3 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
