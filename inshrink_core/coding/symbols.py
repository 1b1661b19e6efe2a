"""Coding of symbols as bytes: quantization-aware deltas, run lengths and Huffman codes, in chunks.

``docs/format.md`` (symbol streams) defines the bytes. The method is from Agrawal et al., Inshrinkerator,
SoCC 2024. The paper leaves some choices open. Here, run lengths and literals have separate code tables,
because a literal always ends a run and a shared table would spend bits on that. Runs count the prevalent
symbol of a group. Groups are consecutive in one bit stream, without lengths, because the decoder can count
the previous symbols. A group has separate tables of runs and literals, or shares pooled ones: one pool for
all groups with an expected symbol, and a literal table for all groups without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.coding.huffman import (
    check_end,
    code_entries,
    decode_symbols_with,
    literal_entries,
    parse_lengths,
    serialize_lengths,
    spent_bits,
    stream_bytes,
    stream_words,
    symbol_windows,
    window_bits,
)
from inshrink_core.coding.raw import in_range, of_length, pack_bits, packed_bytes, unpack_bits
from inshrink_core.errors import DamagedError
from inshrink_core.ops.cpu.symbols import (
    MAX_CHUNK,
    MAX_CODE_BITS,
    N_RUN_TOKENS,
    code_lengths,
    count_groups,
    count_pairs,
    delta_events,
    pack_events,
    pack_symbols,
    unpack_events,
)
from inshrink_core.varint import Cursor, write_varint

_PACKED, _CONSTANT, _PLAIN, _GROUPED = range(4)

_SAMPLE = 1 << 16
"""Number of pairs in the sample that determines the prevalent symbol of each group in a chunk."""

_HOST = torch.device("cpu")

_Bytes = bytes | memoryview
_Symbols = NDArray[np.uint8]
_Counts = NDArray[np.int64]


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
    cursor = Cursor(memoryview(payload))
    for start in range(0, n, MAX_CHUNK):
        chunk = out[start : start + MAX_CHUNK]
        groups = None if before is None else before[start : start + MAX_CHUNK]
        kind = cursor.take(1)[0]
        body = cursor.section() if start + MAX_CHUNK < n else cursor.take(len(cursor.rest))
        chunk[:] = _decode_chunk(kind, body, chunk.size, n_symbols, groups, n_previous)
    of_length(cursor.rest, 0, "bytes follow a symbol stream")
    in_range(out.max(initial=0), 0, n_symbols - 1, "a symbol is outside the alphabet")
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
        cursor = Cursor(body)
        return decode_symbols_with(parse_lengths(cursor, n_symbols), cursor.rest, n)
    groups, bases, modulus = _grouping(n, n_symbols, previous, n_previous)
    if kind == _GROUPED:
        return decode_grouped(body, groups, bases, modulus)
    if kind == _CONSTANT and len(body) == 1 and body[0] < modulus:
        table: _Symbols = ((bases - body[0]) % modulus).astype(np.uint8)
        return table[groups]
    raise DamagedError("a chunk of symbols has no known kind", expected="0 to 3", found=str(kind))


NO_EXPECTATION = 256
"""Marks a group without a prevalent symbol; no symbol has this value."""


_PREVALENCE = 0.6
"""Share of a group's most frequent symbol from which its runs are coded. Below it, a Huffman code of single
symbols wastes no more than one of runs, and decodes faster."""

_MIN_GROUP = 64
"""Size below which a group expects "no change": storing its prevalent symbol would save nothing."""


def expected_symbols(pair_counts: NDArray[np.int64], unmoved: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the symbol whose runs are coded in each group, or `NO_EXPECTATION`.

    Parameters
    ----------
    pair_counts
        (256, 256): counts of each symbol in each group, possibly of a sample.
    unmoved
        256 symbols that mean "no change" (D = 0).

    Returns
    -------
    ndarray of int64
        256 symbols.
    """
    totals, most = pair_counts.sum(axis=1), pair_counts.max(axis=1)
    chosen = np.where(most >= _PREVALENCE * totals, pair_counts.argmax(axis=1), NO_EXPECTATION)
    return np.where(totals < _MIN_GROUP, unmoved, chosen).astype(np.int64)


_UNIFORM, _POOLED = 1, 2

_POOLED_RUNS, _POOLED_PLAIN = 0, 1
"""Rows of the pooled tables; separate tables of groups follow."""

_ROW_COUNT = 96
"""Columns of the run counts, as in the kernels."""

_LITERAL_COUNT = 257
"""Columns of the literal codes; the last one, "no literal", takes no bits."""

_CODE_BITS = 10
"""Longest code to write: windows of 20 groups then take 160 kB instead of 640, for 0.04 % in size."""

_MIN_TENSOR_EVENTS = 256
"""A group with fewer events does not justify separate tables."""

# Runs below 16 have separate classes. Above, each octave has four classes, and extra bits give the rest of
# the length (an Elias-type code with a Huffman-coded prefix).
_TOKENS = np.arange(N_RUN_TOKENS, dtype=np.int64)

RUN_EXTRA_BITS: NDArray[np.int64] = np.where(_TOKENS < 16, 0, (_TOKENS - 16) // 4 + 2)
"""Number of extra bits after each run token."""

RUN_STARTS: NDArray[np.int64] = np.where(_TOKENS < 16, _TOKENS, (4 + (_TOKENS - 16) % 4) << RUN_EXTRA_BITS)
"""Shortest run of each token's class."""


def run_windows(lengths: NDArray[np.int64], n_bits: int) -> NDArray[np.uint32]:
    """Return the window table of run tokens: code length, extra bits, shortest run (`unpack_events`)."""
    entries = (spent_bits(lengths) | RUN_EXTRA_BITS << 4 | RUN_STARTS << 9).astype(np.uint32)
    return symbol_windows(lengths, n_bits, entries)


@dataclass(slots=True)
class _Tables:
    """Code lengths by row (the pooled tables, then separate ones), and the row of each of 256 groups."""

    rows: _Counts
    runs: list[_Counts]
    literals: list[_Counts]


def _lone_run() -> _Counts:
    """Return the code of a group without expectation: run 0, in no bits."""
    lengths = np.zeros(N_RUN_TOKENS, np.int64)
    lengths[0] = 1
    return lengths


def encode_grouped(
    groups: _Symbols, symbols: _Symbols, bases: _Counts, expected: _Counts, modulus: int
) -> bytes:
    """Encode a chunk, and return its body.

    Parameters
    ----------
    groups, symbols
        UInt8[n], n from 1 to `MAX_CHUNK`.
    bases, expected, modulus
        As in `inshrink_core.ops.cpu.symbols.delta_events`.
    """
    records, run_counts, literal_counts = delta_events(groups, symbols, bases, expected, modulus)
    n_events = run_counts.sum(axis=1)
    present = np.flatnonzero(n_events)
    run_counts, literal_counts = run_counts[:, :N_RUN_TOKENS], literal_counts[:, :modulus]
    tables = _choose_tables(present, run_counts, literal_counts, expected != NO_EXPECTATION)
    out = _header(present, bases, expected, modulus, tables)
    with_runs = _rows_with_runs(tables, expected)
    for row in _stored_rows(present, tables):
        if row in with_runs:
            out += serialize_lengths(tables.runs[row])
        out += serialize_lengths(tables.literals[row])
    run_codes = np.stack([code_entries(lengths, _ROW_COUNT) for lengths in tables.runs])
    literal_codes = np.stack([code_entries(lengths, _LITERAL_COUNT) for lengths in tables.literals])
    return bytes(out) + stream_bytes(*pack_events(records, n_events, tables.rows, run_codes, literal_codes))


def decode_grouped(body: memoryview, groups: _Symbols, bases: _Counts, modulus: int) -> _Symbols:
    """Decode a chunk, and return its symbols, which are below `modulus`.

    Raises
    ------
    DamagedError
        The body is not valid for these groups.
    """
    present = np.flatnonzero(count_groups(groups))
    cursor = Cursor(body)
    expected, apart = _parse_header(cursor, present, bases, modulus)
    tables = _parse_tables(cursor, present, expected, apart, modulus)
    run_bits = max(window_bits(lengths) for lengths in tables.runs)
    literal_bits = max(window_bits(lengths) for lengths in tables.literals)
    runs = np.stack([run_windows(lengths, run_bits) for lengths in tables.runs])
    literals = np.stack(
        [symbol_windows(lengths, literal_bits, literal_entries(lengths)) for lengths in tables.literals]
    )
    stream, out = cursor.rest, np.empty(groups.size, np.uint8)
    arguments = (stream_words(stream), 8 * len(stream), groups, bases, expected, modulus)
    check_end(unpack_events(*arguments, tables.rows, runs, literals, out), stream)
    return out


def _choose_tables(
    present: _Counts, run_counts: _Counts, literal_counts: _Counts, expecting: NDArray[np.bool_]
) -> _Tables:
    """Assign separate tables to groups in which they save more than they cost, and pool the rest."""
    rows = np.where(expecting, _POOLED_RUNS, _POOLED_PLAIN).astype(np.int64)
    pooled = _pool(rows, run_counts, literal_counts)
    n_events = run_counts.sum(axis=1)
    apart_runs: list[_Counts] = []
    apart_literals: list[_Counts] = []
    for group in present[n_events[present] >= _MIN_TENSOR_EVENTS].tolist():
        runs = code_lengths(run_counts[group], _CODE_BITS) if expecting[group] else _lone_run()
        literals = code_lengths(literal_counts[group], _CODE_BITS)
        row = int(rows[group])
        saved = _code_bits(pooled[0][row], run_counts[group]) - _code_bits(runs, run_counts[group])
        saved += _code_bits(pooled[1][row], literal_counts[group])
        saved -= _code_bits(literals, literal_counts[group])
        tables = (literals, runs) if expecting[group] else (literals,)
        if saved > 8 * sum(len(serialize_lengths(lengths)) for lengths in tables):
            rows[group] = 2 + len(apart_runs)
            apart_runs.append(runs)
            apart_literals.append(literals)
    if apart_runs:
        pooled = _pool(rows, run_counts, literal_counts)
    return _Tables(rows, pooled[0] + apart_runs, pooled[1] + apart_literals)


def _pool(rows: _Counts, run_counts: _Counts, literal_counts: _Counts) -> tuple[list[_Counts], list[_Counts]]:
    """Return the pooled tables of the groups without separate ones."""
    shared, plain = rows == _POOLED_RUNS, rows == _POOLED_PLAIN
    runs = [code_lengths(run_counts[shared].sum(axis=0), _CODE_BITS), _lone_run()]
    literals = [code_lengths(literal_counts[kind].sum(axis=0), _CODE_BITS) for kind in (shared, plain)]
    return runs, literals


def _code_bits(lengths: _Counts, counts: _Counts) -> int:
    """Return the bits of codes with these lengths, without extra bits, which do not depend on the table."""
    return int((spent_bits(lengths) * counts).sum())


def _stored_rows(present: _Counts, tables: _Tables) -> list[int]:
    """Return the rows in use, in the order of their stored tables."""
    return sorted({int(row) for row in tables.rows[present]})


def _rows_with_runs(tables: _Tables, expected: _Counts) -> set[int]:
    """Return the rows with a run table: groups without expectation have no runs."""
    return {_POOLED_RUNS, *tables.rows[expected != NO_EXPECTATION].tolist()}


def _header(present: _Counts, bases: _Counts, expected: _Counts, modulus: int, tables: _Tables) -> bytearray:
    """Return flags, and for each present group its expectation and whether it has separate tables."""
    apart = tables.rows[present] > _POOLED_PLAIN
    uniform = bool(np.all(expected[present] == bases[present]))
    out = bytearray([(_UNIFORM if uniform else 0) | (0 if apart.any() else _POOLED)])
    if not uniform:
        expecting = expected[present] != NO_EXPECTATION
        out += np.packbits(expecting, bitorder="little").tobytes()
        deltas = (bases[present] - expected[present]) % modulus
        out += deltas[expecting].astype(np.uint8).tobytes()
    if apart.any():
        out += np.packbits(apart, bitorder="little").tobytes()
    return out


def _parse_header(
    cursor: Cursor, present: _Counts, bases: _Counts, modulus: int
) -> tuple[_Counts, NDArray[np.bool_]]:
    """Parse a header; return expected symbols, and the groups with separate tables."""
    flags = in_range(cursor.take(1)[0], 0, _UNIFORM | _POOLED, "a chunk of symbols has unknown flags")
    expected = bases.copy()
    apart = np.zeros(present.size, bool)
    if not flags & _UNIFORM:
        expecting = _parse_mask(cursor, present.size)
        n_expecting = int(np.count_nonzero(expecting))
        deltas = np.frombuffer(cursor.take(n_expecting), np.uint8).astype(np.int64)
        in_range(deltas.max(initial=0), 0, modulus - 1, "an expected delta is outside the alphabet")
        expected[present[~expecting]] = NO_EXPECTATION
        expected[present[expecting]] = (bases[present[expecting]] - deltas) % modulus
    if not flags & _POOLED:
        apart = _parse_mask(cursor, present.size)
    return expected, apart


def _parse_mask(cursor: Cursor, n: int) -> NDArray[np.bool_]:
    """Parse a bit for each present group, first group least significant."""
    bits = np.unpackbits(np.frombuffer(cursor.take((n + 7) // 8), np.uint8), bitorder="little")
    if bits[n:].any():
        raise DamagedError("a mask of groups has a padding bit set")
    return bits[:n].astype(bool)


def _parse_tables(
    cursor: Cursor, present: _Counts, expected: _Counts, apart: NDArray[np.bool_], modulus: int
) -> _Tables:
    """Parse code lengths in the order of `_stored_rows`; unused rows get placeholders."""
    rows = np.where(expected == NO_EXPECTATION, _POOLED_PLAIN, _POOLED_RUNS).astype(np.int64)
    rows[present[apart]] = 2 + np.arange(int(np.count_nonzero(apart)))
    n_rows = 2 + int(np.count_nonzero(apart))
    tables = _Tables(rows, [_lone_run()] * n_rows, [np.zeros(modulus, np.int64)] * n_rows)
    with_runs = _rows_with_runs(tables, expected)
    for row in _stored_rows(present, tables):
        if row in with_runs:
            tables.runs[row] = parse_lengths(cursor, N_RUN_TOKENS)
        tables.literals[row] = parse_lengths(cursor, modulus)
    return tables
