"""Result of one training of a rehearsal, and its parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["TrainingResult", "parse_training"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """Result of one complete training.

    Parameters
    ----------
    seed
        Its seed.
    steps, metrics, train_losses
        Steps of the saves, the metric at each of them (before a failure), and the mean training loss since
        the previous save.
    seconds
        Wall time.
    save_seconds
        Time that training waited for `Saver.save`; 0 without failures.
    raw_weights, weights_nbytes, raw_total, nbytes
        Raw size of the weights and of everything in the frames, and their stored sizes; 0 without failures.
    bound_record
        Bounds on every restored save, and the result of each save
        (`inshrink_core.training.check.CheckedWriter.bound_record`); None without bounds.
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
    bound_record: Mapping[str, Any] | None = None

    @property
    def final(self) -> float:
        """The metric at the end."""
        return self.metrics[-1]


def parse_training(values: Mapping[str, Any]) -> TrainingResult:
    """Return a result from its JSON.

    Raises
    ------
    ValueError, TypeError, KeyError
        The values are those of no training.
    """
    result = msgspec.convert(values, TrainingResult)
    if not result.steps or not len(result.steps) == len(result.metrics) == len(result.train_losses):
        raise ValueError("its curves differ in length")
    return result
