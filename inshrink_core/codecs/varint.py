"""Lengths in base 128, little endian: one byte for what is small."""

from __future__ import annotations

from inshrink_core.errors import DamagedError

__all__ = ["read_varint", "write_varint"]

_MAX_BYTES = 9
"""63 bits, the most a length may have."""


def write_varint(out: bytearray, value: int) -> None:
    """Append a number from 0 to 2**63 - 1.

    Examples
    --------
    >>> out = bytearray()
    >>> write_varint(out, 300)
    >>> out.hex()
    'ac02'
    """
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def read_varint(payload: bytes | memoryview, offset: int) -> tuple[int, int]:
    """Return a number and the offset after it.

    Raises
    ------
    DamagedError
        It ends early or is longer than nine bytes.
    """
    value = 0
    for i in range(_MAX_BYTES):
        if offset + i >= len(payload):
            raise DamagedError("a length ends early", where=f"offset {offset}")
        byte = payload[offset + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, offset + i + 1
    raise DamagedError(
        "a length is too long", where=f"offset {offset}", expected="at most 9 bytes", found="more"
    )
