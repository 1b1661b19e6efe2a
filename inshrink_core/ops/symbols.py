"""Entropy coding of symbols: modular delta, grouping, run lengths and Huffman codes, fused.

These run in host memory, because their output is bytes. Arrays that are indexed by a group have 256
rows, whatever the number of groups. ``docs/format.md`` (symbol streams) defines the bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import op

MAX_CODE_BITS = 12
"""Longest Huffman code: a window table of 4096 entries still fits the first-level cache."""

MAX_CHUNK = 1 << 21
"""Most symbols per call: a run then needs at most 19 extra bits, an event at most 12 + 19 + 12."""

N_RUN_TOKENS = 85
"""Run classes: 16 exact ones, then four for each octave from 16 up to `MAX_CHUNK` inclusive."""


LITERAL_SHIFT = 23


RUN_MASK = (1 << LITERAL_SHIFT) - 1


NO_LITERAL = 256
"""A record of `delta_events`: the run below, the literal, or that there is none, above."""


@op
def code_lengths(counts: NDArray[np.int64], limit: int = MAX_CODE_BITS) -> NDArray[np.int64]:
    """Return the code length of each symbol of a Huffman code no longer than a limit.

    Parameters
    ----------
    counts
        How often each symbol occurs; at most ``2**limit`` of them positive.
    limit
        Longest code allowed, in bits.

    Returns
    -------
    ndarray
        0 where the count is 0, else 1 to `limit`; 1 for a symbol that is the only one. Otherwise the
        Kraft sum is exactly 1.
    """
    # Package-merge (Larmore and Hirschberg, 1990), written so that numba compiles it as it is.
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
    # The cheapest 2m - 2 items of the last level hold each symbol once for every bit of its code.
    n_items = 2 * m - 2
    for level in range(limit - 1, -1, -1):
        n_leaves = int(np.count_nonzero(is_leaf[level, :n_items]))
        for i in range(n_leaves):
            lengths[order[i]] += 1
        n_items = 2 * (n_items - n_leaves)
    return lengths


@op
def count_groups(groups: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return how often each byte value occurs, as 256 counts."""
    return np.bincount(groups, minlength=256).astype(np.int64)


@op
def count_pairs(groups: NDArray[np.uint8], symbols: NDArray[np.uint8], stride: int) -> NDArray[np.int64]:
    """Return how often each symbol occurs in each group, (256, 256), over every `stride`-th element."""
    pairs = groups[::stride].astype(np.int64) * 256 + symbols[::stride]
    return np.bincount(pairs, minlength=65536).reshape(256, 256).astype(np.int64)


def run_token(run: int) -> int:
    """Class of a run length: exact below 16, then four classes an octave."""
    if run < 16:
        return run
    exponent = run.bit_length() - 1
    return 16 + (exponent - 4) * 4 + (run >> (exponent - 2) & 3)


def run_extra_bits(token: int) -> int:
    """Bits that follow a run token and say which run of its class it is."""
    return 0 if token < 16 else (token - 16) // 4 + 2


@op
def delta_events(
    groups: NDArray[np.uint8],
    symbols: NDArray[np.uint8],
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """Return the events of a chunk, group after group: runs of the expected symbol, each ended by a literal.

    Parameters
    ----------
    groups, symbols
        Group and symbol of each element, at most `MAX_CHUNK`.
    bases
        256 values below `modulus`: the literal of a symbol s in group g is ``(bases[g] - s) mod modulus``.
    expected
        256 values: the symbol of which runs are counted in each group, 256 for none.
    modulus
        Size of the alphabet of literals; more than any symbol.

    Returns
    -------
    records : ndarray of uint32
        One per event; groups ascend, and the events of a group follow its symbols in order. Bits 0-22
        the run, 23-31 the literal that ends it (256: the group ended).
    run_counts : ndarray of int64, (256, 96)
        How often each run token occurs in each group.
    literal_counts : ndarray of int64, (256, 256)
        How often each literal occurs in each group.
    """
    run_counts = np.zeros((256, 96), np.int64)
    literal_counts = np.zeros((256, 256), np.int64)
    records: list[int] = []
    for group in range(256):
        run = 0
        for symbol in symbols[groups == group].tolist():
            if symbol == expected[group]:
                run += 1
                continue
            literal = int(bases[group] - symbol) % modulus
            run_counts[group, run_token(run)] += 1
            literal_counts[group, literal] += 1
            records.append(run | literal << LITERAL_SHIFT)
            run = 0
        if run:
            run_counts[group, run_token(run)] += 1
            records.append(run | NO_LITERAL << LITERAL_SHIFT)
    return np.array(records, np.uint32), run_counts, literal_counts


class _BitWriter:
    """A stream as one integer, because shifting it states the bit order without words or carries."""

    def __init__(self) -> None:
        self.value = 0
        self.n_bits = 0

    def put(self, value: int, n_bits: int) -> None:
        self.value |= value << self.n_bits
        self.n_bits += n_bits

    def put_code(self, code: int) -> None:
        self.put(code & 0xFFFF, code >> 16)

    def words(self) -> tuple[NDArray[np.uint64], int]:
        n_words = self.n_bits // 64 + 1
        return np.frombuffer(self.value.to_bytes(8 * n_words, "little"), np.uint64), self.n_bits


@op
def pack_events(
    records: NDArray[np.uint32],
    n_events: NDArray[np.int64],
    expected: NDArray[np.int64],
    tables: NDArray[np.int64],
    run_codes: NDArray[np.uint32],
    literal_codes: NDArray[np.uint32],
) -> tuple[NDArray[np.uint64], int]:
    """Return a bit stream, first bit least significant, of `delta_events`' records; and its length in bits.

    Parameters
    ----------
    records
        From `delta_events`.
    n_events
        256 counts: the records of each group.
    expected
        As in `delta_events`.
    tables
        256 row numbers: the code tables of each group.
    run_codes, literal_codes
        (tables, 96) and (tables, 257): the code in bits 0-15, its length above; the last literal is none.
    """
    stream = _BitWriter()
    for table, record in zip(np.repeat(tables, n_events).tolist(), records.tolist(), strict=True):
        run, literal = record & RUN_MASK, record >> LITERAL_SHIFT
        token = run_token(run)
        stream.put_code(int(run_codes[table, token]))
        n_extra = run_extra_bits(token)
        stream.put(run & ((1 << n_extra) - 1), n_extra)
        if literal != NO_LITERAL:
            stream.put_code(int(literal_codes[table, literal]))
    return stream.words()


@op
def unpack_events(
    words: NDArray[np.uint64],
    n_bits: int,
    groups: NDArray[np.uint8],
    sizes: NDArray[np.int64],
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
    tables: NDArray[np.int64],
    run_windows: NDArray[np.uint32],
    literal_windows: NDArray[np.uint32],
    out: NDArray[np.uint8],
) -> int:
    """Decode a chunk of events into symbols and return how many bits they took, or -1 for a bad stream.

    Parameters
    ----------
    words
        The stream, padded with two words of zeros at least.
    n_bits
        Length of the stream without padding.
    groups
        Group of each element.
    sizes
        `count_groups` of `groups`.
    bases, expected, modulus
        As in `delta_events`; `expected` is below 256 in groups whose run table holds more than run 0.
    tables
        256 row numbers of the window tables.
    run_windows
        (tables, 2**b): for each value of the next b bits, the code length in bits 0-3, the number of
        extra bits in 4-8, the shortest run of the class above.
    literal_windows
        (tables, 2**b): the literal in bits 0-7, the code length above.
    out
        Takes the symbols.
    """
    stream = int.from_bytes(words.tobytes(), "little")
    position = 0
    for group in np.flatnonzero(sizes).tolist():
        size = int(sizes[group])
        symbols: list[int] = []
        while len(symbols) < size:
            if position > n_bits:
                return -1
            entry = int(run_windows[tables[group], stream >> position & (run_windows.shape[1] - 1)])
            position += entry & 15
            n_extra = entry >> 4 & 31
            run = (entry >> 9) + (stream >> position & ((1 << n_extra) - 1))
            position += n_extra
            if len(symbols) + run > size:
                return -1
            symbols += [int(expected[group])] * run
            if len(symbols) < size:
                window = stream >> position & (literal_windows.shape[1] - 1)
                entry = int(literal_windows[tables[group], window])
                position += entry >> 8
                symbols.append(int(bases[group] - (entry & 255)) % modulus)
        out[groups == group] = symbols
    return position if position <= n_bits else -1


@op
def pack_symbols(symbols: NDArray[np.uint8], codes: NDArray[np.uint32]) -> tuple[NDArray[np.uint64], int]:
    """Return the codes of symbols as one bit stream, first bit least significant, and its length in bits.

    Parameters
    ----------
    symbols
        What to encode.
    codes
        256 entries: the code in bits 0-15, its length above.
    """
    stream = _BitWriter()
    for symbol in symbols.tolist():
        stream.put_code(int(codes[symbol]))
    return stream.words()


@op
def unpack_symbols(
    words: NDArray[np.uint64], n_bits: int, windows: NDArray[np.uint32], out: NDArray[np.uint8]
) -> int:
    """Decode symbols and return how many bits they took, or -1 for a bad stream.

    Parameters
    ----------
    words
        The stream, padded with two words of zeros at least.
    n_bits
        Length of the stream without padding.
    windows
        For each value of the next bits, the symbol in bits 0-7 and the code length, at least 1, above.
    out
        Takes the symbols.
    """
    stream: Any = int.from_bytes(words.tobytes(), "little")
    position = 0
    for i in range(out.size):
        if position > n_bits:
            return -1
        entry = int(windows[stream >> position & (windows.size - 1)])
        out[i] = entry & 255
        position += entry >> 8
    return position if position <= n_bits else -1
