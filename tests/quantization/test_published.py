"""The published sketch and fit."""

import numpy as np
import pytest
import torch

from inshrink_core.ops.quantize import histogram16
from inshrink_core.quantization.codebook import KeyHistogram, key_histogram
from inshrink_core.quantization.published import fit_published, log_sketch


@pytest.fixture(name="histogram")
def _histogram():
    x = torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.05
    return key_histogram(histogram16(x).numpy(), "float32")


@pytest.mark.parametrize("alpha", [0.01, 0.05])
def test_sketch_keeps_values_within_its_relative_error(histogram, alpha):
    sketch = log_sketch(histogram, alpha)
    nearest = np.abs(sketch.values[None] - histogram.values[:, None]).min(axis=1)
    assert (nearest <= alpha * np.abs(histogram.values) * (1 + 1e-9)).all()
    assert sketch.counts.sum() == histogram.counts.sum()
    assert len(sketch.values) < len(histogram.values)


def test_sketch_mirrors_signs_about_a_zero_bucket():
    sketch = log_sketch(KeyHistogram(np.array([-2.0, 0.0, 2.0]), np.array([1, 5, 1])), 0.01)
    assert sketch.values[0] == -sketch.values[2]
    assert sketch.values[1] == 0.0
    assert sketch.counts.tolist() == [1, 5, 1]


def test_sketch_takes_the_smallest_and_largest_floats():
    values = np.array([2.0**-149, float(np.finfo(np.float32).max)])
    sketch = log_sketch(KeyHistogram(values, np.array([1, 1])), 0.01)
    np.testing.assert_allclose(sketch.values, values, rtol=0.0101)


def test_fit_depends_on_its_seed_and_on_nothing_else(histogram):
    first = fit_published(histogram, 12, seed=1)
    np.testing.assert_array_equal(first, fit_published(histogram, 12, seed=1))
    assert not np.array_equal(first, fit_published(histogram, 12, seed=2))


def test_fit_gives_large_values_more_centroids_than_least_squares_would(histogram):
    by_magnitude = fit_published(histogram, 16, sigma=0.0)
    by_count = fit_published(histogram, 16, sigma=1.0)
    assert np.abs(by_magnitude).mean() > np.abs(by_count).mean()


def test_fit_of_nothing_is_empty():
    assert len(fit_published(KeyHistogram(np.empty(0), np.empty(0, np.int64)), 4)) == 0


def test_fit_of_zeros_alone_is_zero():
    assert fit_published(KeyHistogram(np.array([0.0]), np.array([7])), 4).tolist() == [0.0]


@pytest.mark.parametrize("k", [1, 2, 254])
def test_fit_is_ascending_and_has_at_most_the_centroids_asked(histogram, k):
    centroids = fit_published(histogram, k)
    assert 1 <= len(centroids) <= k
    assert (np.diff(centroids) > 0).all()
