"""Symbols under context rANS: the same deltas as in symbol streams, without runs and Huffman codes.

The context of a symbol is the previous one, or a band of neighbours where there are more than the coder has
contexts. ``docs/format.md`` (inshrinkerator/1, flag ``RANS``) defines the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from inshrink_core.delta import alphabet_size, modular_delta
from inshrink_core.entropy.rans import decode_rans, encode_rans, worst_case_rans_bytes
from inshrink_core.errors import DamagedError
from inshrink_core.ops.rans import MAX_CONTEXTS

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["decode_symbols_rans", "encode_symbols_rans", "worst_case_symbols_rans_bytes"]


def worst_case_symbols_rans_bytes(n: int) -> int:
    """Return the largest stream of n symbols of any alphabet."""
    return worst_case_rans_bytes(n, 256)


def _bands(previous: Tensor, n_previous: int) -> tuple[Tensor, int]:
    """Return contexts and their number: the previous symbols, in bands where there are too many."""
    if n_previous <= MAX_CONTEXTS:
        return previous, n_previous
    bands = torch.arange(256, device=previous.device) * MAX_CONTEXTS // n_previous
    return bands.clamp_(max=MAX_CONTEXTS - 1).to(torch.uint8)[previous.long()], MAX_CONTEXTS


def encode_symbols_rans(symbols: Tensor, n_symbols: int, previous: Tensor | None, n_previous: int) -> bytes:
    """Encode symbols, given those of the previous checkpoint if there are any.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Values below `n_symbols`, on the CPU.
    n_symbols
        Size of the alphabet, 1 to 256.
    previous : UInt8[Tensor, "n"] or None
        The previous checkpoint's symbols, values below `n_previous`; None to stand alone.
    n_previous
        Size of the previous alphabet.

    Examples
    --------
    >>> symbols = torch.tensor([2, 2, 3, 2], dtype=torch.uint8)
    >>> stream = encode_symbols_rans(symbols, 4, symbols, 4)
    >>> decode_symbols_rans(stream, 4, 4, symbols, 4).tolist()
    [2, 2, 3, 2]
    """
    if previous is None:
        return encode_rans(symbols, None, n_symbols)
    modulus = alphabet_size(n_symbols, n_previous)
    contexts, n_contexts = _bands(previous, n_previous)
    return encode_rans(modular_delta(previous, symbols, modulus), contexts, modulus, n_contexts)


def decode_symbols_rans(
    stream: memoryview | bytes, n: int, n_symbols: int, previous: Tensor | None, n_previous: int
) -> Tensor:
    """Return the symbols that `encode_symbols_rans` coded.

    Raises
    ------
    DamagedError
        The stream is not one of n symbols of this alphabet after those previous ones.
    """
    if previous is None:
        return decode_rans(stream, n, n_symbols)
    modulus = alphabet_size(n_symbols, n_previous)
    contexts, n_contexts = _bands(previous, n_previous)
    deltas = decode_rans(stream, n, modulus, contexts, n_contexts)
    symbols = torch.remainder(previous.to(torch.int16) - deltas.to(torch.int16), modulus).to(torch.uint8)
    if n and int(symbols.max()) >= n_symbols:
        raise DamagedError(
            "a symbol is outside the alphabet", expected=f"below {n_symbols}", found=str(int(symbols.max()))
        )
    return symbols
