"""Adaptive arithmetic coder of bytes with contexts: no tables to store, a few million symbols a second.

A symbol of b bits is b binary decisions, most significant first. Each node of the decision tree has an
estimate per context. It starts at one half. At its n-th use it moves towards the decision by 1/(n + 2) of
the distance (the estimator of Krichevsky and Trofimov), and by 1/1024 of it after many uses. All arithmetic
is on integers that fit signed 64-bit. If coding does not pay, the stream falls back to packed bits or to a
constant.

The coder is the range coder of G. N. N. Martin ("Range encoding", Video & Data Recording Conference,
1979) with carry propagation into what was written; ``docs/format-rivals.md`` (adaptive streams) defines the
bytes. The kernels at the end are plain Python that numba compiles. Every index is proved in range: nodes are
below ``2**n_bits``, contexts below `n_contexts` by the caller's check, and the stream is read and written
behind comparisons with its size. A carry never runs past the first byte, because the code of a prefix and its
range stay below one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from inshrink_core.coding.raw import CONSTANT, PACKED, bits_per_symbol, decode_escape, pack_bits, packed_bytes
from inshrink_core.errors import DamagedError, InputError

_Bytes: TypeAlias = NDArray[np.uint8]

_CODED = 2

_MAX_CONTEXTS = 256

_CHANCE_BITS = 28
"""Precision of an estimate: with 16 bits, steps of 1/1024 would stop short of rare decisions."""

_CODED_BITS = 16
"""Precision of the probability that divides the range: the range has 24 bits at least."""

_RARE = 32
"""No probability is below 32 / 65536, so that both parts of every range are positive."""

_SLOWEST = 1022
"""Number of uses after which an estimate moves by 1/1024: it then forgets in about a thousand symbols."""

_LOW_MASK, _SMALLEST_RANGE = (1 << 32) - 1, 1 << 24


def encode_adaptive(symbols: _Bytes, contexts: _Bytes | None, n_symbols: int, n_contexts: int = 1) -> bytes:
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
        At most `worst_case_coded_bytes`. O(n log n_symbols) time, one symbol after the other.

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
        return bytes((CONSTANT, largest))
    width, limit = bits_per_symbol(n_symbols), packed_bytes(symbols.size, n_symbols)
    stream = encode_kernel(symbols, chosen, width, n_contexts, limit)
    if not stream.size:
        return bytes((PACKED,)) + pack_bits(symbols, n_symbols)
    return bytes((_CODED,)) + stream.tobytes()


def decode_adaptive(
    payload: bytes | memoryview, n: int, n_symbols: int, contexts: _Bytes | None = None, n_contexts: int = 1
) -> _Bytes:
    """Return the `n` symbols that `encode_adaptive` coded with the same contexts.

    Raises
    ------
    DamagedError
        The payload is not the code of `n` such symbols.
    InputError
        A context is out of range.
    """
    chosen = _checked(n, contexts, n_symbols, n_contexts)
    symbols = decode_escape(payload, n, n_symbols)
    if symbols is not None:
        return symbols
    if payload[0] != _CODED or n_symbols < 2:
        raise DamagedError("coded symbols have an unknown mode", expected="0 to 2", found=str(payload[0]))
    width, stream = bits_per_symbol(n_symbols), np.frombuffer(payload, np.uint8)[1:]
    symbols, intact = decode_kernel(stream, chosen, width, n_contexts)
    if not intact or int(symbols.max()) >= n_symbols:
        raise DamagedError("an adaptive stream does not end with its last symbol, or holds another alphabet")
    return symbols


def _checked(n: int, contexts: _Bytes | None, n_symbols: int, n_contexts: int) -> _Bytes:
    """Kernels take their arguments on trust."""
    chosen = np.zeros(n, np.uint8) if contexts is None else np.ascontiguousarray(contexts)
    largest = int(chosen.max(initial=0))
    if not (1 <= n_symbols <= 256 and largest < n_contexts <= _MAX_CONTEXTS and chosen.size == n):
        raise InputError(
            "an alphabet or contexts are out of range",
            expected=f"1 to 256 symbols, {n} contexts below 1 to {_MAX_CONTEXTS}",
            found=f"{n_symbols} symbols, {chosen.size} contexts to {largest} below {n_contexts}",
        )
    return chosen


@njit(nogil=True, inline="always")
def _bound(chance: int, span: int) -> int:
    """Return the part of a range that a 0 takes."""
    coded = min(max(chance >> (_CHANCE_BITS - _CODED_BITS), _RARE), (1 << _CODED_BITS) - _RARE)
    return (span >> _CODED_BITS) * coded


@njit(nogil=True, inline="always")
def _learn(chances: NDArray[np.int64], uses: NDArray[np.int64], at: int, bit: int) -> None:
    """Move the estimate of a node towards the decision."""
    rest = chances[at] if bit else (1 << _CHANCE_BITS) - chances[at]
    chances[at] += (1 - 2 * bit) * (rest // (uses[at] + 2))
    uses[at] = min(uses[at] + 1, _SLOWEST)


@njit(nogil=True, inline="always")
def _put(out: _Bytes, size: int, low: int) -> None:
    """Write the highest byte of the low end of a range, and carry into those before it."""
    last = size - 1
    while low > _LOW_MASK and out[last] == 255:
        out[last] = 0
        last -= 1
    if low > _LOW_MASK:
        out[last] += 1
    out[size] = (low >> 24) & 255


@njit(nogil=True, cache=True)
def encode_kernel(symbols: _Bytes, contexts: _Bytes, n_bits: int, n_contexts: int, limit: int) -> _Bytes:
    """Return the code of symbols, nothing where it would take more than `limit` bytes.

    Symbols are below ``2**n_bits``, of 1 to 8 bits; contexts below `n_contexts`.
    """
    out = np.empty(limit, np.uint8)
    chances = np.full(n_contexts << n_bits, 1 << (_CHANCE_BITS - 1), np.int64)
    uses = np.zeros_like(chances)
    low, span, size = 0, _LOW_MASK, 0
    for i in range(symbols.size):
        symbol, base = np.int64(symbols[i]), np.int64(contexts[i]) << n_bits
        node: Any = 1
        for level in range(n_bits - 1, -1, -1):
            bound = _bound(chances[base + node], span)
            bit: Any = (symbol >> level) & 1
            low += bit * bound
            span = span - bound if bit else bound
            _learn(chances, uses, base + node, bit)
            node = 2 * node + bit
            while span < _SMALLEST_RANGE:
                if size >= limit:
                    return out[:0]
                _put(out, size, low)
                size += 1
                low = (low << 8) & _LOW_MASK
                span <<= 8
    # One more byte identifies the range, because every range contains a multiple of its smallest size.
    if size >= limit:
        return out[:0]
    _put(out, size, low + _SMALLEST_RANGE - 1)
    return out[: size + 1]


@njit(nogil=True, cache=True)
def decode_kernel(stream: _Bytes, contexts: _Bytes, n_bits: int, n_contexts: int) -> tuple[_Bytes, bool]:
    """Return one symbol per context, and whether the stream ends where and as an encoder ends it.

    Any bytes are safe to decode. O(n · n_bits).
    """
    symbols = np.empty(contexts.size, np.uint8)
    chances = np.full(n_contexts << n_bits, 1 << (_CHANCE_BITS - 1), np.int64)
    uses = np.zeros_like(chances)
    code: Any = 0
    for position in range(4):
        code = (code << 8) | _byte(stream, position)
    span, position = _LOW_MASK, 4
    for i in range(contexts.size):
        base = np.int64(contexts[i]) << n_bits
        node: Any = 1
        for _ in range(n_bits):
            bound = _bound(chances[base + node], span)
            bit = int(code >= bound)
            code -= bit * bound
            span = span - bound if bit else bound
            _learn(chances, uses, base + node, bit)
            node = 2 * node + bit
            while span < _SMALLEST_RANGE:
                # A damaged code may be beyond its range; the mask makes it small, whatever it decodes to.
                code = ((code << 8) | _byte(stream, position)) & _LOW_MASK
                position += 1
                span <<= 8
        symbols[i] = node - (1 << n_bits)
    # The encoder's last byte rounds up to a multiple of the smallest range; three zeros are implied.
    return symbols, position == stream.size + 3 and code < _SMALLEST_RANGE


@njit(nogil=True, inline="always")
def _byte(stream: _Bytes, position: int) -> Any:
    """Return a byte of a stream, zero behind its end."""
    return np.int64(stream[position]) if position < stream.size else 0
