"""The colours of pages and figures, each kind of axis with its own; text stays legible on every ground."""

LIGHT = {
    "ground": "#f6f6f3",
    "panel": "#ffffff",
    "ink": "#1b1f24",
    "muted": "#565f6a",
    "line": "#d5d8dc",
    "vectorized": "#1f5fbf",
    "chunked": "#0b7263",
    "sequential": "#96520a",
    "deduplicated": "#9a2f77",
    "padded": "#6547c4",
    "other": "#565f6a",
    "fits": "#1c7038",
    "over": "#bd1e28",
}
DARK = {
    "ground": "#121518",
    "panel": "#1b1f24",
    "ink": "#e9ebee",
    "muted": "#a7b0ba",
    "line": "#3a4149",
    "vectorized": "#86b4ff",
    "chunked": "#54cdb8",
    "sequential": "#f2af55",
    "deduplicated": "#f59ad4",
    "padded": "#bba5ff",
    "other": "#a7b0ba",
    "fits": "#79d596",
    "over": "#ff8a8d",
}
TINT = 0.08  # how much of its colour the ground of an axis has


def blend(over: str, under: str, amount: float) -> str:
    """`amount` of one hex colour over another."""
    pairs = zip(bytes.fromhex(over[1:]), bytes.fromhex(under[1:]), strict=True)
    return "#" + bytes(round(amount * a + (1 - amount) * b) for a, b in pairs).hex()


def contrast(a: str, b: str) -> float:
    """The contrast ratio of two hex colours, from 1 to 21 (WCAG 2.2, relative luminance)."""

    def luminance(colour: str) -> float:
        channels = [value / 255 for value in bytes.fromhex(colour[1:])]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
