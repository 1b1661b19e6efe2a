"""Shaped rounding: errors are fed forward, to where the loss is flat.

The cost of the errors e of a row is ``e S e'`` with ``S = G G' + damping``, n columns and rank `RANK`.
Completing squares from the last column on, it is a sum of ``d_k (e_k + V_k · s_k)²`` with
``s_k = sum of e_j G_j over the columns j before k`` (Babai's plane; LDLQ, GPTQ): so column k is rounded
as if it were less by ``V_k · s_k``. Errors are whole 1024ths of a spacing, V and G 16-bit integers and sums
64-bit ones, so no result depends on the order of summation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import Lattice, changes_from, float32
from inshrink_core.ops.registry import op

RANK = 16
"""As good as full factors in the study, at a cost that does not grow with the width."""

SKETCHED = 32
"""Columns of a sketch: twice the rank, so that its first directions are nearly those of the whole matrix."""

SKETCH_BITS = 11
"""Of what is sketched: decoded first moments have fewer."""

PARTS = 1024
"""Errors and movements are in these parts of a spacing."""

FAR = 1 << 14
"""Values so many spacings away are rounded alone: beyond it their parts would not be exact float32."""

MOST_FED = 1 << 12
"""Most that is fed forward, in parts: four spacings."""

MOST_ERROR = MOST_FED - 1

MOST_SUM = 1 << 20
"""Bound on the sum of the absolute entries of a column of G: a sum s stays below 2**32."""

MOST_ENTRY = (1 << 15) - 1

MOST_COUNTED = 1 << 13
"""Movements from here on, eight spacings, do not count for the threshold of matched gain."""


class Factors(NamedTuple):
    """What errors in the columns of a matrix cost each other.

    Parameters
    ----------
    gains : Int16[ndarray, "n 16"]
        V.
    directions : Int16[ndarray, "n 16"]
        G; the absolute values of a column of it sum up to at most `MOST_SUM`.
    shift
        ``V_k · s_k`` is in parts times 2**shift.
    share
        Cost of shaped rounding over that of plain rounding with the same spacing, as predicted.
    variance
        Mean variance of an error over that of plain rounding, at least 1.
    """

    gains: NDArray[np.int16]
    directions: NDArray[np.int16]
    shift: int
    share: float
    variance: float


class Shaped(NamedTuple):
    """Changes whose errors were fed forward.

    Parameters
    ----------
    changes : Float32[Tensor, "n"]
        In whole spacings; not finite where a value is not.
    lead, square
        By how much the projection of the rounded movement on the movement exceeds the movement's own,
        and the latter, both in parts squared, over movements below `MOST_COUNTED`; 0 without a base.
    """

    changes: Tensor
    lead: int
    square: int


@op
def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grade: int,
    factors: Factors,
    by_row: Factors | None = None,
) -> Shaped:
    """Choose the changes of a frame, each row's errors fed forward along its columns, and down the rows.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
    base : Float32[Tensor, "n"] or None
        The values that training continued from, for matched gain.
    integers : Int32[Tensor, "n"]
        N before the frame.
    lattice
        The lattice.
    grade
        Threshold of matched gain in 4096ths; 0: to the nearest point.
    factors
        Of the columns.
    by_row
        Of the rows, W and H; None: errors stay in their row.

    Notes
    -----
    With ``R = rint(1024 r)`` and ``O = rint(1024 o)`` as of `inshrink_core.ops.lattice.round_to_lattice`
    (without a base r is the whole change and o is 0), ``T = R - ((V_k · s + half) >> shift)`` is rounded:
    ``y = (T + 512) >> 10``, or in magnitude ``(4 abs(T) + 4096 - t) >> 12`` with a threshold t;
    ``q = (1024 y - O + 512) >> 10``, and the error ``1024 q + O - R`` is fed forward. Down the rows goes the
    error and what its row fed it, ``a``: T is less by ``W_i · c_k``, too, with ``c_k = sum of a_jk H_j over
    the rows j before i``. O(32 n), or twice that; a row needs of the row before only the columns that it
    has passed, so that rows follow each other at a distance of one.
    """
    device, n = values.device, factors.gains.shape[0]
    at, u = changes_from(values, integers.to(device), lattice)
    if base is None:
        r, o = u, torch.zeros_like(u)
    else:
        start, reciprocal = base.to(device), float32(lattice.reciprocal, values)
        r, o = (values - start) * reciprocal, (at - start) * reciprocal
    near = ((r.abs() < FAR) & (o.abs() < FAR)).view(-1, n)
    moved = torch.where(near, (r.view(-1, n) * PARTS).round(), 0).long()
    offset = torch.where(near, (o.view(-1, n) * PARTS).round(), 0).long()
    n_rows = near.shape[0]
    gains, directions = _factors_on(factors, device)
    row_gains, row_directions = _factors_on(factors if by_row is None else by_row, device)
    sums = torch.zeros(n_rows, RANK, dtype=torch.int64, device=device)
    down = torch.zeros(n, RANK, dtype=torch.int64, device=device)
    lead = square = torch.zeros((), dtype=torch.int64, device=device)
    changes = u.round().view(-1, n).clone()
    # All of a diagonal at once: rows follow each other at a distance of one column.
    for diagonal in range(n_rows + n - 1):
        i = torch.arange(max(0, diagonal - n + 1), min(n_rows, diagonal + 1), device=device)
        k = diagonal - i
        here, r_parts, o_parts = near[i, k], moved[i, k], offset[i, k]
        along = _fed(sums[i], gains[k], factors.shift)
        fed = along
        if by_row is not None:
            fed = along + _fed(down[k], row_gains[i], by_row.shift)
        wanted = r_parts - fed.clamp(-MOST_FED, MOST_FED)
        crossed = torch.where(wanted < 0, -o_parts, o_parts) > PARTS // 2
        threshold = torch.where(crossed, grade * 7 // 10, grade)
        size = (4 * wanted.abs() + 4 * PARTS - threshold) >> 12
        y = torch.where(wanted < 0, -size, size) if grade else (wanted + PARTS // 2) >> 10
        q = (PARTS * y - o_parts + PARTS // 2) >> 10
        error = (PARTS * q + o_parts - r_parts).clamp(-MOST_ERROR, MOST_ERROR)
        sums[i] += torch.where(here, error, 0)[:, None] * directions[k]
        if by_row is not None:
            passed = torch.where(here, (error + along).clamp(-MOST_ERROR, MOST_ERROR), 0)
            down[k] += passed[:, None] * row_directions[i]
        if base is not None:
            movement = torch.where(here & (r_parts.abs() < MOST_COUNTED), r_parts, 0)
            lead = lead + ((PARTS * y - movement) * movement).sum()
            square = square + (movement * movement).sum()
        changes[i, k] = torch.where(here, q.to(torch.float32), changes[i, k])
    return Shaped(changes.view(-1), int(lead), int(square))


class Sketches(NamedTuple):
    """What one matrix M adds to the sketches of its two sides.

    Parameters
    ----------
    columns : (n, 32)
        ``M' M @ signs``.
    rows : (rows, 32) or None
        ``M M' @ row_signs``.
    square
        The sum of the squares of M, the trace of both.
    """

    columns: NDArray[np.float64]
    rows: NDArray[np.float64] | None
    square: float


def _factors_on(factors: Factors, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return V and G as 64-bit integers on a device."""
    gains, directions = (torch.from_numpy(a).to(device).long() for a in (factors.gains, factors.directions))
    return gains, directions


def _fed(sums: Tensor, gains: Tensor, shift: int) -> Tensor:
    return ((sums * gains).sum(1) + (1 << shift >> 1)) >> shift


@op
def sketch_sides(
    values: Tensor, up: int, signs: NDArray[np.float64], row_signs: NDArray[np.float64] | None
) -> Sketches:
    """Return the sketches of a matrix whose elements are rounded to multiples of ``2**-up``.

    Parameters
    ----------
    values : Float32[Tensor, "rows n"]
        Finite; whole numbers of at most `SKETCH_BITS`, whose sums stay below 2**53, which makes them exact.
    up
        As said; results are in the matrix's own unit.
    signs, row_signs
        (n, 32) and (rows, 32), each 1, -1 or 0, at most 2**14 rows; without the second only columns.

    Notes
    -----
    O(64 rows n), twice that with rows.
    """
    scaled = values.double().mul_(2.0**up).round_()
    down = 2.0 ** (-2 * up)
    columns = (scaled.T @ (scaled @ torch.from_numpy(signs).to(scaled.device))).cpu().numpy() * down
    rows = None
    if row_signs is not None:
        rows = (scaled @ (scaled.T @ torch.from_numpy(row_signs).to(scaled.device))).cpu().numpy() * down
    return Sketches(columns, rows, float(scaled.square().sum()) * down)
