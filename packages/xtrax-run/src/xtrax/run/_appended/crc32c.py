"""The checksum of a shard's index."""

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected


def _entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(_entry(value) for value in range(256))


def crc32c(data: bytes) -> int:
    """CRC-32C (RFC 3720, B.4) of a few bytes: a loop of Python, for an index of some kilobytes.

    Examples:
        >>> hex(crc32c(b"123456789"))
        '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF
