"""Shaped rounding in Triton: a program for a few rows, which goes along the columns.

Both ways, rows and columns, the plain-torch twin rounds the diagonals.

`inshrink_core.ops.shaping` documents the functions; `inshrink_core.ops.reference.shaping` has their twins in
plain torch. Importing this module needs Triton. Parts of spacings are integers; what floats come before them
is single operations, launched without fused multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inshrink_core.ops.lattice import Lattice
from inshrink_core.ops.reference import shaping as reference
from inshrink_core.ops.shaping import FAR, MOST_COUNTED, MOST_ERROR, MOST_FED, PARTS, RANK, Factors, Shaped
from inshrink_core.ops.triton.lattice import nearest

_RANK = tl.constexpr(RANK)
_FAR = tl.constexpr(float(FAR))
_PARTS = tl.constexpr(PARTS)
_FED = tl.constexpr(MOST_FED)
_ERROR = tl.constexpr(MOST_ERROR)
_COUNTED = tl.constexpr(MOST_COUNTED)

_ROWS = 16
"""Rows of a program: their sums are 64-bit numbers in registers, eight a thread."""


@triton.jit(do_not_specialize=["n_rows", "per_row", "shift"])
def _shape(
    values: tl.tensor,
    base: tl.tensor,
    integers: tl.tensor,
    grades: tl.tensor,
    gains: tl.tensor,
    directions: tl.tensor,
    changes: tl.tensor,
    leads: tl.tensor,
    unit: tl.tensor,
    reciprocal: tl.tensor,
    n_rows: tl.tensor,
    n: tl.tensor,
    per_row: tl.tensor,
    shift: tl.tensor,
    based: tl.constexpr,
    size: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    here = row < n_rows
    rank = tl.arange(0, _RANK)
    grade = tl.load(grades + row * per_row, mask=here, other=0).to(tl.int64)
    sums = tl.zeros((size, _RANK), tl.int64)
    lead = tl.zeros((size,), tl.int64)
    energy = tl.zeros((size,), tl.int64)
    half = (tl.full((), 1, tl.int64) << shift) >> 1
    for k in range(n):
        place = row * n + k
        w = tl.load(values + place, mask=here, other=0.0)
        at = tl.load(integers + place, mask=here, other=0).to(tl.float32) * unit
        u = (w - at) * reciprocal
        r = u
        o = tl.zeros((size,), tl.float32)
        if based:
            start = tl.load(base + place, mask=here, other=0.0)
            r = (w - start) * reciprocal
            o = (at - start) * reciprocal
        near = (tl.abs(r) < _FAR) & (tl.abs(o) < _FAR)  # false for NaN
        moved = nearest(tl.where(near, r * _PARTS, 0.0)).to(tl.int64)
        offset = nearest(tl.where(near, o * _PARTS, 0.0)).to(tl.int64)
        gain = tl.load(gains + k * _RANK + rank).to(tl.int64)
        fed = (tl.sum(sums * gain[None, :], 1) + half) >> shift
        fed = tl.minimum(tl.maximum(fed, -_FED), _FED)
        wanted = moved - fed
        crossed = tl.where(wanted < 0, -offset, offset) > _PARTS // 2
        threshold = tl.where(crossed, grade * 7 // 10, grade)
        length = (4 * tl.abs(wanted) + 4 * _PARTS - threshold) >> 12
        matched = tl.where(wanted < 0, -length, length)
        y = tl.where(grade == 0, (wanted + _PARTS // 2) >> 10, matched)
        q = (_PARTS * y - offset + _PARTS // 2) >> 10
        error = _PARTS * q + offset - moved
        error = tl.where(near, tl.minimum(tl.maximum(error, -_ERROR), _ERROR), 0)
        direction = tl.load(directions + k * _RANK + rank).to(tl.int64)
        sums += error[:, None] * direction[None, :]
        if based:
            movement = tl.where(near & (tl.abs(moved) < _COUNTED), moved, 0)
            lead += (_PARTS * y - movement) * movement
            energy += movement * movement
        tl.store(changes + place, tl.where(near, q.to(tl.float32), nearest(u)), mask=here)
    tl.store(leads + 2 * row, lead, mask=here)
    tl.store(leads + 2 * row + 1, energy, mask=here)


def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grades: Tensor,
    factors: Factors,
    by_row: Factors | None,
) -> Shaped:
    """See `inshrink_core.ops.shaping.shape_changes`."""
    if by_row is not None:
        return reference.shape_changes(values, base, integers, lattice, grades, factors, by_row)
    device, n = values.device, factors.gains.shape[0]
    n_rows = values.numel() // n
    changes = torch.empty_like(values)
    leads = torch.empty(n_rows, 2, dtype=torch.int64, device=device)
    sides = (torch.from_numpy(side).to(device) for side in (factors.gains, factors.directions))
    start = values if base is None else base.to(device)
    tensors = (values, start, integers.to(device), grades.to(device), *sides, changes, leads)
    numbers = (lattice.unit, lattice.reciprocal, n_rows, n, int(grades.numel() > 1), factors.shift)
    _shape[(triton.cdiv(n_rows, _ROWS),)](*tensors, *numbers, base is not None, _ROWS, enable_fp_fusion=False)
    return Shaped(changes, leads.to(integers.device))
