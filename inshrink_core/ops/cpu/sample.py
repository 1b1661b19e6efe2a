"""Sums over a sample in numba: a single call that replaces ten PyTorch calls.

Each PyTorch call releases the GIL to other threads that observe their tensors, and then waits for it. A
sample on a device is copied to host memory and summed up here too: it has 64 kB.
"""

from __future__ import annotations

import numpy as np

from inshrink_core.ops.cpu.compiled import Float32s, Int32s, Int64s, brief, part

_F32 = np.float32


@part
def _add(value: np.float32, sums: Int64s) -> None:  # pragma: no cover - compiled
    bits = _F32(value).view(np.uint32)
    exponent = (bits >> 23) & 255
    # Normal numbers have a hidden bit, subnormal numbers do not.
    sums[exponent] += (bits & 0x7FFFFF) | (0x800000 if exponent > 0 else 0)
    if exponent == 255:
        sums[256] += 1


@brief
def add_mantissas(
    w: Float32s, x: Int32s, known: int, m: Float32s, adaptive: int, unit: np.float32, sums: Int64s
) -> None:  # pragma: no cover - compiled
    """Add up a sample (`inshrink_core.ops.sample.sample_sums`).

    `known` and `adaptive` are 1, or 0 if their array has only one element.
    """
    for i in range(w.size):
        away = _F32(w[i] - _F32(_F32(x[i * known]) * unit))
        _add(_F32(w[i] * w[i]), sums[0])
        _add(_F32(away * away), sums[1])
        _add(m[i * adaptive], sums[2])
