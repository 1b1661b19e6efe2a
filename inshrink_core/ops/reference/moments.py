"""The norm of the moments codec's kernels in plain torch, an operation for each step of the rule.

`inshrink_core.ops.moments` documents the functions. What takes float64 is done in host memory, for not every
device has that. Whole tensors are rounded by the ops that are done on any device, and by what these tell.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops import moments as ops
from inshrink_core.ops.moments import (
    BAND,
    EIGHTHS,
    FIRST_FACTOR,
    FRACTION_BITS,
    HIGHEST,
    LARGEST_INTEGER,
    LEAST_MOVE,
    LINE,
    LOGARITHMS,
    LOWEST,
    LOWEST_THRESHOLD,
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
    Kinds,
    Sums,
    Units,
    base_of,
    half_octave_values,
)

__all__: list[str] = []


def round_first(
    values: Tensor, second: Tensor | None, n_rows: int, unit: float, allowed: float | None
) -> Codes | None:
    """See `moments.round_first`."""
    n = values.numel()
    if not ops.kinds_of(values).finite:
        return None
    adaptive = second is not None and ops.squares_cover(second, values)
    sums = ops.sum_sides(second if second is not None and adaptive else values, n_rows, not adaptive)
    rows, columns = _log_means(sums)
    # Own columns would give the largest value of a row and a column a unit beyond itself.
    columns = ((columns + 4) >> 3).clip(-ZERO_POINT, ZERO_POINT - 1) if adaptive else np.zeros_like(columns)
    rows = np.where(rows > NO_ROW, (rows + 4) >> 3, NO_ROW)
    reaches = ops.row_reaches(values, n_rows, columns)
    if unit == 0 or not reaches.any():
        return Codes(0, NO_BYTES, NO_BYTES, NO_BYTES)
    root = math.sqrt(ops.relative_square(values, Units(rows, columns)) / n)
    if allowed is not None and adaptive == (second is not None):
        share = allowed / (root if adaptive else math.sqrt(float(sums.rows.cumsum()[-1]) / n))
        unit = min(max(share, UNIT_RANGE[0] * unit), UNIT_RANGE[1] * unit)
    wanted = rows + ((int(_eighths(np.array(unit * root))) + 2) >> 2)
    fitted, threshold = _chosen(values, wanted, columns, reaches)
    base = base_of(int(fitted.max()), 0, False)
    codes = np.where(fitted > NO_ROW, (fitted - base).clip(1, 255), 0)
    units = Units(np.where(codes > 0, codes + base, NO_ROW), columns)
    return _codes(base, codes, columns + ZERO_POINT, ops.round_in_units(values, units, threshold))


def round_second(values: Tensor, n_rows: int, before: Codes | None, held: float | None) -> Codes | None:
    """See `moments.round_second`."""
    if ops.kinds_of(values) != (True, False):
        return None
    by_row, by_column = _log_means(ops.sum_sides(values, n_rows, False))
    largest, known = int(by_row.max()), before is not None
    base = base_of((largest + 2) >> 2 if largest > NO_ROW else 0, before.base if before else 0, known)
    same = before if before is not None and before.base == base else None
    rows = _held(by_row - 4 * base, None if same is None else same.rows, 1)
    rows[by_row == NO_ROW] = 0
    columns = _held(by_column + 4 * ZERO_POINT, None if same is None else same.columns, 0)
    elements = NO_BYTES
    if held is not None:
        old = None if before is None else before.elements.to(values.device)
        elements = ops.round_to_octaves(values, Units(rows + base, columns - ZERO_POINT), old, held)
    return _codes(base, rows, columns, elements)


def round_vector(values: Tensor, before: int | None) -> Codes | None:
    """See `moments.round_vector`."""
    if ops.kinds_of(values) != (True, False):
        return None
    exponents = ((values.view(torch.int32) + OCTAVE_CARRY) >> 23) - 127
    positive = values > 0
    largest = int(exponents[positive].max()) if bool(positive.any()) else 0
    base = base_of(largest, before or 0, before is not None)
    codes = torch.where(positive, (exponents - base).clamp(1, 255), 0).to(torch.uint8)
    return Codes(base, NO_BYTES, NO_BYTES, codes)


def _codes(base: int, rows: NDArray[np.int64], columns: NDArray[np.int64], elements: Tensor) -> Codes:
    by_row, by_column = (torch.from_numpy(side.astype(np.uint8)) for side in (rows, columns))
    return Codes(base, by_row, by_column, elements)


def _eighths(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the whole eighths of octaves in numbers; `NO_ROW` in zero."""
    fractions, exponents = np.frexp(values)
    found = 8 * (exponents.astype(np.int64) - 1) + np.searchsorted(EIGHTHS, fractions, side="right")
    return np.where(values > 0, found, NO_ROW)


def _log_means(sums: Sums) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the eighths of row means, and of column means over that of all."""
    n_rows, n_columns = sums.rows.size, sums.columns.size
    mean = float(sums.rows.cumsum()[-1]) / (n_rows * n_columns)
    relative = sums.columns / n_rows / mean if mean > 0 else np.ones(n_columns)
    return _eighths(sums.rows / n_columns), _eighths(relative)


def _held(eighths: NDArray[np.int64], before: Tensor | None, least: int) -> NDArray[np.int64]:
    """Return half octaves as codes; old ones where those are near enough: no number is on their edges."""
    codes = ((eighths + 2) >> 2).clip(least, 255)
    if before is None:
        return codes
    old = before.cpu().numpy().astype(np.int64)
    away = eighths - 4 * old
    return np.where((old >= least) & (away >= -3) & (away <= 2), old, codes)


def _chosen(
    values: Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64], reaches: NDArray[np.float64]
) -> tuple[NDArray[np.int64], int]:
    """Return exponents of rows and the threshold; where none preserves the projection, units are halved."""
    most = reaches / (LARGEST_INTEGER + 0.25)
    # A row whose integers would not fit a byte has a coarser unit.
    least = _eighths(most)
    least = (least >> 2) + ~((least & 7 == 0) & (np.frexp(most)[0] == 0.5))
    for halvings in range(MAX_HALVINGS + 1):
        fitted = np.where(reaches > 0, np.maximum(rows - 2 * halvings, least), NO_ROW)
        threshold = _threshold(ops.count_magnitudes(values, Units(fitted, columns)))
        if threshold is not None:
            return fitted, threshold
    return fitted, LOWEST_THRESHOLD


def _threshold(counts: NDArray[np.int64]) -> int | None:
    """Return the largest threshold that preserves the projection; None where none is low enough.

    `counts` are those of magnitudes.
    """
    at = np.flatnonzero(counts)
    counts = counts[at] * at

    def falls_short(threshold: int) -> bool:
        whole = (at + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
        return int((counts * whole).sum()) << FRACTION_BITS < int((counts * at).sum())

    thresholds = range(LOWEST_THRESHOLD, PLAIN_THRESHOLD + 1)
    n = bisect.bisect_left(thresholds, True, key=falls_short)
    return thresholds[n - 1] if n else None


def kinds_of(values: Tensor) -> Kinds:
    """See `moments.kinds_of`."""
    return Kinds(bool(values.isfinite().all()), bool((values < 0).any()))


def squares_cover(squares: Tensor, values: Tensor) -> bool:
    """See `moments.squares_cover`."""
    fits = squares.isfinite() & ((squares > 0) | ((squares == 0) & (values == 0)))
    return bool(fits.all())


def _sums_of_rows(terms: Tensor) -> NDArray[np.float64]:
    total = torch.zeros(len(terms), dtype=torch.float64)
    for part in torch.split(terms, LINE, 1):
        padded = torch.nn.functional.pad(part, (0, -part.shape[1] % N_SUMS))
        sums = padded.reshape(len(terms), -1, N_SUMS).cumsum(1)[:, -1]
        while sums.shape[1] > 1:
            sums = sums[:, 0::2] + sums[:, 1::2]
        total = total + sums[:, 0]
    found: NDArray[np.float64] = total.numpy()
    return found


def sum_sides(values: Tensor, n_rows: int, squared: bool) -> Sums:
    """See `moments.sum_sides`."""
    # A running sum begins with +0.0, which -0.0 does not change.
    terms = values.cpu().double().view(n_rows, -1) + 0.0
    if squared:
        terms *= terms
    columns = torch.zeros(terms.shape[1], dtype=torch.float64)
    for band in torch.split(terms, BAND):
        columns = columns + band.cumsum(0)[-1]
    return Sums(_sums_of_rows(terms), columns.numpy())


def _exponents(units: Units) -> Tensor:
    rows, columns = map(torch.from_numpy, units)
    return (rows[:, None] + columns[None, :]).view(-1)


def _values_of(exponents: Tensor) -> Tensor:
    table = torch.from_numpy(half_octave_values(np.arange(LOWEST, HIGHEST + 1))).to(exponents.device)
    return table[exponents.clamp(LOWEST, HIGHEST) - LOWEST]


def relative_square(values: Tensor, units: Units) -> float:
    """See `moments.relative_square`."""
    relative = values.cpu().double() * _values_of(-_exponents(units))
    return float(_sums_of_rows(relative.square().view(units.rows.size, -1)).cumsum()[-1])


def row_reaches(values: Tensor, n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """See `moments.row_reaches`."""
    sizes = values.cpu().double().abs().view(n_rows, -1) * _values_of(torch.from_numpy(-columns))
    reaches: NDArray[np.float64] = sizes.amax(1).numpy()
    return reaches


def _magnitudes(values: Tensor, units: Units) -> Tensor:
    shares = values.abs() * _values_of(-_exponents(units).to(values.device)) * float(1 << FRACTION_BITS)
    return shares.clamp(max=float(MAX_MAGNITUDE)).to(torch.int64)


def count_magnitudes(values: Tensor, units: Units) -> NDArray[np.int64]:
    """See `moments.count_magnitudes`."""
    counts: NDArray[np.int64] = (
        torch.bincount(_magnitudes(values, units), minlength=MAX_MAGNITUDE + 1).cpu().numpy()
    )
    return counts


def round_in_units(values: Tensor, units: Units, threshold: int) -> Tensor:
    """See `moments.round_in_units`."""
    whole = (_magnitudes(values, units) + (1 << FRACTION_BITS) - threshold) >> FRACTION_BITS
    whole = whole.clamp(max=LARGEST_INTEGER)
    return (torch.where(values < 0, -whole, whole) + ZERO_POINT).to(torch.uint8)


def round_to_octaves(values: Tensor, units: Units, before: Tensor | None, held: float) -> Tensor:
    """See `moments.round_to_octaves`."""
    values, device = values.cpu(), values.device
    mantissas, exponents = torch.frexp(values.double())
    # Of a power of two the logarithm is taken of one, so that a tie is one on every processor.
    logarithms = (2 * mantissas).log2() + (exponents - 1)
    wanted = logarithms - 0.5 * _exponents(units)
    wanted = torch.where(values > 0, wanted, 0.0)
    codes = wanted.round().clamp(1 - ZERO_POINT, ZERO_POINT - 1) + ZERO_POINT
    if before is not None:
        old = before.cpu().double()
        codes = torch.where((old > 0) & ((wanted + ZERO_POINT - old).abs() <= held), old, codes)
    return torch.where(values > 0, codes, 0.0).to(torch.uint8).to(device)


def carry_octaves(values: Tensor, units: Units, before: Tensor, rounded: Tensor) -> Tensor | None:
    """See `moments.carry_octaves`."""
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


def draw_octaves(values: Tensor, units: Units, draw: int) -> Tensor:
    """See `moments.draw_octaves`."""
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
    return 256 * (exponents.long() - 1) + above - 128 * _exponents(units).to(values.device).view(-1)


def expand_units(rows: Tensor, columns: Tensor, elements: Tensor | None, base: int, scaled: bool) -> Tensor:
    """See `moments.expand_units`."""
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
