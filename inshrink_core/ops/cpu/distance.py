"""The kernels of `inshrink_core.ops.distance` in numba: one pass, no copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Float64s, Int32s, kernel, part
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
    values: Float32s, decoded: Float32s, errors: Float64s, norms: Float64s
) -> None:  # pragma: no cover - compiled
    """Add squares to sums, of which there are `N_SUMS` each."""
    whole = values.size // N_SUMS * N_SUMS
    # A constant number of sums: a loop to the end of the values would not become vector instructions.
    for begin in range(0, whole, N_SUMS):
        for k in range(N_SUMS):
            value = values[begin + k]
            add_square(value, _F32(value - decoded[begin + k]), k, errors, norms)
    for i in range(whole, values.size):
        add_square(values[i], _F32(values[i] - decoded[i]), i - whole, errors, norms)


@kernel
def _add_squares_to_lattice(
    values: Float32s, integers: Int32s, unit: np.float32, errors: Float64s, norms: Float64s
) -> None:  # pragma: no cover - compiled
    """Do what `_add_squares` does."""
    whole = values.size // N_SUMS * N_SUMS
    for begin in range(0, whole, N_SUMS):
        for k in range(N_SUMS):
            value, point = values[begin + k], _F32(_F32(integers[begin + k]) * unit)
            add_square(value, _F32(value - point), k, errors, norms)
    for i in range(whole, values.size):
        point = _F32(_F32(integers[i]) * unit)
        add_square(values[i], _F32(values[i] - point), i - whole, errors, norms)


def _distance(add: Callable[..., None], values: Tensor, others: Tensor, *unit: np.float32) -> Distance:
    original, decoded = values.numpy(), others.numpy()
    spans = slices_of(original.size)
    sums = np.zeros((len(spans), 2, N_SUMS))
    for span, (errors, norms) in zip(spans, sums, strict=True):
        add(original[span], decoded[span], *unit, errors, norms)
    return added_up(sums.tolist())


def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """See `distance.squared_distance`."""
    return _distance(_add_squares, values, decoded)


def distance_to_lattice(values: Tensor, integers: Tensor, unit: float) -> Distance:
    """See `distance.distance_to_lattice`."""
    return _distance(_add_squares_to_lattice, values, integers, _F32(unit))
