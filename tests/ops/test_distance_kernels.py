"""The kernel adds the same squares in the same order as its norm."""

import math

import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.distance import distance_to_lattice, squared_distance
from tests.strategies import normal


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, 100_003])
def test_kernel_and_norm_return_the_same_sums(n):
    values, decoded = normal((n,), 1) * 1e3, normal((n,), 2)
    found = squared_distance(values, decoded)
    with force_backend(Backend.REFERENCE):
        assert squared_distance(values, decoded) == found
    away = (values - decoded).double()
    assert found.error == pytest.approx(math.fsum((away * away).tolist()), rel=1e-12)
    assert found.norm == pytest.approx(math.fsum(values.double().square().tolist()), rel=1e-12)


def test_what_is_not_finite_counts_for_nothing():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, largest, 3.0, 4.0])
    decoded = torch.tensor([0.5, 0.0, math.inf, 0.0, -largest, math.nan, 2.0])
    found = squared_distance(values, decoded)
    with force_backend(Backend.REFERENCE):
        assert squared_distance(values, decoded) == found
    assert found.error == 0.25 + 4.0
    assert found.norm == 1.0 + float(largest) ** 2 + 9.0 + 16.0


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, 100_003])
def test_the_distance_to_grid_points_is_that_to_their_values(n):
    values = normal((n,), 1)
    integers = (values * 2.0**7).round().to(torch.int32)
    found = distance_to_lattice(values, integers, 2.0**-7)
    assert found == squared_distance(values, integers.float() * 2.0**-7)
    with force_backend(Backend.REFERENCE):
        assert distance_to_lattice(values, integers, 2.0**-7) == found


def test_a_value_that_is_not_finite_is_no_distance_from_a_point():
    values = torch.tensor([math.nan, math.inf, 1.25])
    assert distance_to_lattice(values, torch.tensor([1, 2, 1], dtype=torch.int32), 1.0) == (0.0625, 1.5625)
