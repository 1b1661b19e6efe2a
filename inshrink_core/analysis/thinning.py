"""Thinning of curves with very many values for display."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def thinned(series: Sequence[tuple[float, float]], n_parts: int) -> list[tuple[float, float]]:
    """Return a curve with only the smallest and the largest value of each part.

    Parameters
    ----------
    series
        Pairs of a step and a value, by ascending step.
    n_parts
        Number of parts of equal width, at least 1.

    Returns
    -------
    list
        `series` itself if it has at most two values per part. Otherwise the extremes of each part, its first
        value that is not finite, so that gaps stay visible, and the first and the last value of all.

    Notes
    -----
    O(n).

    Examples
    --------
    >>> thinned([(0, 1.0), (1, 9.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.5)], 1)
    [(0, 1.0), (1, 9.0), (5, 2.5)]
    """
    if len(series) <= 2 * n_parts:
        return list(series)
    steps, values = np.array(series, np.float64).T
    edges = np.searchsorted(steps, np.linspace(steps[0], steps[-1], n_parts + 1)[1:-1])
    places = {0, len(series) - 1}
    for begin, end in itertools.pairwise([0, *edges.tolist(), len(series)]):
        part = values[begin:end]
        finite = np.flatnonzero(np.isfinite(part))
        if finite.size:
            places |= {begin + int(finite[pick(part[finite])]) for pick in (np.argmin, np.argmax)}
        if finite.size < part.size:
            places.add(begin + int(np.argmin(np.isfinite(part))))
    return [series[place] for place in sorted(places)]
