"""The lattice's global step: a bracketed search on the measured figures.

Divergence and loss grow with the square of the step (they are quadratic in the error, and the error is in
proportion to the step), so one measurement predicts where a bound is reached, and a few confirm it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from inshrink_core.search.space import three_digits
from inshrink_core.search.strategies import Outcome, Proposals

__all__ = ["Bracket"]

_POWER: Final = 2.0
"""Power of the step that figures grow with, until two measurements say otherwise."""

_POWERS: Final = (0.5, 4.0)
"""Range of a power that two measurements may say: outside of it they tell of noise."""

_AIM: Final = 0.93
"""Share of a bound that is aimed at, so that the next measurement is more likely within than beyond it."""

_LEAP: Final = 4.0
"""Largest factor of one move: far from what was measured, a prediction is a guess."""

_LIMITS: Final = (2.0**-8, 2.0**8)
"""Finest and coarsest step tried: from ten bits a weight to a keyframe's few values."""

_HALF: Final = 0.5
_FINER: Final = 1.5
"""Factor of a move off a plateau of which only one end is known."""


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """The coarsest step that keeps the bounds, to a few percent.

    Parameters
    ----------
    start
        Where to begin: the last checkpoint's step.
    tolerance
        Ratio of a step that breaks the bounds and one that keeps them at which the search ends.
    enough
        Share of a bound that is as good as all of it: a step that uses more of it ends the search.
    most
        The coarsest step to try.
    power
        Power of the step that figures grow with, until two measurements say otherwise.
    aim
        Share of a bound that is aimed at.

    Notes
    -----
    Where steps are held to powers of two, two points often give the same frame. Such a plateau is halved
    in the middle, for its figures say nothing of how far it reaches; between two of them the search ends.
    """

    start: float
    most: float = _LIMITS[1]
    power: float = _POWER
    aim: float = _AIM
    tolerance: float = 1.05
    enough: float = 0.85

    def proposals(self) -> Proposals[float]:
        """Ask for one step at a time."""
        step = _limited(self.start)
        kept: Outcome[float] | None = None
        broken: Outcome[float] | None = None
        plateaus: set[bool] = set()
        while True:
            (outcome,) = yield [step]
            known = kept if outcome.kept else broken
            flat = known is not None and _same(outcome, known)
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
            if following in (step, kept and kept.point, broken and broken.point):
                return
            step = following

    def _next(
        self, last: Outcome[float], kept: Outcome[float] | None, broken: Outcome[float] | None, flat: bool
    ) -> float:
        """Return the step at which the bounds are expected to be reached, within what is known of it."""
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
            # From the bracket's ends nothing is learned; the middle is better than a hair inside.
            inner = math.log(broken.point / kept.point)
            share = math.log(guess / kept.point) / inner if guess > 0 else _HALF
            share = _HALF if flat else min(max(share, 0.2), 0.8)
            guess = kept.point * math.exp(share * inner)
        elif broken is not None:
            guess = min(guess, broken.point / (_FINER if flat else 1.1))
        elif kept is not None:
            guess = max(guess, kept.point * (_FINER if flat else 1.1))
        return _limited(guess)


def _same(one: Outcome[float], other: Outcome[float]) -> bool:
    """Whether two points restore the same state, as far as its figures tell; their names differ in size."""
    return one.usage == other.usage


def _limited(step: float) -> float:
    return three_digits(min(max(step, _LIMITS[0]), _LIMITS[1]))
