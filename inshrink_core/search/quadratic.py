"""The quadratic model of what an error costs: ½ Σ h·e², h from squared gradients or from movement.

Near a minimum, an error e in the weights raises the loss by ½ eᵀHe. The diagonal of H is in proportion to the
mean squared gradient (Fisher information), which Adam stores as its second moment. The model orders
configurations of one run well, but needs a factor, which differs between runs with second moments from
hundreds to tens of thousands. Trials of the run calibrate it. Without trials the codecs' plainer rules are
off by less; these are no measurements (``docs/design.md``).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from inshrink_core.chain import ChainConfig
from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.search.trials import Trial
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

# Values summed at a time: temporary copies stay small, whatever the tensor.
_SLICE: Final = 1 << 20


def sensitivities(
    checkpoint: Checkpoint, before: Checkpoint | None, keys: frozenset[str] | None = None
) -> dict[str, float]:
    """Return the mean h of every weight that has one, by key.

    Parameters
    ----------
    checkpoint
        The step, with optimizer state or without.
    before
        The original a step before. Where no weight has second moments, mean squared movement takes
        their place, which is in proportion under Adam's kind of update.
    keys
        Look at these weights only.

    Returns
    -------
    dict
        Empty where neither is known. Means over the finite values of a tensor.
    """
    weights = [spec for spec in checkpoint.specs if _is_weight(spec) and (keys is None or spec.key in keys)]
    found = {spec.key: _mean(_second_moment(checkpoint, spec)) for spec in weights}
    known = {key: value for key, value in found.items() if value is not None}
    if known or before is None:
        return known
    moved = {spec.key: _movement(checkpoint, before, spec) for spec in weights}
    return {key: value for key, value in moved.items() if value is not None}


def damage_of(squared_errors: Mapping[str, float], h: Mapping[str, float]) -> float | None:
    """Return ½ Σ h·e²; None where no h is known."""
    return 0.5 * math.fsum(h[key] * squared_errors.get(key, 0.0) for key in h) if h else None


def _is_weight(spec: TensorSpec) -> bool:
    return spec.role is TensorRole.WEIGHT and spec.dtype.startswith(("float", "bfloat")) and spec.numel > 0


def _second_moment(checkpoint: Checkpoint, spec: TensorSpec) -> Tensor | None:
    key = f"{spec.name}@{TensorRole.EXP_AVG_SQ.value}"
    if key not in checkpoint or checkpoint.spec(key).shape != spec.shape:
        return None
    return checkpoint[key]


def _movement(checkpoint: Checkpoint, before: Checkpoint, spec: TensorSpec) -> float | None:
    """Mean squared movement since the original before."""
    if spec.key not in before or before.spec(spec.key).shape != spec.shape:
        return None
    import torch

    now, then = (magnitudes(source[spec.key], torch.float64) for source in (checkpoint, before))
    return _mean((now - then).square())


def _mean(values: Tensor | None) -> float | None:
    """Mean of what is finite, in float64."""
    if values is None:
        return None
    import torch

    total, n = 0.0, 0
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _SLICE):
        part = magnitudes(flat[start : start + _SLICE], torch.float64)
        finite = part[torch.isfinite(part)]
        total += float(finite.sum())
        n += finite.numel()
    return total / n if n else None


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
    usable = [trial for trial in trials if trial.damage and not trial.failure]
    pairs: dict[str, dict[int, list[tuple[float, float]]]] = {"drop": {}, "divergence": {}}
    for trial in usable:
        for figure, by_step in pairs.items():
            value = getattr(trial, figure)
            if value is not None:
                by_step.setdefault(trial.step, []).append((trial.damage or 0.0, value))
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
