"""Codebooks: exact one-dimensional k-means over key bins, rounding, and look-up tables.

The squared error of a cluster of sorted values satisfies the concave Monge inequality, so the best last cut
of a prefix is non-decreasing in the length of the prefix. Each of the k rows of the dynamic programme is
therefore solved by divide and conquer (Wu 1991; Grønlund et al. 2017, "Fast exact k-means in 1D").
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@numba.njit(nogil=True, inline="always")
def _cost(
    first: int,
    last: int,
    weight: NDArray[np.float64],
    moment: NDArray[np.float64],
    square: NDArray[np.float64],
) -> float:  # pragma: no cover - compiled
    """Return the squared error of bins first..last-1 about their mean, from prefix sums."""
    w = weight[last] - weight[first]
    m = moment[last] - moment[first]
    return float(max(square[last] - square[first] - m * m / w, 0.0))


@numba.njit(nogil=True, cache=True)
def _solve_row(
    row: NDArray[np.float64],
    previous: NDArray[np.float64],
    cuts: NDArray[np.uint16],
    first_row: int,
    weight: NDArray[np.float64],
    moment: NDArray[np.float64],
    square: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Fill row[j] = min over i of previous[i] + cost(i, j) for first_row <= j <= n, with its cuts.

    The stack holds the open pairs of j and i ranges; its depth is that of a balanced binary tree.
    """
    n = row.size - 1
    stack = np.empty((64, 4), np.int64)
    stack[0] = (first_row, n, first_row - 1, n - 1)
    depth = 1
    while depth:
        depth -= 1
        low, high, cut_low, cut_high = stack[depth]
        middle = (low + high) // 2
        best, best_cut = np.inf, cut_low
        for cut in range(cut_low, min(cut_high, middle - 1) + 1):
            total = previous[cut] + _cost(cut, middle, weight, moment, square)
            if total < best:
                best, best_cut = total, cut
        row[middle] = best
        cuts[middle] = best_cut
        if middle < high:
            stack[depth] = (middle + 1, high, best_cut, cut_high)
            depth += 1
        if low < middle:
            stack[depth] = (low, middle - 1, cut_low, best_cut)
            depth += 1


@numba.njit(nogil=True, cache=True)
def _optimal_cuts(
    values: NDArray[np.float64], counts: NDArray[np.float64], k: int
) -> NDArray[np.int64]:  # pragma: no cover - compiled
    """Return the first bin of each of k clusters, and the end, for 1 <= k <= n. O(k n log n)."""
    n = values.size
    weight, moment, square = np.zeros(n + 1), np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n):
        weight[i + 1] = weight[i] + counts[i]
        moment[i + 1] = moment[i] + counts[i] * values[i]
        square[i + 1] = square[i] + counts[i] * values[i] * values[i]
    cuts = np.zeros((k + 1, n + 1), np.uint16)  # at most 65,280 finite keys
    previous = np.empty(n + 1)
    previous[0] = 0.0
    for j in range(1, n + 1):
        previous[j] = _cost(0, j, weight, moment, square)
    row = np.empty(n + 1)
    for used in range(2, k + 1):
        row[:] = np.inf
        _solve_row(row, previous, cuts[used], used, weight, moment, square)
        previous, row = row, previous
    bounds = np.empty(k + 1, np.int64)
    bounds[k] = n
    for used in range(k, 0, -1):
        bounds[used - 1] = cuts[used, bounds[used]]
    return bounds


@numba.njit(nogil=True, cache=True)
def _cluster_means(
    values: NDArray[np.float64], weights: NDArray[np.float64], bounds: NDArray[np.int64]
) -> NDArray[np.float64]:  # pragma: no cover - compiled
    means = np.empty(bounds.size - 1)
    for cluster in range(means.size):
        moment, weight = 0.0, 0.0
        for i in range(bounds[cluster], bounds[cluster + 1]):
            moment += weights[i] * values[i]
            weight += weights[i]
        means[cluster] = moment / weight
    return means


def fit_exact(histogram: KeyHistogram, k: int) -> NDArray[np.float64]:
    """Return the k or fewer centroids with the least squared error on a histogram.

    Parameters
    ----------
    histogram
        m key bins in the order of their values.
    k
        Number of centroids, at least 1. If the histogram has no more than k distinct values, each of them
        becomes a centroid.

    Returns
    -------
    Float[ndarray, "c"]
        Ascending, distinct float64, c <= k; empty for an empty histogram.

    Notes
    -----
    O(k m log m) time and O(k m) 16-bit integers of memory. Sums are computed in float64 in key order on the
    CPU, so that equal histograms give equal centroids on every machine.

    Examples
    --------
    >>> import numpy as np
    >>> fit_exact(KeyHistogram(np.array([0.0, 1.0, 9.0, 11.0]), np.array([1, 1, 1, 3])), 2)
    array([ 0.5, 10.5])
    """
    values, counts = histogram
    if len(values) <= k:
        return np.unique(values)
    weights = counts.astype(np.float64)
    # The cost does not depend on the origin; centring avoids a loss of digits to a common offset.
    centre = ordered_sum(values * weights) / float(counts.sum())
    return np.unique(_cluster_means(values, weights, _optimal_cuts(values - centre, weights, k)))


def round_centroids(centroids: NDArray[np.float64], dtype: str) -> NDArray[np.float32]:
    """Round centroids to their stored precision, so that decoding is a look-up.

    Parameters
    ----------
    centroids : Float[ndarray, "c"]
        Finite, ascending.
    dtype
        Stored dtype of the tensor. Centroids are rounded to this dtype; for float32 tensors to bfloat16,
        which halves the table at a relative error of 2^-9.

    Returns
    -------
    Float[ndarray, "d"]
        float32, strictly ascending, finite; d <= c, as neighbours may round to the same number.
    """
    first = np.float16 if dtype == "float16" else np.float32
    largest = np.float64(np.finfo(first).max)
    rounded = np.clip(centroids, -largest, largest).astype(first).astype(np.float32)
    if dtype != "float16":
        rounded = round_to_bfloat16(torch.from_numpy(rounded)).float().numpy()
    return np.unique(rounded + np.float32(0.0))  # -0.0 + 0.0 is +0.0, so there is a single zero


def round_to_bfloat16(values: Tensor) -> Tensor:
    """Round finite float32 values to the nearest bfloat16, ties to even, never to infinity.

    Works on the bits as integers. float16 and bfloat16 values are returned unchanged.
    """
    if values.dtype != torch.float32:
        return values
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper -= ((upper & 0x7FFF) == 0x7F80).to(torch.int64)
    return (upper - ((upper >> 15) << 16)).to(torch.int16).view(torch.bfloat16)


def _sizes(centroids: NDArray[np.float32], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return how many of the ascending `values` are nearest to each centroid; ties go to the lower."""
    wide = centroids.astype(np.float64)
    cuts = np.searchsorted(values, (wide[1:] + wide[:-1]) / 2, side="right")
    return np.diff(cuts, prepend=0, append=len(values))


def assignment_table(
    centroids: NDArray[np.float32], dtype: str, *, first_symbol: int, prune_below: int, protect_from: int
) -> NDArray[np.uint8]:
    """Return the symbol of each key.

    Parameters
    ----------
    centroids : Float[ndarray, "c"]
        Ascending; may be empty if no value is quantized.
    dtype
        Stored dtype, which determines the representative of a key.
    first_symbol
        Symbol of the lowest centroid; those of the others follow.
    prune_below, protect_from
        Magnitude keys below the first get symbol 0, those from the second get symbol 1.

    Returns
    -------
    UInt8[ndarray, "65536"]
        Nearest centroid of the key's representative. A value near the middle of two centroids may thus get
        the farther one, by at most half a key's width (2^-8 of its magnitude).
    """
    table = np.zeros(N_KEYS, np.uint8)
    order = sorted_keys()
    if len(centroids):
        sizes = _sizes(centroids, key_values(dtype)[order])
        table[order] = np.repeat(np.arange(first_symbol, first_symbol + len(centroids)), sizes)
    for half in (table[: N_KEYS // 2], table[N_KEYS // 2 :]):
        half[:prune_below] = 0
        half[protect_from:] = 1
    return table


def squared_error(histogram: KeyHistogram, centroids: NDArray[np.float32]) -> float:
    """Return the sum of squared distances of the bins to their nearest centroids, as float64.

    Without centroids, this is the sum of squares.
    """
    values, counts = histogram
    if not len(centroids):
        return ordered_sum(counts * values * values)
    distance = values - np.repeat(centroids.astype(np.float64), _sizes(centroids, values))
    return ordered_sum(counts * distance * distance)


N_KEYS = 1 << 16
"""Number of keys. A key is the upper half of a float32: sign, exponent, seven bits of mantissa."""

_N_FINITE = 0x7F80
"""Number of finite magnitude keys, which is the key of infinity."""

_OFFSETS = {"float32": 0x8000, "float16": 0x7000, "bfloat16": 0}
"""Middle of the values that share a key, by stored dtype: the lower half has 16 free bits for float32, the
upper three for float16 (0..7 in units of 2^13, mean 3.5), and none for bfloat16."""


class KeyHistogram(NamedTuple):
    """The occupied key bins, in the order of their values.

    Parameters
    ----------
    values : Float[ndarray, "m"]
        float64 representatives, ascending (both zeros may occur side by side).
    counts : Int[ndarray, "m"]
        Positive int64 counts.
    """

    values: NDArray[np.float64]
    counts: NDArray[np.int64]


@cache
def key_values(dtype: str) -> NDArray[np.float64]:
    """Return the representative of each key: the middle of the values of `dtype` with that key.

    Parameters
    ----------
    dtype
        ``float32``, ``float16`` or ``bfloat16``.

    Returns
    -------
    Float[ndarray, "65536"]
        float64; zero for the two zero keys (including subnormals below 2^-133), and infinity for non-finite
        keys. Read-only.
    """
    bits = np.arange(N_KEYS, dtype=np.uint32) << np.uint32(16)
    finite = (bits & np.uint32(0x7FFFFFFF)) < np.uint32(_N_FINITE << 16)
    nonzero = (bits & np.uint32(0x7FFFFFFF)) != 0
    bits[finite & nonzero] |= np.uint32(_OFFSETS[dtype])
    values = np.where(finite, bits, np.uint32(_N_FINITE << 16)).view(np.float32).astype(np.float64)
    values.setflags(write=False)
    return values


@cache
def sorted_keys() -> NDArray[np.int64]:
    """Return all finite keys in the order of their values, from the largest negative magnitude."""
    magnitudes = np.arange(_N_FINITE)
    keys = np.concatenate(((magnitudes | 0x8000)[::-1], magnitudes))
    keys.setflags(write=False)
    return keys


def key_histogram(counts: NDArray[np.int64], dtype: str) -> KeyHistogram:
    """Return the occupied bins of dense counts by key (`ops` kernel ``histogram16``).

    Infinite and NaN keys are omitted: tensors with such values are not quantized.
    """
    order = sorted_keys()
    in_order = counts[order]
    occupied = np.flatnonzero(in_order)
    return KeyHistogram(key_values(dtype)[order[occupied]], in_order[occupied])


def ordered_sum(terms: NDArray[np.floating]) -> float:
    """Return the sum from first to last; the order of `np.sum` depends on the processor."""
    return float(np.cumsum(terms, dtype=np.float64)[-1]) if len(terms) else 0.0


def ordered_mean(values: NDArray[np.floating]) -> float:
    """Return the mean, summed from first to last in float64."""
    return ordered_sum(values) / values.size
