"""Byte planes follow their formula and are undone, for every word and transform."""

import pytest
import torch

from inshrink_core.ops.cpu.planes import Transform, merge_planes, split_planes
from tests.strategies import random_bits


def zigzag(words):
    return (words << 1) ^ -(words < 0).to(words.dtype)


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
def test_planes_are_the_bytes_of_transformed_words_and_come_back(dtype, transform, n):
    words, reference = random_bits(dtype, (n,), 1), random_bits(dtype, (n,), 2)
    planes = split_planes(words, reference, transform)
    assert planes.shape == (words.element_size(), n)
    joined = planes.T.reshape(-1).view(words.dtype)
    signed = words.view(torch.int8) if dtype == "uint8" else words
    other = reference.view(torch.int8) if dtype == "uint8" else reference
    expected = {
        Transform.NONE: signed,
        Transform.ZIGZAG: zigzag(signed),
        Transform.ROTATE: (signed << 1) | (signed < 0).to(signed.dtype),
        Transform.DELTA: zigzag(signed - other),
    }.get(transform)
    assert expected is None or torch.equal(joined, expected.view(joined.dtype))
    found = torch.empty_like(words)
    merge_planes(planes, reference, transform, found)
    assert torch.equal(found, words)


def test_ordered_integers_keep_the_order_of_floats():
    # One unit in the last place apart, on both sides of zero: deltas of 1, zigzag 2 (or 1 downwards).
    values = torch.tensor([-1.0, -1e-45, 0.0, 1e-45, 1.0, float("inf")])
    above = torch.nextafter(values, torch.tensor(float("inf")))
    planes = split_planes(above.view(torch.int32), values.view(torch.int32), Transform.ORDERED_DELTA)
    # -1e-45 to -0.0 is one unit as well; 0.0 is two integers above -1e-45.
    assert planes[0].tolist() == [2, 2, 2, 2, 2, 0]
    assert not planes[1:].any()
