"""The figures of a rehearsal, by hand."""

import math

import pytest

from inshrink_lab.rehearsal import Rehearsal, half_width
from inshrink_lab.results import TrainingResult


def result(final, **sizes):
    return TrainingResult(
        seed=0, steps=(1, 2), metrics=(9.0, final), train_losses=(1.0, 1.0), seconds=1.0, **sizes
    )


def rehearsal(before, after, direction="lower"):
    return Rehearsal(
        task="t",
        metric="m",
        direction=direction,
        codec="c",
        config={},
        optimizer="exact",
        n_steps=2,
        n_saves=2,
        restored_at=(1,),
        uninterrupted=tuple(result(value) for value in before),
        restored=tuple(
            result(value, raw_weights=100, weights_nbytes=10 * (i + 1), raw_total=300, nbytes=100 * (i + 1))
            for i, value in enumerate(after)
        ),
    )


def test_excess_is_the_mean_of_paired_relative_changes_for_the_worse():
    found = rehearsal([2.0, 4.0], [2.02, 4.12])
    assert found.excesses == pytest.approx((0.01, 0.03))
    assert found.excess == pytest.approx(0.02)
    # t = 12.706 at one degree of freedom, sd = √2 · 0.01, n = 2
    assert found.excess_half_width == pytest.approx(12.706 * math.sqrt(2) * 0.01 / math.sqrt(2))
    assert found.noise == pytest.approx(math.sqrt(2) / 3)


def test_ratios_are_those_of_all_frames_together():
    found = rehearsal([1.0, 1.0], [1.0, 1.0])
    assert found.ratio_weights == pytest.approx(200 / 30)
    assert found.ratio_total == pytest.approx(600 / 300)


@pytest.mark.parametrize(
    ("before", "after", "direction", "excess"),
    [
        ([0.5, 0.5], [0.4, 0.4], "higher", pytest.approx(0.2)),
        ([1.0], [1.1], "lower", pytest.approx(0.1)),  # one seed has neither half width nor noise
        ([0.0, 1.0], [1.0, 1.0], "lower", None),
        ([1.0, 1.0], [math.nan, 1.0], "lower", None),
    ],
)
def test_an_excess_is_relative_for_the_worse_and_known_if_it_is_for_every_seed(
    before, after, direction, excess
):
    found = rehearsal(before, after, direction)
    assert found.excess == excess
    assert (found.excess_half_width is None) == (excess is None or len(before) == 1)
    assert (found.noise is None) == (len(before) == 1)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 31, 32, 60, 500])
def test_half_width_agrees_with_the_distribution_of_t(n):
    stats = pytest.importorskip("scipy.stats", reason="the oracle")
    values = [float(i % 7) for i in range(n)]
    mean = sum(values) / n
    sd = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    assert half_width(values) == pytest.approx(stats.t.ppf(0.975, n - 1) * sd / math.sqrt(n), rel=1e-3)


def test_the_document_has_the_figures_and_the_curves():
    document = rehearsal([2.0, 4.0], [2.02, 4.12]).to_json()
    assert document["uninterrupted"] == [2.0, 4.0]
    assert document["restored"] == [2.02, 4.12]
    assert document["curves"][1]["restored"] == [9.0, 4.12]
    assert {"excess", "excess_half_width", "noise", "ratio_weights", "ratio_total"} <= document.keys()
