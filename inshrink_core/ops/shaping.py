"""Typed fronts of shaped rounding: errors are fed forward, to where the loss is flat.

The cost of the errors e of a row is ``e S e'`` with ``S = G G' + damping``, n columns and rank `RANK`.
Completing squares from the last column on, it is a sum of ``d_k (e_k + V_k · s_k)²`` with
``s_k = sum of e_j G_j over the columns j before k`` (Babai's plane; LDLQ, GPTQ): so column k is rounded
as if it were less by ``V_k · s_k``. Errors are whole 1024ths of a spacing, V and G 16-bit integers and sums
64-bit ones, so no result depends on the order of summation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.lattice import Lattice
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
    leads : Int64[Tensor, "rows 2"]
        By row, by how much the projection of the rounded movement on the movement exceeds the movement's own,
        and the latter, both in parts squared, over movements below `MOST_COUNTED`; 0 without a base.
    """

    changes: Tensor
    leads: Tensor


@op
def shape_changes(
    values: Tensor,
    base: Tensor | None,
    integers: Tensor,
    lattice: Lattice,
    grades: Tensor,
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
        N before the frame, on the CPU.
    lattice
        The lattice.
    grades : Int32[Tensor, "1"] or Int32[Tensor, "rows"]
        Threshold of matched gain in 4096ths, for all rows or for each; 0: to the nearest point.
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
    raise NotImplementedError


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
    raise NotImplementedError


@op
def factorize(
    sketch: NDArray[np.float64],
    signs: NDArray[np.float64],
    trace: float,
    dampings: Sequence[float],
    noise: float = 0.0,
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
    noise
        How much of the trace is no H but rounding errors, alike in all directions: it is taken away again.

    Notes
    -----
    ``H ≈ Y (signs' Y)^-1 Y'`` (Nyström), of which the `RANK` largest directions are taken and the rest is
    spread over the diagonal. Single float64 operations in a stated order: Cholesky, Jacobi's rotations in
    rows, no library. O(32² n).
    """
    raise NotImplementedError
