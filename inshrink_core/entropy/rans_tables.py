"""Probability models of context rANS: chosen from counts, and as bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.errors import DamagedError
from inshrink_core.ops.rans import MAX_CONTEXTS, PRECISION, RansModel
from inshrink_core.ops.rans_tables import normalize_counts, pool_contexts, read_tables, write_tables

__all__ = ["ChosenModel", "choose_model", "read_model"]

_TRIED_PRECISIONS = (12, 10, 8, 6)
"""Coarser tables are shorter; two bits less cost about a thousandth of the data."""

_COARSE_BELOW = 1 << 17
"""Symbols from which the finest tables are taken unseen: coarser ones then save less than they cost."""

_MAX_FREQUENCY_BITS = 21
"""Golomb code of a change of length by 13 (9 bits) and the 12 bits below the highest."""

_BITS_OF = np.array([0.0, *(PRECISION - np.log2(np.arange(1, (1 << PRECISION) + 1)))])
"""Bits of a symbol by its frequency."""


class ChosenModel(NamedTuple):
    """What an encoder chose, and what it writes of it.

    Parameters
    ----------
    model
        Tables as the kernels take them.
    precision
        Logarithm of the sum of the stored frequencies.
    bits : uint8
        Table numbers of the contexts and the tables, one bit a byte.
    data_bits
        Bits of the symbols under the model.
    """

    model: RansModel
    precision: int
    bits: NDArray[np.uint8]
    data_bits: float


def choose_model(counts: NDArray[np.int64]) -> ChosenModel:
    """Pool contexts and choose the precision of tables for the smallest sum of tables and data.

    Parameters
    ----------
    counts : (n_contexts, n_symbols)
        How often each symbol occurs in each context; at least one positive.
    """
    rows, _ = pool_contexts(counts)
    if int(counts.sum()) >= _COARSE_BELOW:
        return _model_of(counts, rows, PRECISION)
    n_used = int(np.count_nonzero(counts.any(0)))
    poolings = (rows, np.zeros_like(rows)) if rows.any() else (rows,)
    candidates = [
        _model_of(counts, pooling, precision)
        for pooling in poolings
        for precision in _TRIED_PRECISIONS
        if n_used <= 1 << precision
    ]
    return min(candidates, key=lambda chosen: chosen.bits.size + chosen.data_bits)


def _model_of(counts: NDArray[np.int64], rows: NDArray[np.int64], precision: int) -> ChosenModel:
    """Tables of one pooling and precision, and what they cost."""
    pooled = np.zeros((int(rows.max()) + 1, counts.shape[1]), np.int64)
    np.add.at(pooled, rows, counts)
    stored = normalize_counts(pooled, precision)
    model = RansModel(rows, stored << (PRECISION - precision))
    width = (stored.shape[0] - 1).bit_length()
    numbers = (rows[:, None] >> np.arange(width) & 1).astype(np.uint8).ravel()
    bits = np.concatenate((numbers, write_tables(stored, precision)))
    return ChosenModel(model, precision, bits, float((pooled * _BITS_OF[model.frequencies]).sum()))


def read_model(
    payload: bytes | memoryview, n_tables: int, n_symbols: int, n_contexts: int, precision: int
) -> tuple[RansModel, int]:
    """Return the model that a payload begins with, and how many bytes it takes.

    Parameters
    ----------
    payload
        The bits of `ChosenModel`, lowest first in each byte, and anything after them.
    n_tables
        At most `n_contexts`.
    n_symbols, n_contexts, precision
        As when the model was written.

    Raises
    ------
    DamagedError
        The bits end early, name a table that is not there, or hold one that does not sum to
        ``2**precision``.
    """
    width = (n_tables - 1).bit_length()
    most = MAX_CONTEXTS * width + n_tables * n_symbols * _MAX_FREQUENCY_BITS
    bits = np.unpackbits(np.frombuffer(payload[: (most + 7) // 8], np.uint8), bitorder="little")
    n_numbers = n_contexts * width
    if bits.size < n_numbers:
        raise DamagedError("a rANS stream ends early", expected="table numbers", found=f"{bits.size} bits")
    numbers = bits[:n_numbers].reshape(n_contexts, width).astype(np.int64)
    rows = (numbers << np.arange(width)).sum(1).astype(np.int64)
    if int(rows.max()) >= n_tables:
        raise DamagedError(
            "a context names a table that is not there",
            expected=f"below {n_tables}",
            found=str(int(rows.max())),
        )
    frequencies, n_bits = read_tables(bits[n_numbers:], n_tables, n_symbols, precision)
    if n_bits < 0:
        raise DamagedError("a rANS frequency table is cut or does not sum to its total")
    end = n_numbers + n_bits
    if bits[end : (end + 7) // 8 * 8].any():
        raise DamagedError("rANS tables have a padding bit set")
    return RansModel(rows, frequencies << (PRECISION - precision)), (end + 7) // 8
