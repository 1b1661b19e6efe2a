"""The quadratic model of what an error costs: ½ Σ h·e², h from squared gradients or from movement.

Near a minimum, an error e in the weights raises the loss by ½ eᵀHe. The diagonal of H is in proportion to the
mean squared gradient (Fisher information), which Adam keeps as its second moment; a batch's size and the
cross terms make a factor that trials calibrate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.search.trials import Trial
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Calibration", "calibrate", "damage_of", "rank_correlation", "sensitivities"]

_SLICE: Final = 1 << 20
"""Values summed at a time: temporary copies stay small, whatever the tensor."""

_FEWEST: Final = 3
"""Trials from which a factor is more than a coincidence."""


def sensitivities(
    checkpoint: Checkpoint, before: Checkpoint | None, keys: frozenset[str] | None = None
) -> dict[str, float]:
    """Return the mean h of every weight that has one, by key.

    Parameters
    ----------
    checkpoint
        The step, with optimizer state or without.
    before
        The original a step before. Where no weight has second moments, mean squared movement stands for
        them, which is in proportion under Adam's kind of update.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Factors from ½ Σ h·e² to figures, by step, from trials.

    Parameters
    ----------
    drop, divergence
        Factor by step: what squared gradients have to do with curvature changes as training goes on. Empty
        where no trial tells it.
    rank_correlation
        Spearman's, between what the factors predict and what was measured (divergence where there is one,
        else drop); None for fewer than three trials.
    drop_rank_correlation
        The same of drops, whether there is a divergence or not.
    n_trials
        Trials it comes from.
    """

    drop: Mapping[int, float]
    divergence: Mapping[int, float]
    rank_correlation: float | None = None
    drop_rank_correlation: float | None = None
    n_trials: int = 0

    def predict(self, figure: str, step: int, damage: float | None) -> float | None:
        """Return a predicted ``drop`` or ``divergence``, by the factor of the nearest step that has one."""
        factors = self.drop if figure == "drop" else self.divergence
        if damage is None or not factors:
            return None
        return damage * factors[min(factors, key=lambda known: (abs(known - step), known))]


def calibrate(trials: Sequence[Trial]) -> Calibration:
    """Fit the factors to trials that have been measured.

    Notes
    -----
    A divergence is positive and spans decades: its factor is the median of quotients. A drop has the
    metric's noise and may be negative: its factor is that of least squares through the origin, not below 0.
    """
    measured = [one for one in trials if not one.failure and one.partial is None]
    usable = [one for one in measured if one.damage is not None and one.damage > 0]
    by_step: dict[int, list[Trial]] = {}
    for one in usable:
        by_step.setdefault(one.step, []).append(one)
    drops = {step: factor for step, group in by_step.items() if (factor := _slope(group)) is not None}
    quotients = {step: factor for step, group in by_step.items() if (factor := _median(group)) is not None}
    fitted = Calibration(drop=drops, divergence=quotients)
    by_drop = _correlation(fitted, "drop", usable)
    return replace(
        fitted,
        rank_correlation=_correlation(fitted, "divergence", usable) if quotients else by_drop,
        drop_rank_correlation=by_drop,
        n_trials=len(usable),
    )


def _correlation(fitted: Calibration, figure: str, trials: Sequence[Trial]) -> float | None:
    """Rank correlation of what the factors predict and what was measured."""
    pairs = [(fitted.predict(figure, one.step, one.damage), getattr(one, figure)) for one in trials]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return rank_correlation([a for a, _ in known], [b for _, b in known])


def _slope(trials: Sequence[Trial]) -> float | None:
    """Factor of a drop, by least squares through the origin."""
    pairs = [(one.damage or 0.0, one.drop) for one in trials if one.drop is not None]
    squares = math.fsum(damage * damage for damage, _ in pairs)
    return max(math.fsum(a * b for a, b in pairs) / squares, 0.0) if squares > 0 else None


def _median(trials: Sequence[Trial]) -> float | None:
    """Factor of a divergence, by the median of quotients."""
    quotients = [one.divergence / one.damage for one in trials if one.divergence and one.damage]
    return statistics.median(quotients) if quotients else None


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
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for i in order[start : end + 1]:
            ranks[i] = (start + end) / 2
        start = end + 1
    return ranks
