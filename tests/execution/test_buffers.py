"""Buffers are writable, their own, and of the size asked for, mapped or not."""

from __future__ import annotations

import pytest
import torch

from inshrink_core.execution import new_buffer


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 3])
def test_a_buffer_has_its_size_and_shares_nothing(nbytes: int) -> None:
    one, other = new_buffer(nbytes), new_buffer(nbytes)
    assert len(one) == len(other) == nbytes
    one[:] = b"\1" * nbytes
    other[:] = b"\2" * nbytes
    assert bytes(one) == b"\1" * nbytes


def test_a_tensor_keeps_the_buffer_it_was_made_from() -> None:
    buffer = new_buffer(1 << 20)
    buffer[:4] = b"\1\2\3\4"
    tensor = torch.frombuffer(buffer, dtype=torch.uint8)
    del buffer
    assert tensor[:4].tolist() == [1, 2, 3, 4]
