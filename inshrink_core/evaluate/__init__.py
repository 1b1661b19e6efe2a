"""A user's evaluator in a child process, and the same figures for any codec.

The evaluator is a function ``state_dict -> {"accuracy": …, "loss": …}``, which may also return
``"log_probs"`` (n × classes) or ``"predictions"`` (regression) for the divergence. It may be a generator
that yields what is known so far. It runs in a child of its own, so that what it prints, breaks or hangs on
stays there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.evaluate.choice import EvaluatorRequest as EvaluatorRequest
    from inshrink_core.evaluate.choice import Executing as Executing
    from inshrink_core.evaluate.comparison import Comparison as Comparison
    from inshrink_core.evaluate.comparison import EvaluatedStep as EvaluatedStep
    from inshrink_core.evaluate.comparison import OriginalEvaluations as OriginalEvaluations
    from inshrink_core.evaluate.comparison import compare_steps as compare_steps
    from inshrink_core.evaluate.evaluator import Evaluation as Evaluation
    from inshrink_core.evaluate.evaluator import Evaluator as Evaluator
    from inshrink_core.evaluate.evaluator import PartialEvaluation as PartialEvaluation
    from inshrink_core.evaluate.evaluator import StateEvaluator as StateEvaluator
    from inshrink_core.evaluate.evaluator import StreamingEvaluator as StreamingEvaluator

__all__ = index(__name__)
