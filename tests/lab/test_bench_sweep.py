"""The order of measurements, on a codec whose figures are known beforehand."""

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
            knob=bins,
            ratio_weights=self.ratio(bins) if bins else 2.0,
            mean_divergence=self.divergence(bins) if bins else 0.0,
        )


def bound(limit):
    return (Bound("divergence", limit),)


def test_refining_finds_the_coarsest_whole_value_and_measures_nothing_twice():
    model = Model()
    points = sweep(BINS, bound(1 / 20**2), model, refine=4)
    assert min(p.knob for p in points if p.mean_divergence <= 1 / 20**2) == 20
    assert len(model.asked) == len(set(model.asked))
    assert [point.knob for point in points] == sorted(model.asked, reverse=True)


def test_without_refining_only_the_grid_is_measured():
    model = Model()
    sweep(BINS, bound(1 / 20**2), model, refine=0)
    assert set(model.asked) <= set(BINS.knob.values)


def test_coarser_values_are_not_tried_once_two_in_a_row_keep_no_bound():
    model = Model()
    sweep(BINS, bound(1 / 20**2), model, refine=0)
    assert model.asked[-3:] == [24, 16, 12]


def test_one_value_out_of_bounds_does_not_end_the_sweep():
    model = Model(lambda bins: 1.0 if bins == 64 else bins**-2)
    sweep(BINS, bound(1 / 20**2), model, refine=0)
    assert 24 in model.asked


def test_a_bound_that_the_coarsest_value_keeps_needs_no_refinement():
    model = Model(lambda bins: 0.0)
    sweep(BINS, bound(0.1), model, refine=3)
    assert model.asked == list(BINS.knob.values)


def test_a_bound_out_of_reach_ends_early():
    model = Model(lambda bins: 1.0)
    assert len(sweep(BINS, bound(0.1), model, refine=3)) == 2


def test_every_bound_is_refined_on_its_own():
    model = Model()
    points = sweep(BINS, (*bound(1 / 40**2), *bound(1 / 10**2)), model, refine=5)
    assert {40, 10} <= {point.knob for point in points}


def test_a_continuous_knob_is_refined_between_grid_values():
    lattice = Variant("lattice")
    model = Model(lambda c: c / 100, lambda c: 8 * c)
    points = sweep(lattice, bound(0.05), model, refine=3)
    best = max(p.knob for p in points if p.mean_divergence <= 0.05)
    assert 4.0 < best <= 5.0
    assert [p.knob for p in points] == sorted(p.knob for p in points)


def test_nothing_to_sweep_is_one_measurement():
    model = Model()
    assert len(sweep(Variant("lossless"), bound(0.1), model, refine=3)) == 1
    assert model.asked == [None]
