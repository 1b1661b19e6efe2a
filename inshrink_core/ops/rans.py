"""Context rANS: counting symbols per context, and coding blocks of interleaved lanes.

A block of symbols is coded by `lanes` states that share one stream of 16-bit words. Symbol p of a block
belongs to lane p mod lanes and to step p // lanes; a decoder takes words in order of (step, lane). That
order makes the stream sequential on a CPU and a prefix sum on a GPU, so every back end reads and writes
the same words. ``docs/format.md`` (rANS streams) defines the bits.

The coder is the range variant of asymmetric numeral systems (J. Duda, arXiv:1311.2540, 2013, section 3),
interleaved as in F. Giesen, "Interleaved entropy coders", arXiv:1402.3392, 2014, section 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import op

PRECISION = 12
"""Bits of a frequency: tables of 4096 entries of 32 bits, of which 16 fit a second-level cache."""

BIT_LENGTHS = np.array([f.bit_length() for f in range((1 << PRECISION) + 1)], np.int64)
"""Bit length of each frequency."""

INITIAL_STATE = 1 << 15
"""Smallest state, which an encoder starts from: states below 2**31 then fit a signed 32-bit integer."""

MAX_CONTEXTS = 32
"""Most contexts: more would cost more in tables than they gain, and leave the second-level cache."""

CONTEXT_MASK = MAX_CONTEXTS - 1
"""Bits of a byte that are its context; a caller may use the others, they need not be removed."""


class RansModel(NamedTuple):
    """Probability tables and which of them each context uses; in host memory, whatever the device.

    Parameters
    ----------
    rows : int64, (n_contexts,)
        Table of each context.
    frequencies : int64, (n_tables, n_symbols)
        Each row sums to ``2**PRECISION``.
    """

    rows: NDArray[np.int64]
    frequencies: NDArray[np.int64]


class RansBlocks(NamedTuple):
    """Coded blocks: states and words, all on one device.

    Parameters
    ----------
    words : Int16[Tensor, "w"]
        The unsigned words of all blocks, block after block.
    n_words : Int64[Tensor, "n_blocks"]
        Words of each block, in host memory.
    states : Int32[Tensor, "n_blocks lanes"]
        What a decoder starts from, ``2**15 <= state < 2**31``.
    """

    words: Tensor
    n_words: Tensor
    states: Tensor

    @property
    def device(self) -> torch.device:
        """Where words and states are."""
        return self.words.device


def block_sizes(n: int, block_length: int) -> NDArray[np.int64]:
    """Return the number of symbols in each block: all full but the last."""
    starts = np.arange(0, n, block_length, dtype=np.int64)
    return np.minimum(block_length, n - starts)


_WORD_BITS = 16


_WORD_MASK = (1 << _WORD_BITS) - 1


_SLOT_MASK = (1 << PRECISION) - 1


_LIMIT_SHIFT = 31 - PRECISION
"""A state below frequency << 19 stays below 2**31 after coding."""


@op
def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """Count every pair of context and symbol.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Any device.
    contexts : UInt8[Tensor, "n"] or None
        Their lower five bits count; None: all symbols are in context 0.
    n_symbols, n_contexts
        Shape of the result, at most 256 each.

    Returns
    -------
    Int64[Tensor, "n_contexts n_symbols"]
        In host memory; pairs outside the shape are not counted. O(n).
    """
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


@op
def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """Code symbols in blocks.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Each with a positive frequency in the table of its context.
    contexts : UInt8[Tensor, "n"] or None
        Their lower five bits are the contexts, below the number that the model has; None: context 0.
    model
        Probability tables.
    lanes, block_length
        Powers of two; both shape the stream.

    Returns
    -------
    RansBlocks
        On the device of the symbols, the same on every device. O(n).
    """
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


@op
def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """Decode symbols from blocks; any words are safe to decode.

    Parameters
    ----------
    blocks
        With as many counts and rows of states as `n` symbols have blocks, every state in its range and
        the counts summing to the number of words.
    contexts : UInt8[Tensor, "n"] or None
        As given to `rans_encode`, on the device of the words; a context that the model does not have
        is decoded as context 0.
    model
        As given to `rans_encode`.
    n, block_length
        Number of symbols, and how many of them a block holds.

    Returns
    -------
    symbols : UInt8[Tensor, "n"]
        On the device of the words.
    intact : bool
        Whether every block took exactly its words and ended in the state an encoder starts from.
    """
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


def decode_table(frequencies: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return what each slot of each table decodes to, (n_tables, 4096).

    Bits 0-11 hold the frequency less one, 12-23 the offset of the slot within its symbol, 24-31 the symbol.
    """
    n_tables, n_symbols = frequencies.shape
    size = 1 << PRECISION
    flat = frequencies.ravel()
    starts = (np.cumsum(frequencies, axis=1) - frequencies).ravel()
    offsets = np.tile(np.arange(size), n_tables) - np.repeat(starts, flat)
    symbols = np.repeat(np.tile(np.arange(n_symbols), n_tables), flat)
    entries = (np.repeat(flat, flat) - 1) | offsets << 12 | symbols << 24
    return entries.astype(np.uint32).view(np.int32).reshape(n_tables, size)


def model_on(model: RansModel, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of all possible contexts, frequencies and their exclusive sums, int32 on a device."""
    starts = np.cumsum(model.frequencies, axis=1) - model.frequencies
    rows_of = np.zeros(MAX_CONTEXTS, np.int64)
    rows_of[: model.rows.size] = model.rows
    parts = (rows_of, model.frequencies, starts)
    rows, frequencies, begins = (torch.from_numpy(part.astype(np.int32)).to(device) for part in parts)
    return rows, frequencies, begins
