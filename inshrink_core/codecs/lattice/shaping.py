"""Where the loss is flat, as first moments show it: what shaped rounding feeds forward, and how much.

Gradients of a matrix lie in few directions of its inputs; H, the sum of m'm over first moments m, says in
which. An encoder holds a sketch of it from frame to frame. It is of first moments as the archive decodes
them, so that another session, which has nothing else, goes on in the same way (`recalled`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.checkpoint import TensorSpec
from inshrink_core.codec import TensorInput
from inshrink_core.ops.flat import as_float32
from inshrink_core.ops.lattice import GAIN_SLACK, MAX_GRADE, MIN_GRADE, Gain, Lattice
from inshrink_core.ops.shaping import SKETCHED, Factors, factorize, shape_changes

_DAMPING: Final = 2.0
"""Means of the diagonal of H that are added to it: stronger feedback makes deltas a fresh draw."""

_MOST_SHARE: Final = 0.8
"""From this share of plain rounding's cost on nothing is gained: inputs are nearly white."""

_POWER: Final = -0.33
"""Of the share, by which the spacing is coarser."""

_LEAST_SHARE: Final = 0.05
"""Less than that is foretold only by a sketch of too few moments."""

_SIDES: Final = (8, 1 << 14)
"""Columns of a matrix that is shaped; wider ones would leave G no bits."""

_DIGITS: Final = 2
"""Binary digits set, at most, in the number of a frame whose first moment counts."""

_BITS: Final = 11
"""Of a first moment in a sketch: decoded ones have fewer."""

_SLICE: Final = 1 << 18
"""Elements turned to float64 at a time: 2 MB."""

_TRIES: Final = 8
"""Halvings of the range of thresholds: 6 of 4096ths remain."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """What an encoder holds of a matrix's first moments.

    Parameters
    ----------
    n_seen
        Frames of the chain whose first moments were there.
    sketch : (columns, p)
        H times `signs_of`.
    trace
        Of H.
    factors
        Of H; None where shaping gains nothing.
    """

    n_seen: int
    sketch: NDArray[np.float64]
    trace: float
    factors: Factors | None

    @property
    def nbytes(self) -> int:
        """Bytes of sketch and factors."""
        return self.sketch.nbytes + (0 if self.factors is None else 2 * self.factors.gains.nbytes)


def grown(before: Shaping | None, moment: Tensor) -> Shaping | None:
    """Return what is known with one more first moment, in the shape of its matrix.

    Moments count, and factors are renewed, at frames whose number has two binary digits that are set at
    most: a factor that changes moves the points of many weights.
    """
    rows = moment.shape[0]
    n = moment.numel() // max(rows, 1)
    n_seen = 0 if before is None else before.n_seen
    if before is not None and n_seen.bit_count() > _DIGITS:
        return Shaping(n_seen + 1, before.sketch, before.trace, before.factors)
    values = as_float32(moment).cpu()
    largest = float(values.abs().max())
    if not 0 < largest < math.inf:
        return before  # NaN compares false, too
    signs = signs_of(n)
    # Whole numbers whose products and sums stay below 2**53: exact, whoever adds them up in whatever order.
    bits = min(_BITS, (52 - math.ceil(math.log2(values.numel()))) // 2)
    up = bits - math.frexp(largest)[1]
    found, squares = torch.zeros(n, signs.shape[1], dtype=torch.float64), 0.0
    step = max(1, _SLICE // n)
    for begin in range(0, rows, step):
        part = values[begin * n : (begin + step) * n].view(-1, n).double()
        whole = part.mul_(2.0**up).round_()
        found += whole.T @ (whole @ torch.from_numpy(signs))
        squares += float(whole.square().sum())
    sketch, trace = np.ldexp(found.numpy(), -2 * up), math.ldexp(squares, -2 * up)
    if before is not None:
        sketch, trace = before.sketch + sketch, before.trace + trace
    factors = factorize(sketch, signs, trace, _DAMPING)
    return Shaping(n_seen + 1, sketch, trace, factors if factors.share < _MOST_SHARE else None)


@functools.lru_cache(maxsize=16)
def signs_of(n: int) -> NDArray[np.float64]:
    """Return what a matrix of n columns is multiplied with: signs as of a coin, or one where all fit.

    Bits of splitmix64 (Steele, Lea and Flood, 2014), the same everywhere.
    """
    if n <= SKETCHED:
        return np.eye(n)
    z = (np.arange(1, n * SKETCHED + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    signs = 1.0 - 2.0 * ((z ^ (z >> np.uint64(31))) & np.uint64(1)).astype(np.float64)
    return signs.reshape(n, SKETCHED)


def can_be_shaped(spec: TensorSpec) -> bool:
    """Whether a tensor has columns enough to feed errors from one to the next, and not too many."""
    low, high = _SIDES
    return len(spec.shape) >= 2 and low <= spec.numel // max(spec.shape[0], 1) <= high


def known_of(item: TensorInput, before: Shaping | None) -> tuple[Shaping | None, Factors | None]:
    """Return what is known of a tensor with this frame, and what to feed forward.

    In a chain that has no first moment yet, or stores none, the frame's own serves once.
    """
    if not can_be_shaped(item.spec):
        return None, None
    if item.moment_before is not None:
        known = grown(before, item.moment_before)
        return known, None if known is None else known.factors
    own = item.momentum if item.gradient is None else item.gradient
    once = None if own is None or own.shape != item.spec.shape else grown(None, own)
    return before, None if once is None else once.factors


def coarser(factors: Factors | None) -> float:
    """Return how much coarser a spacing is for shaped rounding."""
    return 1.0 if factors is None else float(max(factors.share, _LEAST_SHARE) ** _POWER)


def shaped_changes(
    values: Tensor, integers: Tensor, lattice: Lattice, gain: Gain | None, factors: Factors
) -> Tensor:
    """Return the changes of a frame; under matched gain with thresholds that stand inside the feedback.

    The largest threshold is taken with which the movement is kept, as without feedback: by halving, since
    what is fed forward depends on it.
    """
    none = torch.zeros(1, dtype=torch.int32)
    if gain is None:
        return shape_changes(values, None, integers, lattice, none, factors).changes
    n_rows = gain.grades.numel()
    low, high = torch.full((n_rows,), MIN_GRADE), torch.full((n_rows,), MAX_GRADE + 1)
    tried = torch.zeros(n_rows, dtype=torch.int32)
    chosen = torch.full((n_rows,), MIN_GRADE)
    for number in range(_TRIES + 1):
        shaped = shape_changes(values, gain.base, integers, lattice, tried, factors)
        sums = shaped.leads if n_rows > 1 else shaped.leads.sum(0, keepdim=True)
        enough = sums[:, 0] + sums[:, 1] // GAIN_SLACK >= 0
        if number == 0:
            nearest = enough
        else:
            low, high = torch.where(enough, tried, low), torch.where(enough, high, tried)
        if bool(nearest.all()):
            return shaped.changes
        tried = torch.where(nearest, 0, (low + high) // 2).to(torch.int32)
    chosen = torch.where(nearest, 0, low).to(torch.int32)
    return shape_changes(values, gain.base, integers, lattice, chosen, factors).changes


class PastBlock(NamedTuple):
    """What recalling needs of one frame: whether its points were written, and shaped, and a first moment."""

    is_lattice: bool
    moved: bool
    shaped: bool
    moment: Tensor | None


def recalled(past: Iterable[PastBlock]) -> Shaping | None:
    """Return what an encoder that wrote some frames of a chain would know, from its keyframe on."""
    known: Shaping | None = None
    for frame in past:
        if not frame.is_lattice or (frame.moved and not frame.shaped):
            known = None
        elif frame.moved and frame.moment is not None:
            known = grown(known, frame.moment)
    return known
