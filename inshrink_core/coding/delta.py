"""The quantization-aware delta: symbols less those of the previous checkpoint, modulo the alphabet.

D = (q_previous − q) mod B, over an alphabet of B symbols that holds those of both checkpoints; D is
then grouped by the previous symbol, which the decoder knows, because bins differ in how often their
parameters move and a busy bin would break the runs of a calm one (Agrawal et al., Inshrinkerator,
SoCC 2024, "delta" and "parameter arrangement"). `inshrink_core.ops.symbols.delta_events` computes it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NO_EXPECTATION = 256
"""Stands for "no symbol prevails in this group": no symbol has this value."""


def expected_symbols(
    pair_counts: NDArray[np.int64],
    unmoved: NDArray[np.int64],
    *,
    prevalence: float,
    min_count: int,
) -> NDArray[np.int64]:
    """Return the symbol of which runs pay in each group, or `NO_EXPECTATION`.

    Parameters
    ----------
    pair_counts
        (256, 256): how often each symbol occurs in each group, perhaps in a sample.
    unmoved
        256 symbols: those that mean "no change" (D = 0).
    prevalence
        Share of a group from which on coding runs of its most frequent symbol is worth it.
    min_count
        Groups seen less often expect "no change": too few to know, and saying otherwise costs bytes.

    Returns
    -------
    ndarray of int64
        256 symbols.
    """
    totals = pair_counts.sum(axis=1)
    best = pair_counts.argmax(axis=1)
    n_best = pair_counts.max(axis=1)
    rows = np.arange(256)
    n_unmoved = pair_counts[rows, np.minimum(unmoved, 255)]
    best = np.where(n_unmoved == n_best, unmoved, best)
    chosen = np.where(n_best >= prevalence * totals, best, NO_EXPECTATION)
    return np.where(totals < min_count, unmoved, chosen).astype(np.int64)
