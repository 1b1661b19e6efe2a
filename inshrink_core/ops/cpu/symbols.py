"""Entropy coding of symbols: modular delta, grouping, run lengths and Huffman codes.

The functions work in host memory, because their output is bytes, and numba compiles them. Arrays indexed by a
group have 256 rows, for any number of groups. ``docs/format.md`` (symbol streams) defines the bits.
Compiled code does not check indices. Tables indexed by a byte therefore have 256 entries, and tables indexed
by a window of the bit stream have an entry per window value. Streams are padded by two words; a step reads
less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.cpu.compiled import Int64s, UInt8s, UInt32s, compiled

UInt64s = NDArray[np.uint64]

MAX_CODE_BITS = 12
"""Maximum length of a Huffman code: a window table of 4096 entries still fits the first-level cache."""

MAX_CHUNK = 1 << 21
"""Maximum number of symbols per call: a run then has at most 19 extra bits, an event at most 12 + 19 + 12."""

N_RUN_TOKENS = 85
"""Number of run classes: 16 exact ones, then four per octave from 16 up to `MAX_CHUNK` inclusive."""

_LITERAL_SHIFT = 23
_RUN_MASK = (1 << _LITERAL_SHIFT) - 1
_NO_LITERAL = 256
"""Literal field of a `delta_events` record without a literal; the run is below it, the literal above."""

_EVENT_BITS = 43

_compiled, _inlined = compiled(nogil=True), compiled(nogil=True, inline="always")
_I64: Any = np.int64


@_compiled
def code_lengths(counts: Int64s, limit: int = MAX_CODE_BITS) -> Int64s:  # pragma: no cover - compiled
    """Return the code length of each symbol of a length-limited Huffman code.

    Parameters
    ----------
    counts
        Number of occurrences of each symbol; at most ``2**limit`` of them positive.
    limit
        Maximum code length in bits.

    Returns
    -------
    ndarray
        0 for a count of 0, otherwise 1 to `limit`. A single symbol gets length 1. With more symbols the Kraft
        sum is exactly 1. The algorithm is package-merge (Larmore and Hirschberg, 1990).
    """
    lengths = np.zeros(counts.size, np.int64)
    used = np.flatnonzero(counts)
    m = used.size
    if m < 2:
        lengths[used] = 1
        return lengths
    order = used[np.argsort(counts[used], kind="mergesort")]
    weights = counts[order]
    is_leaf = np.zeros((limit, 2 * m), np.bool_)
    merged = np.zeros(2 * m, np.int64)
    packages = np.zeros(m, np.int64)
    n_packages = 0
    for level in range(limit):
        leaf = 0
        package = 0
        for i in range(m + n_packages):
            if package >= n_packages or (leaf < m and weights[leaf] <= packages[package]):
                is_leaf[level, i] = True
                merged[i] = weights[leaf]
                leaf += 1
            else:
                merged[i] = packages[package]
                package += 1
        n_packages = (m + n_packages) // 2
        for i in range(n_packages):
            packages[i] = merged[2 * i] + merged[2 * i + 1]
    # The cheapest 2m - 2 items of the last level contain each symbol once per bit of its code.
    n_items = 2 * m - 2
    for level in range(limit - 1, -1, -1):
        n_leaves = int(np.count_nonzero(is_leaf[level, :n_items]))
        for i in range(n_leaves):
            lengths[order[i]] += 1
        n_items = 2 * (n_items - n_leaves)
    return lengths


@_compiled
def count_groups(groups: UInt8s) -> Int64s:  # pragma: no cover - compiled
    """Return the number of occurrences of each byte value, as 256 counts."""
    # Four tables, because two increments of a counter in a row wait for the first store.
    parts = np.zeros((4, 256), np.int64)
    n = groups.size
    for i in range(0, n - 3, 4):
        parts[0, groups[i]] += 1
        parts[1, groups[i + 1]] += 1
        parts[2, groups[i + 2]] += 1
        parts[3, groups[i + 3]] += 1
    for i in range(n - n % 4, n):
        parts[0, groups[i]] += 1
    counts: Int64s = parts[0] + parts[1] + parts[2] + parts[3]
    return counts


@_compiled
def count_pairs(groups: UInt8s, symbols: UInt8s, stride: int) -> Int64s:  # pragma: no cover - compiled
    """Count each symbol in each group, (256, 256), over every `stride`-th element."""
    counts = np.zeros((256, 256), np.int64)
    for i in range(0, symbols.size, stride):
        counts[groups[i], symbols[i]] += 1
    return counts


@_compiled
def _order(groups: UInt8s) -> Int64s:  # pragma: no cover - compiled
    """Return the indices of elements sorted by group, ascending within a group."""
    counts = count_groups(groups)
    places, order = np.cumsum(counts) - counts, np.empty(groups.size, np.int64)
    for i in range(groups.size):
        order[places[groups[i]]] = i
        places[groups[i]] += 1
    return order


@_inlined
def _run_token(run: int) -> int:  # pragma: no cover - compiled
    """Return the class of a run length: exact below 16, then four classes per octave."""
    if run < 16:
        return run
    exponent = 4
    while run >> exponent > 1:
        exponent += 1
    return 16 + (exponent - 4) * 4 + ((run >> (exponent - 2)) & 3)


@_compiled
def delta_events(
    groups: UInt8s, symbols: UInt8s, bases: Int64s, expected: Int64s, modulus: int
) -> tuple[UInt32s, Int64s, Int64s]:  # pragma: no cover - compiled
    """Return the events of a chunk by group; an event is a run of the expected symbol and a literal.

    Parameters
    ----------
    groups, symbols
        Group and symbol of each element, at most `MAX_CHUNK`.
    bases
        256 values below `modulus`: the literal of a symbol s in group g is ``(bases[g] - s) mod modulus``.
    expected
        256 values: the symbol whose runs are counted in each group, or 256 for none.
    modulus
        Size of the alphabet of literals; more than any symbol.

    Returns
    -------
    records : ndarray of uint32
        One per event. Groups ascend, and the events of a group follow its symbols in order. Bits 0-22 are the
        run, bits 23-31 the literal that ends it (256: the end of the group).
    run_counts : ndarray of int64, (256, 96)
        Number of occurrences of each run token in each group.
    literal_counts : ndarray of int64, (256, 256)
        Number of occurrences of each literal in each group.
    """
    order, records = _order(groups), np.empty(symbols.size, np.uint32)
    run_counts, literal_counts = np.zeros((256, 96), np.int64), np.zeros((256, 256), np.int64)
    at, run = 0, 0
    for i in range(order.size):
        group, symbol = groups[order[i]], symbols[order[i]]
        literal = _NO_LITERAL
        if symbol == expected[group]:
            run += 1
            if i + 1 < order.size and groups[order[i + 1]] == group:
                continue
        else:
            literal = (bases[group] - symbol) % modulus
            literal_counts[group, literal] += 1
        run_counts[group, _run_token(run)] += 1
        records[at] = run | literal << _LITERAL_SHIFT
        at, run = at + 1, 0
    return records[:at], run_counts, literal_counts


@_inlined
def _put(words: UInt64s, position: int, value: int, n_bits: int) -> int:  # pragma: no cover - compiled
    """Write up to 43 bits at a position from which on all bits are zero; return the next position."""
    word, shift = position >> 6, np.uint64(position & 63)
    words[word] |= np.uint64(value) << shift
    words[word + 1] |= (np.uint64(value) >> np.uint64(1)) >> (np.uint64(63) - shift)
    return position + n_bits


@_inlined
def _bits_at(words: UInt64s, position: int, mask: int) -> int:  # pragma: no cover - compiled
    """Return the bits from a position, under a mask."""
    word, shift = position >> 6, np.uint64(position & 63)
    window = (words[word] >> shift) | ((words[word + 1] << np.uint64(1)) << (np.uint64(63) - shift))
    bits: int = _I64(window & np.uint64(mask))
    return bits


@_compiled
def pack_events(
    records: UInt32s, n_events: Int64s, tables: Int64s, run_codes: UInt32s, literal_codes: UInt32s
) -> tuple[UInt64s, int]:  # pragma: no cover - compiled
    """Pack the records of `delta_events` into bits, first bit least significant; return the length too.

    Parameters
    ----------
    records
        Result of `delta_events`.
    n_events
        256 counts: number of records of each group.
    tables
        256 row numbers: code tables of each group.
    run_codes, literal_codes
        (tables, 96) and (tables, 257): the code in bits 0-15, its length above. The last literal has no code.
    """
    words = np.zeros(records.size * _EVENT_BITS // 64 + 2, np.uint64)
    position, end = 0, 0
    for group in range(n_events.size):
        table, begin = tables[group], end
        end += n_events[group]
        for i in range(begin, end):
            run = _I64(records[i]) & _RUN_MASK
            token = _run_token(run)
            code = _I64(run_codes[table, token])
            position = _put(words, position, code & 0xFFFF, code >> 16)
            n_extra = (token - 8) >> 2 if token >= 16 else 0
            position = _put(words, position, run & ((1 << n_extra) - 1), n_extra)
            code = _I64(literal_codes[table, records[i] >> _LITERAL_SHIFT])
            position = _put(words, position, code & 0xFFFF, code >> 16)
    return words, position


@_compiled
def unpack_events(
    words: UInt64s,
    n_bits: int,
    groups: UInt8s,
    bases: Int64s,
    expected: Int64s,
    modulus: int,
    tables: Int64s,
    run_windows: UInt32s,
    literal_windows: UInt32s,
    out: UInt8s,
) -> int:  # pragma: no cover - compiled
    """Decode a chunk of events into symbols; return the number of bits read, or -1 for a bad stream.

    Parameters
    ----------
    words
        The stream, padded with at least two zero words.
    n_bits
        Length of the stream without padding.
    groups
        Group of each element.
    bases, expected, modulus
        As in `delta_events`; `expected` is below 256 in groups whose run table holds more than run 0.
    tables
        256 row numbers of the window tables.
    run_windows
        (tables, 2**b). Each entry, for a value of the next b bits, holds the code length in bits 0-3, the
        number of extra bits in bits 4-8, and the shortest run of the class above.
    literal_windows
        (tables, 2**b): the literal in bits 0-7, the code length above.
    out
        Receives the symbols.
    """
    order = _order(groups)
    run_mask, literal_mask = run_windows.shape[1] - 1, literal_windows.shape[1] - 1
    position, i, stop = 0, 0, 0
    while i < order.size:
        group = groups[order[i]]
        while stop < order.size and groups[order[stop]] == group:
            stop += 1
        if position > n_bits:
            return -1
        entry = _I64(run_windows[tables[group], _bits_at(words, position, run_mask)])
        position += entry & 15
        n_extra = (entry >> 4) & 31
        run = (entry >> 9) + _bits_at(words, position, (1 << n_extra) - 1)
        position += n_extra
        if run > stop - i:
            return -1
        for k in range(i, i + run):
            out[order[k]] = np.uint8(expected[group] & 255)
        i += run
        if i < stop:
            entry = _I64(literal_windows[tables[group], _bits_at(words, position, literal_mask)])
            position += entry >> 8
            out[order[i]] = np.uint8((bases[group] - (entry & 255)) % modulus)
            i += 1
    return position if position <= n_bits else -1


@_compiled
def pack_symbols(symbols: UInt8s, codes: UInt32s) -> tuple[UInt64s, int]:  # pragma: no cover - compiled
    """Pack the codes of symbols into a bit stream, first bit least significant; return its length too.

    Parameters
    ----------
    symbols
        Symbols to encode.
    codes
        256 entries: the code in bits 0-15, its length above.
    """
    words = np.zeros(symbols.size * MAX_CODE_BITS // 64 + 2, np.uint64)
    position = 0
    for i in range(symbols.size):
        code = _I64(codes[symbols[i]])
        position = _put(words, position, code & 0xFFFF, code >> 16)
    return words, position


@_compiled
def unpack_symbols(
    words: UInt64s, n_bits: int, windows: UInt32s, out: UInt8s
) -> int:  # pragma: no cover - compiled
    """Decode symbols; return the number of bits read, or -1 for a bad stream.

    Parameters
    ----------
    words
        The stream, padded with at least two zero words.
    n_bits
        Length of the stream without padding.
    windows
        For each value of the next bits, the symbol in bits 0-7 and the code length, at least 1, above.
    out
        Receives the symbols.
    """
    position = 0
    for i in range(out.size):
        if position > n_bits:
            return -1
        entry = _I64(windows[_bits_at(words, position, windows.size - 1)])
        out[i] = entry & 255
        position += entry >> 8
    return position if position <= n_bits else -1
