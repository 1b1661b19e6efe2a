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


@pytest.mark.parametrize("means", [[[1.0, 1.9], [1.0, 0.51]], [[1.0, 64.0, math.nan], [1.0, 1.0, 1.0]]])
def test_less_than_a_factor_of_two_is_no_change_nor_is_a_row_that_is_gone(means):
    assert told(means).stretch is None


def test_long_names_are_shortened():
    long = "transformer." * 40 + "weight"
    found = findings("fisher", "tensor", [long], [1], (1,), np.ones((1, 1)))
    assert len(found.sentence()) < 140


FELL = [[1, 1, 1], [16, 4, 1], [4, 2, 1], [1, 1, 9]]


@pytest.mark.parametrize(
    ("metric", "by", "means", "sentence"),
    [
        ("fisher", "tensor", [[1], [30], [9], [60]], "carry at least 80 % of the sensitivity: d and b."),
        ("fisher", "tensor", [[1, 16]], "times more sensitive since step 100: a weight needs 2 bits more."),
        ("fisher", "block", FELL, "2 blocks, b to c, have become 8 times less sensitive since step 100: a"),
        ("fisher", "block", [[1, 128]] * 2, "All 2 blocks have become 130 times more sensitive since"),
        ("fisher", "tensor", [[1e-38, 1e38]], "become more than 10,000 times more sensitive since step 100"),
        ("fisher", "tensor", [[math.nan, 1, 100]], "has become 100 times more sensitive since step 400"),
        ("taylor", "tensor", [[8, 1]], "It has become 8 times less sensitive since step 100."),
        ("magnitude", "tensor", [[8, 1]], "80 % of the magnitude: a. It has become 8 times smaller since"),
        ("update", "tensor", [[math.nan, 24, 5]], "It has slowed down 8 times since step 400."),
    ],
)
def test_what_is_said_names_the_rows_and_calls_each_metric_by_its_name(metric, by, means, sentence):
    assert sentence in told(means, metric, by).sentence()
