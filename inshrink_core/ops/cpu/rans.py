"""Context rANS in numba, one pass over the symbols; `inshrink_core.ops.rans` documents it.

Full steps of 16 or 32 lanes use `wide_rans` if the processor supports it, all others `rans_loops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Int64s, UInt8s, UInt16s, UInt32s, inlined, kernel, part
from inshrink_core.ops.cpu.wide_rans import LANES, decode_steps, encode_steps, is_wide
from inshrink_core.ops.rans import (
    BIT_LENGTHS,
    CONTEXT_MASK,
    INITIAL_STATE,
    MAX_CONTEXTS,
    PRECISION,
    RansBlocks,
    RansModel,
)

_U8, _U16, _U32, _U64 = np.uint8, np.uint16, np.uint32, np.uint64
_SIZE = 1 << PRECISION
_CONTEXT_BITS = np.uint8(CONTEXT_MASK)

_CHUNK = 2048
"""Number of symbols counted at a time; their table indices are computed in vectors first."""

_N_TABLES = 4

_EVERY, _NONE = np.int64(-1), np.int64(0)
_NO_CONTEXTS = np.zeros(max(2 * LANES, _CHUNK), np.uint8)
"""Stand-in for absent contexts. Kernels read it again and again; a variant without contexts would cost
compile time."""

_WIDE = is_wide()
_encode_stream, _encode_two = encode_steps
_decode_stream, _decode_two = decode_steps


_UNIT = np.uint64(1)
_LOWEST = np.uint32(INITIAL_STATE)
_SLOT = np.uint32((1 << PRECISION) - 1)
_CONTEXT = np.uint64(CONTEXT_MASK)


@part
def encode_lanes(
    symbols: UInt8s,
    contexts: UInt8s,
    every: np.int64,
    bases: UInt32s,
    table: UInt32s,
    states: UInt32s,
    words: UInt16s,
    end: int,
    stop: int,
) -> np.int64:  # pragma: no cover - compiled
    """Encode a block from its end down to a position, words downwards; return the start of the words."""
    lanes = _U64(states.size)
    mask = _U64(every)
    at = _U64(end)
    i = _U64(symbols.size)
    lane = i % lanes
    while i > _U64(stop):
        if lane == _U64(0):
            lane = lanes
        while lane > _U64(0):
            lane -= _UNIT
            i -= _UNIT
            entry = _U64(bases[contexts[i & mask] & _CONTEXT] + _U32(symbols[i]))
            x = states[lane]
            if x >= table[entry, _U64(0)]:
                at -= _UNIT
                words[at] = np.uint16(x & _U32(0xFFFF))
                x >>= _U32(16)
            last = table[entry, _U64(3)]
            quotient = (_U64(x) * _U64(table[entry, _U64(1)])) >> (_U64(32) + _U64(last >> _U32(16)))
            states[lane] = x + table[entry, _U64(2)] + _U32(quotient) * (last & _U32(0xFFFF))
    return np.int64(at)


@part
def decode_lanes(
    words: UInt16s,
    contexts: UInt8s,
    every: np.int64,
    bases: UInt32s,
    table: UInt32s,
    states: UInt32s,
    out: UInt8s,
    start: int,
    taken: int,
) -> np.int64:  # pragma: no cover - compiled
    """Decode a block from the start of a step; return the number of words used, or -1 if too few."""
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
                at += _UNIT
            states[lane] = x
            lane += _UNIT
            i += _UNIT
    return np.int64(at)


def _host(tensor: Tensor) -> NDArray[Any]:
    """Return the values in host memory."""
    return (tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()).numpy()


def _contexts_of(contexts: Tensor | None) -> tuple[UInt8s, np.int64]:
    """Return the contexts and the mask for indices into them."""
    return (_NO_CONTEXTS, _NONE) if contexts is None else (_host(contexts), _EVERY)


@kernel
def _count(
    symbols: UInt8s,
    contexts: UInt8s,
    every: np.int64,
    places: UInt16s,
    tables: UInt32s,
    counts: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled
    """Count fewer than 2**34 pairs; pairs out of range do not count.

    Four tables take turns, because two increments of a counter in a row wait for the first store. The last
    entry of each table takes pairs out of range. Rows are as short as possible to stay in the first-level
    cache.
    """
    n_contexts, n_symbols = counts.shape
    row = min(n_symbols + 1, 256)
    size = (n_contexts + 1) * row
    top, last, wide, apart = _U8(row - 1), _U8(n_contexts), _U16(row), _U16(size)
    for begin in range(0, symbols.size, _CHUNK):
        part = symbols[begin : begin + _CHUNK]
        known = contexts[begin & every :]
        for i in range(part.size):
            context, symbol = _U8(known[i] & _CONTEXT_BITS), part[i]
            place = _U16(_U16(context if context < last else last) * wide)
            place = _U16(place + _U16(symbol if symbol < top else top))
            places[i] = _U16(place + _U16(_U16(i & (_N_TABLES - 1)) * apart))
        for i in range(part.size):
            tables[places[i]] += _U32(1)
    for c in range(n_contexts):
        for s in range(n_symbols):
            total = np.int64(0)
            for k in range(_N_TABLES):
                total += np.int64(tables[k * size + c * row + s])
            counts[c, s] = total


def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """See `inshrink_core.ops.rans.rans_counts`."""
    counts, n_rows = np.zeros((n_contexts, n_symbols), np.int64), min(n_contexts, MAX_CONTEXTS)
    tables = np.zeros(_N_TABLES * (n_rows + 1) * min(n_symbols + 1, 256), np.uint32)
    _count(_host(symbols), *_contexts_of(contexts), np.empty(_CHUNK, np.uint16), tables, counts[:n_rows])
    return torch.from_numpy(counts)


@inlined
def _find_bases(rows: Int64s, row_entries: int, bases: UInt32s) -> None:
    """Compute the start of the table of each possible context."""
    for c in range(MAX_CONTEXTS):  # pragma: no cover - compiled
        bases[c] = _U32(rows[c] * row_entries if c < rows.size else 0)


@inlined
def _fill(frequencies: Int64s, table: UInt32s, entries: UInt32s) -> None:  # pragma: no cover - compiled
    """Fill in the encoder's entry of each symbol, table after table.

    Full steps use ``frequency - 1 | start << 12``. Single lanes use the limit of the state, reciprocal, bias,
    and shift with complement: x // f is (x * reciprocal) >> 32 + shift for x < 2**31 (T. Granlund and P.
    Montgomery, "Division by invariant integers using multiplication", PLDI 1994, section 4). For f = 1 the
    product gives x - 1; the bias corrects it.
    """
    n_tables, n_symbols = frequencies.shape
    for row in range(n_tables):
        start = 0
        for s in range(n_symbols):
            f, at = frequencies[row, s], row * n_symbols + s
            if f == 0:
                continue
            entries[at] = _U32((f - 1) | start << PRECISION)
            table[at, 0] = _U32(f << (31 - PRECISION))
            if f == 1:
                table[at, 1], table[at, 2], table[at, 3] = _U32(0xFFFFFFFF), _U32(start + _SIZE - 1), _SLOT
            else:
                shift = BIT_LENGTHS[f - 1]
                table[at, 1], table[at, 2] = _U32(((1 << (shift + 31)) + f - 1) // f), _U32(start)
                table[at, 3] = _U32((_SIZE - f) | (shift - 1) << 16)
            start += f


@kernel
def _encode_blocks(
    symbols: UInt8s,
    contexts: UInt8s,
    every: np.int64,
    tables: tuple[NDArray[Any], ...],
    states: UInt32s,
    words: UInt16s,
    n_words: Int64s,
    block_length: int,
) -> np.int64:  # pragma: no cover - compiled
    """Encode all blocks from the last, so that their words are adjacent; return the start of the words.

    `tables` has the model's arrays, and the buffers for `bases`, `table` and `entries`.
    """
    rows, frequencies, bases, table, entries = tables
    n_blocks, lanes = states.shape
    _find_bases(rows, frequencies.shape[1], bases)
    _fill(frequencies, table, entries)
    at = np.int64(words.size)
    for block in range(n_blocks - 1, -1, -1):
        begin = block * block_length
        part = symbols[begin : begin + block_length]
        known = contexts[begin : begin + block_length] if every else contexts
        state = states[block]
        state[:] = _LOWEST
        end, full_steps = at, 0
        if _WIDE:
            full_steps = part.size // lanes if lanes == LANES or lanes == 2 * LANES else 0
        at = encode_lanes(part, known, every, bases, table, state, words, at, full_steps * lanes)
        if _WIDE:
            if full_steps > 0 and lanes == LANES:
                at = _encode_stream(words, part, known, every, bases, entries, state, at, full_steps, at)
            elif full_steps > 0:
                at = _encode_two(words, part, known, every, bases, entries, state, at, full_steps, at)
        n_words[block] = end - at
    return at


def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    values = _host(symbols)
    known, every = _contexts_of(contexts)
    n_blocks, n_entries = -(-values.size // block_length), model.frequencies.size
    states, bases = np.empty((n_blocks, lanes), np.uint32), np.empty(MAX_CONTEXTS, np.uint32)
    table, entries = np.empty((n_entries, 4), np.uint32), np.empty(n_entries, np.uint32)
    words, n_words = np.empty(values.size, np.uint16), np.empty(n_blocks, np.int64)
    tables = (*model, bases, table, entries)
    begin = _encode_blocks(values, known, every, tables, states, words, n_words, block_length)
    coded = torch.from_numpy(words[begin:].view(np.int16))
    return RansBlocks(coded, torch.from_numpy(n_words), torch.from_numpy(states.view(np.int32)))


@kernel
def _decode_blocks(
    words: UInt16s,
    n_words: Int64s,
    contexts: UInt8s,
    every: np.int64,
    tables: tuple[NDArray[Any], ...],
    states: UInt32s,
    out: UInt8s,
    block_length: int,
) -> bool:  # pragma: no cover - compiled
    """Decode all blocks; return whether each used exactly its words and ended in the encoder's initial state.

    `tables` has the model's arrays, and the buffers for `bases` and `table`. The latter becomes the result of
    `inshrink_core.ops.rans.decode_table`, flat.
    """
    rows, frequencies, bases, table = tables
    _find_bases(rows, _SIZE, bases)
    at = 0
    for row in range(frequencies.shape[0]):
        for s in range(frequencies.shape[1]):
            f = frequencies[row, s]
            for offset in range(f):
                table[at + offset] = _U32((f - 1) | (offset << PRECISION) | (s << (2 * PRECISION)))
            at += f
    n_blocks, lanes = states.shape
    at = 0
    for block in range(n_blocks):
        begin = block * block_length
        part = out[begin : begin + block_length]
        known = contexts[begin : begin + block_length] if every else contexts
        coded, state = words[at : at + n_words[block]], states[block]
        done = np.int64(0)
        if _WIDE:
            arguments = (coded, part, known, every, bases, table, state, 0, part.size // lanes, coded.size)
            if lanes == LANES:
                done = _decode_stream(*arguments)
            elif lanes == 2 * LANES:
                done = _decode_two(*arguments)
        start, taken = (done >> 32) * lanes, done & 0xFFFFFFFF
        if decode_lanes(coded, known, every, bases, table, state, part, start, taken) != coded.size:
            return False
        for lane in range(lanes):
            if state[lane] != _LOWEST:
                return False
        at += coded.size
    return True


def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    words, states = _host(blocks.words).view(np.uint16), _host(blocks.states).view(np.uint32).copy()
    known, every = _contexts_of(contexts)
    symbols = np.empty(n, np.uint8)
    table = np.empty(model.frequencies.shape[0] * _SIZE, np.uint32)
    tables, n_words = (*model, np.empty(MAX_CONTEXTS, np.uint32), table), blocks.n_words.numpy()
    intact = _decode_blocks(words, n_words, known, every, tables, states, symbols, block_length)
    if not intact:
        symbols[:] = 0
    return torch.from_numpy(symbols), intact
