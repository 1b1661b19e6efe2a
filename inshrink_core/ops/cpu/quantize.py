"""Numba kernels of the codebook codecs: each makes one pass over the values and releases the GIL.

`inshrink_core.ops.quantize` documents the functions and has the versions in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Int64s, UInt8s, compiled
from inshrink_core.ops.flat import as_float32, flattened
from inshrink_core.ops.quantize import INFINITE_KEY, MAGNITUDE_KEYS, N_KEYS, PROTECTED

_KEY_SHIFT = 16


def _values(tensor: Tensor) -> NDArray[Any]:
    """Return float32 values, because sensitivity is a float32 product."""
    return np.asarray(as_float32(tensor).cpu().numpy())


def _bits(tensor: Tensor) -> tuple[NDArray[Any], int]:
    """Return the bits and the shift that leaves the key; bfloat16 bits are keys already."""
    if tensor.dtype == torch.bfloat16:
        return flattened(tensor).cpu().view(torch.int16).numpy().view(np.uint16), 0
    return _values(tensor).view(np.uint32), _KEY_SHIFT


@compiled(nogil=True)
def _histogram(bits: NDArray[Any], shift: int) -> Int64s:  # pragma: no cover - compiled
    counts = np.zeros(N_KEYS, np.int64)
    for i in range(bits.size):
        counts[bits[i] >> shift] += 1
    return counts


@compiled(nogil=True, inline="always")
def _sensitivity_key(value: np.float32, gradient: np.float32) -> int:  # pragma: no cover - compiled
    product = np.float32(value * gradient)
    key = int((product.view(np.int32) >> _KEY_SHIFT) & (MAGNITUDE_KEYS - 1))
    return min(key, INFINITE_KEY)


@compiled(nogil=True)
def _histogram_between(
    values: Float32s, gradient: Float32s, low: int, high: int
) -> Int64s:  # pragma: no cover - compiled
    counts = np.zeros(N_KEYS, np.int64)
    bits = values.view(np.uint32)
    for i in range(values.size):
        key = _sensitivity_key(values[i], gradient[i])
        if low <= key < high:
            counts[bits[i] >> _KEY_SHIFT] += 1
    return counts


@compiled(nogil=True)
def _histogram_products(values: Float32s, gradient: Float32s) -> Int64s:  # pragma: no cover - compiled
    counts = np.zeros(MAGNITUDE_KEYS, np.int64)
    for i in range(values.size):
        counts[_sensitivity_key(values[i], gradient[i])] += 1
    return counts


@compiled(nogil=True)
def _assign_between(
    values: Float32s, gradient: Float32s, lut: UInt8s, low: int, high: int, out: UInt8s
) -> None:  # pragma: no cover - compiled
    bits = values.view(np.uint32)
    for i in range(values.size):
        symbol = lut[bits[i] >> _KEY_SHIFT]
        key = _sensitivity_key(values[i], gradient[i])
        if key >= high:
            symbol = np.uint8(PROTECTED)
        elif key < low and symbol != PROTECTED:
            symbol = np.uint8(0)
        out[i] = symbol


def histogram16(
    values: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """See `quantize.histogram16`."""
    if gradient is None:
        return torch.from_numpy(_histogram(*_bits(values)))
    return torch.from_numpy(_histogram_between(_values(values), _values(gradient), low, high))


def sensitivity_histogram(values: Tensor, gradient: Tensor) -> Tensor:
    """See `quantize.sensitivity_histogram`."""
    return torch.from_numpy(_histogram_products(_values(values), _values(gradient)))


def assign(
    values: Tensor, lut: Tensor, gradient: Tensor | None = None, low: int = 0, high: int = MAGNITUDE_KEYS
) -> Tensor:
    """See `quantize.assign`."""
    table = lut.cpu().numpy()
    if gradient is None:
        bits, shift = _bits(values)
        return torch.from_numpy(table[bits >> shift])
    symbols = np.empty(values.numel(), np.uint8)
    _assign_between(_values(values), _values(gradient), table, low, high, symbols)
    return torch.from_numpy(symbols)
