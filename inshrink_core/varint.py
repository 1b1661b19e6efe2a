"""Numbers of variable length: seven bits per byte, least significant first, as in protobuf (LEB128)."""

from __future__ import annotations

from typing import Final

from inshrink_core.errors import DamagedError

_MAX_BYTES: Final = 9
"""63 bits, the largest length."""


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


def read_varint(payload: bytes | memoryview, offset: int, max_bytes: int = _MAX_BYTES) -> tuple[int, int]:
    """Return a number and the offset after it.

    Raises
    ------
    DamagedError
        The number ends early, or is longer than `max_bytes`.

    Examples
    --------
    >>> read_varint(bytes.fromhex("ac02"), 0)
    (300, 2)
    """
    value = 0
    for i in range(max_bytes):
        if offset + i >= len(payload):
            raise DamagedError(f"a number of variable length at offset {offset} ends early")
        byte = payload[offset + i]
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, offset + i + 1
    raise DamagedError(
        f"a number of variable length at offset {offset} is too long", expected=f"at most {max_bytes} bytes"
    )


def write_section(out: bytearray, section: bytes | memoryview) -> None:
    """Append bytes, preceded by their length."""
    write_varint(out, len(section))
    out += section


def read_section(payload: memoryview, offset: int) -> tuple[memoryview, int]:
    """Return bytes preceded by their length, and the offset after them.

    Raises
    ------
    DamagedError
        The payload ends early.
    """
    length, at = read_varint(payload, offset)
    if length > len(payload) - at:
        raise DamagedError(
            f"a section at offset {offset} is cut short",
            expected=f"{length} bytes",
            found=str(len(payload) - at),
        )
    return payload[at : at + length], at + length
