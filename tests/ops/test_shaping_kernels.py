"""Shaped rounding is the same bits by every back end, and lies where it should."""

import numpy as np
import pytest
import torch

from inshrink_core.codecs.shaping import signs_of
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.shaping import MAX_SUM, RANK, shape_changes, sketch_sides
from tests.ops.shaping_checks import LATTICE, NEAREST, factors_of, uneven
from tests.strategies import normal


def cost_of(changes, values, matrix):
    error = (changes / 4 - values).view(-1, matrix.shape[0]).double()
    return float(((error @ matrix) * error).sum())


@pytest.mark.parametrize("n", [24, 96])
def test_errors_lie_where_they_cost_less_by_about_what_is_foretold(n):
    matrix, values = uneven(n), 50 * normal((300 * n,), 5)
    factors = factors_of(matrix)
    zeros = torch.zeros(values.numel(), dtype=torch.int32)
    shaped = shape_changes(values, None, zeros, LATTICE, NEAREST, factors)[0]
    share = cost_of(shaped, values, matrix) / cost_of((values * 4).round(), values, matrix)
    assert share < 0.8
    assert abs(share / factors.share - 1) < 0.15


def test_errors_fed_both_ways_cost_the_product_of_both_shares():
    inputs, outputs, values = uneven(48), uneven(64), 50 * normal((64 * 48,), 5)
    sides = factors_of(inputs), factors_of(outputs)
    zeros = torch.zeros(values.numel(), dtype=torch.int32)
    shaped = shape_changes(values, None, zeros, LATTICE, NEAREST, *sides)[0]

    def cost(changes):
        error = (changes / 4 - values).view(64, 48).double()
        return float(torch.trace(outputs @ error @ inputs @ error.T))

    share = cost(shaped) / cost((values * 4).round())
    assert abs(share / (sides[0].share * sides[1].share) - 1) < 0.3


def test_a_white_matrix_is_said_to_gain_nothing():
    assert factors_of(torch.eye(20, dtype=torch.float64)).share > 0.99


def test_sums_of_factors_stay_within_their_bound():
    factors = factors_of(uneven(200) * 1e-12)
    assert int(np.abs(factors.directions.astype(np.int64)).sum(0).max()) <= MAX_SUM
    assert factors.gains.shape == factors.directions.shape == (200, RANK)


def test_a_matrix_of_one_direction_or_of_none_has_factors():
    line = normal((12, 1), 6).double()
    assert factors_of(line @ line.T).share < 0.8
    assert not factors_of(torch.zeros(12, 12, dtype=torch.float64)).gains.any()


def test_the_error_of_what_is_stored_exactly_is_not_fed_forward():
    matrix, values = uneven(16), 50 * normal((16,), 7)
    odd = values.clone()
    odd[0] = float("nan")
    zeros = torch.zeros(16, dtype=torch.int32)
    values[0] = 0.0  # its error is none, too
    plain, damaged = (
        shape_changes(v, None, zeros, LATTICE, NEAREST, factors_of(matrix))[0] for v in (values, odd)
    )
    assert torch.equal(plain[1:], damaged[1:])


def as_large_as_can_be(rows, columns):
    """A matrix whose products with signs reach their bounds, 2**11 times as many as there are."""
    of_rows, of_columns = (torch.from_numpy(signs_of(n)[:, :1]).float().sign() for n in (rows, columns))
    return 1024 * torch.where(of_rows < 0, -1, 1) * torch.where(of_columns < 0, -1, 1).T


@pytest.mark.parametrize(
    "values",
    [
        *(
            (300 * normal(shape, 8) * normal((shape[0], 1), 9)).clamp(-1023, 1023)
            for shape in [(64, 64), (17, 100), (300, 9), (8, 40)]
        ),
        *(as_large_as_can_be(*shape) for shape in [(24, 1 << 14), (1 << 14, 40)]),
    ],
    ids=lambda values: "x".join(map(str, values.shape)),
)
def test_numba_sketches_as_the_reference_does(values):
    shape = values.shape
    for row_signs in (signs_of(shape[0]), None):
        arguments = (values, 1, signs_of(shape[1]), row_signs)
        columns, rows, square = sketch_sides(*arguments)
        with force_backend(Backend.REFERENCE):
            expected = sketch_sides(*arguments)
        assert np.array_equal(columns, expected[0])
        assert square == expected[2] > 0
        assert (rows is None) == (row_signs is None)
        assert row_signs is None or np.array_equal(rows, expected[1])
