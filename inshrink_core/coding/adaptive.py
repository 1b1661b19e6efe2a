"""Adaptive arithmetic coder of bytes with contexts: no tables to store, a few million symbols a second.

What does not pay falls back to packed bits or to a constant. ``docs/format-rivals.md`` (adaptive streams)
defines the bytes; `inshrink_core.ops.adaptive` says how probabilities follow the data.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.coding.raw import bits_per_symbol, pack_bits, packed_bytes, unpack_bits
from inshrink_core.errors import DamagedError, InputError
from inshrink_core.ops.adaptive import adaptive_decode, adaptive_encode

__all__ = ["decode_adaptive", "encode_adaptive", "worst_case_adaptive_bytes"]

_PACKED = 0
_CONSTANT = 1
_CODED = 2

_MAX_CONTEXTS = 256


def worst_case_adaptive_bytes(n: int, n_symbols: int) -> int:
    """Return the largest payload `encode_adaptive` produces: a mode and packed bits.

    Examples
    --------
    >>> worst_case_adaptive_bytes(1000, 16)
    501
    """
    return 0 if n == 0 else 1 + max(packed_bytes(n, n_symbols), 1)


def encode_adaptive(
    symbols: NDArray[np.uint8], contexts: NDArray[np.uint8] | None, n_symbols: int, n_contexts: int = 1
) -> bytes:
    """Code symbols, each with the estimates of its context.

    Parameters
    ----------
    symbols
        UInt8[n], values below `n_symbols`.
    contexts
        UInt8[n], values below `n_contexts`, known to the decoder; None: no contexts.
    n_symbols
        Size of the alphabet, 1 to 256.
    n_contexts
        1 to 256.

    Returns
    -------
    bytes
        At most `worst_case_adaptive_bytes`. O(n log n_symbols) time, one symbol after the other.

    Raises
    ------
    InputError
        A symbol or a context is out of range, or the sizes differ.

    Examples
    --------
    >>> import numpy as np
    >>> symbols = np.array([3, 3, 0, 3], np.uint8)
    >>> decode_adaptive(encode_adaptive(symbols, None, 4), 4, 4).tolist()
    [3, 3, 0, 3]
    """
    chosen = _checked(symbols.size, contexts, n_symbols, n_contexts)
    if symbols.size == 0:
        return b""
    largest = int(symbols.max())
    if largest >= n_symbols:
        raise InputError("a symbol is out of range", expected=f"below {n_symbols}", found=str(largest))
    if largest == int(symbols.min()):
        return bytes((_CONSTANT, largest))
    limit = packed_bytes(symbols.size, n_symbols)
    stream = adaptive_encode(symbols, chosen, bits_per_symbol(n_symbols), n_contexts, limit)
    if stream is None:
        return bytes((_PACKED,)) + pack_bits(symbols, n_symbols)
    return bytes((_CODED,)) + stream.tobytes()


def decode_adaptive(
    payload: bytes | memoryview,
    n: int,
    n_symbols: int,
    contexts: NDArray[np.uint8] | None = None,
    n_contexts: int = 1,
) -> NDArray[np.uint8]:
    """Return the `n` symbols that `encode_adaptive` coded with the same contexts.

    Raises
    ------
    DamagedError
        The payload is not the code of `n` such symbols.
    InputError
        A context is out of range.
    """
    chosen = _checked(n, contexts, n_symbols, n_contexts)
    if n == 0 or len(payload) == 0:
        if n or len(payload):
            raise DamagedError(
                "coded symbols have the wrong length", expected=f"{n} symbols", found=f"{len(payload)} bytes"
            )
        return np.zeros(0, np.uint8)
    mode, body = payload[0], memoryview(payload)[1:]
    if mode == _PACKED:
        return unpack_bits(body, n, n_symbols)
    if mode == _CONSTANT and len(body) == 1 and body[0] < n_symbols:
        return np.full(n, body[0], np.uint8)
    if mode != _CODED or n_symbols < 2:
        raise DamagedError("coded symbols have an unknown mode", expected="0 to 2", found=str(mode))
    stream = np.frombuffer(body, np.uint8)
    symbols, intact = adaptive_decode(stream, chosen, bits_per_symbol(n_symbols), n_contexts)
    if not intact or int(symbols.max()) >= n_symbols:
        raise DamagedError("an adaptive stream does not end with its last symbol, or holds another alphabet")
    return symbols


def _checked(
    n: int, contexts: NDArray[np.uint8] | None, n_symbols: int, n_contexts: int
) -> NDArray[np.uint8]:
    """Kernels take their arguments on trust."""
    if not (1 <= n_symbols <= 256 and 1 <= n_contexts <= _MAX_CONTEXTS):
        raise InputError(
            "an alphabet or a number of contexts is out of range",
            expected=f"1 to 256 symbols, 1 to {_MAX_CONTEXTS} contexts",
            found=f"{n_symbols} symbols, {n_contexts} contexts",
        )
    if contexts is None:
        return np.zeros(n, np.uint8)
    if contexts.size != n:
        raise InputError("contexts have another size", expected=str(n), found=str(contexts.size))
    if n and int(contexts.max()) >= n_contexts:
        raise InputError(
            "a context is out of range", expected=f"below {n_contexts}", found=str(int(contexts.max()))
        )
    return np.ascontiguousarray(contexts)
