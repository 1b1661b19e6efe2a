"""Context rANS in numba, one pass over the symbols; `inshrink_core.ops.reference_rans` is the norm.

Every index is proved in range, because compiled code checks none: tables have a row for each byte, slots
are twelve bits, and a word is read or written only inside its block. Indices are unsigned, which saves
the test for negative ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.rans import (
    INITIAL_STATE,
    PRECISION,
    RansBlocks,
    RansModel,
    block_sizes,
    decode_table,
)
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []

_U32 = np.uint32
_U64 = np.uint64
_ONE = np.uint64(1)
_LOWEST = np.uint32(INITIAL_STATE)
_SLOT = np.uint32((1 << PRECISION) - 1)
_SIZE = 1 << PRECISION

_N_BYTES = 256
"""Symbols and contexts are bytes: what has an entry for each of them needs no bound on its index."""

_COUNTED = 1 << 31
"""Symbols that 32-bit counters take without overflow."""


@njit(nogil=True, cache=True)
def _count(symbols: NDArray[np.uint8], contexts: Any, counts: Any) -> None:  # pragma: no cover - compiled
    """Count into (4, n_contexts, 256); contexts are in range, or None for a kernel without them."""
    # Four tables, because a counter that is incremented twice in a row waits for its own store.
    first, second, third, fourth = counts[0], counts[1], counts[2], counts[3]
    n = symbols.size
    n_fours = n - n % 4
    if contexts is None:
        for i in range(0, n_fours, 4):
            first[0, symbols[i]] += _U32(1)
            second[0, symbols[i + 1]] += _U32(1)
            third[0, symbols[i + 2]] += _U32(1)
            fourth[0, symbols[i + 3]] += _U32(1)
        for i in range(n_fours, n):
            first[0, symbols[i]] += _U32(1)
    else:
        for i in range(0, n_fours, 4):
            first[contexts[i], symbols[i]] += _U32(1)
            second[contexts[i + 1], symbols[i + 1]] += _U32(1)
            third[contexts[i + 2], symbols[i + 2]] += _U32(1)
            fourth[contexts[i + 3], symbols[i + 3]] += _U32(1)
        for i in range(n_fours, n):
            first[contexts[i], symbols[i]] += _U32(1)


@register("rans_counts", Backend.CPU)
def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """See `inshrink_core.ops.rans.rans_counts`."""
    if contexts is not None and contexts.numel() and int(contexts.max()) >= n_contexts:
        inside = contexts < n_contexts
        symbols, contexts = symbols[inside], contexts[inside]
    values = _host(symbols)
    total = np.zeros((n_contexts, _N_BYTES), np.int64)
    for begin in range(0, values.size, _COUNTED):
        span = slice(begin, begin + _COUNTED)
        counts = np.zeros((4, n_contexts, _N_BYTES), np.uint32)
        _count(values[span], None if contexts is None else _host(contexts)[span], counts)
        total += counts.sum(0, dtype=np.int64)
    return torch.from_numpy(np.ascontiguousarray(total[:, :n_symbols]))


def _host(tensor: Tensor) -> NDArray[np.uint8]:
    """Bytes where the kernels can read them."""
    return np.asarray(tensor.cpu().contiguous().numpy())


def _bases(model: RansModel, row_entries: int) -> NDArray[np.uint32]:
    """Where the table of each context begins, for each possible byte."""
    bases = np.zeros(_N_BYTES, np.uint32)
    bases[: model.rows.size] = model.rows * row_entries
    return bases


@njit(nogil=True, cache=True)
def _encode_table(frequencies: NDArray[np.int64]) -> NDArray[np.uint32]:  # pragma: no cover - compiled
    """Limit of the state, reciprocal, bias, and shift with complement, of each symbol.

    x // f is (x * reciprocal) >> 32 + shift for x < 2**31 (T. Granlund and P. Montgomery, "Division by
    invariant integers using multiplication", PLDI 1994, section 4). For f = 1 the product gives x - 1,
    which the bias corrects.
    """
    n_tables, n_symbols = frequencies.shape
    table = np.zeros((n_tables, _N_BYTES, 4), np.uint32)
    for row in range(n_tables):
        start = 0
        for s in range(n_symbols):
            f = frequencies[row, s]
            if f == 0:
                continue
            shift = 0
            while (1 << shift) < f:
                shift += 1
            table[row, s, 0] = f << (31 - PRECISION)
            if f == 1:
                table[row, s, 1] = 0xFFFFFFFF
                table[row, s, 2] = start + _SIZE - 1
                table[row, s, 3] = _SIZE - 1
            else:
                table[row, s, 1] = ((1 << (shift + 31)) + f - 1) // f
                table[row, s, 2] = start
                table[row, s, 3] = (_SIZE - f) | ((shift - 1) << 16)
            start += f
    return table


@njit(nogil=True, cache=True)
def _encode(
    symbols: NDArray[np.uint8],
    contexts: Any,
    bases: NDArray[np.uint32],
    table: NDArray[np.uint32],
    states: NDArray[np.uint32],
    words: NDArray[np.uint16],
) -> int:  # pragma: no cover - compiled
    """Code one block from its end, words downwards; return where they begin."""
    lanes = _U64(states.size)
    at = _U64(words.size)
    i = _U64(symbols.size)
    lane = i % lanes
    while i > _U64(0):
        if lane == _U64(0):
            lane = lanes
        while lane > _U64(0):
            lane -= _ONE
            i -= _ONE
            base = bases[0] if contexts is None else bases[contexts[i]]
            entry = _U64(base + _U32(symbols[i]))
            x = states[lane]
            if x >= table[entry, _U64(0)]:
                at -= _ONE
                words[at] = np.uint16(x & _U32(0xFFFF))
                x >>= _U32(16)
            last = table[entry, _U64(3)]
            quotient = (_U64(x) * _U64(table[entry, _U64(1)])) >> (_U64(32) + _U64(last >> _U32(16)))
            states[lane] = x + table[entry, _U64(2)] + _U32(quotient) * (last & _U32(0xFFFF))
    return int(at)


@register("rans_encode", Backend.CPU)
def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    values = _host(symbols)
    context_values = None if contexts is None else _host(contexts)
    bases, table = _bases(model, _N_BYTES), _encode_table(model.frequencies).reshape(-1, 4)
    sizes = block_sizes(values.size, block_length)
    states = np.full((sizes.size, lanes), INITIAL_STATE, np.uint32)
    scratch = np.empty(min(block_length, values.size), np.uint16)
    parts = [scratch[:0]]
    for block, size in enumerate(sizes.tolist()):
        span = slice(block * block_length, block * block_length + size)
        here = None if context_values is None else context_values[span]
        begin = _encode(values[span], here, bases, table, states[block], scratch[:size])
        parts.append(scratch[begin:size].copy())
    words = torch.from_numpy(np.concatenate(parts).view(np.int16))
    n_words = torch.tensor([part.size for part in parts[1:]], dtype=torch.int64)
    return RansBlocks(words, n_words, torch.from_numpy(states.view(np.int32)))


@njit(nogil=True, inline="always")
def _next(x: Any, table: Any, base: Any) -> Any:  # pragma: no cover - compiled
    """Symbol of a state, and the state before it was coded."""
    entry = table[base + (x & _SLOT)]
    x = ((entry & _SLOT) + _U32(1)) * (x >> _U32(PRECISION)) + ((entry >> _U32(PRECISION)) & _SLOT)
    return np.uint8(entry >> _U32(2 * PRECISION)), x


@njit(nogil=True, cache=True)
def _decode(
    words: NDArray[np.uint16],
    contexts: Any,
    bases: NDArray[np.uint32],
    table: NDArray[np.uint32],
    states: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> int:  # pragma: no cover - compiled
    """Decode one block; return how many words it took, or -1 if it wants more than there are."""
    lanes = _U64(states.size)
    n = _U64(out.size)
    at = _U64(0)
    end = _U64(words.size)
    i = _U64(0)
    while i < n:
        n_lanes = min(lanes, n - i)
        lane = _U64(0)
        while lane < n_lanes:
            out[i], x = _next(states[lane], table, bases[0] if contexts is None else bases[contexts[i]])
            if x < _LOWEST:
                if at >= end:
                    return -1
                x = (x << _U32(16)) | _U32(words[at])
                at += _ONE
            states[lane] = x
            lane += _ONE
            i += _ONE
    return int(at)


@register("rans_decode", Backend.CPU)
def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    words = blocks.words.cpu().numpy().view(np.uint16)
    states = blocks.states.cpu().numpy().view(np.uint32).copy()
    context_values = None if contexts is None else _host(contexts)
    bases, table = _bases(model, _SIZE), decode_table(model.frequencies).view(np.uint32).ravel()
    symbols = torch.empty(n, dtype=torch.uint8)
    out = symbols.numpy()
    at = 0
    for block, n_words in enumerate(blocks.n_words.tolist()):
        span = slice(block * block_length, (block + 1) * block_length)
        here = None if context_values is None else context_values[span]
        taken = _decode(words[at : at + n_words], here, bases, table, states[block], out[span])
        if taken != n_words:
            return symbols.zero_(), False
        at += n_words
    return symbols, bool((states == INITIAL_STATE).all())
