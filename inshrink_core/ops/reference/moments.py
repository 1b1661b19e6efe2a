"""The norm of the moments codec's kernels in plain torch, an operation for each step of the rule.

`inshrink_core.ops.moments` documents the functions. What takes float64 is done in host memory, for not every
device has that.
"""

from __future__ import annotations

import math

import numpy as np
import torch
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
    half_octave_values,
)

__all__: list[str] = []


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
    relative = values.cpu().double() / _values_of(_exponents(units))
    return math.fsum(_sums_of_rows(relative.square().view(units.rows.size, -1)).tolist())


def row_reaches(values: Tensor, n_rows: int, columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """See `moments.row_reaches`."""
    units = _values_of(torch.from_numpy(columns))
    reaches: NDArray[np.float64] = (values.cpu().double().abs().view(n_rows, -1) / units).amax(1).numpy()
    return reaches


def _magnitudes(values: Tensor, units: Units) -> Tensor:
    shares = values.abs() / _values_of(_exponents(units).to(values.device)) * float(1 << FRACTION_BITS)
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
