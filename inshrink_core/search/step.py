"""One configuration for each checkpoint: what goes from step to step, and how the next is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from inshrink_core.chain import ChainConfig
from inshrink_core.search.bounds import Bounds, Verdict
from inshrink_core.search.bracket import Bracket
from inshrink_core.search.guided import GuidedExhaustive
from inshrink_core.search.neighbourhood import DeltaNeighbourhood
from inshrink_core.search.space import Candidate, Cube, CubePoint, LatticeLine, three_digits
from inshrink_core.search.strategies import Explored, Outcome, Strategy, explore
from inshrink_core.search.trials import Trial

__all__ = ["BUDGET", "ChainSearch", "Decision"]

BUDGET: Final = 8
"""Evaluations a step that a lattice's search may take: a bracket is closed to a few percent by then."""

_WORTHWHILE: Final = 1.01
"""Least gain for which factors of layer types are changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a step is written with.

    Parameters
    ----------
    candidate
        The configuration; None where none keeps the bounds, and the step is to be stored exactly.
    trial
        What was measured of it; None for an exact step.
    verdict
        How it keeps the bounds.
    trials
        Everything measured at this step.
    """

    candidate: Candidate | None
    trial: Trial | None
    verdict: Verdict
    trials: tuple[Trial, ...]


Measure = Callable[[Candidate], Trial]
Ratios = Callable[[Candidate], float]


@dataclass(kw_only=True)
class ChainSearch:
    """The search of a chain, step after step.

    Parameters
    ----------
    space
        What is searched.
    start
        The lattice's step to begin with; NaN for cubes, which begin otherwise.
    last
        Where the last informative step ended: a step, or a point of the cube; None at the start.
    budget
        Most evaluations a step; None: as many as the strategy wants. A cube's first step is not bounded.
    measure_all
        Measures candidates side by side; by default one after the other.
    """

    space: Cube | LatticeLine
    start: float = math.nan
    last: Any = None
    budget: int | None = None
    replicas: int = 1
    _trials: list[Trial] = field(default_factory=list)
    _by_point: dict[Any, Trial] = field(default_factory=dict)

    @classmethod
    def begin(
        cls, space: Cube | LatticeLine, chain: ChainConfig, *, resumed: bool, replicas: int = 1
    ) -> ChainSearch:
        """Return a search that begins with a chain, or goes on from an archive's newest configuration."""
        if isinstance(space, LatticeLine):
            at = three_digits(float(getattr(chain.config, "coarseness", math.nan)))
            return cls(space=space, start=at, last=at if resumed else None, replicas=replicas)
        return cls(space=space, last=_point_of(space, chain) if resumed else None, replicas=replicas)

    def decide(
        self,
        bounds: Bounds,
        measure: Measure,
        ratios: Ratios,
        *,
        informative: bool,
        unsure: bool = False,
        factors: Mapping[str, float] | None = None,
    ) -> Decision:
        """Return what a step is to be written with.

        Parameters
        ----------
        bounds
            What is promised.
        measure
            Encodes and evaluates a candidate at this step.
        ratios
            Estimates the ratio of a candidate at this step.
        informative
            False where the stale copy keeps the bounds too: then the last configuration stays if it keeps
            them, for the bounds say nothing about a coarser one.
        unsure
            Whether there is no stale copy to tell if the bounds say anything: then nothing coarser than
            the start is tried either.
        factors
            Factors of layer types to try in the place of the lattice's present ones.
        """
        self._trials = []
        self._by_point = {}

        def outcomes(points: Sequence[Any]) -> list[Outcome[Any]]:
            return [self._outcome(point, bounds, measure) for point in points]

        explored: Explored[Any] = Explored(())
        if not informative and self.last is not None:
            explored = Explored(tuple(outcomes([self.last])))
        elif factors is not None:
            explored = Explored(self._compare_factors(factors, bounds, measure))
        if explored.best is None or informative:
            strategy = self._strategy(ratios, coarser=informative and not unsure)
            explored = explore(strategy, outcomes, budget=self._limit(), known=explored.outcomes)
        best = explored.best
        if best is None:
            return Decision(
                candidate=None, trial=None, verdict=Verdict(kept=True, usage=0.0), trials=tuple(self._trials)
            )
        if informative or self.last is None:
            self.last = best.point
        trial = self._by_point[best.point]
        return Decision(
            candidate=self.space.candidate(best.point),
            trial=trial,
            verdict=bounds.judge(trial.figures),
            trials=tuple(self._trials),
        )

    def _outcome(self, point: Any, bounds: Bounds, measure: Measure) -> Outcome[Any]:
        """Measure a point of the space as it is now."""
        trial = measure(self.space.candidate(point))
        self._trials.append(trial)
        self._by_point[point] = trial
        verdict = bounds.judge(trial.figures)
        return Outcome(point, verdict.kept, trial.ratio_weights, verdict.usage)

    def _compare_factors(
        self, factors: Mapping[str, float], bounds: Bounds, measure: Measure
    ) -> tuple[Outcome[Any], ...]:
        """Keep the factors that make more of a bound: the ratio over the root of what it uses.

        Figures grow with the square of the step, bytes fall about in proportion to it.
        """
        if not isinstance(self.space, LatticeLine):
            return ()
        at = three_digits(self.last if self.last is not None else self.start)
        spaces = (self.space, replace(self.space, factors=factors))
        found = []
        for space in spaces:
            self.space = space
            outcome = self._outcome(at, bounds, measure)
            found.append((outcome, self._by_point[at]))
        better = 1 if _merit(found[1][0]) > _WORTHWHILE * _merit(found[0][0]) else 0
        self.space, self._by_point[at] = spaces[better], found[better][1]
        return (found[better][0],)

    def _limit(self) -> int | None:
        """Return the evaluations allowed at this step."""
        return BUDGET if self.budget is None and isinstance(self.space, LatticeLine) else self.budget

    def _strategy(self, ratios: Ratios, *, coarser: bool) -> Strategy[Any]:
        """Choose how to look: around the last configuration where there is one."""
        if isinstance(self.space, LatticeLine):
            start = self.last if self.last is not None else self.start
            return Bracket(start=start) if coarser else Bracket(start=start, most=start)
        cube = self.space

        def ratio_of(point: CubePoint) -> float:
            return ratios(cube.candidate(point))

        if self.last is None:
            return GuidedExhaustive(cube=cube, ratio_of=ratio_of, replicas=self.replicas)
        return DeltaNeighbourhood(cube=cube, last=self.last, ratio_of=ratio_of, replicas=self.replicas)


def _merit(outcome: Outcome[Any]) -> float:
    """Return a ratio over the root of the bound's share it takes; 0 where nothing can be said."""
    return outcome.ratio / math.sqrt(outcome.usage) if 0 < outcome.usage < math.inf else 0.0


def _point_of(cube: Cube, chain: ChainConfig) -> CubePoint | None:
    """Return the point of a configuration; None where it lies on none."""
    place = []
    for axis in cube.axes:
        value = getattr(chain.config, axis.settings[0], None)
        if value not in axis.values:
            return None
        place.append(axis.values.index(value))
    word = str(getattr(chain.config, cube.switch[0])) if cube.switch is not None else ""
    return cube.point(place, word)
