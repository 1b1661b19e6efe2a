"""Search around the last checkpoint's configuration, and the baselines it is measured against.

Agrawal et al., "Inshrinkerator" (SoCC 2024), section "Delta-neighbourhood search".
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from inshrink_core.search.guided import GuidedExhaustive, RatioOf
from inshrink_core.search.space import Cube, CubePoint, LatticeLine
from inshrink_core.search.strategies import Proposals

__all__ = ["DeltaNeighbourhood", "Grid", "Random"]

_RADIUS: Final = 2
"""Steps on the axes, in sum, that a configuration may be away from the last one; the paper gives no number.
Two reach ten configurations, of which few are measured."""

_CLEARLY: Final = 0.9
"""The other pruning metric takes over where it uses less than this share of what the last one used."""


@dataclass(frozen=True, kw_only=True)
class DeltaNeighbourhood:
    """Configurations near the last one, never a coarser one; the whole cube where none is kept.

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
        begin = list(dict.fromkeys(self.cube.point(self.last.place, word) for word in words))
        outcomes = yield begin
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
        steps = itertools.product(range(_RADIUS + 1), repeat=len(point.place))
        places = [
            tuple(at - step for at, step in zip(point.place, taken, strict=True))
            for taken in steps
            if 1 <= sum(taken) <= _RADIUS
        ]
        inside = [place for place in places if min(place) >= 0]
        return list(dict.fromkeys(self.cube.point(place, point.word) for place in inside))


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every point of a space: the truth that the others are judged by."""

    space: Cube | LatticeLine
    replicas: int = 1

    def proposals(self) -> Proposals[Any]:
        """Ask for everything."""
        yield from _in_batches(self.space.points(), self.replicas)


@dataclass(frozen=True, kw_only=True)
class Random:
    """Points of a space in an order that a seed decides."""

    space: Cube | LatticeLine
    seed: int = 0
    replicas: int = 1

    def proposals(self) -> Proposals[Any]:
        """Ask for everything, shuffled; a budget ends it."""
        points: list[Any] = list(self.space.points())
        random.Random(self.seed).shuffle(points)
        yield from _in_batches(points, self.replicas)


def _in_batches(points: Sequence[Any], n: int) -> Proposals[Any]:
    for start in range(0, len(points), n):
        yield points[start : start + n]
