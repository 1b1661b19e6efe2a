"""Coding of symbols as bytes: quantization-aware deltas, run lengths and Huffman codes, in chunks.

``docs/format.md`` (symbol streams) defines the bytes. The method is from Agrawal et al., Inshrinkerator,
SoCC 2024. The paper leaves some choices open. Here, run lengths and literals have separate code tables,
because a literal always ends a run and a shared table would spend bits on that. Runs count the prevalent
symbol of a group. Groups are consecutive in one bit stream, without lengths, because the decoder can count
the previous symbols.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.coding.events import NO_EXPECTATION, decode_grouped, encode_grouped, expected_symbols
from inshrink_core.coding.huffman import (
    code_entries,
    decode_symbols_with,
    parse_lengths,
    serialize_lengths,
    stream_bytes,
)
from inshrink_core.coding.raw import check_below, of_length, pack_bits, packed_bytes, unpack_bits
from inshrink_core.errors import DamagedError
from inshrink_core.ops.cpu.symbols import (
    MAX_CHUNK,
    MAX_CODE_BITS,
    code_lengths,
    count_groups,
    count_pairs,
    pack_symbols,
)
from inshrink_core.varint import read_varint, write_varint

_PACKED, _CONSTANT, _PLAIN, _GROUPED = range(4)

_SAMPLE = 1 << 16
"""Number of pairs in the sample that determines the prevalent symbol of each group in a chunk."""

_HOST = torch.device("cpu")

_Bytes = bytes | memoryview
_Symbols = NDArray[np.uint8]


def encode_symbols(symbols: Tensor, n_symbols: int, previous: Tensor | None, n_previous: int) -> bytes:
    """Encode symbols, relative to those of the previous checkpoint if there are any.

    Parameters
    ----------
    symbols
        UInt8[n], values below `n_symbols`, on any device.
    n_symbols
        Size of the alphabet, 1 to 256.
    previous
        UInt8[n], the previous checkpoint's symbols of the same parameters; None for a standalone payload.
    n_previous
        Size of the previous alphabet; ignored without `previous`.

    Returns
    -------
    bytes
        At most the packed bits of the symbols, and five bytes for each chunk of `MAX_CHUNK` symbols.

    Notes
    -----
    Time and memory are linear. Besides the arguments, a chunk of `MAX_CHUNK` symbols takes up to fourteen
    bytes a symbol, of which usually fewer than eight are touched. The result depends only on the arguments.

    Examples
    --------
    >>> symbols = torch.tensor([2, 3, 3, 2], dtype=torch.uint8)
    >>> payload = encode_symbols(symbols, 4, None, 0)
    >>> decode_symbols(payload, 4, 4, None, 0).tolist()
    [2, 3, 3, 2]
    """
    now, before = _host(symbols), None if previous is None else _host(previous)
    out = bytearray()
    for start in range(0, now.size, MAX_CHUNK):
        chunk = now[start : start + MAX_CHUNK]
        groups = None if before is None else before[start : start + MAX_CHUNK]
        kind, body = _encode_chunk(chunk, n_symbols, groups, n_previous)
        out.append(kind)
        if start + MAX_CHUNK < now.size:
            write_varint(out, len(body))
        out += body
    return bytes(out)


def decode_symbols(
    payload: _Bytes,
    n: int,
    n_symbols: int,
    previous: Tensor | None,
    n_previous: int,
    device: torch.device = _HOST,
) -> Tensor:
    """Decode the symbols from a payload of `encode_symbols`, given the same previous symbols.

    Parameters
    ----------
    payload
        The bytes.
    n
        Number of symbols.
    n_symbols, previous, n_previous
        As given to `encode_symbols`.
    device
        Device of the result without `previous`; decoding takes place in host memory.

    Returns
    -------
    Tensor
        UInt8[n] on the device of `previous`, or else on `device`; values below `n_symbols`.

    Raises
    ------
    DamagedError
        The payload is not valid for `n` symbols of the alphabet.
    """
    before = None if previous is None else _host(previous)
    out = np.empty(n, np.uint8)
    view = memoryview(payload)
    offset = 0
    for start in range(0, n, MAX_CHUNK):
        chunk = out[start : start + MAX_CHUNK]
        groups = None if before is None else before[start : start + MAX_CHUNK]
        if offset >= len(view):
            raise DamagedError("a symbol stream ends early", expected=f"{n} symbols", found=str(start))
        kind, offset = view[offset], offset + 1
        length = len(view) - offset
        if start + MAX_CHUNK < n:
            length, offset = read_varint(view, offset)
        body = of_length(view[offset : offset + length], length, "a chunk of symbols ends early")
        chunk[:] = _decode_chunk(kind, body, chunk.size, n_symbols, groups, n_previous)
        offset += length
    if offset != len(view):
        raise DamagedError("bytes follow a symbol stream", found=str(len(view) - offset), expected="0")
    check_below(out, n_symbols, "a symbol is outside the alphabet")
    return torch.from_numpy(out).to(device if previous is None else previous.device)


def _host(symbols: Tensor) -> _Symbols:
    """Return symbols in host memory, where entropy coding runs, as in the paper."""
    array: _Symbols = symbols.detach().reshape(-1).to("cpu").contiguous().numpy()
    return array


def _grouping(
    n: int, n_symbols: int, groups: _Symbols | None, n_previous: int
) -> tuple[_Symbols, NDArray[np.int64], int]:
    """Return groups, base symbol of each group, and modulus; without `groups`, one group of base 0."""
    if groups is None:
        return np.zeros(n, np.uint8), np.zeros(256, np.int64), n_symbols
    return groups, np.arange(256, dtype=np.int64), max(n_symbols, n_previous)


def _encode_chunk(
    chunk: _Symbols, n_symbols: int, previous: _Symbols | None, n_previous: int
) -> tuple[int, bytes]:
    """Return kind and body of the smallest form of a chunk, among those likely to be smallest."""
    groups, bases, modulus = _grouping(chunk.size, n_symbols, previous, n_previous)
    pairs = count_pairs(groups, chunk, max(1, chunk.size // _SAMPLE))
    expected = expected_symbols(pairs, bases)
    forms: list[tuple[int, bytes]] = []
    if previous is not None or expected[0] != NO_EXPECTATION:
        delta = _constant_delta(groups, chunk, bases, expected, modulus)
        if delta is not None:
            return _CONSTANT, bytes([delta])
        forms.append((_GROUPED, encode_grouped(groups, chunk, bases, expected, modulus)))
        # If the previous symbols do not help, grouping costs only a table for each group, which matters
        # only for small chunks.
    if previous is None or chunk.size <= _SAMPLE:
        lengths = code_lengths(count_groups(chunk)[:n_symbols], MAX_CODE_BITS)
        stream = stream_bytes(*pack_symbols(chunk, code_entries(lengths)))
        forms.append((_PLAIN, serialize_lengths(lengths) + stream))
    kind, body = min(forms, key=lambda form: len(form[1]))
    if len(body) >= packed_bytes(chunk.size, n_symbols):
        return _PACKED, pack_bits(chunk, n_symbols)
    return kind, body


def _constant_delta(
    groups: _Symbols,
    chunk: _Symbols,
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
) -> int | None:
    """Return D if it is equal for all elements, else None."""
    delta = (int(bases[groups[0]]) - int(chunk[0])) % modulus
    table = ((bases - delta) % modulus).astype(np.uint8)
    # If little moved, a sparse probe finds no difference and the whole chunk would be compared. A dense
    # probe at the start almost always finds one first.
    for probe in (slice(0, None, max(1, chunk.size // 64)), slice(0, _SAMPLE), slice(None)):
        if not np.array_equal(table[groups[probe]], chunk[probe]):
            return None
    return delta


def _decode_chunk(
    kind: int, body: memoryview, n: int, n_symbols: int, previous: _Symbols | None, n_previous: int
) -> _Symbols:
    """Decode a chunk, inverse of `_encode_chunk`; the caller checks the alphabet."""
    if kind == _PACKED:
        return unpack_bits(body, n, n_symbols)
    if kind == _PLAIN:
        lengths, offset = parse_lengths(body, 0, n_symbols)
        return decode_symbols_with(lengths, body[offset:], n)
    groups, bases, modulus = _grouping(n, n_symbols, previous, n_previous)
    if kind == _GROUPED:
        return decode_grouped(body, groups, bases, modulus)
    if kind == _CONSTANT and len(body) == 1 and body[0] < modulus:
        table: _Symbols = ((bases - body[0]) % modulus).astype(np.uint8)
        return table[groups]
    raise DamagedError("a chunk of symbols has no known kind", expected="0 to 3", found=str(kind))
