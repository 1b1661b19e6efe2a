"""The quadratic model: sensitivities, damage, factors from trials."""

import math

import pytest
import torch

from inshrink_core.search.quadratic import calibrate, damage_of, rank_correlation, sensitivities
from inshrink_core.search.trials import Trial
from tests.builders import memory_checkpoint, seeded


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
    assert fitted.rank_correlation == pytest.approx(1.0)
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
    assert fitted.rank_correlation is None


def test_rank_correlation_bears_ties_and_refuses_what_has_no_order():
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 9]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None
