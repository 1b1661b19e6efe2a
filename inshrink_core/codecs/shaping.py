"""Error feedback of the lattice codec: which rounding errors to feed forward, and how strongly.

The gradients of a matrix lie in few directions of its inputs. These are the main directions of H = Σ mᵀm over
first moments m, and the loss is flat in the others. The encoder state holds a sketch of H. It is computed
from first moments as the archive decodes them, so another session can restore it from the archive alone
(`LatticeCodec.recall`).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.checkpoint import TensorRole
from inshrink_core.codec import DecodedMoment, TensorInput
from inshrink_core.ops.cpu.factors import factorize
from inshrink_core.ops.flat import as_float32
from inshrink_core.ops.lattice import GAIN_SLACK, MAX_GRADE, MIN_GRADE, Lattice
from inshrink_core.ops.shaping import SKETCH_BITS, SKETCHED, Factors, shape_changes, sketch_sides

_N_SIZES: Final = 16
_SIZES: Final = tuple(NormalDist().inv_cdf(0.5 + (i + 0.5) / (2 * _N_SIZES)) for i in range(_N_SIZES))
"""Movements in root mean squares: the medians of equally likely parts of a normal distribution."""

_SPREADS: Final[tuple[float, ...]] = (0.0, *(2.0 ** (j / 8) for j in range(-80, 41)))
"""Tabulated root mean squares in step sizes; values in between are interpolated linearly."""

_TABLE_DIGITS: Final = 9
"""Decimal digits of a table entry, so that no result depends on the last bit of a logarithm."""

_ROUNDS: Final = 8
"""Most iterations; each leaves at most about half of the remaining error."""

_SETTLED: Final = 1e-6
"""Relative change of the spread below which the iteration stops."""


def _rounded(spread: float) -> tuple[float, float]:
    """Return the bits a weight, and the mean squared change of its rounding error over the error's variance.

    The second number is 2 for an independent new error. Both are averages over the weight's position in its
    cell: a weight that moves by a fraction r of the step size crosses to the next cell with probability r.
    """
    chances: dict[int, float] = {}
    change = 0.0
    for size in _SIZES:
        integer, rest = divmod(spread * size, 1.0)
        change += 12 * rest * (1 - rest) / _N_SIZES
        for number, chance in ((int(integer), 1 - rest), (int(integer) + 1, rest)):
            chances[number] = chances.get(number, 0.0) + chance / _N_SIZES
    # Both signs are equally likely.
    bits = math.fsum(-p * math.log2(p / 2 if number else p) for number, p in chances.items() if p > 0)
    return round(bits, _TABLE_DIGITS), round(change, _TABLE_DIGITS)


_TABLE: Final = ((0.0, 0.0), *map(_rounded, _SPREADS[1:]))
_BITS: Final = tuple(bits for bits, _ in _TABLE)
_CHANGES: Final = tuple(change for _, change in _TABLE)


def _at(table: tuple[float, ...], spread: float) -> float:
    """Return the interpolated table entry for a spread; the last entry beyond the table."""
    i = bisect.bisect_right(_SPREADS, spread)
    if i == len(_SPREADS):
        return table[-1]
    below, last = _SPREADS[i - 1], table[i - 1]
    return last + (table[i] - last) * (spread - below) / (_SPREADS[i] - below)


@functools.lru_cache(maxsize=1 << 14)
def bits_of(movement: float, variance: float) -> float:
    """Return the predicted bits a weight of a delta frame, without context modelling.

    Parameters
    ----------
    movement
        Root mean square of the weights' movement between frames, in step sizes.
    variance
        Variance of errors over that of plain rounding (`inshrink_core.ops.shaping.Factors`), at least 1.

    Notes
    -----
    Let m be the movement and v the variance. The feedback added to a weight is a sum of other weights'
    rounding errors and has variance f = (v − 1)/12. Between frames it changes by the same sum of their
    changes, so the observed movement s satisfies

    s² = m² + f·c(s),

    where c(s) is the mean squared change of an error over its variance. The largest solution is found by
    iteration from above. Only single float64 operations and square roots are used, so that the result is
    the same on every machine.

    Examples
    --------
    >>> bits_of(0.1, 1.0) < bits_of(0.1, 1.2) < bits_of(0.3, 1.2)
    True
    """
    feedback = (variance - 1.0) / 12.0
    spread = math.sqrt(movement * movement + 2.0 * feedback)
    for _ in range(_ROUNDS if feedback > 0 else 0):
        before, spread = spread, math.sqrt(movement * movement + feedback * _at(_CHANGES, spread))
        if before - spread <= _SETTLED * before:
            break
    return _at(_BITS, spread)


_BARE: Final = 0.1
"""Damping at which the share measures the anisotropy of H, apart from sampling noise."""

_DAMPINGS: Final = (8.0, 4.0, 2.0, 1.0, 0.5)
"""Dampings, in means of the diagonal of H, that are added to it. Less damping is stronger feedback, which
makes deltas less predictable."""

_MAX_BARE: Final = 0.5
"""Largest share at that damping for feedback along a side; above it, the inputs are nearly white."""

_WORTHWHILE: Final = 0.97
"""Largest predicted rate, relative to plain rounding, that justifies error feedback; smaller gains are within
the prediction error."""

_POWER: Final = -0.33
"""Exponent of the share in the growth of the step size."""

_LEAST_SHARE: Final = 0.05
"""Lower bound of a predicted share; only sketches of too few moments predict less."""

_SIDES: Final = (8, 1 << 14)
"""Range of the number of columns of a matrix with error feedback; more would leave G no bits."""

_DIGITS: Final = 2
"""Most binary digits set in the number of a frame whose first moment is used."""

_OF_WEIGHTS: Final = (TensorRole.EXP_AVG, TensorRole.MOMENTUM)
_OF_MASTERS: Final = (TensorRole.MOMENTUM,)
"""Roles whose tensor in the current frame is used while a chain has no first moment."""

_TRIES: Final = 8
"""Most thresholds to try."""

_CLOSE: Final = 16
"""Tolerance of a threshold, in 4096ths of the step size."""


@dataclass(frozen=True, eq=False)
class Side:
    """Sketch of a matrix's first moments along one side: its columns or its rows.

    Parameters
    ----------
    sketch : (n, 32)
        H times `signs_of`.
    trace
        Trace of H.
    """

    sketch: NDArray[np.float64]
    trace: float

    @functools.cached_property
    def factors(self) -> tuple[Factors, ...]:
        """Factors of H, strongest feedback first; only the weakest if H is nearly isotropic or not known."""
        made = factorize(self.sketch, signs_of(self.sketch.shape[0]), self.trace, (_BARE, *_DAMPINGS))
        bare, weakest = next(made), next(made)
        return (*reversed(list(made)), weakest) if bare.share <= _MAX_BARE else (weakest,)

    @property
    def choices(self) -> tuple[Factors, ...]:
        """Feedback factors for this side; empty if H is nearly isotropic or not known."""
        return self.factors if len(self.factors) > 1 else ()


@dataclass(frozen=True, slots=True)
class Shaping:
    """The encoder state of a matrix: what is known of its first moments.

    Parameters
    ----------
    n_seen
        Number of the chain's frames with first moments.
    columns, rows
        The two sides; `rows` is None if errors are not fed down the rows.
    """

    n_seen: int
    columns: Side
    rows: Side | None

    @property
    def has_feedback(self) -> bool:
        """Whether error feedback is possible along a side."""
        return bool(self.columns.choices or (self.rows is not None and self.rows.choices))

    def chosen(self, movement: float) -> Feedback | None:
        """Return the feedback that minimizes the predicted rate at equal cost; None for no feedback.

        The rate is ``bits_of(m sqrt(s), v)`` for the movement m, the share s and the variance v.

        Parameters
        ----------
        movement
            Root mean square of the weights' movement between frames, in step sizes of plain rounding.
        """
        along, down = self.columns.choices, () if self.rows is None else self.rows.choices
        if not along and down:  # feedback down the columns only: almost none along the rows
            along = self.columns.factors
        if not along:
            return None

        def bits(feedback: Feedback) -> float:
            return bits_of(movement * math.sqrt(feedback.share), feedback.variance)

        # Optimize one side at a time: they interact only through the product of their variances.
        best = min((Feedback(columns, None) for columns in along), key=bits)
        best = min((best, *(Feedback(best.columns, rows) for rows in down)), key=bits)
        best = min((best, *(Feedback(columns, best.rows) for columns in along)), key=bits)
        return best if bits(best) < _WORTHWHILE * bits_of(movement, 1.0) else None


class Feedback(NamedTuple):
    """Factors of columns, and of rows if errors are also fed down them."""

    columns: Factors
    rows: Factors | None

    @property
    def share(self) -> float:
        """Predicted cost over that of plain rounding with the same step size."""
        return max(self.columns.share * (1.0 if self.rows is None else self.rows.share), _LEAST_SHARE)

    @property
    def variance(self) -> float:
        """Mean variance of an error over that of plain rounding."""
        return self.columns.variance * (1.0 if self.rows is None else self.rows.variance)

    @property
    def coarser(self) -> float:
        """Factor of the step size over that of plain rounding: about the cubic root of 1 / `share`."""
        return float(self.share**_POWER)


def grown(before: Shaping | None, moment: DecodedMoment, shape: Sequence[int]) -> Shaping | None:
    """Return the encoder state with one more first moment m: each sketch H S grows by ``mᵀ m S``.

    Parameters
    ----------
    before
        The state before.
    moment
        Decodes the first moment; not called if the frame's moment is not used.
    shape
        Shape of the matrix. A moment of another shape, from before a resize, is not used.

    Notes
    -----
    Moments are added, and factors recomputed, only at frames whose number has at most two binary digits set,
    because new factors change the points of many weights.
    """
    n_seen = 0 if before is None else before.n_seen
    if before is not None and n_seen.bit_count() > _DIGITS:
        return Shaping(n_seen + 1, before.columns, before.rows)
    decoded = moment()
    if decoded.shape != tuple(shape):
        return before
    values = as_float32(decoded).view(decoded.shape[0], -1)
    lowest, highest = values.aminmax()
    largest = max(-float(lowest), float(highest))
    if not 0 < largest < math.inf:
        return before  # also for NaN, which fails every comparison
    # Integers whose products and sums stay below 2**53, so that sums are exact in any order.
    bits = min(SKETCH_BITS, (52 - math.ceil(math.log2(values.numel()))) // 2)
    up = bits - math.frexp(largest)[1]
    low, high = _SIDES
    n_rows, n = values.shape
    row_signs = signs_of(n_rows) if low <= n_rows <= high else None
    by_column, by_row, square = sketch_sides(values, up, signs_of(n), row_signs)
    columns = _side(before.columns if before else None, by_column, square)
    rows = None if by_row is None else _side(before.rows if before else None, by_row, square)
    return Shaping(n_seen + 1, columns, rows)


def _side(before: Side | None, sketch: NDArray[np.float64], trace: float) -> Side:
    """Return a side with one more moment added to the sketch."""
    return Side(sketch, trace) if before is None else Side(before.sketch + sketch, before.trace + trace)


@functools.lru_cache(maxsize=16)
def signs_of(n: int) -> NDArray[np.float64]:
    """Return the sketching matrix for n columns: random signs, or the identity if n is small.

    The signs are bits of splitmix64 (Steele, Lea and Flood, 2014) and the same on every machine.
    """
    if n <= SKETCHED:
        return np.eye(n, SKETCHED)
    z = (np.arange(1, n * SKETCHED + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    signs = 1.0 - 2.0 * ((z ^ (z >> np.uint64(31))) & np.uint64(1)).astype(np.float64)
    return signs.reshape(n, SKETCHED)


def can_be_shaped(shape: Sequence[int]) -> bool:
    """Whether a tensor's number of columns is in the range for error feedback."""
    low, high = _SIDES
    return len(shape) >= 2 and low <= math.prod(shape[1:]) <= high and shape[0] > 0


def known_of(
    item: TensorInput, before: Shaping | None, movement: float
) -> tuple[Shaping | None, Feedback | None]:
    """Return the encoder state of a tensor including this frame, and the feedback to apply.

    In a chain without first moments so far, the frame's own moment is used once. `movement` is as in
    `Shaping.chosen`.
    """
    if not can_be_shaped(item.spec.shape):
        return None, None
    if item.moment_before is not None:
        known = grown(before, item.moment_before, item.spec.shape)
        return known, None if known is None else known.chosen(movement)
    moment = item.auxiliary(*(_OF_WEIGHTS if item.spec.role is TensorRole.WEIGHT else _OF_MASTERS))
    if moment is None:
        return before, None
    once = grown(None, lambda: moment, item.spec.shape)
    return before, None if once is None else once.chosen(movement)


def shaped_changes(
    values: Tensor, integers: Tensor, lattice: Lattice, base: Tensor | None, feedback: Feedback
) -> Tensor:
    """Return the changes of a frame with error feedback; with a base, under matched gain.

    Under matched gain, this finds the largest threshold that preserves the movement as without feedback.
    The search evaluates each threshold, since the feedback depends on it. It uses the Illinois variant of
    false position, which halves the value at an end that stays twice. A threshold is computed
    from integers by single operations, so it is the same on every machine.
    """
    changes, lead, square = shape_changes(values, base, integers, lattice, 0, *feedback)
    slack = square // GAIN_SLACK
    if base is None or lead + slack >= 0:
        return changes
    best: Tensor | None = None
    low, high, above, below = MIN_GRADE, MAX_GRADE, 0, lead + slack
    for _ in range(_TRIES):
        span = high - low
        ahead = int(span * (float(above) / float(max(above - below, 1)))) if above > 0 else span // 2
        grade = low + min(max(ahead, _CLOSE // 2), max(span - _CLOSE // 2, 1))
        changes, lead, square = shape_changes(values, base, integers, lattice, grade, *feedback)
        slack = square // GAIN_SLACK
        lead += slack
        if lead >= 0:
            best, low = changes, grade
            below, above = (below // 2 if above > 0 else below), lead + 1
        else:
            high = grade
            above, below = (above // 2 if below < 0 else above), lead
        if 0 <= lead <= 2 * slack or high - low <= _CLOSE:
            break
    return shape_changes(values, base, integers, lattice, low, *feedback)[0] if best is None else best
