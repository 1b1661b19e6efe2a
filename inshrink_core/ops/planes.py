"""Words of a tensor as byte planes: the bytes of one significance together, after a delta or rotation."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from inshrink_core.ops.registry import op


class Transform(IntEnum):
    """What is done to a word of w bits before it is split into bytes; each has an inverse.

    `ZIGZAG` maps small signed integers to small unsigned ones. `ROTATE` moves a float's sign to the
    end, so that the exponent begins a byte in float32. The deltas subtract the reference modulo 2^w
    and apply zigzag; `ORDERED_DELTA` does so on order-preserving integers of floats.
    """

    NONE = 0
    ZIGZAG = 1
    ROTATE = 2
    DELTA = 3
    ORDERED_DELTA = 4


def _wrapped(words: Tensor, n_bits: int) -> Tensor:
    """Reduce int64 modulo 2^n_bits into the signed range, which torch's narrower types would do."""
    shift = 64 - n_bits
    return words << shift >> shift


def _logical_shift(words: Tensor, n: int, n_bits: int) -> Tensor:
    """Shift right with zeros: torch shifts the sign in."""
    if n == 0:
        return words
    return (words >> n) & ((1 << (n_bits - n)) - 1)


def _ordered(words: Tensor, n_bits: int) -> Tensor:
    """Map float bits to integers in the floats' order: of negative ones, flip all bits but the sign."""
    return torch.where(words < 0, words ^ ((1 << (n_bits - 1)) - 1), words)


def _zigzag(words: Tensor, n_bits: int) -> Tensor:
    """Sign in the lowest bit."""
    return _wrapped((words << 1) ^ (words >> (n_bits - 1)), n_bits)


def _undo_zigzag(words: Tensor, n_bits: int) -> Tensor:
    """Inverse of `_zigzag`."""
    return _logical_shift(words, 1, n_bits) ^ -(words & 1)


@op
def split_planes(words: Tensor, reference: Tensor | None, transform: Transform) -> Tensor:
    """Return the byte planes of transformed words, least significant first.

    Parameters
    ----------
    words
        (n,) of uint8, int16, int32 or int64: the bits of the values.
    reference
        Same shape and dtype; the deltas need it, the others ignore it.
    transform
        What to do before.

    Returns
    -------
    Tensor
        uint8, (bytes per word, n).
    """
    n_bits = 8 * words.element_size()
    x = _wrapped(words.to(torch.int64), n_bits)
    if transform == Transform.ZIGZAG:
        x = _zigzag(x, n_bits)
    elif transform == Transform.ROTATE:
        x = (x << 1) | _logical_shift(x, n_bits - 1, n_bits)
    elif reference is not None and transform >= Transform.DELTA:
        before = _wrapped(reference.to(torch.int64), n_bits)
        if transform == Transform.ORDERED_DELTA:
            x, before = _ordered(x, n_bits), _ordered(before, n_bits)
        x = _zigzag(_wrapped(x - before, n_bits), n_bits)
    return torch.stack([(x >> shift & 0xFF).to(torch.uint8) for shift in range(0, n_bits, 8)])


@op
def merge_planes(planes: Tensor, reference: Tensor | None, transform: Transform, out: Tensor) -> None:
    """Undo `split_planes` into `out`.

    Parameters
    ----------
    planes
        UInt8, (bytes per word, n).
    reference, transform
        As given to `split_planes`.
    out
        (n,), contiguous, of the words' dtype.
    """
    n_bits = 8 * planes.shape[0]
    x = torch.zeros(planes.shape[1], dtype=torch.int64, device=planes.device)
    for i in range(planes.shape[0]):
        x |= planes[i].to(torch.int64) << (8 * i)
    x = _wrapped(x, n_bits)
    if transform == Transform.ZIGZAG:
        x = _undo_zigzag(x, n_bits)
    elif transform == Transform.ROTATE:
        x = _logical_shift(x, 1, n_bits) | (x << (n_bits - 1))
    elif reference is not None and transform >= Transform.DELTA:
        before = _wrapped(reference.to(torch.int64), n_bits)
        if transform == Transform.ORDERED_DELTA:
            before = _ordered(before, n_bits)
        x = _wrapped(_undo_zigzag(x, n_bits) + before, n_bits)
        if transform == Transform.ORDERED_DELTA:
            x = _ordered(x, n_bits)
    out.copy_(_wrapped(x, n_bits).to(out.dtype))
