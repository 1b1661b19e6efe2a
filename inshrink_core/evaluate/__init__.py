"""A user's evaluator in a child process, and the same figures for any codec.

The evaluator is a function ``state_dict -> {"accuracy": …, "loss": …}``, which may also return
``"log_probs"`` (n × classes) or ``"predictions"`` (regression) for the divergence. It may be a generator
that yields what is known so far. It runs in a child of its own, so that what it prints, breaks or hangs on
stays there.
"""

from __future__ import annotations

from inshrink_core.evaluate.choice import EvaluatorRequest
from inshrink_core.evaluate.comparison import Comparison, EvaluatedStep, OriginalEvaluations, compare_steps
from inshrink_core.evaluate.evaluator import (
    Evaluation,
    Evaluator,
    PartialEvaluation,
    StateEvaluator,
    StreamingEvaluator,
)

__all__ = [
    "Comparison",
    "EvaluatedStep",
    "Evaluation",
    "Evaluator",
    "EvaluatorRequest",
    "OriginalEvaluations",
    "PartialEvaluation",
    "StateEvaluator",
    "StreamingEvaluator",
    "compare_steps",
]
