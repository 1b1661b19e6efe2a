"""Probability tables of the context rANS coder: scaling counts, sharing tables, and their compact form."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inshrink_core.ops.registry import dispatch

__all__ = ["normalize_counts", "pool_contexts", "read_tables", "write_tables"]

_HOST = torch.device("cpu")


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
    frequencies: NDArray[np.int64] = dispatch("normalize_counts", _HOST)(counts, precision)
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
    result: Any = dispatch("pool_contexts", _HOST)(counts)
    leaders, occurs, bits = result
    order = np.unique(leaders[occurs])
    rows = np.where(occurs, np.searchsorted(order, leaders), 0)
    return rows.astype(np.int64), float(bits)


def write_tables(frequencies: NDArray[np.int64], precision: int) -> NDArray[np.uint8]:
    """Return the bits, one a byte, of tables whose rows sum to ``2**precision``.

    For each symbol until the sum is reached: the change of the bit length of the frequency against that
    of the symbol before (0 before the first), in zigzag order (0, -1, 1, -2, ...) and coded in
    exponential Golomb bits of order 0; then the bits of the frequency below its highest, lowest first.
    """
    bits: NDArray[np.uint8] = dispatch("write_tables", _HOST)(frequencies, precision)
    return bits


def read_tables(
    bits: NDArray[np.uint8], n_tables: int, n_symbols: int, precision: int
) -> tuple[NDArray[np.int64], int]:
    """Return the tables that bits begin with, and how many bits they took, or -1 if they are none.

    Parameters
    ----------
    bits
        One a byte, of `write_tables`, with anything after them.
    n_tables, n_symbols, precision
        Shape of the tables and logarithm of their sums.
    """
    frequencies, n_bits = dispatch("read_tables", _HOST)(bits, n_tables, n_symbols, precision)
    return frequencies, int(n_bits)
