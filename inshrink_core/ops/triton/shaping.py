"""Error feedback in Triton: a program processes a few rows along the columns.

With feedback in both directions each row runs one column behind the row above. Programs synchronize through
launches: in each launch every program advances by some columns, two launches behind the program above.

`inshrink_core.ops.shaping` documents the functions and has the versions in plain PyTorch. Importing this
module needs Triton. Fractions of a step are integers. The float operations before them are single operations,
launched without fused multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inshrink_core.ops.lattice import Lattice
from inshrink_core.ops.shaping import FAR, MAX_COUNTED, MAX_ERROR, MAX_FEEDBACK, PARTS, RANK, Factors
from inshrink_core.ops.triton.lattice import nearest

_RANK = tl.constexpr(RANK)
_FAR = tl.constexpr(float(FAR))
_PARTS = tl.constexpr(PARTS)
_FEEDBACK = tl.constexpr(MAX_FEEDBACK)
_ERROR = tl.constexpr(MAX_ERROR)
_COUNTED = tl.constexpr(MAX_COUNTED)

_ROWS = 16
"""Rows of a program: their sums are 64-bit numbers in registers, eight per thread."""

_STEPS = 32
"""Columns per launch with feedback in both directions: at least the number of rows of a program."""


@triton.jit
def _taken(
    values: tl.tensor,
    base: tl.tensor,
    integers: tl.tensor,
    place: tl.tensor,
    here: tl.tensor,
    unit: tl.tensor,
    reciprocal: tl.tensor,
    based: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return r and o in parts, whether both are near, and the plain changes ``rint((w - x) / D)``.

    With the value w, the state x, the base b and the step size D, ``r = (w - b) / D`` and
    ``o = (x - b) / D``. Without a base, b is x.
    """
    w = tl.load(values + place, mask=here, other=0.0)
    at = tl.load(integers + place, mask=here, other=0).to(tl.float32) * unit
    u = (w - at) * reciprocal
    r = u
    o = tl.zeros_like(u)
    if based:
        start = tl.load(base + place, mask=here, other=0.0)
        r = (w - start) * reciprocal
        o = (at - start) * reciprocal
    near = (tl.abs(r) < _FAR) & (tl.abs(o) < _FAR)  # false for NaN
    moved = nearest(tl.where(near, r * _PARTS, 0.0)).to(tl.int64)
    offset = nearest(tl.where(near, o * _PARTS, 0.0)).to(tl.int64)
    return moved, offset, near, nearest(u)


@triton.jit
def _feedback(sums: tl.tensor, gains: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """Return the feedback ``V · s`` in parts; `gains` holds V in units of ``2**-shift``."""
    half = (tl.full((), 1, tl.int64) << shift) >> 1
    return (tl.sum(sums * gains, 1) + half) >> shift


@triton.jit
def _rounded(
    moved: tl.tensor, offset: tl.tensor, near: tl.tensor, feedback: tl.tensor, grade: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return rounded movements y, changes q, and errors e in parts.

    With m the movement less the feedback, ``y = sign(m) floor(abs(m) + 1 - t)``, or ``floor(m + 1/2)`` for
    grade 0. Then ``q = floor(y - o + 1/2)`` and ``e = q + o - r``. `matched_changes` defines the threshold t.
    """
    wanted = moved - tl.minimum(tl.maximum(feedback, -_FEEDBACK), _FEEDBACK)
    crossed = tl.where(wanted < 0, -offset, offset) > _PARTS // 2
    threshold = tl.where(crossed, grade * 7 // 10, grade)
    length = (4 * tl.abs(wanted) + 4 * _PARTS - threshold) >> 12
    matched = tl.where(wanted < 0, -length, length)
    y = tl.where(grade == 0, (wanted + _PARTS // 2) >> 10, matched)
    q = (_PARTS * y - offset + _PARTS // 2) >> 10
    error = _PARTS * q + offset - moved
    return y, q, tl.where(near, tl.minimum(tl.maximum(error, -_ERROR), _ERROR), 0)


@triton.jit(do_not_specialize=["n_rows", "grade", "shift", "row_shift", "wave", "steps"])
def _shape(
    values: tl.tensor,
    base: tl.tensor,
    integers: tl.tensor,
    gains: tl.tensor,
    directions: tl.tensor,
    row_gains: tl.tensor,
    row_directions: tl.tensor,
    along: tl.tensor,
    down: tl.tensor,
    changes: tl.tensor,
    leads: tl.tensor,
    unit: tl.tensor,
    reciprocal: tl.tensor,
    n_rows: tl.tensor,
    n: tl.tensor,
    grade: tl.tensor,
    shift: tl.tensor,
    row_shift: tl.tensor,
    wave: tl.tensor,
    steps: tl.tensor,
    based: tl.constexpr,
    both: tl.constexpr,
    size: tl.constexpr,
) -> None:
    """Choose the changes of some columns k of a program's rows i.

    The feedback is ``V_k · s_i``, plus ``V'_i · d_k`` in both directions. After the error e of an element,
    ``s_i += e G_k`` and ``d_k += (e + V_k · s_i) G'_i``, with the old s_i. The prime denotes `row_gains` and
    `row_directions`. In both directions rows are one column apart, and programs two launches.
    """
    lane = tl.arange(0, size)
    row = tl.program_id(0).to(tl.int64) * size + lane
    inside = row < n_rows
    rank = tl.arange(0, _RANK)[None, :]
    row_at = row[:, None] * _RANK + rank
    sums = tl.zeros((size, _RANK), tl.int64)
    if both:
        begun = (wave - 2 * tl.program_id(0)) * steps + tl.zeros_like(row)
        inside = inside & (begun >= 0)
        by_row = tl.load(row_gains + row_at, mask=inside[:, None], other=0).to(tl.int64)
        downward = tl.load(row_directions + row_at, mask=inside[:, None], other=0).to(tl.int64)
        sums = tl.load(along + row_at, mask=inside[:, None], other=0)
    lead = tl.load(leads + 2 * row, mask=inside, other=0)
    energy = tl.load(leads + 2 * row + 1, mask=inside, other=0)
    for step in range(steps):
        here, k, column, loaded = inside, step, step * _RANK + rank, rank >= 0
        if both:
            k = begun + step - lane
            here = inside & (k >= 0) & (k < n)
            column, loaded = k[:, None] * _RANK + rank, here[:, None]
        place = row * n + k
        moved, offset, near, plain = _taken(values, base, integers, place, here, unit, reciprocal, based)
        near = near & here
        gain = tl.load(gains + column, mask=loaded, other=0).to(tl.int64)
        of_row = _feedback(sums, gain, shift)
        feedback = of_row
        if both:
            column_sums = tl.load(down + column, mask=loaded, other=0)
            feedback = of_row + _feedback(column_sums, by_row, row_shift)
        y, q, error = _rounded(moved, offset, near, feedback, grade)
        direction = tl.load(directions + column, mask=loaded, other=0).to(tl.int64)
        sums += error[:, None] * direction
        if both:
            passed = tl.where(near, tl.minimum(tl.maximum(error + of_row, -_ERROR), _ERROR), 0)
            tl.store(down + column, column_sums + passed[:, None] * downward, mask=loaded)
            tl.debug_barrier()  # the next row reads the sums that this row has written
        if based:
            # The sums are over movements below the counting limit.
            movement = tl.where(near & (tl.abs(moved) < _COUNTED), moved, 0)
            lead += (_PARTS * y - movement) * movement
            energy += movement * movement
        tl.store(changes + place, tl.where(near, q.to(tl.float32), plain), mask=here)
    if both:
        tl.store(along + row_at, sums, mask=inside[:, None])
    tl.store(leads + 2 * row, lead, mask=inside)
    tl.store(leads + 2 * row + 1, energy, mask=inside)


def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grade: int,
    factors: Factors,
    by_row: Factors | None = None,
) -> tuple[Tensor, int, int]:
    """See `inshrink_core.ops.shaping.shape_changes`."""
    device, n = values.device, factors.gains.shape[0]
    n_rows = values.numel() // n
    changes = torch.empty_like(values)
    leads = torch.zeros(n_rows, 2, dtype=torch.int64, device=device)
    start = values if base is None else base.to(device)
    tensors = (values, start, integers.to(device), *_sides(factors, device))
    row_sides = tensors[3:5] if by_row is None else _sides(by_row, device)
    sizes = (0, 0) if by_row is None else (n_rows, n)
    sums = (torch.zeros(size, RANK, dtype=torch.int64, device=device) for size in sizes)
    numbers = (lattice.unit, lattice.reciprocal, n_rows, n, grade, factors.shift)
    everything = (*tensors, *row_sides, *sums, changes, leads, *numbers, by_row.shift if by_row else 0)
    n_programs, n_waves, steps = triton.cdiv(n_rows, _ROWS), 1, n
    if by_row is not None:
        # The last row of a program reaches a column one launch after its first row.
        n_waves, steps = 2 * (n_programs - 1) + triton.cdiv(n + _ROWS - 1, _STEPS), _STEPS
    flags = (base is not None, by_row is not None, _ROWS)
    for wave in range(n_waves):
        _shape[(n_programs,)](*everything, wave, steps, *flags, enable_fp_fusion=False)
    lead, square = leads.sum(0).tolist()
    return changes, lead, square


def _sides(factors: Factors, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return V and G on a device."""
    return torch.from_numpy(factors.gains).to(device), torch.from_numpy(factors.directions).to(device)
