"""Quadratic model of the cost of an error: ½ Σ h·e², with h from squared gradients or from movement.

Near a minimum, an error e in the weights raises the loss by ½ eᵀHe. The diagonal of the Hessian H is
proportional to the mean squared gradient (Fisher information), which Adam stores as its second moment. The
model orders the configurations of one run well but needs a factor. With second moments this factor differs
between runs from hundreds to tens of thousands, so trials of the run calibrate it. Without trials the simpler
rules of the codecs have a smaller error; they are no measurements (``docs/design.md``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.search.trials import Trial
from inshrink_core.values import magnitudes

if TYPE_CHECKING:
    from torch import Tensor

# Number of values summed at a time, so that temporary copies stay small for any tensor.
_SLICE: Final = 1 << 20


def sensitivities(
    checkpoint: Checkpoint, before: Checkpoint | None, keys: frozenset[str] | None = None
) -> dict[str, float]:
    """Return the mean h of each weight by key: of Adam's second moments, else of (w − w_before)².

    Parameters
    ----------
    checkpoint
        The step, with or without optimizer state.
    before
        The original of the previous step. If no weight has second moments, the mean squared movement replaces
        them; under Adam-like updates it is proportional to them.
    keys
        Restrict the result to these weights.

    Returns
    -------
    dict
        Empty if neither is known. Means are over the finite values of a tensor.
    """
    weights = [spec for spec in checkpoint.specs if _is_weight(spec) and (keys is None or spec.key in keys)]
    moments = {spec.key: checkpoint.auxiliary_spec(spec, TensorRole.EXP_AVG_SQ) for spec in weights}
    found = {key: _mean(checkpoint[moment.key]) for key, moment in moments.items() if moment is not None}
    known = {key: value for key, value in found.items() if value is not None}
    if known or before is None:
        return known
    moved = {spec.key: _movement(checkpoint, before, spec) for spec in weights}
    return {key: value for key, value in moved.items() if value is not None}


def damage_of(squared_errors: Mapping[str, float], h: Mapping[str, float]) -> float | None:
    """Return ½ Σ h·e², or None if no h is known."""
    return 0.5 * math.fsum(h[key] * squared_errors.get(key, 0.0) for key in h) if h else None


def _is_weight(spec: TensorSpec) -> bool:
    return spec.role is TensorRole.WEIGHT and spec.dtype.startswith(("float", "bfloat")) and spec.numel > 0


def _movement(checkpoint: Checkpoint, before: Checkpoint, spec: TensorSpec) -> float | None:
    """Return the mean squared movement since the previous original."""
    if spec.key not in before or before.spec(spec.key).shape != spec.shape:
        return None
    import torch

    now, then = (magnitudes(source[spec.key], torch.float64) for source in (checkpoint, before))
    return _mean((now - then).square())


def _mean(values: Tensor) -> float | None:
    """Return the mean of the finite values, in float64."""
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
"""Ratio of the worst step's drop to its divergence: median over the same rows, which range from .5 to 16
because metrics differ."""

_LEAST: Final = 1e-300
"""Stand-in for a damage of zero, which has no logarithm."""


class Curve(NamedTuple):
    """A factor as a function of the damage, measured at ascending damages."""

    damages: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def through(cls, measured: Iterable[tuple[float, float]]) -> Curve:
        """Return the curve through pairs of damage and factor; average the factors of equal damages."""
        found: dict[float, list[float]] = {}
        for damage, factor in sorted(measured):
            found.setdefault(damage, []).append(factor)
        return cls(tuple(found), tuple(map(statistics.fmean, found.values())))

    def at(self, damage: float) -> float:
        """Return the factor, linear in the logarithm of the damage and constant beyond the ends."""
        return float(np.interp(math.log(max(damage, _LEAST)), np.log(self.damages), self.factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Relation of ½ Σ h·e² to the figures of trials, by step.

    Parameters
    ----------
    curves
        For ``drop`` and ``divergence``, by step: the figure divided by the damage. The relation of squared
        gradients to curvature changes during training, and as errors grow.
    n_trials
        Number of trials.
    """

    curves: Mapping[str, Mapping[int, Curve]]
    n_trials: int = 0

    def predict(self, figure: str, step: int, damage: float | None) -> float | None:
        """Return a predicted ``drop`` or ``divergence``, using the nearest step with trials.

        Notes
        -----
        At a measured damage the prediction equals the measured figure.
        """
        curves = self.curves[figure]
        if damage is None or not curves:
            return None
        nearest = min(curves, key=lambda known: (abs(known - step), known))
        return damage * curves[nearest].at(damage) if damage > 0 else 0.0


def calibrate(trials: Sequence[Trial]) -> Calibration:
    """Return curves of figure / damage over log damage through the trials, for each step."""
    usable = [trial for trial in trials if trial.damage and not trial.failure]
    pairs: dict[str, dict[int, list[tuple[float, float]]]] = {"drop": {}, "divergence": {}}
    for trial in usable:
        for figure, by_step in pairs.items():
            value = getattr(trial, figure)
            if value is not None:
                by_step.setdefault(trial.step, []).append((trial.damage or 0.0, value))
    return Calibration(
        curves={
            figure: {step: Curve.through((x, y / x) for x, y in group) for step, group in by_step.items()}
            for figure, by_step in pairs.items()
        },
        n_trials=len(usable),
    )
