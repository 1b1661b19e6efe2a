"""Numbers of variable length, and bytes preceded by their length.

A number takes seven bits per byte, least significant first, as in protobuf (LEB128).
"""

from __future__ import annotations

from dataclasses import dataclass
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


def write_section(out: bytearray, section: bytes | memoryview) -> None:
    """Append bytes, preceded by their length."""
    write_varint(out, len(section))
    out += section


@dataclass(slots=True)
class Cursor:
    """Reads a payload sequentially; every length is checked before its bytes are read.

    Parameters
    ----------
    rest
        The bytes that are not read yet.

    Raises
    ------
    DamagedError
        From every method: the payload ends early, or a number is too long.

    Examples
    --------
    >>> cursor = Cursor(memoryview(bytes.fromhex("ac0261")))
    >>> cursor.varint(), bytes(cursor.rest)
    (300, b'a')
    """

    rest: memoryview

    def take(self, nbytes: int) -> memoryview:
        """Return the next bytes."""
        if nbytes > len(self.rest):
            found = str(len(self.rest))
            raise DamagedError("a payload is cut short", expected=f"{nbytes} bytes", found=found)
        taken, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return taken

    def varint(self, max_bytes: int = _MAX_BYTES) -> int:
        """Return the next number of variable length."""
        value = 0
        for place, byte in enumerate(self.rest[:max_bytes]):
            value |= (byte & 127) << 7 * place
            if byte < 128:
                self.rest = self.rest[place + 1 :]
                return value
        raise DamagedError(
            "a number of variable length ends early or is too long", expected=f"at most {max_bytes} bytes"
        )

    def section(self) -> memoryview:
        """Return the next section: a length, followed by that many bytes."""
        return self.take(self.varint())
