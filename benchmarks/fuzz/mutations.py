"""Mutations of bytes that know nothing of their meaning, and of structured values (msgpack, JSON, TOML)."""

from __future__ import annotations

import copy
import random
import struct
from typing import Any, Final

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


TEXTS: Final = (
    "", "a", "../x", "../../../../tmp/x", "/etc/passwd", "C:\\x", "a/../../b", "x\0y", "\x1b[2J", "con",
    "é" * 300, "n" * 5000, "a/" * 300 + "a", ".", "..", "float32", "float64", "bool", "complex64", "weight",
    "exp_avg", "same/1", "stored/1", "zstd/1", "lossless/9", "lattice/1", "torch",
    "\N{RIGHT-TO-LEFT OVERRIDE}x", "__proto__", "nan", "1e999", "-1", "%s%n{0}", "[red]x[/red]", "[/x]",
)  # fmt: skip

_MAX_TIMES: Final = 300


def hostile_value(rng: random.Random) -> Any:
    """Return a value that stands where another is expected."""
    kind = rng.randrange(12)
    if kind <= 3:
        return rng.choice(EXTREMES) * rng.choice((1, 1, 1, -1))
    if kind == 4:
        return rng.choice((float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324, 0.5))
    if kind <= 6:
        return rng.choice(TEXTS)
    if kind == 7:
        return rng.choice((None, True, False, [], {}))
    if kind == 8:
        return rng.randbytes(rng.choice((0, 1, 16, 32, 64)))
    if kind == 9:
        return [rng.choice(EXTREMES) for _ in range(rng.choice((1, 2, 4, 70)))]
    if kind == 10:
        return {rng.choice(TEXTS): rng.choice(EXTREMES) for _ in range(rng.choice((1, 2, 5)))}
    value: Any = rng.choice((1, "x", [], None))
    for _ in range(rng.choice((2, 20, 70, 400))):
        value = [value] if rng.random() < 0.7 else {"x": value}
    return value


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """List every (container, key) of a value; an index or a key of a map."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        found.append((value, key))
        _places(item, found)
    return found


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Return a copy with one to a few nodes changed."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(root, [])
        container, key = rng.choice(places)
        _change(rng, container, key)
        if not root:
            root = [None]
    return root[0]


def _change(rng: random.Random, container: Any, key: Any) -> None:
    """Change one node in place."""
    item, kind = container[key], rng.randrange(10)
    if kind <= 1:
        container[key] = hostile_value(rng)
    elif kind == 2 and len(container) > 1:
        del container[key]
    elif kind == 3 and isinstance(container, list):
        container[key:key] = [copy.deepcopy(item)] * rng.choice((1, 1, 2, _MAX_TIMES))
    elif kind == 3:
        container[rng.choice(TEXTS)] = copy.deepcopy(item)
    elif kind == 4 and isinstance(container, list):
        other = rng.randrange(len(container))
        container[key], container[other] = container[other], container[key]
    elif kind == 4:
        container[rng.choice(TEXTS)] = container.pop(key)
    elif isinstance(item, bool) or item is None:
        container[key] = rng.choice((True, False, None, 0, 1, "x"))
    elif isinstance(item, int):
        container[key] = rng.choice(
            (item + 1, item - 1, item * 2, -item, item ^ (1 << rng.randrange(40)), rng.choice(EXTREMES))
        )
    elif isinstance(item, float):
        container[key] = rng.choice((-item, item * 1e300, float("nan"), float("inf"), 0, str(item)))
    elif isinstance(item, str):
        container[key] = rng.choice((rng.choice(TEXTS), item + "x", item[:-1], item * 2, item.upper()))
    elif isinstance(item, bytes):
        container[key] = mutate_bytes(rng, item)
    else:
        container[key] = hostile_value(rng)
