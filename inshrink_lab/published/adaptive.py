"""Adaptive arithmetic coder of bytes with contexts: no tables to store, a few million symbols a second.

A symbol of b bits is b binary decisions, most significant first. Each node of the tree of decisions has,
for each context, an estimate of its own, which starts at one half and moves by 1/(n + 2) of the distance
at its n-th use (the estimator of Krichevsky and Trofimov), by 1/1024 once it was used often. Everything
is integers that fit 64 bits with a sign. What does not pay falls back to packed bits or to a constant.

The coder is the range coder of G. N. N. Martin ("Range encoding", Video & Data Recording Conference,
1979) with carry propagation into what was written; ``docs/format-rivals.md`` (adaptive streams) defines the
bytes. The kernels at the end are plain Python that numba compiles. Every index is proved in range: nodes are
below ``2**n_bits``, contexts below `n_contexts` by the caller's check, and the stream is read and written
behind comparisons with its size. A carry never runs past the first byte, because the code of a prefix and its
range stay below one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inshrink_core.coding.raw import bits_per_symbol, pack_bits, packed_bytes, unpack_bits
from inshrink_core.errors import DamagedError, InputError

_PACKED = 0
_CONSTANT = 1
_CODED = 2

_MAX_CONTEXTS = 256

_CHANCE_BITS = 28
"""Precision of an estimate: with 16 bits, steps of 1/1024 would stop short of rare decisions."""

_CODED_BITS = 16
"""Precision of the probability that divides the range: the range has 24 bits at least."""

_RARE = 32
"""No probability is below 32 / 65536, so that both parts of every range are positive."""

_SLOWEST = 1022
"""Uses after which an estimate goes on moving by 1/1024: it then forgets in about a thousand symbols."""

_LOW_MASK = (1 << 32) - 1
_SMALLEST_RANGE = 1 << 24


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
    stream = encode_kernel(symbols, chosen, bits_per_symbol(n_symbols), n_contexts, limit)
    if not stream.size:
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
    symbols, intact = decode_kernel(stream, chosen, bits_per_symbol(n_symbols), n_contexts)
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


@njit(nogil=True, cache=True)
def encode_kernel(
    symbols: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    n_bits: int,
    n_contexts: int,
    limit: int,
) -> NDArray[np.uint8]:
    """Return the code of symbols, nothing where it would take more than `limit` bytes.

    Symbols are below ``2**n_bits``, of 1 to 8 bits; contexts below `n_contexts`.
    """
    out = np.empty(limit, np.uint8)
    chances = np.full(n_contexts << n_bits, 1 << (_CHANCE_BITS - 1), np.int64)
    uses = np.zeros(n_contexts << n_bits, np.int64)
    low = 0
    span = _LOW_MASK
    size = 0
    for i in range(symbols.size):
        symbol = np.int64(symbols[i])
        base = np.int64(contexts[i]) << n_bits
        node: Any = 1
        for level in range(n_bits - 1, -1, -1):
            at = base + node
            chance = chances[at]
            coded = min(max(chance >> (_CHANCE_BITS - _CODED_BITS), _RARE), (1 << _CODED_BITS) - _RARE)
            bound = (span >> _CODED_BITS) * coded
            bit = (symbol >> level) & 1
            if bit:
                low += bound
                span -= bound
                chances[at] = chance - chance // (uses[at] + 2)
            else:
                span = bound
                chances[at] = chance + ((1 << _CHANCE_BITS) - chance) // (uses[at] + 2)
            uses[at] = min(uses[at] + 1, _SLOWEST)
            node = 2 * node + bit
            if low > _LOW_MASK:
                low &= _LOW_MASK
                last = size - 1
                while out[last] == 255:
                    out[last] = 0
                    last -= 1
                out[last] += 1
            while span < _SMALLEST_RANGE:
                if size >= limit:
                    return out[:0]
                out[size] = low >> 24
                size += 1
                low = (low << 8) & _LOW_MASK
                span <<= 8
    # One byte more tells the range apart, because every range holds a multiple of its smallest size.
    if size >= limit:
        return out[:0]
    final = (low + _SMALLEST_RANGE - 1) >> 24
    if final > 255:
        last = size - 1
        while out[last] == 255:
            out[last] = 0
            last -= 1
        out[last] += 1
    out[size] = final & 255
    return out[: size + 1]


@njit(nogil=True, cache=True)
def decode_kernel(
    stream: NDArray[np.uint8],
    contexts: NDArray[np.uint8],
    n_bits: int,
    n_contexts: int,
) -> tuple[NDArray[np.uint8], bool]:
    """Return one symbol per context, and whether the stream ends where and as an encoder ends it.

    Any bytes are safe to decode. O(n · n_bits).
    """
    symbols = np.empty(contexts.size, np.uint8)
    chances = np.full(n_contexts << n_bits, 1 << (_CHANCE_BITS - 1), np.int64)
    uses = np.zeros(n_contexts << n_bits, np.int64)
    code: Any = 0
    for position in range(4):
        code = (code << 8) | (np.int64(stream[position]) if position < stream.size else 0)
    position = 4
    span = _LOW_MASK
    for i in range(contexts.size):
        base = np.int64(contexts[i]) << n_bits
        node: Any = 1
        for _ in range(n_bits):
            at = base + node
            chance = chances[at]
            coded = min(max(chance >> (_CHANCE_BITS - _CODED_BITS), _RARE), (1 << _CODED_BITS) - _RARE)
            bound = (span >> _CODED_BITS) * coded
            if code >= bound:
                code -= bound
                span -= bound
                chances[at] = chance - chance // (uses[at] + 2)
                node = 2 * node + 1
            else:
                span = bound
                chances[at] = chance + ((1 << _CHANCE_BITS) - chance) // (uses[at] + 2)
                node = 2 * node
            uses[at] = min(uses[at] + 1, _SLOWEST)
            while span < _SMALLEST_RANGE:
                # A damaged code may lie beyond its range; the mask makes it small, whatever it decodes to.
                code = (
                    (code << 8) | (np.int64(stream[position]) if position < stream.size else 0)
                ) & _LOW_MASK
                position += 1
                span <<= 8
        symbols[i] = node - (1 << n_bits)
    # The encoder's last byte rounds up to a multiple of the smallest range; three zeros are implied.
    return symbols, position == stream.size + 3 and code < _SMALLEST_RANGE
