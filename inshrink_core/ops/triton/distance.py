"""How far decoded values are from the original ones, in Triton: a program adds up the squares of a slice.

`inshrink_core.ops.distance` documents the functions. Importing this module needs Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inshrink_core.ops.distance import N_SUMS, SLICE, Distance, added_up

_SLICE = tl.constexpr(SLICE)
_SUMS = tl.constexpr(N_SUMS)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)

_AHEAD = 16
"""Turns whose loads do not wait for each other's sums."""


@triton.jit
def _square(x: tl.tensor) -> tl.tensor:
    finite = tl.where(tl.abs(x) <= _LARGEST, x, 0.0).to(tl.float64)  # false for NaN
    return finite * finite


@triton.jit
def _squares(
    values: tl.tensor,
    others: tl.tensor,
    unit: tl.tensor,
    sums: tl.tensor,
    n: tl.tensor,
    on_lattice: tl.constexpr,
    ahead: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, _SUMS)
    errors = tl.zeros((_SUMS,), tl.float64)
    norms = tl.zeros((_SUMS,), tl.float64)
    begin = program * _SLICE
    for first in range(begin, tl.minimum(begin + _SLICE, n), ahead * _SUMS):
        for turn in tl.static_range(ahead):
            place = first + turn * _SUMS + lane
            here = place < n
            value = tl.load(values + place, mask=here, other=0.0)
            if on_lattice:
                other = tl.load(others + place, mask=here, other=0).to(tl.float32) * unit
            else:
                other = tl.load(others + place, mask=here, other=0.0)
            errors += _square(value - other)
            norms += _square(value)
    tl.store(sums + 2 * program * _SUMS + lane, errors)
    tl.store(sums + (2 * program + 1) * _SUMS + lane, norms)


def _distance(values: Tensor, others: Tensor, unit: float, on_lattice: bool) -> Distance:
    n_slices = triton.cdiv(values.numel(), SLICE)
    sums = torch.empty(n_slices, 2, N_SUMS, dtype=torch.float64, device=values.device)
    if n_slices:
        numbers = (values.numel(), on_lattice, _AHEAD)
        _squares[(n_slices,)](values, others, unit, sums, *numbers, enable_fp_fusion=False, num_warps=1)
    return added_up(sums.tolist())


def squared_distance(values: Tensor, decoded: Tensor) -> Distance:
    """See `inshrink_core.ops.distance.squared_distance`."""
    return _distance(values, decoded, 1.0, False)


def distance_to_lattice(values: Tensor, integers: Tensor, unit: float) -> Distance:
    """See `inshrink_core.ops.distance.distance_to_lattice`."""
    return _distance(values, integers, unit, True)
