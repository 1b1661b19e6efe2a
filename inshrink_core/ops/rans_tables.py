"""Probability tables of the context rANS coder: scaling counts, sharing tables, and their compact form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.ops.rans import PRECISION
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
    dispatch("normalize_counts", _HOST)(counts, counts.shape[0], precision, frequencies)
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
    n = counts.shape[0]
    leaders, alive = np.empty(n, np.int64), np.empty(n, np.bool_)
    stale, pair_bits = np.empty((n, n), np.bool_), np.empty((n, n), np.float64)
    bits = float(dispatch("pool_contexts", _HOST)(counts.copy(), leaders, alive, stale, pair_bits))
    number_of = np.cumsum(alive) - 1
    rows: NDArray[np.int64] = np.where(leaders < 0, 0, number_of[leaders])
    return rows, bits


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
    n_contexts, n_symbols = counts.shape
    n_tables = int(rows.max()) + 1
    rows, tried = rows.copy(), np.array(precisions, np.int64)
    pooled, frequencies = (np.empty((n_tables, n_symbols), np.int64) for _ in range(2))
    bits = np.empty(n_contexts * n_tables.bit_length() + n_tables * n_symbols * TABLE_BITS, np.uint8)
    choose = dispatch("choose_tables", _HOST)
    n_tables, precision, n_bits, cost = choose(counts, rows, tried, _COSTS, pooled, frequencies, bits)
    data_bits = int(cost) / (1 << _COST_BITS)
    return Tables(rows, frequencies[:n_tables], int(precision), bits[:n_bits], data_bits)


def write_tables(frequencies: NDArray[np.int64], precision: int) -> NDArray[np.uint8]:
    """Return the bits, one a byte, of tables whose rows sum to ``2**precision``.

    For each symbol until the sum is reached: the change of the bit length of the frequency against that
    of the symbol before (0 before the first), in zigzag order (0, -1, 1, -2, ...) and coded in
    exponential Golomb bits of order 0; then the bits of the frequency below its highest, lowest first.
    """
    bits = np.empty(frequencies.size * TABLE_BITS, np.uint8)
    n_bits = dispatch("write_tables", _HOST)(frequencies, frequencies.shape[0], precision, bits, 0)
    return bits[:n_bits]


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
    rows, frequencies = np.empty(n_contexts, np.int64), np.empty((n_tables, n_symbols), np.int64)
    width = (n_tables - 1).bit_length()
    taken = dispatch("read_tables", _HOST)(packed, n_bits, precision, rows, width, frequencies)
    return rows, frequencies, int(taken)
