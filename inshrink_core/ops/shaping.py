"""Error feedback: rounding errors are fed forward to directions in which the loss is flat.

The errors e of a row cost ``e S e'`` with ``S = G G' + damping``, for n columns and rank `RANK`. Completing
squares from the last column on, the cost is ``sum_k d_k (e_k + V_k · s_k)²`` with ``s_k = sum_{j < k} e_j
G_j`` (Babai's nearest plane; LDLQ, GPTQ). So column k is rounded as if its value were ``V_k · s_k`` less.
Errors are integers in units of 1/1024 step, V and G are 16-bit integers, and sums are 64-bit integers. So no
result depends on the order of summation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import Lattice, changes_from, from_base
from inshrink_core.ops.registry import op

RANK = 16
"""Rank of the factors. In the study it is as good as full rank, at a cost that does not grow with the
width."""

SKETCHED = 32
"""Columns of a sketch: twice the rank, so that its leading directions are close to those of the matrix."""

SKETCH_BITS = 11
"""Bits of the sketched values; decoded first moments have fewer."""

PARTS = 1024
"""Number of parts of a step; errors and movements are integers in these parts."""

FAR = 1 << 14
"""Distance in steps beyond which a value gets no feedback: its parts would not be exact in float32."""

MAX_FEEDBACK = 1 << 12
"""Maximum feedback in parts: four steps."""

MAX_ERROR = MAX_FEEDBACK - 1

MAX_SUM = 1 << 20
"""Bound on the sum of the absolute entries of a column of G; it limits a sum s to less than 2**32."""

MAX_ENTRY = (1 << 15) - 1

MAX_COUNTED = 1 << 13
"""Movement in parts, eight steps, from which on values do not count for the threshold of matched gain."""


class Factors(NamedTuple):
    """Error-feedback factors of the columns of a matrix: the mutual cost of their errors.

    Parameters
    ----------
    gains : Int16[ndarray, "n 16"]
        V.
    directions : Int16[ndarray, "n 16"]
        G; the absolute values of a column sum to at most `MAX_SUM`.
    shift
        ``V_k · s_k`` is in parts times 2**shift.
    share
        Predicted cost of rounding with error feedback relative to plain rounding at the same step size.
    variance
        Mean variance of an error relative to plain rounding, at least 1.
    """

    gains: NDArray[np.int16]
    directions: NDArray[np.int16]
    shift: int
    share: float
    variance: float


@op
def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grade: int,
    factors: Factors,
    by_row: Factors | None = None,
) -> tuple[Tensor, int, int]:
    """Choose the changes of a frame; feed each row's errors forward along its columns, and down the rows.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
    base : Float32[Tensor, "n"] or None
        Values that training continued from, for matched gain.
    integers : Int32[Tensor, "n"]
        N before the frame.
    lattice
        Lattice of the tensor.
    grade
        Threshold of matched gain in units of 1/4096; 0 rounds to the nearest point.
    factors
        Factors of the columns, V and G.
    by_row
        Factors of the rows, W and H. With None, errors stay in their row.

    Returns
    -------
    changes : Float32[Tensor, "n"]
        In steps, integer-valued; not finite where a value is not.
    lead, square : int
        ``sum(y r) - sum(r r)`` and ``sum(r r)`` for movements r below `MAX_COUNTED` and rounded movements y,
        in parts squared; 0 without a base.

    Notes
    -----
    Let ``R = rint(1024 r)`` and ``O = rint(1024 o)`` with r and o in steps as in
    `inshrink_core.ops.lattice.matched_changes`; without a base r is the full change and o is 0. The value
    ``T = R - ((V_k · s + half) >> shift)`` is rounded to ``y = (T + 512) >> 10``, or in magnitude to
    ``(4 abs(T) + 4096 - t) >> 12`` with a threshold t. The change is ``q = (1024 y - O + 512) >> 10``, and
    the error ``1024 q + O - R`` is fed forward. The error plus the row's own feedback, ``a``, is fed down the
    rows: T is also reduced by ``W_i · c_k`` with ``c_k = sum_{j < i} a_jk H_j``. O(32 n), or twice that with
    `by_row`. A row needs only those columns of the previous row that are already rounded, so rows run one
    column apart.
    """
    device, n = values.device, factors.gains.shape[0]
    u = changes_from(values, integers.to(device), lattice)
    r, o = (u, torch.zeros_like(u)) if base is None else from_base(values, integers, lattice, base)
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
    # All elements of a diagonal at once: each row runs one column behind the row above.
    for diagonal in range(n_rows + n - 1):
        i = torch.arange(max(0, diagonal - n + 1), min(n_rows, diagonal + 1), device=device)
        k = diagonal - i
        here, r_parts, o_parts = near[i, k], moved[i, k], offset[i, k]
        along = _feedback(sums[i], gains[k], factors.shift)
        feedback = along
        if by_row is not None:
            feedback = along + _feedback(down[k], row_gains[i], by_row.shift)
        wanted = r_parts - feedback.clamp(-MAX_FEEDBACK, MAX_FEEDBACK)
        crossed = torch.where(wanted < 0, -o_parts, o_parts) > PARTS // 2
        threshold = torch.where(crossed, grade * 7 // 10, grade)
        size = (4 * wanted.abs() + 4 * PARTS - threshold) >> 12
        y = torch.where(wanted < 0, -size, size) if grade else (wanted + PARTS // 2) >> 10
        q = (PARTS * y - o_parts + PARTS // 2) >> 10
        error = (PARTS * q + o_parts - r_parts).clamp(-MAX_ERROR, MAX_ERROR)
        sums[i] += torch.where(here, error, 0)[:, None] * directions[k]
        if by_row is not None:
            passed = torch.where(here, (error + along).clamp(-MAX_ERROR, MAX_ERROR), 0)
            down[k] += passed[:, None] * row_directions[i]
        if base is not None:
            movement = torch.where(here & (r_parts.abs() < MAX_COUNTED), r_parts, 0)
            lead = lead + ((PARTS * y - movement) * movement).sum()
            square = square + (movement * movement).sum()
        changes[i, k] = torch.where(here, q.to(torch.float32), changes[i, k])
    return changes.view(-1), int(lead), int(square)


def _factors_on(factors: Factors, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return V and G as 64-bit integers on a device."""
    gains, directions = (torch.from_numpy(a).to(device).long() for a in (factors.gains, factors.directions))
    return gains, directions


def _feedback(sums: Tensor, gains: Tensor, shift: int) -> Tensor:
    return ((sums * gains).sum(1) + (1 << shift >> 1)) >> shift


@op
def sketch_sides(
    values: Tensor, up: int, signs: NDArray[np.float64], row_signs: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None, float]:
    """Sketch the two sides of a matrix M whose elements are rounded to multiples of ``2**-up``.

    Parameters
    ----------
    values : Float32[Tensor, "rows n"]
        Finite. Rounded elements have at most `SKETCH_BITS` bits, so that sums stay below 2**53 and exact.
    up
        Elements are rounded to multiples of ``2**-up``; the results are in the matrix's original unit.
    signs, row_signs
        (n, 32) and (rows, 32), each 1, -1 or 0, at most 2**14 rows. Without `row_signs` only columns are
        sketched.

    Returns
    -------
    columns : (n, 32)
        ``M' M @ signs``.
    rows : (rows, 32) or None
        ``M M' @ row_signs``.
    square : float
        Sum of the squares of M, the trace of both ``M' M`` and ``M M'``.

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
    return columns, rows, float(scaled.square().sum()) * down
