"""Thresholds of matched gain in Triton: an integer histogram of each row, and the choice from its sums.

`inshrink_core.ops.lattice` documents the function; `reference_lattice` has its twin in plain torch.
Importing this module needs Triton. What decides is integers, so no result depends on the order in which
programs add their counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inshrink_core.ops.lattice import GAIN_BINS, GAIN_SLACK, MAX_GRADE, MIN_GRADE, WEAK_ENERGY, Grid

__all__ = ["grades_on"]

_BINS = tl.constexpr(GAIN_BINS)
_SLACK = tl.constexpr(GAIN_SLACK)
_WEAK = tl.constexpr(WEAK_ENERGY)
_MIN = tl.constexpr(MIN_GRADE)
_MAX = tl.constexpr(MAX_GRADE)

_COUNTED = 4096
"""Elements of one turn: as many as bins, so that clearing those costs no more than counting."""

_PROGRAMS = 1024
"""Most programs for a row: several for each of the hundred-odd multiprocessors of a large GPU."""

_ROWS = 4096
"""Rows counted together: their bins take 128 MB."""


@triton.jit(do_not_specialize=["per_row"])
def _count(
    values: tl.tensor,
    base: tl.tensor,
    integers: tl.tensor,
    counts: tl.tensor,
    beyond: tl.tensor,
    delta: tl.tensor,
    rcp: tl.tensor,
    length: tl.tensor,
    per_row: tl.tensor,
    size: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) // per_row
    part = tl.program_id(0).to(tl.int64) % per_row
    found = tl.zeros((2 * _BINS,), tl.int32)
    n_beyond = tl.zeros((size,), tl.int32)
    for begin in range(part * size, length, per_row * size):
        within = begin + tl.arange(0, size)
        here = within < length
        place = row * length + within
        b = tl.load(base + place, mask=here, other=0.0)
        r = (tl.load(values + place, mask=here, other=0.0) - b) * rcp
        o = (tl.load(integers + place, mask=here, other=0).to(tl.float32) * delta - b) * rcp
        crossed = tl.where(r < 0, -o, o) > 0.5
        scaled = tl.abs(r) * 256.0
        inside = scaled < _BINS  # false for NaN
        key = tl.where(inside, scaled, 0.0).to(tl.int32) + tl.where(crossed, _BINS, 0)
        found += tl.histogram(key, 2 * _BINS, mask=here & inside)
        n_beyond += (here & (inside == 0)).to(tl.int32)
    place = tl.arange(0, 2 * _BINS)
    tl.atomic_add(counts + row * 2 * _BINS + place, found.to(tl.int64), mask=found > 0)
    tl.atomic_add(beyond + row, tl.sum(n_beyond.to(tl.int64), 0))


@triton.jit
def _choose(counts: tl.tensor, beyond: tl.tensor, grades: tl.tensor) -> None:
    """Twin of `reference_lattice.best_grade`, whose loops over bins are sums here."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 2 * _BINS)
    count = tl.load(counts + row * 2 * _BINS + place)
    b = place % _BINS
    crossed = place >= _BINS
    twice = (2 * b + 1).to(tl.int64)
    energy = tl.sum(count * twice * twice, 0)
    plain = tl.sum(count * twice * ((twice + 256) // 512 * 512 - twice), 0)
    slack = energy // _SLACK
    low = tl.full((), _MIN - 1, tl.int32)
    high = tl.full((), _MAX + 1, tl.int32)
    while high - low > 1:
        grade = (low + high) // 2
        threshold = tl.where(crossed, grade * 7 // 10, grade)
        whole = (16 * b + 8 + 4096 - threshold) // 4096
        lead = tl.sum(count * twice * (whole * 512 - twice), 0)
        enough = lead + slack >= 0
        low = tl.where(enough, grade, low)
        high = tl.where(enough, high, grade)
    weak = _WEAK * energy < tl.sum(count, 0) * (512 * 512)
    coarse = (low < _MIN) | ((tl.load(beyond + row) == 0) & weak)
    chosen = tl.where(coarse, -tl.maximum(low, _MIN), low)
    tl.store(grades + row, tl.where(plain + slack >= 0, 0, chosen))


def grades_on(values: Tensor, base: Tensor, integers: Tensor, grid: Grid, n_rows: int) -> Tensor:
    """See `inshrink_core.ops.lattice.gain_grades`; at least one value."""
    device, length = values.device, values.numel() // n_rows
    base, integers = base.to(device), integers.to(device)
    grades = torch.empty(n_rows, dtype=torch.int32, device=device)
    for first in range(0, n_rows, _ROWS):
        rows = min(_ROWS, n_rows - first)
        per_row = min(triton.cdiv(length, _COUNTED), max(_PROGRAMS // rows, 1))
        part = slice(first * length, (first + rows) * length)
        counts = torch.zeros(rows, 2 * GAIN_BINS, dtype=torch.int64, device=device)
        beyond = torch.zeros(rows, dtype=torch.int64, device=device)
        _count[(rows * per_row,)](
            values[part],
            base[part],
            integers[part],
            counts,
            beyond,
            grid.delta,
            grid.rcp,
            length,
            per_row,
            _COUNTED,
            enable_fp_fusion=False,
            num_warps=8,
        )
        _choose[(rows,)](counts, beyond, grades[first : first + rows], enable_fp_fusion=False, num_warps=8)
    return grades.cpu()
