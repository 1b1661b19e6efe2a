"""Sensitivity of the loss to an error of a parameter: four metrics, groupings, and summaries of scores.

Sources: `magnitude` and `taylor` are the Inshrinkerator paper's (Agrawal et al. 2024, Section 4.1); the
second moment of Adam estimates the diagonal of the empirical Fisher information (Kingma and Ba 2015).
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Self

from inshrink_core.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


N_KEYS = 0x7F80
"""Number of keys, the top 16 bits of finite, non-negative float32 values: all are below infinity's."""

CHUNK_ELEMENTS = 1 << 20
"""Scores converted to float64 at a time, 8 MB."""

STATISTICS = ("mean", "p50", "p99")
"""Statistics of the scores in a table."""


class _Word(StrEnum):
    """Enumeration whose members are words of the user."""

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the member with a name.

        Raises
        ------
        InputError
            No member has the name.
        """
        try:
            return cls(name)
        except ValueError:
            noun = "grouping" if cls is Grouping else "sensitivity metric"
            raise InputError(
                f"there is no {noun} '{name}'", remedy=f"choose one of {', '.join(cls)}"
            ) from None


class SensitivityMetric(_Word):
    """Metric of a parameter: abs(w), abs(g·w), Adam's second moment, or abs(w − previous w)."""

    MAGNITUDE = "magnitude"
    TAYLOR = "taylor"
    FISHER = "fisher"
    UPDATE = "update"

    @property
    def quantity(self) -> str:
        """Kind of the values, in a word: magnitude and movement do not measure the sensitivity of the loss.

        Examples
        --------
        >>> [metric.quantity for metric in SensitivityMetric]
        ['magnitude', 'sensitivity', 'sensitivity', 'movement']
        """
        words = {SensitivityMetric.MAGNITUDE: "magnitude", SensitivityMetric.UPDATE: "movement"}
        return words.get(self, "sensitivity")


class Grouping(_Word):
    """Grouping of parameters into the rows of a table."""

    TENSOR = "tensor"
    BLOCK = "block"
    LAYER_TYPE = "layer_type"


class Summary(NamedTuple):
    """Statistics of finite scores; NaN without scores.

    Parameters
    ----------
    mean, p50, p99
        Mean, median and 99th percentile.
    n
        Number of finite scores.
    n_nonfinite
        Number of NaN and infinite scores, which are not counted elsewhere.
    """

    mean: float
    p50: float
    p99: float
    n: int
    n_nonfinite: int


class ScoreHistogram:
    """Histogram of scores by the top 16 bits of their float32, with sums; histograms merge without loss.

    Notes
    -----
    The size is 510 kB for any number of scores. A quantile is the mean of the scores with the key of the
    wanted rank. Its error is below the width of a key, 2^-7 of the value, and 0 if these scores are equal.
    The same scores in the same order give the same bits, on any number of threads.

    Examples
    --------
    >>> import torch
    >>> histogram = ScoreHistogram()
    >>> histogram.add(torch.arange(5.0))
    >>> histogram.summary()
    Summary(mean=2.0, p50=2.0, p99=4.0, n=5, n_nonfinite=0)
    """

    __slots__ = ("_counts", "_n_nonfinite", "_sums")

    def __init__(self) -> None:
        import numpy as np

        self._counts: NDArray[np.int64] = np.zeros(N_KEYS, np.int64)
        self._sums: NDArray[np.float64] = np.zeros(N_KEYS, np.float64)
        self._n_nonfinite = 0

    def add(self, values: Tensor) -> None:
        """Count scores of any shape; their sign is ignored."""
        import numpy as np

        flat = values.detach().cpu().float().reshape(-1)
        for start in range(0, flat.numel(), CHUNK_ELEMENTS):
            chunk = flat[start : start + CHUNK_ELEMENTS].abs().numpy()
            keys = chunk.view(np.int32) >> 16
            finite = keys < N_KEYS
            if not finite.all():
                self._n_nonfinite += int(keys.size - finite.sum())
                keys, chunk = keys[finite], chunk[finite]
            self._counts += np.bincount(keys, minlength=N_KEYS)
            self._sums += np.bincount(keys, weights=chunk, minlength=N_KEYS)

    def merge(self, other: ScoreHistogram) -> None:
        """Add the counts of another histogram."""
        self._counts += other._counts
        self._sums += other._sums
        self._n_nonfinite += other._n_nonfinite

    def summary(self) -> Summary:
        """Return mean, median and 99th percentile of the counted scores."""
        import numpy as np

        cumulative = np.cumsum(self._counts)
        n = int(cumulative[-1])
        if n == 0:
            return Summary(math.nan, math.nan, math.nan, 0, self._n_nonfinite)

        def quantile(share: float) -> float:
            key = int(np.searchsorted(cumulative, math.ceil(share * n)))
            return float(self._sums[key] / self._counts[key])

        mean = float(self._sums.sum()) / n
        return Summary(mean, quantile(0.5), quantile(0.99), n, self._n_nonfinite)
