"""Predicting drops and divergences of a configuration that was not tried, from trials or rules of thumb.

½ Σ h·e² orders configurations of one run well, but needs a factor, and that is not one number: on runs with
second moments it is between hundreds and tens of thousands. Trials of the run calibrate it. Without them the
codecs' plainer rules are off by less; these are no measurements (``docs/design.md``).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from inshrink_core.chain import ChainConfig
from inshrink_core.search.trials import Trial

DROP_PER_NAT: Final = 1.2
"""Drop of the worst step over its divergence: median over the same rows, .5 to 16; as metrics differ, so does
it."""

# Values from which a rank correlation is more than a coincidence.
_FEWEST: Final = 3

_LEAST: Final = 1e-300
"""In the place of a damage of zero, which has no logarithm."""

T = TypeVar("T")


def prior_of(chain: ChainConfig, relative_error: float) -> tuple[float, float]:
    """Return the drop and the divergence, nats, to expect of a chain's worst step by other runs.

    Parameters
    ----------
    chain
        The configuration.
    relative_error
        Root of squared error over squared norm of the weights, at the worst step.

    Examples
    --------
    >>> from inshrink_core.codec import get_codec
    >>> qd = get_codec("qd")
    >>> prior_of(ChainConfig(config=qd()), 0.0)
    (0.0, 0.0)
    """
    divergence = chain.config.expected_divergence(relative_error)
    return DROP_PER_NAT * divergence, divergence


class Course(NamedTuple):
    """A factor that changes with the damage: measured at some damages, ascending."""

    damages: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def through(cls, measured: Iterable[tuple[float, float]]) -> Course:
        """Return the course through pairs of damage and factor; of equal damages, through their mean."""
        found: dict[float, list[float]] = {}
        for damage, factor in sorted(measured):
            found.setdefault(damage, []).append(factor)
        return cls(tuple(found), tuple(map(statistics.fmean, found.values())))

    def at(self, damage: float) -> float:
        """Return the factor, linear in the logarithm of the damage; beyond the ends, that of the nearest."""
        import numpy as np

        return float(np.interp(math.log(max(damage, _LEAST)), np.log(self.damages), self.factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How trials lead from ½ Σ h·e² to figures, by step.

    Parameters
    ----------
    courses
        For ``drop`` and ``divergence``, by step: the figure over the damage. What squared gradients have to
        do with curvature changes as training goes on, and as errors grow.
    rank_correlation
        Spearman's, between the prediction of one factor a step and what was measured (divergence where there
        is one, else drop); None for fewer than three trials.
    n_trials
        Trials it comes from.
    """

    courses: Mapping[str, Mapping[int, Course]]
    rank_correlation: float | None = None
    n_trials: int = 0

    def predict(self, figure: str, step: int, damage: float | None) -> float | None:
        """Return a predicted ``drop`` or ``divergence``, from the nearest step that has trials.

        Notes
        -----
        At a damage that was measured, it is the figure that was measured.
        """
        courses = self.courses[figure]
        if damage is None or not courses:
            return None
        return damage * _nearest(courses, step).at(damage) if damage > 0 else 0.0


def calibrate(trials: Sequence[Trial]) -> Calibration:
    """Fit the relation of damage and figures to measured trials."""
    usable = [one for one in trials if one.damage and not one.failure]
    pairs: dict[str, dict[int, list[tuple[float, float]]]] = {"drop": {}, "divergence": {}}
    for one in usable:
        for figure, by_step in pairs.items():
            value = getattr(one, figure)
            if value is not None:
                by_step.setdefault(one.step, []).append((one.damage or 0.0, value))
    return Calibration(
        courses={
            figure: {step: Course.through((x, y / x) for x, y in group) for step, group in by_step.items()}
            for figure, by_step in pairs.items()
        },
        rank_correlation=_correlation(pairs["drop"], pairs["divergence"]),
        n_trials=len(usable),
    )


def _correlation(
    drops: Mapping[int, Sequence[tuple[float, float]]],
    divergences: Mapping[int, Sequence[tuple[float, float]]],
) -> float | None:
    """Rank correlation of divergences, or of drops, and their prediction by one factor a step.

    A divergence is positive and spans decades: its factor is the median of quotients. A drop has the metric's
    noise and may be negative: its factor is that of least squares through the origin, not below 0.
    """
    quotients = {step: [y / x for x, y in group if y] for step, group in divergences.items()}
    factors = {step: statistics.median(known) for step, known in quotients.items() if known}
    by_step = divergences
    if not factors:
        by_step = drops
        for step, group in drops.items():
            product = math.fsum(x * y for x, y in group)
            factors[step] = max(product / math.fsum(x * x for x, _ in group), 0.0)
    predicted = [x * _nearest(factors, step) for step, group in by_step.items() for x, _ in group]
    return rank_correlation(predicted, [y for group in by_step.values() for _, y in group])


def _nearest(by_step: Mapping[int, T], step: int) -> T:
    return by_step[min(by_step, key=lambda known: (abs(known - step), known))]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None for too few values or no spread.

    Examples
    --------
    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0])
    1.0
    """
    if len(first) < _FEWEST or any(len(set(values)) == 1 for values in (first, second)):
        return None
    return statistics.correlation(*(_ranks(values) for values in (first, second)))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]
