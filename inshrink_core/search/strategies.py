"""The one loop of every search, and the strategies that propose what it measures.

A strategy is a generator. It yields a batch of points, is sent their outcomes in order, and ends when it has
no more to ask. It neither measures nor keeps anything, so it is deterministic, can be given up at any time,
and goes on after an interruption by being told again what was measured.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, Protocol

from inshrink_core.search.space import Cube, CubePoint, Point, Space, three_digits

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

# A box that promises less than this much more than the best point known is not opened: ratios are estimates,
# and five percent is what the search is good for.
_WORTHWHILE: Final = 1.03

# Steps on the axes, in sum, that a configuration may be away from the last one. The paper gives no number;
# two reach ten configurations, of which few are measured.
_RADIUS: Final = 2

# The other pruning metric takes over where it uses less than this share of what the last one used.
_CLEARLY: Final = 0.9

# Share of the bytes allowed from which a result is near enough: the rest would not pay a trial.
_NEAR: Final = 0.97

# How far beyond the spacing that should suffice the next trial goes: doubling it saves a little less than a
# bit.
_MARGIN: Final = 1.015

Place = tuple[int, ...]


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
class Everything:
    """Every point of a space: the truth that the other strategies are compared with.

    Parameters
    ----------
    space
        What is searched.
    seed
        Decides the order; None for that of the space.
    replicas
        Points measured side by side.
    """

    space: Space[Any]
    seed: int | None = None
    replicas: int = 1

    def proposals(self) -> Proposals[Any]:
        """Ask for everything; a budget ends it."""
        points: list[Any] = list(self.space.points())
        if self.seed is not None:
            random.Random(self.seed).shuffle(points)
        for start in range(0, len(points), self.replicas):
            yield points[start : start + self.replicas]


class _Box(NamedTuple):
    """The places between two corners, both included."""

    low: Place
    high: Place

    def places(self) -> Iterator[Place]:
        return itertools.product(*(range(a, b + 1) for a, b in zip(self.low, self.high, strict=True)))

    def diagonal(self) -> tuple[Place, ...]:
        """Return the places nearest to the line between the corners, from fine to coarse."""
        spans = [b - a for a, b in zip(self.low, self.high, strict=True)]
        n = max([1, *spans])
        line = (
            tuple(a + (2 * at * span + n) // (2 * n) for a, span in zip(self.low, spans, strict=True))
            for at in range(n + 1)
        )
        return tuple(dict.fromkeys(line))


class _Known:
    """What follows, by monotony, from the outcomes of one word of the switch."""

    def __init__(self) -> None:
        self._kept: list[Place] = []
        self._broken: list[Place] = []

    def add(self, outcome: Outcome[CubePoint]) -> None:
        (self._kept if outcome.kept else self._broken).append(outcome.point.place)

    def is_open(self, place: Place) -> bool:
        """Whether neither a coarser place was kept nor a finer one broken."""
        return not any(_within(place, one) for one in self._kept) and not any(
            _within(one, place) for one in self._broken
        )


def _within(fine: Place, coarse: Place) -> bool:
    """Whether a place is at least as fine as another on every axis."""
    return all(a <= b for a, b in zip(fine, coarse, strict=True))


class _Crossing(NamedTuple):
    """The last place of a diagonal that keeps the bounds, the next one, and the best ratio seen on it."""

    kept: Place | None
    broken: Place | None
    ratio: float


@dataclass(frozen=True, kw_only=True)
class GuidedExhaustive:
    """The published search of a cube whose quality falls, and whose ratio rises, along every axis.

    Agrawal et al., "Inshrinkerator" (SoCC 2024), section "Guided exhaustive search": evaluate the cube's
    diagonal, split what may still hold a better point into smaller cubes, and so on; once for each pruning
    metric.

    Parameters
    ----------
    cube
        The space.
    ratio_of
        Estimates ratios: a box whose coarsest corner is no better than what is known is not opened.
    replicas
        Points measured side by side; the diagonal is then cut in so many parts at once.
    first
        The word of the switch to begin with; by default the cube's first.
    """

    cube: Cube
    ratio_of: RatioOf
    replicas: int = 1
    first: str = ""

    def proposals(self) -> Proposals[CubePoint]:
        """Search once for each word of the switch; the second time only for what beats the first."""
        best = 0.0
        words = sorted(self.cube.words, key=lambda word: word != self.first)
        for number, word in enumerate(words):
            low = [0] * len(self.cube.shape)
            if number and self.cube.switch is not None:
                if self.cube.shape[self.cube.idle_at] == 1:
                    continue
                low[self.cube.idle_at] = 1  # without pruning, the metric of pruning changes nothing
            box = _Box(tuple(low), tuple(n - 1 for n in self.cube.shape))
            best = yield from self._search(box, word, best)

    def _search(
        self, whole: _Box, word: str, best: float
    ) -> Generator[Sequence[CubePoint], Sequence[Outcome[CubePoint]], float]:
        """Open boxes in the order of what they promise; returns the best ratio that was kept."""
        known = _Known()
        boxes: list[tuple[float, _Box]] = [(-math.inf, whole)]
        while boxes:
            _, box = heapq.heappop(boxes)
            shrunk, promise = self._shrunk(box, word, known, best * _WORTHWHILE)
            if shrunk is None:
                continue
            if boxes and promise < -boxes[0][0]:
                heapq.heappush(boxes, (-promise, shrunk))
                continue
            crossing = yield from self._cut(shrunk, word, known)
            best = max(best, crossing.ratio)
            for part in _parts(shrunk, crossing):
                heapq.heappush(boxes, (-promise, part))
        return best

    def _shrunk(self, box: _Box, word: str, known: _Known, least: float) -> tuple[_Box | None, float]:
        """Return the smallest box around what is open in a box and worth it, and its largest ratio."""
        opened = {p: self.ratio_of(self.cube.point(p, word)) for p in box.places() if known.is_open(p)}
        places = [place for place, ratio in opened.items() if ratio > least]
        if not places:
            return None, 0.0
        columns = list(zip(*places, strict=True))
        return _Box(tuple(map(min, columns)), tuple(map(max, columns))), max(opened.values())

    def _cut(
        self, box: _Box, word: str, known: _Known
    ) -> Generator[Sequence[CubePoint], Sequence[Outcome[CubePoint]], _Crossing]:
        """Find where the diagonal of a box leaves the bounds."""
        line = box.diagonal()
        low, high, best = -1, len(line), 0.0
        while unknown := [at for at in range(low + 1, high) if known.is_open(line[at])]:
            count = min(self.replicas, len(unknown))  # the places that cut the rest into equal parts
            chosen = [unknown[(2 * k + 1) * len(unknown) // (2 * count)] for k in range(count)]
            outcomes = yield [self.cube.point(line[at], word) for at in chosen]
            for at, outcome in zip(chosen, outcomes, strict=True):
                known.add(outcome)
                if outcome.kept:
                    low, best = max(low, at), max(best, outcome.ratio)
                else:
                    high = min(high, at)
            if low >= high:  # quality did not fall evenly: take the finer end
                low = high - 1
        return _Crossing(
            line[low] if low >= 0 else None, line[low + 1] if low + 1 < len(line) else None, best
        )


def _parts(box: _Box, crossing: _Crossing) -> Iterator[_Box]:
    """Yield the boxes of what is neither as fine as the kept place nor as coarse as the broken one.

    A place is in one of them if it is coarser than the kept one on some axis, and finer than the broken
    one on another. They overlap; what one settles is no longer open in the others.
    """
    if crossing.kept is None or crossing.broken is None:
        return
    for coarser, finer in itertools.permutations(range(len(box.low)), 2):
        low, high = list(box.low), list(box.high)
        low[coarser] = max(low[coarser], crossing.kept[coarser] + 1)
        high[finer] = min(high[finer], crossing.broken[finer] - 1)
        if _within(tuple(low), tuple(high)):
            yield _Box(tuple(low), tuple(high))


@dataclass(frozen=True, kw_only=True)
class DeltaNeighbourhood:
    """Configurations near the last checkpoint's, never a coarser one; the whole cube where none is kept.

    Agrawal et al., "Inshrinkerator" (SoCC 2024), section "Delta-neighbourhood search".

    Parameters
    ----------
    cube
        The space.
    last
        The configuration of the checkpoint before.
    ratio_of
        Estimates ratios: what is near is measured in their order, the largest first.
    replicas
        Points measured side by side.
    """

    cube: Cube
    last: CubePoint
    ratio_of: RatioOf
    replicas: int = 1

    def proposals(self) -> Proposals[CubePoint]:
        """Ask for the last configuration under every metric, then for finer ones, then for the cube."""
        words = sorted(self.cube.words, key=lambda word: word != self.last.word)
        outcomes = yield list(dict.fromkeys(self.cube.point(self.last.place, word) for word in words))
        chosen = outcomes[0]
        for other in outcomes[1:]:
            if (other.kept and not chosen.kept) or other.usage < _CLEARLY * chosen.usage:
                chosen = other
        if any(one.kept for one in outcomes):
            return
        near = sorted(self._finer(chosen.point), key=self.ratio_of, reverse=True)
        for start in range(0, len(near), self.replicas):
            outcomes = yield near[start : start + self.replicas]
            if any(one.kept for one in outcomes):
                return
        yield from GuidedExhaustive(
            cube=self.cube, ratio_of=self.ratio_of, replicas=self.replicas, first=chosen.point.word
        ).proposals()

    def _finer(self, point: CubePoint) -> list[CubePoint]:
        """Return the points that are finer by at most `_RADIUS` steps in sum."""
        taken = itertools.product(range(_RADIUS + 1), repeat=len(point.place))
        places = [
            tuple(at - fewer for at, fewer in zip(point.place, steps, strict=True))
            for steps in taken
            if 1 <= sum(steps) <= _RADIUS
        ]
        return list(dict.fromkeys(self.cube.point(p, point.word) for p in places if min(p) >= 0))
