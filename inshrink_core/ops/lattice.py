"""Typed fronts of the lattice codec's kernels.

A tensor is int32 numbers N in units of ``delta = 2**e``; a frame adds ``step * q``. What touches floats is
single float32 operations: ``x = float32(N) * delta`` is exact, then one subtraction, one multiplication
and one rounding to the nearest even integer. So every device chooses the same q.

The *history* of an element is a byte: bits 0-4 its context, 0 if it has not changed since the chain's
keyframe, else ``1 + 3 * (age - 1) + pair`` where age (1 to 8, 8 standing for more) counts the frames since
its last change and pair tells what the change before was (0 none, 1 of the same sign, 2 of the other);
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

__all__ = [
    "EXACT",
    "FIRST_LARGE",
    "MAX_GRADE",
    "MIN_GRADE",
    "N_CONTEXTS",
    "N_TOKENS",
    "Advanced",
    "Gain",
    "Grid",
    "Rounded",
    "advance",
    "gain_grades",
    "large_changes",
    "pack_extra",
    "round_to_grid",
    "scale_integers",
    "unpack_extra",
]

_EXTRA_PART = 1 << 16
"""Large numbers whose bits are spread out at a time: 64-bit numbers, a megabyte for each bit of theirs."""

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
"""Bound on abs(step * q): the way from one end of the integers to the other."""

MIN_GRADE, MAX_GRADE = 410, 2048
"""Thresholds of matched gain in 4096ths: .1 and .5."""

GAIN_BINS = 2048
"""Bins of abs(r), 256 to a step; what is beyond eight steps is rounded and taken as it is."""


GAIN_SLACK = 256
"""The projection may be short of the movement's by one part in 256."""

WEAK_ENERGY = 400
"""A step is too coarse for a movement whose mean r² is below one part in 400: rms(r) below .05. With .2, as
first measured, rehearsals of a small GPT end no closer and store a third more."""


class Grid(NamedTuple):
    """A lattice, and what of it a tensor may use.

    Parameters
    ----------
    delta
        Unit, a power of two.
    step
        Units from one lattice point to the next, at least 1.
    rcp
        ``float32(1 / (step * delta))``.
    bound
        Largest abs(N), below 2**24.
    """

    delta: float
    step: int
    rcp: float
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
    values : Float32[Tensor, "n"]
        ``N * delta``.
    valid
        Whether every N is within its bound.
    """

    integers: Tensor
    history: Tensor
    values: Tensor
    valid: bool


@op
def round_to_grid(
    values: Tensor, integers: Tensor, history: Tensor | None, grid: Grid, gain: Gain | None = None
) -> Rounded:
    """Choose the changes of a frame, and return them as tokens with the state after them.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, any device; what is not finite becomes `EXACT`.
    integers : Int32[Tensor, "n"]
        N before the frame, within the bound; on the CPU.
    history : UInt8[Tensor, "n"] or None
        Before the frame; None: no element has changed.
    grid
        The lattice.
    gain
        None: each value goes to the nearest lattice point. Else matched gain: ``y``, the movement
        ``(w - base) / D`` in whole steps, becomes ``floor(abs + 1 - t)`` in magnitude, and
        ``q = rint(y - (x - base) / D)``; t is seven tenths where x lies more than half a step further
        that way already.

    Returns
    -------
    Rounded
        On the CPU. O(n).
    """
    raise NotImplementedError


@op
def advance(
    tokens: Tensor, large: NDArray[np.int64], integers: Tensor | None, history: Tensor | None, grid: Grid
) -> Advanced:
    """Apply decoded tokens to a state: the inverse of `round_to_grid`.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Any below `N_TOKENS`.
    large
        z of the tokens from `FIRST_LARGE` on but for `EXACT`, in order.
    integers, history
        Before the frame; None: zeros.
    grid
        The lattice.
    """
    raise NotImplementedError


@op
def scale_integers(integers: Tensor, delta: float) -> Tensor:
    """Return the values ``N * delta`` that integers stand for, in memory of their own.

    Parameters
    ----------
    integers : Int32[Tensor, "n"]
    delta
        Unit, a power of two.

    Returns
    -------
    Float32[Tensor, "n"]
        On the device of the integers.
    """
    raise NotImplementedError


@op
def gain_grades(values: Tensor, base: Tensor, integers: Tensor, grid: Grid, n_rows: int) -> Tensor:
    """Find the threshold of matched gain for each of `n_rows` rows of equal length.

    With ``r = (w - base) / D`` the largest t is taken for which the projection of the rounded movement on
    the movement is at least the movement's own, from an integer histogram of ``floor(256 abs(r))``.

    Returns
    -------
    Int32[Tensor, "rows"]
        4096 t, from `MIN_GRADE` to `MAX_GRADE`; 0 where plain rounding keeps the movement; negative,
        ``-4096 t``, where the step is too coarse: rms(r) is below .05, or even t = .1 falls short.
    """
    raise NotImplementedError


def large_changes(
    tokens: Tensor, before: Tensor, after: Tensor, history: Tensor | None, step: int
) -> NDArray[np.int64]:
    """Return z of the tokens from `FIRST_LARGE` on but for `EXACT`, in order."""
    # Done in torch on every device: only keyframes of fine steps have more than a few.
    at = ((tokens >= FIRST_LARGE) & (tokens != EXACT)).nonzero().view(-1)
    changes = (after[at].long() - before[at].long()) // step
    if history is not None:
        turned = (history[at] & NEGATIVE) != 0
        changes[turned] = -changes[turned]
    z: NDArray[np.int64] = ((changes << 1) ^ (changes >> 63)).cpu().numpy()
    return z


def pack_extra(z: NDArray[np.int64]) -> bytes:
    """Return the extra bits of large z, lowest bit first, filled up to a byte with zeros."""
    # Whole bytes at the end of each part but the last: the bits of a part are put before the next one's.
    left, parts = np.zeros(0, np.uint8), []
    for begin in range(0, z.size, _EXTRA_PART):
        part = z[begin : begin + _EXTRA_PART]
        lengths = _places(part) - 2
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        bits = np.concatenate((left, (np.repeat(part, lengths) >> within & 1).astype(np.uint8)))
        whole = bits.size // 8 * 8
        parts.append(np.packbits(bits[:whole], bitorder="little").tobytes())
        left = bits[whole:]
    return b"".join((*parts, np.packbits(left, bitorder="little").tobytes()))


def _places(z: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places of the highest bits: numbers below 2**27 are exact as float64."""
    return np.frexp(z.astype(np.float64))[1].astype(np.int64) - 1


def unpack_extra(tokens: Tensor, extra: bytes | memoryview) -> NDArray[np.int64] | None:
    """Return the large z of tokens from their extra bits; None unless these are exactly enough."""
    large = tokens[(tokens >= FIRST_LARGE) & (tokens < EXACT)].cpu().numpy().astype(np.int64) - FIRST_LARGE
    lengths = large // 4 + 5
    ends = np.cumsum(lengths)
    n_bits = int(ends[-1]) if large.size else 0
    stored = np.frombuffer(extra, np.uint8)
    if (n_bits + 7) // 8 != stored.size or (n_bits % 8 and int(stored[-1]) >> n_bits % 8):
        return None
    z: NDArray[np.int64] = (4 | large % 4) << lengths
    for begin in range(0, large.size, _EXTRA_PART):
        span = slice(begin, begin + _EXTRA_PART)
        first, last = int(ends[begin] - lengths[begin]), int(ends[span][-1])
        bits = np.unpackbits(stored[first // 8 : (last + 7) // 8], bitorder="little")[first % 8 :]
        bits = bits[: last - first]
        starts = ends[span] - lengths[span] - first
        weights = bits.astype(np.int64) << (np.arange(last - first) - np.repeat(starts, lengths[span]))
        z[span] |= np.add.reduceat(weights, starts)
    return z
