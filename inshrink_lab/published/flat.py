"""Byte streams of the published codecs' symbols, under the coder that a setting names.

These codecs work in host memory, because their coders do and their purpose is a comparison of size and
fidelity. So equal inputs give equal bytes, whatever the device of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.codec import Tunable, Tuning
from inshrink_core.coding.huffman import (
    code_entries,
    decode_symbols_with,
    parse_lengths,
    serialize_lengths,
    stream_bytes,
)
from inshrink_core.coding.rans import decode_rans, encode_rans
from inshrink_core.coding.raw import (
    CONSTANT,
    PACKED,
    bits_per_symbol,
    decode_escape,
    pack_bits,
    packed_bytes,
    unpack_bits,
)
from inshrink_core.coding.zstd import zstd_compress, zstd_decompress
from inshrink_core.errors import DamagedError
from inshrink_core.ops.cpu.symbols import MAX_CODE_BITS, code_lengths, count_groups, pack_symbols
from inshrink_core.varint import Cursor
from inshrink_lab.published.lzma2 import lzma_compress, lzma_decompress

BITS = Tuning(
    tunable=Tunable(settings=("bits",), values=(8, 7, 6, 5, 4, 3, 2, 1), label="Bits", unit="bits a symbol")
)
"""The tunable parameter of codecs whose symbols have a width."""

Symbols: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.bool_]

_ZSTD_LEVEL = 19
"""The highest level that needs no more memory to decode than the others."""


class _Mode(IntEnum):
    """First byte of coded symbols."""

    HUFFMAN = 2
    LZMA = 3
    RANS = 4
    ZSTD = 5


FLAT_CODERS: Mapping[str, _Mode] = {mode.name.lower(): mode for mode in _Mode}
"""Coders a config may name."""

FLAT_WORDS: Mapping[str, tuple[str, ...]] = {"coder": tuple(FLAT_CODERS), "vectors": ("quantized", "exact")}
"""Settings of these codecs: the coder, and what becomes of tensors of at most one dimension."""


def _byte_alphabet(n_symbols: int) -> int:
    """Widen symbols to 1, 2, 4 or 8 bits: byte-wise coders see nothing across bytes."""
    width = max(bits_per_symbol(n_symbols), 1)
    return 1 << (1 << (width - 1).bit_length())


def encode_flat(symbols: Symbols, n_symbols: int, coder: str) -> bytes:
    """Return symbols coded, packed where that is smaller, or as a constant.

    Parameters
    ----------
    symbols
        UInt8[n], values below `n_symbols`.
    n_symbols
        Size of the alphabet, 1 to 256.
    coder
        A key of `FLAT_CODERS`.

    Returns
    -------
    bytes
        At most `worst_case_coded_bytes`.

    Examples
    --------
    >>> import numpy as np
    >>> encode_flat(np.array([2, 2, 2], np.uint8), 4, "huffman").hex()
    '0102'
    """
    if symbols.size and int(symbols.min()) == int(symbols.max()):
        return bytes((CONSTANT, int(symbols[0])))
    body = _ENCODERS[coder](symbols, n_symbols)
    if len(body) < packed_bytes(symbols.size, n_symbols):
        return bytes((FLAT_CODERS[coder],)) + body
    return bytes((PACKED,)) + pack_bits(symbols, n_symbols)


def decode_flat(payload: bytes | memoryview, n: int, n_symbols: int) -> Symbols:
    """Return the `n` symbols that `encode_flat` coded.

    Raises
    ------
    DamagedError
        The payload is not the code of `n` symbols of this alphabet.
    """
    symbols = decode_escape(payload, n, n_symbols)
    if symbols is not None:
        return symbols
    if payload[0] > max(_Mode):
        raise DamagedError("coded symbols have no known mode", expected=f"0 to {max(_Mode)}", found="another")
    symbols = _DECODERS[_Mode(payload[0])](memoryview(payload)[1:], n, n_symbols)
    if n and int(symbols.max()) >= n_symbols:
        raise DamagedError(
            "a symbol is outside the alphabet", expected=f"below {n_symbols}", found=str(int(symbols.max()))
        )
    return symbols


def encode_huffman(values: Symbols) -> bytes:
    """Return the table of an order-0 code, then the codes; a lone value takes its table only."""
    if values.size == 0:
        return b""
    lengths = code_lengths(count_groups(values), MAX_CODE_BITS)
    table = serialize_lengths(lengths)
    if np.count_nonzero(lengths) == 1:
        return table
    return table + stream_bytes(*pack_symbols(values, code_entries(lengths)))


def decode_huffman(payload: bytes | memoryview, n: int) -> Symbols:
    """Return the `n` values; DamagedError if the table or the codes are not theirs."""
    if n == 0 and len(payload) == 0:
        return np.zeros(0, np.uint8)
    cursor = Cursor(memoryview(payload))
    return decode_symbols_with(parse_lengths(cursor, 256), cursor.rest, n)


def _encode_rans(symbols: Symbols, n_symbols: int) -> bytes:
    return encode_rans(torch.from_numpy(np.ascontiguousarray(symbols)), None, n_symbols)


def _decode_rans(body: memoryview, n: int, n_symbols: int) -> Symbols:
    symbols: Symbols = decode_rans(body, n, n_symbols).numpy()
    return symbols


def _packing(compress: Callable[[bytes], bytes]) -> Callable[[Symbols, int], bytes]:
    return lambda symbols, n_symbols: compress(pack_bits(symbols, _byte_alphabet(n_symbols)))


def _unpacking(
    decompress: Callable[[memoryview, int], bytes],
) -> Callable[[memoryview, int, int], Symbols]:
    def decode(body: memoryview, n: int, n_symbols: int) -> Symbols:
        alphabet = _byte_alphabet(n_symbols)
        return unpack_bits(decompress(body, packed_bytes(n, alphabet)), n, alphabet)

    return decode


_ENCODERS: Mapping[str, Callable[[Symbols, int], bytes]] = {
    "huffman": lambda symbols, _: encode_huffman(np.ascontiguousarray(symbols)),
    "lzma": _packing(lzma_compress),
    "rans": _encode_rans,
    "zstd": _packing(lambda data: zstd_compress(data, _ZSTD_LEVEL)),
}

_DECODERS: Mapping[_Mode, Callable[[memoryview, int, int], Symbols]] = {
    _Mode.HUFFMAN: lambda body, n, _: decode_huffman(body, n),
    _Mode.LZMA: _unpacking(lzma_decompress),
    _Mode.RANS: _decode_rans,
    _Mode.ZSTD: _unpacking(zstd_decompress),
}
