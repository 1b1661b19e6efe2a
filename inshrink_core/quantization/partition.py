"""Every parameter is pruned, quantized or protected: thresholds from integer histograms.

Agrawal et al., Inshrinkerator (SoCC'24), section "Quantization": the largest parameters by magnitude or
by sensitivity are protected, the smallest by one of them are pruned, and the quantiles are pooled over
the layers of a type. Quantiles here are exact on the 16-bit keys of the values, instead of a sketch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NO_UPPER = 1 << 15
"""Upper threshold that no magnitude key reaches."""


class KeyCounts(NamedTuple):
    """A histogram over magnitude or sensitivity keys that lists only the keys that occur.

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
        """Return the histogram whose count of key ``i`` is ``counts[i]``."""
        keys = np.flatnonzero(counts)
        return cls(keys, counts[keys])

    @property
    def total(self) -> int:
        """Number of values counted."""
        return int(self.counts.sum())


class Thresholds(NamedTuple):
    """Where the partition cuts: a parameter below a lower key is pruned, at or above an upper protected.

    Protection wins over pruning. A lower threshold of 0 and an upper of `NO_UPPER` cut nothing.
    """

    prune_magnitude: int = 0
    protect_magnitude: int = NO_UPPER
    prune_sensitivity: int = 0
    protect_sensitivity: int = NO_UPPER


def merge(histograms: Iterable[KeyCounts]) -> KeyCounts:
    """Add histograms up; integers, so neither order nor grouping matters."""
    dense = np.zeros(NO_UPPER, np.int64)
    for histogram in histograms:
        dense[histogram.keys] += histogram.counts
    return KeyCounts.from_dense(dense)


def lower_threshold(histogram: KeyCounts, fraction: float) -> int:
    """Return the largest key below which at most `fraction` of the values lie.

    Values that share a key are never parted, so the fraction below is the promised one less at most
    the share of one key (a relative width of 2^-7).
    """
    below = np.concatenate(([0], np.cumsum(histogram.counts)))
    fits = int(np.searchsorted(below, int(fraction * below[-1]), side="right")) - 1
    return int(histogram.keys[fits]) if 0 < fits < len(histogram.keys) else 0


def upper_threshold(histogram: KeyCounts, fraction: float) -> int:
    """Return the smallest key at or above which at most `fraction` of the values lie.

    See `lower_threshold` for what holds where values share a key.
    """
    above = np.concatenate(([0], np.cumsum(histogram.counts[::-1])))
    fits = int(np.searchsorted(above, int(fraction * above[-1]), side="right")) - 1
    return int(histogram.keys[len(histogram.keys) - fits]) if fits > 0 else NO_UPPER


def thresholds(
    magnitude: KeyCounts, sensitivity: KeyCounts | None, *, prune: float, protect: float, by_sensitivity: bool
) -> Thresholds:
    """Return where to cut a group of tensors.

    Parameters
    ----------
    magnitude
        Histogram of abs(w) over the group.
    sensitivity
        Histogram of abs(g·w) over those tensors of the group whose gradient is known; None if none is.
    prune, protect
        Fractions of the group, 0..1. As protection is by magnitude *or* sensitivity, up to twice
        `protect` is protected.
    by_sensitivity
        Prune by sensitivity. `prune_magnitude` is computed all the same: it is the rule for tensors
        without a gradient.

    Examples
    --------
    >>> import numpy as np
    >>> even = KeyCounts(np.arange(100, 200), np.ones(100, np.int64))
    >>> thresholds(even, None, prune=0.25, protect=0.1, by_sensitivity=False)[:2]
    (125, 190)
    """
    known = sensitivity is not None and sensitivity.total > 0
    return Thresholds(
        prune_magnitude=lower_threshold(magnitude, prune),
        protect_magnitude=upper_threshold(magnitude, protect),
        prune_sensitivity=(
            lower_threshold(sensitivity, prune) if sensitivity is not None and known and by_sensitivity else 0
        ),
        protect_sensitivity=(
            upper_threshold(sensitivity, protect) if sensitivity is not None and known else NO_UPPER
        ),
    )
