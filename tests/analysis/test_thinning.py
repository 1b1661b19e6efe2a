"""Curves of very many values keep what shows."""

import math

import numpy as np
import pytest

from inshrink_core.analysis.thinning import thinned


def test_few_values_stay_as_they_are():
    series = [(step, float(step % 7)) for step in range(200)]
    assert thinned(series, 100) == series


def test_every_peak_of_a_long_curve_stays():
    values = np.zeros(200_000)
    values[[17, 100_001, 199_998]] = (5.0, -7.0, 9.0)
    found = thinned(list(enumerate(values.tolist())), 1_000)
    assert len(found) <= 2 * 1_000 + 2
    assert {(17, 5.0), (100_001, -7.0), (199_998, 9.0), (0, 0.0), (199_999, 0.0)} <= set(found)
    assert found == sorted(found)


def test_a_gap_stays_a_gap_and_infinity_hides_nothing():
    series = [(step, math.nan if 400 <= step < 600 else 1.0) for step in range(1_000)]
    series[100], series[900] = (100, math.inf), (900, 3.0)
    found = dict(thinned(series, 10))
    assert any(math.isnan(value) for step, value in found.items() if 400 <= step < 600)
    assert found[100] == math.inf
    assert found[900] == 3.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e308])
def test_curves_of_one_value_or_one_step_are_thinned_too(value):
    assert 1 <= len(thinned([(step, value) for step in range(50)], 5)) <= 20
    assert {step for step, _ in thinned([(3, value)] * 50, 5)} == {3}
