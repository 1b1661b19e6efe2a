"""Numba kernels of the moments codec: a single call per tensor.

The cost of calls dominates the time of small tensors.
`inshrink_core.ops.moments` documents the functions and has the versions in plain PyTorch.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped, unused-ignore]
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.cpu.compiled import Float32s, Float64s, Int32s, Int64s, UInt8s, kernel, load, part
from inshrink_core.ops.moments import (
    BAND,
    EIGHTHS,
    FIRST_FACTOR,
    FRACTION_BITS,
    HIGHEST,
    LARGEST_INTEGER,
    LINE,
    LOGARITHMS,
    LOWEST,
    LOWEST_THRESHOLD,
    MAX_BASE,
    MAX_HALVINGS,
    MAX_MAGNITUDE,
    N_SUMS,
    NO_BYTES,
    NO_ROW,
    OCTAVE_CARRY,
    PLACE_FACTOR,
    PLAIN_THRESHOLD,
    SECOND_FACTOR,
    UNIT_RANGE,
    ZERO_POINT,
    Codes,
    Units,
    base_of,
    half_log2_values,
)

_F32, _F64, _I32, _U8 = np.float32, np.float64, np.int32, np.uint8
_intrinsic: Any = intrinsic
_cgutils: Any = untyped_cgutils

_UNITS = half_log2_values(np.arange(LOWEST, HIGHEST + 1))
_TABLE = half_log2_values(np.arange(-MAX_BASE - 3 * ZERO_POINT, MAX_BASE + 6 * ZERO_POINT))
"""Values of all units for every base and code."""

_EIGHTHS = np.array(EIGHTHS)
_LOGARITHMS = np.array(LOGARITHMS, np.int32)
_NO_SQUARES = np.zeros(0, np.float32)
_REFUSED, _EMPTY, _DONE = 0, 1, 2
"""Outcomes of rounding: invalid values, only zeros left, or codes."""

_base_of = part(base_of)

_INFINITE = 0x7F800000
"""Bits of float32 infinity; the bits of finite numbers, without the sign, are smaller."""

_PAST_ROOT = 0x3504F4
"""Fraction bits of the first float32 number above √2."""

_FRACTION = 0x7FFFFF
_LEAST_NORMAL = 0x800000
_NORMALIZING_BITS = 24
_BIAS = 127


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.counts = np.zeros((3, MAX_MAGNITUDE + 1), np.int64)


_scratch = _Scratch()
"""Counts of magnitudes, zero between calls, and two scratch rows."""


@part
def _kinds(bits: Int32s) -> tuple[np.bool, np.bool]:  # pragma: no cover - compiled
    """Return whether all numbers are finite, and whether some are negative."""
    largest, negative = _I32(0), _I32(0)
    for i in range(bits.size):
        size = _I32(bits[i] & _I32(0x7FFFFFFF))
        largest = size if size > largest else largest
        there = (size != _I32(0)) & (size <= _I32(_INFINITE))
        negative = _I32(negative | (bits[i] if there else _I32(0)))
    return largest < _I32(_INFINITE), negative < _I32(0)


@part
def _covers(squares: Int32s, values: Int32s) -> bool:  # pragma: no cover - compiled
    """Return whether second moments, as bits, are finite, nonnegative, and zero only with the values."""
    found = 0
    for i in range(values.size):
        square, value = squares[i], _I32(values[i] & _I32(0x7FFFFFFF))
        # As an integer -0.0 is the smallest; negative numbers and NaN are out of range.
        zero = _I32(square & _I32(0x7FFFFFFF)) == _I32(0)
        fits = (square < _I32(_INFINITE)) & (square > _I32(0))
        found += not (fits | (zero & (value == _I32(0))))
    return found == 0


@_intrinsic
def _sum_lanes(_: Any, terms: Any, n: Any) -> Any:
    """Sum `n` terms, a multiple of `N_SUMS`: one sum a lane, then neighbouring sums until one is left."""

    def build(context: Any, b: Any, signature: Any, given: Any) -> Any:
        data = context.make_array(signature.args[0])(context, b, given[0]).data
        lanes, width = ir.VectorType(ir.DoubleType(), N_SUMS), context.get_constant(types.intp, N_SUMS)
        total = _cgutils.alloca_once_value(b, ir.Constant(lanes, [0.0] * N_SUMS))
        with _cgutils.for_range(b, b.sdiv(given[1], width)) as each:
            b.store(b.fadd(b.load(total), load(b, data, b.mul(each.index, width), lanes)), total)
        left, found = N_SUMS, b.load(total)
        while left > 1:
            left //= 2
            order = ir.VectorType(ir.IntType(32), left)
            sides = (ir.Constant(order, list(range(first, 2 * left, 2))) for first in (0, 1))
            found = b.fadd(*(b.shuffle_vector(found, found, side) for side in sides))
        return b.extract_element(found, ir.IntType(32)(0))

    return types.float64(terms, types.intp), build


@part
def _sum_up(terms: Float64s, n: int) -> Any:  # pragma: no cover - compiled
    """Return the sum of `n` terms of a slice, in the order of `_sum_lanes`."""
    end = n + -n % N_SUMS
    terms[n:end] = _F64(0.0)
    return _sum_lanes(terms, end)


@part
def _eighths(value: np.float64) -> np.int64:  # pragma: no cover - compiled
    """Return ``floor(8 log2(value))``; `NO_ROW` for zero."""
    fraction, exponent = math.frexp(value)
    found = np.int64(8 * (exponent - 1))
    for k in range(7):
        found += fraction >= _EIGHTHS[k]
    return found if value > 0.0 else np.int64(NO_ROW)


@part
def _log_means(
    values: Float32s, squared: bool, scratch: tuple[Any, ...]
) -> np.float64:  # pragma: no cover - compiled
    """Sum rows and columns of the values or of their squares; return the total.

    The sums of columns and rows must be zero at first.
    With x the values or their squares, `by_row` gets ``floor(8 log2(mean of a row of x))`` and `by_column`
    ``floor(8 log2(mean of a column of x / mean of x))``.
    """
    terms, row_sums, column_sums, band, by_row, by_column = scratch
    n_rows, n, total = row_sums.size, column_sums.size, _F64(0.0)
    for row in range(n_rows):
        line = values[row * n : (row + 1) * n]
        for begin in range(0, n, LINE):
            here, summed = line[begin : begin + LINE], band[begin : begin + LINE]
            for i in range(here.size):
                value = _F64(here[i])
                terms[i] = value * value if squared else value
            for i in range(here.size):
                summed[i] += terms[i]
            row_sums[row] += _sum_up(terms, here.size)
        by_row[row] = _eighths(row_sums[row] / n)
        total += row_sums[row]
        if row % BAND == BAND - 1 or row == n_rows - 1:
            for i in range(n):
                column_sums[i] += band[i]
                band[i] = _F64(0.0)
    mean = total / (n_rows * n)
    for i in range(n):
        by_column[i] = _eighths(column_sums[i] / n_rows / mean if total > 0.0 else _F64(1.0))
    return total


@part
def _clipped(value: np.int64, low: int, high: int) -> np.int64:  # pragma: no cover - compiled
    value = value if value > low else np.int64(low)
    return value if value < high else np.int64(high)


@part
def _find_units(
    row: np.int64, columns: Int64s, by_row: Float32s
) -> tuple[np.int64, np.float32]:  # pragma: no cover - compiled
    """Return the line of `by_row` with the units of a row, and a power of two that is still to be applied.

    The first two lines hold the units of even and of odd rows. If exponents may be clipped, the units are
    looked up one by one.
    """
    if LOWEST + ZERO_POINT <= row <= HIGHEST - ZERO_POINT:
        odd = row & 1
        return odd, _UNITS[odd - row - LOWEST]
    for i in range(columns.size):
        by_row[2, i] = _UNITS[_clipped(-row - columns[i], LOWEST, HIGHEST) - LOWEST]
    return np.int64(2), _F32(1.0)


@part
def _magnitude(value: np.float32, over: np.float32) -> np.int32:  # pragma: no cover - compiled
    """Return a magnitude in 1/256 unit; `over` is the reciprocal of the unit."""
    share = _F32(_F32(np.abs(value) * over) * _F32(1 << FRACTION_BITS))
    return _I32(share if share < _F32(MAX_MAGNITUDE) else _F32(MAX_MAGNITUDE))


@part
def _find_threshold(counts: Int64s, largest: int) -> int:  # pragma: no cover - compiled
    """Return the largest threshold that preserves the projection, or -1; reset the counts to zero."""
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
def _sum_of_squares(
    line: Float32s, units: Float32s, scale: np.float32, terms: Float64s
) -> np.float64:  # pragma: no cover - compiled
    """Return Σ (x u)² over the values x of a row and their units u, in the order of `_log_means`."""
    total = _F64(0.0)
    for begin in range(0, line.size, LINE):
        here, found = line[begin : begin + LINE], units[begin : begin + LINE]
        for i in range(here.size):
            relative = _F64(here[i]) * _F64(_F32(found[i] * scale))
            terms[i] = relative * relative
        total += _sum_up(terms, here.size)
    return total


@part
def _coarser(unit: np.int64, largest: np.float64) -> np.int64:  # pragma: no cover - compiled
    """Return a row's unit, or a coarser one if its `largest` value would take more than a byte."""
    most = largest / (LARGEST_INTEGER + 0.25)
    least = _eighths(most)
    is_power = (least & 7) == 0 and math.frexp(most)[0] == 0.5
    return max(unit, (least >> 2) + (0 if is_power else 1))


@part
def _count_magnitudes(
    line: Float32s, units: Float32s, scale: np.float32, places: Int32s, counts: Int64s
) -> np.int32:  # pragma: no cover - compiled
    """Count the magnitudes of a row; return the largest."""
    top = _I32(0)
    for i in range(line.size):
        place = _magnitude(line[i], _F32(units[i] * scale))
        top = place if place > top else top
        places[i] = place
    for i in range(line.size):
        counts[0, np.uint32(places[i])] += 1
    return top


@kernel
def _round_first(
    values: Float32s,
    squares: Float32s,
    unit: float,
    allowed: float,
    counts: Int64s,
    scratch: tuple[Any, ...],
    fitted: Int64s,
    by_row: Float32s,
    places: Int32s,
    rows: UInt8s,
    columns: UInt8s,
    elements: UInt8s,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Round a first moment; return the outcome and the base. `squares` is empty without second moments."""
    n_rows, n = rows.size, columns.size
    if not _kinds(values.view(np.int32))[0]:
        return _REFUSED, 0
    adaptive = squares.size > 0 and _covers(squares.view(np.int32), values.view(np.int32))
    total = _log_means(squares if adaptive else values, not adaptive, scratch)
    terms, maxima, _, _, by_hand, shifts = scratch
    for i in range(n):
        # Column exponents per eighth could put the largest value of a row and column a unit too high.
        shifts[i] = _clipped((shifts[i] + 4) >> 3, -ZERO_POINT, ZERO_POINT - 1) if adaptive else 0
        columns[i] = shifts[i] + ZERO_POINT
        by_row[0, i], by_row[1, i] = _UNITS[-shifts[i] - LOWEST], _UNITS[-shifts[i] - 1 - LOWEST]
    square, furthest = _F64(0.0), _F64(0.0)
    for row in range(n_rows):
        line = values[row * n : (row + 1) * n]
        by_hand[row] = (by_hand[row] + 4) >> 3 if by_hand[row] > NO_ROW else NO_ROW
        which, scale = _find_units(by_hand[row], shifts, by_row)
        square += _sum_of_squares(line, by_row[which], scale, terms)
        largest_here = np.int64(0)
        for i in range(n):
            # As integers: LLVM vectorizes no maximum of floats, because NaN is unordered.
            reach = _F64(np.abs(_F64(line[i])) * _F64(by_row[0, i])).view(np.int64)
            largest_here = reach if reach > largest_here else largest_here
        maxima[row] = np.int64(largest_here).view(np.float64)
        furthest = max(furthest, maxima[row])
    if unit == 0.0 or furthest == 0.0:
        return _EMPTY, 0
    root = math.sqrt(square / values.size)
    if allowed >= 0.0 and adaptive == (squares.size > 0):
        share = allowed / (root if adaptive else math.sqrt(total / values.size))
        unit = min(max(share, UNIT_RANGE[0] * unit), UNIT_RANGE[1] * unit)
    finer, threshold, largest = (_eighths(unit * root) + 2) >> 2, -1, np.int64(NO_ROW)
    for _ in range(MAX_HALVINGS + 1):
        largest, top = np.int64(NO_ROW), _I32(0)
        for row in range(n_rows):
            fitted[row] = _coarser(by_hand[row] + finer, maxima[row]) if maxima[row] > 0.0 else NO_ROW
            largest = max(largest, fitted[row])
            which, scale = _find_units(fitted[row], shifts, by_row)
            line = values[row * n : (row + 1) * n]
            top = max(top, _count_magnitudes(line, by_row[which], scale, places, counts))
        threshold = _find_threshold(counts, top)
        if threshold >= 0:
            break
        finer -= 2
    base = _base_of(largest, 0, False)
    more = _I32((1 << FRACTION_BITS) - (threshold if threshold >= 0 else LOWEST_THRESHOLD))
    for row in range(n_rows):
        code = _clipped(fitted[row] - base, 1, 255) if fitted[row] > NO_ROW else np.int64(0)
        rows[row] = code
        which, scale = _find_units(code + base if code > 0 else np.int64(NO_ROW), shifts, by_row)
        line, found = values[row * n : (row + 1) * n], by_row[which]
        rounded = elements[row * n : (row + 1) * n]
        for i in range(n):
            size = _I32(_I32(_magnitude(line[i], _F32(found[i] * scale)) + more) >> _I32(FRACTION_BITS))
            size = size if size < _I32(LARGEST_INTEGER) else _I32(LARGEST_INTEGER)
            rounded[i] = _U8(_I32(ZERO_POINT) - size if line[i] < _F32(0.0) else _I32(ZERO_POINT) + size)
    return _DONE, base


@part
def _code_of(eighths: np.int64, old: int, least: int) -> np.int64:  # pragma: no cover - compiled
    """Return a row's or column's half octaves as a code, or its old code if that is near enough."""
    away = eighths - 4 * old
    # In units of 8 log2, rounded down: three quarters of a half octave on either side; no float64 is on the
    # edge.
    if old >= least and -3 <= away <= 2:
        return np.int64(old)
    code: np.int64 = _clipped((eighths + 2) >> 2, least, 255)
    return code


@kernel
def _round_second(
    values: Float32s,
    base: int,
    old_rows: UInt8s,
    old_columns: UInt8s,
    before: UInt8s,
    edges: Int32s,
    scratch: tuple[Any, ...],
    rows: UInt8s,
    columns: UInt8s,
    elements: UInt8s,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Round a second moment; return the outcome and the base. The previous codes are empty if there are none.

    In that case `before` has zeros for a row. `elements` is empty if only factors are wanted.
    """
    n_rows, n, bits = rows.size, columns.size, values.view(np.int32)
    finite, negative = _kinds(bits)
    if negative or not finite:
        return _REFUSED, 0
    _log_means(values, negative, scratch)  # a literal would compile it twice
    by_row, by_column = scratch[4], scratch[5]
    largest = np.int64(NO_ROW)
    for row in range(n_rows):
        largest = max(largest, by_row[row])
    known, old_base = old_rows.size > 0, base
    base = _base_of((largest + 2) >> 2 if largest > NO_ROW else np.int64(0), old_base, known)
    same = known and base == old_base
    for row in range(n_rows):
        earlier = np.int64(old_rows[row]) if same else np.int64(-1)
        rows[row] = _code_of(by_row[row] - 4 * base, earlier, 1) if by_row[row] > NO_ROW else 0
    for i in range(n):
        earlier = np.int64(old_columns[i]) if same else np.int64(-1)
        columns[i] = _code_of(by_column[i] + 4 * ZERO_POINT, earlier, 0)
    even_low, even_from, even_high, even_to = edges[0]
    odd_low, odd_from, odd_high, odd_to = edges[1]
    for row in range(n_rows if elements.size > 0 else 0):
        begin, end = row * n, (row + 1) * n
        codes = before[begin:end] if before.size == values.size else before
        first = _I32(np.int64(rows[row]) + base - ZERO_POINT)
        line, words, found = values[begin:end], bits[begin:end], elements[begin:end]
        for i in range(n):
            small = words[i] < _I32(_LEAST_NORMAL)
            # A subnormal number is scaled up exactly, and its exponent corrected.
            enlarged = _F32(line[i] * _F32(1 << _NORMALIZING_BITS)).view(np.int32)
            number = enlarged if small else words[i]
            unit = _I32(first + _I32(columns[i]))
            odd = _I32(unit & _I32(1)) == _I32(1)
            octave = _I32(_I32(_I32(number >> _I32(23)) - _I32(_BIAS)) - _I32(unit >> _I32(1)))
            octave = _I32(octave - (_I32(_NORMALIZING_BITS) if small else _I32(0)))
            fraction = _I32(number & _I32(_FRACTION))
            # The rounding edge is √2 for an even unit and a power of two for an odd one, a tie that goes to
            # even.
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
            found[i] = _U8(code if words[i] > _I32(0) else _I32(0))
    return _DONE, base


@kernel
def _round_vector(
    bits: Int32s, base: int, known: bool, codes: UInt8s
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Round nonnegative values to powers of two; return the outcome and the base."""
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


@part
def _distance(value: np.float32, word: np.int32, unit: np.int64) -> np.int64:  # pragma: no cover - compiled
    """Return log2 of a value, given with its bits, relative to its unit, in 1/256 octave."""
    small = word < _I32(_LEAST_NORMAL)
    enlarged = _F32(value * _F32(1 << _NORMALIZING_BITS)).view(np.int32)
    number = enlarged if small else word
    octave = np.int64(number >> _I32(23)) - _BIAS - (_NORMALIZING_BITS if small else 0)
    distance: np.int64 = (octave << 8) + _LOGARITHMS[(number & _I32(_FRACTION)) >> _I32(13)] - (unit << 7)
    return distance


@kernel
def _dither_log2(
    values: Float32s, rows: Int64s, columns: Int64s, dither_seed: int, elements: UInt8s
) -> None:  # pragma: no cover - compiled
    """Round to the octave below or above, by the dither at each position."""
    n, bits, mask = columns.size, values.view(np.int32), np.uint64(0xFFFFFFFF)
    for row in range(rows.size):
        for i in range(row * n, (row + 1) * n):
            y = _distance(values[i], bits[i], rows[row] + columns[i - row * n])
            mixed = np.uint64(i + dither_seed * PLACE_FACTOR) * np.uint64(FIRST_FACTOR) & mask
            mixed = (mixed ^ (mixed >> np.uint64(15))) * np.uint64(SECOND_FACTOR) & mask
            code = _clipped((y + np.int64(mixed >> np.uint64(24))) >> 8, 1 - ZERO_POINT, ZERO_POINT - 1)
            elements[i] = code + ZERO_POINT if bits[i] > _I32(0) else 0


def dither_log2(values: Tensor, units: Units, dither_seed: int) -> Tensor:
    """See `moments.dither_log2`."""
    elements = np.empty(values.numel(), np.uint8)
    _dither_log2(values.numpy(), *units, dither_seed, elements)
    return torch.from_numpy(elements)


_NOTHING = np.zeros(0, np.uint8)


def _sums(n_rows: int, n: int) -> tuple[NDArray[Any], ...]:
    """Return zeros for the sums and the logarithms of `_log_means`."""
    sums = (np.zeros(size) for size in (min(n, LINE) + N_SUMS, n_rows, n, n))
    return (*sums, np.zeros(n_rows, np.int64), np.zeros(n, np.int64))


def round_first(
    values: Tensor, second: Tensor | None, n_rows: int, unit: float, allowed: float | None
) -> Codes | None:
    """See `moments.round_first`."""
    rows, columns = np.empty(n_rows, np.uint8), np.empty(values.numel() // n_rows, np.uint8)
    elements = np.empty(values.numel(), np.uint8)
    squares, most = _NO_SQUARES if second is None else second.numpy(), -1.0 if allowed is None else allowed
    n = columns.size
    more = np.zeros(n_rows, np.int64), np.empty((3, n), np.float32), np.empty(n, np.int32)
    numbers = (values.numpy(), squares, unit, most, _scratch.counts, _sums(n_rows, n), *more)
    return _codes(_round_first(*numbers, rows, columns, elements), rows, columns, elements)


def round_second(values: Tensor, n_rows: int, before: Codes | None, tolerance: float | None) -> Codes | None:
    """See `moments.round_second`."""
    rows, columns = np.empty(n_rows, np.uint8), np.empty(values.numel() // n_rows, np.uint8)
    elements = _NOTHING if tolerance is None else np.empty(values.numel(), np.uint8)
    known = (0, _NOTHING, _NOTHING, np.zeros(columns.size, np.uint8))
    if before is not None:
        old = before.elements.numpy() if elements.size else _NOTHING
        known = (before.base, before.rows.numpy(), before.columns.numpy(), old)
    scratch = _sums(n_rows, columns.size)
    ended = _round_second(values.numpy(), *known, _edges(tolerance or 0.0), scratch, rows, columns, elements)
    return _codes(ended, rows, columns, elements)


def round_vector(values: Tensor, before: int | None) -> Codes | None:
    """See `moments.round_vector`."""
    codes = np.empty(values.numel(), np.uint8)
    ended = _round_vector(values.numpy().view(np.int32), before or 0, before is not None, codes)
    return _codes(ended, _NOTHING, _NOTHING, codes)


def _codes(ended: tuple[int, int], *sides: UInt8s) -> Codes | None:
    if ended[0] == _REFUSED:
        return None
    if ended[0] == _EMPTY:
        return Codes(0, NO_BYTES, NO_BYTES, NO_BYTES)
    rows, columns, elements = map(torch.from_numpy, sides)
    return Codes(ended[1], rows, columns, elements)


@functools.lru_cache
def _edges(tolerance: float) -> Int32s:
    """Return the bounds of values whose octave stays at a code, (2, 4): for even and for odd units.

    The bounds are lowest exponent and fraction, then highest, of ``exponent + log2(1 + fraction / 2**23)``,
    relative to the code and to the unit in octaves, rounded down.
    """
    edges = list[int]()
    for odd in range(2):
        for edge, inward in ((0.5 * odd - tolerance, math.ceil), (0.5 * odd + tolerance, math.floor)):
            octave = math.floor(edge)
            edges += octave, inward((2.0 ** (edge - octave) - 1) * (1 << 23))
    return np.array(edges, np.int32).reshape(2, 4)


@kernel
def _expand(
    rows: UInt8s, columns: Int32s, elements: UInt8s, scaled: int, table: Float32s, values: Float32s
) -> None:  # pragma: no cover - compiled
    """Look up values by the code of their row plus that of their column; octaves add twice their own code.

    All rows share the elements if there are no more than columns.
    """
    n, twice, known = columns.size, _I32(2 * (1 - scaled)), int(elements.size == values.size)
    for row in range(rows.size):
        first, empty = _I32(rows[row]), rows[row] == _U8(0)
        line, codes = values[row * n : (row + 1) * n], elements[row * n * known : row * n * known + n]
        for i in range(n):
            element = _I32(codes[i])
            value = table[np.uint32(_I32(_I32(first + columns[i]) + _I32(twice * element)))]
            if scaled == 1:
                unit = _F32(0.0) if empty else value
                line[i] = _F32(unit * _F32(_I32(element - _I32(ZERO_POINT))))
            else:
                line[i] = _F32(0.0) if empty | (element == _I32(0)) else value


def expand_units(rows: Tensor, columns: Tensor, elements: Tensor | None, base: int, scaled: bool) -> Tensor:
    """See `moments.expand_units`."""
    values = np.empty(rows.numel() * columns.numel(), np.float32)
    # Without elements every octave equals that of the unit.
    given = np.full(columns.numel(), ZERO_POINT, np.uint8) if elements is None else elements.numpy()
    log2_buckets = elements is None or not scaled
    # The first table entry is for a row code of 0, a column code of 0 and an octave code of 0.
    places = columns.numpy().astype(np.int32) + (0 if log2_buckets else 2 * ZERO_POINT)
    table = _TABLE[base + MAX_BASE : base + MAX_BASE + 9 * ZERO_POINT]
    _expand(rows.numpy(), places, given, int(not log2_buckets), table, values)
    return torch.from_numpy(values)
