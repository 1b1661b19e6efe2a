"""The codebook fit as published with Inshrinkerator: weighted k-means on a logarithmic sketch.

Agrawal et al. (SoCC'24), sections "make_sketch", "approx_kmeans" and "weighted_kmeanspp". The paper does not
specify how to sketch signs and zero, or how to normalize vectors. Here keys are mirrored about a zero bucket,
and a normalized vector sums to one. This is the baseline for `codebook.fit_exact`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from inshrink_core.quantization.codebook import KeyHistogram, ordered_sum

_SMALLEST = 2.0**-149
"""Smallest positive float32, the end of the sketch's first bucket."""

_LARGEST = 2.0**128
"""Upper bound of finite float32 numbers."""

_MAX_ITERATIONS = 300
"""Largest number of Lloyd iterations, as in scikit-learn; a one-dimensional fit of a few thousand buckets
converges much earlier."""


@lru_cache(maxsize=8)
def _bucket_ends(alpha: float) -> NDArray[np.float64]:
    """Return powers of gamma by repeated multiplication, which is the same on every machine."""
    gamma = (1 + alpha) / (1 - alpha)
    ends = [_SMALLEST]
    while ends[-1] < _LARGEST:
        ends.append(ends[-1] * gamma)
    return np.array(ends)


def log_sketch(histogram: KeyHistogram, alpha: float) -> KeyHistogram:
    """Merge bins into buckets of equal ratio, mirrored about a zero bucket.

    Parameters
    ----------
    histogram
        Key bins in the order of their values.
    alpha
        Relative error of a bucket's centre, in (0, 1).

    Returns
    -------
    KeyHistogram
        Bucket centres ``2 γ^i / (γ + 1)`` (DDSketch, Masson et al. 2019), γ = (1 + α) / (1 - α), with
        their counts. O(m log m).
    """
    gamma = (1 + alpha) / (1 - alpha)
    ends = _bucket_ends(alpha)
    indices = np.searchsorted(ends, np.abs(histogram.values), side="left") + 1
    signed = np.where(histogram.values < 0, -indices, np.where(histogram.values > 0, indices, 0))
    buckets, member = np.unique(signed, return_inverse=True)
    counts = np.zeros(len(buckets), np.int64)
    np.add.at(counts, member, histogram.counts)
    centres = ends[np.abs(buckets) - 1] * (2 / (gamma + 1))
    return KeyHistogram(np.where(buckets == 0, 0.0, np.copysign(centres, buckets)), counts)


def fit_published(
    histogram: KeyHistogram, k: int, *, alpha: float = 0.01, sigma: float = 0.2, seed: int = 0
) -> NDArray[np.float64]:
    """Return at most k centroids by the published approximate k-means.

    Parameters
    ----------
    histogram
        Key bins in the order of their values.
    k
        Number of centroids, at least 1.
    alpha
        Relative error of the sketch.
    sigma
        Share of frequency in a bucket's weight. The rest is magnitude, which draws centroids away from zero.
        The paper uses 0.2.
    seed
        Seed of k-means++.

    Returns
    -------
    Float[ndarray, "c"]
        Ascending, distinct float64.
    """
    if not len(histogram.values):
        return np.empty(0)
    values, counts = log_sketch(histogram, alpha)
    if len(values) <= k:
        return values
    magnitudes = np.abs(values)
    weights = sigma * counts / counts.sum() + (1 - sigma) * magnitudes / ordered_sum(magnitudes)
    return _lloyd(values, weights, _seed_centres(values, weights, k, np.random.default_rng(seed)))


def _draw(weights: NDArray[np.float64], generator: np.random.Generator) -> int:
    """Return an index drawn by inverse transform: one uniform number a draw, stable across numpy versions."""
    cumulative = np.cumsum(weights)
    point = generator.random() * cumulative[-1]
    return min(int(np.searchsorted(cumulative, point, side="right")), len(weights) - 1)


def _seed_centres(
    values: NDArray[np.float64], weights: NDArray[np.float64], k: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Return weighted k-means++ centres, drawn with probability of weight times distance (not squared)."""
    chosen = [values[_draw(weights, generator)]]
    distance = np.abs(values - chosen[0])
    while len(chosen) < k:
        chosen.append(values[_draw(distance * weights, generator)])
        distance = np.minimum(distance, np.abs(values - chosen[-1]))
    return np.unique(chosen)


def _lloyd(
    values: NDArray[np.float64], weights: NDArray[np.float64], centres: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Move centres to the weighted means of their buckets until the cuts do not change."""
    weight = np.concatenate(([0.0], np.cumsum(weights)))
    moment = np.concatenate(([0.0], np.cumsum(weights * values)))
    cuts = np.empty(0, np.int64)
    for _ in range(_MAX_ITERATIONS):
        new_cuts = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2, side="right")
        if np.array_equal(new_cuts, cuts):
            break
        cuts = new_cuts
        bounds = np.concatenate(([0], cuts, [len(values)]))
        mass = np.diff(weight[bounds])
        centres = np.where(mass > 0, np.diff(moment[bounds]) / np.where(mass > 0, mass, 1.0), centres)
        centres = np.sort(centres)
    return np.unique(centres)
