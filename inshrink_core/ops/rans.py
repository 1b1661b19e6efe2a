"""Context rANS: counting symbols per context, and coding blocks of interleaved lanes.

A block of symbols is coded by `lanes` states that share one stream of 16-bit words. With f the frequency and
c the exclusive cumulative frequency of a symbol in the table of its context, encoding maps a state x to
``(x // f) * 2**PRECISION + c + x % f``, after it emits a word if the result would reach ``2**31``. Symbol p
of a block belongs to lane p mod lanes and to step p // lanes. A decoder takes words in order of (step, lane).
This order makes the stream sequential on a CPU and a prefix sum on a GPU, so every back end reads and writes
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

from inshrink_core.ops.registry import Backend, kernel_of, op

PRECISION = 12
"""Bits of a frequency. A table has 4096 entries of 32 bits, so 16 tables fit a second-level cache."""

BIT_LENGTHS = np.array([f.bit_length() for f in range((1 << PRECISION) + 1)], np.int64)
"""Bit length of each frequency."""

INITIAL_STATE = 1 << 15
"""Smallest state and initial state of the encoder; states below 2**31 fit a signed 32-bit integer."""

MAX_CONTEXTS = 32
"""Maximum number of contexts; more would add more table bits than they save, and exceed the cache."""

CONTEXT_MASK = MAX_CONTEXTS - 1
"""Bits of a byte that select the context; a caller may use the other bits."""


class RansModel(NamedTuple):
    """Probability tables and the table of each context; always in host memory.

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
    """Coded blocks: states and words, on one device.

    Parameters
    ----------
    words : Int16[Tensor, "w"]
        Unsigned words of all blocks, block after block.
    n_words : Int64[Tensor, "n_blocks"]
        Number of words of each block, in host memory.
    states : Int32[Tensor, "n_blocks lanes"]
        Initial states of the decoder, ``2**15 <= state < 2**31``.
    """

    words: Tensor
    n_words: Tensor
    states: Tensor

    @property
    def device(self) -> torch.device:
        """Device of the words and states."""
        return self.words.device


@op
def rans_counts(symbols: Tensor, contexts: Tensor | None, n_symbols: int, n_contexts: int) -> Tensor:
    """Count each pair of context and symbol.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Any device.
    contexts : UInt8[Tensor, "n"] or None
        The lower five bits are the context. With None, all symbols have context 0.
    n_symbols, n_contexts
        Shape of the result, at most 256 each.

    Returns
    -------
    Int64[Tensor, "n_contexts n_symbols"]
        In host memory; pairs outside the shape do not count.

    Notes
    -----
    O(n).
    """
    pairs = symbols.long()
    if contexts is not None:
        pairs = pairs + 256 * (contexts & CONTEXT_MASK).long()
    counts = torch.bincount(pairs, minlength=1 << 16).view(256, 256)
    return counts[:n_contexts, :n_symbols].cpu().contiguous()


@op
def rans_encode(
    symbols: Tensor, contexts: Tensor | None, model: RansModel, lanes: int, block_length: int
) -> RansBlocks:
    """Code symbols in blocks.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Each has a positive frequency in the table of its context.
    contexts : UInt8[Tensor, "n"] or None
        The lower five bits are the context, below the model's number of contexts. None: context 0.
    model
        Probability tables.
    lanes, block_length
        Powers of two that set the shape of the stream.

    Returns
    -------
    RansBlocks
        Bit-identical on every device; on the symbols' device if it has a kernel.

    Notes
    -----
    O(n).
    """
    encoded: RansBlocks = kernel_of(rans_encode, Backend.CPU)(symbols, contexts, model, lanes, block_length)
    return encoded


@op
def rans_decode(
    blocks: RansBlocks, contexts: Tensor | None, model: RansModel, n: int, block_length: int
) -> tuple[Tensor, bool]:
    """Decode symbols from blocks; any words are safe to decode.

    Parameters
    ----------
    blocks
        As many counts and rows of states as `n` symbols have blocks. Every state is in its range, and the
        counts sum to the number of words.
    contexts : UInt8[Tensor, "n"] or None
        As in `rans_encode`, on the device of the words. A context outside the model is decoded as context 0.
    model
        As in `rans_encode`.
    n, block_length
        Number of symbols, and number of symbols per block.

    Returns
    -------
    symbols : UInt8[Tensor, "n"]
        On the device of the words.
    intact : bool
        Whether every block used exactly its words and ended in the encoder's initial state.
    """
    symbols, intact = kernel_of(rans_decode, Backend.CPU)(blocks, contexts, model, n, block_length)
    return symbols.to(blocks.device), intact
