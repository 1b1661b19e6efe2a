"""Byte planes: the kernel equals the reference, and both are undone, for every word and transform."""

import pytest
import torch

from inshrink_core.ops import Backend, force_backend
from inshrink_core.ops.planes import Transform, merge_planes, split_planes
from tests.strategies import random_bits


@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
def test_planes_agree_between_back_ends_and_come_back(dtype, transform, n):
    words, reference = random_bits(dtype, (n,), 1), random_bits(dtype, (n,), 2)
    planes = split_planes(words, reference, transform)
    assert planes.shape == (words.element_size(), n)
    with force_backend(Backend.REFERENCE):
        assert torch.equal(split_planes(words, reference, transform), planes)
        plain = torch.empty_like(words)
        merge_planes(planes, reference, transform, plain)
    fast = torch.empty_like(words)
    merge_planes(planes, reference, transform, fast)
    assert torch.equal(plain, words)
    assert torch.equal(fast, words)


def test_ordered_integers_keep_the_order_of_floats():
    # One unit in the last place apart, on both sides of zero: deltas of 1, zigzag 2 (or 1 downwards).
    values = torch.tensor([-1.0, -1e-45, 0.0, 1e-45, 1.0, float("inf")])
    above = torch.nextafter(values, torch.tensor(float("inf")))
    planes = split_planes(above.view(torch.int32), values.view(torch.int32), Transform.ORDERED_DELTA)
    # -1e-45 to -0.0 is one unit as well; 0.0 stands two integers above -1e-45.
    assert planes[0].tolist() == [2, 2, 2, 2, 2, 0]
    assert not planes[1:].any()


def test_rotation_puts_the_sign_last():
    words = torch.tensor([-1.0]).view(torch.int32)
    assert split_planes(words, None, Transform.ROTATE)[:, 0].tolist() == [1, 0, 0, 0x7F]
