"""The ratio of a codec at an excess that none of its settings hits exactly."""

import pytest

from benchmarks.published import frontier, ratio_at_excess


def test_a_point_that_another_beats_in_both_is_not_on_the_frontier():
    points = [(0.02, 30.0), (0.01, 20.0), (0.03, 25.0), (0.01, 15.0)]
    assert frontier(points) == [(0.01, 20.0), (0.02, 30.0)]


def test_an_excess_may_be_negative_and_nothing_is_extrapolated():
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.001) == pytest.approx(20.0)
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.004) is None
