"""The moments codec in Triton: sums, reaches and counts of optimizer state, its rounding and its inverse.

`inshrink_core.ops.moments` documents the functions; `inshrink_core.ops.reference.moments` has their twins in
plain torch. Importing this module needs Triton. Units are made of bits, not looked up. Every sum has the
order of the rule: a program adds up the slices of rows, or a band of columns, and the host adds these.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

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
    octave_edges,
)

_SIZE = 1024
"""Elements of one program: eight a thread."""

_SLICES = 8
"""Slices that one program adds up: a running sum for each thread."""

_COLUMNS = 128
"""Columns that one program adds up: one a thread."""

_MAX_COPIES = 32
"""Tables that programs count in by turns: of equal magnitudes only one can be added to a table at a time."""

_LINE = tl.constexpr(LINE)
_BAND = tl.constexpr(BAND)
_SUMS = tl.constexpr(N_SUMS)
_LOWEST = tl.constexpr(LOWEST)
_HIGHEST = tl.constexpr(HIGHEST)
_ZERO = tl.constexpr(ZERO_POINT)
_TOP = tl.constexpr(LARGEST_INTEGER)
_BITS = tl.constexpr(FRACTION_BITS)
_ONE = tl.constexpr(1 << FRACTION_BITS)
_MAX_MAGNITUDE = tl.constexpr(float(MAX_MAGNITUDE))

_INFINITE = tl.constexpr(0x7F800000)
_ROOT = tl.constexpr(0x3504F3)
"""Fraction of the root of two in float32; that of the next number is the first beyond the root."""

_FRACTION = tl.constexpr(0x7FFFFF)
_LEAST_NORMAL = tl.constexpr(0x800000)
_NORMALIZING_BITS = tl.constexpr(24)
_ENLARGED = tl.constexpr(2.0**24)


@triton.jit
def _half_octaves(k: tl.tensor) -> tl.tensor:
    """Twin of `moments.half_octave_values`."""
    k = tl.minimum(tl.maximum(k, _LOWEST), _HIGHEST)
    bits = (((k >> 1) + 127) << 23) | tl.where((k & 1) != 0, _ROOT, 0)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _exponents(
    rows: tl.tensor, columns: tl.tensor, length: tl.tensor, place: tl.tensor, here: tl.tensor
) -> tl.tensor:
    """Sum of what a row and a column say, of elements in row-major order."""
    of_row = tl.load(rows + place // length, mask=here, other=0).to(tl.int32)
    return of_row + tl.load(columns + place % length, mask=here, other=0).to(tl.int32)


@triton.jit
def _kinds(words: tl.tensor, seen: tl.tensor, n: tl.tensor, size: tl.constexpr) -> None:
    program = tl.program_id(0).to(tl.int64)
    place = program * size + tl.arange(0, size)
    word = tl.load(words + place, mask=place < n, other=0)
    magnitude = word & 0x7FFFFFFF
    negative = (word < 0) & (magnitude != 0) & (magnitude <= _INFINITE)
    tl.store(seen + 2 * program, tl.max((magnitude >= _INFINITE).to(tl.int32), 0))
    tl.store(seen + 2 * program + 1, tl.max(negative.to(tl.int32), 0))


@triton.jit
def _uncovered(
    squares: tl.tensor, values: tl.tensor, found: tl.tensor, n: tl.tensor, size: tl.constexpr
) -> None:
    program = tl.program_id(0).to(tl.int64)
    place = program * size + tl.arange(0, size)
    here = place < n
    square = tl.load(squares + place, mask=here, other=0)
    value = tl.load(values + place, mask=here, other=0) & 0x7FFFFFFF
    # As integers, -0.0 is the least, and numbers below zero and NaN are out of range.
    fits = ((square > 0) & (square < _INFINITE)) | (((square & 0x7FFFFFFF) == 0) & (value == 0))
    tl.store(found + program, tl.sum((fits == 0).to(tl.int32), 0))


@triton.jit
def _neighbours(x: tl.tensor, n_rows: tl.constexpr, left: tl.constexpr) -> tl.tensor:
    one, other = tl.split(tl.reshape(x, (n_rows, left, 2)))
    return one + other


@triton.jit(do_not_specialize=["per_row"])
def _sum_slices(
    values: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    sums: tl.tensor,
    length: tl.tensor,
    per_row: tl.tensor,
    n_slices: tl.tensor,
    relative: tl.constexpr,
    squared: tl.constexpr,
    size: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = number < n_slices
    row = (number // per_row)[:, None]
    begin = (number % per_row)[:, None] * _LINE
    end = tl.where(there[:, None], tl.minimum(begin + _LINE, length), 0)
    lane = tl.arange(0, _SUMS)[None, :]
    total = tl.zeros((size, _SUMS), tl.float64)
    for first in range(0, tl.minimum(length, _LINE), _SUMS):
        within = begin + first + lane
        here = within < end
        value = tl.load(values + row * length + within, mask=here, other=0.0).to(tl.float64)
        if relative:
            k = tl.load(rows + row + 0 * lane, mask=here, other=0)
            k += tl.load(columns + within, mask=here, other=0)
            value = value * _half_octaves(-k).to(tl.float64)
        if squared:
            value = value * value
        total += value
    total = _neighbours(total, size, 8)
    total = _neighbours(total, size, 4)
    total = _neighbours(total, size, 2)
    total = _neighbours(total, size, 1)
    tl.store(sums + number, tl.reshape(total, (size,)), mask=there)


@triton.jit
def _sum_bands(
    values: tl.tensor,
    sums: tl.tensor,
    n_rows: tl.tensor,
    length: tl.tensor,
    n_blocks: tl.tensor,
    squared: tl.constexpr,
    size: tl.constexpr,
) -> None:
    band = tl.program_id(0).to(tl.int64) // n_blocks
    column = tl.program_id(0).to(tl.int64) % n_blocks * size + tl.arange(0, size)
    total = tl.zeros((size,), tl.float64)
    for row in range(band * _BAND, tl.minimum((band + 1) * _BAND, n_rows)):
        value = tl.load(values + row * length + column, mask=column < length, other=0.0).to(tl.float64)
        if squared:
            value = value * value
        total += value
    tl.store(sums + band * length + column, total, mask=column < length)


@triton.jit(do_not_specialize=["per_row"])
def _reaches(
    values: tl.tensor,
    columns: tl.tensor,
    found: tl.tensor,
    length: tl.tensor,
    per_row: tl.tensor,
    size: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    within = program % per_row * size + tl.arange(0, size)
    here = within < length
    value = tl.load(values + program // per_row * length + within, mask=here, other=0.0).to(tl.float64)
    over = _half_octaves(-tl.load(columns + within, mask=here, other=0)).to(tl.float64)
    tl.store(found + program, tl.max(tl.abs(value) * over, 0))


@triton.jit
def _magnitude(value: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Magnitude in 256ths of a unit."""
    share = tl.abs(value) * _half_octaves(-k) * _ONE
    return tl.where(share < _MAX_MAGNITUDE, share, _MAX_MAGNITUDE).to(tl.int32)


@triton.jit(do_not_specialize=["copies"])
def _count_magnitudes(
    values: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    counts: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    copies: tl.tensor,
    n_counts: tl.constexpr,
    size: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    value = tl.load(values + place, mask=here, other=0.0)
    magnitude = _magnitude(value, _exponents(rows, columns, length, place, here))
    tl.atomic_add(counts + (tl.program_id(0) % copies) * n_counts + magnitude, 1, mask=here)


@triton.jit(do_not_specialize=["threshold"])
def _round_in_units(
    values: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    elements: tl.tensor,
    threshold: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    size: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    value = tl.load(values + place, mask=here, other=0.0)
    magnitude = _magnitude(value, _exponents(rows, columns, length, place, here))
    whole = tl.minimum((magnitude + _ONE - threshold) >> _BITS, _TOP)
    tl.store(elements + place, (tl.where(value < 0, -whole, whole) + _ZERO).to(tl.uint8), mask=here)


@triton.jit
def _round_to_octaves(
    words: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    before: tl.tensor,
    edges: tl.tensor,
    elements: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    known: tl.constexpr,
    size: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    word = tl.load(words + place, mask=here, other=0)
    # A subnormal number is scaled up, exactly, and its exponent mended.
    small = word < _LEAST_NORMAL
    enlarged = word.to(tl.float32, bitcast=True) * _ENLARGED
    number = tl.where(small, enlarged.to(tl.int32, bitcast=True), word)
    unit = _exponents(rows, columns, length, place, here)
    odd = (unit & 1) != 0
    octave = (number >> 23) - 127 - (unit >> 1) - tl.where(small, _NORMALIZING_BITS, 0)
    fraction = number & _FRACTION
    # For an even unit the edge is the root of two, for an odd one a power: a tie, to even.
    past = (fraction > _ROOT).to(tl.int32)
    tie = tl.where(fraction == 0, octave & 1, 0)
    nearest = tl.where(odd, octave - tie, octave + past)
    code = tl.minimum(tl.maximum(nearest, 1 - _ZERO), _ZERO - 1) + _ZERO
    if known:
        old = tl.load(before + place, mask=here, other=0).to(tl.int32)
        away = octave - (old - _ZERO)
        edge = edges + 4 * odd.to(tl.int32)
        low = tl.load(edge)
        high = tl.load(edge + 2)
        above = (away > low) | ((away == low) & (fraction >= tl.load(edge + 1)))
        below = (away < high) | ((away == high) & (fraction <= tl.load(edge + 3)))
        code = tl.where((old > 0) & above & below, old, code)
    tl.store(elements + place, tl.where(word > 0, code, 0).to(tl.uint8), mask=here)


@triton.jit(do_not_specialize=["base"])
def _expand(
    rows: tl.tensor,
    columns: tl.tensor,
    elements: tl.tensor,
    values: tl.tensor,
    base: tl.tensor,
    length: tl.tensor,
    n: tl.tensor,
    known: tl.constexpr,
    scaled: tl.constexpr,
    size: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = place < n
    k = _exponents(rows, columns, length, place, here) - _ZERO + base
    there = tl.load(rows + place // length, mask=here, other=0) != 0
    code = tl.full((size,), _ZERO, tl.int32)
    if known:
        code = tl.load(elements + place, mask=here, other=0).to(tl.int32)
    if scaled:
        value = tl.where(there, _half_octaves(k), 0.0) * (code - _ZERO).to(tl.float32)
    else:
        value = tl.where(there & (code != 0), _half_octaves(k + 2 * (code - _ZERO)), 0.0)
    tl.store(values + place, value, mask=here)


def _programs(n: int) -> tuple[int]:
    return (triton.cdiv(n, _SIZE),)


def _words(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def _small(exponents: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(exponents.astype(np.int32)).to(device)


def kinds_of(values: Tensor) -> Kinds:
    """See `inshrink_core.ops.moments.kinds_of`."""
    n = values.numel()
    grid = _programs(n)
    seen = torch.empty(*grid, 2, dtype=torch.int32, device=values.device)
    _kinds[grid](_words(values), seen, n, _SIZE, enable_fp_fusion=False)
    endless, negative = seen.amax(0).tolist()
    return Kinds(not endless, bool(negative))


def squares_cover(squares: Tensor, values: Tensor) -> bool:
    """See `inshrink_core.ops.moments.squares_cover`."""
    n = values.numel()
    grid = _programs(n)
    found = torch.empty(*grid, dtype=torch.int32, device=values.device)
    _uncovered[grid](_words(squares), _words(values), found, n, _SIZE, enable_fp_fusion=False)
    return not bool(found.any())


def _sums_of_rows(values: Tensor, n_rows: int, units: Units | None, squared: bool) -> NDArray[np.float64]:
    length, device = values.numel() // n_rows, values.device
    per_row = triton.cdiv(length, LINE)
    n_slices = n_rows * per_row
    sums = torch.empty(n_rows, per_row, dtype=torch.float64, device=device)
    sides = (values, values) if units is None else (_small(side, device) for side in units)
    numbers = (length, per_row, n_slices, units is not None, squared, _SLICES)
    grid = (triton.cdiv(n_slices, _SLICES),)
    _sum_slices[grid](values, *sides, sums, *numbers, enable_fp_fusion=False)
    found: NDArray[np.float64] = sums.cpu().numpy().cumsum(1)[:, -1]
    return found


def sum_sides(values: Tensor, n_rows: int, squared: bool) -> Sums:
    """See `inshrink_core.ops.moments.sum_sides`."""
    length = values.numel() // n_rows
    n_blocks, n_bands = triton.cdiv(length, _COLUMNS), triton.cdiv(n_rows, BAND)
    bands = torch.empty(n_bands, length, dtype=torch.float64, device=values.device)
    numbers = (n_rows, length, n_blocks, squared, _COLUMNS)
    _sum_bands[(n_blocks * n_bands,)](values, bands, *numbers, enable_fp_fusion=False)
    rows = _sums_of_rows(values, n_rows, None, squared)
    return Sums(rows, bands.cpu().numpy().cumsum(0)[-1])


def relative_square(values: Tensor, units: Units) -> float:
    """See `inshrink_core.ops.moments.relative_square`."""
    return float(_sums_of_rows(values, units.rows.size, units, True).cumsum()[-1])


def row_reaches(values: Tensor, n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """See `inshrink_core.ops.moments.row_reaches`."""
    length, device = columns.size, values.device
    size = min(max(triton.next_power_of_2(length), _COLUMNS), _SIZE)
    per_row = triton.cdiv(length, size)
    found = torch.empty(n_rows, per_row, dtype=torch.float64, device=device)
    tensors = (values, _small(columns, device), found)
    _reaches[(n_rows * per_row,)](*tensors, length, per_row, size, enable_fp_fusion=False)
    reaches: NDArray[np.float64] = found.amax(1).cpu().numpy()
    return reaches


def _by_element(values: Tensor, units: Units) -> tuple[tuple[Tensor, Tensor, Tensor], int, int]:
    """Return what a kernel over elements in units begins with: tensors, the length of a row, and n."""
    rows, columns = (_small(side, values.device) for side in units)
    return (values, rows, columns), columns.numel(), values.numel()


def count_magnitudes(values: Tensor, units: Units) -> NDArray[np.int64]:
    """See `inshrink_core.ops.moments.count_magnitudes`."""
    tensors, length, n = _by_element(values, units)
    n_counts, grid = MAX_MAGNITUDE + 1, _programs(n)
    copies = min(max(grid[0] // 64, 1), _MAX_COPIES)
    tables = torch.zeros(copies, n_counts, dtype=torch.int64, device=values.device)
    numbers = (length, n, copies, n_counts, _SIZE)
    _count_magnitudes[grid](*tensors, tables, *numbers, enable_fp_fusion=False)
    counts: NDArray[np.int64] = tables.sum(0).cpu().numpy()
    return counts


def round_in_units(values: Tensor, units: Units, threshold: int) -> Tensor:
    """See `inshrink_core.ops.moments.round_in_units`."""
    tensors, length, n = _by_element(values, units)
    elements = torch.empty(n, dtype=torch.uint8, device=values.device)
    numbers = (threshold, length, n, _SIZE)
    _round_in_units[_programs(n)](*tensors, elements, *numbers, enable_fp_fusion=False)
    return elements


def round_to_octaves(values: Tensor, units: Units, before: Tensor | None, held: float) -> Tensor:
    """See `inshrink_core.ops.moments.round_to_octaves`."""
    tensors, length, n = _by_element(_words(values), units)
    elements = torch.empty(n, dtype=torch.uint8, device=values.device)
    edges = torch.tensor(octave_edges(held), dtype=torch.int32, device=values.device)
    given = elements if before is None else before
    numbers = (length, n, before is not None, _SIZE)
    _round_to_octaves[_programs(n)](*tensors, given, edges, elements, *numbers, enable_fp_fusion=False)
    return elements


def expand_units(rows: Tensor, columns: Tensor, elements: Tensor | None, base: int, scaled: bool) -> Tensor:
    """See `inshrink_core.ops.moments.expand_units`."""
    n = rows.numel() * columns.numel()
    values = torch.empty(n, dtype=torch.float32, device=rows.device)
    known = elements is not None
    tensors = (rows, columns, elements if known else rows, values)
    numbers = (base, columns.numel(), n, known, scaled and known, _SIZE)
    _expand[_programs(n)](*tensors, *numbers, enable_fp_fusion=False)
    return values
