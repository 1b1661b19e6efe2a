"""Context rANS in plain torch, all lanes of all blocks at once: the norm, on any device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from inshrink_core.ops.rans import (
    CONTEXT_MASK,
    INITIAL_STATE,
    PRECISION,
    RansBlocks,
    RansModel,
    block_sizes,
    decode_table,
    model_on,
)

__all__: list[str] = []

_WORD_BITS = 16
_WORD_MASK = (1 << _WORD_BITS) - 1
_SLOT_MASK = (1 << PRECISION) - 1
_LIMIT_SHIFT = 31 - PRECISION
"""A state below frequency << 19 stays below 2**31 after coding."""


def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """See `inshrink_core.ops.rans.rans_counts`."""
    pairs = symbols.long()
    if contexts is not None:
        pairs = pairs + 256 * (contexts & CONTEXT_MASK).long()
    counts = torch.bincount(pairs, minlength=1 << 16).view(256, 256)
    return counts[:n_contexts, :n_symbols].cpu().contiguous()


def _in_lanes(values: Tensor, n_blocks: int, block_length: int, lanes: int) -> Tensor:
    """Values by (step, block, lane), zeros where there are none, because a step is one operation."""
    padded = torch.zeros(n_blocks * block_length, dtype=values.dtype, device=values.device)
    padded[: values.numel()] = values
    return padded.view(n_blocks, block_length // lanes, lanes).transpose(0, 1).contiguous()


def _rows_in_lanes(
    contexts: Tensor | None, rows: Tensor, shape: tuple[int, int, int], n: int, device: torch.device
) -> Tensor:
    """Table of every place by (step, block, lane)."""
    n_blocks, block_length, lanes = shape
    if contexts is None:
        return rows[0].long().expand(block_length // lanes, n_blocks, lanes)
    row = rows.long()[(contexts.to(device) & CONTEXT_MASK).long()[:n]]
    return _in_lanes(row, n_blocks, block_length, lanes)


def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """See `inshrink_core.ops.rans.rans_encode`."""
    device = symbols.device
    n = symbols.numel()
    sizes = torch.from_numpy(block_sizes(n, block_length)).to(device)
    n_blocks = sizes.numel()
    rows, frequencies, starts = model_on(model, device)
    block_length = min(block_length, -(-n // lanes) * lanes)
    shape = (n_blocks, block_length, lanes)
    entry = _in_lanes(symbols.long(), *shape) + frequencies.shape[1] * _rows_in_lanes(
        contexts, rows, shape, n, device
    )
    frequency, start = frequencies.ravel().long(), starts.ravel().long()
    lane = torch.arange(lanes, device=device)
    block = torch.arange(n_blocks, device=device)[:, None].expand(n_blocks, lanes)
    scratch = torch.zeros(n_blocks, block_length, dtype=torch.int16, device=device)
    states = torch.full((n_blocks, lanes), INITIAL_STATE, dtype=torch.int64, device=device)
    begin = torch.full((n_blocks, 1), block_length, dtype=torch.int64, device=device)
    for step in range(block_length // lanes - 1, -1, -1):
        here = step * lanes + lane < sizes[:, None]
        f = torch.where(here, frequency[entry[step]], 1)
        spill = here & (states >= f << _LIMIT_SHIFT)
        begin = begin - spill.sum(1, keepdim=True)
        place = begin + spill.cumsum(1) - 1
        # Two's complement, because torch indexes no unsigned words.
        word = ((states & _WORD_MASK) ^ INITIAL_STATE) - INITIAL_STATE
        scratch[block[spill], place[spill]] = word[spill].to(torch.int16)
        states = torch.where(spill, states >> _WORD_BITS, states)
        quotient = states // f
        coded = (quotient << PRECISION) + states - quotient * f + start[entry[step]]
        states = torch.where(here, coded, states)
    kept = torch.arange(block_length, device=device) >= begin
    n_words = (block_length - begin[:, 0]).cpu()
    return RansBlocks(scratch[kept], n_words, states.to(torch.int32))


def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """See `inshrink_core.ops.rans.rans_decode`."""
    device = blocks.words.device
    n_blocks, lanes = blocks.states.shape
    sizes = torch.from_numpy(block_sizes(n, block_length)).to(device)
    block_length = min(block_length, -(-n // lanes) * lanes)
    table = torch.from_numpy(decode_table(model.frequencies).view(np.uint32).astype(np.int64)).to(device)
    rows, _, _ = model_on(model, device)
    row = _rows_in_lanes(contexts, rows, (n_blocks, block_length, lanes), n, device)
    # One word more, so that places past the end can be read before they are masked.
    words = torch.cat((blocks.words, blocks.words.new_zeros(1))).long() & _WORD_MASK
    end = blocks.n_words.to(device).cumsum(0)[:, None]
    at = end - blocks.n_words.to(device)[:, None]
    states = blocks.states.to(device).long()
    lane = torch.arange(lanes, device=device)
    out = torch.empty(block_length // lanes, n_blocks, lanes, dtype=torch.uint8, device=device)
    for step in range(block_length // lanes):
        here = step * lanes + lane < sizes[:, None]
        entry = table[row[step], states & _SLOT_MASK]
        decoded = ((entry & _SLOT_MASK) + 1) * (states >> PRECISION) + (entry >> PRECISION & _SLOT_MASK)
        states = torch.where(here, decoded, states)
        out[step] = (entry >> 2 * PRECISION).to(torch.uint8)
        refill = here & (states < INITIAL_STATE)
        place = at + refill.cumsum(1) - 1
        word = torch.where(place < end, words[place.clamp(0, words.numel() - 1)], 0)
        states = torch.where(refill, states << _WORD_BITS | word, states)
        at = at + refill.sum(1, keepdim=True)
    intact = bool((at == end).all()) and bool((states == INITIAL_STATE).all())
    symbols = out.transpose(0, 1).reshape(-1)[:n].contiguous()
    return symbols, intact
