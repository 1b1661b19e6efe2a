"""What services hand to pages that compare: plain values, no objects of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

__all__ = ["ComparedStep", "Comparison", "Curve", "RehearsalResult"]


class ComparedStep(NamedTuple):
    """One step, original against restored, and with the checkpoint before it in its place (stale).

    Drops are relative changes for the worse; each is None where it is not defined.
    """

    step: int
    original: float
    restored: float
    drop: float | None
    divergence: float | None
    stale_drop: float | None
    stale_divergence: float | None
    standard_error: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One archive against its run.

    Parameters
    ----------
    path, name
        The archive.
    metric, direction
        What was measured, and which way it is better.
    n_samples
        What the evaluator judged by, where its predictions tell.
    steps
        Ascending; those known so far.
    """

    path: Path
    name: str
    metric: str
    direction: str
    n_samples: int | None
    steps: tuple[ComparedStep, ...]

    @property
    def worst(self) -> ComparedStep | None:
        """The step that drops most."""
        known = [row for row in self.steps if row.drop is not None]
        return max(known, key=lambda row: row.drop or 0.0, default=None)

    @property
    def max_divergence(self) -> float | None:
        """The largest divergence."""
        return max((row.divergence for row in self.steps if row.divergence is not None), default=None)


class Curve(NamedTuple):
    """The metric of a pair of trainings of one seed, at the steps of their saves."""

    seed: int
    steps: tuple[int, ...]
    uninterrupted: tuple[float, ...]
    restored: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalResult:
    """Trainings with failures against those without.

    Parameters
    ----------
    task, metric, direction, codec
        What was trained, how it is judged, and how its steps were stored.
    restored_at
        Steps that training was restored at.
    curves
        A pair a seed.
    excess, excess_half_width
        Mean relative change of the final metric for the worse, and half of its 95 % interval; None where
        not known.
    noise
        Relative standard deviation of the final metric over seeds, without failures.
    ratio_weights, ratio_total
        Over all frames of the restored trainings.
    """

    task: str
    metric: str
    direction: str
    codec: str
    restored_at: tuple[int, ...]
    curves: tuple[Curve, ...]
    excess: float | None
    excess_half_width: float | None
    noise: float | None
    ratio_weights: float | None
    ratio_total: float | None
