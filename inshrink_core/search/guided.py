"""Guided exhaustive search of a cube whose quality falls, and whose ratio rises, along every axis.

Agrawal et al., "Inshrinkerator" (SoCC 2024), section "Guided exhaustive search": evaluate the cube's
diagonal, split what may still hold a better point into smaller cubes, and so on; once for each pruning
metric.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from inshrink_core.search.space import Cube, CubePoint
from inshrink_core.search.strategies import Outcome, Proposals

__all__ = ["GuidedExhaustive", "RatioOf"]

RatioOf = Callable[[CubePoint], float]
"""Returns about what ratio a point will have, without the evaluator."""

Place = tuple[int, ...]

_WORTHWHILE: Final = 1.03
"""A box that promises less than this much more than the best point known is not opened: ratios are
estimates, and five percent is what the search is good for."""


class _Box(NamedTuple):
    """The places between two corners, both included."""

    low: Place
    high: Place

    def places(self) -> Iterator[Place]:
        return itertools.product(*(range(a, b + 1) for a, b in zip(self.low, self.high, strict=True)))

    def diagonal(self) -> tuple[Place, ...]:
        """Return the places nearest to the line between the corners, from fine to coarse."""
        spans = [b - a for a, b in zip(self.low, self.high, strict=True)]
        longest = max(spans, default=0)
        line = (
            [
                tuple(
                    a + (2 * at * span + longest) // (2 * longest)
                    for a, span in zip(self.low, spans, strict=True)
                )
                for at in range(longest + 1)
            ]
            if longest
            else [self.low]
        )
        return tuple(dict.fromkeys(line))


@dataclass
class _Known:
    """What follows, by monotony, from the outcomes of one word of the switch."""

    kept: list[Place] = field(default_factory=list)
    broken: list[Place] = field(default_factory=list)

    def add(self, outcome: Outcome[CubePoint]) -> None:
        (self.kept if outcome.kept else self.broken).append(outcome.point.place)

    def is_open(self, place: Place) -> bool:
        """Whether neither a coarser place was kept nor a finer one broken."""
        return not any(_within(place, one) for one in self.kept) and not any(
            _within(one, place) for one in self.broken
        )


def _within(fine: Place, coarse: Place) -> bool:
    """Whether a place is at least as fine as another on every axis."""
    return all(a <= b for a, b in zip(fine, coarse, strict=True))


class _Crossing(NamedTuple):
    """The last place of a diagonal that keeps the bounds, the next one, and the best ratio seen on it."""

    kept: Place | None
    broken: Place | None
    ratio: float


_Asking = Generator[Sequence[CubePoint], Sequence[Outcome[CubePoint]], float]
_Cutting = Generator[Sequence[CubePoint], Sequence[Outcome[CubePoint]], _Crossing]


@dataclass(frozen=True, kw_only=True)
class GuidedExhaustive:
    """The published search of a whole cube.

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

    def _search(self, whole: _Box, word: str, best: float) -> _Asking:
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
        opened = [place for place in box.places() if known.is_open(place)]
        ratios = {place: self.ratio_of(self.cube.point(place, word)) for place in opened}
        places = [place for place in opened if ratios[place] > least]
        if not places:
            return None, 0.0
        columns = list(zip(*places, strict=True))
        return _Box(tuple(map(min, columns)), tuple(map(max, columns))), max(ratios.values())

    def _cut(self, box: _Box, word: str, known: _Known) -> _Cutting:
        """Find where the diagonal of a box leaves the bounds."""
        line = box.diagonal()
        low, high, best = -1, len(line), 0.0
        while True:
            unknown = [at for at in range(low + 1, high) if known.is_open(line[at])]
            if not unknown:
                break
            chosen = _spread(unknown, self.replicas)
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


def _spread(places: Sequence[int], n: int) -> list[int]:
    """Return up to `n` of the places that cut them into equal parts; the middle one for 1."""
    count = min(n, len(places))
    return [places[(2 * k + 1) * len(places) // (2 * count)] for k in range(count)]


def _parts(box: _Box, crossing: _Crossing) -> Iterator[_Box]:
    """Yield the boxes of what is neither as fine as the kept place nor as coarse as the broken one.

    A place is in one of them if it is coarser than the kept one on some axis, and finer than the broken
    one on another. They overlap; what one settles is no longer open in the others.
    """
    if crossing.kept is None or crossing.broken is None:
        return
    axes = range(len(box.low))
    for coarser, finer in itertools.permutations(axes, 2):
        low, high = list(box.low), list(box.high)
        low[coarser] = max(low[coarser], crossing.kept[coarser] + 1)
        high[finer] = min(high[finer], crossing.broken[finer] - 1)
        if all(a <= b for a, b in zip(low, high, strict=True)):
            yield _Box(tuple(low), tuple(high))
