"""Probability tables of the context rANS coder in plain Python: the norm, which numba also compiles.

The functions call no others, because compiled code cannot call plain Python; every index is proved in
range by a loop bound or a guard, because compiled code checks none.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__: list[str] = []


@register("normalize_counts", Backend.REFERENCE)
def normalize_counts(counts: NDArray[np.int64], precision: int) -> NDArray[np.int64]:
    """See `inshrink_core.ops.rans_tables.normalize_counts`."""
    n_rows, n_symbols = counts.shape
    size = 1 << precision
    frequencies = np.zeros((n_rows, n_symbols), np.int64)
    for row in range(n_rows):
        total = np.int64(0)
        for s in range(n_symbols):
            total += counts[row, s]
        if total == 0:
            frequencies[row, 0] = size
            continue
        left = size
        for s in range(n_symbols):
            if counts[row, s] > 0:
                frequencies[row, s] = max(counts[row, s] * size // total, 1)
                left -= frequencies[row, s]
        # log((f + 1) / f) is 2 / (2 f + 1) up to a term in f**-3: comparing count / (2 f + 1) finds the
        # symbol whose bits fall most by one more, comparing count / (2 f - 1) whose rise least by one less.
        while left != 0:
            best = -1
            side = 1 if left > 0 else -1
            for s in range(n_symbols):
                f = frequencies[row, s]
                if f == 0 or (side < 0 and f == 1):
                    continue
                if best < 0:
                    best = s
                    continue
                this = counts[row, s] * (2 * frequencies[row, best] + side)
                other = counts[row, best] * (2 * f + side)
                if (side > 0 and this > other) or (side < 0 and this < other):
                    best = s
            if best < 0:
                break
            frequencies[row, best] += side
            left -= side
    return frequencies


@register("pool_contexts", Backend.REFERENCE)
def pool_contexts(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_], float]:
    """See `inshrink_core.ops.rans_tables.pool_contexts`; the rows are numbers of contexts here."""
    n_contexts, n_symbols = counts.shape
    merged = counts.copy()
    leaders = np.arange(n_contexts)
    occurs = np.zeros(n_contexts, np.bool_)
    for c in range(n_contexts):
        for s in range(n_symbols):
            occurs[c] |= counts[c, s] > 0
    alive = occurs.copy()
    stale = np.ones((n_contexts, n_contexts), np.bool_)
    bits = np.zeros((n_contexts, n_contexts), np.float64)
    while True:
        best_gain, best_i, best_j = 0.0, -1, -1
        # The diagonal first: what two contexts take alone is compared with what they take together.
        for apart in range(n_contexts):
            for i in range(n_contexts - apart):
                j = i + apart
                if not alive[i] or not alive[j]:
                    continue
                if stale[i, j]:
                    stale[i, j] = False
                    total = np.int64(0)
                    for s in range(n_symbols):
                        total += merged[i, s] + (merged[j, s] if j > i else 0)
                    log_total = math.log2(total)
                    seen = np.int64(0)
                    before = 0
                    sum_bits = 0.0
                    for s in range(n_symbols):
                        if seen == total:
                            break
                        count = merged[i, s] + (merged[j, s] if j > i else 0)
                        length = 0
                        if count > 0:
                            sum_bits += count * (log_total - math.log2(count))
                            f = max(count * 4096 // total, 1)
                            while (f >> length) > 0:
                                length += 1
                            sum_bits += length - 1
                        # A change by d takes 1 bit and 2 for each bit of |d|: see write_tables.
                        jump = abs(length - before)
                        before = length
                        sum_bits += 1
                        while jump > 0:
                            sum_bits += 2
                            jump >>= 1
                        seen += count
                    bits[i, j] = sum_bits
                gain = bits[i, i] + bits[j, j] - bits[i, j]
                if j > i and gain > best_gain:
                    best_gain, best_i, best_j = gain, i, j
        if best_i < 0:
            break
        alive[best_j] = False
        for s in range(n_symbols):
            merged[best_i, s] += merged[best_j, s]
        for c in range(n_contexts):
            if leaders[c] == best_j:
                leaders[c] = best_i
            stale[best_i, c] = True
            stale[c, best_i] = True
    total_bits = 0.0
    for c in range(n_contexts):
        if alive[c]:
            total_bits += bits[c, c]
    return leaders, occurs, total_bits


@register("write_tables", Backend.REFERENCE)
def write_tables(frequencies: NDArray[np.int64], precision: int) -> NDArray[np.uint8]:
    """See `inshrink_core.ops.rans_tables.write_tables`."""
    n_tables, n_symbols = frequencies.shape
    # A change of length is at most 27 in zigzag order, 9 Golomb bits; a frequency has 12 more.
    bits = np.zeros(n_tables * n_symbols * 21, np.uint8)
    at = 0
    for table in range(n_tables):
        left = 1 << precision
        before = 0
        for s in range(n_symbols):
            if left <= 0:
                break
            f = frequencies[table, s]
            length = 0
            while (f >> length) > 0:
                length += 1
            change = length - before
            zigzag = 2 * change if change >= 0 else -2 * change - 1
            before = length
            golomb = 0
            while ((zigzag + 1) >> golomb) > 1:
                golomb += 1
            at += golomb
            for k in range(golomb, -1, -1):
                bits[at] = ((zigzag + 1) >> k) & 1
                at += 1
            for k in range(length - 1):
                bits[at] = (f >> k) & 1
                at += 1
            left -= f
    return bits[:at]


@register("read_tables", Backend.REFERENCE)
def read_tables(
    bits: NDArray[np.uint8], n_tables: int, n_symbols: int, precision: int
) -> tuple[NDArray[np.int64], int]:
    """See `inshrink_core.ops.rans_tables.read_tables`."""
    frequencies = np.zeros((n_tables, n_symbols), np.int64)
    at = 0
    for table in range(n_tables):
        left = 1 << precision
        length = 0
        for s in range(n_symbols):
            if left == 0:
                break
            golomb = 0
            while golomb < 5 and at < bits.size and bits[at] == 0:
                golomb += 1
                at += 1
            if golomb == 5 or at + golomb + 1 > bits.size:
                return frequencies, -1
            value = 0
            for _ in range(golomb + 1):
                value = 2 * value + int(bits[at])
                at += 1
            zigzag = value - 1
            length += zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2
            if length < 0 or length > precision + 1 or at + length > bits.size + 1:
                return frequencies, -1
            if length == 0:
                continue
            f = 1 << (length - 1)
            for k in range(length - 1):
                f |= int(bits[at]) << k
                at += 1
            if f > left:
                return frequencies, -1
            frequencies[table, s] = f
            left -= f
        if left != 0:
            return frequencies, -1
    return frequencies, at
