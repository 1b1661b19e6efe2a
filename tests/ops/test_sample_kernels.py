"""Sums over a sample: exact, the same on every back end, of the same elements for the same length."""

import numpy as np
import pytest
import torch

from inshrink_core.errors import InputError
from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.sample import sample, sample_sums
from tests.strategies import normal

NOWHERE = np.zeros(0, np.int64)


def test_a_sample_has_at_most_16384_elements_and_reaches_the_end():
    assert sample(torch.arange(16384)).numel() == 16384
    taken = sample(torch.arange(10_000_000))
    assert taken.numel() == 16384
    assert int(taken.max()) < 10_000_000
    assert int(taken.max()) > 9_900_000


@pytest.mark.parametrize("n", [0, 1, 3000, 16384, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", ["nothing", "integers", "second", "both"])
def test_back_ends_sum_the_same_mantissas(n, dtype, given):
    values = (normal((n,), 4) * 10.0 ** torch.arange(n).remainder(9).sub(4)).to(dtype)
    integers = torch.arange(n, dtype=torch.int32) - n // 2 if given in ("integers", "both") else None
    second = normal((n,), 5).square() if given in ("second", "both") else None
    places = np.arange(n)[::7]
    sums, probe = sample_sums(values, integers, second, 2.0**-9, places)
    with force_backend(Backend.REFERENCE):
        again = sample_sums(values.view(1, n), integers, second, 2.0**-9, places)
    assert np.array_equal(again.sums, sums)
    assert np.array_equal(again.probe, probe)
    assert np.array_equal(probe, values.float().numpy()[::7])
    assert sums[0, :255].any() == (n > 0)


def test_sums_are_exact_and_count_what_is_not_finite():
    second = normal((3000,), 4) * 10.0 ** torch.arange(-30, 30).repeat(50)
    second[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")])
    sums, _ = sample_sums(torch.zeros(3000), None, second, 1.0, NOWHERE)
    assert sums[:, 256].tolist() == [0, 0, 2]
    assert sum(int(s) * 2.0 ** (max(e, 1) - 150) for e, s in enumerate(sums[2, :255])) == pytest.approx(
        float(second[4:].double().abs().sum()), rel=1e-12
    )


def test_tensors_of_different_lengths_and_places_outside_are_an_input_error():
    with pytest.raises(InputError):
        sample_sums(torch.zeros(3), torch.zeros(2, dtype=torch.int32), None, 1.0, NOWHERE)
    for place in (-1, 3):
        with pytest.raises(InputError):
            sample_sums(torch.zeros(3), None, None, 1.0, np.array([place]))
