"""Probability tables of the context rANS coder: scaling counts, sharing tables, and their compact form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.ops.rans import PRECISION
from inshrink_core.ops.reference.rans_tables import LENGTHS, MAX_JUMP, READ_AHEAD
from inshrink_core.ops.registry import dispatch

__all__ = [
    "TABLE_BITS",
    "Tables",
    "choose_tables",
    "normalize_counts",
    "pool_contexts",
    "read_tables",
    "write_tables",
]

_HOST = torch.device("cpu")

TABLE_BITS = 21
"""Most bits of a frequency: a Golomb code of a change of length by 13 (9) and 12 below the highest."""

_COST_BITS = 16
_SIZE = 1 << PRECISION
_COSTS = np.zeros(_SIZE, np.int64)
_COSTS[1:] = np.round((PRECISION - np.log2(np.arange(1, _SIZE))) * (1 << _COST_BITS))
"""Bits of a symbol by its frequency, in 65536ths, so that sums are equal in any order; 4096 stands at 0."""


def _golomb_code(change: int) -> tuple[int, int]:
    """Return the exponential Golomb bits of a change, the first bit lowest, and their number."""
    place = 2 * change + 1 if change >= 0 else -2 * change
    n_bits = 2 * place.bit_length() - 1
    return int(f"{place:0{n_bits}b}"[::-1], 2), n_bits


_CODES, _CODE_LENGTHS = np.array(
    [_golomb_code(change) for change in (*range(MAX_JUMP + 1), *range(-MAX_JUMP, 0))], np.int64
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
    return _fit(counts, precision)[0]


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
    sums = merged[:, n_symbols].tolist()
    leaders = np.array([i if total else -1 for i, total in enumerate(sums)], np.int64)
    pair_bits = np.full((n, n), -1.0)
    dispatch("pool_contexts", _HOST)(merged, leaders, pair_bits)
    led = leaders.tolist()
    number_of = {leader: number for number, leader in enumerate(i for i in range(n) if led[i] == i)}
    rows = np.array([number_of.get(leader, 0) for leader in led], np.int64)
    # One by one: numpy's sum of eight and more numbers takes another order.
    return rows, sum((float(pair_bits[i, i]) for i in number_of), start=0.0)


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
            frequencies, cost, n_bits = _fit(pooled, precision)
            size = cost + ((number_bits + n_bits) << _COST_BITS)
            if best is None or size < best[0]:
                best = size, precision, pooling, frequencies, cost
    if best is None:
        raise ValueError("no precision leaves every symbol a frequency")
    _, precision, chosen, frequencies, cost = best
    width = (frequencies.shape[0] - 1).bit_length()
    numbers = (chosen[:, None] >> np.arange(width) & 1).astype(np.uint8).ravel()
    bits = np.concatenate((numbers, write_tables(frequencies, precision)))
    return Tables(chosen, frequencies, precision, bits, cost / (1 << _COST_BITS))


def _fit(counts: NDArray[np.int64], precision: int) -> tuple[NDArray[np.int64], int, int]:
    """Return frequencies, the cost of the data under them in 65536ths of a bit, and their own bits."""
    frequencies = np.empty(counts.shape, np.int64)
    cost, n_bits = dispatch("fit_tables", _HOST)(counts, precision, _COSTS, frequencies)
    return frequencies, int(cost), int(n_bits)


def write_tables(frequencies: NDArray[np.int64], precision: int) -> NDArray[np.uint8]:
    """Return the bits, one a byte, of tables whose rows sum to ``2**precision``.

    For each symbol until the sum is reached: the change of the bit length of the frequency against that
    of the symbol before (0 before the first), in zigzag order (0, -1, 1, -2, ...) and coded in
    exponential Golomb bits of order 0; then the bits of the frequency below its highest, lowest first.
    """
    written = np.cumsum(frequencies, axis=1) - frequencies < 1 << precision
    lengths = LENGTHS[frequencies]
    changes = lengths.copy()
    changes[:, 1:] -= lengths[:, :-1]
    places = changes[written]
    n_code = _CODE_LENGTHS[places]
    n_bits = n_code + LENGTHS[frequencies[written] >> 1]
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
    bits = np.unpackbits(packed, count=8 * packed.size + READ_AHEAD, bitorder="little")
    rows: NDArray[np.int64] = bits[:at].reshape(n_contexts, width) @ (1 << np.arange(width))
    if int(rows.max()) >= n_tables:
        return rows, frequencies, -1
    return rows, frequencies, int(dispatch("read_tables", _HOST)(bits, n_bits, precision, frequencies, at))
