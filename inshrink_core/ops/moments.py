"""Typed fronts of the moments codec's kernels.

Units are powers of the root of two, counted in *half octaves*: a row's and a column's, added. Integers and
codes follow from float64 sums in one order, from single float32 operations, and from comparisons, so every
implementation returns the same bits. All arrays are in host memory, where optimizer state is coded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.ops.registry import op

__all__ = [
    "FRACTION_BITS",
    "LARGEST_INTEGER",
    "MAX_MAGNITUDE",
    "ZERO_POINT",
    "Kinds",
    "Sums",
    "Units",
    "count_magnitudes",
    "expand_units",
    "half_octave_values",
    "kinds_of",
    "relative_square",
    "round_in_units",
    "round_to_octaves",
    "row_reaches",
    "squares_cover",
    "sum_sides",
]

ZERO_POINT = 128
"""Integers, residuals and column exponents are stored with this added."""

LARGEST_INTEGER = 127

FRACTION_BITS = 8
"""Of magnitudes in units, where the threshold is sought: all sums are of integers, so equal everywhere."""

MAX_MAGNITUDE = (LARGEST_INTEGER + 1) << FRACTION_BITS
"""Larger magnitudes count as this one."""

LOWEST, HIGHEST = -252, 252
"""Half octaves of the smallest and largest unit: normal float32 numbers."""

_SQRT2 = np.float32(math.sqrt(2))


class Kinds(NamedTuple):
    """Whether all values are finite, and whether some are below zero."""

    finite: bool
    negative: bool


class Sums(NamedTuple):
    """Sums of values, or of their squares.

    Parameters
    ----------
    rows : float64, (n_rows,)
        In numpy's order for contiguous values: pairwise, in blocks of 128.
    columns : float64, (n_columns,)
        From the first row to the last.
    total
        Of all, in the order of a row.
    """

    rows: NDArray[np.float64]
    columns: NDArray[np.float64]
    total: float


class Units(NamedTuple):
    """Exponents of the unit of each element, in half octaves: that of its row and that of its column.

    Parameters
    ----------
    rows : int64, (n_rows,)
    columns : int64, (n_columns,)
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]


def half_octave_values(exponents: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return ``2**(k / 2)`` in float32, the root of two rounded once; k is first clipped to +-252.

    Examples
    --------
    >>> half_octave_values(np.array([0, 2, -2])).tolist()
    [1.0, 2.0, 0.5]
    """
    k = np.clip(exponents, LOWEST, HIGHEST)
    values: NDArray[np.float32] = np.ldexp(np.where(k & 1, _SQRT2, np.float32(1)), k >> 1).astype(np.float32)
    return values


@op
def kinds_of(values: NDArray[np.float32]) -> Kinds:
    """Tell what kinds of values there are; neither NaN nor -0.0 is below zero."""
    raise NotImplementedError


@op
def squares_cover(squares: NDArray[np.float32], values: NDArray[np.float32]) -> bool:
    """Whether second moments are finite, not negative, and above zero wherever a value is not zero.

    Parameters
    ----------
    squares, values : float32, (n,)
    """
    raise NotImplementedError


@op
def sum_sides(values: NDArray[np.float32], n_rows: int, squared: bool) -> Sums:
    """Sum rows and columns of values in row-major order, at least one; or of their squares."""
    raise NotImplementedError


@op
def relative_square(values: NDArray[np.float32], units: Units) -> float:
    """Return the sum of the squares of values in their units, from first to last, in float64."""
    raise NotImplementedError


@op
def row_reaches(values: NDArray[np.float32], n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the largest magnitude of each row, in units of the columns alone."""
    raise NotImplementedError


@op
def count_magnitudes(values: NDArray[np.float32], units: Units) -> NDArray[np.int64]:
    """Count the magnitudes of values in 256ths of their units, rounded down.

    Returns
    -------
    int64, (MAX_MAGNITUDE + 1,)
        What is larger counts as the last.
    """
    raise NotImplementedError


@op
def round_in_units(values: NDArray[np.float32], units: Units, threshold: int) -> NDArray[np.uint8]:
    """Return ``sign * floor(magnitude + 1 - threshold)``, at most 127 in magnitude, plus `ZERO_POINT`.

    Parameters
    ----------
    values : float32, (n,)
        In row-major order.
    units
        Of rows and columns.
    threshold
        In 256ths of a unit, as magnitudes are.
    """
    raise NotImplementedError


@op
def round_to_octaves(
    values: NDArray[np.float32], units: Units, before: NDArray[np.uint8] | None, held: float
) -> NDArray[np.uint8]:
    """Return the octave of each value against its unit, plus `ZERO_POINT`; 0 where it is not above zero.

    Parameters
    ----------
    values : float32, (n,)
        In row-major order, finite.
    units
        Of rows and columns.
    before : uint8, (n,) or None
        Codes that stay where they are near enough, but for 0.
    held
        Octaves that are near enough, 0 to 64.

    Notes
    -----
    With ``y = log2(value) - unit / 2`` the octave is y to the nearest even integer, -127 to 127, and a code
    is near enough where it is at most `held` away from y.
    """
    raise NotImplementedError


@op
def expand_units(
    rows: NDArray[np.uint8],
    columns: NDArray[np.uint8],
    elements: NDArray[np.uint8] | None,
    base: int,
    scaled: bool,
) -> NDArray[np.float32]:
    """Return the values that row, column and element codes stand for.

    Parameters
    ----------
    rows : uint8, (n_rows,)
        Half octaves above `base`; 0: zeros.
    columns : uint8, (n_columns,)
        Half octaves plus `ZERO_POINT`.
    elements : uint8, (n_rows * n_columns,) or None
        Integers in units if `scaled`, else octaves beside them, 0 for zero; both plus `ZERO_POINT`. None: the
        units themselves.
    base
        Half octaves, at most 1024 in magnitude.
    scaled
        What the elements are.
    """
    raise NotImplementedError
