"""Thresholds keep the promised fractions."""

import numpy as np
import pytest
import torch

from inshrink_core.ops.quantize import histogram16, sensitivity_histogram
from inshrink_core.quantization.partition import NO_UPPER, KeyCounts, thresholds

EMPTY = KeyCounts.from_dense(np.zeros(NO_UPPER, np.int64))


def normal_counts(seed, n=100_000):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    return KeyCounts.from_dense(histogram16(x).view(2, -1).sum(0).numpy())


def below(histogram, key):
    return float(histogram.counts[histogram.keys < key].sum() / histogram.counts.sum())


@pytest.mark.parametrize("fraction", [0.0, 0.0005, 0.005, 0.1, 0.25, 0.5, 0.95])
def test_fractions_hold_within_one_key(fraction):
    histogram = normal_counts(0)
    cut = thresholds(histogram, EMPTY, prune=fraction, protect=fraction, by_sensitivity=False)
    largest_bin = float(histogram.counts.max() / histogram.counts.sum())
    assert fraction - largest_bin <= below(histogram, cut.prune_magnitude) <= fraction
    assert fraction - largest_bin <= 1 - below(histogram, cut.protect_magnitude) <= fraction + 1e-12


def test_values_that_share_a_key_are_never_parted():
    same = KeyCounts(np.array([0x3F80]), np.array([1000]))
    cut = thresholds(same, EMPTY, prune=0.5, protect=0.4, by_sensitivity=False)
    assert cut.prune_magnitude == 0
    assert cut.protect_magnitude == NO_UPPER


def test_sensitivity_cuts_only_where_gradients_are_known():
    cut = thresholds(normal_counts(1), EMPTY, prune=0.3, protect=0.1, by_sensitivity=True)
    assert cut.prune_sensitivity == 0
    assert cut.protect_sensitivity == NO_UPPER
    assert cut.prune_magnitude > 0


def test_an_empty_group_cuts_nothing():
    assert thresholds(EMPTY, EMPTY, prune=0.5, protect=0.5, by_sensitivity=True) == (0, NO_UPPER, 0, NO_UPPER)


def test_a_gradient_of_nan_protects_nothing_when_it_fills_more_than_the_fraction():
    x = torch.randn(100)
    counts = KeyCounts.from_dense(sensitivity_histogram(x, torch.full((100,), float("nan"))).numpy())
    assert (
        thresholds(counts, counts, prune=0.0, protect=0.1, by_sensitivity=False).protect_sensitivity
        == NO_UPPER
    )
