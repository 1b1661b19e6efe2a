"""Ops of the moments codec.

Units are powers of √2. The exponent of an element's unit, counted in *half octaves* k, is the sum of its
row's and its column's exponent, and the unit is ``2**(k / 2)``. A value is expressed in units by multiplying
it with the unit of exponent -k. That equals the reciprocal of the unit up to the last bit and is several
times as fast as a division. Integers and codes follow from float64 sums in a fixed order, single float32
operations and comparisons, so every implementation returns the same bits. Data with an entry per element are
tensors, all on the same device; data with an entry per row or column are arrays in host memory.

Row sums run over slices of `LINE` elements. In a slice, element i is added to partial sum i modulo `N_SUMS`,
from first to last; then neighbouring partial sums are added pairwise until one is left; then the slices are
added from first to last. Column sums run over bands of `BAND` rows, each from first to last, and then over
the bands.
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
"""Offset of stored integers, residuals and column exponents."""

LARGEST_INTEGER = 127

FRACTION_BITS = 8
"""Fractional bits of magnitudes in the threshold search; all sums are integer sums, equal on every device."""

MAX_MAGNITUDE = (LARGEST_INTEGER + 1) << FRACTION_BITS
"""Upper bound of counted magnitudes; larger ones are clipped to it."""

N_SUMS, LINE, BAND = 16, 1 << 12, 1 << 8
"""Partial sums per slice, elements per slice, and rows per band: enough to occupy every core of a GPU."""

LOWEST, HIGHEST = -252, 252
"""Exponents in half octaves of the smallest and the largest unit, both normal float32 numbers."""

MAX_BASE = 1024
"""Largest absolute value of a base."""

LEAST_BASE = -600
"""Smallest base, in half octaves; a base does not follow a largest value below it."""

HEADROOM = 54
"""Half octaves by which the largest value may grow before the chain needs a new base."""

NO_ROW = -(1 << 20)
"""Exponent of a row of zeros, less than every other exponent."""

EIGHTHS = tuple(2.0 ** (k / 8 - 1) for k in range(1, 8))
"""Mantissa thresholds between .5 and 1: each marks one more eighth of an octave."""

OCTAVE_CARRY = 0x800000 - 0x3504F3
"""Addend that carries mantissas of at least √2 into the exponent, so one addition rounds to octaves."""

PLAIN_THRESHOLD, LOWEST_THRESHOLD = 128, 26
"""Largest and smallest threshold in 1/256 unit: plain rounding, and a tenth; below a tenth only noise is
left."""

UNIT_RANGE = (0.25, 2.0)
"""Range of a first moment's unit relative to the unit that its bound allows."""

MAX_HALVINGS = 6
"""Maximum number of halvings of the unit if no threshold is low enough, as in tensors of very mixed scale."""

NO_BYTES = torch.zeros(0, dtype=torch.uint8)
"""Placeholder of tensors that a form lacks."""

_SQRT2 = np.float32(math.sqrt(2))

LOGARITHMS = tuple(round(256 * math.log2(1 + (k + 0.5) / 1024)) for k in range(1024))
"""``log2(1 + f)`` in 1/256 octave, indexed by the first ten bits of the fraction f."""

LEAST_MOVE = 26
"""Mean change of codes after a restore, in 1/256 octave, below which octaves are dithered
(``docs/design.md``)."""

PLACE_FACTOR, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
"""Odd multipliers that mix the bits of a position (Knuth; Appleby, MurmurHash3)."""


class Codes(NamedTuple):
    """A tensor of optimizer state as byte codes: one per row, per column and per element.

    Parameters
    ----------
    base
        Code 1 means the exponent ``base + 1`` in half octaves (in octaves for a vector).
    rows, columns, elements : UInt8[Tensor, "..."]
        Row exponents, 0 for a row of zeros; column exponents plus `ZERO_POINT`; and octaves, integers or
        residuals of the elements. Parts that a form lacks are empty.
    """

    base: int
    rows: Tensor
    columns: Tensor
    elements: Tensor

    def on(self, device: torch.device | str) -> Codes:
        """Return the same codes on a device."""
        return Codes(self.base, self.rows.to(device), self.columns.to(device), self.elements.to(device))


class Units(NamedTuple):
    """Exponents of the units in half octaves; an element's exponent is its row's plus its column's.

    Parameters
    ----------
    rows : int64, (n_rows,)
    columns : int64, (n_columns,)
    """

    rows: Int64s
    columns: Int64s


def half_log2_values(exponents: Int64s) -> NDArray[np.float32]:
    """Return ``2**(k / 2)`` in float32, with √2 rounded once; k is clipped to ±252 first.

    Examples
    --------
    >>> half_log2_values(np.array([0, 2, -2])).tolist()
    [1.0, 2.0, 0.5]
    """
    k = np.clip(exponents, LOWEST, HIGHEST)
    values: NDArray[np.float32] = np.ldexp(np.where(k & 1, _SQRT2, np.float32(1)), k >> 1).astype(np.float32)
    return values


def base_of(largest: int, before: int, known: bool) -> int:
    """Return the previous base if it is known and the largest exponent still fits, else a new one."""
    if known and 1 <= largest - before <= 255:
        return before
    return max(largest, LEAST_BASE) - (255 - HEADROOM)


@op
def round_first(
    values: Tensor, second: Tensor | None, n_rows: int, unit: float, allowed: float | None
) -> Codes | None:
    """Round a first moment to integers in units per row and column, so that the projection is preserved.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, at least one value; the same holds for the functions below.
    second : Float32[Tensor, "n"] or None
        Second moment of the same parameter. Its square root sets the units of rows and columns. Without it,
        or if it is unsuitable, the root mean squares of the rows of `values` set them.
    n_rows
        Number of rows, all of equal length.
    unit
        Unit in root mean squares of the values. 0 omits the tensor.
    allowed
        Unit that the error bound allows, divided by the root of the second moment if one is given. It
        replaces `unit`, clipped to between a quarter of `unit` and twice `unit`, unless the second moment is
        unsuitable.

    Returns
    -------
    Codes or None
        All parts are empty if only zeros remain. None if a value is not finite.

    Notes
    -----
    With z the values in units, the integers are ``sign(z) * floor(abs(z) + 1 - t)``. The threshold t is the
    largest one between .1 and .5 for which ``sum(integers * z) >= sum(z * z)``. O(n).
    """
    n = values.numel()
    if not bool(values.isfinite().all()):
        return None
    adaptive = second is not None and squares_cover(second, values)
    sums = sum_sides(second if second is not None and adaptive else values, n_rows, not adaptive)
    rows, columns = _log_means(*sums)
    # Column exponents per eighth could put the largest value of a row and column a unit too high.
    columns = ((columns + 4) >> 3).clip(-ZERO_POINT, ZERO_POINT - 1) if adaptive else np.zeros_like(columns)
    rows = np.where(rows > NO_ROW, (rows + 4) >> 3, NO_ROW)
    maxima = row_maxima(values, n_rows, columns)
    if unit == 0 or not maxima.any():
        return Codes(0, NO_BYTES, NO_BYTES, NO_BYTES)
    root = math.sqrt(relative_square(values, Units(rows, columns)) / n)
    if allowed is not None and adaptive == (second is not None):
        share = allowed / (root if adaptive else math.sqrt(float(sums[0].cumsum()[-1]) / n))
        unit = min(max(share, UNIT_RANGE[0] * unit), UNIT_RANGE[1] * unit)
    wanted = rows + ((int(_eighths(np.array(unit * root))) + 2) >> 2)
    fitted, threshold = _chosen(values, wanted, columns, maxima)
    base = base_of(int(fitted.max()), 0, False)
    codes = np.where(fitted > NO_ROW, (fitted - base).clip(1, 255), 0)
    units = Units(np.where(codes > 0, codes + base, NO_ROW), columns)
    return _codes(base, codes, columns + ZERO_POINT, round_in_units(values, units, threshold))


@op
def round_second(values: Tensor, n_rows: int, before: Codes | None, tolerance: float | None) -> Codes | None:
    """Return row and column factors in half octaves, and the octave of each element relative to them.

    The factors are the means of rows and columns (Adafactor: Shazeer & Stern, 2018, section 3).

    Parameters
    ----------
    values : Float32[Tensor, "n"]
    n_rows
        Number of rows, all of equal length.
    before
        Codes of the previous frame; a code that is still within the tolerance does not change.
    tolerance
        Tolerance of an element's code in octaves, at least .5. For rows and columns the tolerance is three
        quarters of a half octave. None: return only the factors.

    Returns
    -------
    Codes or None
        None if a value is negative or not finite.

    Notes
    -----
    O(n).
    """
    if not bool((values.isfinite() & (values >= 0)).all()):
        return None
    by_row, by_column = _log_means(*sum_sides(values, n_rows, False))
    largest, known = int(by_row.max()), before is not None
    base = base_of((largest + 2) >> 2 if largest > NO_ROW else 0, before.base if before else 0, known)
    same = before if before is not None and before.base == base else None
    rows = _near_codes(by_row - 4 * base, None if same is None else same.rows, 1)
    rows[by_row == NO_ROW] = 0
    columns = _near_codes(by_column + 4 * ZERO_POINT, None if same is None else same.columns, 0)
    elements = NO_BYTES
    if tolerance is not None:
        old = None if before is None else before.elements.to(values.device)
        elements = round_log2(values, Units(rows + base, columns - ZERO_POINT), old, tolerance)
    return _codes(base, rows, columns, elements)


@op
def round_vector(values: Tensor, before: int | None) -> Codes | None:
    """Round to powers of two; zero stays zero, and no other value becomes zero.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
    before
        Base of the previous frame, used again if possible.

    Returns
    -------
    Codes or None
        Element codes only; None if a value is negative or not finite.

    Notes
    -----
    O(n).
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
    """Return ``floor(8 log2(value))``; `NO_ROW` for zero."""
    fractions, exponents = np.frexp(values)
    found = 8 * (exponents.astype(np.int64) - 1) + np.searchsorted(EIGHTHS, fractions, side="right")
    return np.where(values > 0, found, NO_ROW)


def _log_means(rows: Float64s, columns: Float64s) -> tuple[Int64s, Int64s]:
    """Return 8 log2, rounded down, of the row means, and of the column means relative to the overall mean."""
    mean = float(rows.cumsum()[-1]) / (rows.size * columns.size)
    relative = columns / rows.size / mean if mean > 0 else np.ones(columns.size)
    return _eighths(rows / columns.size), _eighths(relative)


def _near_codes(eighths: Int64s, before: Tensor | None, least: int) -> Int64s:
    """Return half octaves as codes; an old code stays if it is near enough (no value falls on an edge)."""
    codes = ((eighths + 2) >> 2).clip(least, 255)
    if before is None:
        return codes
    old = before.cpu().numpy().astype(np.int64)
    away = eighths - 4 * old
    return np.where((old >= least) & (away >= -3) & (away <= 2), old, codes)


def _chosen(values: Tensor, rows: Int64s, columns: Int64s, maxima: Float64s) -> tuple[Int64s, int]:
    """Return row exponents and the threshold; halve the units if no threshold preserves the projection."""
    most = maxima / (LARGEST_INTEGER + 0.25)
    # A row whose integers would exceed a byte gets a coarser unit.
    least = _eighths(most)
    least = (least >> 2) + ~((least & 7 == 0) & (np.frexp(most)[0] == 0.5))
    for halvings in range(MAX_HALVINGS + 1):
        fitted = np.where(maxima > 0, np.maximum(rows - 2 * halvings, least), NO_ROW)
        threshold = _threshold(_magnitudes(values, Units(fitted, columns)))
        if threshold is not None:
            return fitted, threshold
    return fitted, LOWEST_THRESHOLD


def _threshold(magnitudes: Tensor) -> int | None:
    """Return the largest threshold that preserves the projection, or None."""
    by_size = torch.bincount(magnitudes).cpu().numpy()
    at = np.flatnonzero(by_size)
    counts = by_size[at] * at

    def falls_short(threshold: int) -> bool:
        steps = (at + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
        return int((counts * steps).sum()) << FRACTION_BITS < int((counts * at).sum())

    thresholds = range(LOWEST_THRESHOLD, PLAIN_THRESHOLD + 1)
    n = bisect.bisect_left(thresholds, True, key=falls_short)
    return thresholds[n - 1] if n else None


def squares_cover(squares: Tensor, values: Tensor) -> bool:
    """Return whether second moments are finite, nonnegative, and positive wherever a value is nonzero."""
    fits = squares.isfinite() & ((squares > 0) | ((squares == 0) & (values == 0)))
    return bool(fits.all())


def _added(parts: Tensor) -> Tensor:
    """Sum along the second-last dimension from first to last; a scan on a GPU uses another order."""
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
    """Return the sums of rows and columns of finite values, or of their squares, in row-major order."""
    # A running sum starts at +0.0; adding -0.0 leaves it unchanged.
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
    table = torch.from_numpy(half_log2_values(np.arange(LOWEST, HIGHEST + 1))).to(exponents.device)
    return table[exponents.clamp(LOWEST, HIGHEST) - LOWEST]


def relative_square(values: Tensor, units: Units) -> float:
    """Return the sum of the squares of finite values in their units; row sums are added in order."""
    relative = values.double() * _values_of(-_exponents(units, values.device))
    return float(_sums_of_rows(relative.square().view(units.rows.size, -1)).cumsum()[-1])


def row_maxima(values: Tensor, n_rows: int, columns: Int64s) -> Float64s:
    """Return the largest magnitude of each row of finite values, in units of the columns only."""
    by_column = _values_of(torch.from_numpy(-columns).to(values.device))
    maxima: Float64s = (values.double().abs().view(n_rows, -1) * by_column).amax(1).cpu().numpy()
    return maxima


def _magnitudes(values: Tensor, units: Units) -> Tensor:
    """Return the magnitudes of finite values in 1/256 of their units, rounded down and clipped."""
    shares = values.abs() * _values_of(-_exponents(units, values.device)) * float(1 << FRACTION_BITS)
    return shares.clamp(max=float(MAX_MAGNITUDE)).to(torch.int64)


def round_in_units(values: Tensor, units: Units, threshold: int) -> Tensor:
    """Return ``sign * floor(magnitude + 1 - threshold)``, at most 127 in magnitude, plus `ZERO_POINT`.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite.
    units
        Of rows and columns.
    threshold
        In units of 1/256, as magnitudes are.

    Returns
    -------
    UInt8[Tensor, "n"]
    """
    steps = (_magnitudes(values, units) + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
    steps = steps.clamp(max=LARGEST_INTEGER)
    return (torch.where(values < 0, -steps, steps) + ZERO_POINT).to(torch.uint8)


def round_log2(values: Tensor, units: Units, before: Tensor | None, tolerance: float) -> Tensor:
    """Return the octave of each value relative to its unit, plus `ZERO_POINT`; 0 for values not above zero.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite.
    units
        Of rows and columns.
    before : UInt8[Tensor, "n"] or None
        Codes of the previous frame. A code within the tolerance stays, except for 0.
    tolerance
        Tolerance in octaves, 0 to 64.

    Returns
    -------
    UInt8[Tensor, "n"]

    Notes
    -----
    With ``y = log2(value) - unit / 2`` the octave is y rounded to the nearest even integer, -127 to 127. A
    code is within the tolerance if it is at most `tolerance` away from y.
    """
    mantissas, exponents = torch.frexp(values.double())
    # For a power of two the logarithm is computed of exactly 1, so a tie is a tie on every processor. All
    # other values are farther from an edge than logarithms differ between processors.
    logarithms = (2 * mantissas).log2() + (exponents - 1)
    wanted = logarithms - 0.5 * _exponents(units, values.device)
    wanted = torch.where(values > 0, wanted, 0.0)
    codes = wanted.round().clamp(1 - ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT
    if before is not None:
        old = before.double()
        codes = torch.where((old > 0) & ((wanted + ZERO_POINT - old).abs() <= tolerance), old, codes)
    return torch.where(values > 0, codes, 0.0).to(torch.uint8)


def carry_log2(values: Tensor, units: Units, before: Tensor, rounded: Tensor) -> Tensor | None:
    """Move octave codes by as much as the values have moved; return the new codes.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite, not negative.
    units
        Of rows and columns.
    before : UInt8[Tensor, "n"]
        Octaves relative to these units, plus `ZERO_POINT`; 0 for zero.
    rounded : UInt8[Tensor, "n"]
        Codes for values that are zero now or were zero before.

    Returns
    -------
    UInt8[Tensor, "n"] or None
        None if the values are on average less than `LEAST_MOVE` from their codes: a threshold would never
        move values that change steadily but slowly.

    Notes
    -----
    Let z be the distance of a value from its code in octaves, in units of 1/256 by `LOGARITHMS`. A code moves
    by ``sign(z) * floor(abs(z) + 1 - t)``. Values that have grown have one threshold t, the others another.
    Each t is the largest one between .1 and .5 for which ``sum(move * z) >= sum(z * z)`` over its values.
    O(n).
    """
    moves = _distances(values, units) - 256 * (before.long() - ZERO_POINT)
    moves = moves.clamp(-MAX_MAGNITUDE, MAX_MAGNITUDE)
    known = (before > 0) & (values > 0)
    if int(moves[known].abs().sum()) < LEAST_MOVE * int(known.sum()):
        return None
    steps = torch.zeros_like(moves)
    for sign in (1, -1):
        there = known & (sign * moves > 0)
        more = (1 << FRACTION_BITS) - (_threshold(moves[there].abs()) or LOWEST_THRESHOLD)
        steps = torch.where(there, sign * ((sign * moves + more) >> FRACTION_BITS), steps)
    carried = (before.long() + steps).clamp(1, 255).to(torch.uint8)
    return torch.where(known, carried, rounded)


@op
def dither_log2(values: Tensor, units: Units, dither_seed: int) -> Tensor:
    """Return the octave below or above each value relative to its unit, chosen by dither, plus `ZERO_POINT`.

    The nearer octave is more likely, so that octaves are unbiased (stochastic rounding).

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        In row-major order, finite, not negative.
    units
        Of rows and columns.
    dither_seed
        Dither seed, 1 to 255. The same seed gives the same number at a position, so a constant value keeps
        its octave.

    Returns
    -------
    UInt8[Tensor, "n"]
        0 for zero.

    Notes
    -----
    With ``y = log2(value) - unit / 2`` in units of 1/256 by `LOGARITHMS`, the octave is ``floor(y + k /
    256)``, -127 to 127, where k, 0 to 255, is a hash of position and seed. O(n).
    """
    mixed = torch.arange(values.numel(), device=values.device) + dither_seed * PLACE_FACTOR
    mixed = (mixed * FIRST_FACTOR) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * SECOND_FACTOR) & 0xFFFFFFFF
    codes = (_distances(values, units) + (mixed >> 24)) >> 8
    codes = codes.clamp(1 - ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT
    return torch.where(values > 0, codes, 0).to(torch.uint8)


def _distances(values: Tensor, units: Units) -> Tensor:
    """Return ``log2(value) - unit / 2`` in units of 1/256 octave."""
    mantissas, exponents = torch.frexp(values)
    above = torch.tensor(LOGARITHMS, device=values.device)[((2 * mantissas - 1) * 1024).int().clamp(0)]
    return 256 * (exponents.long() - 1) + above - 128 * _exponents(units, values.device).view(-1)


@op
def expand_units(rows: Tensor, columns: Tensor, elements: Tensor | None, base: int, scaled: bool) -> Tensor:
    """Return the values that row, column and element codes represent.

    Parameters
    ----------
    rows : UInt8[Tensor, "n_rows"]
        Half octaves above `base`; 0 means a row of zeros.
    columns : UInt8[Tensor, "n_columns"]
        Half octaves plus `ZERO_POINT`.
    elements : UInt8[Tensor, "n_rows * n_columns"] or None
        Integers in units if `scaled`, otherwise octaves relative to the units, 0 for zero; both plus
        `ZERO_POINT`. None: return the units.
    base
        Half octaves, at most 1024 in magnitude.
    scaled
        Whether the elements are integers in units.

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
