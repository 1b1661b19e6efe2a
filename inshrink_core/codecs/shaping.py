"""Where the loss is flat, as first moments show it: what shaped rounding feeds forward, and how much.

Gradients of a matrix lie in few directions of its inputs; H, the sum of m'm over first moments m, says in
which. An encoder holds a sketch of it from frame to frame. It is of first moments as the archive decodes
them, so that another session, which has nothing else, goes on in the same way (`LatticeCodec.recall`).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
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
"""Of movements, in root mean squares: the middles of as many equal parts of a normal distribution."""

_SPREADS: Final[tuple[float, ...]] = (0.0, *(2.0 ** (j / 8) for j in range(-80, 41)))
"""Root mean squares, in spacings, that are tabled; in between lines are drawn."""

_TABLE_DIGITS: Final = 9
"""Decimal digits of a table, so that no last bit of a logarithm decides."""

_ROUNDS: Final = 8
"""Steps of the iteration at most: each leaves at most about half of what is missing."""

_SETTLED: Final = 1e-6
"""Share of a spread that a step has to change for another one."""


def _rounded(spread: float) -> tuple[float, float]:
    """Return bits, and the mean squared change of an error over its variance, which is 2 for a new one.

    An average over where in its cell a value lies: one that moves by a of a spacing crosses with a chance a.
    """
    chances: dict[int, float] = {}
    change = 0.0
    for size in _SIZES:
        integer, rest = divmod(spread * size, 1.0)
        change += 12 * rest * (1 - rest) / _N_SIZES
        for number, chance in ((int(integer), 1 - rest), (int(integer) + 1, rest)):
            chances[number] = chances.get(number, 0.0) + chance / _N_SIZES
    # Both signs are as likely.
    bits = math.fsum(-p * math.log2(p / 2 if number else p) for number, p in chances.items() if p > 0)
    return round(bits, _TABLE_DIGITS), round(change, _TABLE_DIGITS)


_TABLE: Final = ((0.0, 0.0), *map(_rounded, _SPREADS[1:]))
_BITS: Final = tuple(bits for bits, _ in _TABLE)
_CHANGES: Final = tuple(change for _, change in _TABLE)


def _at(table: tuple[float, ...], spread: float) -> float:
    """Return what a table has for a spread; its last entry beyond."""
    i = bisect.bisect_right(_SPREADS, spread)
    if i == len(_SPREADS):
        return table[-1]
    below, last = _SPREADS[i - 1], table[i - 1]
    return last + (table[i] - last) * (spread - below) / (_SPREADS[i] - below)


@functools.lru_cache(maxsize=1 << 14)
def bits_of(movement: float, variance: float) -> float:
    """Return the bits a weight of a delta, without contexts.

    Parameters
    ----------
    movement
        Root mean square of how far weights move, in spacings.
    variance
        Of errors over that of plain rounding (`inshrink_core.ops.shaping.Factors`), at least 1.

    Notes
    -----
    What is fed to a weight is a sum of other weights' rounding errors, its variance (variance - 1)/12; from
    one frame to the next it changes by the same sum of their changes. So the variance of what a weight is
    seen to move by is that of its movement and ``(variance - 1)/12`` times the change of errors, which
    depends on it: the largest solution, by iteration from above. Single operations and square roots of
    float64 alone: the same everywhere.

    Examples
    --------
    >>> bits_of(0.1, 1.0) < bits_of(0.1, 1.2) < bits_of(0.3, 1.2)
    True
    """
    fed = (variance - 1.0) / 12.0
    spread = math.sqrt(movement * movement + 2.0 * fed)
    for _ in range(_ROUNDS if fed > 0 else 0):
        before, spread = spread, math.sqrt(movement * movement + fed * _at(_CHANGES, spread))
        if before - spread <= _SETTLED * before:
            break
    return _at(_BITS, spread)


BARE: Final = 0.1
"""Damping at which the share tells how uneven H is, sampling noise apart."""

_DAMPINGS: Final = (BARE, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Means of the diagonal of H that are added to it: stronger feedback makes deltas a fresh draw. All but the
first are chosen from."""

_MOST_BARE: Final = 0.5
"""Share at that damping beyond which nothing is fed along a side: its inputs are nearly white."""

_WORTHWHILE: Final = 0.97
"""Of plain rounding's bits, at most what is shaped for: less is within what is not foretold."""

_POWER: Final = -0.33
"""Of the share, by which the spacing is coarser."""

_LEAST_SHARE: Final = 0.05
"""Less than that is foretold only by a sketch of too few moments."""

_SIDES: Final = (8, 1 << 14)
"""Columns of a matrix that is shaped; wider ones would leave G no bits."""

_DIGITS: Final = 2
"""Binary digits set, at most, in the number of a frame whose first moment counts."""

_OF_WEIGHTS: Final = (TensorRole.EXP_AVG, TensorRole.MOMENTUM)
_OF_MASTERS: Final = (TensorRole.MOMENTUM,)
"""What serves once where a chain has no first moment yet."""

_TRIES: Final = 8
"""Thresholds that are tried at most."""

_CLOSE: Final = 16
"""4096ths of a spacing that a threshold may be off."""


@dataclass(frozen=True, eq=False)
class Side:
    """What is known of a matrix's first moments from one side: of its columns, or of its rows.

    Parameters
    ----------
    sketch : (n, 32)
        H times `signs_of`.
    trace
        Of H.
    """

    sketch: NDArray[np.float64]
    trace: float

    @functools.cached_property
    def factors(self) -> Mapping[float, Factors]:
        """Of H, by damping; found when they are first asked for."""
        signs = signs_of(self.sketch.shape[0])
        return dict(zip(_DAMPINGS, factorize(self.sketch, signs, self.trace, _DAMPINGS), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the sketch, and of factors where they were asked for."""
        known: Mapping[float, Factors] = vars(self).get("factors", {})
        return self.sketch.nbytes + sum(2 * factors.gains.nbytes for factors in known.values())

    @property
    def choices(self) -> tuple[Factors, ...]:
        """What may be fed along this side; nothing where H is not uneven enough, or that is not known."""
        if not self.factors[BARE].share <= _MOST_BARE:
            return ()
        return tuple(self.factors[damping] for damping in _DAMPINGS[1:])


@dataclass(frozen=True, slots=True)
class Shaping:
    """What an encoder holds of a matrix's first moments.

    Parameters
    ----------
    n_seen
        Frames of the chain whose first moments were there.
    columns, rows
        Of both sides; None where errors are not fed down the rows.
    """

    n_seen: int
    columns: Side
    rows: Side | None

    @property
    def nbytes(self) -> int:
        """Bytes of sketches and factors."""
        return self.columns.nbytes + (0 if self.rows is None else self.rows.nbytes)

    @property
    def is_fed(self) -> bool:
        """Whether anything may be fed forward."""
        return bool(self.columns.choices or (self.rows is not None and self.rows.choices))

    def chosen(self, movement: float) -> Fed | None:
        """Return what to feed forward so that deltas take least at an equal cost; None for nothing.

        Parameters
        ----------
        movement
            How far weights move from frame to frame, root mean square, in spacings of plain rounding.
        """
        along, down = self.columns.choices, () if self.rows is None else self.rows.choices
        if not along and down:  # fed down its columns alone: next to nothing along the rows
            along = (self.columns.factors[_DAMPINGS[-1]],)
        if not along:
            return None

        def bits(fed: Fed) -> float:
            return bits_of(movement * math.sqrt(fed.share), fed.variance)

        # One side after the other: what they share is but the product of their variances.
        best = min((Fed(columns, None) for columns in along), key=bits)
        best = min((best, *(Fed(best.columns, rows) for rows in down)), key=bits)
        best = min((best, *(Fed(columns, best.rows) for columns in along)), key=bits)
        return best if bits(best) < _WORTHWHILE * bits_of(movement, 1.0) else None


class Fed(NamedTuple):
    """Factors of columns, and of rows where errors are fed down them."""

    columns: Factors
    rows: Factors | None

    @property
    def share(self) -> float:
        """Cost over that of plain rounding with the same spacing, as predicted."""
        return max(self.columns.share * (1.0 if self.rows is None else self.rows.share), _LEAST_SHARE)

    @property
    def variance(self) -> float:
        """Mean variance of an error over that of plain rounding."""
        return self.columns.variance * (1.0 if self.rows is None else self.rows.variance)

    @property
    def coarser(self) -> float:
        """How much coarser a spacing may be than with plain rounding: a cubic root of what is gained."""
        return float(self.share**_POWER)


def grown(before: Shaping | None, moment: DecodedMoment) -> Shaping | None:
    """Return what is known with one more first moment, in the shape of its matrix.

    Parameters
    ----------
    before
        What was known.
    moment
        Decodes it; not called where it does not count.

    Notes
    -----
    Moments count, and factors are renewed, at frames whose number has two binary digits that are set at
    most: a factor that changes moves the points of many weights.
    """
    n_seen = 0 if before is None else before.n_seen
    if before is not None and n_seen.bit_count() > _DIGITS:
        return Shaping(n_seen + 1, before.columns, before.rows)
    decoded = moment()
    values = as_float32(decoded).view(decoded.shape[0], -1)
    lowest, highest = values.aminmax()
    largest = max(-float(lowest), float(highest))
    if not 0 < largest < math.inf:
        return before  # NaN compares false, too
    # Whole numbers whose products and sums stay below 2**53: exact, whoever adds them up in whatever order.
    bits = min(SKETCH_BITS, (52 - math.ceil(math.log2(values.numel()))) // 2)
    up = bits - math.frexp(largest)[1]
    low, high = _SIDES
    n_rows, n = values.shape
    found = sketch_sides(values, up, signs_of(n), signs_of(n_rows) if low <= n_rows <= high else None)
    columns = _side(None if before is None else before.columns, found.columns, found.square)
    rows = None
    if found.rows is not None:
        rows = _side(None if before is None else before.rows, found.rows, found.square)
    return Shaping(n_seen + 1, columns, rows)


def _side(before: Side | None, sketch: NDArray[np.float64], trace: float) -> Side:
    """Return a side with the sketch of one more moment."""
    return Side(sketch, trace) if before is None else Side(before.sketch + sketch, before.trace + trace)


@functools.lru_cache(maxsize=16)
def signs_of(n: int) -> NDArray[np.float64]:
    """Return what a matrix of n columns is multiplied with: signs as of a coin, or one where all fit.

    Bits of splitmix64 (Steele, Lea and Flood, 2014), the same everywhere.
    """
    if n <= SKETCHED:
        return np.eye(n, SKETCHED)
    z = (np.arange(1, n * SKETCHED + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    signs = 1.0 - 2.0 * ((z ^ (z >> np.uint64(31))) & np.uint64(1)).astype(np.float64)
    return signs.reshape(n, SKETCHED)


def can_be_shaped(shape: Sequence[int]) -> bool:
    """Whether a tensor has columns enough to feed errors from one to the next, and not too many."""
    low, high = _SIDES
    return len(shape) >= 2 and low <= math.prod(shape[1:]) <= high and shape[0] > 0


def known_of(item: TensorInput, before: Shaping | None, movement: float) -> tuple[Shaping | None, Fed | None]:
    """Return what is known of a tensor with this frame, and what to feed forward.

    In a chain that has no first moment yet, or stores none, the frame's own serves once. `movement` is as for
    `Shaping.chosen`.
    """
    if not can_be_shaped(item.spec.shape):
        return None, None
    if item.moment_before is not None:
        known = grown(before, item.moment_before)
        return known, None if known is None else known.chosen(movement)
    moment = item.companion(*(_OF_WEIGHTS if item.spec.role is TensorRole.WEIGHT else _OF_MASTERS))
    if moment is None or moment.shape != item.spec.shape:
        return before, None
    once = grown(None, lambda: moment)
    return before, None if once is None else once.chosen(movement)


def shaped_changes(
    values: Tensor, integers: Tensor, lattice: Lattice, base: Tensor | None, fed: Fed
) -> Tensor:
    """Return the changes of a frame; with a base, under matched gain.

    The largest threshold is taken with which the movement is kept, as without feedback: by trial, since what
    is fed forward depends on it. By false position, where one end stays twice with half its value (Illinois);
    from whole numbers by single operations, so that a threshold is the same everywhere.
    """
    changes, lead, square = shape_changes(values, base, integers, lattice, 0, *fed)
    slack = square // GAIN_SLACK
    if base is None or lead + slack >= 0:
        return changes
    best: Tensor | None = None
    low, high, above, below = MIN_GRADE, MAX_GRADE, 0, lead + slack
    for _ in range(_TRIES):
        span = high - low
        ahead = int(span * (float(above) / float(max(above - below, 1)))) if above > 0 else span // 2
        grade = low + min(max(ahead, _CLOSE // 2), max(span - _CLOSE // 2, 1))
        changes, lead, square = shape_changes(values, base, integers, lattice, grade, *fed)
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
    return shape_changes(values, base, integers, lattice, low, *fed).changes if best is None else best
