"""What an evaluator said of one state, in full or so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from inshrink_core.metrics import Direction, divergence, output_error

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from inshrink_core.checkpoint import Checkpoint

__all__ = ["Evaluation", "PartialEvaluation", "StateEvaluator", "StreamingEvaluator"]


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


@dataclass(frozen=True, kw_only=True)
class PartialEvaluation:
    """What an evaluator says of one state before it has seen all samples.

    Parameters
    ----------
    metric, direction, value
        The chosen metric, which way it is better, and its mean over the samples so far; `value` is None
        where the evaluator has not said it.
    n, of
        Samples so far, and in all.
    limits
        The least and the largest that one sample can score, None for one that is not known.
    standard_error
        Of `value` as an estimate of the mean over all samples, were they drawn at random; None where the
        evaluator does not know it.
    log_probs
        Rows that came since the last partial result, (rows, classes), nats; None if none did.
    """

    metric: str
    direction: Direction
    value: float | None
    n: int
    of: int
    limits: tuple[float | None, float | None] = (None, None)
    standard_error: float | None = None
    log_probs: NDArray[Any] | None = field(default=None, repr=False)


class StateEvaluator(Protocol):
    """Whatever says how good a state is."""

    @property
    def spec(self) -> str:
        """What it is, for messages."""
        ...

    @property
    def metric(self) -> str | None:
        """The scalar that was asked for; None leaves it to the rules."""
        ...

    @property
    def direction(self) -> Direction | None:
        """Which way it is better, where that was said."""
        ...

    def evaluate(self, state_dict: Mapping[str, Tensor] | Checkpoint, /) -> Evaluation:
        """Return what there is to say of a state, measured in full."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


@runtime_checkable
class StreamingEvaluator(Protocol):
    """An evaluator that may be stopped."""

    def evaluate_until(
        self, state_dict: Mapping[str, Tensor] | Checkpoint, stop: Callable[[PartialEvaluation], bool], /
    ) -> Evaluation | PartialEvaluation:
        """Return the full result, or the partial one at which `stop` said yes."""
        ...
