"""Numba kernels of the moments codec: one pass over a tensor for each question.

`inshrink_core.ops.moments` documents the functions; `ops/reference/moments.py` has their twins in torch.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.execution import new_array
from inshrink_core.ops.cpu.compiled import kernel, part
from inshrink_core.ops.moments import (
    BAND,
    FRACTION_BITS,
    HIGHEST,
    LARGEST_INTEGER,
    LINE,
    LOWEST,
    MAX_MAGNITUDE,
    N_SUMS,
    ZERO_POINT,
    Kinds,
    Sums,
    Units,
    half_octave_values,
    octave_edges,
)

__all__: list[str] = []

_F32, _F64, _I32, _U8 = np.float32, np.float64, np.int32, np.uint8

_UNITS = half_octave_values(np.arange(LOWEST, HIGHEST + 1))

_INFINITE = 0x7F800000
"""Bits of float32 infinity: of finite numbers, without the sign, less."""

_PAST_ROOT = 0x3504F4
"""Fraction of the first float32 above the root of two."""

_FRACTION = 0x7FFFFF
_LEAST_NORMAL = 0x800000
_NORMALIZING_BITS = 24
_BIAS = 127


@kernel
def _kinds(bits: NDArray[np.int32]) -> tuple[np.int32, np.int32]:  # pragma: no cover - compiled
    """Return the largest magnitude as bits, and the bits that all numbers below zero have together."""
    largest, negative = _I32(0), _I32(0)
    for i in range(bits.size):
        size = _I32(bits[i] & _I32(0x7FFFFFFF))
        largest = size if size > largest else largest
        there = (size != _I32(0)) & (size <= _I32(_INFINITE))
        negative = _I32(negative | (bits[i] if there else _I32(0)))
    return largest, negative


def kinds_of(values: Tensor) -> Kinds:
    """See `moments.kinds_of`."""
    largest, negative = _kinds(values.numpy().view(np.int32))
    return Kinds(int(largest) < _INFINITE, int(negative) < 0)


@kernel
def _uncovered(squares: NDArray[np.int32], values: NDArray[np.int32]) -> int:  # pragma: no cover - compiled
    """Count second moments, as bits, that will not do."""
    found = 0
    for i in range(values.size):
        square, value = squares[i], _I32(values[i] & _I32(0x7FFFFFFF))
        # As integers, -0.0 is the least, and numbers below zero and NaN are out of range.
        zero = _I32(square & _I32(0x7FFFFFFF)) == _I32(0)
        fits = (square < _I32(_INFINITE)) & (square > _I32(0))
        found += not (fits | (zero & (value == _I32(0))))
    return found


def squares_cover(squares: Tensor, values: Tensor) -> bool:
    """See `moments.squares_cover`."""
    return int(_uncovered(squares.numpy().view(np.int32), values.numpy().view(np.int32))) == 0


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


@kernel
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


def sum_sides(values: Tensor, n_rows: int, squared: bool) -> Sums:
    """See `moments.sum_sides`."""
    rows, columns = np.zeros(n_rows), np.zeros(values.numel() // n_rows)
    _sums(values.numpy(), squared, np.zeros(N_SUMS), np.zeros(columns.size), rows, columns)
    return Sums(rows, columns)


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
        k = row + columns[i]
        k = k if k > LOWEST else np.int64(LOWEST)
        by_row[2, i] = units[(k if k < HIGHEST else np.int64(HIGHEST)) - LOWEST]
    return np.int64(2), _F32(1.0)


@kernel
def _relative_squares(
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    units: NDArray[np.float32],
    by_row: NDArray[np.float32],
    sums: NDArray[np.float64],
    squares: NDArray[np.float64],
) -> None:  # pragma: no cover - compiled
    """Add up the squares of values in units by rows; `sums` and `squares` are zeros."""
    n, bounds = columns.size, _prepare(columns, units, by_row)
    for row in range(rows.size):
        line = values[row * n : (row + 1) * n]
        which, scale = _find_units(rows[row], columns, bounds, units, by_row)
        found = by_row[which]
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
            squares[row] += _sum_up(sums)


def _room(units: Units) -> NDArray[np.float32]:
    """Return where units of even rows, of odd ones and of any other are looked up."""
    return np.empty((3, units.columns.size), np.float32)


def relative_square(values: Tensor, units: Units) -> float:
    """See `moments.relative_square`."""
    squares = np.zeros(units.rows.size)
    _relative_squares(values.numpy(), *units, _UNITS, _room(units), np.zeros(N_SUMS), squares)
    return math.fsum(squares.tolist())


@kernel
def _reaches(
    values: NDArray[np.float32], units: NDArray[np.float64], reaches: NDArray[np.int64]
) -> None:  # pragma: no cover - compiled
    """Fill in the bits of the largest magnitude of each row."""
    n = units.size
    for row in range(reaches.size):
        line, largest = values[row * n : (row + 1) * n], np.int64(0)
        for i in range(n):
            # As integers: of floats, whose order NaN spoils, no vector takes the largest.
            reach = _F64(np.abs(_F64(line[i])) / units[i]).view(np.int64)
            largest = reach if reach > largest else largest
        reaches[row] = largest


def row_reaches(values: Tensor, n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """See `moments.row_reaches`."""
    reaches = np.empty(n_rows)
    _reaches(values.numpy(), half_octave_values(columns).astype(np.float64), reaches.view(np.int64))
    return reaches


@part
def _magnitude(value: np.float32, unit: np.float32) -> np.int32:  # pragma: no cover - compiled
    """Return a magnitude in 256ths of a unit."""
    share = _F32(_F32(np.abs(value) / unit) * _F32(1 << FRACTION_BITS))
    return _I32(share if share < _F32(MAX_MAGNITUDE) else _F32(MAX_MAGNITUDE))


@kernel
def _count_magnitudes(
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    units: NDArray[np.float32],
    by_row: NDArray[np.float32],
    places: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:  # pragma: no cover - compiled
    """Count magnitudes."""
    n, bounds = columns.size, _prepare(columns, units, by_row)
    for row in range(rows.size):
        line = values[row * n : (row + 1) * n]
        which, scale = _find_units(rows[row], columns, bounds, units, by_row)
        found = by_row[which]
        for i in range(n):
            places[i] = _magnitude(line[i], _F32(found[i] * scale))
        for i in range(n):
            counts[places[i]] += 1


def count_magnitudes(values: Tensor, units: Units) -> NDArray[np.int64]:
    """See `moments.count_magnitudes`."""
    counts = np.zeros(MAX_MAGNITUDE + 1, np.int64)
    _count_magnitudes(
        values.numpy(), *units, _UNITS, _room(units), np.empty(units.columns.size, np.int32), counts
    )
    return counts


@kernel
def _round_in_units(
    values: NDArray[np.float32],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    units: NDArray[np.float32],
    by_row: NDArray[np.float32],
    threshold: int,
    elements: NDArray[np.uint8],
) -> None:  # pragma: no cover - compiled
    """Round values to integers in their units."""
    n, bounds = columns.size, _prepare(columns, units, by_row)
    more, top, zero = _I32((1 << FRACTION_BITS) - threshold), _I32(LARGEST_INTEGER), _I32(ZERO_POINT)
    for row in range(rows.size):
        line, rounded = values[row * n : (row + 1) * n], elements[row * n : (row + 1) * n]
        which, scale = _find_units(rows[row], columns, bounds, units, by_row)
        found = by_row[which]
        for i in range(n):
            magnitude = _magnitude(line[i], _F32(found[i] * scale))
            whole = _I32(_I32(magnitude + more) >> _I32(FRACTION_BITS))
            whole = whole if whole < top else top
            rounded[i] = _U8(zero - whole if line[i] < _F32(0.0) else zero + whole)


def round_in_units(values: Tensor, units: Units, threshold: int) -> Tensor:
    """See `moments.round_in_units`."""
    elements = new_array(values.numel(), np.uint8)
    _round_in_units(values.numpy(), *units, _UNITS, _room(units), threshold, elements)
    return torch.from_numpy(elements)


@kernel
def _round_to_octaves(
    values: NDArray[np.float32],
    rows: NDArray[np.int32],
    columns: NDArray[np.int32],
    before: NDArray[np.uint8],
    known: int,
    edges: NDArray[np.int32],
    elements: NDArray[np.uint8],
) -> None:  # pragma: no cover - compiled
    """Find octaves from the bits of values; `known` is 1, or 0 where each row has the same codes before."""
    n, bits = columns.size, values.view(np.int32)
    even_low, even_from, even_high, even_to = edges[0]
    odd_low, odd_from, odd_high, odd_to = edges[1]
    for row in range(rows.size):
        begin = row * n
        line, whole, found = values[begin : begin + n], bits[begin : begin + n], elements[begin : begin + n]
        codes = before[begin * known : begin * known + n]
        for i in range(n):
            small = whole[i] < _I32(_LEAST_NORMAL)
            # A subnormal number is scaled up, exactly, and its exponent mended.
            enlarged = _F32(line[i] * _F32(1 << _NORMALIZING_BITS)).view(np.int32)
            number = enlarged if small else whole[i]
            unit = _I32(rows[row] + columns[i])
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
            first, last = (odd_from, odd_to) if odd else (even_from, even_to)
            above = (away > low) | ((away == low) & (fraction >= first))
            below = (away < high) | ((away == high) & (fraction <= last))
            code = old if (old > _I32(0)) & above & below else _I32(nearest + _I32(ZERO_POINT))
            found[i] = _U8(code if whole[i] > _I32(0) else _I32(0))


def round_to_octaves(values: Tensor, units: Units, before: Tensor | None, held: float) -> Tensor:
    """See `moments.round_to_octaves`."""
    elements = new_array(values.numel(), np.uint8)
    rows, columns = (side.astype(np.int32) for side in units)
    given = np.zeros(columns.size, np.uint8) if before is None else before.numpy()
    edges = np.array(octave_edges(held), np.int32).reshape(2, 4)
    _round_to_octaves(values.numpy(), rows, columns, given, int(before is not None), edges, elements)
    return torch.from_numpy(elements)


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
    table = half_octave_values(np.arange(-3 * ZERO_POINT, 6 * ZERO_POINT) + base)
    # Without elements each octave is that of the unit.
    given = np.full(columns.numel(), ZERO_POINT, np.uint8) if elements is None else elements.numpy()
    octaves = elements is None or not scaled
    # The table's first place is that of a row's code of 0, a column's of 0, and an octave's of 0.
    places = columns.numpy().astype(np.int32) + (0 if octaves else 2 * ZERO_POINT)
    _expand(rows.numpy(), places, given, int(elements is not None), int(not octaves), table, values)
    return torch.from_numpy(values)
