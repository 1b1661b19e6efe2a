"""The moments codec's ops.

Units are powers of the root of two, counted in *half octaves*: a row's and a column's, added. To take a value
in units is to multiply it with the unit of the negative exponent: one over the unit but for the last bit, and
several times as fast. Integers and codes follow from float64 sums in one order, from single float32
operations, and from comparisons, so every implementation returns the same bits. What has an element for each
of a tensor's is a tensor, on any device and all on the same; what has one for each row or column is an array
in host memory.

Sums of rows are made of slices of `LINE` elements: element i is added to sum i modulo `N_SUMS`, from first
to last, neighbouring sums are added until one is left, and slices from first to last. Sums of columns are
made of bands of `BAND` rows, each from first to last, as bands are.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import op

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

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

MAX_BASE = 1024
"""Largest magnitude of a base."""

LEAST_BASE = -600
"""Half octaves of the largest value below which a base does not follow it."""

HEADROOM = 54
"""Half octaves that the largest value may grow by before the codes of a chain begin anew."""

NO_ROW = -(1 << 20)
"""Exponent of a row of zeros, below every other."""

EIGHTHS = tuple(2.0 ** (k / 8 - 1) for k in range(1, 8))
"""Mantissas from .5 to 1 from which on there is one eighth of an octave more."""

OCTAVE_CARRY = 0x800000 - 0x3504F3
"""What carries a mantissa from the root of two on into the exponent: rounding to octaves is one addition."""

PLAIN_THRESHOLD, LOWEST_THRESHOLD = 128, 26
"""Thresholds in 256ths of a unit: plain rounding, and a tenth, below which all that is left is noise."""

UNIT_RANGE = (0.25, 2.0)
"""Of the unit of a first moment, by what it is allowed."""

MAX_HALVINGS = 6
"""Of the unit, where no threshold is low enough: values of very different size in one tensor."""

NO_BYTES = torch.zeros(0, dtype=torch.uint8)
"""Of tensors that a form does not have."""

_SQRT2 = np.float32(math.sqrt(2))

LOGARITHMS = tuple(round(256 * math.log2(1 + (k + 0.5) / 1024)) for k in range(1024))
"""Of one plus a fraction, by its first ten bits: 256ths of an octave."""

LEAST_MOVE = 26
"""Of codes after a restore, 256ths of an octave: below it octaves are drawn (``docs/design.md``)."""

PLACE_FACTOR, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Odd numbers that mix the bits of a place (Knuth; Appleby, MurmurHash3)."""


class Codes(NamedTuple):
    """A tensor of optimizer state as bytes: of each row and column, and of each element.

    Parameters
    ----------
    base
        Half octaves (of a vector, octaves) that code 1 stands for is ``base + 1``.
    rows, columns, elements : UInt8[Tensor, "..."]
        Exponents of rows, 0 for a row of zeros, and of columns plus `ZERO_POINT`; octaves, integers or
        residuals of elements. What there is not is empty.
    """

    base: int
    rows: Tensor
    columns: Tensor
    elements: Tensor

    def on(self, device: torch.device | str) -> Codes:
        """Return the same codes on a device."""
        return Codes(self.base, self.rows.to(device), self.columns.to(device), self.elements.to(device))


class Units(NamedTuple):
    """Exponents of the unit of each element, in half octaves: that of its row and that of its column.

    Parameters
    ----------
    rows : int64, (n_rows,)
    columns : int64, (n_columns,)
    """

    rows: Int64s
    columns: Int64s


def half_octave_values(exponents: Int64s) -> NDArray[np.float32]:
    """Return ``2**(k / 2)`` in float32, the root of two rounded once; k is first clipped to +-252.

    Examples
    --------
    >>> half_octave_values(np.array([0, 2, -2])).tolist()
    [1.0, 2.0, 0.5]
    """
    k = np.clip(exponents, LOWEST, HIGHEST)
    values: NDArray[np.float32] = np.ldexp(np.where(k & 1, _SQRT2, np.float32(1)), k >> 1).astype(np.float32)
    return values


def base_of(largest: int, before: int, known: bool) -> int:
    """Return the base of the frame before, if known, where the largest exponent still fits, or a new one."""
    if known and 1 <= largest - before <= 255:
        return before
    return max(largest, LEAST_BASE) - (255 - HEADROOM)


@op
def round_first(
    values: Tensor, second: Tensor | None, n_rows: int, unit: float, allowed: float | None
) -> Codes | None:
    """Round to integers in units of a power of two times row and column, so that the projection is preserved.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, at least one, as in all that follow.
    second : Float32[Tensor, "n"] or None
        The second moment of the same parameter: its root gives rows and columns their units. Without
        it, or where it will not do, the root mean squares of the values' own rows do.
    n_rows
        Rows of equal length.
    unit
        In root mean squares of the values, where rows and columns are equal; 0: they are left out.
    allowed
        The unit that is fine enough, over the root of the second moment if there is one: taken in the place
        of `unit`, but for a quarter of that at least and twice that at most. Not where there is one that
        will not do.

    Returns
    -------
    Codes or None
        All empty where nothing but zeros is left; None where a value is not finite.

    Notes
    -----
    With z the values in units, the integers are ``sign(z) * floor(abs(z) + 1 - t)`` with the largest t
    between .1 and .5 for which their sum of products with z reaches that of the squares of z. O(n).
    """
    n = values.numel()
    if not bool(values.isfinite().all()):
        return None
    adaptive = second is not None and squares_cover(second, values)
    sums = sum_sides(second if second is not None and adaptive else values, n_rows, not adaptive)
    rows, columns = _log_means(sums)
    # Own columns would give the largest value of a row and a column a unit beyond itself.
    columns = ((columns + 4) >> 3).clip(-ZERO_POINT, ZERO_POINT - 1) if adaptive else np.zeros_like(columns)
    rows = np.where(rows > NO_ROW, (rows + 4) >> 3, NO_ROW)
    reaches = row_reaches(values, n_rows, columns)
    if unit == 0 or not reaches.any():
        return Codes(0, NO_BYTES, NO_BYTES, NO_BYTES)
    root = math.sqrt(relative_square(values, Units(rows, columns)) / n)
    if allowed is not None and adaptive == (second is not None):
        share = allowed / (root if adaptive else math.sqrt(float(sums[0].cumsum()[-1]) / n))
        unit = min(max(share, UNIT_RANGE[0] * unit), UNIT_RANGE[1] * unit)
    wanted = rows + ((int(_eighths(np.array(unit * root))) + 2) >> 2)
    fitted, threshold = _chosen(values, wanted, columns, reaches)
    base = base_of(int(fitted.max()), 0, False)
    codes = np.where(fitted > NO_ROW, (fitted - base).clip(1, 255), 0)
    units = Units(np.where(codes > 0, codes + base, NO_ROW), columns)
    return _codes(base, codes, columns + ZERO_POINT, round_in_units(values, units, threshold))


@op
def round_second(values: Tensor, n_rows: int, before: Codes | None, tolerance: float | None) -> Codes | None:
    """Return factors of rows and columns in half octaves, and the octave of each element relative to them.

    The factors are the means of rows and columns (Adafactor: Shazeer & Stern, 2018, section 3).

    Parameters
    ----------
    values : Float32[Tensor, "n"]
    n_rows
        Rows of equal length.
    before
        Those of the frame before: codes stay where they are near enough.
    tolerance
        Octaves that are near enough for an element, at least .5; for a row or a column it is three quarters
        of a half octave. None: factors alone.

    Returns
    -------
    Codes or None
        None where a value is below zero or not finite. O(n).
    """
    if not bool((values.isfinite() & (values >= 0)).all()):
        return None
    by_row, by_column = _log_means(sum_sides(values, n_rows, False))
    largest, known = int(by_row.max()), before is not None
    base = base_of((largest + 2) >> 2 if largest > NO_ROW else 0, before.base if before else 0, known)
    same = before if before is not None and before.base == base else None
    rows = _near_codes(by_row - 4 * base, None if same is None else same.rows, 1)
    rows[by_row == NO_ROW] = 0
    columns = _near_codes(by_column + 4 * ZERO_POINT, None if same is None else same.columns, 0)
    elements = NO_BYTES
    if tolerance is not None:
        old = None if before is None else before.elements.to(values.device)
        elements = round_to_octaves(values, Units(rows + base, columns - ZERO_POINT), old, tolerance)
    return _codes(base, rows, columns, elements)


@op
def round_vector(values: Tensor, before: int | None) -> Codes | None:
    """Round to powers of two; zero stays zero, and nothing else becomes it.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
    before
        The base of the frame before, which is used again where it can be.

    Returns
    -------
    Codes or None
        Elements alone; None where a value is below zero or not finite. O(n).
    """
    if not bool((values.isfinite() & (values >= 0)).all()):
        return None
    exponents = ((values.view(torch.int32) + OCTAVE_CARRY) >> 23) - 127
    positive = values > 0
    largest = int(exponents[positive].max()) if bool(positive.any()) else 0
    base = base_of(largest, before or 0, before is not None)
    codes = torch.where(positive, (exponents - base).clamp(1, 255), 0).to(torch.uint8)
    return Codes(base, NO_BYTES, NO_BYTES, codes)


def _codes(base: int, rows: Int64s, columns: Int64s, elements: Tensor) -> Codes:
    by_row, by_column = (torch.from_numpy(side.astype(np.uint8)) for side in (rows, columns))
    return Codes(base, by_row, by_column, elements)


def _eighths(values: Float64s) -> Int64s:
    """Return the whole eighths of octaves in numbers; `NO_ROW` in zero."""
    fractions, exponents = np.frexp(values)
    found = 8 * (exponents.astype(np.int64) - 1) + np.searchsorted(EIGHTHS, fractions, side="right")
    return np.where(values > 0, found, NO_ROW)


def _log_means(
    sums: tuple[Float64s, Float64s],
) -> tuple[Int64s, Int64s]:
    """Return the eighths of row means, and of column means over that of all."""
    rows, columns = sums
    mean = float(rows.cumsum()[-1]) / (rows.size * columns.size)
    relative = columns / rows.size / mean if mean > 0 else np.ones(columns.size)
    return _eighths(rows / columns.size), _eighths(relative)


def _near_codes(eighths: Int64s, before: Tensor | None, least: int) -> Int64s:
    """Return half octaves as codes; old ones where those are near enough: no number is on their edges."""
    codes = ((eighths + 2) >> 2).clip(least, 255)
    if before is None:
        return codes
    old = before.cpu().numpy().astype(np.int64)
    away = eighths - 4 * old
    return np.where((old >= least) & (away >= -3) & (away <= 2), old, codes)


def _chosen(values: Tensor, rows: Int64s, columns: Int64s, reaches: Float64s) -> tuple[Int64s, int]:
    """Return exponents of rows and the threshold; where none preserves the projection, units are halved."""
    most = reaches / (LARGEST_INTEGER + 0.25)
    # A row whose integers would not fit a byte has a coarser unit.
    least = _eighths(most)
    least = (least >> 2) + ~((least & 7 == 0) & (np.frexp(most)[0] == 0.5))
    for halvings in range(MAX_HALVINGS + 1):
        fitted = np.where(reaches > 0, np.maximum(rows - 2 * halvings, least), NO_ROW)
        threshold = _threshold(count_magnitudes(values, Units(fitted, columns)))
        if threshold is not None:
            return fitted, threshold
    return fitted, LOWEST_THRESHOLD


def _threshold(counts: Int64s) -> int | None:
    """Return the largest threshold that preserves the projection; None where none is low enough.

    `counts` are those of magnitudes.
    """
    at = np.flatnonzero(counts)
    counts = counts[at] * at

    def falls_short(threshold: int) -> bool:
        steps = (at + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
        return int((counts * steps).sum()) << FRACTION_BITS < int((counts * at).sum())

    thresholds = range(LOWEST_THRESHOLD, PLAIN_THRESHOLD + 1)
    n = bisect.bisect_left(thresholds, True, key=falls_short)
    return thresholds[n - 1] if n else None


def squares_cover(squares: Tensor, values: Tensor) -> bool:
    """Whether second moments are finite, not negative, and above zero wherever a value is not zero."""
    fits = squares.isfinite() & ((squares > 0) | ((squares == 0) & (values == 0)))
    return bool(fits.all())


def _added(parts: Tensor) -> Tensor:
    """Add up along the last dimension but one, from first to last: a scan on a GPU has another order."""
    total = torch.zeros_like(parts[..., 0, :])
    for k in range(parts.shape[-2]):
        total = total + parts[..., k, :]
    return total


def _sums_of_rows(terms: Tensor) -> Float64s:
    n_rows, n = terms.shape
    line = min(LINE, n + -n % N_SUMS)
    sums = _added(torch.nn.functional.pad(terms, (0, -n % line)).view(n_rows, -1, line // N_SUMS, N_SUMS))
    while sums.shape[-1] > 1:
        sums = sums[..., 0::2] + sums[..., 1::2]
    found: Float64s = sums[..., 0].cpu().cumsum(1)[:, -1].numpy()
    return found


def sum_sides(values: Tensor, n_rows: int, squared: bool) -> tuple[Float64s, Float64s]:
    """Sum rows and columns of finite values in row-major order; or of their squares."""
    # A running sum begins with +0.0, which -0.0 does not change.
    terms = values.double().view(n_rows, -1) + 0.0
    if squared:
        terms *= terms
    band = min(BAND, n_rows)
    bands = torch.nn.functional.pad(terms, (0, 0, 0, -n_rows % band)).view(-1, band, terms.shape[1])
    return _sums_of_rows(terms), _added(bands).cpu().cumsum(0)[-1].numpy()


def _exponents(units: Units, device: torch.device) -> Tensor:
    rows, columns = (torch.from_numpy(side).to(device) for side in units)
    return (rows[:, None] + columns[None, :]).view(-1)


def _values_of(exponents: Tensor) -> Tensor:
    table = torch.from_numpy(half_octave_values(np.arange(LOWEST, HIGHEST + 1))).to(exponents.device)
    return table[exponents.clamp(LOWEST, HIGHEST) - LOWEST]


def relative_square(values: Tensor, units: Units) -> float:
    """Return the sum of the squares of finite values in their units: the sums of rows from first to last."""
    relative = values.double() * _values_of(-_exponents(units, values.device))
    return float(_sums_of_rows(relative.square().view(units.rows.size, -1)).cumsum()[-1])


def row_reaches(values: Tensor, n_rows: int, columns: Int64s) -> Float64s:
    """Return the largest magnitude of each row of finite values, in units of the columns alone."""
    by_column = _values_of(torch.from_numpy(-columns).to(values.device))
    reaches: Float64s = (values.double().abs().view(n_rows, -1) * by_column).amax(1).cpu().numpy()
    return reaches


def _magnitudes(values: Tensor, units: Units) -> Tensor:
    shares = values.abs() * _values_of(-_exponents(units, values.device)) * float(1 << FRACTION_BITS)
    return shares.clamp(max=float(MAX_MAGNITUDE)).to(torch.int64)


def count_magnitudes(values: Tensor, units: Units) -> Int64s:
    """Count the magnitudes of finite values in 256ths of their units, rounded down.

    Returns
    -------
    int64, (MAX_MAGNITUDE + 1,)
        What is larger counts as the last.
    """
    counts: Int64s = torch.bincount(_magnitudes(values, units), minlength=MAX_MAGNITUDE + 1).cpu().numpy()
    return counts


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
    steps = (_magnitudes(values, units) + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
    steps = steps.clamp(max=LARGEST_INTEGER)
    return (torch.where(values < 0, -steps, steps) + ZERO_POINT).to(torch.uint8)


def round_to_octaves(values: Tensor, units: Units, before: Tensor | None, tolerance: float) -> Tensor:
    """Return the octave of each value relative to its unit, plus `ZERO_POINT`; 0 where it is not above zero.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite.
    units
        Of rows and columns.
    before : UInt8[Tensor, "n"] or None
        Codes that stay where they are near enough, but for 0.
    tolerance
        Octaves that are near enough, 0 to 64.

    Returns
    -------
    UInt8[Tensor, "n"]

    Notes
    -----
    With ``y = log2(value) - unit / 2`` the octave is y to the nearest even integer, -127 to 127, and a code
    is near enough where it is at most `tolerance` away from y.
    """
    mantissas, exponents = torch.frexp(values.double())
    # Of a power of two the logarithm is taken of one, so that a tie is one on every processor; all others are
    # further from an edge than logarithms differ.
    logarithms = (2 * mantissas).log2() + (exponents - 1)
    wanted = logarithms - 0.5 * _exponents(units, values.device)
    wanted = torch.where(values > 0, wanted, 0.0)
    codes = wanted.round().clamp(1 - ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT
    if before is not None:
        old = before.double()
        codes = torch.where((old > 0) & ((wanted + ZERO_POINT - old).abs() <= tolerance), old, codes)
    return torch.where(values > 0, codes, 0.0).to(torch.uint8)


def carry_octaves(values: Tensor, units: Units, before: Tensor, rounded: Tensor) -> Tensor | None:
    """Return octaves that have moved, from those before, by what the values have moved.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite, not negative.
    units
        Of rows and columns.
    before : UInt8[Tensor, "n"]
        Octaves relative to these units, plus `ZERO_POINT`; 0 for what was zero.
    rounded : UInt8[Tensor, "n"]
        What becomes of a value that was zero, or is.

    Returns
    -------
    UInt8[Tensor, "n"] or None
        None where values are less than `LEAST_MOVE` from their codes in the mean: a threshold would leave all
        that move steadily, if slowly, where they are.

    Notes
    -----
    With z how far a value is from its code, in octaves and whole 256ths by `LOGARITHMS`, codes move by
    ``sign(z) * floor(abs(z) + 1 - t)``, with a threshold t for values that have grown and one for the
    others, each the largest between .1 and .5 for which the moves' sum of products with z reaches that of
    the squares of z. O(n).
    """
    moves = _distances(values, units) - 256 * (before.long() - ZERO_POINT)
    moves = moves.clamp(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    known = (before > 0) & (values > 0)
    if int(moves[known].abs().sum()) < LEAST_MOVE * int(known.sum()):
        return None
    steps = torch.zeros_like(moves)
    for sign in (1, -1):
        there = known & (sign * moves > 0)
        counts = torch.bincount(moves[there].abs(), minlength=1).cpu().numpy()
        more = (1 << FRACTION_BITS) - (_threshold(counts) or LOWEST_THRESHOLD)
        steps = torch.where(there, sign * ((sign * moves + more) >> FRACTION_BITS), steps)
    carried = (before.long() + steps).clamp(1, 255).to(torch.uint8)
    return torch.where(known, carried, rounded)


@op
def draw_octaves(values: Tensor, units: Units, draw: int) -> Tensor:
    """Return the octave below or above each value relative to its unit, by chance, plus `ZERO_POINT`.

    The nearer one has the better chance, so that octaves are right in the mean (stochastic rounding).

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite, not negative.
    units
        Of rows and columns.
    draw
        1 to 255. The same one draws the same number for a place again, so that a value that stays keeps its
        octave.

    Returns
    -------
    UInt8[Tensor, "n"]
        0 for zero.

    Notes
    -----
    With ``y = log2(value) - unit / 2`` in whole 256ths by `LOGARITHMS`, the octave is ``floor(y + k / 256)``,
    -127 to 127, where k is a hash of place and draw, 0 to 255. O(n).
    """
    mixed = torch.arange(values.numel(), device=values.device) + draw * PLACE_FACTOR
    mixed = (mixed * FIRST_FACTOR) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * SECOND_FACTOR) & 0xFFFFFFFF
    codes = (_distances(values, units) + (mixed >> 24)) >> 8
    codes = codes.clamp(1 - ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT
    return torch.where(values > 0, codes, 0).to(torch.uint8)


def _distances(values: Tensor, units: Units) -> Tensor:
    """Return logarithms of values relative to their units, in 256ths of an octave."""
    mantissas, exponents = torch.frexp(values)
    above = torch.tensor(LOGARITHMS, device=values.device)[((2 * mantissas - 1) * 1024).int().clamp(0)]
    return 256 * (exponents.long() - 1) + above - 128 * _exponents(units, values.device).view(-1)


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
    exponents = rows.int()[:, None] + (columns.int() - ZERO_POINT) + base
    if elements is not None and not scaled:
        exponents = exponents + 2 * (elements.int().view(exponents.shape) - ZERO_POINT)
    units = _values_of(exponents)
    units[rows == 0] = 0
    flat = units.view(-1)
    if elements is not None and not scaled:
        flat[elements == 0] = 0
    if elements is not None and scaled:
        flat = flat * (elements.float() - ZERO_POINT)
    return flat
