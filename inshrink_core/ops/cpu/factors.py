"""Error-feedback factors of a matrix from its sketch: a low-rank part plus a diagonal.

For a symmetric matrix H (n, n), random signs S (n, p) and the sketch Y = H S, the approximation is
``H ≈ Y (S' Y)⁻¹ Y'`` (Nyström; Tropp, Yurtsever, Udell & Cevher, "Fixed-rank approximation of a
positive-semidefinite matrix from streaming data", 2017). With ``S' Y = L L'``, ``B = Y L⁻ᵀ`` and Q the
eigenvectors of the `RANK` largest eigenvalues of ``B' B``, the low-rank factor is ``G = B Q``. The rest of
the trace is spread over the diagonal. The code uses single float64 operations in a fixed order and no
library, so all processors produce the same bits. It uses Cholesky decomposition and Jacobi rotations of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from inshrink_core.ops.cpu.compiled import Float64s, Int16s, kernel, part
from inshrink_core.ops.shaping import MAX_ENTRY, MAX_SUM, RANK, Factors

_SWEEPS = 12
"""Maximum number of Jacobi sweeps; 32 columns need four or five."""

_TURNED = 1e-4
"""Squared cosine below which two columns need no further rotation. If only one of the two is selected, the
error is at most this share of a direction's square."""

_RIDGE = 1e-12
"""Ridge added to the diagonal of S' Y, relative to its trace, so that a rank-deficient matrix has a Cholesky
factor."""


@part
def add_outer(out: Float64s, left: Float64s, at: int, right: Float64s, right_at: int) -> None:
    """Add the outer product of row `at` of `left` and row `right_at` of `right` to `out`."""
    for i in range(out.shape[0]):
        factor = left[at, i]
        for j in range(out.shape[1]):
            out[i, j] += factor * right[right_at, j]


@part
def weigh(out: Float64s, at: int, rows: Float64s, weights: Float64s, weights_at: int) -> None:
    """Write to row `at` of `out` the sum of `rows`, weighted by row `weights_at` of `weights`."""
    for j in range(out.shape[1]):
        out[at, j] = 0.0
    for i in range(rows.shape[0]):
        weight = weights[weights_at, i]
        for j in range(out.shape[1]):
            out[at, j] += weight * rows[i, j]


@part
def reset(square: Float64s, diagonal: float) -> None:
    """Set a matrix to a multiple of the identity."""
    for i in range(square.shape[0]):
        for j in range(square.shape[1]):
            square[i, j] = diagonal if i == j else 0.0


@part
def _multiply(out: Float64s, left: Float64s, right: Float64s) -> None:
    """Write left' right to `out`."""
    reset(out, 0.0)
    for k in range(left.shape[0]):
        add_outer(out, left, k, right, k)


@part
def _invert_cholesky(core: Float64s, upper: Float64s) -> None:
    """Replace C in `core` by L⁻ᵀ, with C = L L'; `upper` receives L' above its inverted diagonal."""
    p, ridge = core.shape[0], 0.0
    for i in range(p):
        ridge += core[i, i]
    ridge *= _RIDGE
    for i in range(p):
        for j in range(i, p):
            upper[i, j] = core[j, i]
        for l in range(i):  # noqa: E741 - the usual third index of a matrix product
            factor = upper[l, i]
            for j in range(i, p):
                upper[i, j] -= factor * upper[l, j]
        pivot = upper[i, i]
        upper[i, i] = 1.0 / math.sqrt(pivot + ridge) if pivot > -ridge else 0.0
        for j in range(i + 1, p):
            upper[i, j] *= upper[i, i]
    for i in range(p):
        for j in range(p):
            core[i, j] = upper[i, i] if i == j else 0.0
        for l in range(i, p):  # noqa: E741
            if l > i:
                core[i, l] *= -upper[l, l]
            for j in range(l + 1, p):
                core[i, j] += core[i, l] * upper[l, j]


@part
def _diagonalize(core: Float64s, vectors: Float64s) -> None:
    """Turn a symmetric matrix into its eigenvalues; the rows of `vectors` become the eigenvectors.

    Cyclic Jacobi: a rotation by θ with t = tan θ = sign(τ) / (|τ| + √(τ² + 1)), τ = (c_jj - c_ii) / 2 c_ij,
    makes c_ij zero (Golub & Van Loan, "Matrix Computations", section 8.5). Entries below a hundredth of the
    ridge are rounding errors, of which a rank-deficient matrix has many.
    """
    p, total = core.shape[0], 0.0
    for i in range(p):
        total += core[i, i]
    least = _TURNED * (_RIDGE * total) ** 2
    reset(vectors, 1.0)
    for _ in range(_SWEEPS):
        n_turned = 0
        for i in range(p - 1):
            for j in range(i + 1, p):
                both, first, second = core[i, j], core[i, i], core[j, j]
                if both * both <= max(_TURNED * first * second, least):
                    continue
                n_turned += 1
                ratio = (second - first) / (2.0 * both)
                tangent = 1.0 / (abs(ratio) + math.sqrt(ratio * ratio + 1.0))
                if ratio < 0.0:
                    tangent = -tangent
                cosine = 1.0 / math.sqrt(tangent * tangent + 1.0)
                sine = tangent * cosine
                for rows in (core, vectors):
                    for l in range(p):  # noqa: E741
                        a, b = rows[i, l], rows[j, l]
                        rows[i, l] = cosine * a - sine * b
                        rows[j, l] = sine * a + cosine * b
                for l in range(p):  # noqa: E741
                    core[l, i], core[l, j] = core[i, l], core[j, l]
                core[i, i], core[j, j] = first - tangent * both, second + tangent * both
                core[i, j], core[j, i] = 0.0, 0.0
        if n_turned == 0:
            break


@part
def _quantize(found: Float64s, units: Float64s, directions: Int16s) -> float:
    """Round the columns of G to multiples of powers of two, `units`; return the sum of G's squares."""
    energy = 0.0
    for r in range(found.shape[1]):
        square, total, largest = 0.0, 0.0, 0.0
        for k in range(found.shape[0]):
            square += found[k, r] * found[k, r]
            total += abs(found[k, r])
            largest = max(largest, abs(found[k, r]))
        energy += square
        most = max(total / (MAX_SUM - found.shape[0]), largest / MAX_ENTRY)
        units[r] = math.ldexp(1.0, math.frexp(most)[1]) if most > 0.0 else 1.0
        for k in range(found.shape[0]):
            directions[k, r] = np.rint(found[k, r] / units[r])
    return energy


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

    `core` (p, p) holds S' Y, then L⁻ᵀ, then B' B and its eigenvalues. `turned` (p, p) holds L', then the
    eigenvectors. `columns` (n, p) holds B, `basis` (p, rank) holds Q and `found` (n, rank) holds G.
    `directions` is G in `units`, one unit per rank, scaled so that each column is as large as its bound
    allows.
    """
    n, p = sketch.shape
    _multiply(core, signs, sketch)
    _invert_cholesky(core, turned)
    for k in range(n):
        weigh(columns, k, core, sketch, k)
    _multiply(core, columns, columns)
    _diagonalize(core, turned)
    for r in range(found.shape[1]):
        best = -1
        for i in range(p):
            if core[i, i] > 0.0 and (best < 0 or core[i, i] > core[best, best]):
                best = i
        for i in range(p):
            basis[i, r] = turned[best, i] if best >= 0 else 0.0
        if best >= 0:
            core[best, best] = 0.0
    for k in range(n):
        weigh(found, k, basis, columns, k)
    energy: float = _quantize(found, units, directions)
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
    """Fill in V from G; return the predicted cost, the sum of the error variances, and the shift.

    A rounding error has variance 1. Start with P = I and d = `damping`. For each column k from last to first:
    ``d_k = d + G_k P G_k'``, ``V_k = P G_k' / d_k`` and ``P -= d_k V_k V_k'``. With damping, rounding errors
    cost ``sum_k d_k``. The inverse of ``e_k + V_k · s_k`` has entries ``-d_k / d V_k · G_i``, so the
    variances sum to ``sum_k (d_k - |P G_k|²) / d``. The `rest` of the damping is added to the cost. `square`
    (rank, rank) holds P, `line` (2, rank) holds P G' and -P G' / d_k. `stored` holds V in `units`, one per
    rank, as large as its bound allows.
    """
    n, rank = found.shape
    reset(square, 1.0)
    cost, variances, largest = 0.0, 0.0, 0.0
    here, negative = np.int64(0), np.int64(1)  # literals would compile `weigh` and `add_outer` twice
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
    shift = min(max(math.frexp(MAX_ENTRY / largest)[1] - 1, 1), 60) if largest > 0.0 else 1
    up = 2.0**shift
    for k in range(n):
        for i in range(rank):
            stored[k, i] = np.rint(gains[k, i] * up)
    return cost - (damping - rest) * variances, variances, shift


def factorize(
    sketch: Float64s, signs: Float64s, trace: float, dampings: Sequence[float]
) -> Iterator[Factors]:
    """Yield the error-feedback factors of a matrix H from its sketch, one result per damping.

    Parameters
    ----------
    sketch : (n, 32)
        ``H @ signs``.
    signs : (n, 32)
        Random signs of the sketch.
    trace
        Trace of H.
    dampings
        Multiples of H's mean diagonal entry that are added to the diagonal.

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
    square, line = np.empty((rank, rank)), np.empty((2, rank))
    for damping in dampings:
        total, stored = damping * trace / n + rest, np.empty((n, rank), np.int16)
        cost, variances, shift = feed_forward(found, units, total, rest, square, line, gains, stored)
        share = cost / trace if trace > 0 else 1.0
        yield Factors(stored, directions, shift, share, variances / n)
