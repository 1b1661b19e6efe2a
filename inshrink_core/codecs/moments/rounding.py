"""From values of optimizer state to the integers of the moments codec: decided by the encoder alone.

Second moments say how large the steps of training are, so they keep their scale: powers of two, held where
they are until a value has left its octave for good. First moments say where training is going, so they keep
their sum: the largest are rounded up and the others left out, with the threshold at which the projection of
the rounded values on the true ones equals the true ones' square. Plain rounding to so coarse a unit loses a
part of the momentum of every parameter, which a restore would feel as a pause.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codecs.moments.block import NO_BYTES, Form, MomentsReference, sides
from inshrink_core.ops.flat import as_float32
from inshrink_core.ops.moments import (
    FRACTION_BITS,
    LARGEST_INTEGER,
    ZERO_POINT,
    Sums,
    Units,
    count_magnitudes,
    relative_square,
    round_in_units,
    round_to_octaves,
    row_reaches,
    squares_cover,
    sum_sides,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.checkpoint import TensorSpec


HELD: Final = 1.0
"""Octaves that a second moment may be off its code before that changes: at .5, plain rounding, values on an
edge change again and again (``benchmarks/results/moments.csv``)."""

_OCTAVE_CARRY: Final = 0x800000 - 0x3504F3
"""What carries a mantissa from the root of two on into the exponent: rounding to octaves is one addition."""

_PLAIN, _LOWEST_THRESHOLD = 128, 26
"""Thresholds in 256ths of a unit: plain rounding, and a tenth, below which all that is left is noise."""

_UNIT_RANGE: Final = (0.25, 2.0)
"""Of the unit of a first moment, by what it is allowed."""

_MAX_HALVINGS: Final = 6
"""Of the unit, where no threshold is low enough: values of very different size in one tensor."""


def zeros(spec: TensorSpec) -> MomentsReference:
    """Return the state of a tensor that is left out."""
    return MomentsReference(spec.dtype, spec.shape, Form.ZEROS, 0, NO_BYTES, NO_BYTES, NO_BYTES)


def octaves(spec: TensorSpec, values: Tensor, before: MomentsReference | None) -> MomentsReference:
    """Round non-negative values to powers of two; zero stays zero, and nothing else becomes it.

    Parameters
    ----------
    spec
        What they belong to.
    values : Float32[Tensor, "n"]
        Contiguous, any device, finite, not negative.
    before
        The state of the previous frame, whose base is used again where it can be.
    """
    exponents = ((values.view(torch.int32) + _OCTAVE_CARRY) >> 23) - 127
    positive = values > 0
    base = base_of(int(exponents[positive].max()) if bool(positive.any()) else 0, Form.OCTAVES, before)
    codes = torch.where(positive, (exponents - base).clamp(1, 255), 0).to(torch.uint8)
    return MomentsReference(spec.dtype, spec.shape, Form.OCTAVES, base, codes, NO_BYTES, NO_BYTES)


def rank_one(spec: TensorSpec, values: Tensor, before: MomentsReference | None) -> MomentsReference:
    """Keep the means of rows and columns, in half octaves (Adafactor: Shazeer & Stern, 2018, section 3)."""
    base, *codes = held_factors(values, spec.shape, Form.RANK_ONE, before)
    rows, columns = map(torch.from_numpy, codes)
    return MomentsReference(spec.dtype, spec.shape, Form.RANK_ONE, base, NO_BYTES, rows, columns)


def factored(
    spec: TensorSpec, values: Tensor, before: MomentsReference | None, held: float = HELD
) -> MomentsReference:
    """Store row and column factors, and the octave of each element relative to their product.

    Parameters
    ----------
    spec
        What they belong to.
    values : Float32[Tensor, "n"]
        Contiguous, any device, finite, not negative.
    before
        The state of the previous frame: its codes stay where they are near enough.
    held
        Octaves that are near enough, at least .5.

    Notes
    -----
    The factors follow what all of a row do together, as gradients shrink, so that the octaves of elements
    stay. O(n).
    """
    base, rows, columns = held_factors(values, spec.shape, Form.FACTORED, before)
    units = Units(rows.astype(np.int64) + base, columns.astype(np.int64) - ZERO_POINT)
    old = None
    if before is not None and before.form is Form.FACTORED:
        old = before.elements.to(values.device)
    elements = round_to_octaves(values, units, old, held)
    codes = map(torch.from_numpy, (rows, columns))
    return MomentsReference(spec.dtype, spec.shape, Form.FACTORED, base, elements, *codes)


def scaled(
    spec: TensorSpec,
    values: Tensor,
    second: Tensor | None,
    unit: float,
    allowed: float | None = None,
) -> MomentsReference:
    """Round to integers in units of a power of two times row and column, so that the projection is preserved.

    Parameters
    ----------
    spec
        What they belong to.
    values : Float32[Tensor, "n"]
        Contiguous, any device, finite.
    second
        The second moment of the same parameter: its root gives rows and columns their units. Without
        it, the root mean squares of the values' own rows do.
    unit
        In root mean squares of the values, where rows and columns are equal.
    allowed
        The unit that is fine enough, over the root of the second moment where there is one: taken in the
        place of `unit`, but for a quarter of that at least and twice that at most.

    Notes
    -----
    With z the values in units, the integers are ``sign(z) * floor(abs(z) + 1 - t)`` with the largest t
    between .1 and .5 for which their sum of products with z reaches that of the squares of z. O(n).
    """
    n_rows, _ = sides(spec.shape)
    rows, columns, is_adaptive = _shape_of_units(values, spec.shape, second)
    column_codes = column_codes_of(columns)
    shifts = column_codes.astype(np.int64) - ZERO_POINT
    reaches = row_reaches(values, n_rows, shifts)
    if not reaches.any():
        return zeros(spec)
    root = math.sqrt(relative_square(values, Units(rows, shifts)) / values.numel())
    if allowed is not None and is_adaptive == (spec.role is TensorRole.EXP_AVG):
        share = allowed / (root if is_adaptive else _root_mean_square(values, n_rows))
        unit = min(max(share, _UNIT_RANGE[0] * unit), _UNIT_RANGE[1] * unit)
    wanted = np.where(reaches > 0, rows + round(2 * math.log2(unit * root)), NO_ROW)
    fitted, threshold = _chosen(values, wanted, shifts, reaches)
    base = base_of(int(fitted.max()), Form.SCALED, None)
    row_codes = row_codes_of(fitted, base)
    kept = np.where(row_codes == 0, NO_ROW, row_codes.astype(np.int64) + base)
    elements = round_in_units(values, Units(kept, shifts), threshold)
    codes = map(torch.from_numpy, (row_codes, column_codes))
    return MomentsReference(spec.dtype, spec.shape, Form.SCALED, base, elements, *codes)


def _chosen(
    values: Tensor,
    rows: NDArray[np.int64],
    shifts: NDArray[np.int64],
    reaches: NDArray[np.float64],
) -> tuple[NDArray[np.int64], int]:
    """Return exponents of rows and the threshold; where none preserves the projection, units are halved."""
    for halvings in range(_MAX_HALVINGS + 1):
        fitted = _fitted(np.where(rows == NO_ROW, rows, rows - 2 * halvings), reaches)
        threshold = _threshold(count_magnitudes(values, Units(fitted, shifts)))
        if threshold is not None:
            return fitted, threshold
    return fitted, _LOWEST_THRESHOLD


def _fitted(rows: NDArray[np.int64], reaches: NDArray[np.float64]) -> NDArray[np.int64]:
    """Give a row whose integers would not fit a byte a coarser unit."""
    with np.errstate(divide="ignore"):
        least = np.ceil(2 * np.log2(reaches / (LARGEST_INTEGER + 0.25)))
    fitted: NDArray[np.int64] = np.where(reaches > 0, np.maximum(rows, least), NO_ROW).astype(np.int64)
    return fitted


def _threshold(counts: NDArray[np.int64]) -> int | None:
    """Return the largest threshold that preserves the projection; None where none is low enough.

    `counts` are those of magnitudes.
    """
    at = np.flatnonzero(counts)
    counts = counts[at]
    wanted = int((counts * at * at).sum())
    one = 1 << FRACTION_BITS

    def reaches(threshold: int) -> bool:
        return int((counts * at * ((at + one - threshold) >> FRACTION_BITS)).sum()) * one >= wanted

    if not reaches(_LOWEST_THRESHOLD):
        return None
    low, high = _LOWEST_THRESHOLD, _PLAIN
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle - 1)
    return low


def _root_mean_square(values: Tensor, n_rows: int) -> float:
    return math.sqrt(math.fsum(sum_sides(values, n_rows, True).rows.tolist()) / values.numel())


def _shape_of_units(
    values: Tensor, shape: tuple[int, ...], second: Tensor | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """Return exponents of rows and columns, and whether they are the second moment's root.

    Else they are the values' own, by row alone.

    Own columns would give the largest value of a row and a column a unit beyond itself.
    """
    n_rows, _ = sides(shape)
    if second is not None:
        squares = as_float32(second).to(values.device)
        if squares_cover(squares, values):
            return *factors(sum_sides(squares, n_rows, False), 1.0), True
    rows, columns = factors(sum_sides(values, n_rows, True), 1.0)
    return rows, np.zeros_like(columns), False


NO_ROW: Final = -(1 << 20)
"""Exponent of a row of zeros, below every other."""

_HELD_FACTOR: Final = 0.75
"""Half octaves that a row or column may be off its code before that changes."""

_HEADROOM: Final = 54
"""Half octaves that the largest value may grow by before the codes of a chain begin anew."""


def _logarithms(sums: Sums, scale: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``scale * log2`` of row means, and of column means relative to the mean of all."""
    n_rows, n_columns = sums.rows.size, sums.columns.size
    by_row, by_column = sums.rows / n_columns, sums.columns / n_rows
    mean = math.fsum(sums.rows.tolist()) / (n_rows * n_columns)
    with np.errstate(divide="ignore", invalid="ignore"):
        return scale * np.log2(by_row), scale * np.log2(by_column / mean)


def factors(sums: Sums, scale: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the same rounded; `NO_ROW` for a row of zeros."""
    rows, columns = _logarithms(sums, scale)
    whole = np.where(np.isfinite(rows), np.rint(rows), NO_ROW).astype(np.int64)
    return whole, np.rint(np.nan_to_num(columns, nan=0.0, neginf=-128.0)).astype(np.int64)


def held_factors(
    values: Tensor, shape: tuple[int, ...], form: Form, before: MomentsReference | None
) -> tuple[int, NDArray[np.uint8], NDArray[np.uint8]]:
    """Return base, row codes and column codes, those of the reference where they are near enough."""
    rows, columns = _logarithms(sum_sides(values, sides(shape)[0], False), 2.0)
    finite = np.isfinite(rows)
    base = base_of(int(np.rint(rows[finite].max())) if finite.any() else 0, form, before)
    new_rows = row_codes_of(np.where(finite, np.rint(rows), NO_ROW).astype(np.int64), base)
    columns = np.nan_to_num(columns, nan=0.0, neginf=-128.0)
    new_columns = column_codes_of(np.rint(columns).astype(np.int64))
    if before is None or before.form is not form or before.base != base:
        return base, new_rows, new_columns
    old_rows, old_columns = before.rows.cpu().numpy(), before.columns.cpu().numpy()
    held = (np.abs(rows - base - old_rows) <= _HELD_FACTOR) & (old_rows > 0) & finite
    held_columns = np.abs(columns + ZERO_POINT - old_columns) <= _HELD_FACTOR
    return base, np.where(held, old_rows, new_rows), np.where(held_columns, old_columns, new_columns)


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
