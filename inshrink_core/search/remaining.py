"""How long a search still takes: its own strategy, played on with outcomes like those that were measured."""

from __future__ import annotations

import itertools
import math
import operator
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inshrink_core.search.space import Candidate, Space
from inshrink_core.search.strategies import Outcome

Measure = Callable[[Sequence[Any]], list[Outcome[Any]]]
"""Measures points of a space."""

Walk = Callable[[Measure], Any]
"""Looks for the best point with a way to measure some."""

# Power of the coarseness that figures grow with, as often as it takes measured ones to outvote it.
_POWER: Final = (2.0, 2.0, 2.0)
_POWERS: Final = (0.5, 4.0)

# Least and largest share of a bound that is distinguished from others: what is nearly nothing, and a failure.
_USAGES: Final = (1e-4, 1e2)

# By how much a chain's figures are off what its neighbours predict, as a standard deviation of the
# logarithm; and how often the rest is played, with other errors of that size each time.
_SCATTER: Final = 0.3
_PLAYS: Final = 7

# Share of a bound that a step uses while nothing was measured.
_UNKNOWN: Final = 0.3

# Times the usual trial that one may take and be expected to take as long again.
_OUTLIER: Final = 3.0

# Chains next to a point that its figures are predicted from.
_NEIGHBOURS: Final = 6

# Trials' time that encodings without the evaluator take at the end of a search.
_ENDING: Final = 2.0


class Remaining:
    """How many trials may follow, and how long they take.

    Parameters
    ----------
    n_steps
        Trials of a chain that is not given up.
    side_by_side
        Trials measured at a time.

    Attributes
    ----------
    evaluations
        Trials measured so far, those of a log not counted.
    after
        About how many trials follow the search itself.

    Notes
    -----
    A strategy is a deterministic generator, so what it will ask for follows from the outcomes. Those that are
    not known are predicted: a step uses the share of its bound that it used at the nearest spacing or place
    measured, times a power of the quotient of both. The rest of the search is played a few times with errors
    of the usual size, and the means of the plays are returned. A step takes the median time of its own
    trials, one that was never reached that of all trials but the first: kernels are compiled in that.
    """

    def __init__(self, n_steps: int, side_by_side: int = 1) -> None:
        self.evaluations = self.after = 0
        self._n_steps, self._side_by_side = n_steps, side_by_side
        self._walk: Walk = lambda measure: None
        self._space: Space[Any]
        self._ratio_of: Callable[[Any], float] | None = None
        self._usages: dict[str, list[float]] = {}
        self._points: dict[Any, tuple[str, float]] = {}
        self._seconds: dict[int, list[float]] = {}
        self._first: float | None = None

    def plan(self, walk: Walk, space: Space[Any], ratio_of: Callable[[Any], float] | None = None) -> None:
        """Take note of what is going to be asked.

        Parameters
        ----------
        walk
            The rest of the search. It gets outcomes without a result.
        space
            What it searches.
        ratio_of
            Estimates the ratio of a point; by default the coarser is the smaller.
        """
        self._walk, self._space, self._ratio_of, self._points = walk, space, ratio_of, {}

    def add(self, candidate: Candidate, place: int, usage: float, seconds: float | None) -> None:
        """Take note of a trial.

        Parameters
        ----------
        candidate, place
            The configuration, and the place of the step in the chain.
        usage
            The share of the bounds that it uses.
        seconds
            What it took; None where a log told it.
        """
        known = self._usages.setdefault(candidate.digest, [])
        known[place:] = [usage]
        if seconds is None:
            return
        self.evaluations += 1
        if self._first is None:
            self._first = seconds
        else:
            self._seconds.setdefault(place, []).append(seconds)

    def left(self) -> tuple[int, float]:
        """Return about how many trials may follow, and about how many seconds the rest takes."""
        costs, chains = self._costs(), self._chains()
        plays = [self._played(random.Random(seed), costs, chains) for seed in range(_PLAYS)]
        trials, seconds = (statistics.fmean(column) for column in zip(*plays, strict=True))
        ending = (_ENDING + self.after) * float(np.median(costs))
        return round(trials) + self.after, seconds / self._side_by_side + ending

    def _costs(self) -> NDArray[np.float64]:
        """Return about what a trial takes at each place of the chain."""
        told = [max(one, 1e-6) for times in self._seconds.values() for one in times]
        usual = math.exp(statistics.median(map(math.log, told))) if told else self._first or 0.0
        costs = np.full(self._n_steps, usual)
        for place, times in self._seconds.items():
            costs[place] = min(statistics.median(times), _OUTLIER * usual)
        return costs

    def _chains(self) -> list[tuple[float, NDArray[np.float64]]]:
        """Return the logarithm of coarseness, and of the share that each step uses, of what was measured.

        Every point that was asked for is asked for again by each play, so that its coarseness is known.
        """
        return [
            (at, np.log(np.clip(np.array(usages), *_USAGES)))
            for digest, at in self._points.values()
            if (usages := self._usages.get(digest))
        ]

    def _played(self, luck: random.Random, costs: NDArray[np.float64], chains: _Chains) -> tuple[int, float]:
        """Play the rest of the search; return its trials, and their time one after the other."""
        trials, seconds, power = 0, 0.0, _power(chains)

        def measure(points: Sequence[Any]) -> list[Outcome[Any]]:
            nonlocal trials, seconds
            outcomes = []
            for point in points:
                if point not in self._points:
                    self._points[point] = (
                        self._space.candidate(point).digest,
                        self._space.log_coarseness(point),
                    )
                digest, at = self._points[point]
                known = self._usages.get(digest, [])
                usages = np.array(known)
                if not known or (len(known) < self._n_steps and known[-1] <= 1):
                    usages = self._predicted(known, _expected(chains, at, power, self._n_steps), luck)
                trials += len(usages) - len(known)
                seconds += float(costs[len(known) : len(usages)].sum())
                usage = float(usages.max())
                kept = len(usages) == self._n_steps and usage <= 1
                ratio = math.exp(at) if self._ratio_of is None else self._ratio_of(point)
                outcomes.append(Outcome(point, kept, ratio, usage))
            return outcomes

        self._walk(measure)
        return trials, seconds

    def _predicted(
        self, known: Sequence[float], expected: NDArray[np.float64], luck: random.Random
    ) -> NDArray[np.float64]:
        """Return the shares that a chain uses until one is more than all of a bound; those known first."""
        usages = np.exp(expected + luck.gauss(0.0, _SCATTER))
        usages[: len(known)] = known
        broken = np.flatnonzero(usages > 1)
        return usages[: broken[0] + 1] if len(broken) else usages


_Chains = Sequence[tuple[float, NDArray[np.float64]]]


def _expected(chains: _Chains, at: float, power: float, n_steps: int) -> NDArray[np.float64]:
    """Return the logarithm of the share that each step is expected to use at a coarseness."""
    expected = np.full(n_steps, np.nan)
    for near, logs in sorted(chains, key=lambda chain: -abs(chain[0] - at))[-_NEIGHBOURS:]:
        expected[: len(logs)] = logs + power * (at - near)
    unknown = np.isnan(expected)
    expected[unknown] = math.log(_UNKNOWN) if unknown.all() else np.median(expected[~unknown])
    return expected


def _power(chains: _Chains) -> float:
    """Return the power of the coarseness that shares grow with, as chains next to each other tell it."""
    slopes = list(_POWER)
    for (low, one), (high, other) in itertools.pairwise(sorted(chains, key=operator.itemgetter(0))):
        both = min(len(one), len(other))
        if high > low:
            slopes.append(float(np.median(other[:both] - one[:both])) / (high - low))
    return min(max(statistics.median(slopes), _POWERS[0]), _POWERS[1])
