"""The norm of the moments codec's kernels, an array operation for each step of the rule.

`inshrink_core.ops.moments` documents the functions. In numpy, whose order of summation is part of the rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.moments import (
    FRACTION_BITS,
    LARGEST_INTEGER,
    MAX_MAGNITUDE,
    ZERO_POINT,
    Kinds,
    Sums,
    Units,
    half_octave_values,
)

__all__: list[str] = []

_LOWEST_CODE, _HIGHEST_CODE = -3 * ZERO_POINT, 6 * ZERO_POINT
"""Bounds of the sum of a row's, a column's and twice an element's code."""


def kinds_of(values: NDArray[np.float32]) -> Kinds:
    """See `moments.kinds_of`."""
    return Kinds(bool(np.isfinite(values).all()), bool((values < 0).any()))


def squares_cover(squares: NDArray[np.float32], values: NDArray[np.float32]) -> bool:
    """See `moments.squares_cover`."""
    finite = np.isfinite(squares).all() and (squares >= 0).all()
    return bool(finite and (squares[values != 0] > 0).all())


def sum_sides(values: NDArray[np.float32], n_rows: int, squared: bool) -> Sums:
    """See `moments.sum_sides`."""
    matrix = values.astype(np.float64).reshape(n_rows, -1)
    if squared:
        matrix *= matrix
    return Sums(matrix.sum(1), matrix.sum(0), float(matrix.sum()))


def _units(units: Units) -> NDArray[np.float32]:
    return half_octave_values(units.rows[:, None] + units.columns[None, :]).reshape(-1)


def relative_square(values: NDArray[np.float32], units: Units) -> float:
    """See `moments.relative_square`."""
    relative = values.astype(np.float64) / _units(units)
    return float(np.cumsum(relative * relative)[-1])


def row_reaches(values: NDArray[np.float32], n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """See `moments.row_reaches`."""
    matrix = np.abs(values.astype(np.float64)).reshape(n_rows, -1)
    reaches: NDArray[np.float64] = (matrix / half_octave_values(columns)[None, :]).max(1)
    return reaches


def _magnitudes(values: NDArray[np.float32], units: Units) -> NDArray[np.int64]:
    with np.errstate(over="ignore"):
        shares = np.abs(values) / _units(units) * np.float32(1 << FRACTION_BITS)
    magnitudes: NDArray[np.int64] = np.minimum(shares, np.float32(MAX_MAGNITUDE)).astype(np.int64)
    return magnitudes


def count_magnitudes(values: NDArray[np.float32], units: Units) -> NDArray[np.int64]:
    """See `moments.count_magnitudes`."""
    return np.bincount(_magnitudes(values, units), minlength=MAX_MAGNITUDE + 1).astype(np.int64)


def round_in_units(values: NDArray[np.float32], units: Units, threshold: int) -> NDArray[np.uint8]:
    """See `moments.round_in_units`."""
    whole = (_magnitudes(values, units) + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
    integers = np.where(values < 0, -1, 1) * np.minimum(whole, LARGEST_INTEGER)
    elements: NDArray[np.uint8] = (integers + ZERO_POINT).astype(np.uint8)
    return elements


def round_to_octaves(
    values: NDArray[np.float32], units: Units, before: NDArray[np.uint8] | None, held: float
) -> NDArray[np.uint8]:
    """See `moments.round_to_octaves`."""
    exponents = (units.rows[:, None] + units.columns[None, :]).reshape(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = np.log2(values.astype(np.float64)) - 0.5 * exponents
    wanted = np.where(values > 0, wanted, 0.0)
    codes = np.clip(np.rint(wanted), 1 - ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT
    if before is not None:
        old = before.astype(np.float64)
        codes = np.where((old > 0) & (np.abs(wanted + ZERO_POINT - old) <= held), old, codes)
    return np.where(values > 0, codes, 0).astype(np.uint8)


def expand_units(
    rows: NDArray[np.uint8],
    columns: NDArray[np.uint8],
    elements: NDArray[np.uint8] | None,
    base: int,
    scaled: bool,
) -> NDArray[np.float32]:
    """See `moments.expand_units`."""
    exponents = rows.astype(np.int16)[:, None] + (columns.astype(np.int16) - ZERO_POINT)
    if elements is not None and not scaled:
        exponents = exponents + 2 * (elements.astype(np.int16).reshape(exponents.shape) - ZERO_POINT)
    table = half_octave_values(np.arange(_LOWEST_CODE, _HIGHEST_CODE) + base)
    units = table[exponents - _LOWEST_CODE]
    units[rows == 0] = 0
    flat: NDArray[np.float32] = units.reshape(-1)
    if elements is not None and not scaled:
        flat[elements == 0] = 0
    if elements is not None and scaled:
        # Only a block that no encoder wrote has units so large.
        with np.errstate(over="ignore"):
            flat *= elements.astype(np.float32) - np.float32(ZERO_POINT)
    return flat
