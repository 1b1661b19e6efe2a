"""Context rANS in numba, one pass over the symbols; `inshrink_core.ops.reference_rans` is the norm.

Every index is proved in range, because compiled code checks none: tables have a row for each byte, slots
are twelve bits, and a word is read or written only inside its block. Indices are unsigned, which saves
the test for negative ones. Whole steps of 16 or 32 lanes go to `wide_rans` where the processor can.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.compiled import kernel, part
from inshrink_core.ops.rans import (
    CONTEXT_MASK,
    INITIAL_STATE,
    MAX_CONTEXTS,
    PRECISION,
    RansBlocks,
    RansModel,
    block_sizes,
)
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend
from inshrink_core.ops.wide_rans import LANES, decode_steps, encode_steps, is_wide

__all__: list[str] = []

_U8, _U16, _U32, _U64 = np.uint8, np.uint16, np.uint32, np.uint64
_ONE = np.uint64(1)
_LOWEST = np.uint32(INITIAL_STATE)
_SLOT = np.uint32((1 << PRECISION) - 1)
_SIZE = 1 << PRECISION
_CONTEXT, _CONTEXT_BITS = np.uint64(CONTEXT_MASK), np.uint8(CONTEXT_MASK)

_N_BYTES = 256
"""Symbols are bytes: what has an entry for each of them needs no bound on its index."""

_COUNTED = 1 << 31
"""Symbols that 32-bit counters take without overflow."""

_CHUNK = 2048
"""Symbols counted at a time: their places are found in vectors before."""

_TABLES = 4

_EVERY, _NONE = np.int64(-1), np.int64(0)
_NO_CONTEXTS = np.zeros(2 * LANES, np.uint8)
"""Contexts where there are none: read again and again, because a kernel without them would have to be
compiled, too."""

_WIDE = is_wide()
_encode_one, _encode_two = encode_steps
_decode_one, _decode_two = decode_steps


def _host(tensor: Tensor) -> NDArray[np.uint8]:
    """Bytes where the kernels can read them."""
    return np.asarray(tensor.cpu().contiguous().numpy())


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
        if every:
            known = contexts[begin : begin + _CHUNK]
            for i in range(part.size):
                place = _U16(_U16(known[i] & _CONTEXT_BITS) * row)
                places[i] = _U16(_U16(place + _U16(min(part[i], top))) + turn[i])
        else:
            for i in range(part.size):
                places[i] = _U16(_U16(min(part[i], top)) + turn[i])
        for i in range(part.size):
            counts[places[i]] += _U32(1)


@register("rans_counts", Backend.CPU)
def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """See `inshrink_core.ops.rans.rans_counts`."""
    values = _host(symbols)
    context_values, every = _contexts_of(contexts)
    # Rows as short as they can be stay in the first-level cache. Four tables in turn, because a counter
    # that is incremented twice in a row waits for its own store.
    row = min(n_symbols + 1, _N_BYTES)
    n_rows = MAX_CONTEXTS if every else 1
    total = np.zeros((n_rows, row), np.int64)
    turn = np.arange(_CHUNK, dtype=np.uint16) % np.uint16(_TABLES) * np.uint16(total.size)
    places = np.empty(_CHUNK, np.uint16)
    for begin in range(0, values.size, _COUNTED):
        span = slice(begin, begin + _COUNTED)
        counts = np.zeros(_TABLES * total.size, np.uint32)
        known = context_values[span] if every else context_values
        _count(values[span], known, every, np.uint16(row), turn, places, counts)
        total += counts.reshape(_TABLES, n_rows, row).sum(0, dtype=np.int64)
    if n_rows < n_contexts:
        total = np.concatenate((total, np.zeros((n_contexts - n_rows, row), np.int64)))
    return torch.from_numpy(np.ascontiguousarray(total[:n_contexts, :n_symbols]))


@kernel
def _encode_tables(
    frequencies: NDArray[np.int64], table: NDArray[np.uint32], entries: NDArray[np.uint32]
) -> None:  # pragma: no cover - compiled
    """Limit of the state, reciprocal, bias, and shift with complement, of each symbol; and wide entries.

    x // f is (x * reciprocal) >> 32 + shift for x < 2**31 (T. Granlund and P. Montgomery, "Division by
    invariant integers using multiplication", PLDI 1994, section 4). For f = 1 the product gives x - 1,
    which the bias corrects.
    """
    n_tables, n_symbols = frequencies.shape
    for row in range(n_tables):
        start = 0
        for s in range(n_symbols):
            f = frequencies[row, s]
            if f == 0:
                continue
            at = row * _N_BYTES + s
            shift = 0
            while (1 << shift) < f:
                shift += 1
            table[at, 0] = f << (31 - PRECISION)
            if f == 1:
                table[at, 1] = 0xFFFFFFFF
                table[at, 2] = start + _SIZE - 1
                table[at, 3] = _SIZE - 1
            else:
                table[at, 1] = ((1 << (shift + 31)) + f - 1) // f
                table[at, 2] = start
                table[at, 3] = (_SIZE - f) | ((shift - 1) << 16)
            entries[at] = (f - 1) | (start << PRECISION)
            start += f


@part
def _encode(
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
            whole = part.size // lanes if lanes // LANES * LANES == lanes and lanes <= 2 * LANES else 0
        at = _encode(part, known, every, bases, table, state, words, at, whole * lanes)
        if _WIDE:
            if whole > 0 and lanes == LANES:
                at = _encode_one(words, part, known, every, bases, entries, state, at, whole)
            elif whole > 0:
                at = _encode_two(words, part, known, every, bases, entries, state, at, whole)
        n_words[block] = end - at
    return at


@register("rans_encode", Backend.CPU)
def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    values = _host(symbols)
    known, every = _contexts_of(contexts)
    n_blocks = block_sizes(values.size, block_length).size
    states = np.full((n_blocks, lanes), INITIAL_STATE, np.uint32)
    words = np.empty(values.size, np.uint16)
    n_words = np.empty(n_blocks, np.int64)
    n_entries = model.frequencies.shape[0] * _N_BYTES
    table, entries = np.zeros((n_entries, 4), np.uint32), np.zeros(n_entries, np.uint32)
    _encode_tables(model.frequencies, table, entries)
    bases = _bases(model, _N_BYTES)
    begin = _encode_blocks(values, known, every, bases, table, entries, states, words, n_words, block_length)
    coded = torch.from_numpy(words[begin:].copy().view(np.int16))
    return RansBlocks(coded, torch.from_numpy(n_words), torch.from_numpy(states.view(np.int32)))


@kernel
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


@part
def _decode(
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
        n_lanes = min(lanes, n - i)
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
        if _decode(own, known, every, bases, table, state, part, start, taken) != own.size:
            return False
        at += own.size
    return True


@register("rans_decode", Backend.CPU)
def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    words = blocks.words.cpu().numpy().view(np.uint16)
    states = blocks.states.cpu().numpy().view(np.uint32).copy()
    known, every = _contexts_of(contexts)
    symbols = torch.empty(n, dtype=torch.uint8)
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
