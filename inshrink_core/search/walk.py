"""Walks over search spaces: each candidate is measured once, between the finest and the coarsest."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic

from inshrink_core.search.space import Cube, CubePoint, Point, three_digits

# Power of the coarseness that figures are assumed to grow with before two measurements exist: they are
# quadratic in the error. A fitted power outside of the range is noise.
_POWER: Final = 2.0
_POWERS: Final = (0.5, 4.0)

# Share of a bound to aim at, so that the next measurement is more likely within the bound than beyond it.
_AIM: Final = 0.93

# The walk ends when the ratio of a coarseness that breaks the bounds to one that keeps them falls below this;
# a share of a bound within this factor of 1 is good enough.
_TOLERANCE: Final = 1.05
_ENOUGH: Final = 0.85

# Maximum and minimum share of a bound at which the next save reuses the settings. Below the minimum, twice
# the coarseness is expected to stay below the maximum, because figures are quadratic.
_STEADY: Final = (0.85, 0.18)

# Largest factor of one move: far from what was measured, a prediction is a guess.
_MAX_FACTOR: Final = 4.0

# Finest and coarsest value to try: from ten bits per weight to the few values of a keyframe.
_LIMITS: Final = (2.0**-8, 2.0**8)

# Factor of a move off a plateau with only one known end.
_FINER: Final = 1.5

# A point is measured only if its ratio exceeds the best known one by this factor: ratios are estimates with
# an error of five percent.
_WORTHWHILE: Final = 1.03

# Maximum number of axis steps, in total, from the last configuration. The paper gives no number; two steps
# reach ten configurations, and few of them are measured.
_RADIUS: Final = 2


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Point]):
    """A measured point.

    Parameters
    ----------
    point
        Position of the candidate.
    within
        Whether it keeps the bounds.
    ratio
        Compression ratio.
    usage
        Largest figure as a share of its limit (`inshrink_core.search.bounds.BoundCheck`).
    result
        Source of the figures: a trial or a chain.
    """

    point: Point
    within: bool
    ratio: float
    usage: float
    result: Any = field(default=None, compare=False)


class _SpentError(Exception):
    """The budget is used up."""


class Walk(Generic[Point]):
    """Searches the largest ratio that keeps the bounds; measures each point once.

    Parameters
    ----------
    measure
        Function that returns the outcome of a point.
    budget
        Maximum number of points to measure; None for no limit.
    known
        Outcomes of earlier measurements, which cost nothing.

    Notes
    -----
    Equal outcomes lead to equal points, so an interrupted walk can continue from a log of outcomes.
    """

    def __init__(
        self,
        measure: Callable[[Point], Outcome[Point]],
        budget: int | None = None,
        known: Iterable[Outcome[Point]] = (),
    ) -> None:
        self._measure, self._left = measure, budget
        self._outcomes = {outcome.point: outcome for outcome in known}

    @property
    def outcomes(self) -> tuple[Outcome[Point], ...]:
        """All outcomes in the order of measurement."""
        return tuple(self._outcomes.values())

    @property
    def best(self) -> Outcome[Point] | None:
        """Outcome of the largest ratio that keeps the bounds, or None."""
        return max(
            (outcome for outcome in self.outcomes if outcome.within),
            key=lambda outcome: outcome.ratio,
            default=None,
        )

    def at(self, point: Point) -> Outcome[Point]:
        """Return the outcome of a point."""
        if point not in self._outcomes:
            if self._left is not None:
                if self._left < 1:
                    raise _SpentError
                self._left -= 1
            self._outcomes[point] = self._measure(point)
        return self._outcomes[point]


def walk_line(
    walk: Walk[float],
    start: float,
    *,
    most: float = _LIMITS[1],
) -> Outcome[float] | None:
    """Return the coarsest value that keeps the bounds, to a few percent.

    Parameters
    ----------
    walk
        Measures values.
    start
        Start of the walk: the coarseness of the last checkpoint.
    most
        Coarsest value to try.

    Notes
    -----
    Divergence and loss grow with the square of the coarseness, so one measurement predicts the value that
    reaches a bound, and a few more confirm it. If step sizes are powers of two, neighbouring values often
    give the same frame. The walk bisects such a plateau, because its figures do not show its extent. It ends
    between two plateaus.
    """
    at = limited(start)
    within: Outcome[float] | None = None
    broken: Outcome[float] | None = None
    plateaus: set[bool] = set()
    with suppress(_SpentError):
        while True:
            last = walk.at(at)
            known = within if last.within else broken
            # Equal figures mean equal states; only names in the frame differ.
            flat = known is not None and last.usage == known.usage
            plateaus |= {last.within} if flat else set()
            if len(plateaus) == 2 or (last.within and last.usage >= _ENOUGH):
                break
            within, broken = (last, broken) if last.within else (within, last)
            if within is not None and broken is not None and broken.point <= within.point * _TOLERANCE:
                break
            ends = [outcome.point for outcome in (within, broken) if outcome is not None]
            at = min(_next(last, within, broken, flat), three_digits(most))
            if at in (last.point, *ends):
                break
    return walk.best


def _next(
    last: Outcome[float],
    within: Outcome[float] | None,
    broken: Outcome[float] | None,
    flat: bool,
) -> float:
    """Return ``p (_AIM / u)^(1 / k)`` for the last value p of usage u, within the known bracket.

    Two measurements (p₁, u₁) and (p₂, u₂) give ``k = log(u₂ / u₁) / log(p₂ / p₁)``; before, k is `_POWER`.
    """
    power = _POWER
    inner = math.log(broken.point / within.point) if within is not None and broken is not None else 0.0
    if within is not None and broken is not None and within.usage > 0 and math.isfinite(broken.usage):
        power = min(max(math.log(broken.usage / within.usage) / inner, _POWERS[0]), _POWERS[1])
    factor = (_AIM / last.usage) ** (1 / power) if last.usage > 0 else math.inf
    guess = last.point * min(max(factor, 1 / _MAX_FACTOR), _MAX_FACTOR)
    if within is not None and broken is not None:
        # A measurement near an end of the bracket adds little information.
        share = 0.5 if flat else min(max(math.log(guess / within.point) / inner, 0.2), 0.8)
        return limited(within.point * math.exp(share * inner))
    step = _FINER if flat else 1.1
    return limited(min(guess, last.point / step) if broken is not None else max(guess, last.point * step))


def follow_line(walk: Walk[float], start: float, usage: float | None) -> Outcome[float] | None:
    """Return a value that keeps the bounds, with as few measurements as a training allows.

    The last save's value stays unless that save used almost all of a bound or very little of it. The value
    changes by powers of two: after a smaller change, a lattice would store values on the edges of its cells.

    Parameters
    ----------
    walk
        Measures values.
    start
        Value of the last save.
    usage
        Share of its bounds that the last save used, or None.
    """
    most, least = _STEADY
    at = limited(start)
    if usage is not None:
        at = limited(at / 2) if usage > most else limited(at * 2) if usage < least else at
    with suppress(_SpentError):
        while not (last := walk.at(at)).within and at != limited(0):
            octaves = math.ceil(math.log2(last.usage / most) / _POWER) if last.usage < math.inf else 2
            at = limited(at * 2.0 ** -min(max(octaves, 1), 4))
    return walk.best


def limited(value: float) -> float:
    """Return a value rounded to three digits, within the limits of the search."""
    return three_digits(min(max(value, _LIMITS[0]), _LIMITS[1]))


def walk_cube(
    walk: Walk[CubePoint], cube: Cube, ratio_of: Callable[[CubePoint], float], last: CubePoint | None = None
) -> Outcome[CubePoint] | None:
    """Return the point of largest ratio that keeps the bounds in a cube; quality falls along the axes.

    Parameters
    ----------
    walk
        Measures points.
    cube
        Search space.
    ratio_of
        Estimates ratios without the evaluator.
    last
        Configuration of the previous checkpoint. It stays if it keeps the bounds. Otherwise slightly finer
        points are measured first, as in the delta-neighbourhood search of Agrawal et al., "Inshrinkerator"
        (SoCC 2024).

    Notes
    -----
    A point that keeps the bounds rules out all finer points, and those whose ratio is not clearly larger. A
    point that breaks a bound rules out all coarser points. After the coarsest point, the walk takes the point
    whose worse outcome rules out the most: it measures about 13 of the 216 published points. O(n²) bits of
    memory for n points.
    """
    left, ratio_of = list(cube.points()), functools.cache(ratio_of)

    def left_after(outcome: Outcome[CubePoint]) -> list[CubePoint]:
        return [point for point in left if outcome.within or not cube.is_finer(outcome.point, point)]

    with suppress(_SpentError):
        if last is not None:
            same = [walk.at(cube.point(last.place, word)) for word in cube.words]
            if any(outcome.within for outcome in same):
                return walk.best
            for outcome in same:
                left = left_after(outcome)
            near = [point for point in left if _steps(point.place, last.place) <= _RADIUS]
            for point in sorted(near, key=ratio_of, reverse=True):
                if point in left:
                    outcome = walk.at(point)
                    if outcome.within:
                        return walk.best
                    left = left_after(outcome)
        _halve(walk, cube, ratio_of, left)
    return walk.best


def _halve(
    walk: Walk[CubePoint], cube: Cube, ratio_of: Callable[[CubePoint], float], points: Sequence[CubePoint]
) -> None:
    """Measure points until each one is measured or ruled out."""
    order = sorted(points, key=lambda point: (ratio_of(point), point))
    ratios = [ratio_of(point) for point in order]
    n, best = len(order), 0.0
    # Sets of points are integers with a bit per point.
    finer, coarser = [0] * n, [0] * n
    for (i, point), (j, other) in itertools.product(enumerate(order), repeat=2):
        if cube.is_finer(point, other):
            finer[j] |= 1 << i
            coarser[i] |= 1 << j
    left = (1 << n) - 1

    def not_worthwhile(than: float) -> int:
        return (1 << bisect_right(ratios, than * _WORTHWHILE)) - 1

    no_use = [finer[i] | not_worthwhile(ratios[i]) for i in range(n)]

    def coarseness(i: int) -> tuple[int, int]:
        return finer[i].bit_count(), i

    def ruled_out(i: int) -> tuple[int, int]:
        return min((left & no_use[i]).bit_count(), (left & coarser[i]).bit_count()), i

    order_of = coarseness
    while left:
        i = max((i for i in range(n) if left >> i & 1), key=order_of)
        outcome = walk.at(order[i])
        best = max(best, outcome.ratio if outcome.within else 0.0)
        left &= ~((finer[i] if outcome.within else coarser[i]) | not_worthwhile(best))
        order_of = ruled_out


def _steps(place: tuple[int, ...], coarse: tuple[int, ...]) -> float:
    """Return how many axis steps a place is finer than another; infinite if it is coarser on an axis."""
    steps = [b - a for a, b in zip(place, coarse, strict=True)]
    return sum(steps) if min(steps) >= 0 else math.inf
