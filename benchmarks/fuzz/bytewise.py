"""Mutations of bytes that know nothing of what the bytes mean."""

from __future__ import annotations

import random
import struct
from typing import Final

EXTREMES: Final = (
    0, 1, 2, 7, 8, 127, 128, 255, 256, 4095, 4096, 32767, 32768, 65535, 65536, (1 << 24) - 1,
    (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 36, 1 << 40, (1 << 53) + 1, (1 << 63) - 1,
    1 << 63, (1 << 64) - 1,
)  # fmt: skip
"""Numbers at the edges of widths, and amounts that no tiny input has reason to ask for."""

_WIDTHS: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}

_VARINTS: Final = (
    *(b"\x80" * 8 + b"\x01", b"\xff" * 9, b"\xff" * 8 + b"\x7f"),
    *(b"\x80\x80\x00", b"\x80" * 20, b"\xff\x7f"),
)
"""Numbers of variable length at the edges of what is read."""


def mutate_bytes(
    rng: random.Random, data: bytes, donors: tuple[bytes, ...] = (), near_start: float = 0.0
) -> bytes:
    """Return the bytes with one to a few changes.

    Parameters
    ----------
    rng
        Source of randomness.
    data
        The bytes.
    donors
        Other inputs, pieces of which may replace some bytes.
    near_start
        Share of the changes that are near the start, where a payload has its fields.
    """
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 8))):
        at = int(rng.expovariate(1 / 6)) if rng.random() < near_start else rng.randrange(len(content) + 1)
        content = _once(rng, content, min(at, len(content) - 1), donors)
    return bytes(content)


def _once(rng: random.Random, content: bytearray, at: int, donors: tuple[bytes, ...]) -> bytearray:
    if not content:
        return bytearray(rng.randbytes(rng.randint(1, 16)))
    length = min(len(content) - at, 1 << rng.randint(0, 8))
    end = at + length
    kind = rng.randrange(15)
    if kind <= 2:
        content[at] ^= 1 << rng.randrange(8)
    elif kind <= 4:
        content[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif kind == 5:
        del content[at:]
    elif kind == 6:
        content[at:at] = rng.randbytes(length) if rng.random() < 0.5 else content[at:end]
    elif kind == 7:
        del content[at:end]
    elif kind == 8:
        content[at:end] = bytes(length)
    elif kind == 9:
        other = rng.randrange(len(content))
        content[other : other + length] = content[at:end]
    elif kind == 10:
        other = rng.randrange(len(content))
        second = bytes(content[other : other + length])
        content[other : other + length], content[at:end] = content[at:end], second
    elif kind == 11:
        width = rng.choice(tuple(_WIDTHS))
        number = rng.choice(EXTREMES) & ((1 << 8 * width) - 1)
        content[at : at + width] = struct.pack("<" + _WIDTHS[width], number)
    elif kind == 12:
        varint = rng.choice(_VARINTS)
        content[at : at + rng.choice((0, 1, len(varint)))] = varint
    elif kind == 13:
        content[at:] = rng.randbytes(rng.choice((0, 1, 3, 12, 60, 300)))
    else:
        donor = rng.choice(donors) if donors else bytes(content)
        start = rng.randrange(max(len(donor), 1))
        content[at:end] = donor[start : start + length]
    return content
