"""Whole rANS streams in numba: one call each way, because a small tensor's time is that of its calls.

`inshrink_core.ops.streams` is the norm, and what says where a stream is damaged.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inshrink_core.execution import new_array
from inshrink_core.ops import streams
from inshrink_core.ops.cpu.compiled import Int64s, UInt8s, UInt16s, UInt32s, inlined, kernel
from inshrink_core.ops.cpu.rans import (
    CHUNK,
    COUNTED,
    N_TABLES,
    contexts_of,
    count,
    decode_blocks,
    encode_blocks,
    host,
)
from inshrink_core.ops.cpu.tables import (
    COST_BITS,
    COSTS,
    TABLE_BITS,
    Scratch,
    choose_kernel,
    read_kernel,
    write_kernel,
)
from inshrink_core.ops.rans import INITIAL_STATE, MAX_CONTEXTS, PRECISION
from inshrink_core.ops.registry import in_torch
from inshrink_core.ops.streams import (
    COARSE_BELOW,
    CONSTANT,
    HEADER,
    MAX_BLOCK_LOG2,
    MAX_LANES_LOG2,
    PRECISIONS,
    RANS,
    SHORTEST_BLOCK_LOG2,
    STATE_BITS,
    STATE_BYTES,
    STATE_SHARE,
    WARP_LOG2,
    WORD_BYTES,
    Coded,
)

__all__: list[str] = []

_U8, _U16, _U32 = np.uint8, np.uint16, np.uint32

_N_SYMBOLS = 256

_HEADER_NBYTES = HEADER.size
_BEGIN = 1 + _HEADER_NBYTES
"""Where tables begin, behind the first byte and the header."""

_MOST_TABLES_NBYTES = _BEGIN + (MAX_CONTEXTS * 5 + MAX_CONTEXTS * _N_SYMBOLS * TABLE_BITS + 7) // 8


class _Room(NamedTuple):
    """Arrays that the calls of a thread share, for any alphabet and contexts."""

    chosen: Scratch
    tables: UInt32s
    places: UInt16s
    bases: UInt32s
    table: UInt32s
    entries: UInt32s
    head: UInt8s
    slots: UInt32s


class _Rooms(threading.local):
    def __init__(self) -> None:
        n = MAX_CONTEXTS * _N_SYMBOLS
        self.room = _Room(
            Scratch.of(MAX_CONTEXTS, _N_SYMBOLS),
            np.empty(N_TABLES * (n + _N_SYMBOLS), np.uint32),
            np.empty(CHUNK, np.uint16),
            np.empty(MAX_CONTEXTS, np.uint32),
            np.empty((n, 4), np.uint32),
            np.empty(n, np.uint32),
            np.empty(_MOST_TABLES_NBYTES, np.uint8),
            np.empty(MAX_CONTEXTS << PRECISION, np.uint32),
        )


_rooms = _Rooms()


@inlined
def _bit_length(value: int) -> int:  # pragma: no cover - compiled
    """Return the bits of a number that is not negative."""
    length = 0
    while value >> length > 0:
        length += 1
    return length


@inlined
def _shape(n: int, data_bits: int) -> tuple[int, int]:  # pragma: no cover - compiled
    """Return the logarithms of lanes and block length (`stream_shape`)."""
    budget = max(data_bits // (STATE_BITS * STATE_SHARE), 1)
    log2_lanes = min(_bit_length(budget) - 1, WARP_LOG2)
    whole = _bit_length(max(n - 1, (1 << log2_lanes) - 1))
    per_block = _bit_length(max(n // max(budget >> WARP_LOG2, 1), 1))
    return log2_lanes, min(max(per_block, SHORTEST_BLOCK_LOG2), whole, MAX_BLOCK_LOG2)


@inlined
def _get(payload: UInt8s, at: int) -> np.int64:  # pragma: no cover - compiled
    """Read 32 bits."""
    value = np.int64(0)
    for k in range(STATE_BYTES):
        value |= np.int64(payload[at + k]) << (8 * k)
    return value


@kernel
def _write(
    symbols: UInt8s,
    contexts: UInt8s,
    every: np.int64,
    n_symbols: int,
    n_contexts: int,
    apart: bool,
    log2_lanes: int,
    log2_block: int,
    costs: Int64s,
    room: _Room,
    states: UInt32s,
    n_words: Int64s,
    words: UInt16s,
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Write what a stream begins with into `head`; return its size, how many blocks follow, and their place.

    In the place of the size, 0 where packed bits are smaller, and -1 where not all symbols were counted: the
    number of those that were comes last. Lanes and block length are by the rule where they are negative.
    """
    n, head = symbols.size, room.head
    counts, rows, frequencies = room.chosen.counts, room.chosen.rows, room.chosen.frequencies
    count(symbols, contexts, every, n_contexts, n_symbols, room.places, room.tables, counts)
    n_counted, n_used, top = np.int64(0), 0, 0
    for s in range(n_symbols):
        total = np.int64(0)
        for c in range(n_contexts):
            total += counts[c * n_symbols + s]
        n_counted += total
        if total > 0:
            n_used, top = n_used + 1, s
    if n_counted != n:
        return -1, 0, int(n_counted)
    if n_used == 1:
        head[0], head[1] = CONSTANT, top
        return 2, 0, words.size
    # Symbols beyond the last one that occurs have no place in any table.
    size = top + 1
    for c in range(1, n_contexts):
        for s in range(size):
            counts[c * size + s] = counts[c * n_symbols + s]
    precisions = PRECISIONS[: 1 if n >= COARSE_BELOW else PRECISIONS.size]
    n_tables, precision, cost, n_bits = choose_kernel(n_contexts, size, apart, precisions, costs, room.chosen)
    stored = (n * _bit_length(n_symbols - 1) + 7) // 8
    if cost >= (8 * stored - n_bits) << COST_BITS:
        return 0, 0, 0
    if log2_lanes < 0:
        log2_lanes, log2_block = _shape(n, cost >> COST_BITS)
    chosen, used = frequencies[: n_tables * size].reshape(n_tables, size), rows[:n_contexts]
    head[0], head[1], head[2] = RANS, log2_lanes | precision << 4, log2_block
    head[3] = n_tables - 1
    end = _BEGIN + ((n_bits + 7) >> 3)
    head[_BEGIN:end] = _U8(0)
    write_kernel(used, chosen, precision, head[_BEGIN:end])
    for k in range(n_tables * size):
        frequencies[k] <<= PRECISION - precision
    n_blocks = ((n - 1) >> log2_block) + 1
    lanes = states[: n_blocks << log2_lanes].reshape(n_blocks, 1 << log2_lanes)
    tables = (used, chosen, room.bases, room.table, room.entries)
    return (
        end,
        n_blocks,
        encode_blocks(symbols, contexts, every, tables, lanes, words, n_words, 1 << log2_block),
    )


def write_stream(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int,
    apart: bool,
    shape: tuple[int, int] | None,
) -> bytes:
    """See `streams.write_stream`."""
    values, n = host(symbols), symbols.numel()
    if n >= COUNTED:
        return in_torch(streams.write_stream)(symbols, contexts, n_symbols, n_contexts, apart, shape)
    log2_lanes, log2_block = (-1, -1) if shape is None else (one.bit_length() - 1 for one in shape)
    n_blocks = -(-n >> (SHORTEST_BLOCK_LOG2 if shape is None else log2_block))
    n_states = n_blocks << (WARP_LOG2 if shape is None else log2_lanes)
    room, words = _rooms.room, new_array(n, np.uint16, brief=True)
    states, n_words = np.empty(n_states, np.uint32), np.empty(n_blocks, np.int64)
    size, n_blocks, begin = _write(
        values,
        *contexts_of(contexts),
        n_symbols,
        n_contexts,
        apart,
        log2_lanes,
        log2_block,
        COSTS,
        room,
        states,
        n_words,
        words,
    )
    if size < 0:
        streams.check_counted(n, begin, n_symbols, n_contexts)
    if size <= 0:
        return b""
    # The last block has what remains of the words.
    parts = [room.head[:size].data]
    if n_blocks:
        lanes = states[: n_blocks << int(room.head[1] & 15)]
        parts += [n_words[: n_blocks - 1].astype("<u4").data, lanes.data, words[begin:].data]
    stream = b"".join(parts)
    return stream if len(stream) <= streams.stored_bytes(n, n_symbols) or not n_blocks else b""


@kernel
def _read(
    payload: UInt8s,
    n_symbols: int,
    n_contexts: int,
    contexts: UInt8s,
    every: np.int64,
    room: _Room,
    states: UInt32s,
    n_words: Int64s,
    words: UInt16s,
    out: UInt8s,
) -> bool:  # pragma: no cover - compiled
    """Decode a stream; return whether it is intact. Every length is checked before its bytes are taken."""
    rows, frequencies = room.chosen.rows, room.chosen.frequencies
    log2_lanes, log2_block = np.int64(payload[0] & 15), np.int64(payload[1])
    precision, n_tables = np.int64(payload[0] >> 4), np.int64(payload[2]) + 1
    if log2_lanes > MAX_LANES_LOG2 or log2_lanes > log2_block or log2_block > MAX_BLOCK_LOG2:
        return False
    if n_tables > n_contexts or precision < 1 or precision > PRECISION:
        return False
    chosen, used = frequencies[: n_tables * n_symbols].reshape(n_tables, n_symbols), rows[:n_contexts]
    tables = payload[_HEADER_NBYTES:]
    n_bits = read_kernel(tables, 8 * tables.size, precision, used, chosen)
    if n_bits < 0 or (n_bits & 7 and tables[n_bits >> 3] >> (n_bits & 7) != 0):
        return False
    for k in range(n_tables * n_symbols):
        frequencies[k] <<= PRECISION - precision
    n_blocks = ((out.size - 1) >> log2_block) + 1
    at = ((n_bits + 7) >> 3) + _HEADER_NBYTES
    end = at + STATE_BYTES * (n_blocks - 1 + (n_blocks << log2_lanes))
    if end > payload.size or (payload.size - end) % WORD_BYTES != 0:
        return False
    left, block_length = np.int64((payload.size - end) // WORD_BYTES), 1 << log2_block
    for block in range(n_blocks):
        n_words[block] = _get(payload, at) if block < n_blocks - 1 else left
        at += STATE_BYTES if block < n_blocks - 1 else 0
        left -= n_words[block]
        # A symbol takes at most one word.
        if left < 0 or n_words[block] > min(block_length, out.size - block * block_length):
            return False
    for k in range(n_blocks << log2_lanes):
        state = _get(payload, at)
        if state < INITIAL_STATE or state >> (STATE_BITS - 1) > 0:
            return False
        states[k], at = _U32(state), at + STATE_BYTES
    body = payload[end:]
    found = words[: body.size // WORD_BYTES]
    for k in range(found.size):
        found[k] = _U16(_U16(body[2 * k]) | _U16(_U16(body[2 * k + 1]) << _U16(8)))
    lanes = states[: n_blocks << log2_lanes].reshape(n_blocks, 1 << log2_lanes)
    model = (used, chosen, room.bases, room.slots)
    intact: bool = decode_blocks(found, n_words, contexts, every, model, lanes, out, block_length)
    return intact


def read_stream(coded: Coded, contexts: Tensor | None) -> Tensor:
    """See `streams.read_stream`."""
    payload, n, n_symbols, n_contexts, _ = coded
    stored = np.frombuffer(payload, np.uint8)
    if stored.size >= _HEADER_NBYTES and -(-n >> int(stored[1])) <= stored.size:
        out = new_array(n, np.uint8)
        n_states = stored.size // STATE_BYTES + 1
        if _read(
            stored,
            n_symbols,
            n_contexts,
            *contexts_of(contexts),
            _rooms.room,
            np.empty(n_states, np.uint32),
            np.empty(n_states, np.int64),
            new_array(stored.size // WORD_BYTES, np.uint16, brief=True),
            out,
        ):
            return torch.from_numpy(out)
    # The reference finds what is wrong with it.
    return in_torch(streams.read_stream)(coded, contexts)
