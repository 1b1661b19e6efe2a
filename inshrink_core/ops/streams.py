"""Typed fronts of whole rANS streams: tables, blocks and the bytes they become, in one call a tensor.

The parameters in a stream follow the estimated size of the coded symbols, never the device:

- lanes cost four bytes each, so all of them together get at most `_STATE_SHARE` of the size. Up to 32
  lanes share one block (1 lane below 13 kbit, 8 from 51 kbit, 32 from 205 kbit);
- beyond that the tensor is split into blocks of at least 2**16 symbols with 32 lanes, the width of a
  GPU's warp, so that 8 M symbols at .7 bit are about 900 lanes in 32 blocks;
- contexts share tables, and tables of few symbols are coarser, as far as that makes the sum smaller.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from inshrink_core.ops.registry import op

CONSTANT, RANS = 1, 2
"""First byte of what `write_stream` returns; 0 is for symbols that are packed in bits."""

HEADER = struct.Struct("<BBB")

STATE_BYTES, WORD_BYTES = 4, 2

MAX_LANES_LOG2 = 12
"""4096 lanes: what one block of a GPU's threads can hold in registers."""

MAX_BLOCK_LOG2 = 31
"""A place inside a block fits a signed 32-bit integer."""

PRECISIONS = np.array((12, 10, 8, 6), np.int64)
"""Of tables. Coarser ones are shorter; two bits less cost about a thousandth of the data."""

COARSE_BELOW = 1 << 17
"""Symbols from which the finest tables are taken unseen: coarser ones then save less than they cost."""

STATE_BITS = 32
STATE_SHARE = 200
"""States take at most one part in 200 of the data: half a percent, the budget for all but the entropy."""

WARP_LOG2 = 5
SHORTEST_BLOCK_LOG2 = 16


def stream_shape(n: int, data_bits: float) -> tuple[int, int]:
    """Return the number of lanes and the block length for symbols of an estimated size.

    Parameters
    ----------
    n
        Number of symbols, at least 1.
    data_bits
        Their size when coded.
    """
    budget = max(int(data_bits) // (STATE_BITS * STATE_SHARE), 1)
    lanes = min(1 << (budget.bit_length() - 1), 1 << WARP_LOG2)
    whole = max(n - 1, lanes - 1).bit_length()
    per_block = max(n // max(budget >> WARP_LOG2, 1), 1).bit_length()
    return lanes, 1 << min(max(per_block, SHORTEST_BLOCK_LOG2), whole, MAX_BLOCK_LOG2)


class Coded(NamedTuple):
    """A stream, and what its decoder knows: as given to `write_stream`, and where to decode."""

    payload: memoryview
    n: int
    n_symbols: int
    n_contexts: int
    device: torch.device


@op
def write_stream(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int,
    apart: bool,
    shape: tuple[int, int] | None,
) -> bytes:
    """Code symbols, each with the probability table of its context.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        At least one; any device.
    contexts : UInt8[Tensor, "n"] or None
        On the same device; their lower five bits count.
    n_symbols, n_contexts
        At most 256 and 32.
    apart
        Whether each context has a table of its own.
    shape
        Lanes and block length, in the place of what `stream_shape` says.

    Returns
    -------
    bytes
        `CONSTANT` and the symbol, or `RANS` and a stream; nothing where packed bits are smaller. O(n).

    Raises
    ------
    InputError
        A symbol or a context is out of range.
    """
    raise NotImplementedError


@op
def read_stream(coded: Coded, contexts: Tensor | None) -> Tensor:
    """Decode a stream, of which nothing is trusted: the inverse of `write_stream`, behind its first byte.

    Parameters
    ----------
    coded
        What is to be decoded, of at least one symbol.
    contexts : UInt8[Tensor, "n"] or None
        As given to the encoder, on the device; one that is not below `n_contexts` counts as 0.

    Returns
    -------
    UInt8[Tensor, "n"]
        On the device.

    Raises
    ------
    DamagedError
        It is not the code of `n` symbols with these contexts. Nothing larger than it was allocated then,
        but for the symbols, where there are lanes enough.
    """
    raise NotImplementedError
