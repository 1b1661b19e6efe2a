"""Row and column factors of a matrix of optimizer state, as codes of half octaves.

Adafactor's (Shazeer & Stern, ICML 2018, section 3): the mean of each row, and of each column against the
mean of all. A factor goes into a byte, counted from a base that a chain keeps as long as it can.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inshrink_core.codecs.moments_state import ZERO_POINT, Form, MomentsReference, sides

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NO_ROW", "base_of", "column_codes_of", "factors", "held_factors", "row_codes_of"]

NO_ROW: Final = -(1 << 20)
"""Exponent of a row of zeros, below every other."""

_HELD_FACTOR: Final = 0.75
"""Half octaves that a row or column may be off its code before that changes."""

_HEADROOM: Final = 54
"""Half octaves that the largest value may grow by before the codes of a chain begin anew."""


def _logarithms(
    values: NDArray[Any], shape: tuple[int, ...], scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``scale * log2`` of row means, and of column means against the mean of all."""
    matrix = values.astype(np.float64).reshape(sides(shape))
    by_row, by_column = matrix.mean(1), matrix.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return scale * np.log2(by_row), scale * np.log2(by_column / matrix.mean())


def factors(
    values: NDArray[Any], shape: tuple[int, ...], scale: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the same rounded; `NO_ROW` for a row of zeros."""
    rows, columns = _logarithms(values, shape, scale)
    whole = np.where(np.isfinite(rows), np.rint(rows), NO_ROW).astype(np.int64)
    return whole, np.rint(np.nan_to_num(columns, nan=0.0, neginf=-128.0)).astype(np.int64)


def held_factors(
    values: NDArray[np.float32], shape: tuple[int, ...], form: Form, before: MomentsReference | None
) -> tuple[int, NDArray[np.uint8], NDArray[np.uint8]]:
    """Return base, row codes and column codes, those of the reference where they are near enough."""
    rows, columns = _logarithms(values, shape, 2.0)
    finite = np.isfinite(rows)
    base = base_of(int(np.rint(rows[finite].max())) if finite.any() else 0, form, before)
    new_rows = row_codes_of(np.where(finite, np.rint(rows), NO_ROW).astype(np.int64), base)
    columns = np.nan_to_num(columns, nan=0.0, neginf=-128.0)
    new_columns = column_codes_of(np.rint(columns).astype(np.int64))
    if before is None or before.form is not form or before.base != base:
        return base, new_rows, new_columns
    held = (np.abs(rows - base - before.rows) <= _HELD_FACTOR) & (before.rows > 0) & finite
    held_columns = np.abs(columns + ZERO_POINT - before.columns) <= _HELD_FACTOR
    return (
        base,
        np.where(held, before.rows, new_rows),
        np.where(held_columns, before.columns, new_columns),
    )


def row_codes_of(rows: NDArray[np.int64], base: int) -> NDArray[np.uint8]:
    """Return 1 to 255 from the base up, and 0 for a row of zeros."""
    return np.where(rows == NO_ROW, 0, np.clip(rows - base, 1, 255)).astype(np.uint8)


def column_codes_of(columns: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return exponents plus 128, clamped to a byte."""
    return (np.clip(columns, -ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT).astype(np.uint8)


def base_of(largest: int, form: Form, before: MomentsReference | None) -> int:
    """Return the base of the reference where the largest exponent still fits, else one with headroom."""
    if before is not None and before.form is form and 1 <= largest - before.base <= 255:
        return before.base
    return max(largest, -600) - (255 - _HEADROOM)
