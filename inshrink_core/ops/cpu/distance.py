"""Squared distance between decoded and original values.

For values w and decoded values v the sums are ``E = sum_i (w_i - v_i)²`` and ``S = sum_i w_i²``, without
terms that are not finite. The squares are float64 squares of float32 differences and values. In a slice of
`SLICE` elements, element i is added to partial sum i modulo `N_SUMS`. The partial sums, and then the slices,
are added from first to last, so the result depends neither on threads nor on vector width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Float64s, kernel, part

N_SUMS = 16
"""Number of partial sums: two vectors of eight float64 values each."""

SLICE = 1 << 20

_F32, _F64 = np.float32, np.float64
_LARGEST = np.finfo(np.float32).max


@part
def add_square(
    value: np.float32, away: np.float32, k: int, errors: Float64s, norms: Float64s
) -> None:  # pragma: no cover - compiled
    """Add the squares of a value and of its error to their sums."""
    # Both comparisons are false for NaN.
    value = value if np.abs(value) <= _LARGEST else _F32(0.0)
    away = away if np.abs(away) <= _LARGEST else _F32(0.0)
    errors[k] += _F64(away) * _F64(away)
    norms[k] += _F64(value) * _F64(value)


@kernel
def _add_squares(
    values: Float32s, others: NDArray[Any], unit: np.float32, errors: Float64s, norms: Float64s
) -> None:  # pragma: no cover - compiled
    """Add the squares of a slice to `N_SUMS` partial sums each; `others` are multiples of a unit."""
    full = values.size // N_SUMS * N_SUMS
    # The inner loop has a constant length: LLVM does not vectorize a loop to the end of the values.
    for begin in range(0, full, N_SUMS):
        for k in range(N_SUMS):
            value, point = values[begin + k], _F32(_F32(others[begin + k]) * unit)
            add_square(value, _F32(value - point), k, errors, norms)
    for i in range(full, values.size):
        point = _F32(_F32(others[i]) * unit)
        add_square(values[i], _F32(values[i] - point), i - full, errors, norms)


def squared_distance(values: Tensor, points: Tensor, unit: float = 1.0) -> tuple[float, float]:
    """Return the sums of squared differences and squared values, E and S, for the decoded ``points * unit``.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous.
    points : Float32[Tensor, "n"] or Int32[Tensor, "n"]
        Decoded values, or integers below 2**24 in magnitude.
    unit
        A power of two.

    Notes
    -----
    O(n). The decoded values are not allocated. Tensors on a device are copied to host memory.
    """
    original, decoded = values.cpu().numpy(), points.cpu().numpy()
    error = norm = 0.0
    for begin in range(0, original.size, SLICE):
        sums, span = np.zeros((2, N_SUMS)), slice(begin, begin + SLICE)
        _add_squares(original[span], decoded[span], _F32(unit), *sums)
        errors, norms = sums.tolist()
        error, norm = error + sum(errors), norm + sum(norms)
    return error, norm
