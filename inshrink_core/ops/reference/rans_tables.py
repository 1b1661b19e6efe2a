"""Probability tables of the context rANS coder in plain Python: the norm, which numba also compiles.

The functions make no arrays and call nothing but each other, and look up what would be a loop over bits:
each statement takes numba some milliseconds to compile, a loop or an array of its own some tens. Results
go where the caller says. Every index is proved in range by a loop bound or a guard, because compiled code
checks none.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.rans import PRECISION
from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

__all__ = ["LENGTHS", "MAX_JUMP", "READ_AHEAD", "fit_tables", "pool_contexts", "read_tables"]

_SIZE = 1 << PRECISION

LENGTHS = np.array([f.bit_length() for f in range(_SIZE + 1)], np.int64)
"""Bit length of each frequency."""

MAX_JUMP = PRECISION + 1
"""Largest change of a length: from none to that of 4096."""

_JUMP_BITS = np.array(
    [1 + 2 * abs(d).bit_length() for d in (*range(MAX_JUMP + 1), *range(-MAX_JUMP, 0))], np.int64
)
"""Bits of a change of length (`inshrink_core.ops.rans_tables.write_tables`); negative ones from the end."""

_LONGEST_ZEROS = 5
"""Zeros that no Golomb code of a change begins with."""

_JUMPS = np.array(
    [0, *(v // 2 if v % 2 else -(v // 2) for v in range(1, 1 << (_LONGEST_ZEROS + 1)))], np.int64
)
"""Change of length by what its Golomb code says, which is its place in zigzag order and one."""

READ_AHEAD = 2 * _LONGEST_ZEROS + 1 + PRECISION
"""Bits that may be read past the end of a stream before that is noticed."""


@register("fit_tables", Backend.REFERENCE)
def fit_tables(
    counts: NDArray[np.int64],
    precision: int,
    costs: NDArray[np.int64],
    frequencies: NDArray[np.int64],
) -> tuple[int, int]:
    """See `inshrink_core.ops.rans_tables.normalize_counts`; return the cost of the data and the tables' bits.

    `costs` is by frequency in 4096ths; its first entry stands for 4096, whose symbols take no bits.
    """
    n_rows, n_symbols = counts.shape
    size, cost, n_bits = 1 << precision, 0, 0
    for row in range(n_rows):
        total = 0
        for s in range(n_symbols):
            total += counts[row, s]
        left = size
        for s in range(n_symbols):
            f = counts[row, s] * size // total if total > 0 else 0
            frequencies[row, s] = (f if f > 1 else 1) if counts[row, s] > 0 else 0
            left -= frequencies[row, s]
        if total == 0:
            frequencies[row, 0], left = size, 0
        # log((f + 1) / f) is 2 / (2 f + 1) up to a term in f**-3: comparing count / (2 f + 1) finds the
        # symbol whose bits fall most by one more, comparing count / (2 f - 1) whose rise least by one less.
        side = 1 if left > 0 else -1
        for _ in range(left * side):
            # Begins as 0 / 1 or 1 / 0, which any symbol is better than.
            best, best_count, best_size = -1, (1 - side) // 2, (1 + side) // 2
            for s in range(n_symbols):
                twice = 2 * frequencies[row, s] + side
                if twice > 1 and side * (counts[row, s] * best_size - best_count * twice) > 0:
                    best, best_count, best_size = s, counts[row, s], twice
            if best >= 0:
                frequencies[row, best] += side
        before, left = 0, size
        for s in range(n_symbols):
            f = frequencies[row, s]
            cost += counts[row, s] * costs[(f << (PRECISION - precision)) & (_SIZE - 1)]
            if left > 0:
                length = LENGTHS[f]
                n_bits += _JUMP_BITS[length - before] + LENGTHS[f >> 1]
                before = length
                left -= f
    return cost, n_bits


@register("pool_contexts", Backend.REFERENCE)
def pool_contexts(merged: NDArray[np.int64], leaders: NDArray[np.int64], bits: NDArray[np.float64]) -> None:
    """See `inshrink_core.ops.rans_tables.pool_contexts`.

    `merged` begins as the counts with their sums in a last column, `leaders` as the numbers of the contexts
    or -1 where one does not occur, `bits` of pairs as -1. A context leads where it is its own leader.
    """
    n_contexts, n_columns = merged.shape
    n_symbols = n_columns - 1
    for _ in range(n_contexts):
        best_gain, best_i, best_j = 0.0, -1, -1
        # The diagonal first: what two contexts take alone is compared with what they take together.
        for apart in range(n_contexts):
            two = 1 if apart > 0 else 0
            for i in range(n_contexts - apart):
                j = i + apart
                if leaders[i] != i or leaders[j] != j:
                    continue
                if bits[i, j] < 0:
                    total = merged[i, n_symbols] + two * merged[j, n_symbols]
                    log_total = math.log2(total)
                    left, before, sum_bits = total, 0, 0.0
                    for s in range(n_symbols):
                        if left == 0:
                            break
                        count = merged[i, s] + two * merged[j, s]
                        f = 0
                        if count > 0:
                            sum_bits += count * (log_total - math.log2(count))
                            f = count * _SIZE // total
                            f = f if f > 1 else 1
                        length = LENGTHS[f]
                        sum_bits += _JUMP_BITS[length - before] + LENGTHS[f >> 1]
                        before = length
                        left -= count
                    bits[i, j] = sum_bits
                gain = two * (bits[i, i] + bits[j, j] - bits[i, j])
                if gain > best_gain:
                    best_gain, best_i, best_j = gain, i, j
        if best_i < 0:
            break
        for s in range(n_symbols + 1):
            merged[best_i, s] += merged[best_j, s]
        for c in range(n_contexts):
            if leaders[c] == best_j:
                leaders[c] = best_i
            bits[best_i, c] = -1.0
            bits[c, best_i] = -1.0


@register("read_tables", Backend.REFERENCE)
def read_tables(
    bits: NDArray[np.uint8], n_bits: int, precision: int, frequencies: NDArray[np.int64], at: int
) -> int:
    """See `inshrink_core.ops.rans_tables.read_tables`; from a place on, returning the place after, or -1.

    One bit a number, and `READ_AHEAD` zeros after the last.
    """
    n_tables, n_symbols = frequencies.shape
    for table in range(n_tables):
        left, length = 1 << precision, 0
        for s in range(n_symbols):
            frequencies[table, s] = 0
            if left > 0:
                zeros = 0
                while zeros < _LONGEST_ZEROS and bits[at] == 0:
                    zeros += 1
                    at += 1
                value = 0
                for _ in range(zeros + 1):
                    value = 2 * value + int(bits[at])
                    at += 1
                length += _JUMPS[value]
                if zeros == _LONGEST_ZEROS or length < 0 or length > precision + 1:
                    return -1
                f = (1 << length) >> 1
                for k in range(length - 1):
                    f |= int(bits[at]) << k
                    at += 1
                left -= f
                if left < 0 or at > n_bits:
                    return -1
                frequencies[table, s] = f
        if left != 0:
            return -1
    return at
