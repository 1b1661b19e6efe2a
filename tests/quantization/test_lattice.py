"""Steps of a lattice: chosen from exact means, held by octaves, within what kernels can take."""

import math

import numpy as np
import pytest
import torch

from inshrink_core.codecs.lattice.step_size import (
    MAX_UNITS,
    StepSize,
    exact_mean,
    geometric_mean,
    lattice_of,
    new_step_size,
    sensitivity_factor,
    step_size_of,
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


@pytest.mark.parametrize("width", [1e-20, 3.3e-5, 0.7, 12345.0, 1e20])
def test_a_new_step_is_near_what_was_asked_and_can_be_halved_often(width):
    step_size = new_step_size(width, width * 10)
    assert step_size.width == pytest.approx(width, rel=0.004)
    assert step_size.units >= 256
    assert step_size.units & -step_size.units >= 2


def test_numbers_beyond_any_unit_have_no_step():
    for width, rms in ((0.0, 1.0), (1e-37, 1.0), (1e37, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, 1e-37)):
        assert new_step_size(width, rms) is None


def test_a_step_stays_in_its_range():
    assert step_size_of(1e-9, 0).units == 1
    assert step_size_of(1e30, 0).units == MAX_UNITS


def test_sensitive_tensors_have_finer_steps():
    means = [1.0, 1.0, 16.0, 1 / 16]
    middle = geometric_mean(means)
    assert middle == 1.0
    assert [sensitivity_factor(m, middle, 0.25) for m in means] == [1.0, 1.0, 0.5, 2.0]
    assert sensitivity_factor(0.0, middle, 0.25) == 1.0
    assert sensitivity_factor(3.0, middle, 0.0) == 1.0
    assert sensitivity_factor(1e-30, 1e-15, 0.25) == 10.0


def test_tensors_without_gradients_have_no_mean_and_all_the_same_step():
    assert geometric_mean([0.0, 4.0, 1.0]) == 2.0
    assert geometric_mean([0.0]) == 0.0
    assert sensitivity_factor(2.0, 0.0, 0.25) == 1.0


def test_a_grid_keeps_float16_finite():
    lattice = lattice_of(StepSize(-4, 16), "float16")
    assert math.isfinite(float(np.float16(lattice.bound * lattice.unit)))
    assert lattice_of(StepSize(-4, 16), "bfloat16").bound == 2**24 - 1
