"""Typed fronts of the moments codec's kernels.

Units are powers of the root of two, counted in *half octaves*: a row's and a column's, added. Integers and
codes follow from float64 sums in one order, from single float32 operations, and from comparisons, so every
implementation returns the same bits. What has an element for each of a tensor's is a tensor, on any device
and all on the same; what has one for each row or column is an array in host memory.

Sums of rows are made of slices of `LINE` elements: element i is added to sum i modulo `N_SUMS`, from first
to last, neighbouring sums are added until one is left, and slices from first to last. Sums of columns are
made of bands of `BAND` rows, each from first to last, as bands are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import op

ZERO_POINT = 128
"""Integers, residuals and column exponents are stored with this added."""

LARGEST_INTEGER = 127

FRACTION_BITS = 8
"""Of magnitudes in units, where the threshold is sought: all sums are of integers, so equal everywhere."""

MAX_MAGNITUDE = (LARGEST_INTEGER + 1) << FRACTION_BITS
"""Larger magnitudes count as this one."""

N_SUMS, LINE, BAND = 16, 1 << 12, 1 << 8
"""Running sums of a slice, elements of a slice, and rows of a band: enough of all for every core of a GPU."""

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
    columns : float64, (n_columns,)
    """

    rows: NDArray[np.float64]
    columns: NDArray[np.float64]


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


def octave_edges(held: float) -> tuple[int, ...]:
    """Return what bounds the values whose octave is near a code, 4 for an even unit and 4 for an odd one.

    Lowest exponent and fraction, then highest: of ``log2(1 + fraction / 2**23) + exponent``, counted from the
    code and the whole octaves of the unit.
    """
    edges = list[int]()
    for odd in range(2):
        for edge, inward in ((0.5 * odd - held, math.ceil), (0.5 * odd + held, math.floor)):
            whole = math.floor(edge)
            edges += whole, inward((2.0 ** (edge - whole) - 1) * (1 << 23))
    return tuple(edges)


@op
def kinds_of(values: Tensor) -> Kinds:
    """Tell what kinds of values there are; neither NaN nor -0.0 is below zero.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, at least one, as in all that follow.
    """
    raise NotImplementedError


@op
def squares_cover(squares: Tensor, values: Tensor) -> bool:
    """Whether second moments are finite, not negative, and above zero wherever a value is not zero."""
    raise NotImplementedError


@op
def sum_sides(values: Tensor, n_rows: int, squared: bool) -> Sums:
    """Sum rows and columns of finite values in row-major order; or of their squares."""
    raise NotImplementedError


@op
def relative_square(values: Tensor, units: Units) -> float:
    """Return the sum of the squares of finite values in their units: of the sums of rows, rounded once."""
    raise NotImplementedError


@op
def row_reaches(values: Tensor, n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the largest magnitude of each row of finite values, in units of the columns alone."""
    raise NotImplementedError


@op
def count_magnitudes(values: Tensor, units: Units) -> NDArray[np.int64]:
    """Count the magnitudes of finite values in 256ths of their units, rounded down.

    Returns
    -------
    int64, (MAX_MAGNITUDE + 1,)
        What is larger counts as the last.
    """
    raise NotImplementedError


@op
def round_in_units(values: Tensor, units: Units, threshold: int) -> Tensor:
    """Return ``sign * floor(magnitude + 1 - threshold)``, at most 127 in magnitude, plus `ZERO_POINT`.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite.
    units
        Of rows and columns.
    threshold
        In 256ths of a unit, as magnitudes are.

    Returns
    -------
    UInt8[Tensor, "n"]
    """
    raise NotImplementedError


@op
def round_to_octaves(values: Tensor, units: Units, before: Tensor | None, held: float) -> Tensor:
    """Return the octave of each value relative to its unit, plus `ZERO_POINT`; 0 where it is not above zero.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite.
    units
        Of rows and columns.
    before : UInt8[Tensor, "n"] or None
        Codes that stay where they are near enough, but for 0.
    held
        Octaves that are near enough, 0 to 64.

    Returns
    -------
    UInt8[Tensor, "n"]

    Notes
    -----
    With ``y = log2(value) - unit / 2`` the octave is y to the nearest even integer, -127 to 127, and a code
    is near enough where it is at most `held` away from y.
    """
    raise NotImplementedError


@op
def expand_units(rows: Tensor, columns: Tensor, elements: Tensor | None, base: int, scaled: bool) -> Tensor:
    """Return the values that row, column and element codes stand for.

    Parameters
    ----------
    rows : UInt8[Tensor, "n_rows"]
        Half octaves above `base`; 0: zeros.
    columns : UInt8[Tensor, "n_columns"]
        Half octaves plus `ZERO_POINT`.
    elements : UInt8[Tensor, "n_rows * n_columns"] or None
        Integers in units if `scaled`, else octaves beside them, 0 for zero; both plus `ZERO_POINT`. None: the
        units themselves.
    base
        Half octaves, at most 1024 in magnitude.
    scaled
        What the elements are.

    Returns
    -------
    Float32[Tensor, "n_rows * n_columns"]
    """
    raise NotImplementedError
