"""Probability tables of the context rANS coder: scaled counts, table sharing, and the packed form.

The kernels at the end of the module are plain Python that numba compiles. Compile time shapes them: each
statement takes numba some milliseconds, a loop or an array some tens. So they allocate no arrays, write
results into arguments, and use look-ups instead of loops over bits. A loop bound or a guard proves every
index in range, because compiled code does not check indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from inshrink_core.ops.cpu.compiled import Float64s, Int64s, UInt8s, brief, part
from inshrink_core.ops.rans import BIT_LENGTHS, PRECISION

_SIZE = 1 << PRECISION

_MAX_JUMP = PRECISION + 1
"""Largest change of a bit length: from 0 to that of 4096."""

_LONGEST_ZEROS = 5
"""Number of leading zeros that no valid Golomb code of a change has."""

_JUMPS = np.array(
    [0, *(v // 2 if v % 2 else -(v // 2) for v in range(1, 1 << (_LONGEST_ZEROS + 1)))], np.int64
)
"""Change of bit length by Golomb code value, which is the change's position in zigzag order plus one."""

TABLE_BITS = 21
"""Maximum bits of a frequency: a Golomb code of a length change by 13 (9 bits) and 12 bits below the
highest."""

COST_BITS = 16
COSTS = np.zeros(_SIZE, np.int64)
COSTS[1:] = np.round((PRECISION - np.log2(np.arange(1, _SIZE))) * (1 << COST_BITS))
"""Code length of a symbol by frequency, in 1/65536 bit; integer sums do not depend on order. Entry 0 is for
frequency 4096."""


def _golomb_code(change: int) -> tuple[int, int]:
    """Return the exponential Golomb code of a change, first bit lowest, and its length in bits."""
    place = 2 * change + 1 if change >= 0 else -2 * change
    n_bits = 2 * place.bit_length() - 1
    return int(f"{place:0{n_bits}b}"[::-1], 2), n_bits


_CODES, _CODE_LENGTHS = np.array(
    [_golomb_code(change) for change in (*range(_MAX_JUMP + 1), *range(-_MAX_JUMP, 0))], np.int64
).T.copy()
"""Golomb codes of length changes, and their lengths; negative changes index from the end."""


class Tables(NamedTuple):
    """Result of `choose_tables`.

    Parameters
    ----------
    rows : int64, (contexts,)
        Table of each context.
    frequencies : int64, (tables, symbols)
        Each row sums to ``2**precision``.
    precision
        One of the given precisions.
    packed : uint8
        Bits of the table numbers of the contexts and of the tables, lowest first.
    n_bits
        Number of bits in `packed`.
    data_bits
        Size in bits of the symbols coded with these tables.
    """

    rows: Int64s
    frequencies: Int64s
    precision: int
    packed: UInt8s
    n_bits: int
    data_bits: float


def pool_contexts(counts: Int64s) -> tuple[Int64s, Int64s, float]:
    """Choose which contexts share a table; merge greedily while the size of tables plus data falls.

    Parameters
    ----------
    counts : (contexts, symbols)
        Number of occurrences of each symbol in each context.

    Returns
    -------
    rows : ndarray of int64, (contexts,)
        Table of each context, numbered without gaps; 0 for a context that does not occur.
    pooled : ndarray of int64, (tables, symbols)
        Number of occurrences of each symbol in the contexts of each table.
    bits : float
        Estimated bits of data and tables. O(contexts**2 · symbols).
    """
    n = len(counts)
    merged, pair_bits = counts.copy(), np.empty((n, n))
    rows, leaders, totals = np.empty((3, n), np.int64)
    n_tables, bits = pool_kernel(merged, totals, leaders, pair_bits, rows)
    return rows, merged[:n_tables], bits


def choose_tables(counts: Int64s, precisions: Sequence[int], *, apart: bool = False) -> Tables:
    """Choose the precision, and either pooled tables or a single table, that minimize data plus tables.

    Parameters
    ----------
    counts : (contexts, symbols)
        Number of occurrences of each symbol in each context; the total is positive and below 2**40.
    precisions
        Binary logarithms of the table sums to try; on a tie the first is chosen. At least one of them must
        leave a frequency for every symbol that occurs.
    apart
        Whether each context gets a separate table if not all share one; contexts are then not pooled.
    """
    n_contexts = counts.shape[0]
    rows, pooled = np.arange(n_contexts), np.ascontiguousarray(counts)
    if not apart and n_contexts > 1:
        rows, pooled, _ = pool_contexts(counts)
    candidates, best = [(rows, pooled)], None
    if len(pooled) > 1:
        candidates.append((np.zeros_like(rows), pooled.sum(0, keepdims=True)))
    n_used = np.count_nonzero(candidates[-1][1].any(0))
    for rows, pooled in candidates:
        for precision in precisions:
            if n_used <= 1 << precision:
                frequencies = np.empty_like(pooled)
                cost, n_bits = fit_kernel(pooled, precision, COSTS, frequencies)
                n_bits += n_contexts * (len(pooled) - 1).bit_length()
                size = cost + (n_bits << COST_BITS)
                if best is None or size < best[0]:
                    best = size, rows, frequencies, precision, cost, n_bits
    assert best is not None
    _, rows, frequencies, precision, cost, n_bits = best
    packed = np.zeros((n_bits + 7) // 8, np.uint8)
    write_kernel(rows, frequencies, precision, packed)
    return Tables(rows, frequencies, precision, packed, n_bits, cost / (1 << COST_BITS))


def read_tables(packed: UInt8s, shape: tuple[int, int, int], precision: int) -> tuple[Int64s, Int64s, int]:
    """Return the table numbers, the tables and the number of bits read, or -1 for invalid bits.

    Parameters
    ----------
    packed
        Bytes with the bits of `Tables`, lowest first; anything may follow.
    shape
        Numbers of contexts, tables and symbols.
    precision
        Binary logarithm of the sum of each table.
    """
    n_contexts, n_tables, n_symbols = shape
    rows, frequencies = np.zeros(n_contexts, np.int64), np.zeros((n_tables, n_symbols), np.int64)
    return rows, frequencies, int(read_kernel(packed, 8 * packed.size, precision, rows, frequencies))


@brief
def write_kernel(rows: Int64s, frequencies: Int64s, precision: int, packed: UInt8s) -> None:
    """Write table numbers and tables whose rows sum to ``2**precision`` to zeroed bytes.

    Each symbol takes two fields, until the sum is reached. The first is the change of the frequency's bit
    length from the previous symbol (from 0 for the first), in zigzag order (0, -1, 1, -2, ...) and coded in
    exponential Golomb bits of order 0. The second is the frequency without its highest bit, lowest bit first.
    """
    n_tables, n_symbols = frequencies.shape
    at, width = np.int64(0), BIT_LENGTHS[n_tables - 1]  # a literal would compile `put_bits` twice
    for c in range(rows.size):
        at = put_bits(packed, at, rows[c], width)
    for table in range(n_tables):
        left, before = 1 << precision, 0
        for s in range(n_symbols):
            if left == 0:
                break
            f = frequencies[table, s]
            length = BIT_LENGTHS[f]
            code, n_code = _CODES[length - before], _CODE_LENGTHS[length - before]
            # After the code comes the frequency without its highest bit, which is implied.
            below = BIT_LENGTHS[f >> 1]
            at = put_bits(packed, at, code | (f & ((1 << below) - 1)) << n_code, n_code + below)
            before = length
            left -= f


@part
def put_bits(packed: UInt8s, at: int, value: int, n_bits: int) -> int:
    """Write fewer than 32 bits, lowest first; return the position after them."""
    word = value << (at & 7)
    for k in range(((at & 7) + n_bits + 7) >> 3):
        packed[(at >> 3) + k] |= np.uint8((word >> (8 * k)) & 255)
    return at + n_bits


@part
def _bit(packed: UInt8s, at: int) -> np.int64:
    """Return a bit, or 0 beyond the last byte."""
    return (np.int64(packed[at >> 3]) >> (at & 7)) & 1 if at >> 3 < packed.size else np.int64(0)


@brief
def fit_kernel(counts: Int64s, precision: int, costs: Int64s, frequencies: Int64s) -> tuple[int, int]:
    """Fill in frequencies (`normalize_counts`); return the cost of the data and the bits of the tables.

    `costs` gives the cost by frequency in 1/65536 bit. Entry 0 means frequency 4096, which costs
    nothing.
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
        # log((f + 1) / f) equals 2 / (2 f + 1) up to a term in f**-3. So the largest count / (2 f + 1) marks
        # the symbol that gains most from one slot more, the least count / (2 f - 1) the one that loses least.
        side = 1 if left > 0 else -1
        for _ in range(left * side):
            # Starts as 0 / 1 or 1 / 0; any symbol is better.
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
                length = BIT_LENGTHS[f]
                n_bits += _CODE_LENGTHS[length - before] + BIT_LENGTHS[f >> 1]
                before = length
                left -= f
    return cost, n_bits


@brief
def pool_kernel(
    merged: Int64s, totals: Int64s, leaders: Int64s, bits: Float64s, rows: Int64s
) -> tuple[int, float]:
    """Merge the counts of contexts in place (`pool_contexts`); return the number and the bits of the tables.

    Fills in the row sums `totals`, the context that each context was merged into (-1 for one that does not
    occur), the bits of pairs, and the `rows`. A context leads if it is its own leader.
    """
    n_contexts, n_symbols = merged.shape
    for i in range(n_contexts):
        totals[i] = 0
        for s in range(n_symbols):
            totals[i] += merged[i, s]
        leaders[i] = i if totals[i] > 0 else -1
        for j in range(n_contexts):
            bits[i, j] = -1.0
    for _ in range(n_contexts):
        best_gain, best_i, best_j = 0.0, -1, -1
        # The diagonal comes first: the separate costs of two contexts are compared with their joint cost.
        for apart in range(n_contexts):
            two = 1 if apart > 0 else 0
            for i in range(n_contexts - apart):
                j = i + apart
                if leaders[i] != i or leaders[j] != j:
                    continue
                if bits[i, j] < 0:
                    total = totals[i] + two * totals[j]
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
                        length = BIT_LENGTHS[f]
                        sum_bits += _CODE_LENGTHS[length - before] + BIT_LENGTHS[f >> 1]
                        before = length
                        left -= count
                    bits[i, j] = sum_bits
                gain = two * (bits[i, i] + bits[j, j] - bits[i, j])
                if gain > best_gain:
                    best_gain, best_i, best_j = gain, i, j
        if best_i < 0:
            break
        totals[best_i] += totals[best_j]
        for s in range(n_symbols):
            merged[best_i, s] += merged[best_j, s]
        for c in range(n_contexts):
            if leaders[c] == best_j:
                leaders[c] = best_i
            bits[best_i, c] = -1.0
            bits[c, best_i] = -1.0
    n_tables, sum_bits = 0, 0.0
    for c in range(n_contexts):
        rows[c] = rows[leaders[c]] if leaders[c] >= 0 else 0
        if leaders[c] == c:
            sum_bits += bits[c, c]
            rows[c] = n_tables
            for s in range(n_symbols):
                merged[n_tables, s] = merged[c, s]
            n_tables += 1
    return n_tables, sum_bits


@brief
def read_kernel(packed: UInt8s, n_bits: int, precision: int, rows: Int64s, frequencies: Int64s) -> int:
    """Read table numbers and frequencies (`write_kernel`); return the number of bits read, or -1."""
    n_tables, n_symbols = frequencies.shape
    at, width = np.int64(0), BIT_LENGTHS[n_tables - 1]
    for c in range(rows.size):
        row = 0
        for k in range(width):
            row |= _bit(packed, at) << k
            at += 1
        rows[c] = row
        if row >= n_tables or at > n_bits:
            rows[c] = 0
            return -1
    for table in range(n_tables):
        left, length = 1 << precision, 0
        for s in range(n_symbols):
            frequencies[table, s] = 0
            if left > 0:
                zeros = 0
                while zeros < _LONGEST_ZEROS and _bit(packed, at) == 0:
                    zeros += 1
                    at += 1
                value = 0
                for _ in range(zeros + 1):
                    value = 2 * value + _bit(packed, at)
                    at += 1
                length += _JUMPS[value]
                if zeros == _LONGEST_ZEROS or length < 0 or length > precision + 1:
                    return -1
                f = (1 << length) >> 1
                for k in range(length - 1):
                    f |= _bit(packed, at) << k
                    at += 1
                left -= f
                if left < 0 or at > n_bits:
                    return -1
                frequencies[table, s] = f
        if left != 0:
            return -1
    return int(at)
