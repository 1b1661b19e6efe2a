"""Factors of error feedback from the sketch of a matrix: a low rank part and a diagonal.

For a symmetric H (n, n), random signs S (n, p) and the sketch Y = H S, ``H ≈ Y (S' Y)⁻¹ Y'`` (Nyström; Tropp,
Yurtsever, Udell & Cevher, "Fixed-rank approximation of a positive-semidefinite matrix from streaming data",
2017). With ``S' Y = L L'``, ``B = Y L⁻ᵀ`` and the eigenvectors Q of the `RANK` largest eigenvalues of ``B'
B``, ``G = B Q``; the rest of the trace is spread over the diagonal. Single float64 operations in a stated
order and no library, so each processor finds the same bits: Cholesky, Jacobi's rotations in rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from inshrink_core.ops.cpu.compiled import Float64s, Int16s, kernel, part
from inshrink_core.ops.shaping import MOST_ENTRY, MOST_SUM, RANK, Factors

_SWEEPS = 12
"""Sweeps of Jacobi's rotations, at most: 32 columns need four or five."""

_TURNED = 1e-4
"""Squared cosine of two columns that need no rotation any more: at most this share of a direction's square is
lost, where one is taken and the other is not."""

_RIDGE = 1e-12
"""Added to the diagonal of S' Y, over its trace: a matrix of a lower rank has a Cholesky factor too."""


@part
def add_outer(out: Float64s, left: Float64s, at: int, right: Float64s, right_at: int) -> None:
    """Add the outer product of a row of one matrix and a row of another."""
    for i in range(out.shape[0]):
        factor = left[at, i]
        for j in range(out.shape[1]):
            out[i, j] += factor * right[right_at, j]


@part
def weigh(out: Float64s, at: int, rows: Float64s, weights: Float64s, weights_at: int) -> None:
    """Write to a row of a matrix the sum of the rows of another, by the weights in a row of a third."""
    for j in range(out.shape[1]):
        out[at, j] = 0.0
    for i in range(rows.shape[0]):
        weight = weights[weights_at, i]
        for j in range(out.shape[1]):
            out[at, j] += weight * rows[i, j]


@part
def reset(square: Float64s, diagonal: float) -> None:
    """Make a matrix a multiple of the identity."""
    for i in range(square.shape[0]):
        for j in range(square.shape[1]):
            square[i, j] = diagonal if i == j else 0.0


@kernel
def decompose(
    sketch: Float64s,
    signs: Float64s,
    core: Float64s,
    turned: Float64s,
    columns: Float64s,
    basis: Float64s,
    found: Float64s,
    units: Float64s,
    directions: Int16s,
) -> float:
    """Fill in G; return the sum of its squares.

    `core` (p, p) is S' Y, then L⁻ᵀ, then B' B; `turned` (p, p) is L', then the rotations; `columns` (n, p)
    is B, `basis` (p, rank) is Q, `found` (n, rank) is G. `directions` is G in `units` of the ranks, each
    column as large as its bound allows.
    """
    (n, p), rank = sketch.shape, found.shape[1]
    reset(core, 0.0)
    for k in range(n):
        add_outer(core, signs, k, sketch, k)
    ridge = 0.0
    for i in range(p):
        ridge += core[i, i]
    ridge *= _RIDGE
    # Cholesky, by rows of the factor's transpose, from the entries below the diagonal; then its inverse.
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
    reset(core, 0.0)
    for k in range(n):
        add_outer(core, columns, k, columns, k)
    reset(turned, 1.0)
    for _ in range(_SWEEPS):
        n_turned = 0
        for i in range(p - 1):
            for j in range(i + 1, p):
                both, first, second = core[i, j], core[i, i], core[j, j]
                if both * both <= _TURNED * first * second:
                    continue
                n_turned += 1
                ratio = (second - first) / (2.0 * both)
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
                core[i, i], core[j, j] = first - tangent * both, second + tangent * both
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
        square, total, largest = 0.0, 0.0, 0.0
        for k in range(n):
            square += found[k, r] * found[k, r]
            total += abs(found[k, r])
            largest = max(largest, abs(found[k, r]))
        energy += square
        most = max(total / (MOST_SUM - n), largest / MOST_ENTRY)
        units[r] = math.ldexp(1.0, math.frexp(most)[1]) if most > 0.0 else 1.0
        for k in range(n):
            directions[k, r] = np.rint(found[k, r] / units[r])
    return energy


@kernel
def feed_forward(
    found: Float64s,
    units: Float64s,
    damping: float,
    rest: float,
    square: Float64s,
    line: Float64s,
    gains: Float64s,
    stored: Int16s,
) -> tuple[float, float, int]:
    """Fill in V from G; return the cost of shaped rounding, the sum of its errors' variances, and the shift.

    A rounding error's variance is 1. From the last column k to the first, with P = I at first and d =
    `damping`: ``d_k = d + G_k P G_k'``, ``V_k = P G_k' / d_k``, then P is less by ``d_k V_k V_k'``. With
    damping rounding errors cost ``sum of d_k``; the inverse of ``e_k + V_k · s_k`` has entries ``-d_k / d
    V_k · G_i``, so variances are ``sum of (d_k - |P G_k|²) / d``. The `rest` of the damping is cost.
    `square` (rank, rank) is P, `line` (2, rank) P G' and its negative over d_k; `stored` is V in `units` of
    the ranks, as large as all of it fits.
    """
    n, rank = found.shape
    reset(square, 1.0)
    cost, variances, largest = 0.0, 0.0, 0.0
    here, negative = np.int64(0), np.int64(1)  # literals would have `weigh` and `add_outer` compiled twice
    for k in range(n - 1, -1, -1):
        weigh(line, here, square, found, k)
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
        add_outer(square, line, negative, line, here)
    shift = min(max(math.frexp(MOST_ENTRY / largest)[1] - 1, 1), 60) if largest > 0.0 else 1
    up = 2.0**shift
    for k in range(n):
        for i in range(rank):
            stored[k, i] = np.rint(gains[k, i] * up)
    return cost - (damping - rest) * variances, variances, shift


def factorize(
    sketch: Float64s, signs: Float64s, trace: float, dampings: Sequence[float]
) -> tuple[Factors, ...]:
    """Return the factors of a matrix H from its sketch, for each of several dampings.

    Parameters
    ----------
    sketch : (n, 32)
        ``H @ signs``.
    signs : (n, 32)
        The random signs of the sketch.
    trace
        Trace of H.
    dampings
        Added to the diagonal, in means of the diagonal of H.

    Notes
    -----
    O(32² n).
    """
    (n, p), rank = sketch.shape, RANK
    found, gains = np.empty((n, rank)), np.empty((n, rank))
    scratch = np.empty((p, p)), np.empty((p, p)), np.empty((n, p)), np.empty((p, rank))
    units, directions = np.empty(rank), np.empty((n, rank), np.int16)
    energy = decompose(sketch, signs, *scratch, found, units, directions)
    rest = max(0.0, trace - energy) / n
    square, line, factors = np.empty((rank, rank)), np.empty((2, rank)), []
    for damping in dampings:
        total, stored = damping * trace / n + rest, np.empty((n, rank), np.int16)
        cost, variances, shift = feed_forward(found, units, total, rest, square, line, gains, stored)
        share = cost / trace if trace > 0 else 1.0
        factors.append(Factors(stored, directions, shift, share, variances / n))
    return tuple(factors)
