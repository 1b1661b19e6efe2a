"""Bounds: what keeps them, and how clearly."""

import math

import numpy as np
import pytest

from inshrink_core.errors import InputError
from inshrink_core.evaluate import figures_of
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE, Bounds, Figures
from tests.builders import evaluation

HALVES = np.log(np.full((4, 2), 0.5))


BOTH = {"max_drop": 0.01, "max_divergence": 0.003}


@pytest.mark.parametrize(
    ("limits", "figures", "usage", "side"),
    [
        # What equals a limit is within it; the usage is the largest share of any limit.
        (BOTH, {"drop": 0.01, "divergence": 0.003}, 1.0, "inside"),
        (BOTH, {"drop": 0.0101, "divergence": 0.001}, 1.01, "outside"),
        (BOTH, {"drop": -1.0, "divergence": 0.0031}, 0.0031 / 0.003, "outside"),
        (BOTH, {"drop": 0.005, "divergence": 0.0006}, 0.5, "inside"),
        (BOTH, {"drop": -0.5, "divergence": 0.0}, 0.0, "inside"),
        ({"max_drop": 0.0}, {"drop": 1e-9}, math.inf, "outside"),
        ({"max_drop": 1e9}, {"failure": "its 'loss' is nan"}, math.inf, "outside"),
        # Noise says how clear a side is and never changes it.
        ({"max_drop": 0.01}, {"drop": 0.009, "drop_error": 0.001}, 0.9, "inside, within noise"),
        ({"max_drop": 0.01}, {"drop": 0.012, "drop_error": 0.0015}, 1.2, "outside, within noise"),
        ({"max_drop": 0.01}, {"drop": 0.02, "drop_error": 0.001}, 2.0, "outside"),
    ],
)
def test_a_verdict_has_the_side_of_the_bounds_and_how_much_of_them_is_used(limits, figures, usage, side):
    check = Bounds(**limits).check(Figures(**figures))
    assert check.usage == pytest.approx(usage)
    assert check.side == side
    assert check.within == side.startswith("inside")


def test_a_divergence_bound_stands_beside_a_drop_bound_where_there_are_log_probs():
    assert (
        Bounds(max_drop=0.01).completed(evaluation(1.0, log_probs=HALVES)).max_divergence
        == DEFAULT_MAX_DIVERGENCE
    )
    assert Bounds(max_drop=0.01).completed(evaluation(1.0)).max_divergence is None
    assert Bounds(max_drop=0.01).completed(evaluation(1.0, predictions=HALVES)).max_divergence is None
    free = Bounds(max_drop=0.01, max_divergence=math.inf).completed(evaluation(1.0, log_probs=HALVES))
    assert free.check(Figures(drop=0.0, divergence=9.0)).within
    assert free.to_json() == {"drop": 0.01, "divergence": None}


def test_a_divergence_bound_that_cannot_be_checked_is_refused():
    with pytest.raises(InputError, match="must return 'log_probs'"):
        Bounds(max_divergence=0.01).completed(evaluation(1.0))
    assert Bounds(max_divergence=0.01).completed(evaluation(1.0, predictions=HALVES)).max_divergence == 0.01


def test_the_drop_of_a_metric_of_zero_cannot_be_bounded():
    figures = figures_of(evaluation(0.0), evaluation(0.5))
    with pytest.raises(InputError, match="metric of zero"):
        Bounds(max_drop=0.01).check(figures)


@pytest.mark.parametrize("limit", [-0.1, math.nan, True, "1"])
def test_a_limit_that_bounds_nothing_is_refused(limit):
    with pytest.raises(InputError, match="--max-drop is not a bound"):
        Bounds(max_drop=limit)


def test_the_error_of_a_drop_comes_from_both_metrics():
    figures = figures_of(evaluation(2.0, error=0.03), evaluation(2.1, error=0.04))
    assert figures.drop == pytest.approx(0.05)
    assert figures.drop_error == pytest.approx(0.05 / 2)
    assert figures_of(evaluation(2.0, error=0.03), evaluation(2.1)).drop_error is None
