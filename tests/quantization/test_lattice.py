"""Steps of a lattice: chosen from exact means, held by octaves, within what kernels can take."""

import math

import numpy as np
import pytest
import torch

from inshrink_core.codecs.lattice.step_size import (
    StepSize,
    exact_mean,
    lattice_of,
    new_step_size,
)
from inshrink_core.ops.sample import sample_sums
from tests.strategies import normal


def test_a_mean_is_exact_and_does_not_depend_on_the_order():
    moments = torch.cat((normal((3000,), 1).abs(), torch.tensor([1e-42, 1e30, 0.0])))
    expected = math.fsum(moments.double().tolist()) / moments.numel()
    assert mean_of(moments) == pytest.approx(expected, rel=1e-15)
    assert mean_of(moments.flip(0)) == mean_of(moments)
    assert mean_of(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_mean_of_what_is_not_finite_is_nan(bad):
    assert math.isnan(mean_of(torch.tensor([1.0, bad])))


def mean_of(moments):
    return exact_mean(sample_sums(moments, None, moments)[2], moments.numel())


def test_numbers_beyond_any_unit_have_no_step():
    for width, rms in ((0.0, 1.0), (1e-37, 1.0), (1e37, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, 1e-37)):
        assert new_step_size(width, rms) is None


def test_a_grid_keeps_float16_finite():
    lattice = lattice_of(StepSize(-4, 16), "float16")
    assert math.isfinite(float(np.float16(lattice.bound * lattice.unit)))
    assert lattice_of(StepSize(-4, 16), "bfloat16").bound == 2**24 - 1
