"""What trials, or rules of thumb from other runs, tell of the figures of a configuration that was not tried.

½ Σ h·e² orders configurations of one run well, but needs a factor, and that is not one number: on runs with
second moments it is between hundreds and tens of thousands. Trials of the run calibrate it. Without them the
codecs' plainer rules are off by less; these are no measurements (``docs/design.md``).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from inshrink_core.chain import ChainConfig
from inshrink_core.search.trials import Trial

DROP_PER_NAT: Final = 1.2
"""Drop of the worst step over its divergence: median over the same rows, .5 to 16; as metrics differ, so does
it."""


# Values from which a rank correlation is more than a coincidence.
_FEWEST: Final = 3


class Prior(NamedTuple):
    """Drop and divergence, nats, that the worst step of a chain may have."""

    drop: float
    divergence: float


def prior_of(chain: ChainConfig, relative_error: float) -> Prior:
    """Return what other runs let one expect.

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
    Prior(drop=0.0, divergence=0.0)
    """
    divergence = chain.config.expected_divergence(relative_error)
    return Prior(drop=DROP_PER_NAT * divergence, divergence=divergence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What trials tell of the way from ½ Σ h·e² to figures, by step.

    Parameters
    ----------
    lines
        For ``drop`` and ``divergence``, by step: damages that were measured, ascending, and the figure over
        the damage at each. What squared gradients have to do with curvature changes as training goes on, and
        as errors grow.
    rank_correlation
        Spearman's, between what one factor a step predicts and what was measured (divergence where there is
        one, else drop); None for fewer than three trials.
    drop_rank_correlation
        The same of drops, whether there is a divergence or not.
    n_trials
        Trials it comes from.
    """

    lines: Mapping[str, Mapping[int, tuple[tuple[float, float], ...]]]
    rank_correlation: float | None = None
    drop_rank_correlation: float | None = None
    n_trials: int = 0

    def predict(self, figure: str, step: int, damage: float | None) -> float | None:
        """Return a predicted ``drop`` or ``divergence``, from the nearest step of which trials tell one.

        Notes
        -----
        At a damage that was measured, it is the figure that was measured. Between two of them the quotient of
        figure and damage goes from one to the other with the damage's logarithm; beyond, it is that of the
        nearest.
        """
        lines = self.lines[figure]
        if damage is None or not lines:
            return None
        if damage <= 0:
            return 0.0
        line = lines[min(lines, key=lambda known: (abs(known - step), known))]
        import numpy as np

        damages, quotients = zip(*line, strict=True)
        return damage * float(np.interp(math.log(damage), np.log(damages), quotients))


def calibrate(trials: Sequence[Trial]) -> Calibration:
    """Fit the way from damage to figures to trials that have been measured in full.

    Notes
    -----
    For the rank correlations, which say how far the model orders configurations, a step has one factor. A
    divergence is positive and spans decades: its factor is the median of quotients. A drop has the metric's
    noise and may be negative: its factor is that of least squares through the origin, not below 0.
    """
    usable = [one for one in trials if one.damage and not one.failure and one.partial is None]
    pairs: dict[str, dict[int, list[tuple[float, float]]]] = {"drop": {}, "divergence": {}}
    for one in usable:
        for figure, by_step in pairs.items():
            value = getattr(one, figure)
            if value is not None:
                by_step.setdefault(one.step, []).append((one.damage or 0.0, value))
    by_drop = _correlation(pairs["drop"], _slope)
    diverging = {
        step: known
        for step, group in pairs["divergence"].items()
        if (known := [pair for pair in group if pair[1]])
    }
    return Calibration(
        lines={
            figure: {step: _line(group) for step, group in by_step.items()}
            for figure, by_step in pairs.items()
        },
        rank_correlation=_correlation(pairs["divergence"], _median, diverging) if diverging else by_drop,
        drop_rank_correlation=by_drop,
        n_trials=len(usable),
    )


_Pairs = Sequence[tuple[float, float]]


def _line(pairs: _Pairs) -> tuple[tuple[float, float], ...]:
    """Return the mean quotient of figure and damage at each damage, ascending."""
    quotients: dict[float, list[float]] = {}
    for damage, value in sorted(pairs):
        quotients.setdefault(damage, []).append(value / damage)
    return tuple((damage, statistics.fmean(group)) for damage, group in quotients.items())


def _correlation(
    by_step: Mapping[int, _Pairs],
    fit: Callable[[_Pairs], float],
    telling: Mapping[int, _Pairs] | None = None,
) -> float | None:
    """Rank correlation of what one factor a step predicts and what was measured; `telling` are fitted."""
    factors = {step: fit(group) for step, group in (telling or by_step).items()}
    predicted, measured = [], []
    for step, group in by_step.items():
        factor = factors[min(factors, key=lambda known: (abs(known - step), known))]
        predicted += [damage * factor for damage, _ in group]
        measured += [value for _, value in group]
    return rank_correlation(predicted, measured)


def _slope(pairs: _Pairs) -> float:
    """Factor of a drop, by least squares through the origin."""
    product = math.fsum(damage * value for damage, value in pairs)
    return max(product / math.fsum(damage * damage for damage, _ in pairs), 0.0)


def _median(pairs: _Pairs) -> float:
    """Factor of a divergence, by the median of quotients."""
    return statistics.median(value / damage for damage, value in pairs)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, ties at their mean rank; None for too few values or no spread.

    Examples
    --------
    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0])
    1.0
    """
    if len(first) != len(second) or len(first) < _FEWEST:
        return None
    ranks = (_ranks(first), _ranks(second))
    if any(len(set(one)) == 1 for one in ranks):
        return None
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2 for value in values]
