"""What a table of sensitivities says in words: who carries it, and what has changed."""

import math

import numpy as np
import pytest

from inshrink_core.analysis.findings import findings

STEPS = (100, 400, 900)


def told(means, metric="fisher", by="tensor", sizes=None):
    """Return the findings of rows called a, b, c, … of one parameter each, at as many of `STEPS`."""
    values = np.array(means, np.float32).reshape(len(means), -1)
    names = [chr(ord("a") + place) for place in range(len(means))]
    steps = STEPS[: values.shape[1]]
    return findings(metric, by, names, sizes or [1] * len(means), steps, values)


def test_the_fewest_rows_that_carry_four_fifths_are_named_the_largest_first():
    found = told([[1.0], [30.0], [9.0], [60.0]])
    assert found.few == (3, 1)
    assert found.sentence() == "2 of 4 tensors carry at least 80 % of the sensitivity: d and b."


@pytest.mark.parametrize(
    ("means", "sizes", "few", "n_rows"),
    [
        ([10.0, 1.0], [1, 100], (1,), 2),  # a row carries its mean times its size
        ([1.0] * 5, None, (0, 1, 2, 3), 5),  # of equals, the earlier counts first
        ([0.1] * 10, None, tuple(range(8)), 10),  # rounding asks for no row more
        ([math.nan, 1.0, 1.0], None, (1, 2), 2),
        ([math.inf, 1.0, 1.0], None, (1, 2), 2),
    ],
)
def test_rows_carry_what_is_finite_times_their_size(means, sizes, few, n_rows):
    found = told([[mean] for mean in means], sizes=sizes)
    assert (found.few, found.n_rows) == (few, n_rows)


@pytest.mark.parametrize("nothing", [math.nan, 0.0])
def test_a_run_without_sensitivities_has_nothing_to_say(nothing):
    found = told([[nothing, nothing], [nothing, nothing]])
    assert (found.few, found.stretch, found.sentence()) == ((), None, "")


def test_values_of_any_size_are_compared():
    found = told([[1e-38, 1e38], [1e-38, 1e-38]])
    assert found.few == (0,)
    assert "It has become more than 10,000 times more sensitive since step 100." in found.sentence()


def test_one_row_is_all_and_one_step_tells_of_no_change():
    found = told([[3.0]])
    assert (found.few, found.stretch) == ((0,), None)
    assert found.sentence() == "1 of 1 tensor carries at least 80 % of the sensitivity: a."


def test_neighbouring_rows_that_fell_together_are_one_stretch_with_what_it_is_worth():
    found = told([[1.0, 1.0, 1.0], [16.0, 4.0, 1.0], [4.0, 2.0, 1.0], [1.0, 1.0, 9.0]], by="block")
    assert (found.stretch.first, found.stretch.last, found.stretch.step) == (1, 2, 100)
    assert found.stretch.factor == pytest.approx(1 / 8)
    assert found.stretch.bits == pytest.approx(-1.5)
    assert found.sentence().endswith(
        "2 blocks, b to c, have become 8 times less sensitive since step 100: a weight needs 1.5 bits fewer."
    )


def test_a_row_that_comes_later_is_compared_with_its_own_first_value():
    found = told([[math.nan, 1.0, 100.0], [1.0, 1.0, 1.0]])
    assert (found.stretch.step, found.stretch.factor) == (400, pytest.approx(100.0))


@pytest.mark.parametrize("means", [[[1.0, 1.9], [1.0, 0.51]], [[1.0, 64.0, math.nan], [1.0, 1.0, 1.0]]])
def test_less_than_a_factor_of_two_is_no_change_nor_is_a_row_that_is_gone(means):
    assert told(means).stretch is None


def test_all_rows_are_called_all():
    assert "All 2 blocks have become 128 times more sensitive" not in told([[1.0, 1.0]] * 2).sentence()
    assert (
        "All 2 blocks have become 130 times more sensitive since step 100"
        in told([[1.0, 128.0]] * 2, by="block").sentence()
    )


@pytest.mark.parametrize(
    ("metric", "carried", "fell", "grew"),
    [
        ("taylor", "sensitivity", "become 8 times less sensitive", "become 8 times more sensitive"),
        ("magnitude", "magnitude", "become 8 times smaller", "become 8 times larger"),
    ],
)
def test_what_says_nothing_of_the_loss_is_not_called_sensitivity(metric, carried, fell, grew):
    falling, growing = (told([item], metric).sentence() for item in ([8.0, 1.0], [1.0, 8.0]))
    assert (
        falling == f"1 of 1 tensor carries at least 80 % of the {carried}: a. It has {fell} since step 100."
    )
    assert (
        growing == f"1 of 1 tensor carries at least 80 % of the {carried}: a. It has {grew} since step 100."
    )


def test_movement_is_told_as_a_speed():
    moved = np.array([[np.nan, 8.0, 8.0, 4.0]])  # over 10, 10 and 40 steps of training
    told = findings("update", "tensor", ["a"], [1], (10, 20, 30, 70), moved).sentence()
    assert told.endswith("It has slowed down 8 times since step 20.")


def test_only_curvature_says_what_a_bit_is_worth():
    assert "a weight needs 2 bits more" in told([[1.0, 16.0]]).sentence()
    assert "bits" not in told([[1.0, 16.0]], metric="update").sentence()


def test_long_names_are_shortened():
    long = "transformer." * 40 + "weight"
    found = findings("fisher", "tensor", [long], [1], (1,), np.ones((1, 1)))
    assert len(found.sentence()) < 140
