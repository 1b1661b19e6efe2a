"""Triton kernels of context rANS: a program codes a block, with its lanes in step.

`inshrink_core.ops.rans` documents the functions. Importing this module needs Triton. Every address is proved
in range or masked: slots have twelve bits, contexts and symbols are checked before, and a word outside its
block is neither read nor written.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from inshrink_core.ops.rans import (
    CONTEXT_MASK,
    INITIAL_STATE,
    MAX_CONTEXTS,
    PRECISION,
    RansBlocks,
    RansModel,
)

_INITIAL = tl.constexpr(INITIAL_STATE)
_PRECISION = tl.constexpr(PRECISION)
_SLOT = tl.constexpr((1 << PRECISION) - 1)
_LIMIT_SHIFT = tl.constexpr(31 - PRECISION)
_CONTEXT = tl.constexpr(CONTEXT_MASK)

_COPIED = 1024
"""Number of words per iteration of a copy."""

_WARP = 32


@triton.jit
def _encode(
    symbols: tl.tensor,
    contexts: tl.tensor,
    rows: tl.tensor,
    frequencies: tl.tensor,
    starts: tl.tensor,
    scratch: tl.tensor,
    begins: tl.tensor,
    states: tl.tensor,
    n: tl.tensor,
    block_length: tl.tensor,
    n_symbols: tl.tensor,
    with_contexts: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Encode a block, last step first: ``x = (x // f) * 2**PRECISION + c + x % f`` for the state x of a lane.

    Before, states with ``x >= 2**(31 - PRECISION) f`` emit their lower 16 bits. `scratch` receives these
    words from the block's end down to `begins`.
    """
    block = tl.program_id(0).to(tl.int64)
    first = block * block_length
    size = tl.minimum(n - first, block_length)
    lane = tl.arange(0, lanes)
    state = tl.full((lanes,), _INITIAL, tl.int32)
    begin = size
    n_steps = (size + lanes - 1) // lanes
    for back in range(n_steps):
        local = (n_steps - 1 - back) * lanes + lane
        here = local < size
        place = first + local
        entry = tl.load(symbols + place, mask=here, other=0).to(tl.int32)
        context = tl.zeros((lanes,), tl.int32)
        if with_contexts:
            context = tl.load(contexts + place, mask=here, other=0).to(tl.int32) & _CONTEXT
        entry += tl.load(rows + context) * n_symbols
        f = tl.load(frequencies + entry, mask=here, other=1)
        start = tl.load(starts + entry, mask=here, other=0)
        # f << 19 overflows 31 bits for f = 4096.
        spill = here & ((state >> _LIMIT_SHIFT) >= f)
        rank = tl.cumsum(spill.to(tl.int32), 0)
        begin -= tl.sum(spill.to(tl.int32), 0)
        tl.store(scratch + first + begin + rank - 1, state.to(tl.int16), mask=spill)
        state = tl.where(spill, state >> 16, state)
        quotient = state // f
        state = tl.where(here, (quotient << _PRECISION) + state - quotient * f + start, state)
    tl.store(begins + block, begin)
    tl.store(states + block * lanes + lane, state)


@triton.jit
def _gather_words(
    scratch: tl.tensor,
    begins: tl.tensor,
    offsets: tl.tensor,
    words: tl.tensor,
    n: tl.tensor,
    block_length: tl.tensor,
    turn: tl.constexpr,
) -> None:
    """Copy the words of a block from `scratch` to their offset in the stream."""
    block = tl.program_id(0).to(tl.int64)
    first = block * block_length
    size = tl.minimum(n - first, block_length)
    begin = tl.load(begins + block)
    offset = tl.load(offsets + block)
    for done in range(0, size - begin, turn):
        place = done + tl.arange(0, turn)
        here = place < size - begin
        word = tl.load(scratch + first + begin + place, mask=here, other=0)
        tl.store(words + offset + place, word, mask=here)


@triton.jit
def _decode(
    words: tl.tensor,
    ends: tl.tensor,
    states: tl.tensor,
    contexts: tl.tensor,
    rows: tl.tensor,
    table: tl.tensor,
    out: tl.tensor,
    intact: tl.tensor,
    n: tl.tensor,
    block_length: tl.tensor,
    with_contexts: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Decode a block: ``x = f * (x // 2**PRECISION) + x % 2**PRECISION - c`` for the state x of a lane.

    ``x % 2**PRECISION`` determines the symbol. States below 2**15 then take a word, in order of the lanes.
    `intact` receives whether all states end at `INITIAL_STATE` and all words are used.
    """
    block = tl.program_id(0).to(tl.int64)
    first = block * block_length
    size = tl.minimum(n - first, block_length)
    lane = tl.arange(0, lanes)
    state = tl.load(states + block * lanes + lane)
    at = tl.load(ends + block)
    end = tl.load(ends + block + 1)
    for step in range((size + lanes - 1) // lanes):
        local = step * lanes + lane
        here = local < size
        place = first + local
        context = tl.zeros((lanes,), tl.int32)
        if with_contexts:
            context = tl.load(contexts + place, mask=here, other=0).to(tl.int32) & _CONTEXT
        slot = tl.load(rows + context) * (_SLOT + 1) + (state & _SLOT)
        entry = tl.load(table + slot)
        decoded = ((entry & _SLOT) + 1) * (state >> _PRECISION) + ((entry >> _PRECISION) & _SLOT)
        tl.store(out + place, (entry >> (2 * _PRECISION)).to(tl.uint8), mask=here)
        state = tl.where(here, decoded, state)
        refill = here & (state < _INITIAL)
        source = at + tl.cumsum(refill.to(tl.int32), 0) - 1
        word = tl.load(words + source, mask=refill & (source < end), other=0).to(tl.int32) & 0xFFFF
        state = tl.where(refill, (state << 16) | word, state)
        at += tl.sum(refill.to(tl.int32), 0)
    wrong = tl.sum((state != _INITIAL).to(tl.int32), 0)
    tl.store(intact + block, (wrong == 0) & (at == end))


def _decode_table(frequencies: Tensor, starts: Tensor) -> Tensor:
    """Return the flat decode table, with an entry for each slot of each table.

    Bits 0-11 hold the frequency less one, bits 12-23 the offset of the slot within its symbol, bits 24-31 the
    symbol.
    """
    n_tables, n_symbols = frequencies.shape
    flat = frequencies.view(-1).long()
    place = torch.repeat_interleave(flat, output_size=n_tables << PRECISION)
    slot = torch.arange(n_tables << PRECISION, device=flat.device) & ((1 << PRECISION) - 1)
    offset, symbol = slot - starts.view(-1)[place], place % n_symbols
    return ((flat[place] - 1) | offset << PRECISION | symbol << (2 * PRECISION)).to(torch.int32)


def _model_on(model: RansModel, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the table of each possible context, frequencies and their exclusive sums, int32 on a device."""
    starts = np.cumsum(model.frequencies, axis=1) - model.frequencies
    rows_of = np.zeros(MAX_CONTEXTS, np.int64)
    rows_of[: model.rows.size] = model.rows
    parts = (rows_of, model.frequencies, starts)
    rows, frequencies, begins = (torch.from_numpy(part.astype(np.int32)).to(device) for part in parts)
    return rows, frequencies, begins


def _threads(lanes: int) -> dict[str, int]:
    """Return launch options: a thread per lane, in full warps, without fused multiply-add."""
    return {"num_warps": min(max(lanes // _WARP, 1), 8), "enable_fp_fusion": False}


def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    device, n = symbols.device, symbols.numel()
    n_blocks = -(-n // block_length)
    rows, frequencies, starts = _model_on(model, device)
    scratch = torch.empty(n, dtype=torch.int16, device=device)
    begins = torch.empty(n_blocks, dtype=torch.int64, device=device)
    states = torch.empty(n_blocks, lanes, dtype=torch.int32, device=device)
    read = symbols if contexts is None else contexts
    sizes = torch.full((n_blocks,), block_length, dtype=torch.int64, device=device)
    sizes[-1:] = n - (n_blocks - 1) * block_length
    tensors = (symbols, read, rows, frequencies, starts, scratch, begins, states)
    numbers = (n, block_length, frequencies.shape[1], contexts is not None, lanes)
    _encode[(n_blocks,)](*tensors, *numbers, **_threads(lanes))
    counts = sizes - begins
    offsets = counts.cumsum(0) - counts
    n_words = counts.cpu()
    words = torch.empty(int(n_words.sum()), dtype=torch.int16, device=device)
    _gather_words[(n_blocks,)](
        scratch, begins, offsets, words, n, block_length, _COPIED, enable_fp_fusion=False
    )
    return RansBlocks(words, n_words, states)


def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    device = blocks.words.device
    n_blocks, lanes = blocks.states.shape
    rows, *tables = _model_on(model, device)
    table = _decode_table(*tables)
    ends = torch.zeros(n_blocks + 1, dtype=torch.int64)
    ends[1:] = blocks.n_words.cumsum(0)
    out = torch.empty(n, dtype=torch.uint8, device=device)
    intact = torch.zeros(n_blocks, dtype=torch.int32, device=device)
    read = out if contexts is None else contexts
    tensors = (blocks.words, ends.to(device), blocks.states, read, rows, table, out, intact)
    _decode[(n_blocks,)](*tensors, n, block_length, contexts is not None, lanes, **_threads(lanes))
    return out, bool(intact.all())
