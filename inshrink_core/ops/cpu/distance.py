"""The kernels of `inshrink_core.ops.distance` in numba: one pass, no copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Float64s, kernel, part
from inshrink_core.ops.distance import N_SUMS, Distance, added_up, slices_of

_F32, _F64 = np.float32, np.float64
_LARGEST = np.finfo(np.float32).max


@part
def add_square(
    value: np.float32, away: np.float32, k: int, errors: Float64s, norms: Float64s
) -> None:  # pragma: no cover - compiled
    """Add the squares of a value and of its error to a sum each."""
    # Neither comparison holds for NaN.
    value = value if np.abs(value) <= _LARGEST else _F32(0.0)
    away = away if np.abs(away) <= _LARGEST else _F32(0.0)
    errors[k] += _F64(away) * _F64(away)
    norms[k] += _F64(value) * _F64(value)


@kernel
def _add_squares(
    values: Float32s, others: NDArray[Any], unit: np.float32, errors: Float64s, norms: Float64s
) -> None:  # pragma: no cover - compiled
    """Add squares to sums, of which there are `N_SUMS` each; others are in units."""
    whole = values.size // N_SUMS * N_SUMS
    # A constant number of sums: a loop to the end of the values would not become vector instructions.
    for begin in range(0, whole, N_SUMS):
        for k in range(N_SUMS):
            value, point = values[begin + k], _F32(_F32(others[begin + k]) * unit)
            add_square(value, _F32(value - point), k, errors, norms)
    for i in range(whole, values.size):
        point = _F32(_F32(others[i]) * unit)
        add_square(values[i], _F32(values[i] - point), i - whole, errors, norms)


def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """See `distance.squared_distance`."""
    return distance_to_lattice(values, decoded, 1.0)


def distance_to_lattice(values: Tensor, integers: Tensor, unit: float) -> Distance:
    """See `distance.distance_to_lattice`."""
    original, points = values.numpy(), integers.numpy()
    spans = slices_of(original.size)
    sums = np.zeros((len(spans), 2, N_SUMS))
    for span, (errors, norms) in zip(spans, sums, strict=True):
        _add_squares(original[span], points[span], _F32(unit), errors, norms)
    return added_up(sums.tolist())
