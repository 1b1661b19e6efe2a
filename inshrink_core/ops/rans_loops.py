"""The steps of a block one lane at a time, compiled for `cpu_rans` to call: any lanes, any processor.

Every index is proved in range, because compiled code checks none: tables have a row for each byte, slots
are twelve bits, and a word is read or written only inside its block. Indices are unsigned, which saves
the test for negative ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.compiled import part
from inshrink_core.ops.rans import CONTEXT_MASK, INITIAL_STATE, PRECISION

__all__ = ["decode_lanes", "encode_lanes"]

_U8, _U32, _U64 = np.uint8, np.uint32, np.uint64
_ONE = np.uint64(1)
_LOWEST = np.uint32(INITIAL_STATE)
_SLOT = np.uint32((1 << PRECISION) - 1)
_CONTEXT = np.uint64(CONTEXT_MASK)


@part
def encode_lanes(
    symbols: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    every: np.int64,
    bases: NDArray[np.uint32],
    table: NDArray[np.uint32],
    states: NDArray[np.uint32],
    words: NDArray[np.uint16],
    end: int,
    stop: int,
) -> np.int64:  # pragma: no cover - compiled
    """Code one block from its end down to a place, words downwards; return where they begin."""
    lanes = _U64(states.size)
    mask = _U64(every)
    at = _U64(end)
    i = _U64(symbols.size)
    lane = i % lanes
    while i > _U64(stop):
        if lane == _U64(0):
            lane = lanes
        while lane > _U64(0):
            lane -= _ONE
            i -= _ONE
            entry = _U64(bases[contexts[i & mask] & _CONTEXT] + _U32(symbols[i]))
            x = states[lane]
            if x >= table[entry, _U64(0)]:
                at -= _ONE
                words[at] = np.uint16(x & _U32(0xFFFF))
                x >>= _U32(16)
            last = table[entry, _U64(3)]
            quotient = (_U64(x) * _U64(table[entry, _U64(1)])) >> (_U64(32) + _U64(last >> _U32(16)))
            states[lane] = x + table[entry, _U64(2)] + _U32(quotient) * (last & _U32(0xFFFF))
    return np.int64(at)


@part
def decode_lanes(
    words: NDArray[np.uint16],
    contexts: NDArray[np.uint8],
    every: np.int64,
    bases: NDArray[np.uint32],
    table: NDArray[np.uint32],
    states: NDArray[np.uint32],
    out: NDArray[np.uint8],
    start: int,
    taken: int,
) -> np.int64:  # pragma: no cover - compiled
    """Decode one block from a whole step on; return how many words it took, or -1 if it wants more."""
    lanes = _U64(states.size)
    mask = _U64(every)
    n = _U64(out.size)
    at = _U64(taken)
    end = _U64(words.size)
    i = _U64(start)
    while i < n:
        n_lanes = lanes if lanes < n - i else n - i
        lane = _U64(0)
        while lane < n_lanes:
            x = states[lane]
            entry = table[bases[contexts[i & mask] & _CONTEXT] + (x & _SLOT)]
            x = ((entry & _SLOT) + _U32(1)) * (x >> _U32(PRECISION)) + ((entry >> _U32(PRECISION)) & _SLOT)
            out[i] = _U8(entry >> _U32(2 * PRECISION))
            if x < _LOWEST:
                if at >= end:
                    return np.int64(-1)
                x = (x << _U32(16)) | _U32(words[at])
                at += _ONE
            states[lane] = x
            lane += _ONE
            i += _ONE
    return np.int64(at)
