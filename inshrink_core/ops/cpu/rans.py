"""Context rANS in numba, one pass over the symbols; `inshrink_core.ops.reference.rans` is the norm.

Whole steps of 16 or 32 lanes go to `wide_rans` where the processor can, all others to `rans_loops`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.execution import new_array
from inshrink_core.ops.cpu.compiled import brief, kernel, part
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

_N_BYTES = 256
"""Symbols are bytes: what has an entry for each of them needs no bound on its index."""

_COUNTED = 1 << 31
"""Symbols that 32-bit counters take without overflow."""

_CHUNK = 2048
"""Symbols counted at a time: their places are found in vectors before."""

_TABLES = 4

_EVERY, _NONE = np.int64(-1), np.int64(0)
_NO_CONTEXTS = np.zeros(max(2 * LANES, _CHUNK), np.uint8)
"""Contexts where there are none: read again and again, because a kernel without them would have to be
compiled, too."""

_NO_TABLE, _NO_ENTRIES = np.zeros((0, 4), np.uint32), np.zeros(0, np.uint32)

_WIDE = is_wide()
_encode_one, _encode_two = encode_steps
_decode_one, _decode_two = decode_steps


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


def _host(tensor: Tensor) -> NDArray[Any]:
    """Return values where the kernels can read them."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.cpu().contiguous()
    values: NDArray[Any] = tensor.numpy()
    return values


@lru_cache(maxsize=64)
def _turns(size: int) -> NDArray[np.uint16]:
    """Return by how many places the table that counts each symbol of a chunk is from the first."""
    turns: NDArray[np.uint16] = np.arange(_CHUNK, dtype=np.uint16) % np.uint16(_TABLES) * np.uint16(size)
    return turns


def _contexts_of(contexts: Tensor | None) -> tuple[NDArray[np.uint8], np.int64]:
    """Contexts, and the mask for places in them."""
    return (_NO_CONTEXTS, _NONE) if contexts is None else (_host(contexts), _EVERY)


def _bases(model: RansModel, row_entries: int) -> NDArray[np.uint32]:
    """Where the table of each possible context begins."""
    bases = np.zeros(MAX_CONTEXTS, np.uint32)
    bases[: model.rows.size] = model.rows * row_entries
    return bases


@kernel
def _count(
    symbols: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    every: np.int64,
    row: np.uint16,
    turn: NDArray[np.uint16],
    places: NDArray[np.uint16],
    counts: NDArray[np.uint32],
) -> None:  # pragma: no cover - compiled
    """Count into places of rows; a row's last place is for what is out of range."""
    top = _U8(row - _U16(1))
    for begin in range(0, symbols.size, _CHUNK):
        part = symbols[begin : begin + _CHUNK]
        known = contexts[begin & every :]
        for i in range(part.size):
            place = _U16(_U16(known[i] & _CONTEXT_BITS) * row)
            places[i] = _U16(_U16(place + _U16(part[i] if part[i] < top else top)) + turn[i])
        for i in range(part.size):
            counts[places[i]] += _U32(1)


def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """See `inshrink_core.ops.rans.rans_counts`."""
    values = _host(symbols)
    context_values, every = _contexts_of(contexts)
    # Rows as short as they can be stay in the first-level cache. Four tables in turn, because a counter
    # that is incremented twice in a row waits for its own store.
    row = min(n_symbols + 1, _N_BYTES)
    n_rows = MAX_CONTEXTS if every else 1
    total = np.zeros((n_contexts, n_symbols), np.int64)
    turns, places = _turns(n_rows * row), np.empty(_CHUNK, np.uint16)
    n_counted = min(n_rows, n_contexts)
    for begin in range(0, values.size, _COUNTED):
        span = slice(begin, begin + _COUNTED)
        counts = np.zeros((_TABLES, n_rows, row), np.uint32)
        known = context_values[span] if every else context_values
        _count(values[span], known, every, np.uint16(row), turns, places, counts.reshape(-1))
        total[:n_counted] += counts[:, :n_counted, :n_symbols].sum(0, dtype=np.int64)
    return torch.from_numpy(total)


def _wide_entries(frequencies: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return ``frequency - 1 | start << 12`` of each symbol, for whole steps."""
    n_tables, n_symbols = frequencies.shape
    starts = np.cumsum(frequencies, axis=1) - frequencies
    entries = np.zeros((n_tables, _N_BYTES), np.uint32)
    entries[:, :n_symbols] = np.maximum(frequencies - 1, 0) | starts << PRECISION
    return entries.reshape(-1)


def _encode_table(frequencies: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Limit of the state, reciprocal, bias, and shift with complement, of each symbol, for single lanes.

    x // f is (x * reciprocal) >> 32 + shift for x < 2**31 (T. Granlund and P. Montgomery, "Division by
    invariant integers using multiplication", PLDI 1994, section 4). For f = 1 the product gives x - 1,
    which the bias corrects.
    """
    starts = np.cumsum(frequencies, axis=1) - frequencies
    f = np.maximum(frequencies, 1)
    shifts = BIT_LENGTHS[f - 1]
    single = f == 1
    columns = (
        f << (31 - PRECISION),
        np.where(single, 0xFFFFFFFF, ((1 << (shifts + 31)) + f - 1) // f),
        starts + single * (_SIZE - 1),
        np.where(single, _SIZE - 1, (_SIZE - f) | ((shifts - 1) << 16)),
    )
    n_tables, n_symbols = frequencies.shape
    table = np.zeros((n_tables, _N_BYTES, len(columns)), np.uint32)
    table[:, :n_symbols] = np.stack(columns, axis=-1)
    return table.reshape(-1, len(columns))


@kernel
def _encode_blocks(
    symbols: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    every: np.int64,
    bases: NDArray[np.uint32],
    table: NDArray[np.uint32],
    entries: NDArray[np.uint32],
    states: NDArray[np.uint32],
    words: NDArray[np.uint16],
    n_words: NDArray[np.int64],
    block_length: int,
) -> np.int64:  # pragma: no cover - compiled
    """Code all blocks from the last, so that their words meet; return where they begin."""
    n_blocks, lanes = states.shape
    at = np.int64(words.size)
    for block in range(n_blocks - 1, -1, -1):
        begin = block * block_length
        part = symbols[begin : begin + block_length]
        known = contexts[begin : begin + block_length] if every else contexts
        state = states[block]
        end, whole = at, 0
        if _WIDE:
            whole = part.size // lanes if lanes == LANES or lanes == 2 * LANES else 0
        at = encode_lanes(part, known, every, bases, table, state, words, at, whole * lanes)
        if _WIDE:
            if whole > 0 and lanes == LANES:
                at = _encode_one(words, part, known, every, bases, entries, state, at, whole, at)
            elif whole > 0:
                at = _encode_two(words, part, known, every, bases, entries, state, at, whole, at)
        n_words[block] = end - at
    return at


def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    values = _host(symbols)
    known, every = _contexts_of(contexts)
    n_blocks = -(-values.size // block_length)
    states = np.full((n_blocks, lanes), INITIAL_STATE, np.uint32)
    words = new_array(values.size, np.uint16)
    n_words = np.empty(n_blocks, np.int64)
    wide = _WIDE and lanes in (LANES, 2 * LANES)
    # Blocks of whole steps only, as those of large tensors mostly are, need no table for single lanes.
    table = _NO_TABLE if wide and values.size % lanes == 0 else _encode_table(model.frequencies)
    entries = _wide_entries(model.frequencies) if wide else _NO_ENTRIES
    bases = _bases(model, _N_BYTES)
    begin = _encode_blocks(values, known, every, bases, table, entries, states, words, n_words, block_length)
    coded = torch.from_numpy(words[begin:].view(np.int16))
    return RansBlocks(coded, torch.from_numpy(n_words), torch.from_numpy(states.view(np.int32)))


@brief
def _decode_table(
    frequencies: NDArray[np.int64], table: NDArray[np.uint32]
) -> None:  # pragma: no cover - compiled
    """As `inshrink_core.ops.rans.decode_table`, flat."""
    n_tables, n_symbols = frequencies.shape
    at = 0
    for row in range(n_tables):
        for s in range(n_symbols):
            f = frequencies[row, s]
            for offset in range(f):
                table[at + offset] = _U32((f - 1) | (offset << PRECISION) | (s << (2 * PRECISION)))
            at += f


@kernel
def _decode_blocks(
    words: NDArray[np.uint16],
    n_words: NDArray[np.int64],
    contexts: NDArray[np.uint8],
    every: np.int64,
    bases: NDArray[np.uint32],
    table: NDArray[np.uint32],
    states: NDArray[np.uint32],
    out: NDArray[np.uint8],
    block_length: int,
) -> bool:  # pragma: no cover - compiled
    """Decode all blocks; return whether each took its words."""
    n_blocks, lanes = states.shape
    at = 0
    for block in range(n_blocks):
        begin = block * block_length
        part = out[begin : begin + block_length]
        known = contexts[begin : begin + block_length] if every else contexts
        own, state = words[at : at + n_words[block]], states[block]
        done = np.int64(0)
        if _WIDE:
            if lanes == LANES:
                done = _decode_one(
                    own, part, known, every, bases, table, state, 0, part.size // lanes, own.size
                )
            elif lanes == 2 * LANES:
                done = _decode_two(
                    own, part, known, every, bases, table, state, 0, part.size // lanes, own.size
                )
        start, taken = (done >> 32) * lanes, done & 0xFFFFFFFF
        if decode_lanes(own, known, every, bases, table, state, part, start, taken) != own.size:
            return False
        at += own.size
    return True


def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    words = _host(blocks.words).view(np.uint16)
    states = _host(blocks.states).view(np.uint32).copy()
    known, every = _contexts_of(contexts)
    symbols = torch.from_numpy(new_array(n, np.uint8))
    table = np.empty(model.frequencies.shape[0] * _SIZE, np.uint32)
    _decode_table(model.frequencies, table)
    whole = _decode_blocks(
        words,
        blocks.n_words.numpy(),
        known,
        every,
        _bases(model, _SIZE),
        table,
        states,
        symbols.numpy(),
        block_length,
    )
    if not whole:
        return symbols.zero_(), False
    return symbols, bool((states == INITIAL_STATE).all())
