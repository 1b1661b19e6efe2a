"""Byte planes: bytes of equal significance together, after a delta or a rotation of the words.

Let x be the bits of a word of w bits, r the reference or 0, and ``o(x) = x``; for `ORDERED_DELTA` o flips all
bits but the sign if the sign is set. With ``d = o(x) - o(r)`` modulo 2^w, the transformed word is
``(d << s) ^ (-(d >> (w - 1)) & t)``. Zigzag has s = 1 and t all ones, rotation has s = 1 and t = 1, and d
itself has s = t = 0. One loop covers all cases, because numba compiles each further loop as slowly as the
first. A block stays in the first-level cache between the transform and the split, and both loops vectorize.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import UInt8s, kernel, unsigned


class Transform(IntEnum):
    """Invertible transform of a word of w bits before it is split into bytes.

    `ZIGZAG` maps small signed integers to small unsigned ones. `ROTATE` moves a float's sign to the lowest
    bit, so that in float32 the exponent fills a byte. The deltas subtract the reference modulo 2^w and apply
    zigzag; `ORDERED_DELTA` does so on order-preserving integers of floats.
    """

    NONE = 0
    ZIGZAG = 1
    ROTATE = 2
    DELTA = 3
    ORDERED_DELTA = 4


_BLOCK = 1024
"""Number of words in a block."""

_DELTAS = (Transform.DELTA, Transform.ORDERED_DELTA)
_FOLDED = (Transform.ZIGZAG, *_DELTAS)


def _rule(transform: int, kind: Any, turned: int) -> NDArray[Any]:
    """Return the masks of the reference and of ordering, the mask t, the shifts, and the top bit."""
    every, top = np.iinfo(kind).max, np.iinfo(kind).bits - 1
    delta, ordered = transform in _DELTAS, transform == Transform.ORDERED_DELTA
    turns = every if transform in _FOLDED else turned * (transform == Transform.ROTATE)
    return np.array((every * delta, every * ordered, turns, transform != Transform.NONE, top), kind)


@kernel
def _split(
    words: NDArray[Any], reference: NDArray[Any], rule: NDArray[Any], block: NDArray[Any], planes: UInt8s
) -> None:  # pragma: no cover - compiled
    delta, ordered, turned, shift, top = rule[0], rule[1], rule[2], rule[3], rule[4]
    kind = words.dtype.type
    zero, bit = kind(0), kind(1)
    for start in range(0, words.size, _BLOCK):
        part = words[start : start + _BLOCK]
        before = reference[start if reference.size == words.size else 0 :]
        for i in range(part.size):
            x, y = part[i], before[i] & delta
            x = x ^ ((kind(zero - (x >> top)) >> bit) & ordered)
            y = y ^ ((kind(zero - (y >> top)) >> bit) & ordered)
            x = kind(x - y)
            block[i] = kind(kind(x << shift) ^ (kind(zero - (x >> top)) & turned))
        for plane in range(planes.shape[0]):
            place = kind(8 * plane)
            out = planes[plane, start : start + _BLOCK]
            for i in range(out.size):
                out[i] = np.uint8(block[i] >> place)


@kernel
def _merge(
    planes: UInt8s, reference: NDArray[Any], rule: NDArray[Any], block: NDArray[Any], words: NDArray[Any]
) -> None:  # pragma: no cover - compiled
    delta, ordered, turned, shift, top = rule[0], rule[1], rule[2], rule[3], rule[4]
    kind = words.dtype.type
    zero, bit = kind(0), kind(1)
    for start in range(0, words.size, _BLOCK):
        part = words[start : start + _BLOCK]
        before = reference[start if reference.size == words.size else 0 :]
        block[:] = zero
        for plane in range(planes.shape[0]):
            place = kind(8 * plane)
            here = planes[plane, start : start + _BLOCK]
            for i in range(here.size):
                block[i] |= kind(kind(here[i]) << place)
        for i in range(part.size):
            x, y = block[i], before[i] & delta
            y = y ^ ((kind(zero - (y >> top)) >> bit) & ordered)
            x = (x >> shift) ^ (kind(zero - (x & bit)) & turned)
            x = kind(x + y)
            part[i] = x ^ ((kind(zero - (x >> top)) >> bit) & ordered)


def _reference(reference: Tensor | None, kind: Any) -> NDArray[Any]:
    """Return the words of the reference, or zeros for one block, which are read again for each block."""
    return np.zeros(_BLOCK, kind) if reference is None else unsigned(reference)


def split_planes(words: Tensor, reference: Tensor | None, transform: Transform) -> Tensor:
    """Return the byte planes of transformed words, least significant first.

    Parameters
    ----------
    words
        (n,) of uint8, int16, int32 or int64: bits of the values.
    reference
        Same shape and dtype. The deltas need it, the others ignore it.
    transform
        Transform applied before the split.

    Returns
    -------
    Tensor
        uint8, (bytes per word, n).
    """
    bits = unsigned(words)
    before = _reference(reference, bits.dtype)
    planes = np.empty((words.element_size(), bits.size), np.uint8)
    # Rotation moves the top bit, the sign, to the lowest position.
    _split(bits, before, _rule(transform, bits.dtype, 1), np.empty(_BLOCK, bits.dtype), planes)
    return torch.from_numpy(planes)


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
    bits = unsigned(out)
    before = _reference(reference, bits.dtype)
    rule = _rule(transform, bits.dtype, 1 << (8 * out.element_size() - 1))
    _merge(planes.numpy(), before, rule, np.empty(_BLOCK, bits.dtype), bits)
