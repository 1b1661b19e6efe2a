"""Partition of parameters into pruned, quantized and protected ones, by thresholds from histograms.

Agrawal et al., Inshrinkerator (SoCC'24), section "Quantization": the largest parameters by magnitude or by
sensitivity are protected, the smallest by one of them are pruned, and quantiles are pooled over the layers of
a type. The paper uses a sketch; here quantiles are exact on the values' 16-bit keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_UPPER = 1 << 15
"""Upper threshold above all magnitude keys."""


class KeyCounts(NamedTuple):
    """A sparse histogram over magnitude or sensitivity keys.

    Parameters
    ----------
    keys : Int[ndarray, "m"]
        Ascending, distinct, in 0..32767.
    counts : Int[ndarray, "m"]
        Positive int64 counts.
    """

    keys: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def from_dense(cls, counts: NDArray[np.int64]) -> KeyCounts:
        """Return the histogram in which key ``i`` has the count ``counts[i]``."""
        keys = np.flatnonzero(counts)
        return cls(keys, counts[keys])


class Thresholds(NamedTuple):
    """Thresholds of the partition: keys below the lower are pruned, keys from the upper on are protected.

    Protection takes precedence over pruning. A lower threshold of 0 and an upper of `NO_UPPER` have no
    effect.
    """

    prune_magnitude: int = 0
    protect_magnitude: int = NO_UPPER
    prune_sensitivity: int = 0
    protect_sensitivity: int = NO_UPPER


def merge(histograms: Iterable[KeyCounts]) -> KeyCounts:
    """Return the sum of histograms; counts are integers, so the order does not matter."""
    dense = np.zeros(NO_UPPER, np.int64)
    for histogram in histograms:
        dense[histogram.keys] += histogram.counts
    return KeyCounts.from_dense(dense)


def lower_threshold(histogram: KeyCounts, fraction: float) -> int:
    """Return the largest key such that at most `fraction` of the values are below it.

    Values with the same key are not separated, so the actual fraction may be smaller by up to the share of
    one key (a relative width of 2^-7).
    """
    below = np.concatenate(([0], np.cumsum(histogram.counts)))
    fits = int(np.searchsorted(below, int(fraction * below[-1]), side="right")) - 1
    return int(histogram.keys[fits]) if 0 < fits < len(histogram.keys) else 0


def upper_threshold(histogram: KeyCounts, fraction: float) -> int:
    """Return the smallest key such that at most `fraction` of the values are at or above it.

    As in `lower_threshold`, values with the same key are not separated.
    """
    above = np.concatenate(([0], np.cumsum(histogram.counts[::-1])))
    fits = int(np.searchsorted(above, int(fraction * above[-1]), side="right")) - 1
    return int(histogram.keys[len(histogram.keys) - fits]) if fits > 0 else NO_UPPER


def thresholds(
    magnitude: KeyCounts, sensitivity: KeyCounts, *, prune: float, protect: float, by_sensitivity: bool
) -> Thresholds:
    """Return the thresholds of a group of tensors.

    Parameters
    ----------
    magnitude
        Histogram of abs(w) over the group.
    sensitivity
        Histogram of abs(g·w) over the tensors of the group with a known gradient.
    prune, protect
        Fractions of the group, 0..1. Protection is by magnitude *or* sensitivity, so up to twice `protect`
        is protected.
    by_sensitivity
        Prune by sensitivity. `prune_magnitude` is still computed, for tensors without a gradient.

    Examples
    --------
    >>> import numpy as np
    >>> even = KeyCounts(np.arange(100, 200), np.ones(100, np.int64))
    >>> thresholds(even, even, prune=0.25, protect=0.1, by_sensitivity=False)[:2]
    (125, 190)
    """
    return Thresholds(
        prune_magnitude=lower_threshold(magnitude, prune),
        protect_magnitude=upper_threshold(magnitude, protect),
        prune_sensitivity=lower_threshold(sensitivity, prune) if by_sensitivity else 0,
        protect_sensitivity=upper_threshold(sensitivity, protect),
    )
