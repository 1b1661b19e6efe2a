"""Byte planes in numba, one pass; `inshrink_core.ops.reference_planes` is the norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import register
from inshrink_core.ops.schema import Backend

# Values of Transform, which compiled code cannot import as an enumeration without a lookup per use.
_ZIGZAG, _ROTATE, _DELTA, _ORDERED_DELTA = 1, 2, 3, 4

_UNSIGNED = {torch.uint8: np.uint8, torch.int16: np.uint16, torch.int32: np.uint32, torch.int64: np.uint64}


@njit(nogil=True, cache=True)
def _split(
    words: NDArray[Any], reference: NDArray[Any], transform: int, planes: NDArray[np.uint8]
) -> None:  # pragma: no cover - compiled
    n = words.size
    n_planes = planes.shape[0]
    kind = words.dtype.type
    one = kind(1)
    zero = kind(0)
    top = kind(8 * n_planes - 1)
    # Blocks stay in the first-level cache between the transform and the split, and both loops vectorize.
    block = np.empty(1024, words.dtype)
    for start in range(0, n, 1024):
        size = min(1024, n - start)
        if transform == _ZIGZAG:
            for i in range(size):
                x = words[start + i]
                block[i] = kind(x << one) ^ kind(zero - kind(x >> top))
        elif transform == _ROTATE:
            for i in range(size):
                x = words[start + i]
                block[i] = kind(x << one) | kind(x >> top)
        elif transform == _DELTA:
            for i in range(size):
                x = kind(words[start + i] - reference[start + i])
                block[i] = kind(x << one) ^ kind(zero - kind(x >> top))
        elif transform == _ORDERED_DELTA:
            for i in range(size):
                x = words[start + i]
                y = reference[start + i]
                x ^= kind(zero - kind(x >> top)) >> one
                y ^= kind(zero - kind(y >> top)) >> one
                x = kind(x - y)
                block[i] = kind(x << one) ^ kind(zero - kind(x >> top))
        else:
            for i in range(size):
                block[i] = words[start + i]
        for plane in range(n_planes):
            shift = kind(8 * plane)
            for i in range(size):
                planes[plane, start + i] = np.uint8(block[i] >> shift)


@njit(nogil=True, cache=True)
def _merge(
    planes: NDArray[np.uint8], reference: NDArray[Any], transform: int, out: NDArray[Any]
) -> None:  # pragma: no cover - compiled
    n = out.size
    n_planes = planes.shape[0]
    kind = out.dtype.type
    one = kind(1)
    zero = kind(0)
    top = kind(8 * n_planes - 1)
    block = np.empty(1024, out.dtype)
    for start in range(0, n, 1024):
        size = min(1024, n - start)
        for i in range(size):
            block[i] = kind(planes[0, start + i])
        for plane in range(1, n_planes):
            shift = kind(8 * plane)
            for i in range(size):
                block[i] |= kind(kind(planes[plane, start + i]) << shift)
        if transform == _ZIGZAG:
            for i in range(size):
                x = block[i]
                out[start + i] = kind(x >> one) ^ kind(zero - kind(x & one))
        elif transform == _ROTATE:
            for i in range(size):
                x = block[i]
                out[start + i] = kind(x >> one) | kind(x << top)
        elif transform == _DELTA:
            for i in range(size):
                x = block[i]
                x = kind(x >> one) ^ kind(zero - kind(x & one))
                out[start + i] = kind(x + reference[start + i])
        elif transform == _ORDERED_DELTA:
            for i in range(size):
                x = block[i]
                y = reference[start + i]
                y ^= kind(zero - kind(y >> top)) >> one
                x = kind(x >> one) ^ kind(zero - kind(x & one))
                x = kind(x + y)
                out[start + i] = x ^ (kind(zero - kind(x >> top)) >> one)
        else:
            for i in range(size):
                out[start + i] = block[i]


def _unsigned(words: Tensor) -> NDArray[Any]:
    """Unsigned words, so that right shifts bring in zeros and differences wrap."""
    return words.numpy().view(_UNSIGNED[words.dtype])


@register("split_planes", Backend.CPU)
def split_planes(words: Tensor, reference: Tensor | None, transform: int) -> Tensor:
    """See `inshrink_core.ops.planes.split_planes`."""
    bits = _unsigned(words)
    planes = np.empty((words.element_size(), bits.size), np.uint8)
    _split(bits, bits if reference is None else _unsigned(reference), transform, planes)
    return torch.from_numpy(planes)


@register("merge_planes", Backend.CPU)
def merge_planes(planes: Tensor, reference: Tensor | None, transform: int, out: Tensor) -> None:
    """See `inshrink_core.ops.planes.merge_planes`."""
    bits = _unsigned(out)
    _merge(planes.numpy(), bits if reference is None else _unsigned(reference), transform, bits)
