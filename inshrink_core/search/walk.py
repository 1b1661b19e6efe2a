"""The one loop of every search: candidates, each measured once, between the finest and the coarsest."""

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

# Power of the coarseness that figures grow with until two measurements say otherwise: they are quadratic in
# the error. A power outside of the range is noise.
_POWER: Final = 2.0
_POWERS: Final = (0.5, 4.0)

# Share of a bound that is aimed at, so that the next measurement is more likely within than beyond it.
_AIM: Final = 0.93

# Ratio of a coarseness that breaks the bounds and one that keeps them at which the walk ends, and the share
# of a bound that is as good as all of it.
_TOLERANCE: Final = 1.05
_ENOUGH: Final = 0.85

# Of a bound, the most and the least that the last save may have used for the next to be written alike: below
# the least, twice the coarseness is expected to stay within the most, since figures are quadratic.
_STEADY: Final = (0.85, 0.18)

# Largest factor of one move: far from what was measured, a prediction is a guess.
_LEAP: Final = 4.0

# Finest and coarsest value tried: from ten bits a weight to a keyframe's few values.
_LIMITS: Final = (2.0**-8, 2.0**8)

# Factor of a move off a plateau of which only one end is known.
_FINER: Final = 1.5

# A point whose ratio is hardly larger than the best one known is not measured: ratios are estimates, and five
# percent is what the search is good for.
_WORTHWHILE: Final = 1.03

# Steps on the axes, in sum, that a configuration may be away from the last one. The paper gives no number;
# two reach ten configurations, of which few are measured.
_RADIUS: Final = 2


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Point]):
    """A measured point.

    Parameters
    ----------
    point
        The candidate's place.
    within
        Whether it keeps the bounds.
    ratio
        Its compression ratio.
    usage
        Largest figure as a share of its limit (`inshrink_core.search.bounds.Verdict`).
    result
        What the figures come from: a trial or a chain.
    """

    point: Point
    within: bool
    ratio: float
    usage: float
    result: Any = field(default=None, compare=False)


class _SpentError(Exception):
    """The budget is spent."""


class Walk(Generic[Point]):
    """Looks for the largest ratio that keeps the bounds; measures each point once.

    Parameters
    ----------
    measure
        Returns the outcome of a point.
    budget
        Most points to measure; None for as many as it takes.
    known
        Outcomes that are there already; they cost nothing.

    Notes
    -----
    The same outcomes lead to the same points, so that an interrupted walk continues from a log of them.
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
        """Every outcome, in the order of measuring."""
        return tuple(self._outcomes.values())

    @property
    def best(self) -> Outcome[Point] | None:
        """The largest ratio that keeps the bounds; None where none does."""
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
    power: float = _POWER,
    aim: float = _AIM,
    tolerance: float = _TOLERANCE,
    enough: float = _ENOUGH,
) -> Outcome[float] | None:
    """Return the coarsest value that keeps the bounds, to a few percent.

    Parameters
    ----------
    walk
        Measures values.
    start
        Where to begin: the last checkpoint's coarseness.
    most
        The coarsest value to try.
    power
        Power of the value that figures grow with, until two measurements say otherwise.
    aim, tolerance, enough
        Share of a bound that is aimed at, and where the walk ends.

    Notes
    -----
    Divergence and loss grow with the square of the coarseness, so one measurement predicts where a bound is
    reached, and a few confirm it. Where spacings are powers of two, two values often give the same frame.
    Such a plateau is halved in the middle, since its figures do not show how far it reaches; between two
    plateaus the walk ends.
    """
    at = limited(start)
    within: Outcome[float] | None = None
    broken: Outcome[float] | None = None
    plateaus: set[bool] = set()
    with suppress(_SpentError):
        while True:
            last = walk.at(at)
            known = within if last.within else broken
            # Equal figures mean the same state; only names in the frame differ.
            flat = known is not None and last.usage == known.usage
            plateaus |= {last.within} if flat else set()
            if len(plateaus) == 2 or (last.within and last.usage >= enough):
                break
            within, broken = (last, broken) if last.within else (within, last)
            if within is not None and broken is not None and broken.point <= within.point * tolerance:
                break
            ends = [outcome.point for outcome in (within, broken) if outcome is not None]
            at = min(_next(last, within, broken, power, aim, flat), three_digits(most))
            if at in (last.point, *ends):
                break
    return walk.best


def _next(
    last: Outcome[float],
    within: Outcome[float] | None,
    broken: Outcome[float] | None,
    power: float,
    aim: float,
    flat: bool,
) -> float:
    """Return the value at which the bounds are expected to be reached, within what is known of it."""
    between = within is not None and broken is not None
    inner = math.log(broken.point / within.point) if within is not None and broken is not None else 0.0
    if within is not None and broken is not None and within.usage > 0 and math.isfinite(broken.usage):
        power = min(max(math.log(broken.usage / within.usage) / inner, _POWERS[0]), _POWERS[1])
    if last.usage == 0:
        factor = _LEAP
    elif math.isinf(last.usage):
        factor = 1 / _LEAP
    else:
        factor = min(max((aim / last.usage) ** (1 / power), 1 / _LEAP), _LEAP)
    guess = last.point * factor
    if within is not None and between:
        # Nothing is learned at the ends; the middle is better than a hair inside.
        share = 0.5 if flat else min(max(math.log(guess / within.point) / inner, 0.2), 0.8)
        return limited(within.point * math.exp(share * inner))
    step = _FINER if flat else 1.1
    return limited(min(guess, last.point / step) if broken is not None else max(guess, last.point * step))


def follow_line(walk: Walk[float], start: float, usage: float | None) -> Outcome[float] | None:
    """Return a value that keeps the bounds, with as few measurements as a training leaves time for.

    The last save's value stays while that used neither nearly all of a bound nor next to nothing of it. It
    changes by powers of two, since a lattice that changes by less stores values on the edges of its cells.

    Parameters
    ----------
    walk
        Measures values.
    start
        The last save's value.
    usage
        Share of its bounds that the last save used; None where there is none.
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
    """Return a value to three digits, within what is tried."""
    return three_digits(min(max(value, _LIMITS[0]), _LIMITS[1]))


def walk_cube(
    walk: Walk[CubePoint], cube: Cube, ratio_of: Callable[[CubePoint], float], last: CubePoint | None = None
) -> Outcome[CubePoint] | None:
    """Return the point of largest ratio in a cube whose quality falls, and whose ratio rises, along axes.

    Parameters
    ----------
    walk
        Measures points.
    cube
        The space.
    ratio_of
        Estimates ratios, without the evaluator.
    last
        The configuration of the checkpoint before: it stays where it keeps the bounds; else points that are a
        little finer are measured before all others, as in the delta-neighbourhood search of Agrawal et al.,
        "Inshrinkerator" (SoCC 2024).

    Notes
    -----
    A point that keeps the bounds rules out every finer one, and those whose ratio is hardly larger; one that
    breaks a bound rules out every coarser one. After the coarsest, the next point is the one whose outcome
    rules out the most, whichever it is: about 13 of the 216 published points are measured. O(n²) bits of
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
    """Measure points until every one is measured or ruled out."""
    order = sorted(points, key=lambda point: (ratio_of(point), point))
    ratios = [ratio_of(point) for point in order]
    n, best = len(order), 0.0
    # Sets of points are numbers, a bit for each.
    finer, coarser = [0] * n, [0] * n
    for (i, point), (j, other) in itertools.product(enumerate(order), repeat=2):
        if cube.is_finer(point, other):
            finer[j] |= 1 << i
            coarser[i] |= 1 << j
    left = (1 << n) - 1

    def hardly_larger(than: float) -> int:
        return (1 << bisect_right(ratios, than * _WORTHWHILE)) - 1

    no_use = [finer[i] | hardly_larger(ratios[i]) for i in range(n)]

    def coarseness(i: int) -> tuple[int, int]:
        return finer[i].bit_count(), i

    def ruled_out(i: int) -> tuple[int, int]:
        return min((left & no_use[i]).bit_count(), (left & coarser[i]).bit_count()), i

    order_of = coarseness
    while left:
        i = max((i for i in range(n) if left >> i & 1), key=order_of)
        outcome = walk.at(order[i])
        best = max(best, outcome.ratio if outcome.within else 0.0)
        left &= ~((finer[i] if outcome.within else coarser[i]) | hardly_larger(best))
        order_of = ruled_out


def _steps(place: tuple[int, ...], coarse: tuple[int, ...]) -> float:
    """Return how many steps a place is finer than another; infinite where it is coarser on an axis."""
    steps = [b - a for a, b in zip(place, coarse, strict=True)]
    return sum(steps) if min(steps) >= 0 else math.inf
