"""What an evaluator said of one state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inshrink_core.metrics import Direction, divergence, output_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Evaluation"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluator said of one state.

    Parameters
    ----------
    metric, direction, value
        The chosen metric, which way it is better, and its value (finite).
    metrics
        Every scalar it returned.
    log_probs
        Shape (n, classes), nats; None if not returned.
    predictions
        Regression outputs, any shape; None if not returned.
    standard_errors
        Standard error of a metric, by name, where the evaluator knows it.
    seconds
        Time within the evaluator.
    """

    metric: str
    direction: Direction
    value: float
    metrics: Mapping[str, float]
    log_probs: NDArray[Any] | None = field(default=None, repr=False)
    predictions: NDArray[Any] | None = field(default=None, repr=False)
    standard_errors: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def divergence(self, restored: Evaluation) -> float | None:
        """Return how far the predictions of a restored state are from these; None without predictions.

        Mean KL(original ‖ restored), nats, from `log_probs`; else the mean squared difference of
        `predictions` over their variance.
        """
        if self.log_probs is not None and restored.log_probs is not None:
            return divergence(self.log_probs, restored.log_probs)
        if self.predictions is not None and restored.predictions is not None:
            return output_error(self.predictions, restored.predictions)
        return None
