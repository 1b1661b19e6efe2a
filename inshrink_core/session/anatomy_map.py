"""How a tensor's sensitivity goes with its magnitude: pairs of logarithms, counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from inshrink_core.checkpoint import Checkpoint, TensorRole, TensorSpec
from inshrink_core.errors import InputError
from inshrink_core.sensitivity import Scores, scores
from inshrink_core.session.alone import read_if_there
from inshrink_core.session.anatomy_values import bins_of, chunks_of, edges_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MAP_METRICS", "SensitivityMap", "map_sensitivity"]

MAP_METRICS = ("taylor", "fisher", "update")
"""Sensitivities that say something the magnitude does not, in the order in which they are tried."""

N_MAP_BINS = 48


class SensitivityMap(NamedTuple):
    """How many values have which magnitude and which sensitivity.

    Parameters
    ----------
    metric
        ``taylor``, ``fisher`` or ``update``.
    source
        What it came from, where there is a choice (`inshrink_core.sensitivity.Scores`).
    log_magnitude, log_sensitivity : Float[ndarray, "bins + 1"]
        Edges, in decimal logarithms.
    counts : Int[ndarray, "bins bins"]
        Magnitude by sensitivity.
    n_zero
        Values or sensitivities that are zero, which have no logarithm and are in no bin.
    correlation
        Of the two logarithms; None where one of them does not vary.
    """

    metric: str
    source: str | None
    log_magnitude: NDArray[np.float64]
    log_sensitivity: NDArray[np.float64]
    counts: NDArray[np.int64]
    n_zero: int
    correlation: float | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON values."""
        return {
            "metric": self.metric,
            "source": self.source,
            "log10_magnitude": self.log_magnitude.tolist(),
            "log10_sensitivity": self.log_sensitivity.tolist(),
            "counts": self.counts.tolist(),
            "n_zero": self.n_zero,
            "correlation": self.correlation,
        }


def map_sensitivity(
    checkpoint: Checkpoint, before: Checkpoint | None, spec: TensorSpec, values: Tensor, metric: str | None
) -> SensitivityMap | None:
    """Set a sensitivity against the magnitude; None where the checkpoint does not tell it.

    Parameters
    ----------
    checkpoint, before
        Where companions are read; the step before tells movement.
    spec, values
        A weight.
    metric
        One of `MAP_METRICS`; None takes the first that is known.

    Raises
    ------
    InputError
        No such metric.
    """
    if metric is not None and metric not in MAP_METRICS:
        raise InputError(
            f"'{metric}' cannot be set against the magnitude",
            remedy=f"choose one of {', '.join(MAP_METRICS)}",
        )
    if spec.role is not TensorRole.WEIGHT or not values.is_floating_point():
        return None
    for name in MAP_METRICS if metric is None else (metric,):
        found = _scores(name, checkpoint, before, spec, values)
        if found is not None:
            return _map(name, found, values)
    return None


def _scores(
    metric: str, checkpoint: Checkpoint, before: Checkpoint | None, spec: TensorSpec, values: Tensor
) -> Scores | None:
    """Read what a metric needs, and nothing more."""
    if metric == "taylor":
        gradient = checkpoint.companion(spec, TensorRole.GRADIENT)
        first = checkpoint.companion(spec, TensorRole.EXP_AVG) if gradient is None else None
        return scores(metric, values, gradient=gradient, exp_avg=first)
    if metric == "fisher":
        beta2 = checkpoint.hyperparameters.get(spec.name, {}).get("beta2")
        second = checkpoint.companion(spec, TensorRole.EXP_AVG_SQ)
        return scores(metric, exp_avg_sq=second, beta2=beta2, step=_updates_of(checkpoint, spec))
    previous = before[spec.key] if before is not None and spec.key in before else None
    return scores(metric, values, previous=previous)


def _updates_of(checkpoint: Checkpoint, spec: TensorSpec) -> float:
    """Return how often the optimizer has moved a tensor: its own count, else the checkpoint's step."""
    count = read_if_there(checkpoint, f"{spec.name}@{TensorRole.STEP.value}")
    return float(count.item()) if count is not None and count.numel() == 1 else checkpoint.step


def _map(metric: str, found: Scores, values: Tensor) -> SensitivityMap:
    """Count pairs of logarithms chunk by chunk."""
    ends = np.array([[np.inf, -np.inf], [np.inf, -np.inf]])
    sums, n = np.zeros((2, 2)), 0
    n_zero = 0
    for logs, zeros in _logs(values, found.values):
        n_zero += zeros
        if logs.shape[1]:
            ends[:, 0] = np.minimum(ends[:, 0], logs.min(axis=1))
            ends[:, 1] = np.maximum(ends[:, 1], logs.max(axis=1))
            sums[:, 0] += logs.sum(axis=1)
            n += logs.shape[1]
    means = sums[:, 0] / max(n, 1)
    edges = [edges_of(float(low), float(high), N_MAP_BINS) for low, high in ends]
    counts = np.zeros((N_MAP_BINS, N_MAP_BINS), np.int64)
    moments = np.zeros(3)
    for logs, _ in _logs(values, found.values):
        if logs.shape[1]:
            x, y = (bins_of(row, edge) for row, edge in zip(logs, edges, strict=True))
            counts += np.bincount(x * N_MAP_BINS + y, minlength=counts.size).reshape(counts.shape)
            away = logs - means[:, None]
            moments += (np.square(away[0]).sum(), np.square(away[1]).sum(), (away[0] * away[1]).sum())
    norm = float(np.sqrt(moments[0] * moments[1]))
    correlation = float(moments[2]) / norm if norm > 0 else None
    return SensitivityMap(metric, found.source, edges[0], edges[1], counts, n_zero, correlation)


def _logs(values: Tensor, score: Tensor) -> Iterator[tuple[NDArray[np.float64], int]]:
    """Yield log10 of magnitudes and scores where both are positive and finite, and how many are zero."""
    for (_, weights), (_, marks) in zip(chunks_of(values), chunks_of(score), strict=True):
        pair = np.abs(np.stack([weights, marks]))
        finite = np.isfinite(pair).all(axis=0)
        positive = finite & (pair > 0).all(axis=0)
        logs: NDArray[np.float64] = np.log10(pair[:, positive])
        yield logs, int((finite & ~positive).sum())
