"""Time and squared error of a 16-centroid codebook for 20 million values, ours against scikit-learn's KMeans.

The values are pseudo-random normal float32 numbers, standard deviation 0.02, as weights are; the error is
the mean squared distance of every raw value to its nearest centroid, by one function for all methods,
outside of the time. Every method is timed on one thread of arithmetic with its library loaded and its
kernels compiled; ours is the median of several runs, scikit-learn's is one run with its own defaults
(k-means++, Lloyd, at most 300 iterations, tolerance 1e-4) and one start.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from benchmarks.results import write
from inshrink_core.ops.quantize import histogram16
from inshrink_core.quantization import fit_exact, fit_published, key_histogram

REPEATS = 9
_SCIKIT_LEARN = "scikit-learn KMeans on the raw values"


def mean_squared_error(values: NDArray[np.float32], centroids: NDArray[np.float64]) -> float:
    """Return the mean squared distance to the nearest centroid in float64, in slices that fit the cache."""
    centroids = np.sort(centroids)
    middles = (centroids[1:] + centroids[:-1]) / 2
    total = 0.0
    for part in np.array_split(values, max(1, len(values) // 1_000_000)):
        wide = part.astype(np.float64)
        total += float(((wide - centroids[np.searchsorted(middles, wide)]) ** 2).sum())
    return total / len(values)


def timed(fit: Callable[[], NDArray[np.float64]], repeats: int) -> tuple[float, NDArray[np.float64]]:
    """Return the median of the seconds a fit takes, and its centroids."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        centroids = fit()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), centroids


def main(*, quick: bool = False) -> Path:
    """Measure and write the results; a fortieth of the values if `quick`."""
    n_values, k = (500_000 if quick else 20_000_000), 16
    values = torch.randn(n_values, generator=torch.Generator().manual_seed(0)) * 0.02
    raw = values.numpy()
    fit_exact(key_histogram(histogram16(values[:1000]).numpy(), "float32"), 2)  # compiles the kernels

    def exact() -> NDArray[np.float64]:
        return fit_exact(key_histogram(histogram16(values).numpy(), "float32"), k)

    def published() -> NDArray[np.float64]:
        return fit_published(key_histogram(histogram16(values).numpy(), "float32"), k)

    def scikit_learn() -> NDArray[np.float64]:
        model = KMeans(k, n_init=1, random_state=0).fit(raw[:, None])
        return np.asarray(model.cluster_centers_[:, 0], np.float64)

    with threadpool_limits(1):
        measured = {
            "inshrink exact (histogram and dynamic programme)": timed(exact, REPEATS),
            "inshrink published (histogram, sketch, weighted k-means)": timed(published, REPEATS),
            _SCIKIT_LEARN: timed(scikit_learn, 1),
        }
    baseline = measured[_SCIKIT_LEARN][0]
    rows: list[dict[str, object]] = [
        {
            "n_values": n_values,
            "k": k,
            "method": method,
            "seconds": seconds,
            "mse": f"{mean_squared_error(raw, centroids):.6e}",
            "ratio_vs_sklearn": baseline / seconds,
        }
        for method, (seconds, centroids) in measured.items()
    ]
    return write("codebook", rows)


if __name__ == "__main__":
    main()
