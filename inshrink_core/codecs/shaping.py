"""Where the loss is flat, as first moments show it: what shaped rounding feeds forward, and how much.

Gradients of a matrix lie in few directions of its inputs; H, the sum of m'm over first moments m, says in
which. An encoder holds a sketch of it from frame to frame. It is of first moments as the archive decodes
them, so that another session, which has nothing else, goes on in the same way (`recalled`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inshrink_core.codec import DecodedMoment, TensorInput
from inshrink_core.codecs.foretold import bits_of
from inshrink_core.ops.flat import as_float32
from inshrink_core.ops.lattice import GAIN_SLACK, MAX_GRADE, MIN_GRADE, Gain, Lattice
from inshrink_core.ops.shaping import SKETCH_BITS, SKETCHED, Factors, factorize, shape_changes, sketch_sides

_DAMPING: Final = 2.0
"""Means of the diagonal of H that are added to it: stronger feedback makes deltas a fresh draw."""

BARE: Final = 0.1
"""Damping at which the share tells how uneven H is, sampling noise apart."""

_DAMPINGS: Final = (BARE, 0.5, 1.0, _DAMPING, 4.0, 8.0)
"""What ``auto`` chooses from, but for the first."""

_MOST_BARE: Final = 0.5
"""Share at that damping beyond which ``auto`` feeds nothing along a side: its inputs are nearly white."""

_WORTHWHILE: Final = 0.97
"""Of plain rounding's bits, at most what ``auto`` shapes for: less is within what is not foretold."""

_MOST_SHARE: Final = 0.8
"""From this share of plain rounding's cost on nothing is gained: inputs are nearly white."""

_POWER: Final = -0.33
"""Of the share, by which the spacing is coarser."""

_LEAST_SHARE: Final = 0.05
"""Less than that is foretold only by a sketch of too few moments."""

_DOUBT: Final = 0.5
"""Samples a column at which half of a promise, in octaves, is believed: errors cost five times what the
first moments of one frame foretell, and about as much as those of ten (``docs/design.md``)."""

_SIDES: Final = (8, 1 << 14)
"""Columns of a matrix that is shaped; wider ones would leave G no bits."""

_DIGITS: Final = 2
"""Binary digits set, at most, in the number of a frame whose first moment counts."""

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
    trace, noise
        Of H, and how much of it is rounding errors.
    samples
        Rows of the moments so far (of its columns: of their transposes).
    dampings
        Of the factors.
    """

    sketch: NDArray[np.float64]
    trace: float
    noise: float
    samples: int
    dampings: Sequence[float]

    @functools.cached_property
    def factors(self) -> Mapping[float, Factors]:
        """Of H, by damping; found when they are first asked for."""
        signs = signs_of(self.sketch.shape[0])
        found = factorize(self.sketch, signs, self.trace, self.dampings, self.noise)
        return dict(zip(self.dampings, found, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the sketch, and of factors where they were asked for."""
        known: Mapping[float, Factors] = vars(self).get("factors", {})
        return self.sketch.nbytes + sum(2 * one.gains.nbytes for one in known.values())

    @property
    def certainty(self) -> float:
        """What is left, as a power, of the share that a sketch of so few samples promises."""
        return float(self.samples / (self.samples + _DOUBT * self.sketch.shape[0]))

    @property
    def choices(self) -> tuple[Factors, ...]:
        """What may be fed along this side; nothing where H is not uneven enough, or that is not known."""
        bare = self.factors.get(BARE)
        if bare is None or not bare.share <= _MOST_BARE:
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

    def is_fed(self, shaping: str) -> bool:
        """Whether anything may be fed forward, by the setting of the codec of weights."""
        if shaping == "auto":
            return bool(self.columns.choices or (self.rows is not None and self.rows.choices))
        return self.fed() is not None

    def fed(self) -> Fed | None:
        """Return what to feed forward as a setting says; None where little is gained."""
        columns = self.columns.factors.get(_DAMPING)
        if columns is None:
            return None
        by_row = None if self.rows is None else self.rows.factors.get(_DAMPING)
        if by_row is not None and by_row.share >= _MOST_SHARE:
            by_row = None
        return None if by_row is None and columns.share >= _MOST_SHARE else Fed(columns, by_row)

    def for_moment(self, size: float) -> tuple[Fed, float] | None:
        """Return what to feed forward where a first moment is rounded, and how much wider its unit may be.

        It is not stored as a change, so what is fed to it costs no more than what it adds to its size.

        Parameters
        ----------
        size
            Mean square of the moment in units of plain rounding.

        Returns
        -------
        fed, wider
            At about an equal cost; None where the matrix is nearly white, or has few rows.
        """
        along, down = self.columns.choices, () if self.rows is None else self.rows.choices
        if self.rows is None or not (along or down):
            return None

        def share(fed: Fed) -> float:
            by_row = 1.0 if fed.rows is None or self.rows is None else fed.rows.share**self.rows.certainty
            return float(max(fed.columns.share**self.columns.certainty * by_row, _LEAST_SHARE))

        rows = self.rows.factors if down else {}
        choices = [Fed(one, rows.get(damping)) for damping, one in self.columns.factors.items()][1:]
        best = min(choices, key=lambda fed: size * share(fed) + (fed.variance - 1.0) / 12.0)
        return best, float(share(best) ** -0.5)

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


def grown(before: Shaping | None, moment: DecodedMoment, shaping: str = "moments") -> Shaping | None:
    """Return what is known with one more first moment, in the shape of its matrix.

    Parameters
    ----------
    before
        What was known.
    moment
        Decodes it, and says what share of its squares is rounding errors; not called where it does not count.
    shaping
        The setting of the codec of weights; ``moments`` where first moments themselves are rounded.

    Notes
    -----
    Moments count, and factors are renewed, at frames whose number has two binary digits that are set at
    most: a factor that changes moves the points of many weights.
    """
    n_seen, both = 0 if before is None else before.n_seen, shaping != "on"
    dampings = _DAMPINGS if shaping in ("auto", "moments") else (_DAMPING,)
    if before is not None and n_seen.bit_count() > _DIGITS:
        return Shaping(n_seen + 1, before.columns, before.rows if both else None)
    decoded, noise = moment()
    values = as_float32(decoded).cpu().view(decoded.shape[0], -1)
    lowest, highest = values.aminmax()
    largest = max(-float(lowest), float(highest))
    if not 0 < largest < math.inf:
        return before  # NaN compares false, too
    # Whole numbers whose products and sums stay below 2**53: exact, whoever adds them up in whatever order.
    bits = min(SKETCH_BITS, (52 - math.ceil(math.log2(values.numel()))) // 2)
    up = bits - math.frexp(largest)[1]
    low, high = _SIDES
    n_rows, n = values.shape
    down = both and low <= n_rows <= high
    found = sketch_sides(values, up, signs_of(n), signs_of(n_rows) if down else None)
    kept = (None, None) if before is None else (before.columns, before.rows)
    columns = _side(kept[0], found.columns, found.square, noise, n_rows, dampings)
    rows = None
    if found.rows is not None:
        rows = _side(kept[1], found.rows, found.square, noise, n, dampings)
    return Shaping(n_seen + 1, columns, rows)


def _side(
    before: Side | None,
    sketch: NDArray[np.float64],
    trace: float,
    noise: float,
    samples: int,
    dampings: Sequence[float],
) -> Side:
    """Return a side with the sketch of one more moment."""
    noise *= trace
    if before is not None:
        sketch, trace, noise = before.sketch + sketch, before.trace + trace, before.noise + noise
        samples += before.samples
    return Side(sketch, trace, noise, samples, dampings)


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


def known_of(
    item: TensorInput, before: Shaping | None, shaping: str, movement: float
) -> tuple[Shaping | None, Fed | None]:
    """Return what is known of a tensor with this frame, and what to feed forward, by the codec's setting.

    In a chain that has no first moment yet, or stores none, the frame's own serves once. `movement` is as for
    `Shaping.chosen`.
    """
    if not can_be_shaped(item.spec.shape):
        return None, None

    def fed(known: Shaping | None) -> Fed | None:
        if known is None:
            return None
        return known.chosen(movement) if shaping == "auto" else known.fed()

    if item.moment_before is not None:
        known = grown(before, item.moment_before, shaping)
        return known, fed(known)
    own = item.momentum if item.gradient is None else item.gradient
    if own is None or own.shape != item.spec.shape:
        return before, None
    return before, fed(grown(None, lambda: (own, 0.0), shaping))


def shaped_changes(values: Tensor, integers: Tensor, lattice: Lattice, gain: Gain | None, fed: Fed) -> Tensor:
    """Return the changes of a frame; under matched gain with thresholds that stand inside the feedback.

    The largest threshold is taken with which the movement is kept, as without feedback: by trial, since what
    is fed forward depends on it.
    """
    known = torch.zeros(1, dtype=torch.int32)
    if gain is None:
        return shape_changes(values, None, integers, lattice, known, *fed).changes
    n_rows = gain.grades.numel()
    grades, search = known.expand(n_rows).contiguous(), _Thresholds(n_rows)
    best: Tensor | None = None
    while True:
        changes, leads = shape_changes(values, gain.base, integers, lattice, grades, *fed)
        enough = search.told(grades, leads if n_rows > 1 else leads.sum(0, keepdim=True))
        if search.is_over:
            break
        # Of several rows each has its own threshold, and what one is fed depends on those of others.
        best = changes if n_rows == 1 and enough else best
        grades = search.next()
    if torch.equal(search.found, grades):
        return changes
    if best is not None:
        return best
    return shape_changes(values, gain.base, integers, lattice, search.found, *fed).changes


class _Thresholds:
    """Looks for the largest threshold of each row with which its movement is kept.

    By false position, where one end stays twice with half its value (Illinois). From whole numbers by single
    operations, so that a threshold is the same everywhere. About four passes over a tensor.
    """

    def __init__(self, n_rows: int) -> None:
        self._low, self._high = torch.full((n_rows,), MIN_GRADE), torch.full((n_rows,), MAX_GRADE)
        self._above, self._below = (
            torch.zeros(n_rows, dtype=torch.int64),
            torch.zeros(n_rows, dtype=torch.int64),
        )
        self._done = torch.zeros(n_rows, dtype=torch.bool)
        self._nearest = self._done
        self._n_told = 0

    def told(self, grades: Tensor, sums: Tensor) -> bool:
        """Take in how far the movements of the rows are exceeded at some thresholds; whether all are kept."""
        slack = sums[:, 1] // GAIN_SLACK
        lead = sums[:, 0] + slack
        enough = lead >= 0
        if self._n_told == 0:
            self._nearest = self._done = enough
            self._below = lead
        else:
            again_low, again_high = enough & (self._above > 0), ~enough & (self._below < 0)
            self._below = torch.where(again_low, self._below // 2, torch.where(enough, self._below, lead))
            self._above = torch.where(
                again_high, self._above // 2, torch.where(enough, lead + 1, self._above)
            )
            self._low = torch.where(enough, grades, self._low)
            self._high = torch.where(enough, self._high, grades)
            near = enough & (lead <= 2 * slack)
            self._done = self._done | near | (self._high - self._low <= _CLOSE)
        self._n_told += 1
        return bool(enough.all())

    @property
    def is_over(self) -> bool:
        """Whether all are found, or near enough."""
        return self._n_told > _TRIES or bool(self._done.all())

    @property
    def found(self) -> Tensor:
        """The largest thresholds that kept the movement, the smallest that there is where none has."""
        return torch.where(self._nearest, 0, self._low).to(torch.int32)

    def next(self) -> Tensor:
        """Return the thresholds to try next."""
        span = self._high - self._low
        share = self._above.double() / (self._above - self._below).clamp(min=1)
        ahead = torch.where(self._above > 0, (span * share).long(), span // 2)
        tried = self._low + ahead.clamp(min=_CLOSE // 2).minimum((span - _CLOSE // 2).clamp(min=1))
        return torch.where(self._nearest, 0, torch.where(self._done, self._low, tried)).to(torch.int32)


class PastBlock(NamedTuple):
    """What recalling needs of one frame: whether points were written and moved, how, and a first moment."""

    is_lattice: bool
    moved: bool
    shaping: str
    moment: DecodedMoment | None


def recalled(past: Iterable[PastBlock]) -> Shaping | None:
    """Return what an encoder that wrote some frames of a chain would know, from its keyframe on."""
    known: Shaping | None = None
    for frame in past:
        if not frame.is_lattice or (frame.moved and frame.shaping == "off"):
            known = None
        elif frame.moved and frame.moment is not None:
            known = grown(known, frame.moment, frame.shaping)
    return known
