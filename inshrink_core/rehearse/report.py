"""What a rehearsal found: the paired excess, its uncertainty and what the frames cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inshrink_core.metrics import Direction, drop, ratio

__all__ = ["Rehearsal", "TrainingResult", "half_width"]

_T_975: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Quantile .975 of Student's t at 1 to 30 degrees of freedom (any table of it)."""

_Z_975: Final = 1.959964
"""The same of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """One training, from the first step to the last.

    Parameters
    ----------
    seed
        Its seed.
    steps, metrics, train_losses
        The steps of the saves, the metric there (before a failure), and the mean training loss since
        the save before.
    seconds
        Wall time.
    save_seconds
        Time that training waited for `Saver.save`; 0 without failures.
    raw_weights, weights_nbytes, raw_total, nbytes
        Raw bytes of the weights and of everything in the frames, and what they take in the archive;
        0 without failures.
    promise
        What was promised of every save as restored and how each keeps it
        (`inshrink_core.rehearse.bounded.RehearsedWriter.promise`); None where nothing was.
    """

    seed: int
    steps: tuple[int, ...]
    metrics: tuple[float, ...]
    train_losses: tuple[float, ...]
    seconds: float
    save_seconds: float = 0.0
    raw_weights: int = 0
    weights_nbytes: int = 0
    raw_total: int = 0
    nbytes: int = 0
    promise: Mapping[str, Any] | None = None

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.metrics[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """A rehearsal's trainings, paired by seed, and its settings.

    Parameters
    ----------
    task, metric, direction
        What was trained, and which way its metric is better.
    codec, config, optimizer
        How the frames were written.
    n_steps, n_saves, restored_at
        Steps and saves of each training, and the steps it was restored at.
    uninterrupted, restored
        The trainings, in the order of the seeds.
    """

    task: str
    metric: str
    direction: str
    codec: str
    config: Mapping[str, Any]
    optimizer: str
    n_steps: int
    n_saves: int
    restored_at: tuple[int, ...]
    uninterrupted: tuple[TrainingResult, ...]
    restored: tuple[TrainingResult, ...]

    @property
    def excesses(self) -> tuple[float | None, ...]:
        """Relative change of the final metric for the worse, seed by seed."""
        direction = Direction(self.direction)
        return tuple(
            drop(before.final, after.final, direction)
            for before, after in zip(self.uninterrupted, self.restored, strict=True)
        )

    @property
    def excess(self) -> float | None:
        """Mean of `excesses`; None where one is not known."""
        known = _all_known(self.excesses)
        return statistics.fmean(known) if known else None

    @property
    def excess_half_width(self) -> float | None:
        """Half-width of the 95 % interval of `excess`; None for a single seed."""
        known = _all_known(self.excesses)
        return half_width(known) if known else None

    @property
    def noise(self) -> float | None:
        """Relative standard deviation of the uninterrupted seeds' final metric; None for a single seed."""
        finals = _all_known([result.final for result in self.uninterrupted])
        if finals is None or len(finals) < 2 or not (mean := abs(statistics.fmean(finals))):
            return None
        return statistics.stdev(finals) / mean

    @property
    def ratio_weights(self) -> float | None:
        """Ratio of the weights over all frames of the restored trainings, keyframes included."""
        return ratio(
            sum(result.raw_weights for result in self.restored),
            sum(result.weights_nbytes for result in self.restored),
        )

    @property
    def ratio_total(self) -> float | None:
        """Ratio of everything stored over all frames of the restored trainings, keyframes included."""
        return ratio(
            sum(result.raw_total for result in self.restored),
            sum(result.nbytes for result in self.restored),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the document of ``inshrink rehearse --json``."""
        pairs = list(zip(self.uninterrupted, self.restored, strict=True))
        return self._promised() | {
            "task": self.task,
            "metric": self.metric,
            "direction": self.direction,
            "codec": self.codec,
            "config": dict(self.config),
            "optimizer": self.optimizer,
            "steps": self.n_steps,
            "saves": self.n_saves,
            "restored_at": list(self.restored_at),
            "seeds": [result.seed for result in self.uninterrupted],
            "uninterrupted": [before.final for before, _ in pairs],
            "restored": [after.final for _, after in pairs],
            "excesses": list(self.excesses),
            "excess": self.excess,
            "excess_half_width": self.excess_half_width,
            "noise": self.noise,
            "ratio_weights": self.ratio_weights,
            "ratio_total": self.ratio_total,
            "raw_bytes": sum(after.raw_total for _, after in pairs),
            "archive_bytes": sum(after.nbytes for _, after in pairs),
            "train_seconds": sum(before.seconds for before, _ in pairs),
            "restored_seconds": sum(after.seconds for _, after in pairs),
            "save_seconds": sum(after.save_seconds for _, after in pairs),
            "curves": [
                {
                    "seed": before.seed,
                    "steps": list(before.steps),
                    "uninterrupted": list(before.metrics),
                    "restored": list(after.metrics),
                    "uninterrupted_train_loss": list(before.train_losses),
                    "restored_train_loss": list(after.train_losses),
                }
                for before, after in pairs
            ],
        }

    def _promised(self) -> dict[str, Any]:
        """Return what was promised of every save, over all trainings; nothing where nothing was."""
        promises = [(result.seed, result.promise) for result in self.restored if result.promise is not None]
        if not promises:
            return {}
        frames = [{"seed": seed, **frame} for seed, promise in promises for frame in promise["frames"]]
        return {
            "bounds": promises[0][1]["bounds"],
            "max_drop": _largest([frame["drop"] for frame in frames]),
            "max_divergence": _largest([frame["divergence"] for frame in frames]),
            "evaluations": sum(promise["evaluations"] for _, promise in promises),
            "frames": frames,
        }


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _all_known(values: Sequence[float | None]) -> list[float] | None:
    """Return the values; None where one is missing or not finite: a mean of the rest would mislead."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return known if known and len(known) == len(values) else None


def half_width(values: Sequence[float]) -> float | None:
    """Return the half-width of the 95 % interval of a mean, ``t · sd / √n``; None below two values.

    Parameters
    ----------
    values
        Independent measurements.

    Examples
    --------
    >>> round(half_width([1.0, 2.0, 3.0]), 4)
    2.4843
    """
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    return _quantile(freedom) * statistics.stdev(values) / math.sqrt(len(values))


def _quantile(freedom: int) -> float:
    """Return quantile .975 of Student's t; beyond the table by its expansion in 1/ν."""
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    # Abramowitz & Stegun 26.7.5, two terms.
    z = _Z_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
