"""Numba kernels of the moments codec: one call a tensor, because a small tensor's time is that of its calls.

`inshrink_core.ops.moments` documents the functions; `ops/reference/moments.py` has their twins in torch.
"""

from __future__ import annotations

import functools
import math
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.execution import new_array
from inshrink_core.ops.cpu.compiled import kernel, part
from inshrink_core.ops.moments import (
    BAND,
    EIGHTHS,
    FRACTION_BITS,
    HIGHEST,
    LARGEST_INTEGER,
    LINE,
    LOWEST,
    LOWEST_THRESHOLD,
    MAX_BASE,
    MAX_HALVINGS,
    MAX_MAGNITUDE,
    N_SUMS,
    NO_BYTES,
    NO_ROW,
    OCTAVE_CARRY,
    PLAIN_THRESHOLD,
    UNIT_RANGE,
    ZERO_POINT,
    Codes,
    base_of,
    half_octave_values,
    octave_edges,
)

__all__: list[str] = []

_F32, _F64, _I32, _U8 = np.float32, np.float64, np.int32, np.uint8

_UNITS = half_octave_values(np.arange(LOWEST, HIGHEST + 1))
_TABLE = half_octave_values(np.arange(-MAX_BASE - 3 * ZERO_POINT, MAX_BASE + 6 * ZERO_POINT))
"""Units of all bases, each with those of all codes."""

_EIGHTHS = np.array(EIGHTHS)
_NO_SQUARES = np.zeros(0, np.float32)
_REFUSED, _EMPTY, _DONE = 0, 1, 2
"""How rounding ends: there are values that will not do, nothing but zeros is left, there are codes."""

_base_of = part(base_of)

_INFINITE = 0x7F800000
"""Bits of float32 infinity: of finite numbers, without the sign, less."""

_PAST_ROOT = 0x3504F4
"""Fraction of the first float32 above the root of two."""

_FRACTION = 0x7FFFFF
_LEAST_NORMAL = 0x800000
_NORMALIZING_BITS = 24
_BIAS = 127


class _Rooms(threading.local):
    def __init__(self) -> None:
        self.counts = np.zeros((3, MAX_MAGNITUDE + 1), np.int64)


_rooms = _Rooms()
"""Counts of magnitudes, zeros between calls, and two rows beside for those that occur."""


@part
def _kinds(bits: NDArray[np.int32]) -> tuple[np.bool, np.bool]:  # pragma: no cover - compiled
    """Whether all numbers are finite, and whether some are below zero."""
    largest, negative = _I32(0), _I32(0)
    for i in range(bits.size):
        size = _I32(bits[i] & _I32(0x7FFFFFFF))
        largest = size if size > largest else largest
        there = (size != _I32(0)) & (size <= _I32(_INFINITE))
        negative = _I32(negative | (bits[i] if there else _I32(0)))
    return largest < _I32(_INFINITE), negative < _I32(0)


@part
def _covers(squares: NDArray[np.int32], values: NDArray[np.int32]) -> bool:  # pragma: no cover - compiled
    """Whether second moments, as bits, are finite, not negative, and zero only where a value is."""
    found = 0
    for i in range(values.size):
        square, value = squares[i], _I32(values[i] & _I32(0x7FFFFFFF))
        # As integers, -0.0 is the least, and numbers below zero and NaN are out of range.
        zero = _I32(square & _I32(0x7FFFFFFF)) == _I32(0)
        fits = (square < _I32(_INFINITE)) & (square > _I32(0))
        found += not (fits | (zero & (value == _I32(0))))
    return found == 0


@part
def _sum_up(sums: NDArray[np.float64]) -> np.float64:  # pragma: no cover - compiled
    """Add neighbours until one is left, and set all to zero."""
    left = N_SUMS
    while left > 1:
        left //= 2
        for k in range(left):
            sums[k] = sums[2 * k] + sums[2 * k + 1]
    total: np.float64 = sums[0]
    sums[:] = _F64(0.0)
    return total


@part
def _sums(
    values: NDArray[np.float32],
    squared: bool,
    sums: NDArray[np.float64],
    band: NDArray[np.float64],
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Fill in the sums of rows and of columns; all arrays are zeros."""
    n = columns.size
    for row in range(rows.size):
        line = values[row * n : (row + 1) * n]
        for begin in range(0, n, LINE):
            end = min(begin + LINE, n)
            whole = end - (end - begin) % N_SUMS
            # A constant number of sums: a loop to the end would not become vector instructions.
            for first in range(begin, whole, N_SUMS):
                for k in range(N_SUMS):
                    value = _F64(line[first + k])
                    value = value * value if squared else value
                    sums[k] += value
                    band[first + k] += value
            for i in range(whole, end):
                value = _F64(line[i])
                value = value * value if squared else value
                sums[i - whole] += value
                band[i] += value
            rows[row] += _sum_up(sums)
        if row % BAND == BAND - 1 or row == rows.size - 1:
            for i in range(n):
                columns[i] += band[i]
                band[i] = _F64(0.0)


@part
def _eighths(value: np.float64) -> np.int64:  # pragma: no cover - compiled
    """Return the whole eighths of octaves in a number; `NO_ROW` in zero."""
    fraction, exponent = math.frexp(value)
    found = np.int64(8 * (exponent - 1))
    for k in range(7):
        found += fraction >= _EIGHTHS[k]
    return found if value > 0.0 else np.int64(NO_ROW)


@part
def _log_means(
    rows: NDArray[np.float64],
    columns: NDArray[np.float64],
    by_row: NDArray[np.int64],
    by_column: NDArray[np.int64],
) -> np.float64:  # pragma: no cover - compiled
    """Find the eighths of row means, and of column means over that of all; return the sum of all."""
    total = _F64(0.0)
    for row in range(rows.size):
        by_row[row] = _eighths(rows[row] / columns.size)
        total += rows[row]
    mean = total / (rows.size * columns.size)
    for i in range(columns.size):
        by_column[i] = _eighths(columns[i] / rows.size / mean if total > 0.0 else _F64(1.0))
    return total


@part
def _clipped(value: np.int64, low: int, high: int) -> np.int64:  # pragma: no cover - compiled
    """Return the nearest number from low to high."""
    value = value if value > low else np.int64(low)
    return value if value < high else np.int64(high)


@part
def _prepare(
    columns: NDArray[np.int64], units: NDArray[np.float32], by_row: NDArray[np.float32]
) -> tuple[np.int64, np.int64]:  # pragma: no cover - compiled
    """Look the columns' units up for even and for odd rows; return the least and the largest column."""
    low, high = columns[0], columns[0]
    for i in range(columns.size):
        low, high = min(low, columns[i]), max(high, columns[i])
        by_row[0, i] = units[columns[i] - LOWEST]
        by_row[1, i] = units[columns[i] + 1 - LOWEST]
    return low, high


@part
def _find_units(
    row: np.int64,
    columns: NDArray[np.int64],
    bounds: tuple[np.int64, np.int64],
    units: NDArray[np.float32],
    by_row: NDArray[np.float32],
) -> tuple[np.int64, np.float32]:  # pragma: no cover - compiled
    """Return which line of `by_row` has a row's units, and a power of two that they are short of.

    Where the clipping of exponents counts, units are looked up one by one.
    """
    if LOWEST <= row <= HIGHEST and row + bounds[0] >= LOWEST and row + bounds[1] <= HIGHEST:
        odd = row & 1
        return odd, units[row - odd - LOWEST]
    for i in range(columns.size):
        by_row[2, i] = units[_clipped(row + columns[i], LOWEST, HIGHEST) - LOWEST]
    return np.int64(2), _F32(1.0)


@part
def _relative_square(
    line: NDArray[np.float32], found: NDArray[np.float32], scale: np.float32, sums: NDArray[np.float64]
) -> np.float64:  # pragma: no cover - compiled
    """Add up the squares of a row's values in units; `sums` are zeros."""
    n, square = line.size, _F64(0.0)
    for begin in range(0, n, LINE):
        end = min(begin + LINE, n)
        whole = end - (end - begin) % N_SUMS
        for first in range(begin, whole, N_SUMS):
            for k in range(N_SUMS):
                relative = _F64(line[first + k]) / _F64(_F32(found[first + k] * scale))
                sums[k] += relative * relative
        for i in range(whole, end):
            relative = _F64(line[i]) / _F64(_F32(found[i] * scale))
            sums[i - whole] += relative * relative
        square += _sum_up(sums)
    return square


@part
def _reach(
    line: NDArray[np.float32], units: NDArray[np.float32]
) -> np.float64:  # pragma: no cover - compiled
    """Return the largest magnitude of a row in units of the columns."""
    largest = np.int64(0)
    for i in range(line.size):
        # As integers: of floats, whose order NaN spoils, no vector takes the largest.
        reach = _F64(np.abs(_F64(line[i])) / _F64(units[i])).view(np.int64)
        largest = reach if reach > largest else largest
    return np.int64(largest).view(np.float64)


@part
def _magnitude(value: np.float32, unit: np.float32) -> np.int32:  # pragma: no cover - compiled
    """Return a magnitude in 256ths of a unit."""
    share = _F32(_F32(np.abs(value) / unit) * _F32(1 << FRACTION_BITS))
    return _I32(share if share < _F32(MAX_MAGNITUDE) else _F32(MAX_MAGNITUDE))


@part
def _find_threshold(counts: NDArray[np.int64], largest: int) -> int:  # pragma: no cover - compiled
    """Return the largest threshold that preserves the projection, or -1; the counts become zeros."""
    n, wanted = 0, np.int64(0)
    for size in range(largest + 1):
        if counts[0, size] > 0:
            counts[1, n], counts[2, n] = size, counts[0, size] * size
            wanted += counts[2, n] * size
            counts[0, size] = 0
            n += 1
    low, high, best = LOWEST_THRESHOLD, PLAIN_THRESHOLD, -1
    while low <= high:
        threshold, found = (low + high) // 2, np.int64(0)
        for k in range(n):
            found += counts[2, k] * ((counts[1, k] + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS)
        if found << FRACTION_BITS >= wanted:
            best, low = threshold, threshold + 1
        else:
            high = threshold - 1
    return best


@part
def _count_magnitudes(
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    bounds: tuple[np.int64, np.int64],
    units: NDArray[np.float32],
    by_row: NDArray[np.float32],
    places: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> np.int32:  # pragma: no cover - compiled
    """Count magnitudes; return the largest."""
    n, largest = columns.size, _I32(0)
    for row in range(rows.size):
        line = values[row * n : (row + 1) * n]
        which, scale = _find_units(rows[row], columns, bounds, units, by_row)
        found = by_row[which]
        for i in range(n):
            place = _magnitude(line[i], _F32(found[i] * scale))
            largest = place if place > largest else largest
            places[i] = place
        for i in range(n):
            counts[places[i]] += 1
    return largest


@part
def _round_line(
    line: NDArray[np.float32],
    found: NDArray[np.float32],
    scale: np.float32,
    threshold: int,
    rounded: NDArray[np.uint8],
) -> None:  # pragma: no cover - compiled
    """Round the values of a row to integers in their units."""
    more, top, zero = _I32((1 << FRACTION_BITS) - threshold), _I32(LARGEST_INTEGER), _I32(ZERO_POINT)
    for i in range(line.size):
        magnitude = _magnitude(line[i], _F32(found[i] * scale))
        whole = _I32(_I32(magnitude + more) >> _I32(FRACTION_BITS))
        whole = whole if whole < top else top
        rounded[i] = _U8(zero - whole if line[i] < _F32(0.0) else zero + whole)


@kernel
def _round_first(
    values: NDArray[np.float32],
    squares: NDArray[np.float32],
    unit: float,
    allowed: float,
    units: NDArray[np.float32],
    counts: NDArray[np.int64],
    sides: NDArray[np.float64],
    exponents: NDArray[np.int64],
    by_row: NDArray[np.float32],
    places: NDArray[np.int32],
    rows: NDArray[np.uint8],
    columns: NDArray[np.uint8],
    elements: NDArray[np.uint8],
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Round a first moment; return how that ended, and the base. `squares` are empty where there are none."""
    n_rows, n = rows.size, columns.size
    if not _kinds(values.view(np.int32))[0]:
        return _REFUSED, 0
    adaptive = squares.size > 0 and _covers(squares.view(np.int32), values.view(np.int32))
    sums, sides = sides[:N_SUMS], sides[N_SUMS:]
    row_sums, band, column_sums = sides[:n_rows], sides[n_rows : n_rows + n], sides[n_rows + n :]
    _sums(squares if adaptive else values, not adaptive, sums, band, row_sums, column_sums)
    by_hand, fitted, shifts = exponents[:n_rows], exponents[n_rows : 2 * n_rows], exponents[2 * n_rows :]
    total = _log_means(row_sums, column_sums, by_hand, shifts)
    for i in range(n):
        # Own columns would give the largest value of a row and a column a unit beyond itself.
        shifts[i] = _clipped((shifts[i] + 4) >> 3, -ZERO_POINT, ZERO_POINT - 1) if adaptive else 0
        columns[i] = shifts[i] + ZERO_POINT
    bounds = _prepare(shifts, units, by_row)
    square, reaches, furthest = _F64(0.0), row_sums, _F64(0.0)
    for row in range(n_rows):
        line = values[row * n : (row + 1) * n]
        by_hand[row] = (by_hand[row] + 4) >> 3 if by_hand[row] > NO_ROW else NO_ROW
        which, scale = _find_units(by_hand[row], shifts, bounds, units, by_row)
        square += _relative_square(line, by_row[which], scale, sums)
        reaches[row] = _reach(line, by_row[0])
        furthest = max(furthest, reaches[row])
    if unit == 0.0 or furthest == 0.0:
        return _EMPTY, 0
    root = math.sqrt(square / values.size)
    if allowed >= 0.0 and adaptive == (squares.size > 0):
        share = allowed / (root if adaptive else math.sqrt(total / values.size))
        unit = min(max(share, UNIT_RANGE[0] * unit), UNIT_RANGE[1] * unit)
    finer, threshold, largest = (_eighths(unit * root) + 2) >> 2, -1, np.int64(NO_ROW)
    for _ in range(MAX_HALVINGS + 1):
        largest = np.int64(NO_ROW)
        for row in range(n_rows):
            fitted[row] = NO_ROW
            if reaches[row] > 0.0:
                # A row whose integers would not fit a byte has a coarser unit.
                most = reaches[row] / (LARGEST_INTEGER + 0.25)
                least = _eighths(most)
                whole = (least & 7) == 0 and math.frexp(most)[0] == 0.5
                fitted[row] = max(by_hand[row] + finer, (least >> 2) + (0 if whole else 1))
                largest = max(largest, fitted[row])
        top = _count_magnitudes(values, fitted, shifts, bounds, units, by_row, places, counts[0])
        threshold = _find_threshold(counts, top)
        if threshold >= 0:
            break
        finer -= 2
    base = _base_of(largest, 0, False)
    for row in range(n_rows):
        code = _clipped(fitted[row] - base, 1, 255) if fitted[row] > NO_ROW else 0
        rows[row] = code
        exponent = code + base if code > 0 else np.int64(NO_ROW)
        which, scale = _find_units(exponent, shifts, bounds, units, by_row)
        begin, end = row * n, (row + 1) * n
        threshold = threshold if threshold >= 0 else LOWEST_THRESHOLD
        _round_line(values[begin:end], by_row[which], scale, threshold, elements[begin:end])
    return _DONE, base


@part
def _code_of(eighths: np.int64, old: int, least: int) -> np.int64:  # pragma: no cover - compiled
    """Return the half octaves of a row or a column as a code, or its old code where that is near enough."""
    away = eighths - 4 * old
    # Of 8 log2, rounded down: three quarters of a half octave on either side, which no float64 number is on.
    if old >= least and -3 <= away <= 2:
        return np.int64(old)
    code: np.int64 = _clipped((eighths + 2) >> 2, least, 255)
    return code


@part
def _round_line_to_octaves(
    line: NDArray[np.float32],
    bits: NDArray[np.int32],
    first: np.int32,
    columns: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    edges: NDArray[np.int32],
    found: NDArray[np.uint8],
) -> None:  # pragma: no cover - compiled
    """Find the octaves of a row from the bits of its values."""
    even_low, even_from, even_high, even_to = edges[0]
    odd_low, odd_from, odd_high, odd_to = edges[1]
    for i in range(line.size):
        small = bits[i] < _I32(_LEAST_NORMAL)
        # A subnormal number is scaled up, exactly, and its exponent mended.
        enlarged = _F32(line[i] * _F32(1 << _NORMALIZING_BITS)).view(np.int32)
        number = enlarged if small else bits[i]
        unit = _I32(first + _I32(columns[i]))
        odd = _I32(unit & _I32(1)) == _I32(1)
        octave = _I32(_I32(_I32(number >> _I32(23)) - _I32(_BIAS)) - _I32(unit >> _I32(1)))
        octave = _I32(octave - (_I32(_NORMALIZING_BITS) if small else _I32(0)))
        fraction = _I32(number & _I32(_FRACTION))
        # For an even unit the edge is the root of two, for an odd one a power: a tie, to even.
        past = _I32(1) if fraction >= _I32(_PAST_ROOT) else _I32(0)
        tie = _I32(octave & _I32(1)) if fraction == _I32(0) else _I32(0)
        nearest = _I32(octave - tie) if odd else _I32(octave + past)
        nearest = nearest if nearest > _I32(1 - ZERO_POINT) else _I32(1 - ZERO_POINT)
        nearest = nearest if nearest < _I32(ZERO_POINT - 1) else _I32(ZERO_POINT - 1)
        old = _I32(codes[i])
        away = _I32(octave - _I32(old - _I32(ZERO_POINT)))
        low, high = (odd_low, odd_high) if odd else (even_low, even_high)
        start, last = (odd_from, odd_to) if odd else (even_from, even_to)
        above = (away > low) | ((away == low) & (fraction >= start))
        below = (away < high) | ((away == high) & (fraction <= last))
        code = old if (old > _I32(0)) & above & below else _I32(nearest + _I32(ZERO_POINT))
        found[i] = _U8(code if bits[i] > _I32(0) else _I32(0))


@kernel
def _round_second(
    values: NDArray[np.float32],
    base: int,
    old_rows: NDArray[np.uint8],
    old_columns: NDArray[np.uint8],
    before: NDArray[np.uint8],
    edges: NDArray[np.int32],
    sides: NDArray[np.float64],
    exponents: NDArray[np.int64],
    rows: NDArray[np.uint8],
    columns: NDArray[np.uint8],
    elements: NDArray[np.uint8],
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Round a second moment; return how that ended, and the base. What was before is empty if nothing was.

    `before` has zeros for a row then, and `elements` are empty where there shall be none.
    """
    n_rows, n, bits = rows.size, columns.size, values.view(np.int32)
    finite, negative = _kinds(bits)
    if negative or not finite:
        return _REFUSED, 0
    sums, sides = sides[:N_SUMS], sides[N_SUMS:]
    row_sums, band, column_sums = sides[:n_rows], sides[n_rows : n_rows + n], sides[n_rows + n :]
    _sums(values, False, sums, band, row_sums, column_sums)
    by_row, by_column = exponents[:n_rows], exponents[n_rows:]
    _log_means(row_sums, column_sums, by_row, by_column)
    largest = np.int64(NO_ROW)
    for row in range(n_rows):
        largest = max(largest, by_row[row])
    known, old_base = old_rows.size > 0, base
    base = _base_of((largest + 2) >> 2 if largest > NO_ROW else np.int64(0), old_base, known)
    same = known and base == old_base
    for row in range(n_rows):
        code = _code_of(by_row[row] - 4 * base, np.int64(old_rows[row]) if same else np.int64(-1), 1)
        rows[row] = code if by_row[row] > NO_ROW else 0
    for i in range(n):
        old = np.int64(old_columns[i]) if same else np.int64(-1)
        columns[i] = _code_of(by_column[i] + 4 * ZERO_POINT, old, 0)
    if elements.size > 0:
        for row in range(n_rows):
            begin, end = row * n, (row + 1) * n
            codes = before[begin:end] if before.size == values.size else before
            first = _I32(np.int64(rows[row]) + base - ZERO_POINT)
            line, found = values[begin:end], elements[begin:end]
            _round_line_to_octaves(line, bits[begin:end], first, columns, codes, edges, found)
    return _DONE, base


@kernel
def _round_vector(
    bits: NDArray[np.int32], base: int, known: bool, codes: NDArray[np.uint8]
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Round non-negative values to powers of two; return how that ended, and the base."""
    finite, negative = _kinds(bits)
    if negative or not finite:
        return _REFUSED, 0
    largest = _I32(0)
    for i in range(bits.size):
        largest = max(largest, bits[i])
    highest = np.int64((largest + OCTAVE_CARRY) >> 23) - _BIAS if largest > _I32(0) else np.int64(0)
    base = _base_of(highest, base, known)
    for i in range(bits.size):
        code = _clipped(((bits[i] + OCTAVE_CARRY) >> 23) - _BIAS - base, 1, 255)
        codes[i] = code if bits[i] > _I32(0) else 0
    return _DONE, base


_NOTHING = np.zeros(0, np.uint8)


def _sides(n_rows: int, n_columns: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return zeros for sums, and room for the exponents of rows, twice, and of columns."""
    return np.zeros(N_SUMS + n_rows + 2 * n_columns), np.empty(2 * n_rows + n_columns, np.int64)


def round_first(
    values: Tensor, second: Tensor | None, n_rows: int, unit: float, allowed: float | None
) -> Codes | None:
    """See `moments.round_first`."""
    n = values.numel()
    rows, columns = np.empty(n_rows, np.uint8), np.empty(n // n_rows, np.uint8)
    elements = new_array(n, np.uint8)
    ended, base = _round_first(
        values.numpy(),
        _NO_SQUARES if second is None else second.numpy(),
        unit,
        -1.0 if allowed is None else allowed,
        _UNITS,
        _rooms.counts,
        *_sides(n_rows, columns.size),
        np.empty((3, columns.size), np.float32),
        np.empty(columns.size, np.int32),
        rows,
        columns,
        elements,
    )
    return _codes(ended, base, rows, columns, elements)


def round_second(values: Tensor, n_rows: int, before: Codes | None, held: float | None) -> Codes | None:
    """See `moments.round_second`."""
    n = values.numel()
    rows, columns = np.empty(n_rows, np.uint8), np.empty(n // n_rows, np.uint8)
    elements = _NOTHING if held is None else new_array(n, np.uint8)
    old = (NO_BYTES,) * 3 if before is None else before[1:]
    sums, exponents = _sides(n_rows, columns.size)
    ended, base = _round_second(
        values.numpy(),
        0 if before is None else before.base,
        *(part.numpy() for part in old[:2]),
        old[2].numpy() if before is not None and held is not None else np.zeros(columns.size, np.uint8),
        _edges(held or 0.0),
        sums,
        exponents[n_rows:],
        rows,
        columns,
        elements,
    )
    return _codes(ended, base, rows, columns, elements)


def round_vector(values: Tensor, before: int | None) -> Codes | None:
    """See `moments.round_vector`."""
    codes = new_array(values.numel(), np.uint8)
    ended, base = _round_vector(values.numpy().view(np.int32), before or 0, before is not None, codes)
    return _codes(ended, base, _NOTHING, _NOTHING, codes)


def _codes(
    ended: int, base: int, rows: NDArray[np.uint8], columns: NDArray[np.uint8], elements: NDArray[np.uint8]
) -> Codes | None:
    if ended == _REFUSED:
        return None
    if ended == _EMPTY:
        return Codes(0, NO_BYTES, NO_BYTES, NO_BYTES)
    return Codes(base, torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(elements))


@functools.lru_cache
def _edges(held: float) -> NDArray[np.int32]:
    return np.array(octave_edges(held), np.int32).reshape(2, 4)


@kernel
def _expand(
    rows: NDArray[np.uint8],
    columns: NDArray[np.int32],
    elements: NDArray[np.uint8],
    known: int,
    scaled: int,
    table: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Look values up by their row's code, their column's and, but for integers, twice their own.

    `known` is 1, or 0 where each row has the same elements.
    """
    n, twice = columns.size, _I32(2 * (1 - scaled))
    for row in range(rows.size):
        first, empty = _I32(rows[row]), rows[row] == _U8(0)
        line, codes = values[row * n : (row + 1) * n], elements[row * n * known : row * n * known + n]
        for i in range(n):
            element = _I32(codes[i])
            value = table[_I32(_I32(first + columns[i]) + _I32(twice * element))]
            if scaled == 1:
                unit = _F32(0.0) if empty else value
                line[i] = _F32(unit * _F32(_I32(element - _I32(ZERO_POINT))))
            else:
                line[i] = _F32(0.0) if empty | (element == _I32(0)) else value


def expand_units(rows: Tensor, columns: Tensor, elements: Tensor | None, base: int, scaled: bool) -> Tensor:
    """See `moments.expand_units`."""
    values = new_array(rows.numel() * columns.numel(), np.float32)
    # Without elements each octave is that of the unit.
    given = np.full(columns.numel(), ZERO_POINT, np.uint8) if elements is None else elements.numpy()
    octaves = elements is None or not scaled
    # The table's first place is that of a row's code of 0, a column's of 0, and an octave's of 0.
    places = columns.numpy().astype(np.int32) + (0 if octaves else 2 * ZERO_POINT)
    table = _TABLE[base + MAX_BASE : base + MAX_BASE + 9 * ZERO_POINT]
    _expand(rows.numpy(), places, given, int(elements is not None), int(not octaves), table, values)
    return torch.from_numpy(values)
