"""Shaped rounding: errors are fed forward, to where the loss is flat.

The cost of the errors e of a row is ``e S e'`` with ``S = G G' + damping``, n columns and rank `RANK`.
Completing squares from the last column on, it is a sum of ``d_k (e_k + V_k · s_k)²`` with
``s_k = sum of e_j G_j over the columns j before k`` (Babai's plane; LDLQ, GPTQ): so column k is rounded
as if it were less by ``V_k · s_k``. Errors are whole 1024ths of a spacing, V and G 16-bit integers and sums
64-bit ones, so no result depends on the order of summation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


_SWEEPS = 12
"""Of Jacobi's rotations, at most: 32 columns need four or five."""


_TURNED = 1e-4
"""Squared cosine of two columns that need no rotation any more: so much at most of a direction's square is
lost, where one is taken and the other is not."""


_RIDGE = 1e-12
"""Added to the sketch's own diagonal, over its trace: a matrix of a lower rank has a Cholesky factor too."""


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
    gains, directions = _whole(factors, device)
    row_gains, row_directions = _whole(factors if by_row is None else by_row, device)
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


def _whole(factors: Factors, device: torch.device) -> tuple[Tensor, Tensor]:
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
    whole = values.double().mul_(2.0**up).round_()
    down = 2.0 ** (-2 * up)
    columns = (whole.T @ (whole @ torch.from_numpy(signs).to(whole.device))).cpu().numpy() * down
    rows = None
    if row_signs is not None:
        rows = (whole @ (whole.T @ torch.from_numpy(row_signs).to(whole.device))).cpu().numpy() * down
    return Sketches(columns, rows, float(whole.square().sum()) * down)


def add_outer(
    out: NDArray[np.float64],
    one: NDArray[np.float64],
    at: int,
    other: NDArray[np.float64],
    other_at: int,
) -> None:
    """Add the product of a row of one matrix, and a row of another, to a matrix of theirs."""
    for i in range(out.shape[0]):
        factor = one[at, i]
        for j in range(out.shape[1]):
            out[i, j] += factor * other[other_at, j]


def weigh(
    out: NDArray[np.float64],
    at: int,
    rows: NDArray[np.float64],
    weights: NDArray[np.float64],
    weights_at: int,
) -> None:
    """Write to a row of a matrix the sum of the rows of another, by the weights in a row of a third."""
    for j in range(out.shape[1]):
        out[at, j] = 0.0
    for i in range(rows.shape[0]):
        weight = weights[weights_at, i]
        for j in range(out.shape[1]):
            out[at, j] += weight * rows[i, j]


def decompose(
    sketch: NDArray[np.float64],
    signs: NDArray[np.float64],
    core: NDArray[np.float64],
    turned: NDArray[np.float64],
    columns: NDArray[np.float64],
    basis: NDArray[np.float64],
    found: NDArray[np.float64],
    units: NDArray[np.float64],
    directions: NDArray[np.int16],
) -> float:
    """Fill in G; return the sum of its squares.

    `core` and `turned` are (p, p), `columns` is (n, p), `basis` (p, rank), `found` (n, rank).
    `directions` is G in `units` of the ranks, each column as large as its bound allows.
    """
    (n, p), rank = sketch.shape, found.shape[1]
    for i in range(p):
        for j in range(p):
            core[i, j] = 0.0
    for k in range(n):
        add_outer(core, signs, k, sketch, k)
    ridge = 0.0
    for i in range(p):
        ridge += core[i, i]
    ridge *= _RIDGE
    # Cholesky, by rows of the factor's transpose, from what is below the diagonal; then its inverse.
    for i in range(p):
        for j in range(i, p):
            turned[i, j] = core[j, i]
        for l in range(i):  # noqa: E741 - the usual third index of a matrix product
            factor = turned[l, i]
            for j in range(i, p):
                turned[i, j] -= factor * turned[l, j]
        pivot = turned[i, i]
        turned[i, i] = 1.0 / math.sqrt(pivot + ridge) if pivot > -ridge else 0.0
        for j in range(i + 1, p):
            turned[i, j] *= turned[i, i]
    for i in range(p):
        for j in range(p):
            core[i, j] = turned[i, i] if i == j else 0.0
        for l in range(i, p):  # noqa: E741
            if l > i:
                core[i, l] *= -turned[l, l]
            for j in range(l + 1, p):
                core[i, j] += core[i, l] * turned[l, j]
    for k in range(n):
        weigh(columns, k, core, sketch, k)
    for i in range(p):
        for j in range(p):
            core[i, j] = 0.0
    for k in range(n):
        add_outer(core, columns, k, columns, k)
    for i in range(p):
        for j in range(p):
            turned[i, j] = 1.0 if i == j else 0.0
    for _ in range(_SWEEPS):
        n_turned = 0
        for i in range(p - 1):
            for j in range(i + 1, p):
                both, one, other = core[i, j], core[i, i], core[j, j]
                if both * both <= _TURNED * one * other:
                    continue
                n_turned += 1
                ratio = (other - one) / (2.0 * both)
                tangent = 1.0 / (abs(ratio) + math.sqrt(ratio * ratio + 1.0))
                if ratio < 0.0:
                    tangent = -tangent
                cosine = 1.0 / math.sqrt(tangent * tangent + 1.0)
                sine = tangent * cosine
                for l in range(p):  # noqa: E741
                    a, b = core[i, l], core[j, l]
                    core[i, l], core[j, l] = cosine * a - sine * b, sine * a + cosine * b
                    a, b = turned[i, l], turned[j, l]
                    turned[i, l], turned[j, l] = cosine * a - sine * b, sine * a + cosine * b
                for l in range(p):  # noqa: E741
                    core[l, i], core[l, j] = core[i, l], core[j, l]
                core[i, i], core[j, j] = one - tangent * both, other + tangent * both
                core[i, j], core[j, i] = 0.0, 0.0
        if n_turned == 0:
            break
    for r in range(rank):
        best = -1
        for i in range(p):
            if core[i, i] > 0.0 and (best < 0 or core[i, i] > core[best, best]):
                best = i
        for i in range(p):
            basis[i, r] = turned[best, i] if best >= 0 else 0.0
        if best >= 0:
            core[best, best] = 0.0
    energy = 0.0
    for k in range(n):
        weigh(found, k, basis, columns, k)
    for r in range(rank):
        square = 0.0
        for k in range(n):
            square += found[k, r] * found[k, r]
        energy += square
        total, largest = 0.0, 0.0
        for k in range(n):
            total += abs(found[k, r])
            largest = max(largest, abs(found[k, r]))
        most = max(total / (MOST_SUM - n), largest / MOST_ENTRY)
        units[r] = math.ldexp(1.0, math.frexp(most)[1]) if most > 0.0 else 1.0
        for k in range(n):
            directions[k, r] = np.rint(found[k, r] / units[r])
    return energy


def feed_forward(
    found: NDArray[np.float64],
    units: NDArray[np.float64],
    damping: float,
    rest: float,
    square: NDArray[np.float64],
    line: NDArray[np.float64],
    gains: NDArray[np.float64],
    whole: NDArray[np.int16],
) -> tuple[float, float, int]:
    """Fill in V from G; return the cost of shaped rounding, the sum of its errors' variances, and the shift.

    A rounding error's variance is 1.
    `damping` is what the diagonal has more, `rest` what of it is no damping but cost; `square` is
    (rank, rank), P, and `line` (2, rank), P G and its negative over d.
    What rounding errors cost with damping is the sum of d; the inverse of ``e_k + V_k · s_k`` has
    entries ``-d_k / damping V_k · G_i``, so the variances are the sum of ``(d_k - |P G_k|²) / damping``.
    `whole` is V in `units` of the ranks, as large as all of it fits.
    """
    n, rank = found.shape
    for i in range(rank):
        for j in range(rank):
            square[i, j] = 1.0 if i == j else 0.0
    cost, variances, largest = 0.0, 0.0, 0.0
    for k in range(n - 1, -1, -1):
        weigh(line, 0, square, found, k)
        total, length = damping, 0.0
        for i in range(rank):
            total += line[0, i] * found[k, i]
            length += line[0, i] * line[0, i]
        cost += total
        variances += (total - length) / damping if damping > 0.0 else 1.0
        for i in range(rank):
            value = line[0, i] / total if total > 0.0 else 0.0
            line[1, i] = -value
            gains[k, i] = value * units[i]
            largest = max(largest, abs(gains[k, i]))
        add_outer(square, line, 1, line, 0)
    shift = min(max(math.frexp(MOST_ENTRY / largest)[1] - 1, 1), 60) if largest > 0.0 else 1
    up = 2.0**shift
    for k in range(n):
        for i in range(rank):
            whole[k, i] = np.rint(gains[k, i] * up)
    return cost - (damping - rest) * variances, variances, shift


@op
def factorize(
    sketch: NDArray[np.float64],
    signs: NDArray[np.float64],
    trace: float,
    dampings: Sequence[float],
    decomposing: Callable[..., float] = decompose,
    feeding: Callable[..., tuple[float, float, int]] = feed_forward,
) -> tuple[Factors, ...]:
    """Return the factors of a matrix H from its sketch, for each of several dampings.

    Parameters
    ----------
    sketch : (n, 32)
        ``H @ signs``.
    signs : (n, 32)
        What H was multiplied with.
    trace
        Of H.
    dampings
        What is added to the diagonal, in means of that of H.
    decomposing, feeding
        `decompose` and `feed_forward`, as they are or compiled.

    Notes
    -----
    ``H ≈ Y (signs' Y)^-1 Y'`` (Nyström), of which the `RANK` largest directions are taken and the rest is
    spread over the diagonal. Single float64 operations in a stated order: Cholesky, Jacobi's rotations in
    rows, no library. O(32² n).
    """
    (n, p), rank = sketch.shape, RANK
    found, gains = np.empty((n, rank)), np.empty((n, rank))
    room = np.empty((p, p)), np.empty((p, p)), np.empty((n, p)), np.empty((p, rank))
    units, directions = np.empty(rank), np.empty((n, rank), np.int16)
    energy = decomposing(sketch, signs, *room, found, units, directions)
    rest = max(0.0, trace - energy) / n
    square, line, factors = np.empty((rank, rank)), np.empty((2, rank)), []
    for damping in dampings:
        total, whole = damping * trace / n + rest, np.empty((n, rank), np.int16)
        cost, variances, shift = feeding(found, units, total, rest, square, line, gains, whole)
        share = cost / trace if trace > 0 else 1.0
        factors.append(Factors(whole, directions, shift, share, variances / n))
    return tuple(factors)
