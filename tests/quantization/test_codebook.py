"""Histograms of keys; exact and published codebooks, their rounding and their look-up tables."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inshrink_core.ops.quantize import histogram16
from inshrink_core.quantization.codebook import (
    KeyHistogram,
    assignment_table,
    fit_exact,
    key_histogram,
    key_values,
    round_centroids,
    squared_error,
)
from inshrink_core.quantization.published import fit_published


def histogram_of(tensor):
    return key_histogram(histogram16(tensor).numpy(), str(tensor.dtype).removeprefix("torch."))


def error_of(histogram, centroids):
    distance = np.abs(histogram.values[:, None] - np.asarray(centroids, np.float64)[None])
    return float((histogram.counts * distance.min(axis=1) ** 2).sum())


def least_error(values, counts, k):
    """Least squared error over every way to cut the sorted values into k runs."""
    best = np.inf
    for cuts in itertools.combinations(range(1, len(values)), k - 1):
        total = 0.0
        for first, last in itertools.pairwise((0, *cuts, len(values))):
            x, w = values[first:last], counts[first:last]
            total += float((w * (x - (w * x).sum() / w.sum()) ** 2).sum())
        best = min(best, total)
    return best


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_exact_fit_equals_the_best_of_all_partitions(data):
    values = np.array(sorted(data.draw(st.sets(st.integers(-50, 50), min_size=1, max_size=9))), np.float64)
    counts = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(values), max_size=len(values))))
    k = data.draw(st.integers(1, len(values)))
    histogram = KeyHistogram(values, counts)
    assert error_of(histogram, fit_exact(histogram, k)) == pytest.approx(
        least_error(values, counts, k), abs=1e-9
    )


def test_exact_fit_keeps_few_distinct_values_as_they_are():
    x = torch.tensor([0.5, -2.0, 0.5, 0.0, -0.0], dtype=torch.bfloat16)
    assert fit_exact(histogram_of(x), 16).tolist() == [-2.0, 0.0, 0.5]


def test_exact_fit_of_nothing_is_empty():
    assert len(fit_exact(key_histogram(np.zeros(65536, np.int64), "float32"), 16)) == 0


def test_exact_fit_is_precise_for_values_far_from_zero():
    from sklearn.cluster import KMeans  # takes seconds to import

    x = 1000 + torch.arange(64, dtype=torch.float32) * 8
    histogram = histogram_of(x)
    model = KMeans(4, n_init=5, random_state=0).fit(histogram.values[:, None])
    assert error_of(histogram, fit_exact(histogram, 4)) <= model.inertia_ * (1 + 1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounded_centroids_are_finite_ascending_numbers_of_the_dtype(dtype):
    extreme = float(torch.finfo(getattr(torch, dtype)).max)
    raw = np.array([-extreme * 1.0001, -1.0, -1e-9, 1e-9, 1.0, 1.0 + 1e-12, extreme * 1.0001])
    rounded = round_centroids(raw, dtype)
    assert np.isfinite(rounded).all()
    assert (np.diff(rounded) > 0).all()
    tensor = torch.from_numpy(rounded)
    assert torch.equal(tensor.to(getattr(torch, dtype)).float(), tensor)


def test_assignment_takes_the_nearest_centroid_of_every_key():
    centroids = np.array([-1.5, -0.1, 0.0, 0.3, 2.0], np.float32)
    table = assignment_table(centroids, "float32", first_symbol=2, prune_below=0, protect_from=1 << 15)
    values = key_values("float32")
    finite = np.isfinite(values)
    nearest = np.abs(values[finite, None] - centroids.astype(np.float64)[None]).min(axis=1)
    chosen = np.abs(values[finite] - centroids[table[finite] - 2].astype(np.float64))
    np.testing.assert_array_equal(chosen, nearest)


def test_assignment_cuts_by_magnitude_on_both_sides_of_zero():
    table = assignment_table(
        np.array([0.0], np.float32), "float32", first_symbol=2, prune_below=0x3F80, protect_from=0x4000
    )
    for sign in (0, 0x8000):
        assert table[sign | 0x3F7F] == 0
        assert table[sign | 0x3F80] == 2
        assert table[sign | 0x3FFF] == 2
        assert table[sign | 0x4000] == 1


def test_squared_error_is_that_of_the_nearest_centroids():
    histogram = histogram_of(torch.randn(3_000, generator=torch.Generator().manual_seed(2)))
    centroids = np.array([-1.0, 0.25, 0.5, 3.0], np.float32)
    assert squared_error(histogram, centroids) == pytest.approx(error_of(histogram, centroids), rel=1e-12)
    assert squared_error(histogram, centroids[:0]) == pytest.approx(
        float((histogram.counts * histogram.values**2).sum()), rel=1e-12
    )


@pytest.fixture(name="histogram")
def _histogram():
    x = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.05
    return key_histogram(histogram16(x).numpy(), "float32")


def test_fit_gives_large_values_more_centroids_than_least_squares_would(histogram):
    by_magnitude = fit_published(histogram, 16, sigma=0.0)
    by_count = fit_published(histogram, 16, sigma=1.0)
    assert np.abs(by_magnitude).mean() > np.abs(by_count).mean()


@pytest.mark.parametrize("k", [1, 2, 254])
def test_fit_is_ascending_and_has_at_most_the_centroids_asked(histogram, k):
    centroids = fit_published(histogram, k)
    assert 1 <= len(centroids) <= k
    assert (np.diff(centroids) > 0).all()
