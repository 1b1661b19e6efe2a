"""The lattice codec's ops.

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
import torch
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


def float32(value: float, like: Tensor) -> Tensor:
    """Make a 0-d float32, because a Python float would be rounded by rules of its own."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def changes_from(values: Tensor, integers: Tensor, lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Where the state lies, and how many spacings values are from it."""
    at = integers.to(torch.float32) * float32(lattice.unit, values)
    return at, (values - at) * float32(lattice.reciprocal, values)


def _from_base(
    values: Tensor, integers: Tensor | None, lattice: Lattice, base: Tensor
) -> tuple[Tensor, Tensor]:
    """Return by how many spacings values, and the state, are from a base."""
    base, reciprocal = base.to(values.device), float32(lattice.reciprocal, values)
    at = torch.zeros_like(values)
    if integers is not None:
        at = integers.to(values.device, torch.float32) * float32(lattice.unit, values)
    return (values - base) * reciprocal, (at - base) * reciprocal


def matched_changes(
    values: Tensor, integers: Tensor | None, lattice: Lattice, base: Tensor, grade: int
) -> Tensor:
    """Return the changes under matched gain, as floats.

    With D the spacing, x the state, ``r = (w - base) / D`` and ``o = (x - base) / D``, the movement r becomes
    ``y = sign(r) floor(abs(r) + 1 - t)``, or ``rint(r)`` for a grade of 0, and the change is ``rint(y - o)``.
    t is ``grade / 4096``, or seven tenths of it where o is more than half a spacing on the side of r.

    Parameters
    ----------
    values, integers, lattice
        As given to `round_to_lattice`.
    base : Float32[Tensor, "n"]
        The values that training continued from.
    grade
        From `gain_grade`, without its sign.
    """
    r, o = _from_base(values, integers, lattice, base)
    crossed = torch.where(r < 0, -o, o) > 0.5
    threshold = torch.where(crossed, grade * 7 // 10, grade)
    moved = torch.floor(r.abs() + (4096 - threshold).to(torch.float32) / 4096)
    y = torch.where(r < 0, -moved, moved) if grade else r.round()
    return (y - o).round()


def next_history(changes: Tensor, turned: Tensor, history: Tensor) -> Tensor:
    """Return the history after changes; `turned` are the changes times the sign of the last ones."""
    context = history & CONTEXT_BITS
    aged = history + 3 * ((context > 0) & (context < OLDEST_CONTEXT)).to(torch.uint8)
    pair = torch.where(context == 0, 1, torch.where(turned > 0, 2, 3)).to(torch.uint8)
    fresh = pair + NEGATIVE * (changes < 0).to(torch.uint8)
    return torch.where(changes == 0, aged, fresh)


def _tokens_of(z: Tensor) -> Tensor:
    """Tokens of z, int64."""
    place = torch.zeros_like(z)
    for k in range(1, 40):
        place += (z >> k) > 0
    large = FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2).clamp_min(0)) & 3)
    return torch.where(z < FIRST_LARGE, z, large)


@op
def round_to_lattice(
    values: Tensor,
    integers: Tensor | None,
    history: Tensor | None,
    lattice: Lattice,
    changes: Tensor | None = None,
) -> Rounded:
    """Choose the changes of a frame, and return them as tokens with the state after them.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, any device; what is not finite becomes `EXACT`.
    integers : Int32[Tensor, "n"] or None
        N before the frame, within the bound. None: zeros, where the values are.
    history : UInt8[Tensor, "n"] or None
        Before the frame; None: no element has changed.
    lattice
        The lattice.
    changes : Float32[Tensor, "n"] or None
        None: each value goes to the nearest lattice point, ``q = rint((w - N unit) / (spacing unit))``. Else
        q, chosen before (`matched_changes`, `inshrink_core.ops.shaping.shape_changes`).

    Returns
    -------
    Rounded
        Where the integers are. O(n).
    """
    if integers is None:
        integers = torch.zeros(values.numel(), dtype=torch.int32, device=values.device)
    before = integers.to(values.device).long()
    if changes is None:
        changes = changes_from(values, integers.to(values.device), lattice)[1].round()
    changes = changes.to(values.device)
    near = changes.abs() <= float(MAX_PRODUCT // lattice.spacing)  # false for NaN
    q = torch.where(near, changes, 0).long()
    after = before + lattice.spacing * q
    exact = ~(near & (after.abs() <= lattice.bound))
    q[exact] = 0
    old = torch.zeros_like(q, dtype=torch.uint8) if history is None else history.to(values.device)
    turned = torch.where((old & NEGATIVE) != 0, -q, q)
    tokens = _tokens_of((turned << 1) ^ (turned >> 63))
    tokens[exact], after[exact] = EXACT, 0
    new = next_history(q, turned, old)
    new[exact] = 0
    return Rounded(
        tokens.to(torch.uint8).to(integers.device),
        after.to(torch.int32).to(integers.device),
        new.to(integers.device),
        int((tokens >= FIRST_LARGE).sum()),
        int(exact.sum()),
        int(tokens.max()) if tokens.numel() else 0,
    )


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
    z = tokens.long()
    exact = tokens == EXACT
    z[(tokens >= FIRST_LARGE) & ~exact] = torch.from_numpy(large).to(z.device)
    z[exact] = 0
    turned = (z >> 1) ^ -(z & 1)
    old = torch.zeros_like(tokens) if history is None else history
    q = torch.where((old & NEGATIVE) != 0, -turned, turned)
    after = lattice.spacing * q if integers is None else integers.long() + lattice.spacing * q
    after[exact] = 0
    new = next_history(q, turned, old)
    new[exact] = 0
    valid = not bool((after.abs() > lattice.bound).any())
    return Advanced(after.to(torch.int32), new, valid)


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
    return integers.to(torch.float32).mul_(float32(unit, integers))


def _best_grade(counts: NDArray[np.int64], beyond: int) -> int:
    """Return the grade from counts by (crossed, bin) and of values beyond the bins.

    In integers: a bin's abs(r) is ``(2 b + 1) / 512``, thresholds are 4096ths, sums are in 512ths squared.
    """
    bins = np.arange(GAIN_BINS)
    twice = 2 * bins + 1
    energy = int((counts * twice * twice).sum())
    plain = int((counts * twice * ((twice + 256) // 512 * 512 - twice)).sum())
    # Values at the lower edge of their bin are counted at its middle: that much may be missing.
    slack = energy // GAIN_SLACK
    if plain + slack >= 0:
        return 0
    low, high = MIN_GRADE - 1, MAX_GRADE + 1
    while high - low > 1:
        grade = (low + high) // 2
        thresholds = np.array(((grade,), (grade * 7 // 10,)))
        steps = (16 * bins + 8 + 4096 - thresholds) // 4096
        enough = int((counts * twice * (steps * 512 - twice)).sum()) + slack >= 0
        low, high = (grade, high) if enough else (low, grade)
    # What is beyond the bins has at least 8 squared.
    if low < MIN_GRADE or (beyond == 0 and WEAK_ENERGY * energy < int(counts.sum()) * 512 * 512):
        return -max(low, MIN_GRADE)
    return low


def gain_grade(values: Tensor, base: Tensor, integers: Tensor, lattice: Lattice) -> int:
    """Return the threshold of matched gain.

    With ``r = (w - base) / D`` the largest t is taken for which the projection of the rounded movement on
    the movement is at least the movement's own, from an integer histogram of ``floor(256 abs(r))``.

    Returns
    -------
    int
        4096 t, from `MIN_GRADE` to `MAX_GRADE`; 0 where plain rounding keeps the movement; negative,
        ``-4096 t``, where the spacing is too coarse: rms(r) is below .05, or even t = .1 falls short.
    """
    r, o = _from_base(values, integers, lattice, base)
    crossed, scaled = torch.where(r < 0, -o, o) > 0.5, r.abs() * 256
    inside = scaled < GAIN_BINS
    keys = scaled[inside].long() + GAIN_BINS * crossed[inside].long()
    counts = torch.bincount(keys, minlength=2 * GAIN_BINS).view(2, GAIN_BINS).cpu().numpy()
    return _best_grade(counts, int((~inside).sum()))


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
    at = ((tokens >= FIRST_LARGE) & (tokens != EXACT)).nonzero().view(-1)
    moved = after[at].long() - (0 if before is None else before[at].long())
    changes = moved // spacing
    if history is not None:
        turned = (history[at] & NEGATIVE) != 0
        changes[turned] = -changes[turned]
    z: NDArray[np.int64] = ((changes << 1) ^ (changes >> 63)).cpu().numpy()
    return z


def sum_tokens(tokens: Tensor, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sums of the rows and of the columns of tokens in row-major order, at least one."""
    matrix = tokens.view(n_rows, -1)
    rows, columns = matrix.sum(1, dtype=torch.int64), matrix.sum(0, dtype=torch.int64)
    return rows.cpu().numpy(), columns.cpu().numpy()
