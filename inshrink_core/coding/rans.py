"""Context rANS coder of bytes: within a percent of the conditional entropy, with the same bytes everywhere.

Each context has a probability table. The decoder must know the contexts in advance, for example from the
reference state. Data that rANS does not shrink is stored as packed bits or as a constant. ``docs/format.md``
(rANS streams) defines the bytes.
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
"""Size of the mode byte and the stream header."""


def encode_rans(
    symbols: Tensor,
    contexts: Tensor | None,
    n_symbols: int,
    n_contexts: int = 1,
    *,
    apart: bool = False,
    shape: tuple[int, int] | None = None,
) -> bytes:
    """Encode symbols, each with the probability table of its context.

    Parameters
    ----------
    symbols : UInt8[Tensor, "n"]
        Values below `n_symbols`; contiguous, on any device.
    contexts : UInt8[Tensor, "n"] or None
        Contexts on the same device, known to the decoder. Their lower five bits are below `n_contexts`; the
        other bits are ignored. None: no contexts.
    n_symbols
        Size of the alphabet, 1 to 256.
    n_contexts
        Number of contexts, 1 to 32.
    apart
        Whether each context has a separate table; by default contexts share tables if that is smaller.
    shape
        Number of lanes and block length, powers of two. There are at most 4096 lanes, and no more than the
        block length. By default `stream_shape`.

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
    """Decode the symbols from a payload of `encode_rans`.

    Parameters
    ----------
    payload
        The payload, which is untrusted.
    n, n_symbols, n_contexts
        As given to the encoder.
    contexts : UInt8[Tensor, "n"] or None
        As given to the encoder; a context that is not below `n_contexts` counts as 0.
    device
        Device to decode on; by default that of the contexts, else the CPU.

    Returns
    -------
    UInt8[Tensor, "n"]
        The symbols on that device. Decoding is O(n) and takes additional memory of the payload's size.

    Raises
    ------
    DamagedError
        The payload is not valid for `n` symbols with these contexts.
    InputError
        The contexts have another shape or dtype, or the sizes are out of range.
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
    """Return the estimated bits for coding symbols with these counts, of shape (n_contexts, n_symbols)."""
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
