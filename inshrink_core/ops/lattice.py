"""Ops of the lattice codec.

A tensor is represented by int32 numbers N in units of ``unit = 2**e``, so its values are ``x = N * unit``. A
frame adds ``step_size * q`` to N, where `step_size` is the step size in units. Nearest rounding chooses
``q = rint((w - N * unit) / (step_size * unit))`` for a value w. All float steps are single float32
operations: ``x = float32(N) * unit`` is exact, then one subtraction, one multiplication and one rounding to
the nearest even integer. So every device chooses the same q.

The *context state* of an element is a byte. Bits 0-4 hold its context: 0 if the element has not
changed since the keyframe, else ``1 + 3 * (age - 1) + pair``. The age, 1 to 8, counts the frames since the
last change, with 8 for all larger ages. The pair describes the change before the last one: 0 for none, 1 for
the same sign, 2 for the opposite sign. Bit 5 is set if the last change was negative. A change is coded
relative to the last one, that is multiplied by its sign, which makes the contexts symmetric.

Zigzag maps such a change v to ``z = 2 v`` for v >= 0 and ``z = -2 v - 1`` otherwise. The token is z below
`FIRST_LARGE`. For larger z, with k the position of its highest bit, the token is ``128 + 4 (k - 7)`` plus the
two bits below the highest; the remaining k - 2 bits go to a stream of *extra bits*. The token `EXACT` marks
an element whose value is stored separately.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.ops.registry import op

N_CONTEXTS = 25
"""Number of contexts: one for no change so far, and three pairs at each of eight ages."""

FIRST_LARGE = 128
"""First token with extra bits; each smaller token means one value of z."""

EXACT = 228
"""Token of an element whose value is stored separately; it follows 25 highest bits of 4 tokens each."""

N_TOKENS = EXACT + 1

NEGATIVE = 32
"""Bit of the context state that marks a negative last change."""

CONTEXT_BITS = 31

OLDEST_CONTEXT = N_CONTEXTS - 3
"""First context that does not age any further."""

MAX_PRODUCT = 1 << 25
"""Bound on abs(step size * q): the distance between the two ends of the integers' range."""

MIN_GRADE, MAX_GRADE = 410, 2048
"""Range of the matched-gain threshold in units of 1/4096: .1 and .5."""

GAIN_BINS = 2048
"""Number of bins of abs(r), 256 per step. Larger values are rounded and used as they are."""

GAIN_SLACK = 256
"""The projection may fall short of the movement's by one part in 256."""

WEAK_ENERGY = 400
"""The step size is too coarse for a movement whose mean r² is below 1/400, that is rms(r) below .05. With .2,
the first value tried, rehearsals of a small GPT end no closer and store a third more."""


class Lattice(NamedTuple):
    """Lattice of a tensor, and the range that the tensor may use.

    Parameters
    ----------
    unit
        A power of two.
    step_size
        Step size: units between neighbouring lattice points, at least 1.
    reciprocal
        ``float32(1 / (step_size * unit))``.
    bound
        Largest abs(N), below 2**24.
    """

    unit: float
    step_size: int
    reciprocal: float
    bound: int


class Rounded(NamedTuple):
    """A tensor rounded to its lattice.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
    integers : Int32[Tensor, "n"]
        N after the frame; 0 for the token `EXACT`.
    context_state : UInt8[Tensor, "n"]
        Context states after the frame.
    n_large, n_exact
        Number of tokens that are at least `FIRST_LARGE`, and number of `EXACT` tokens among them.
    largest
        Largest token; 0 if nothing changed.
    """

    tokens: Tensor
    integers: Tensor
    context_state: Tensor
    n_large: int
    n_exact: int
    largest: int


def float32(value: float, like: Tensor) -> Tensor:
    """Return a 0-d float32 tensor; PyTorch rounds a Python float by different rules."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)


def changes_from(values: Tensor, integers: Tensor, lattice: Lattice) -> Tensor:
    """Return the changes of the values from the state in steps."""
    at = integers.to(torch.float32) * float32(lattice.unit, values)
    return (values - at) * float32(lattice.reciprocal, values)


def from_base(values: Tensor, integers: Tensor, lattice: Lattice, base: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distances of the values and of the state from a base, in steps."""
    base, reciprocal = base.to(values.device), float32(lattice.reciprocal, values)
    at = integers.to(values.device, torch.float32) * float32(lattice.unit, values)
    return (values - base) * reciprocal, (at - base) * reciprocal


def matched_changes(values: Tensor, integers: Tensor, lattice: Lattice, base: Tensor, grade: int) -> Tensor:
    """Return the changes under matched gain, as floats.

    Let D be the step size, x the state, w the value, ``r = (w - base) / D`` and ``o = (x - base) / D``. The
    movement r is rounded to ``y = sign(r) floor(abs(r) + 1 - t)``, or to ``rint(r)`` for grade 0. The change
    is ``rint(y - o)``. The threshold t is ``grade / 4096``, or seven tenths of it if o exceeds half a step in
    the direction of r.

    Parameters
    ----------
    values, integers, lattice
        As in `round_to_lattice`; the integers are given.
    base : Float32[Tensor, "n"]
        Values that training continued from.
    grade
        Result of `gain_grade` without its sign.
    """
    r, o = from_base(values, integers, lattice, base)
    crossed = torch.where(r < 0, -o, o) > 0.5
    threshold = torch.where(crossed, grade * 7 // 10, grade)
    moved = torch.floor(r.abs() + (4096 - threshold).to(torch.float32) / 4096)
    y = torch.where(r < 0, -moved, moved) if grade else r.round()
    return (y - o).round()


def next_context_state(changes: Tensor, turned: Tensor, context_state: Tensor) -> Tensor:
    """Return the context states after changes q; `turned` holds q times the sign of the last change.

    A context is 0 before the first change, else ``1 + 3 (age - 1) + pair``. Without a change the age grows by
    one, up to 8. A change resets it to 1, and pair is 0 for the first change, 1 after one of the same sign
    and 2 after one of the other. Bit 5 is set if q is negative.
    """
    context = context_state & CONTEXT_BITS
    aged = context_state + 3 * ((context > 0) & (context < OLDEST_CONTEXT)).to(torch.uint8)
    pair = torch.where(context == 0, 1, torch.where(turned > 0, 2, 3)).to(torch.uint8)
    fresh = pair + NEGATIVE * (changes < 0).to(torch.uint8)
    return torch.where(changes == 0, aged, fresh)


def _tokens_of(z: Tensor) -> Tensor:
    """Return z below 128; else ``128 + 4 (k - 7)`` plus the two bits of z below its highest bit, number k."""
    place = torch.zeros_like(z)
    for k in range(1, 40):
        place += (z >> k) > 0
    large = FIRST_LARGE + 4 * (place - 7) + ((z >> (place - 2).clamp_min(0)) & 3)
    return torch.where(z < FIRST_LARGE, z, large)


@op
def round_to_lattice(
    values: Tensor,
    integers: Tensor | None,
    context_state: Tensor | None,
    lattice: Lattice,
    changes: Tensor | None = None,
) -> Rounded:
    """Choose the changes of a frame; return their tokens and the state after them.

    Parameters
    ----------
    values : Float32[Tensor, "n"]
        Contiguous, any device; values that are not finite become `EXACT`.
    integers : Int32[Tensor, "n"] or None
        N before the frame, within the bound. None means zeros on the values' device.
    context_state : UInt8[Tensor, "n"] or None
        Context states before the frame. With None, no element has changed.
    lattice
        Lattice of the tensor.
    changes : Float32[Tensor, "n"] or None
        None: to the nearest lattice point, ``q = rint((w - N * unit) / (step_size * unit))``.
        Otherwise the chosen q (`matched_changes`, `inshrink_core.ops.shaping.shape_changes`).

    Returns
    -------
    Rounded
        On the device of the integers.

    Notes
    -----
    O(n).
    """
    if integers is None:
        integers = torch.zeros(values.numel(), dtype=torch.int32, device=values.device)
    before = integers.to(values.device).long()
    if changes is None:
        changes = changes_from(values, integers.to(values.device), lattice).round()
    changes = changes.to(values.device)
    near = changes.abs() <= float(MAX_PRODUCT // lattice.step_size)  # false for NaN
    q = torch.where(near, changes, 0).long()
    after = before + lattice.step_size * q
    exact = ~(near & (after.abs() <= lattice.bound))
    q[exact] = 0
    old = torch.zeros_like(q, dtype=torch.uint8) if context_state is None else context_state.to(values.device)
    turned = torch.where((old & NEGATIVE) != 0, -q, q)
    tokens = _tokens_of((turned << 1) ^ (turned >> 63))
    tokens[exact], after[exact] = EXACT, 0
    new = next_context_state(q, turned, old)
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
    context_state: Tensor | None,
    lattice: Lattice,
) -> tuple[Tensor, Tensor] | None:
    """Apply decoded tokens to a state; the inverse of `round_to_lattice`.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Each below `N_TOKENS`.
    large
        z of the tokens from `FIRST_LARGE` on except `EXACT`, in order.
    integers, context_state
        State before the frame; None means zeros.
    lattice
        Lattice of the tensor.

    Returns
    -------
    integers, context_state : Tensor
        As in `Rounded`. None if an N is not within the bound.
    """
    z = tokens.long()
    exact = tokens == EXACT
    z[(tokens >= FIRST_LARGE) & ~exact] = torch.from_numpy(large).to(z.device)
    z[exact] = 0
    turned = (z >> 1) ^ -(z & 1)
    old = torch.zeros_like(tokens) if context_state is None else context_state
    q = torch.where((old & NEGATIVE) != 0, -turned, turned)
    after = lattice.step_size * q if integers is None else integers.long() + lattice.step_size * q
    after[exact] = 0
    new = next_context_state(q, turned, old)
    new[exact] = 0
    return None if bool((after.abs() > lattice.bound).any()) else (after.to(torch.int32), new)


def scale_integers(integers: Tensor, unit: float) -> Tensor:
    """Return the values ``N * unit`` of integers in newly allocated memory.

    Parameters
    ----------
    integers : Int32[Tensor, "n"]
    unit
        A power of two.

    Returns
    -------
    Float32[Tensor, "n"]
        On the device of the integers.
    """
    return integers.to(torch.float32).mul_(unit)


def _best_grade(counts: NDArray[np.int64], beyond: int) -> int:
    """Return the grade from counts by (crossed, bin), and from the number of values beyond the bins.

    The computation uses integers. Bin b means ``abs(r) = (2 b + 1) / 512``, thresholds are in units of
    1/4096, and sums in units of 1/512 squared.
    """
    bins = np.arange(GAIN_BINS)
    twice = 2 * bins + 1
    energy = int((counts * twice * twice).sum())
    plain = int((counts * twice * ((twice + 256) // 512 * 512 - twice)).sum())
    # A value at the lower edge of its bin counts as its middle; the slack covers the difference.
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
    # The square of a value beyond the bins is at least 8².
    if low < MIN_GRADE or (beyond == 0 and WEAK_ENERGY * energy < int(counts.sum()) * 512 * 512):
        return -max(low, MIN_GRADE)
    return low


def gain_grade(values: Tensor, base: Tensor, integers: Tensor, lattice: Lattice) -> int:
    """Return the threshold of matched gain.

    With ``r = (w - base) / D`` and ``y(t) = sign(r) floor(abs(r) + 1 - t)``, the function takes the largest t
    for which the projection ``sum(y r)`` is at least the movement's energy ``sum(r r)``. It computes both
    from an integer histogram of ``floor(256 abs(r))``.

    Returns
    -------
    int
        4096 t, from `MIN_GRADE` to `MAX_GRADE`; 0 if plain rounding preserves the movement. Negative, ``-4096
        t``, if the step size is too coarse: rms(r) is below .05, or even t = .1 falls short.
    """
    r, o = from_base(values, integers, lattice, base)
    crossed, scaled = torch.where(r < 0, -o, o) > 0.5, r.abs() * 256
    inside = scaled < GAIN_BINS
    keys = scaled[inside].long() + GAIN_BINS * crossed[inside].long()
    counts = torch.bincount(keys, minlength=2 * GAIN_BINS).view(2, GAIN_BINS).cpu().numpy()
    return _best_grade(counts, int((~inside).sum()))


@op
def large_changes(
    tokens: Tensor, before: Tensor | None, after: Tensor, context_state: Tensor | None, step_size: int
) -> NDArray[np.int64]:
    """Return z of the tokens from `FIRST_LARGE` on except `EXACT`, in order.

    Parameters
    ----------
    tokens : UInt8[Tensor, "n"]
        Result of `round_to_lattice`.
    before, after : Int32[Tensor, "n"]
        The integers that it got (None means zeros), and those it returned.
    context_state : UInt8[Tensor, "n"] or None
        The context states that it got.
    step_size
        Step size in units.
    """
    at = ((tokens >= FIRST_LARGE) & (tokens != EXACT)).nonzero().view(-1)
    moved = after[at].long() - (0 if before is None else before[at].long())
    changes = moved // step_size
    if context_state is not None:
        turned = (context_state[at] & NEGATIVE) != 0
        changes[turned] = -changes[turned]
    z: NDArray[np.int64] = ((changes << 1) ^ (changes >> 63)).cpu().numpy()
    return z


def sum_tokens(tokens: Tensor, n_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row sums and column sums of tokens in row-major order; at least one token is needed."""
    matrix = tokens.view(n_rows, -1)
    rows, columns = matrix.sum(1, dtype=torch.int64), matrix.sum(0, dtype=torch.int64)
    return rows.cpu().numpy(), columns.cpu().numpy()
