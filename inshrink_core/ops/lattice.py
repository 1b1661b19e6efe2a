"""Typed fronts of the lattice codec's kernels.

A tensor is int32 numbers N in units of ``unit = 2**e``; a frame adds ``spacing * q``. What touches floats is
single float32 operations: ``x = float32(N) * unit`` is exact, then one subtraction, one multiplication
and one rounding to the nearest even integer. So every device chooses the same q.

The *history* of an element is a byte: bits 0-4 its context, 0 if it has not changed since the chain's
keyframe, else ``1 + 3 * (age - 1) + pair`` where age (1 to 8, 8 for all beyond) counts the frames since
its last change and pair says what the change before was (0 none, 1 of the same sign, 2 of the other);
bit 5 is set if its last change was negative. A change is coded *turned*, times the sign of the last one,
which makes contexts symmetric.

A turned change v is the token ``z = 2 v`` or ``-2 v - 1``, whichever is not negative, if that is below
`FIRST_LARGE`; else, k being the place of its highest bit, ``128 + 4 (k - 7)`` and the two bits below the
highest, the k - 2 bits below those going to a stream of *extra bits*. `EXACT` says that the element's
value is stored beside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import op

N_CONTEXTS = 25
"""No change so far, and eight ages of three pairs."""

FIRST_LARGE = 128
"""Tokens from here on have extra bits; below, each is one change."""

EXACT = 228
"""Token of an element whose value is stored beside: after 25 highest bits of 4 tokens each."""

N_TOKENS = EXACT + 1

NEGATIVE = 32
"""Bit of a history: the last change was negative."""

CONTEXT_BITS = 31
OLDEST_CONTEXT = N_CONTEXTS - 3
"""Contexts from here on do not age."""

MAX_PRODUCT = 1 << 25
"""Bound on abs(spacing * q): the way from one end of the integers to the other."""

MIN_GRADE, MAX_GRADE = 410, 2048
"""Thresholds of matched gain in 4096ths: .1 and .5."""

GAIN_BINS = 2048
"""Bins of abs(r), 256 to a spacing; what is beyond eight spacings is rounded and taken as it is."""


GAIN_SLACK = 256
"""The projection may be short of the movement's by one part in 256."""

WEAK_ENERGY = 400
"""A spacing is too coarse for a movement whose mean r² is below one part in 400: rms(r) below .05. With .2,
as first measured, rehearsals of a small GPT end no closer and store a third more."""


class Lattice(NamedTuple):
    """A lattice, and what of it a tensor may use.

    Parameters
    ----------
    unit
        Unit, a power of two.
    spacing
        Units from one lattice point to the next, at least 1.
    reciprocal
        ``float32(1 / (spacing * unit))``.
    bound
        Largest abs(N), below 2**24.
    """

    unit: float
    spacing: int
    reciprocal: float
    bound: int


class Gain(NamedTuple):
    """What matched-gain rounding needs.

    Parameters
    ----------
    base : Float32[Tensor, "n"]
        The values that training continued from.
    grades : Int32[Tensor, "rows"]
        Threshold of each row in 4096ths; 0: plain rounding.
    """

    base: Tensor
    grades: Tensor


class Rounded(NamedTuple):
    """One tensor on its lattice.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
    integers : Int32[Tensor, "n"]
        N after the frame; 0 where the token is `EXACT`.
    history : UInt8[Tensor, "n"]
        After the frame.
    n_large, n_exact
        How many tokens are at least `FIRST_LARGE`, and how many of them `EXACT`.
    largest
        The largest token; 0 where nothing changed.
    """

    tokens: Tensor
    integers: Tensor
    history: Tensor
    n_large: int
    n_exact: int
    largest: int


class Advanced(NamedTuple):
    """A state moved by decoded tokens.

    Parameters
    ----------
    integers, history
        As in `Rounded`.
    valid
        Whether every N is within its bound.
    """

    integers: Tensor
    history: Tensor
    valid: bool


@op
def round_to_lattice(
    values: Tensor,
    integers: Tensor | None,
    history: Tensor | None,
    lattice: Lattice,
    gain: Gain | Tensor | None = None,
) -> Rounded:
    """Choose the changes of a frame, and return them as tokens with the state after them.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, any device; what is not finite becomes `EXACT`.
    integers : Int32[Tensor, "n"] or None
        N before the frame, within the bound; on the CPU. None: zeros.
    history : UInt8[Tensor, "n"] or None
        Before the frame; None: no element has changed.
    lattice
        The lattice.
    gain
        None: each value goes to the nearest lattice point. A tensor: the changes, chosen before
        (`inshrink_core.ops.shaping.shape_changes`). Else matched gain: ``y``, the movement
        ``(w - base) / D`` in whole spacings, becomes ``floor(abs + 1 - t)`` in magnitude, and
        ``q = rint(y - (x - base) / D)``; t is seven tenths where x lies more than half a spacing further
        that way already.

    Returns
    -------
    Rounded
        On the CPU. O(n).
    """
    raise NotImplementedError


@op
def advance(
    tokens: Tensor,
    large: NDArray[np.int64],
    integers: Tensor | None,
    history: Tensor | None,
    lattice: Lattice,
) -> Advanced:
    """Apply decoded tokens to a state: the inverse of `round_to_lattice`.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Any below `N_TOKENS`.
    large
        z of the tokens from `FIRST_LARGE` on but for `EXACT`, in order.
    integers, history
        Before the frame; None: zeros.
    lattice
        The lattice.
    """
    raise NotImplementedError


@op
def scale_integers(integers: Tensor, unit: float) -> Tensor:
    """Return the values ``N * unit`` that integers stand for, in memory of their own.

    Parameters
    ----------
    integers : Int32[Tensor, "n"]
    unit
        Unit, a power of two.

    Returns
    -------
    Float32[Tensor, "n"]
        On the device of the integers.
    """
    raise NotImplementedError


@op
def gain_grades(values: Tensor, base: Tensor, integers: Tensor, lattice: Lattice, n_rows: int) -> Tensor:
    """Find the threshold of matched gain for each of `n_rows` rows of equal length.

    With ``r = (w - base) / D`` the largest t is taken for which the projection of the rounded movement on
    the movement is at least the movement's own, from an integer histogram of ``floor(256 abs(r))``.

    Returns
    -------
    Int32[Tensor, "rows"]
        4096 t, from `MIN_GRADE` to `MAX_GRADE`; 0 where plain rounding keeps the movement; negative,
        ``-4096 t``, where the spacing is too coarse: rms(r) is below .05, or even t = .1 falls short.
    """
    raise NotImplementedError


@op
def large_changes(
    tokens: Tensor, before: Tensor | None, after: Tensor, history: Tensor | None, spacing: int
) -> NDArray[np.int64]:
    """Return z of the tokens from `FIRST_LARGE` on but for `EXACT`, in order.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        From `round_to_lattice`.
    before, after : Int32[Tensor, "n"]
        The integers it was given (None: zeros), and those it returned.
    history : UInt8[Tensor, "n"] or None
        The history it was given.
    spacing
        Units from one lattice point to the next.
    """
    raise NotImplementedError


@op
def pack_extra(z: NDArray[np.int64]) -> bytes:
    """Return the extra bits of large z, lowest bit first, filled up to a byte with zeros."""
    raise NotImplementedError


@op
def unpack_extra(tokens: Tensor, extra: bytes | memoryview) -> NDArray[np.int64] | None:
    """Return the large z of tokens from their extra bits; None unless these are exactly enough."""
    raise NotImplementedError


@op
def sum_tokens(tokens: Tensor, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sums of the rows and of the columns of tokens in row-major order, at least one."""
    raise NotImplementedError
