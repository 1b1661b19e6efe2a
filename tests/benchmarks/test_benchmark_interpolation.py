import pytest

from benchmarks.interpolation import frontier, ratio_at, ratio_at_excess


def test_a_point_that_another_beats_in_both_is_not_on_the_frontier():
    points = [(0.02, 30.0), (0.01, 20.0), (0.03, 25.0), (0.01, 15.0)]
    assert frontier(points) == [(0.01, 20.0), (0.02, 30.0)]


def test_a_power_law_is_interpolated_exactly():
    points = [(d, 100 * d**0.25) for d in (0.001, 0.004, 0.05)]
    assert ratio_at(points, 0.01) == pytest.approx(100 * 0.01**0.25, abs=0.01)


def test_a_measured_divergence_gives_the_measured_ratio():
    points = [(0.01, 20.0), (0.04, 40.0)]
    assert ratio_at(points, 0.01) == 20.0
    assert ratio_at(points, 0.04) == 40.0
    assert ratio_at(points[:1], 0.01) == 20.0


@pytest.mark.parametrize("divergence", [0.009, 0.041])
def test_nothing_is_extrapolated(divergence):
    assert ratio_at([(0.01, 20.0), (0.04, 40.0)], divergence) is None


def test_a_lossless_point_cannot_stand_in_a_logarithm():
    assert ratio_at([(0.0, 1.4), (0.01, 20.0), (0.04, 40.0)], 0.005) is None


def test_an_excess_may_be_negative():
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.001) == pytest.approx(20.0)
    assert ratio_at_excess([(-0.001, 10.0), (0.003, 40.0)], 0.004) is None
