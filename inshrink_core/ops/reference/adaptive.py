"""The adaptive range coder in plain Python: the norm.

Every decision depends on all before it, so that there is nothing for a tensor operation to do at once. All
numbers fit signed 64-bit integers, which is what the compiled twin computes with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

CHANCE_BITS = 28
"""Precision of an estimate: with 16 bits, steps of 1/1024 would stop short of rare decisions."""

CODED_BITS = 16
"""Precision of the probability that divides the range: the range has 24 bits at least."""

RARE = 32
"""No probability is below 32 / 65536, so that both parts of every range are positive."""

SLOWEST = 1022
"""Uses after which an estimate goes on moving by 1/1024: it then forgets in about a thousand symbols."""

LOW_MASK = (1 << 32) - 1
SMALLEST_RANGE = 1 << 24


@register("adaptive_encode", Backend.REFERENCE)
def adaptive_encode(
    symbols: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    n_bits: int,
    n_contexts: int,
    out: NDArray[np.uint8],
) -> int:
    """See `inshrink_core.ops.adaptive.adaptive_encode`; returns the size, -1 where `out` is too small."""
    chances = np.full(n_contexts << n_bits, 1 << (CHANCE_BITS - 1), np.int64)
    uses = np.zeros(n_contexts << n_bits, np.int64)
    low = 0
    span = LOW_MASK
    size = 0
    for i in range(symbols.size):
        symbol = np.int64(symbols[i])
        base = np.int64(contexts[i]) << n_bits
        node: Any = 1
        for level in range(n_bits - 1, -1, -1):
            at = base + node
            chance = chances[at]
            coded = min(max(chance >> (CHANCE_BITS - CODED_BITS), RARE), (1 << CODED_BITS) - RARE)
            bound = (span >> CODED_BITS) * coded
            bit = (symbol >> level) & 1
            if bit:
                low += bound
                span -= bound
                chances[at] = chance - chance // (uses[at] + 2)
            else:
                span = bound
                chances[at] = chance + ((1 << CHANCE_BITS) - chance) // (uses[at] + 2)
            uses[at] = min(uses[at] + 1, SLOWEST)
            node = 2 * node + bit
            if low > LOW_MASK:
                low &= LOW_MASK
                last = size - 1
                while out[last] == 255:
                    out[last] = 0
                    last -= 1
                out[last] += 1
            while span < SMALLEST_RANGE:
                if size >= out.size:
                    return -1
                out[size] = low >> 24
                size += 1
                low = (low << 8) & LOW_MASK
                span <<= 8
    # One byte more tells the range apart, because every range holds a multiple of its smallest size.
    if size >= out.size:
        return -1
    final = (low + SMALLEST_RANGE - 1) >> 24
    if final > 255:
        last = size - 1
        while out[last] == 255:
            out[last] = 0
            last -= 1
        out[last] += 1
    out[size] = final & 255
    return size + 1


@register("adaptive_decode", Backend.REFERENCE)
def adaptive_decode(
    stream: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    n_bits: int,
    n_contexts: int,
    symbols: NDArray[np.uint8],
) -> bool:
    """See `inshrink_core.ops.adaptive.adaptive_decode`; fills `symbols`."""
    chances = np.full(n_contexts << n_bits, 1 << (CHANCE_BITS - 1), np.int64)
    uses = np.zeros(n_contexts << n_bits, np.int64)
    code: Any = 0
    for position in range(4):
        code = (code << 8) | (np.int64(stream[position]) if position < stream.size else 0)
    position = 4
    span = LOW_MASK
    for i in range(contexts.size):
        base = np.int64(contexts[i]) << n_bits
        node: Any = 1
        for _ in range(n_bits):
            at = base + node
            chance = chances[at]
            coded = min(max(chance >> (CHANCE_BITS - CODED_BITS), RARE), (1 << CODED_BITS) - RARE)
            bound = (span >> CODED_BITS) * coded
            if code >= bound:
                code -= bound
                span -= bound
                chances[at] = chance - chance // (uses[at] + 2)
                node = 2 * node + 1
            else:
                span = bound
                chances[at] = chance + ((1 << CHANCE_BITS) - chance) // (uses[at] + 2)
                node = 2 * node
            uses[at] = min(uses[at] + 1, SLOWEST)
            while span < SMALLEST_RANGE:
                # A damaged code may lie beyond its range; the mask keeps it small, whatever it decodes to.
                code = (
                    (code << 8) | (np.int64(stream[position]) if position < stream.size else 0)
                ) & LOW_MASK
                position += 1
                span <<= 8
        symbols[i] = node - (1 << n_bits)
    # The encoder's last byte rounds up to a multiple of the smallest range; three zeros are implied.
    return position == stream.size + 3 and code < SMALLEST_RANGE
