"""The kernel of `inshrink_core.ops.distance` in numba: one pass, no copy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import kernel
from inshrink_core.ops.distance import N_SUMS, Distance

__all__: list[str] = []

_F32, _F64 = np.float32, np.float64
_LARGEST = np.finfo(np.float32).max


@kernel
def _add_squares(
    values: NDArray[np.float32],
    decoded: NDArray[np.float32],
    errors: NDArray[np.float64],
    norms: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Add squares to sums, of which there are `N_SUMS` each."""
    for begin in range(0, values.size, N_SUMS):
        for k in range(min(N_SUMS, values.size - begin)):
            value = values[begin + k]
            away = _F32(value - decoded[begin + k])
            # Neither comparison holds for NaN.
            value = value if np.abs(value) <= _LARGEST else _F32(0.0)
            away = away if np.abs(away) <= _LARGEST else _F32(0.0)
            errors[k] += _F64(away) * _F64(away)
            norms[k] += _F64(value) * _F64(value)


def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """See `distance.squared_distance`."""
    errors, norms = np.zeros(N_SUMS), np.zeros(N_SUMS)
    _add_squares(values.numpy(), decoded.numpy(), errors, norms)
    return Distance(float(sum(errors.tolist())), float(sum(norms.tolist())))
