"""The one loop of every search, and the strategies that propose what it measures.

A strategy is a generator. It yields a batch of points, is sent their outcomes in order, and ends when it has
no more to ask. It neither measures nor keeps anything, so it is deterministic, can be given up at any time,
and goes on after an interruption by being told again what was measured.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol

from inshrink_core.search.space import Cube, CubePoint, Point, three_digits

RatioOf = Callable[[CubePoint], float]
"""Returns about what ratio a point will have, without the evaluator."""

# Power of the spacing that figures grow with until two measurements say otherwise: they are quadratic in the
# error. A power outside of the range tells of noise.
_POWER: Final = 2.0
_POWERS: Final = (0.5, 4.0)

# Share of a bound that is aimed at, so that the next measurement is more likely within than beyond it.
_AIM: Final = 0.93

# Of a bound, the most and the least that the last save may have used for the next to be written alike: below
# the least, a spacing of twice the width is expected to stay within the most, since figures are quadratic.
_STEADY: Final = (0.85, 0.18)

# Largest factor of one move: far from what was measured, a prediction is a guess.
_LEAP: Final = 4.0

# Finest and coarsest spacing tried: from ten bits a weight to a keyframe's few values.
_LIMITS: Final = (2.0**-8, 2.0**8)

_HALF: Final = 0.5

# Factor of a move off a plateau of which only one end is known.
_FINER: Final = 1.5

# A point whose ratio is hardly larger than the best one known is not measured: ratios are estimates, and five
# percent is what the search is good for.
_WORTHWHILE: Final = 1.03

# Steps on the axes, in sum, that a configuration may be away from the last one. The paper gives no number;
# two reach ten configurations, of which few are measured.
_RADIUS: Final = 2

# Share of the bytes allowed from which a result is near enough: the rest would not pay a trial.
_NEAR: Final = 0.97

# How far beyond the spacing that should suffice the next trial goes: doubling it saves a little less than a
# bit.
_MARGIN: Final = 1.015


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Point]):
    """What measuring a point gave.

    Parameters
    ----------
    point
        What was measured.
    kept
        Whether it keeps the bounds.
    ratio
        Its compression ratio, the larger the better.
    usage
        Largest figure as a share of its limit (`inshrink_core.search.bounds.Verdict`).
    result
        What the figures come from: a trial, a chain, a point of a sweep.
    """

    point: Point
    kept: bool
    ratio: float
    usage: float
    result: Any = field(default=None, compare=False)


Proposals = Generator[Sequence[Point], Sequence[Outcome[Point]], None]
"""Yields points to measure, all independent of each other; is sent an outcome for each."""


class Strategy(Protocol[Point]):
    """An order in which points are measured."""

    def proposals(self) -> Proposals[Point]:
        """Return a fresh generator; the same answers lead to the same questions."""
        ...


@dataclass(frozen=True, slots=True)
class Explored(Generic[Point]):
    """Everything measured, in order, and the best of it."""

    outcomes: tuple[Outcome[Point], ...]

    @property
    def best(self) -> Outcome[Point] | None:
        """The largest ratio that keeps the bounds; None where none does."""
        return max((one for one in self.outcomes if one.kept), key=lambda one: one.ratio, default=None)


def explore(
    strategy: Strategy[Point],
    measure: Callable[[Sequence[Point]], Sequence[Outcome[Point]]],
    *,
    budget: int | None = None,
    known: Sequence[Outcome[Point]] = (),
) -> Explored[Point]:
    """Measure what a strategy asks for, each point once.

    Parameters
    ----------
    strategy
        What to ask.
    measure
        Returns the outcome of every point of a batch; may measure them side by side.
    budget
        Most points measured; None for as many as the strategy wants.
    known
        Outcomes there are already; they cost nothing.

    Returns
    -------
    Explored
        `known` is part of it.
    """
    outcomes: dict[Point, Outcome[Point]] = {one.point: one for one in known}
    n_measured = 0
    proposals = strategy.proposals()
    try:
        batch = next(proposals)
        while True:
            fresh = [point for point in dict.fromkeys(batch) if point not in outcomes]
            allowed = fresh if budget is None else fresh[: max(0, budget - n_measured)]
            outcomes |= {one.point: one for one in (measure(allowed) if allowed else ())}
            n_measured += len(allowed)
            if len(allowed) < len(fresh):
                break
            batch = proposals.send([outcomes[point] for point in batch])
    except StopIteration:
        pass
    finally:
        proposals.close()
    return Explored(tuple(outcomes.values()))


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """The coarsest spacing of the lattice that keeps the bounds, to a few percent.

    Divergence and loss grow with the square of the spacing, so one measurement predicts where a bound is
    reached, and a few confirm it.

    Parameters
    ----------
    start
        Where to begin: the last checkpoint's spacing.
    tolerance
        Ratio of a spacing that breaks the bounds and one that keeps them at which the search ends.
    enough
        Share of a bound that is as good as all of it: a spacing that uses more of it ends the search.
    most
        The coarsest spacing to try.
    power
        Power of the spacing that figures grow with, until two measurements say otherwise.
    aim
        Share of a bound that is aimed at.

    Notes
    -----
    Where spacings are held to powers of two, two points often give the same frame. Such a plateau is halved
    in the middle, for its figures say nothing of how far it reaches; between two of them the search ends.
    """

    start: float
    most: float = _LIMITS[1]
    power: float = _POWER
    aim: float = _AIM
    tolerance: float = 1.05
    enough: float = 0.85

    def proposals(self) -> Proposals[float]:
        """Ask for one spacing at a time."""
        at = _limited(self.start)
        kept: Outcome[float] | None = None
        broken: Outcome[float] | None = None
        plateaus: set[bool] = set()
        while True:
            (outcome,) = yield [at]
            known = kept if outcome.kept else broken
            # The same state, as far as its figures tell; only names in the frame differ.
            flat = known is not None and outcome.usage == known.usage
            plateaus |= {outcome.kept} if flat else set()
            if len(plateaus) == 2:
                return
            if outcome.kept:
                kept = outcome
                if outcome.usage >= self.enough:
                    return
            else:
                broken = outcome
            if kept is not None and broken is not None and broken.point <= kept.point * self.tolerance:
                return
            following = min(self._next(outcome, kept, broken, flat), three_digits(self.most))
            if following in (at, kept and kept.point, broken and broken.point):
                return
            at = following

    def _next(
        self, last: Outcome[float], kept: Outcome[float] | None, broken: Outcome[float] | None, flat: bool
    ) -> float:
        """Return the spacing at which the bounds are expected to be reached, within what is known of it."""
        power = self.power
        if kept is not None and broken is not None and kept.usage > 0 and math.isfinite(broken.usage):
            steepness = math.log(broken.usage / kept.usage) / math.log(broken.point / kept.point)
            power = min(max(steepness, _POWERS[0]), _POWERS[1])
        if last.usage == 0:
            factor = _LEAP
        elif math.isinf(last.usage):
            factor = 1 / _LEAP
        else:
            factor = min(max((self.aim / last.usage) ** (1 / power), 1 / _LEAP), _LEAP)
        guess = last.point * factor
        if kept is not None and broken is not None:
            # Nothing is learned at the bracket's ends; the middle is better than a hair inside.
            inner = math.log(broken.point / kept.point)
            share = math.log(guess / kept.point) / inner if guess > 0 else _HALF
            share = _HALF if flat else min(max(share, 0.2), 0.8)
            guess = kept.point * math.exp(share * inner)
        elif broken is not None:
            guess = min(guess, broken.point / (_FINER if flat else 1.1))
        elif kept is not None:
            guess = max(guess, kept.point * (_FINER if flat else 1.1))
        return _limited(guess)


@dataclass(frozen=True, kw_only=True)
class Follow:
    """A spacing that keeps the bounds, with as few measurements as a training leaves time for: mostly one.

    The spacing of the last save stays as long as that used neither nearly all of a bound nor next to nothing
    of it. It changes by powers of two, since a lattice that changes by less puts what it stores on the edges
    of its cells. One that breaks a bound is made finer until it keeps it.

    Parameters
    ----------
    start
        Spacing of the last save.
    usage
        Share of its bounds that the last save used; None where there is none.
    """

    start: float
    usage: float | None = None

    def proposals(self) -> Proposals[float]:
        """Ask for one spacing at a time."""
        most, least = _STEADY
        at = _limited(self.start)
        if self.usage is not None and self.usage > most:
            at = _limited(at / 2)
        elif self.usage is not None and self.usage < least:
            at = _limited(at * 2)
        while True:
            (outcome,) = yield [at]
            if outcome.kept or at == _limited(0):
                return
            octaves = math.ceil(math.log2(outcome.usage / most) / _POWER) if outcome.usage < math.inf else 2
            at = _limited(at * 2.0 ** -min(max(octaves, 1), 4))


def _limited(spacing: float) -> float:
    return three_digits(min(max(spacing, _LIMITS[0]), _LIMITS[1]))


@dataclass(frozen=True, kw_only=True)
class Halving:
    """The finest spacing whose bytes fit: half the precision saves a bit a weight, which gives the next one.

    Parameters
    ----------
    start
        Where to begin.
    allowed
        Bytes that the weights may take; the `result` of an outcome is those that they take.
    n_values
        Number of weights.
    """

    start: float
    allowed: float
    n_values: int

    def proposals(self) -> Proposals[float]:
        """Ask for one spacing at a time, until it nearly uses the bytes up or is coarser than it may be."""
        at = self.start
        while True:
            (outcome,) = yield [at]
            if _NEAR * self.allowed <= outcome.result <= self.allowed or not outcome.kept:
                return
            excess_bits = 8 * (outcome.result - self.allowed) / max(self.n_values, 1)
            at, before = min(max(at * 2.0**excess_bits * _MARGIN, 1e-3), 1e4), at
            if at == before:
                return


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The point of largest ratio in a cube whose quality falls, and whose ratio rises, along every axis.

    Parameters
    ----------
    cube
        The space.
    ratio_of
        Estimates ratios.
    last
        The configuration of the checkpoint before: it stays where it keeps the bounds; else points that are a
        little finer are asked for before all others, as in the delta-neighbourhood search of Agrawal et al.,
        "Inshrinkerator" (SoCC 2024).
    replicas
        Points measured side by side.

    Notes
    -----
    What is kept rules out every finer point, and those whose ratio is hardly larger; what breaks a bound
    rules out every coarser one. After the coarsest, the next point is the one whose outcome rules out the
    most, whichever it is: about 13 of the 216 published points are measured. O(n²) bits of memory for n
    points.
    """

    cube: Cube
    ratio_of: RatioOf
    last: CubePoint | None = None
    replicas: int = 1

    def proposals(self) -> Proposals[CubePoint]:
        """Ask for the last configuration, for those near it, then for the cube."""
        broken: list[CubePoint] = []
        if self.last is not None:
            place = self.last.place
            outcomes = yield list(dict.fromkeys(self.cube.point(place, word) for word in self.cube.words))
            if any(one.kept for one in outcomes):
                return
            broken = [one.point for one in outcomes]
            near = [point for point in self._left(broken) if _steps(point.place, place) <= _RADIUS]
            for point in sorted(near, key=self.ratio_of, reverse=True):
                if point in self._left(broken):
                    (outcome,) = yield [point]
                    if outcome.kept:
                        return
                    broken.append(point)
        yield from self._halved(self._left(broken))

    def _left(self, broken: Sequence[CubePoint]) -> list[CubePoint]:
        """Return the points that are coarser than none that broke a bound."""
        return [
            point for point in self.cube.points() if not any(self.cube.is_finer(at, point) for at in broken)
        ]

    def _halved(self, points: Sequence[CubePoint]) -> Proposals[CubePoint]:
        """Find the largest ratio among some points."""
        ratios, order = [], []
        for ratio, point in sorted((self.ratio_of(point), point) for point in points):
            ratios.append(ratio)
            order.append(point)
        n, best = len(order), 0.0
        # Sets of points are numbers, a bit for each.
        finer, coarser = [0] * n, [0] * n
        for (i, one), (j, other) in itertools.product(enumerate(order), repeat=2):
            if self.cube.is_finer(one, other):
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
            chosen: list[int] = []
            for i in sorted((i for i in range(n) if left >> i & 1), key=order_of, reverse=True):
                if len(chosen) < self.replicas and not any((finer[j] | coarser[j]) >> i & 1 for j in chosen):
                    chosen.append(i)
            outcomes = yield [order[i] for i in chosen]
            for i, outcome in zip(chosen, outcomes, strict=True):
                left &= ~(finer[i] if outcome.kept else coarser[i])
                best = max(best, outcome.ratio if outcome.kept else 0.0)
            left &= ~hardly_larger(best)
            order_of = ruled_out


def _steps(place: tuple[int, ...], coarse: tuple[int, ...]) -> float:
    """Return how many steps a place is finer than another; infinite where it is coarser on an axis."""
    steps = [b - a for a, b in zip(place, coarse, strict=True)]
    return sum(steps) if min(steps) >= 0 else math.inf
