"""Probability models of context rANS: chosen from counts, and as bits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.errors import DamagedError
from inshrink_core.ops.rans import MAX_CONTEXTS, PRECISION, RansModel
from inshrink_core.ops.rans_tables import TABLE_BITS, choose_tables, pool_contexts, read_tables

__all__ = ["ChosenModel", "choose_model", "read_model"]

_TRIED_PRECISIONS = (12, 10, 8, 6)
"""Coarser tables are shorter; two bits less cost about a thousandth of the data."""

_COARSE_BELOW = 1 << 17
"""Symbols from which the finest tables are taken unseen: coarser ones then save less than they cost."""


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
    large = int(counts.sum()) >= _COARSE_BELOW
    chosen = choose_tables(counts, rows, (PRECISION,) if large else _TRIED_PRECISIONS)
    model = RansModel(chosen.rows, chosen.frequencies << (PRECISION - chosen.precision))
    return ChosenModel(model, chosen.precision, chosen.bits, chosen.data_bits)


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
    most = MAX_CONTEXTS * width + n_tables * n_symbols * TABLE_BITS
    packed = np.frombuffer(payload[: (most + 7) // 8], np.uint8).copy()
    shape = (n_contexts, n_tables, n_symbols)
    rows, frequencies, n_bits = read_tables(packed, 8 * packed.size, shape, precision)
    if n_bits < 0:
        raise DamagedError(
            "rANS tables are cut, do not sum to their total, or belong to no context",
            found=f"{packed.size} bytes",
        )
    if n_bits % 8 and packed[n_bits // 8] >> n_bits % 8:
        raise DamagedError("rANS tables have a padding bit set")
    return RansModel(rows, frequencies << (PRECISION - precision)), (n_bits + 7) // 8
