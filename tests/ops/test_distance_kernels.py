"""Squares are added up in sixteen running sums a slice."""

import math

import pytest
import torch

from inshrink_core.ops.cpu.distance import SLICE, squared_distance
from tests.strategies import normal


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 33, SLICE + 3])
def test_sums_are_those_of_running_sums_also_for_points_of_a_lattice(n):
    values, integers = normal((n,), 1) * 1e3, (normal((n,), 2) * 2.0**7).round().to(torch.int32)
    decoded = integers.float() * 2.0**-7
    found = squared_distance(values, integers, 2.0**-7)
    assert found == squared_distance(values, decoded)
    for total, terms in zip(found, (values - decoded, values), strict=True):
        expected = 0.0
        for part in terms.double().square().split(SLICE):
            padded = torch.nn.functional.pad(part, (0, -part.numel() % 16))
            expected += sum(padded.view(-1, 16).cumsum(0)[-1:].flatten().tolist())
        assert total == expected


def test_values_that_are_not_finite_count_for_nothing():
    largest = torch.finfo(torch.float32).max
    values = torch.tensor([1.0, math.nan, math.inf, -math.inf, largest, 3.0, 4.0])
    decoded = torch.tensor([0.5, 0.0, math.inf, 0.0, -largest, math.nan, 2.0])
    error, norm = squared_distance(values, decoded)
    assert error == 0.25 + 4.0
    assert norm == 1.0 + float(largest) ** 2 + 9.0 + 16.0
