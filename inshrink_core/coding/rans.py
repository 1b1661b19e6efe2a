"""Context rANS coder of bytes: within a percent of the conditional entropy, the same bytes everywhere.

Symbols are coded with one probability table per context, where the decoder knows the contexts before
(from the reference state, say). What does not pay falls back to packed bits or to a constant.
``docs/format.md`` (rANS streams) defines the bytes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.coding.raw import PACKED, decode_escape, pack_bits, worst_case_coded_bytes
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.ops.cpu.tables import pool_contexts
from inshrink_core.ops.rans import MAX_CONTEXTS
from inshrink_core.ops.streams import HEADER, RANS, STATE_BITS, read_stream, stream_shape, write_stream

_HEADER_BYTES = 1 + HEADER.size
"""Mode byte and stream header."""


def encode_rans(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int = 1,
    *,
    apart: bool = False,
    shape: tuple[int, int] | None = None,
) -> bytes:
    """Code symbols, each with the probability table of its context.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Below `n_symbols`; contiguous, any device.
    contexts : UInt8[Tensor, "n"] or None
        On the same device, known to the decoder; their lower five bits are below `n_contexts`, the others
        do not count. None: no contexts.
    n_symbols
        Size of the alphabet, 1 to 256.
    n_contexts
        1 to 32.
    apart
        Whether each context has a table of its own; else they share tables where that pays.
    shape
        Lanes and block length, powers of two, the first at most 4096 and at most the second; by default
        `stream_shape`.

    Returns
    -------
    bytes
        At most `worst_case_coded_bytes`; the same on every device and back end. O(n).

    Raises
    ------
    InputError
        A symbol or a context is out of range, or the shapes differ.

    Examples
    --------
    >>> import torch
    >>> symbols = torch.tensor([3, 3, 3, 0, 3], dtype=torch.uint8)
    >>> payload = encode_rans(symbols, None, 4)
    >>> decode_rans(payload, 5, 4).tolist()
    [3, 3, 3, 0, 3]
    """
    n = symbols.numel()
    _check_arguments(n, n_symbols, n_contexts, symbols, contexts)
    if n == 0:
        return b""
    stream = write_stream(symbols, contexts, n_symbols, n_contexts, apart, shape)
    return stream or bytes((PACKED,)) + pack_bits(symbols.cpu().numpy(), n_symbols)


def decode_rans(
    payload: bytes | memoryview,
    n: int,
    n_symbols: int,
    contexts: Tensor | None = None,
    n_contexts: int = 1,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Return the symbols that `encode_rans` coded.

    Parameters
    ----------
    payload
        Its bytes; nothing in them is trusted.
    n, n_symbols, n_contexts
        As given to the encoder.
    contexts : UInt8[Tensor, "n"] or None
        As given to the encoder; one that is not below `n_contexts` counts as 0.
    device
        Where to decode; by default where the contexts are, else on the CPU.

    Returns
    -------
    UInt8[Tensor, "n"]
        On that device. O(n); beside it, memory of the size of the payload.

    Raises
    ------
    DamagedError
        The payload is not the code of `n` symbols with these contexts.
    InputError
        Contexts have another shape or dtype, or the sizes are out of range.
    """
    if device is None:
        device = torch.device("cpu") if contexts is None else contexts.device
    _check_arguments(n, n_symbols, n_contexts, None, contexts)
    symbols = decode_escape(payload, n, n_symbols)
    if symbols is not None:
        return torch.from_numpy(symbols).to(device)
    if payload[0] != RANS:
        raise DamagedError("coded symbols have an unknown mode", expected="0 to 2", found=str(payload[0]))
    if contexts is not None:
        contexts = contexts.to(device)
    return read_stream(memoryview(payload)[1:], n, n_symbols, contexts, n_contexts, device)


def estimate_bits_of_counts(counts: NDArray[np.int64]) -> float:
    """Return about how many bits symbols with these counts, (n_contexts, n_symbols), take when coded."""
    n, n_symbols = int(counts.sum()), counts.shape[1]
    if np.count_nonzero(counts.any(0)) <= 1:
        return 16.0 if n else 0.0
    _, _, bits = pool_contexts(counts)
    lanes, block_length = stream_shape(n, bits)
    states = STATE_BITS * lanes * -(-n // block_length)
    return min(bits + states + 8.0 * _HEADER_BYTES, 8.0 * worst_case_coded_bytes(n, n_symbols))


def _check_arguments(
    n: int, n_symbols: int, n_contexts: int, symbols: Tensor | None, contexts: Tensor | None
) -> None:
    """Check what kernels take on trust."""
    for name, tensor in (("symbols", symbols), ("contexts", contexts)):
        if tensor is not None and (tensor.dtype != torch.uint8 or tensor.shape != (n,)):
            raise InputError(
                f"{name} have the wrong form",
                expected=f"uint8, ({n},)",
                found=f"{tensor.dtype}, {tuple(tensor.shape)}",
            )
    if not (1 <= n_symbols <= 256 and 1 <= n_contexts <= MAX_CONTEXTS and n >= 0):
        raise InputError(
            "an alphabet or a number of contexts is out of range",
            expected=f"1 to 256 symbols, 1 to {MAX_CONTEXTS} contexts",
            found=f"{n_symbols} symbols, {n_contexts} contexts, {n} values",
        )
