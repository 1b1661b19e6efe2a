"""How far decoded values are from the original ones.

The sums are ``E = sum of (w_i - v_i)²`` and ``S = sum of w_i²`` over values w and decoded values v, without
terms that are not finite: float64 squares of float32 differences and values. In a slice of `SLICE` elements,
element i is added to sum i modulo `N_SUMS`; sums are added from first to last, as slices are. So the result
depends on neither threads nor vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Float64s, kernel, part

N_SUMS = 16
"""Two vectors of eight float64 each."""

SLICE = 1 << 20

_F32, _F64 = np.float32, np.float64
_LARGEST = np.finfo(np.float32).max


class Distance(NamedTuple):
    """Sums of squares.

    Parameters
    ----------
    error
        Of the differences between original and decoded values.
    norm
        Of the original values.
    """

    error: float
    norm: float


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
    full = values.size // N_SUMS * N_SUMS
    # A constant number of sums: a loop to the end of the values would not become vector instructions.
    for begin in range(0, full, N_SUMS):
        for k in range(N_SUMS):
            value, point = values[begin + k], _F32(_F32(others[begin + k]) * unit)
            add_square(value, _F32(value - point), k, errors, norms)
    for i in range(full, values.size):
        point = _F32(_F32(others[i]) * unit)
        add_square(values[i], _F32(values[i] - point), i - full, errors, norms)


def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """Add up the squares of differences and of values.

    Parameters
    ----------
    values, decoded : Float32[Tensor, "n"]
        Contiguous.
    """
    return distance_to_lattice(values, decoded, 1.0)


def distance_to_lattice(values: Tensor, integers: Tensor, unit: float) -> Distance:
    """Do what `squared_distance` does for decoded values ``integers * unit``, without making them.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous.
    integers : Int32[Tensor, "n"]
        Below 2**24 in magnitude.
    unit
        Unit, a power of two.

    Notes
    -----
    O(n). Tensors on a device are copied to host memory, where each slice is added in order.
    """
    original, points = values.cpu().numpy(), integers.cpu().numpy()
    error = norm = 0.0
    for begin in range(0, original.size, SLICE):
        sums, span = np.zeros((2, N_SUMS)), slice(begin, begin + SLICE)
        _add_squares(original[span], points[span], _F32(unit), *sums)
        errors, norms = sums.tolist()
        error, norm = error + sum(errors), norm + sum(norms)
    return Distance(error, norm)
