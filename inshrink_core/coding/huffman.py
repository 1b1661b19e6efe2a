"""Canonical Huffman codes of at most 12 bits: lengths, codes, tables, and their compact form.

Codes are assigned in the order of (length, symbol), as in DEFLATE (RFC 1951, 3.2.2), and written first bit
first. A symbol that occurs alone takes no bits.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from inshrink_core.errors import DamagedError
from inshrink_core.ops.cpu.symbols import MAX_CODE_BITS, unpack_symbols
from inshrink_core.varint import Cursor

_ZEROS = 0
_REPEAT = 13
_END = 15
_LONGEST_GROUP = 16
"""Largest repeat count; counts are one nibble, for 1 to 16."""

_SPANS = np.array([0] + [1 << (MAX_CODE_BITS - length) for length in range(1, MAX_CODE_BITS + 1)], np.int64)
"""Number of windows that a code of each length takes."""

_REVERSED = np.array([int(f"{i:012b}"[::-1], 2) for i in range(1 << MAX_CODE_BITS)], np.uint32)
"""The twelve bits of every value in reverse order."""


def serialize_lengths(lengths: NDArray[np.int64]) -> bytes:
    """Return code lengths as nibbles, low nibble first.

    A nibble of 1 to 12 is a length. 0 followed by a nibble c means c + 1 symbols without a code. 13
    followed by c repeats the previous length c + 1 times. 15 ends the table; the remaining symbols have no
    code.

    Examples
    --------
    >>> serialize_lengths(np.array([1, 0, 0, 2, 2])).hex()
    '012102'
    """
    nibbles: list[int] = []
    groups = [(value, sum(1 for _ in group)) for value, group in groupby(lengths.tolist())]
    ends_early = bool(groups) and groups[-1][0] == 0
    for value, n_left in groups[:-1] if ends_early else groups:
        while n_left:
            count = min(n_left, _LONGEST_GROUP)
            if value == 0:
                nibbles += (_ZEROS, count - 1)
            elif count > 3:
                nibbles += (value, _REPEAT, count - 2)
            else:
                nibbles += [value] * count
            n_left -= count
    if ends_early:
        nibbles.append(_END)
    if len(nibbles) % 2:
        nibbles.append(0)
    return bytes(low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True))


def parse_lengths(cursor: Cursor, n_symbols: int) -> NDArray[np.int64]:
    """Parse the code lengths of an alphabet.

    Parameters
    ----------
    cursor
        Reads the output of `serialize_lengths`.
    n_symbols
        Size of the alphabet.

    Raises
    ------
    DamagedError
        The bytes end early, or the lengths do not form a complete prefix code.
    """
    lengths: list[int] = []
    high: list[int] = []  # The half of a byte that is not read yet.

    def nibble() -> int:
        if high:
            return high.pop()
        byte = cursor.take(1)[0]
        high.append(byte >> 4)
        return byte & 15

    while len(lengths) < n_symbols:
        value = nibble()
        if value == _END:
            lengths += [0] * (n_symbols - len(lengths))
        elif value == _ZEROS:
            lengths += [0] * (nibble() + 1)
        elif value == _REPEAT and lengths:
            lengths += [lengths[-1]] * (nibble() + 1)
        elif value >= _REPEAT:
            raise DamagedError("a code table holds a reserved value", found=str(value), expected="a length")
        else:
            lengths.append(value)
    if any(high):
        raise DamagedError("a code table has a padding nibble set")
    return _checked_lengths(lengths, n_symbols)


def _checked_lengths(lengths: list[int], n_symbols: int) -> NDArray[np.int64]:
    """Return the lengths if they form a complete code, since kernels require that every window decodes."""
    array = np.array(lengths, np.int64)
    kraft = int(_SPANS[array].sum())
    lone = kraft == 1 << (MAX_CODE_BITS - 1) and np.count_nonzero(array) == 1
    complete = kraft in (0, 1 << MAX_CODE_BITS) or lone
    if len(lengths) != n_symbols or not complete:
        raise DamagedError(
            "code lengths do not form a complete prefix code",
            expected=f"{n_symbols} lengths with Kraft sum {1 << MAX_CODE_BITS}",
            found=f"{len(lengths)} with {kraft}",
        )
    return array


def spent_bits(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bits that each symbol takes: its code length, or none for a lone symbol."""
    return lengths * (np.count_nonzero(lengths) > 1)


def _canonical(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return symbols in canonical order and their lengths; a lone symbol has length 0."""
    used = np.flatnonzero(lengths)
    order = used[np.argsort(lengths[used], kind="stable")]
    return order, spent_bits(lengths)[order]


def code_entries(lengths: NDArray[np.int64], n_entries: int = 256) -> NDArray[np.uint32]:
    """Return each symbol's code in bits 0-15, first bit least significant, and its length above.

    Parameters
    ----------
    lengths
        Code lengths of the alphabet.
    n_entries
        Size of the result; entries beyond the alphabet are 0.
    """
    order, sorted_lengths = _canonical(lengths)
    entries = np.zeros(n_entries, np.uint32)
    spans = 1 << (MAX_CODE_BITS - sorted_lengths)
    # Codes left-aligned to 12 bits are the running sums of the spans; bit reversal right-aligns them.
    starts = np.cumsum(spans) - spans
    entries[order] = _REVERSED[starts & ((1 << MAX_CODE_BITS) - 1)] | sorted_lengths.astype(np.uint32) << 16
    return entries


def window_bits(lengths: NDArray[np.int64]) -> int:
    """Return the number of bits of a window that holds any code."""
    return int(spent_bits(lengths).max())


def symbol_windows(
    lengths: NDArray[np.int64], n_bits: int, entries: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Return the entry of the symbol at the start of each possible window of `n_bits` bits.

    Parameters
    ----------
    lengths
        Code lengths of the alphabet, complete.
    n_bits
        Width of the window, at least `window_bits` of the lengths.
    entries
        Entry of each symbol.
    """
    order, sorted_lengths = _canonical(lengths)
    if order.size == 0:
        return np.zeros(1 << n_bits, np.uint32)
    in_code_order = np.repeat(entries[order], 1 << (n_bits - sorted_lengths))
    windows: NDArray[np.uint32] = in_code_order[_REVERSED[: 1 << n_bits] >> np.uint32(MAX_CODE_BITS - n_bits)]
    return windows


def literal_entries(lengths: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return each symbol's entry for the kernels: symbol in bits 0-7, and code length above."""
    return np.arange(lengths.size, dtype=np.uint32) | (spent_bits(lengths) << 8).astype(np.uint32)


def decode_symbols_with(lengths: NDArray[np.int64], stream: bytes | memoryview, n: int) -> NDArray[np.uint8]:
    """Decode `n` symbols of a stream of codes.

    Raises
    ------
    DamagedError
        The stream does not consist of exactly `n` codes, or the code is empty.
    """
    n_bits = window_bits(lengths)
    if n_bits == 0:
        used = np.flatnonzero(lengths)
        if used.size == 0 or len(stream):
            raise DamagedError("a stream of codes and its table do not fit together")
        return np.full(n, used[0], np.uint8)
    words = stream_words(stream)
    if n > 8 * len(stream):
        raise DamagedError(
            "a stream of codes ends early", expected=f"{n} codes", found=f"{8 * len(stream)} bits"
        )
    symbols = np.empty(n, np.uint8)
    windows = symbol_windows(lengths, n_bits, literal_entries(lengths))
    check_end(unpack_symbols(words, 8 * len(stream), windows, symbols), stream)
    return symbols


def check_end(n_bits: int, stream: bytes | memoryview) -> None:
    """Raise DamagedError unless decoding consumed a stream exactly, with zero padding bits."""
    if n_bits < 0 or (n_bits + 7) // 8 != len(stream) or (n_bits % 8 and stream[-1] >> n_bits % 8):
        raise DamagedError(
            "a stream of codes has the wrong length", expected=f"{n_bits} bits", found=f"{len(stream)} bytes"
        )


_PADDING_BYTES = 16
"""Two words: kernels read the word at a position, at most the end, and the next word."""


def stream_bytes(words: NDArray[np.uint64], n_bits: int) -> bytes:
    """Return the bytes of a stream of `n_bits` bits, padded with zero bits."""
    return words.view(np.uint8)[: (n_bits + 7) // 8].tobytes()


def stream_words(stream: bytes | memoryview) -> NDArray[np.uint64]:
    """Return a stream as 64-bit words, padded with at least two words of zeros."""
    padded = np.zeros((len(stream) + 7) // 8 * 8 + _PADDING_BYTES, np.uint8)
    padded[: len(stream)] = np.frombuffer(stream, np.uint8)
    return padded.view("<u8").astype(np.uint64, copy=False)
