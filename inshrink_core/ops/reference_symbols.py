"""Entropy coding of symbols, restated plainly: the norm that the kernels must agree with.

A bit stream is one long integer here, its first bit the least significant one. Slow on purpose: what
is stated in the obvious way can be read against ``docs/format.md`` line by line.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

_HOLE = (1 << 64) - 1
_NO_LITERAL = 256


@register("code_lengths", Backend.REFERENCE)
def code_lengths(counts: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """See `inshrink_core.ops.symbols.code_lengths`."""
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


@register("count_groups", Backend.REFERENCE)
def count_groups(groups: NDArray[np.uint8]) -> NDArray[np.int64]:
    """See `inshrink_core.ops.symbols.count_groups`."""
    return np.bincount(groups, minlength=256).astype(np.int64)


@register("count_pairs", Backend.REFERENCE)
def count_pairs(groups: NDArray[np.uint8], symbols: NDArray[np.uint8], stride: int) -> NDArray[np.int64]:
    """See `inshrink_core.ops.symbols.count_pairs`."""
    pairs = groups[::stride].astype(np.int64) * 256 + symbols[::stride]
    return np.bincount(pairs, minlength=65536).reshape(256, 256).astype(np.int64)


def run_token(run: int) -> int:
    """Class of a run length: exact below 16, then four classes an octave."""
    if run < 16:
        return run
    exponent = run.bit_length() - 1
    return 16 + (exponent - 4) * 4 + (run >> (exponent - 2) & 3)


def run_extra_bits(token: int) -> int:
    """Bits that follow a run token and tell which run of its class it is."""
    return 0 if token < 16 else (token - 16) // 4 + 2


@register("delta_events", Backend.REFERENCE)
def delta_events(
    groups: NDArray[np.uint8],
    symbols: NDArray[np.uint8],
    bases: NDArray[np.int64],
    expected: NDArray[np.int64],
    modulus: int,
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """See `inshrink_core.ops.symbols.delta_events`."""
    run_counts = np.zeros((256, 96), np.int64)
    literal_counts = np.zeros((256, 256), np.int64)
    records: list[int] = [_HOLE] * 256
    slot = list(range(256))
    run = [0] * 256
    for group, symbol in zip(groups.tolist(), symbols.tolist(), strict=True):
        if symbol == expected[group]:
            run[group] += 1
            continue
        literal = int(bases[group] - symbol) % modulus
        token = run_token(run[group])
        run_counts[group, token] += 1
        literal_counts[group, literal] += 1
        records[slot[group]] = run[group] | token << 24 | literal << 32 | group << 48
        run[group] = 0
        slot[group] = len(records)
        records.append(_HOLE)
    for group in range(256):
        if run[group]:
            token = run_token(run[group])
            run_counts[group, token] += 1
            records[slot[group]] = run[group] | token << 24 | _NO_LITERAL << 32 | group << 48
    return np.array(records, np.uint64), run_counts, literal_counts


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

    def words(self) -> tuple[NDArray[np.uint32], int]:
        n_words = self.n_bits // 32 + 1
        return np.frombuffer(self.value.to_bytes(4 * n_words, "little"), np.uint32), self.n_bits


@register("pack_events", Backend.REFERENCE)
def pack_events(
    records: NDArray[np.uint64],
    tables: NDArray[np.int64],
    run_codes: NDArray[np.uint32],
    literal_codes: NDArray[np.uint32],
) -> tuple[NDArray[np.uint32], int]:
    """See `inshrink_core.ops.symbols.pack_events`."""
    stream = _BitWriter()
    for record in records.tolist():
        if record == _HOLE:
            continue
        run, token, literal = record & 0xFFFFFF, record >> 24 & 0xFF, record >> 32 & 0xFFFF
        table = tables[record >> 48]
        stream.put_code(int(run_codes[table, token]))
        n_extra = run_extra_bits(token)
        stream.put(run & ((1 << n_extra) - 1), n_extra)
        if literal != _NO_LITERAL:
            stream.put_code(int(literal_codes[table, literal]))
    return stream.words()


@register("unpack_events", Backend.REFERENCE)
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
    """See `inshrink_core.ops.symbols.unpack_events`."""
    stream = int.from_bytes(words.tobytes(), "little")
    position = 0
    left = sizes.tolist()
    run = [0] * 256
    pending = [0] * 256

    def fetch(group: int) -> bool:
        nonlocal position
        if not left[group]:
            return True
        if position > n_bits:
            return False
        entry = int(run_windows[tables[group], stream >> position & (run_windows.shape[1] - 1)])
        position += entry & 15
        n_extra = entry >> 4 & 31
        length = (entry >> 9) + (stream >> position & ((1 << n_extra) - 1))
        position += n_extra
        if length > left[group]:
            return False
        run[group] = length
        left[group] -= length
        if not left[group]:
            return True
        entry = int(literal_windows[tables[group], stream >> position & (literal_windows.shape[1] - 1)])
        position += entry >> 8
        pending[group] = int(bases[group] - (entry & 255)) % modulus
        left[group] -= 1
        return True

    if not all(fetch(group) for group in range(256)):
        return -1
    for i, group in enumerate(groups.tolist()):
        if run[group]:
            run[group] -= 1
            out[i] = expected[group]
            continue
        out[i] = pending[group]
        if not fetch(group):
            return -1
    return position


@register("pack_symbols", Backend.REFERENCE)
def pack_symbols(symbols: NDArray[np.uint8], codes: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], int]:
    """See `inshrink_core.ops.symbols.pack_symbols`."""
    stream = _BitWriter()
    for symbol in symbols.tolist():
        stream.put_code(int(codes[symbol]))
    return stream.words()


@register("unpack_symbols", Backend.REFERENCE)
def unpack_symbols(
    words: NDArray[np.uint64], n_bits: int, windows: NDArray[np.uint32], out: NDArray[np.uint8]
) -> int:
    """See `inshrink_core.ops.symbols.unpack_symbols`."""
    stream: Any = int.from_bytes(words.tobytes(), "little")
    position = 0
    for i in range(out.size):
        if position > n_bits:
            return -1
        entry = int(windows[stream >> position & (windows.size - 1)])
        out[i] = entry & 255
        position += entry >> 8
    return position
