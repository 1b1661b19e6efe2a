"""Evaluators of users in a child process, and equal figures for every codec.

An evaluator is a function ``state_dict -> {"accuracy": …, "loss": …}``. It may also return ``"log_probs"``
(n × classes) or ``"predictions"`` (regression) for the divergence. It runs in a child process, which isolates
its output, errors and hangs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inshrink_core.lazy import index

if TYPE_CHECKING:
    from inshrink_core.evaluate.choice import EvaluatorRequest as EvaluatorRequest
    from inshrink_core.evaluate.choice import Executing as Executing
    from inshrink_core.evaluate.comparison import Comparison as Comparison
    from inshrink_core.evaluate.comparison import EvaluatedStep as EvaluatedStep
    from inshrink_core.evaluate.comparison import Figures as Figures
    from inshrink_core.evaluate.comparison import OriginalEvaluations as OriginalEvaluations
    from inshrink_core.evaluate.comparison import compared_steps as compared_steps
    from inshrink_core.evaluate.comparison import figures_of as figures_of
    from inshrink_core.evaluate.evaluator import Evaluation as Evaluation
    from inshrink_core.evaluate.evaluator import Evaluator as Evaluator
    from inshrink_core.evaluate.evaluator import StateEvaluator as StateEvaluator

__all__ = index(__name__)
