"""Bounds and what keeps them; the quadratic model: sensitivities, damage, factors from trials."""

import math

import numpy as np
import pytest
import torch

from inshrink_core.errors import InputError
from inshrink_core.evaluate import figures_of
from inshrink_core.search.bounds import DEFAULT_MAX_DIVERGENCE, Bounds, Figures
from inshrink_core.search.quadratic import calibrate, damage_of, sensitivities
from inshrink_core.search.trials import Trial
from tests.builders import evaluation, memory_checkpoint, seeded


def trial(step, damage, **figures):
    return Trial(step=step, config={}, raw_weights=1, weights_nbytes=1, damage=damage, **figures)


def test_sensitivity_is_the_mean_second_moment_of_a_weight():
    tensors = {
        "w": seeded((4, 4), 0),
        "w@exp_avg_sq": torch.full((4, 4), 3.0),
        "bn.running_mean": seeded((4,), 1),
        "b": seeded((4,), 2),
    }
    assert sensitivities(memory_checkpoint(1, tensors), None) == {"w": 3.0}


def test_movement_stands_for_second_moments_where_there_are_none():
    before = memory_checkpoint(1, {"w": torch.zeros(2, 3), "v": torch.zeros(2)})
    after = memory_checkpoint(2, {"w": torch.full((2, 3), 2.0), "v": torch.zeros(3)})
    assert sensitivities(after, before) == {"w": 4.0}
    assert sensitivities(after, None) == {}


def test_values_that_are_not_finite_tell_no_sensitivity():
    tensors = {"w": torch.ones(2), "w@exp_avg_sq": torch.tensor([math.nan, 5.0])}
    assert sensitivities(memory_checkpoint(1, tensors), None) == {"w": 5.0}


def test_damage_is_half_of_h_times_the_squared_error():
    assert damage_of({"a": 2.0, "b": 10.0}, {"a": 3.0}) == 3.0
    assert damage_of({"a": 2.0}, {}) is None


def test_factors_are_told_by_trials_of_the_same_step_and_used_at_the_nearest():
    trials = [trial(10, 1.0, drop=0.02, divergence=0.5), trial(10, 2.0, drop=0.04, divergence=1.0)]
    trials += [trial(90, 1.0, drop=-0.01, divergence=5.0)]
    fitted = calibrate(trials)
    assert fitted.predict("divergence", 10, 4.0) == pytest.approx(2.0)
    assert fitted.predict("divergence", 60, 1.0) == pytest.approx(5.0)
    assert fitted.predict("drop", 0, 1.0) == pytest.approx(0.02)
    assert fitted.predict("drop", 90, 1.0) == pytest.approx(-0.01)
    assert fitted.n_trials == 3


def test_a_prediction_is_what_was_measured_and_goes_from_one_measurement_to_the_next():
    fitted = calibrate([trial(10, 1.0, divergence=1.0), trial(10, 4.0, divergence=8.0)])
    assert [fitted.predict("divergence", 10, damage) for damage in (1.0, 4.0)] == [1.0, 8.0]
    assert fitted.predict("divergence", 10, 2.0) == pytest.approx(2.0 * 1.5)
    assert fitted.predict("divergence", 10, 0.5) == pytest.approx(0.5)
    assert fitted.predict("divergence", 10, 8.0) == pytest.approx(16.0)
    assert fitted.predict("divergence", 10, 0.0) == 0


def test_without_trials_nothing_is_predicted():
    fitted = calibrate([trial(10, None, drop=0.1), trial(10, 1.0, failure="nan")])
    assert fitted.predict("drop", 10, 1.0) is None


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
