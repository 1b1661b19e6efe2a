"""The norm of shaped rounding; `inshrink_core.ops.shaping` documents the functions.

Those on arrays are compiled by numba, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import Lattice
from inshrink_core.ops.reference.lattice import changes_from, float32
from inshrink_core.ops.shaping import (
    FAR,
    MOST_COUNTED,
    MOST_ENTRY,
    MOST_ERROR,
    MOST_FED,
    MOST_SUM,
    PARTS,
    RANK,
    Factors,
    Shaped,
)

_SWEEPS = 12
"""Of Jacobi's rotations: 32 columns need six to eight for float64."""

_TURNED = 1e-26
"""Squared cosine of two columns that need no rotation any more."""

_RIDGE = 1e-12
"""Added to the sketch's own diagonal, over its trace: a matrix of a lower rank has a Cholesky factor too."""


def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grades: Tensor,
    factors: Factors,
    by_row: Factors | None,
) -> Shaped:
    """See `shaping.shape_changes`."""
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
    gains, directions = _whole(factors, device)
    row_gains, row_directions = _whole(factors if by_row is None else by_row, device)
    grade = grades.to(device).long().expand(n_rows)
    sums = torch.zeros(n_rows, RANK, dtype=torch.int64, device=device)
    down = torch.zeros(n, RANK, dtype=torch.int64, device=device)
    leads = torch.zeros(n_rows, 2, dtype=torch.int64, device=device)
    changes = u.round().view(-1, n).clone()
    # All of a diagonal at once: rows follow each other at a distance of one column.
    for diagonal in range(n_rows + n - 1):
        i = torch.arange(max(0, diagonal - n + 1), min(n_rows, diagonal + 1), device=device)
        k = diagonal - i
        here, r_parts, o_parts, t = near[i, k], moved[i, k], offset[i, k], grade[i]
        along = _fed(sums[i], gains[k], factors.shift)
        fed = along
        if by_row is not None:
            fed = along + _fed(down[k], row_gains[i], by_row.shift)
        wanted = r_parts - fed.clamp(-MOST_FED, MOST_FED)
        crossed = torch.where(wanted < 0, -o_parts, o_parts) > PARTS // 2
        threshold = torch.where(crossed, t * 7 // 10, t)
        size = (4 * wanted.abs() + 4 * PARTS - threshold) >> 12
        matched = torch.where(wanted < 0, -size, size)
        y = torch.where(t == 0, (wanted + PARTS // 2) >> 10, matched)
        q = (PARTS * y - o_parts + PARTS // 2) >> 10
        error = (PARTS * q + o_parts - r_parts).clamp(-MOST_ERROR, MOST_ERROR)
        sums[i] += torch.where(here, error, 0)[:, None] * directions[k]
        if by_row is not None:
            passed = torch.where(here, (error + along).clamp(-MOST_ERROR, MOST_ERROR), 0)
            down[k] += passed[:, None] * row_directions[i]
        if base is not None:
            movement = torch.where(here & (r_parts.abs() < MOST_COUNTED), r_parts, 0)
            leads[i, 0] += (PARTS * y - movement) * movement
            leads[i, 1] += movement * movement
        changes[i, k] = torch.where(here, q.to(torch.float32), changes[i, k])
    return Shaped(changes.view(-1), leads.to(integers.device))


def _whole(factors: Factors, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return V and G as 64-bit integers on a device."""
    gains, directions = (torch.from_numpy(a).to(device).long() for a in (factors.gains, factors.directions))
    return gains, directions


def _fed(sums: Tensor, gains: Tensor, shift: int) -> Tensor:
    return ((sums * gains).sum(1) + (1 << shift >> 1)) >> shift


def decompose(
    sketch: NDArray[np.float64],
    signs: NDArray[np.float64],
    floor: float,
    core: NDArray[np.float64],
    turned: NDArray[np.float64],
    columns: NDArray[np.float64],
    found: NDArray[np.float64],
) -> float:
    """Fill in G, each column's square less by a floor; return the sum of its squares.

    `core` and `turned` are (p, p), `columns` is (n, p), `found` is (n, rank).
    """
    n, p = sketch.shape
    for i in range(p):
        for j in range(p):
            core[i, j] = 0.0
    for k in range(n):
        for i in range(p):
            for j in range(i + 1):
                core[i, j] += signs[k, i] * sketch[k, j]
    ridge = 0.0
    for i in range(p):
        ridge += core[i, i]
    ridge *= _RIDGE
    for i in range(p):
        for j in range(i + 1):
            total = core[i, j]
            for l in range(j):  # noqa: E741 - the usual third index of a matrix product
                total -= core[i, l] * core[j, l]
            if i > j:
                core[i, j] = total / core[j, j] if core[j, j] > 0.0 else 0.0
            else:
                core[i, i] = math.sqrt(total + ridge) if total > -ridge else 0.0
    for k in range(n):
        for i in range(p):
            total = sketch[k, i]
            for l in range(i):  # noqa: E741
                total -= core[i, l] * columns[k, l]
            columns[k, i] = total / core[i, i] if core[i, i] > 0.0 else 0.0
    for i in range(p):
        for j in range(p):
            core[i, j] = 0.0
            turned[i, j] = 1.0 if i == j else 0.0
    for k in range(n):
        for i in range(p):
            for j in range(p):
                core[i, j] += columns[k, i] * columns[k, j]
    for _ in range(_SWEEPS):
        for i in range(p - 1):
            for j in range(i + 1, p):
                if core[i, j] * core[i, j] <= _TURNED * core[i, i] * core[j, j]:
                    continue
                ratio = (core[j, j] - core[i, i]) / (2.0 * core[i, j])
                tangent = 1.0 / (abs(ratio) + math.sqrt(ratio * ratio + 1.0))
                if ratio < 0.0:
                    tangent = -tangent
                cosine = 1.0 / math.sqrt(tangent * tangent + 1.0)
                sine = tangent * cosine
                for l in range(p):  # noqa: E741
                    a, b = core[l, i], core[l, j]
                    core[l, i], core[l, j] = cosine * a - sine * b, sine * a + cosine * b
                for l in range(p):  # noqa: E741
                    a, b = core[i, l], core[j, l]
                    core[i, l], core[j, l] = cosine * a - sine * b, sine * a + cosine * b
                for l in range(p):  # noqa: E741
                    a, b = turned[l, i], turned[l, j]
                    turned[l, i], turned[l, j] = cosine * a - sine * b, sine * a + cosine * b
    energy = 0.0
    for r in range(found.shape[1]):
        best = -1
        for i in range(p):
            if core[i, i] > 0.0 and (best < 0 or core[i, i] > core[best, best]):
                best = i
        for k in range(n):
            total = 0.0
            if best >= 0:
                for i in range(p):
                    total += columns[k, i] * turned[i, best]
            found[k, r] = total
            energy += total * total
        if best >= 0:
            core[best, best] = 0.0
        if floor > 0.0:
            square = 0.0
            for k in range(n):
                square += found[k, r] * found[k, r]
            shrink = math.sqrt(1.0 - floor / square) if square > floor else 0.0
            for k in range(n):
                found[k, r] *= shrink
            energy -= min(square, floor)
    return energy


def feed_forward(
    found: NDArray[np.float64],
    damping: float,
    rest: float,
    square: NDArray[np.float64],
    line: NDArray[np.float64],
    gains: NDArray[np.float64],
) -> tuple[float, float]:
    """Fill in V from G; return the cost of shaped rounding, and the sum of its errors' variances.

    A rounding error's variance is 1.
    `damping` is what the diagonal has more, `rest` what of it is no damping but cost; `square` is
    (rank, rank) and `line` (2, rank).
    """
    n, rank = found.shape
    for i in range(rank):
        for j in range(rank):
            square[i, j] = 1.0 if i == j else 0.0
    for k in range(n - 1, -1, -1):
        total = damping
        for i in range(rank):
            line[0, i] = 0.0
            for j in range(rank):
                line[0, i] += square[i, j] * found[k, j]
            total += line[0, i] * found[k, i]
        for i in range(rank):
            gains[k, i] = line[0, i] / total if total > 0.0 else 0.0
            for j in range(rank):
                square[i, j] -= gains[k, i] * line[0, j]
    # The covariance of s, and with it the variance of each error.
    for i in range(rank):
        for j in range(rank):
            square[i, j] = 0.0
    cost, variances = 0.0, 0.0
    for k in range(n):
        variance = 1.0
        for i in range(rank):
            line[0, i] = 0.0
            for j in range(rank):
                line[0, i] += square[i, j] * gains[k, j]
            variance += line[0, i] * gains[k, i]
        for i in range(rank):
            line[1, i] = found[k, i]
        for i in range(rank):
            for j in range(rank):
                square[i, j] += (
                    variance * line[1, i] * line[1, j] - line[1, i] * line[0, j] - line[0, i] * line[1, j]
                )
        variances += variance
        cost += rest * variance
    for i in range(rank):
        cost += square[i, i]
    return cost, variances


def factorize(
    sketch: NDArray[np.float64],
    signs: NDArray[np.float64],
    trace: float,
    dampings: Sequence[float],
    noise: float = 0.0,
) -> tuple[Factors, ...]:
    """See `shaping.factorize`."""
    return factors_by(decompose, feed_forward, sketch, signs, trace, dampings, noise)


def factors_by(
    decomposing: Callable[..., float],
    feeding: Callable[..., tuple[float, float]],
    sketch: NDArray[np.float64],
    signs: NDArray[np.float64],
    trace: float,
    dampings: Sequence[float],
    noise: float,
) -> tuple[Factors, ...]:
    """Return the factors, the two loops as they are or compiled."""
    (n, p), rank = sketch.shape, RANK
    found, gains = np.zeros((n, rank)), np.zeros((n, rank))
    core, turned, columns = np.empty((p, p)), np.empty((p, p)), np.empty((n, p))
    energy = decomposing(sketch, signs, noise / n, core, turned, columns, found)
    trace -= noise
    rest = max(0.0, trace - energy) / n
    # Whole numbers: each column of G as large as its bound allows, V as large as all of it fits.
    sums, largest = np.abs(found).sum(0), np.abs(found).max(0, initial=0.0)
    up = np.zeros(rank, np.int64)
    for r in range(rank):
        most = max(float(sums[r]) / (MOST_SUM - n), float(largest[r]) / MOST_ENTRY)
        up[r] = -math.frexp(most)[1] if most > 0 else 0
    directions, factors = np.rint(np.ldexp(found, up)).astype(np.int16), []
    for damping in dampings:
        total = damping * trace / n + rest
        cost, variances = feeding(found, total, rest, np.empty((rank, rank)), np.empty((2, rank)), gains)
        size = np.abs(np.ldexp(gains, -up)).max(initial=0.0)
        shift = min(max(math.frexp(MOST_ENTRY / size)[1] - 1, 1), 60) if size > 0 else 1
        whole = np.rint(np.ldexp(gains, shift - up)).astype(np.int16)
        share = cost / trace if trace > 0 else 1.0
        factors.append(Factors(whole, directions, shift, share, variances / n))
    return tuple(factors)
