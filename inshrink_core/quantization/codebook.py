"""Codebooks: the exact optimum of one-dimensional k-means over key bins, rounding, and look-up tables.

The squared error of k centroids on sorted values obeys the concave Monge inequality, so that the best
last cut of a prefix moves right with the prefix, and each of the k rows of the dynamic programme is
solved by divide and conquer (Wu 1991; Grønlund et al. 2017, "Fast exact k-means in 1D").
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
    """Squared error of bins first..last-1 about their mean, from prefix sums."""
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

    The stack holds (j range, i range) still open; its depth is that of a balanced binary tree.
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
    """First bin of each of k clusters and the end, for 1 <= k <= n. O(k n log n)."""
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
    """Return the at most k centroids of least squared error on a histogram.

    Parameters
    ----------
    histogram
        m key bins in the order of their values.
    k
        Number of centroids wanted, at least 1. Where there are no more distinct values, every one of
        them becomes a centroid.

    Returns
    -------
    Float[ndarray, "c"]
        Ascending, distinct float64, c <= k; empty for an empty histogram.

    Notes
    -----
    O(k m log m) time, O(k m) 16-bit integers of memory. Sums run in float64 in key order on the CPU, so
    that equal histograms give equal centroids everywhere.

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
    # The cost is free of the origin; sums about the mean keep the digits that a common offset would eat.
    centre = ordered_sum(values * weights) / float(counts.sum())
    return np.unique(_cluster_means(values, weights, _optimal_cuts(values - centre, weights, k)))


def round_centroids(centroids: NDArray[np.float64], dtype: str) -> NDArray[np.float32]:
    """Round centroids to what the block stores, so that decoding is one look-up.

    Parameters
    ----------
    centroids : Float[ndarray, "c"]
        Finite, ascending.
    dtype
        Stored dtype of the tensor. Every centroid becomes a number of that dtype; for float32 tensors, of
        bfloat16: half the table, at an error of 2^-9 of a centroid.

    Returns
    -------
    Float[ndarray, "d"]
        float32, strictly ascending, finite; d <= c, as neighbours may round to one number.
    """
    if dtype == "float16":
        largest = np.float64(np.finfo(np.float16).max)
        rounded = np.clip(centroids, -largest, largest).astype(np.float16).astype(np.float32)
    else:
        largest = np.float64(np.finfo(np.float32).max)
        single = torch.from_numpy(np.clip(centroids, -largest, largest).astype(np.float32))
        rounded = round_to_bfloat16(single).float().numpy()
    return np.unique(rounded + np.float32(0.0))  # -0.0 + 0.0 is +0.0: one zero


def round_to_bfloat16(values: Tensor) -> Tensor:
    """Round finite float32 values to the nearest bfloat16, ties to even, never to infinity.

    Integer operations on the bits; float16 and bfloat16 values come back as they are.
    """
    if values.dtype != torch.float32:
        return values
    bits = values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    upper -= ((upper & 0x7FFF) == 0x7F80).to(torch.int64)
    return (upper - ((upper >> 15) << 16)).to(torch.int16).view(torch.bfloat16)


def _boundaries(centroids: NDArray[np.float32], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Positions in ascending `values` where the nearest centroid changes; ties go to the lower one."""
    wide = centroids.astype(np.float64)
    return np.searchsorted(values, (wide[1:] + wide[:-1]) / 2, side="right")


def assignment_table(
    centroids: NDArray[np.float32], dtype: str, *, first_symbol: int, prune_below: int, protect_from: int
) -> NDArray[np.uint8]:
    """Return the symbol of every key.

    Parameters
    ----------
    centroids : Float[ndarray, "c"]
        Ascending; may be empty if no value is to be quantized.
    dtype
        Stored dtype, which decides the representative of a key.
    first_symbol
        Symbol of the lowest centroid; the others follow.
    prune_below, protect_from
        Magnitude keys below the first get symbol 0, from the second on symbol 1.

    Returns
    -------
    UInt8[ndarray, "65536"]
        Nearest centroid of the key's representative; a value near the middle between two centroids may
        so get the farther one, by at most half a key's width (2^-8 of its magnitude).
    """
    table = np.zeros(N_KEYS, np.uint8)
    order = sorted_keys()
    if len(centroids):
        cuts = _boundaries(centroids, key_values(dtype)[order])
        sizes = np.diff(np.concatenate(([0], cuts, [len(order)])))
        table[order] = np.repeat(np.arange(first_symbol, first_symbol + len(centroids)), sizes)
    for half in (table[: N_KEYS // 2], table[N_KEYS // 2 :]):
        half[:prune_below] = 0
        half[protect_from:] = 1
    return table


def squared_error(histogram: KeyHistogram, centroids: NDArray[np.float32]) -> float:
    """Return the sum of squared distances of the bins to their nearest centroids, float64.

    Without centroids every value counts as lost: the sum of squares.
    """
    values, counts = histogram
    if not len(centroids):
        return ordered_sum(counts * values * values)
    cuts = _boundaries(centroids, values)
    sizes = np.diff(np.concatenate(([0], cuts, [len(values)])))
    distance = values - np.repeat(centroids.astype(np.float64), sizes)
    return ordered_sum(counts * distance * distance)


N_KEYS = 1 << 16
"""Keys are the upper half of a float32: sign, exponent, seven bits of mantissa."""

_N_FINITE = 0x7F80
"""Finite magnitude keys: 0 up to the key of infinity."""

_OFFSETS = {"float32": 0x8000, "float16": 0x7000, "bfloat16": 0}
"""Middle of the lower half that a key leaves open, by stored dtype: all 16 bits of a float32, the upper
three of a float16 (0..7 in units of 2^13, mean 3.5), none of a bfloat16."""


class KeyHistogram(NamedTuple):
    """Key bins that occur, in the order of their values.

    Parameters
    ----------
    values : Float[ndarray, "m"]
        float64 representatives, ascending (the two zeros may be side by side).
    counts : Int[ndarray, "m"]
        Positive int64 counts.
    """

    values: NDArray[np.float64]
    counts: NDArray[np.int64]


@cache
def key_values(dtype: str) -> NDArray[np.float64]:
    """Return the representative of every key: the middle of the values of `dtype` that share it.

    Parameters
    ----------
    dtype
        ``float32``, ``float16`` or ``bfloat16``.

    Returns
    -------
    Float[ndarray, "65536"]
        float64; zero for the two zero keys (subnormals below 2^-133 among them); infinity for
        what is not finite. Read-only.
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
    """Return all finite keys in the order of their values: negative ones from the largest magnitude down."""
    magnitudes = np.arange(_N_FINITE)
    keys = np.concatenate(((magnitudes | 0x8000)[::-1], magnitudes))
    keys.setflags(write=False)
    return keys


def key_histogram(counts: NDArray[np.int64], dtype: str) -> KeyHistogram:
    """Return the bins that occur among dense counts by key (`ops` kernel ``histogram16``).

    Infinite and NaN keys are left out: tensors that have them are not quantized.
    """
    order = sorted_keys()
    in_order = counts[order]
    occupied = np.flatnonzero(in_order)
    return KeyHistogram(key_values(dtype)[order[occupied]], in_order[occupied])


def ordered_sum(terms: NDArray[np.floating]) -> float:
    """Add numbers from first to last: `np.sum` pairs them in a way that depends on the processor."""
    return float(np.cumsum(terms, dtype=np.float64)[-1]) if len(terms) else 0.0


def ordered_mean(values: NDArray[np.floating]) -> float:
    """Return the mean of numbers, added from first to last in float64."""
    return ordered_sum(values) / values.size
