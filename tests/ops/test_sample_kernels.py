"""Sums over a sample: exact, the same on every back end, of the same elements for the same length."""

import pytest
import torch

from inshrink_core.errors import InputError
from inshrink_core.ops.sample import sample, sample_sums
from tests.strategies import normal


def test_a_sample_has_at_most_16384_elements_and_reaches_the_end():
    assert sample(torch.arange(16384)).numel() == 16384
    taken = sample(torch.arange(10_000_000))
    assert taken.numel() == 16384
    assert int(taken.max()) < 10_000_000
    assert int(taken.max()) > 9_900_000


@pytest.mark.parametrize("n", [0, 1, 3000, 16384, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", ["nothing", "integers", "second", "both"])
def test_sums_are_those_of_mantissas_by_exponent(n, dtype, given):
    values = (normal((n,), 4) * 10.0 ** torch.arange(n).remainder(9).sub(4)).to(dtype)
    values[:2] = torch.inf
    integers = torch.arange(n, dtype=torch.int32) - n // 2 if given in ("integers", "both") else None
    second = normal((n,), 5).square() if given in ("second", "both") else None
    sums = sample_sums(values.view(1, n), integers, second, 2.0**-9)
    w = sample(values).float()
    away = torch.zeros(0) if integers is None else w - sample(integers).float() * 2.0**-9
    m = torch.zeros(0) if second is None else sample(second)
    for row, terms in zip(sums, (w * w, away * away, m), strict=True):
        bits = terms.view(torch.int32).long()
        exponent = bits >> 23
        mantissa = (bits & 0x7FFFFF) + torch.where(exponent > 0, 1 << 23, 0)
        expected = torch.zeros(257, dtype=torch.int64).scatter_add_(0, exponent, mantissa)
        expected[256] = (exponent == 255).sum()
        assert row.tolist() == expected.tolist()


def test_tensors_of_different_lengths_are_an_input_error():
    with pytest.raises(InputError):
        sample_sums(torch.zeros(3), torch.zeros(2, dtype=torch.int32))
