"""The order of measurements, on a codec whose figures are known beforehand."""

import pytest

from inshrink_core.codecs.variants import Variant
from inshrink_lab.bench.benchmark import sweep
from inshrink_lab.bench.report import Bound, Point

BINS = Variant("inshrinkerator")


class Model:
    """A codec of ratio 1000 / bins and divergence 1 / bins², unless said otherwise."""

    def __init__(self, divergence=lambda bins: bins**-2, ratio=lambda bins: 1000 / bins):
        self.divergence, self.ratio, self.asked = divergence, ratio, []

    def __call__(self, bins):
        self.asked.append(bins)
        return Point(
            codec="c",
            metric="loss",
            direction="lower",
            tunable=bins,
            ratio_weights=self.ratio(bins) if bins else 2.0,
            mean_divergence=self.divergence(bins) if bins else 0.0,
        )


def bounds(*limits):
    return tuple(Bound("divergence", limit) for limit in limits)


GRID = list(BINS.tunable.values)


@pytest.mark.parametrize(
    ("divergence", "limits", "expected"),
    [
        # Coarser values are not tried once two in a row keep no bound, but after one they are.
        (lambda bins: bins**-2, bounds(1 / 20**2), GRID[: GRID.index(12) + 1]),
        (lambda bins: 1.0 if bins == 64 else bins**-2, bounds(1 / 20**2), GRID[: GRID.index(12) + 1]),
        (lambda bins: 0.0, bounds(0.1), GRID),
        (lambda bins: 1.0, bounds(0.1), GRID[:2]),
    ],
)
def test_without_refining_the_grid_is_measured_as_far_as_a_bound_may_be_kept(divergence, limits, expected):
    model = Model(divergence)
    sweep(BINS, limits, model, refine=0)
    assert model.asked == expected


@pytest.mark.parametrize("limits", [bounds(1 / 20**2), bounds(1 / 40**2, 1 / 10**2)])
def test_refining_finds_the_coarsest_whole_value_of_each_bound_and_measures_nothing_twice(limits):
    model = Model()
    points = sweep(BINS, limits, model, refine=5)
    for bound in limits:
        best = min(p.tunable for p in points if p.mean_divergence <= bound.limit)
        assert best == round(bound.limit**-0.5)
    assert len(model.asked) == len(set(model.asked))
    assert [point.tunable for point in points] == sorted(model.asked, reverse=True)


def test_a_continuous_tunable_is_refined_between_grid_values():
    model = Model(lambda c: c / 100, lambda c: 8 * c)
    points = sweep(Variant("lattice"), bounds(0.05), model, refine=3)
    assert 4.0 < max(p.tunable for p in points if p.mean_divergence <= 0.05) <= 5.0
    assert [p.tunable for p in points] == sorted(p.tunable for p in points)


def test_nothing_to_sweep_is_one_measurement():
    model = Model()
    assert len(sweep(Variant("lossless"), bounds(0.1), model, refine=3)) == 1
    assert model.asked == [None]
