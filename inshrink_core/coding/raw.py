"""Uncompressed storage of symbols, as bytes or packed bits, to which every other coder falls back."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from inshrink_core.errors import DamagedError

PACKED, CONSTANT = 0, 1
"""First byte of symbols that are stored as packed bits or are all equal; modes of coders start at 2."""


_Data = TypeVar("_Data", bound=Sized)


def of_length(data: _Data, nbytes: int, what: str) -> _Data:
    """Return stored bytes after a check of their number."""
    if len(data) != nbytes:
        raise DamagedError(what, expected=f"{nbytes} bytes", found=str(len(data)))
    return data


def in_range(value: int | np.integer, low: int, high: int, what: str) -> int:
    """Return a stored number after a check of its range, which includes both ends."""
    if not low <= value <= high:
        raise DamagedError(what, expected=f"{low} to {high}", found=str(value))
    return int(value)


def bits_per_symbol(n_symbols: int) -> int:
    """Return the number of bits of a symbol in an alphabet of `n_symbols`."""
    return max(n_symbols - 1, 0).bit_length()


def packed_bytes(n: int, n_symbols: int) -> int:
    """Return the size of `n` symbols as packed bits, in bytes."""
    return (n * bits_per_symbol(n_symbols) + 7) // 8


def worst_case_coded_bytes(n: int, n_symbols: int) -> int:
    """Return the largest payload of a symbol coder: its mode, and packed bits or a constant."""
    return 1 + max(packed_bytes(n, n_symbols), 1)


def pack_bits(symbols: NDArray[np.uint8], n_symbols: int) -> bytes:
    """Pack symbols in the fewest whole bits each, first bit least significant.

    Parameters
    ----------
    symbols
        Values below `n_symbols`.
    n_symbols
        Size of the alphabet, 1 to 256.

    Examples
    --------
    >>> import numpy as np
    >>> pack_bits(np.array([1, 2, 3], np.uint8), 4).hex()
    '39'
    """
    width = bits_per_symbol(n_symbols)
    if width == 8:
        return symbols.tobytes()
    bits = np.unpackbits(symbols[:, None], axis=1, count=width, bitorder="little")
    return np.packbits(bits, bitorder="little").tobytes()


def unpack_bits(payload: bytes | memoryview, n: int, n_symbols: int) -> NDArray[np.uint8]:
    """Return the `n` symbols from packed bits; inverse of `pack_bits`.

    Raises
    ------
    DamagedError
        The payload has the wrong length, a symbol outside the alphabet, or a nonzero padding bit.
    """
    of_length(payload, packed_bytes(n, n_symbols), "packed symbols have the wrong length")
    width = bits_per_symbol(n_symbols)
    stored = np.frombuffer(payload, np.uint8)
    if width == 8:
        symbols = stored.copy()
    else:
        bits = np.unpackbits(stored, bitorder="little")
        if bits[n * width :].any():
            raise DamagedError("packed symbols have a padding bit set")
        rows = bits[: n * width].reshape(n, width)
        symbols = np.packbits(rows, axis=1, bitorder="little").reshape(-1)[:n]
        if width == 0:
            symbols = np.zeros(n, np.uint8)
    in_range(symbols.max(initial=0), 0, n_symbols - 1, "a packed symbol is outside the alphabet")
    return symbols


def decode_escape(payload: bytes | memoryview, n: int, n_symbols: int) -> NDArray[np.uint8] | None:
    """Return `n` symbols from the modes `PACKED` and `CONSTANT`; None for modes of coders.

    Raises
    ------
    DamagedError
        The payload is empty although `n` is positive, or not valid for `n` symbols of the alphabet.
    """
    if n == 0 or len(payload) == 0:
        if n or len(payload):
            raise DamagedError(
                "coded symbols have the wrong length", expected=f"{n} symbols", found=f"{len(payload)} bytes"
            )
        return np.zeros(0, np.uint8)
    body = memoryview(payload)[1:]
    if payload[0] == PACKED:
        return unpack_bits(body, n, n_symbols)
    if payload[0] != CONSTANT:
        return None
    of_length(body, 1, "a constant symbol has the wrong length")
    symbol = in_range(body[0], 0, n_symbols - 1, "a constant symbol is not one of the alphabet")
    return np.full(n, symbol, np.uint8)
