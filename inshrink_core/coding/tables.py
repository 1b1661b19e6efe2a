"""Probability tables of the context rANS coder: scaling counts, sharing tables, and their compact form.

The kernels at the end are plain Python that numba compiles. They make no arrays and call nothing but each
other, and look up what would be a loop over bits: each statement takes numba some milliseconds to compile, a
loop or an array of its own some tens. Results go where the caller says. Every index is proved in range by a
loop bound or a guard, because compiled code checks none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.cpu.compiled import brief
from inshrink_core.ops.rans import BIT_LENGTHS, PRECISION

_SIZE = 1 << PRECISION

_MAX_JUMP = PRECISION + 1
"""Largest change of a length: from none to that of 4096."""

_JUMP_BITS = np.array(
    [1 + 2 * abs(d).bit_length() for d in (*range(_MAX_JUMP + 1), *range(-_MAX_JUMP, 0))], np.int64
)
"""Bits of a change of length (`write_tables`); negative ones from the end."""

_LONGEST_ZEROS = 5
"""Zeros that no Golomb code of a change begins with."""

_JUMPS = np.array(
    [0, *(v // 2 if v % 2 else -(v // 2) for v in range(1, 1 << (_LONGEST_ZEROS + 1)))], np.int64
)
"""Change of length by what its Golomb code says, which is its place in zigzag order and one."""

_READ_AHEAD = 2 * _LONGEST_ZEROS + 1 + PRECISION
"""Bits that may be read past the end of a stream before that is noticed."""


TABLE_BITS = 21
"""Most bits of a frequency: a Golomb code of a change of length by 13 (9) and 12 below the highest."""

_COST_BITS = 16
_COSTS = np.zeros(_SIZE, np.int64)
_COSTS[1:] = np.round((PRECISION - np.log2(np.arange(1, _SIZE))) * (1 << _COST_BITS))
"""Bits of a symbol by its frequency, in 65536ths: sums are equal in any order; that of 4096 is at 0."""


def _golomb_code(change: int) -> tuple[int, int]:
    """Return the exponential Golomb bits of a change, the first bit lowest, and their number."""
    place = 2 * change + 1 if change >= 0 else -2 * change
    n_bits = 2 * place.bit_length() - 1
    return int(f"{place:0{n_bits}b}"[::-1], 2), n_bits


_CODES, _CODE_LENGTHS = np.array(
    [_golomb_code(change) for change in (*range(_MAX_JUMP + 1), *range(-_MAX_JUMP, 0))], np.int64
).T.copy()
"""Codes of changes of length and their lengths; those of negative changes from the end."""

_FIRST = np.arange(32) < np.arange(33)[:, None]
"""By number, which of 32 bits are the first ones."""


class Tables(NamedTuple):
    """What `choose_tables` chose.

    Parameters
    ----------
    rows : int64, (contexts,)
        Table of each context.
    frequencies : int64, (tables, symbols)
        Each row sums to ``2**precision``.
    precision
        One of those given.
    bits : uint8
        Table numbers of the contexts and the tables, one bit a byte.
    data_bits
        Bits of the symbols with these tables.
    """

    rows: NDArray[np.int64]
    frequencies: NDArray[np.int64]
    precision: int
    bits: NDArray[np.uint8]
    data_bits: float


def normalize_counts(counts: NDArray[np.int64], precision: int) -> NDArray[np.int64]:
    """Scale each row of counts to sum to ``2**precision``, in integers only.

    A positive count keeps a positive frequency. What rounding down leaves over goes, one by one, where
    the count per frequency is largest, the lower symbol first.

    Parameters
    ----------
    counts : (rows, symbols)
        Below 2**50; at most ``2**precision`` of a row positive.
    precision
        1 to 12.

    Returns
    -------
    ndarray of int64, (rows, symbols)
        A row without counts gives everything to symbol 0. O(symbols**2) a row.

    Examples
    --------
    >>> normalize_counts(np.array([[2, 1, 0, 1]]), 12).tolist()
    [[2048, 1024, 0, 1024]]
    """
    frequencies = np.empty(counts.shape, np.int64)
    fit_kernel(counts, precision, _COSTS, frequencies)
    return frequencies


def pool_contexts(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], float]:
    """Choose which contexts share a table, merging greedily while tables and data together get smaller.

    Parameters
    ----------
    counts : (contexts, symbols)
        How often each symbol occurs in each context.

    Returns
    -------
    rows : ndarray of int64, (contexts,)
        Table of each context, numbered without gaps; 0 for a context that does not occur.
    bits : float
        Estimated bits of data and tables. O(contexts**2 · symbols).
    """
    n, n_symbols = counts.shape
    merged = np.empty((n, n_symbols + 1), np.int64)
    merged[:, :n_symbols] = counts
    counts.sum(1, out=merged[:, n_symbols])
    leaders = np.where(merged[:, n_symbols] > 0, np.arange(n), -1)
    pair_bits = np.full((n, n), -1.0)
    pool_kernel(merged, leaders, pair_bits)
    leads = leaders == np.arange(n)
    rows = np.where(leaders >= 0, (np.cumsum(leads) - 1)[leaders], 0)
    # One by one: numpy's sum of eight and more numbers takes another order.
    return rows, sum(pair_bits.diagonal()[leads].tolist(), start=0.0)


def choose_tables(counts: NDArray[np.int64], rows: NDArray[np.int64], precisions: tuple[int, ...]) -> Tables:
    """Choose the precision, and the given pooling or one table for all, of least data and tables.

    Parameters
    ----------
    counts : (contexts, symbols)
        How often each symbol occurs in each context, below 2**40 together.
    rows : (contexts,)
        Table of each context, of `pool_contexts`.
    precisions
        Logarithms of the sums to try; the first of equal ones is taken. At least one of them leaves
        every symbol that occurs a frequency.
    """
    n_used = int(np.count_nonzero(counts.any(0)))
    poolings = [rows, np.zeros_like(rows)] if rows.any() else [rows]
    best: tuple[int, int, NDArray[np.int64], NDArray[np.int64], int] | None = None
    for pooling in poolings:
        n_tables = int(pooling.max()) + 1
        members = pooling == np.arange(n_tables)[:, None]
        pooled = members.astype(np.int64) @ counts
        number_bits = rows.size * (n_tables - 1).bit_length()
        for precision in precisions:
            if n_used > 1 << precision:
                continue
            frequencies = np.empty(pooled.shape, np.int64)
            cost, n_bits = fit_kernel(pooled, precision, _COSTS, frequencies)
            size = int(cost) + ((number_bits + int(n_bits)) << _COST_BITS)
            if best is None or size < best[0]:
                best = size, precision, pooling, frequencies, int(cost)
    if best is None:
        raise ValueError("no precision leaves every symbol a frequency")
    _, precision, chosen, frequencies, cost = best
    width = (frequencies.shape[0] - 1).bit_length()
    numbers = (chosen[:, None] >> np.arange(width) & 1).astype(np.uint8).ravel()
    bits = np.concatenate((numbers, write_tables(frequencies, precision)))
    return Tables(chosen, frequencies, precision, bits, cost / (1 << _COST_BITS))


def write_tables(frequencies: NDArray[np.int64], precision: int) -> NDArray[np.uint8]:
    """Return the bits, one a byte, of tables whose rows sum to ``2**precision``.

    For each symbol until the sum is reached: the change of the bit length of the frequency from that
    of the symbol before (0 before the first), in zigzag order (0, -1, 1, -2, ...) and coded in
    exponential Golomb bits of order 0; then the bits of the frequency below its highest, lowest first.
    """
    written = np.cumsum(frequencies, axis=1) - frequencies < 1 << precision
    lengths = BIT_LENGTHS[frequencies]
    changes = lengths.copy()
    changes[:, 1:] -= lengths[:, :-1]
    places = changes[written]
    n_code = _CODE_LENGTHS[places]
    n_bits = n_code + BIT_LENGTHS[frequencies[written] >> 1]
    # What follows the code is the frequency below its highest bit, which is the last one taken.
    codes = _CODES[places] | frequencies[written] << n_code
    # As bytes: a code and a frequency are fewer than 32 bits, the first of them lowest.
    spread = np.unpackbits(codes.astype("<u4").view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    bits: NDArray[np.uint8] = spread[_FIRST[n_bits]]
    return bits


def read_tables(
    packed: NDArray[np.uint8], n_bits: int, shape: tuple[int, int, int], precision: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return table numbers and tables that bits begin with, and how many bits they took, or -1 if none.

    Parameters
    ----------
    packed
        Bytes of the bits of `Tables`, lowest first, with anything after them.
    n_bits
        How many bits there are.
    shape
        Numbers of contexts, of tables and of symbols.
    precision
        Logarithm of the tables' sums.
    """
    n_contexts, n_tables, n_symbols = shape
    width = (n_tables - 1).bit_length()
    frequencies = np.empty((n_tables, n_symbols), np.int64)
    at = n_contexts * width
    # A table has a bit at least. Of no bytes at all, numpy would make bits that are neither 0 nor 1.
    if at >= n_bits:
        return np.zeros(n_contexts, np.int64), frequencies, -1
    bits = np.unpackbits(packed, count=8 * packed.size + _READ_AHEAD, bitorder="little")
    rows: NDArray[np.int64] = bits[:at].reshape(n_contexts, width) @ (1 << np.arange(width))
    if int(rows.max()) >= n_tables:
        return rows, frequencies, -1
    return rows, frequencies, int(read_kernel(bits, n_bits, precision, frequencies, at))


@brief
def fit_kernel(
    counts: NDArray[np.int64],
    precision: int,
    costs: NDArray[np.int64],
    frequencies: NDArray[np.int64],
) -> tuple[int, int]:
    """Fill frequencies (`normalize_counts`); return the cost of the data and the tables' bits.

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
                length = BIT_LENGTHS[f]
                n_bits += _JUMP_BITS[length - before] + BIT_LENGTHS[f >> 1]
                before = length
                left -= f
    return cost, n_bits


@brief
def pool_kernel(merged: NDArray[np.int64], leaders: NDArray[np.int64], bits: NDArray[np.float64]) -> None:
    """Merge contexts in place (`pool_contexts`).

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
                        length = BIT_LENGTHS[f]
                        sum_bits += _JUMP_BITS[length - before] + BIT_LENGTHS[f >> 1]
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


@brief
def read_kernel(
    bits: NDArray[np.uint8], n_bits: int, precision: int, frequencies: NDArray[np.int64], at: int
) -> int:
    """Read frequencies from a place on (`read_tables`); return the place after, or -1.

    One bit a number, and `_READ_AHEAD` zeros after the last.
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
